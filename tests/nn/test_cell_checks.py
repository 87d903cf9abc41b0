"""Attention over cells refuses other inputs in one sentence."""

import pytest
import torch

from overt.attention import grid
from overt.nn import HardAttention, MeanPooling, QuestionOnly, SoftAttention
from overt.nn.cell_checks import check_cells

MODULES = {
    "hard": lambda: HardAttention(32, 8, joint=16).eval(),
    "soft": lambda: SoftAttention(32, 8, 16),
    "mean": MeanPooling,
    "question only": QuestionOnly,
}


@pytest.fixture(autouse=True)
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of shapes at each call, as for users."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.parametrize("name", MODULES)
def test_a_feature_map_raises_and_the_remedy_works(name):
    attend, features, question = MODULES[name](), torch.rand(2, 32, 3, 4), torch.rand(2, 8)
    with pytest.raises(ValueError, match=r"3, 4.*transpose"):
        attend(features, question, grid(3, 4))
    summary, _ = attend(features.flatten(2).transpose(1, 2), question, grid(3, 4))
    assert len(summary) == 2


@pytest.mark.parametrize("name", MODULES)
def test_cells_questions_and_layouts_that_do_not_fit_raise(name):
    attend, cells, question = MODULES[name](), torch.rand(2, 12, 32), torch.rand(2, 8)
    with pytest.raises(ValueError, match=r"\(12, 32\)"):
        attend(cells[0], question, grid(3, 4))
    for other in (question[0], question[:1]):
        with pytest.raises(ValueError, match="2 here"):
            attend(cells, other, grid(3, 4))
    with pytest.raises(ValueError, match=r"9.*12 cells"):
        attend(cells, question, grid(3, 3))


def test_widths_and_masks_that_do_not_fit_raise():
    cells, question = torch.rand(2, 12, 32), torch.rand(2, 8)
    check_cells(cells, question, grid(3, 4), 32, 8)
    with pytest.raises(ValueError, match=r"16.*32"):
        check_cells(cells, question, grid(3, 4), 16)
    with pytest.raises(ValueError, match=r"9.*8"):
        check_cells(cells, question, grid(3, 4), 32, 9)
    attend = MODULES["hard"]()
    with pytest.raises(ValueError, match=r"mask.*12.*11"):
        attend(cells, question, grid(3, 4), torch.ones(2, 11))


def test_a_layout_that_is_a_shape_is_named(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"grid.*\(3, 4\)"):
        check_cells(torch.rand(2, 12, 4), torch.rand(2, 3), (3, 4))
