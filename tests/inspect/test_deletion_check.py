"""Deletion of the cells of a word's map, against random cells, on a model with random weights."""

from dataclasses import replace

import numpy as np
import pytest

from overt.errors import UserError
from overt.inspect.deletion_check import strongest_cells
from overt.inspect.inputs import ModelInput
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import ViewOptions, view_model
from tests.experiments import foreign

PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
GIVEN = ModelInput("what is this", PHOTO)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(foreign.Shelf(tmp_path_factory.mktemp("models"))["llava"])


@pytest.mark.long
def test_a_word_is_scored_without_the_strongest_cells_of_its_map(loaded: LoadedModel) -> None:
    shown = view_model(loaded, GIVEN, ViewOptions(deletion=True, layer="0", head=1)).panels[0]
    check = shown.deletion
    assert check is not None and check.cells == 3  # a fifth of sixteen cells
    assert check.source == "model.language_model.layers.0.self_attn, head 1 of 4"
    assert len(check.mapped) == len(shown.queries)
    assert [len(draw) for draw in check.random] == [len(shown.queries)] * 10
    assert len(set(check.random)) > 5
    # By hand: the same word without these cells.
    image = shown.attention.keys.find("image")
    sides = np.array([90, 60, 90, 60])
    boxes = image.geometry.cells(image.shape)[0].numpy() / sides  # type: ignore[union-attr]
    for word in (0, 2):
        cells = shown.attention.weights[0, 0, 1, word, :16].topk(3).indices.tolist()
        removed = tuple(tuple(boxes[cell].tolist()) for cell in cells)
        less = view_model(loaded, replace(GIVEN, removed_boxes=removed)).panels[0]
        assert check.mapped[word] == pytest.approx(less.chances[word], abs=1e-5)


def test_cells_of_equal_weight_are_covered_in_random_order() -> None:
    there = np.array([0, 1, 2, 3, 5, 6, 7])
    constant = np.full(8, 0.1)
    counts = np.zeros(8)
    for seed in range(700):
        chosen = strongest_cells(constant, there, 2, seed)
        assert chosen == sorted(set(chosen)) and len(chosen) == 2
        counts[chosen] += 1
    assert counts[4] == 0  # not a cell of the photo
    assert counts[there].min() > 140 and counts[there].max() < 260  # 200 expected
    assert strongest_cells(constant, there, 2, seed=3) == strongest_cells(constant, there, 2, 3)
    # larger weights come first, and only ties are drawn
    some = np.array([0.0, 0.3, 0.1, 0.1, 0.9, 0.1, 0.2, 0.0])
    third = {tuple(strongest_cells(some, there, 3, seed)) for seed in range(50)}
    assert third == {(1, 2, 6), (1, 3, 6), (1, 5, 6)}


def test_too_many_operations_are_rejected(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match="operations"):
        view_model(loaded, GIVEN, ViewOptions(deletion=True, max_flops=1e7))
