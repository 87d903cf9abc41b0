"""Box targets of answer words: cells and positions worked out by hand, and what raises."""

from typing import Any

import pytest
import torch
from torch import Tensor

from overt.attention import Layout, Span, grid
from overt.geometry import PixelGeometry
from overt.losses import ANSWER_INPUTS
from overt.targets import placebos
from overt.targets.answer_boxes import answer_box_target, answer_inputs, collate_answer_targets

BOX = [(0, 0, 10, 10), (5, 0, 20, 10)]  # in a photo of 40 x 20 pixels


def layout(index: Any = slice(1, 9)) -> Layout:
    """A token, 2 x 4 cells of 10 x 10 pixels, and three words."""
    geometry = PixelGeometry.identity(1, (20, 40))
    return Layout((Span("image", (2, 4), index, geometry), Span("text", (3,), slice(9, 12))), 12)


def test_a_target_covers_the_union_of_the_boxes_and_counts_words_from_the_token_before() -> None:
    words = {10: BOX, 11: [(30, 10, 40, 20)]}
    target = answer_box_target(layout(), words)
    assert target.shape == (1, 1, 1, 2, 8)
    assert target.weights[0, 0, 0].tolist() == [[0.5, 0.5, *[0] * 6], [*[0] * 7, 1]]
    assert target.keys.find("image").geometry is not None
    found = answer_inputs(target, layout(), words)
    assert found["grounded_words"].tolist() == [9, 10]
    assert found["grounded_tokens"].tolist() == list(range(1, 9))


def test_cells_between_newlines_and_a_placebo_of_a_target() -> None:
    index = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]])
    target = answer_box_target(layout(index), {10: BOX})
    placebo = placebos.permuted_keys(lambda ids: target, seed=2)(["a"])
    found = answer_inputs(placebo, layout(index), {10: BOX})
    assert found["grounded_tokens"].tolist() == index[0].tolist()
    assert sorted(found["grounded_target"][0].tolist()) == [0, 0, 0, 0, 0, 0, 0.5, 0.5]
    assert not torch.equal(placebo.weights, target.weights)


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        (layout(), {}, "one word.*boxes"),
        (layout(), {5: BOX}, "9 to 11.*got 5"),
        (layout(), {12: BOX}, "9 to 11.*got 12"),
        (grid(2, 4), {9: BOX}, "pixels.*layouts_of"),
        (layout(), {10: [(10, 0, 0, 10)]}, "x0 < x1"),
    ],
)
def test_words_and_layouts_without_a_place_raise(given: Layout, words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answer_box_target(given, words)


def test_a_target_of_other_words_raises() -> None:
    target = answer_box_target(layout(), {10: BOX})
    with pytest.raises(ValueError, match="1, 1, 1, 2, 8"):
        answer_inputs(target, layout(), {10: BOX, 11: BOX})


def sample(first: int, count: int) -> dict[str, Any]:
    target = {name: torch.zeros(1, dtype=torch.long) for name in ANSWER_INPUTS[:2]}
    ids = list(range(first, first + count))
    return {"input_ids": ids, **target, "grounded_target": torch.ones(1, 1)}


def rows(*values: list[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(values)}


def test_targets_move_with_their_tokens_in_padded_and_packed_batches() -> None:
    items = [sample(3, 2), sample(5, 3)]
    for batch, words in (
        (rows([0, 3, 4], [5, 6, 7]), [[1], [0]]),
        (rows([3, 4, 0], [5, 6, 7]), [[0], [0]]),
        (rows([3, 4, 5, 6, 7]), [[0, 2]]),
    ):
        found = collate_answer_targets(items, lambda plain, batch=batch: batch)
        assert found["grounded_words"].tolist() == words
        assert found["grounded_target"].sum(dim=-1).flatten().tolist() == [1, 1]
    assert found["grounded_target"][0].tolist() == [[1, 0], [0, 1]]  # packed: its own image


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (rows([3], [5]), "2 tokens.*sample 0"),
        (rows([3, 4, 0], [6, 5, 7]), "3 tokens.*sample 1"),
        (rows([3, 4], [5, 6], [7, 0]), "3 rows.*2 samples"),
    ],
)
def test_batches_without_the_tokens_of_a_sample_raise(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate_answer_targets([sample(3, 2), sample(5, 3)], lambda plain: batch)
