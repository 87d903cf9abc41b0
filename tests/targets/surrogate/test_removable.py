"""Positions that masks may remove: spans, padding, whole words."""

import pytest
import torch

from overt.attention import AttentionMap, Layout, Span, grid, words
from overt.geometry import TextGeometry
from overt.targets.surrogate.removable import RemovablePositions, each_position, whole_words


def test_removable_positions_are_keys_visible_to_some_query():
    mask = torch.tensor([[[True, True, False]], [[True, False, True]]])
    attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 3), words(3), mask=mask)
    places = RemovablePositions.of_span(attention, "text")
    assert places.shape == (3,) and len(places) == 2
    assert places.present.tolist() == mask[:, 0].tolist()
    assert each_position(places).tolist() == [[0, 1, -1], [0, -1, 1]]


def test_spans_may_have_different_positions_per_sample():
    index = torch.tensor([[1, 2], [3, -1]])
    keys = Layout((Span("text", (2,), index),), 4)
    places = RemovablePositions.of_span(
        AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), keys), "text"
    )
    assert places.present.tolist() == [[True, True], [True, False]]


def test_all_cells_of_a_grid_are_removable():
    attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 6), grid(2, 3))
    places = RemovablePositions.of_span(attention, "image")
    assert places.shape == (2, 3) and places.present.all()


def test_subwords_form_one_unit():
    spans = torch.tensor([[[0, 3], [3, 5], [6, 8], [-1, -1]]])
    places = RemovablePositions(
        (4,), torch.tensor([[True, True, True, False]]), TextGeometry(("abcde fg",), spans)
    )
    assert whole_words(places).tolist() == [[0, 0, 1, -1]]
    cut = RemovablePositions((4,), torch.tensor([[False, False, True, False]]), places.text)
    assert whole_words(cut).tolist() == [[-1, -1, 0, -1]]


def test_whole_words_without_text_geometry_raises():
    with pytest.raises(ValueError, match="each_position"):
        whole_words(RemovablePositions((2,), torch.ones(1, 2, dtype=torch.bool)))
