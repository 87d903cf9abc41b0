import pytest
import torch

from overt.attention import AttentionMap, Layout, Span, grid, words
from overt.geometry import TextGeometry
from overt.supervise.surrogate.places import Places, each_place, whole_words


def test_places_are_those_that_some_query_may_see():
    mask = torch.tensor([[[True, True, False]], [[True, False, True]]])
    attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 3), words(3), mask=mask)
    places = Places.under(attention, "text")
    assert places.shape == (3,) and len(places) == 2
    assert places.present.tolist() == mask[:, 0].tolist()
    assert each_place(places).tolist() == [[0, 1, -1], [0, -1, 1]]


def test_spans_stand_at_each_samples_own_place():
    index = torch.tensor([[1, 2], [3, -1]])
    keys = Layout((Span("text", (2,), index),), 4)
    places = Places.under(AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), keys), "text")
    assert places.present.tolist() == [[True, True], [True, False]]


def test_cells_of_a_grid_are_all_there():
    attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 6), grid(2, 3))
    places = Places.under(attention, "image")
    assert places.shape == (2, 3) and places.present.all()


def test_pieces_of_a_word_go_together():
    spans = torch.tensor([[[0, 3], [3, 5], [6, 8], [-1, -1]]])
    places = Places(
        (4,), torch.tensor([[True, True, True, False]]), TextGeometry(("abcde fg",), spans)
    )
    assert whole_words(places).tolist() == [[0, 0, 1, -1]]
    cut = Places((4,), torch.tensor([[False, False, True, False]]), places.text)
    assert whole_words(cut).tolist() == [[-1, -1, 0, -1]]


def test_words_cannot_be_told_without_characters():
    with pytest.raises(ValueError, match="each_place"):
        whole_words(Places((2,), torch.ones(1, 2, dtype=torch.bool)))
