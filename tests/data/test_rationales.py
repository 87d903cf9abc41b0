"""Rationales: marked characters become one map per person over tokens."""

import torch

from overt.attention import Kind
from overt.data.rationales import rationale_attention, rationale_maps
from overt.geometry import TextGeometry

TEXTS = ("red ball here", "no")
SPANS = torch.tensor([[[0, 3], [4, 8], [9, 13]], [[0, 2], [-1, -1], [-1, -1]]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
# two people, then one; half of `ball` is enough, a third of `red` is not
RATIONALES = ([[(0, 1), (6, 8)], [(9, 13)]], [[(0, 2)]])


def test_token_is_marked_when_half_of_it_is_marked():
    maps, present = rationale_maps(RATIONALES, TextGeometry(TEXTS, SPANS), MASK)
    assert maps.tolist() == [[[0, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]]]
    assert present.tolist() == [[True, True], [True, False]]


def test_text_without_annotators_has_one_absent_person():
    maps, present = rationale_maps([[], []], TextGeometry(TEXTS, SPANS), MASK)
    assert maps.shape == (2, 1, 3) and not maps.any() and not present.any()


def test_absent_person_has_no_visible_tokens():
    text = TextGeometry(TEXTS, SPANS)
    found = rationale_attention(*rationale_maps(RATIONALES, text, MASK), text, MASK)
    assert found.kind is Kind.AMOUNT and found.weights.shape == (2, 1, 1, 2, 3)
    assert found.visible.tolist() == [
        [[True, True, True], [True, True, True]],
        [[True, False, False], [False, False, False]],
    ]
