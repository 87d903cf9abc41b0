"""What people marked, token by token and person by person, against loops."""

import torch

from overt.attention import Kind
from overt.data.marks import by_person, map_of
from overt.geometry import TextGeometry

TEXTS = ("red ball here", "no")
SPANS = torch.tensor([[[0, 3], [4, 8], [9, 13]], [[0, 2], [-1, -1], [-1, -1]]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
# two people and one; half of `ball` counts, a third of `red` does not
MARKED = ([[(0, 1), (6, 8)], [(9, 13)]], [[(0, 2)]])


def test_a_token_counts_when_half_of_it_is_marked():
    maps, there = by_person(MARKED, TextGeometry(TEXTS, SPANS), MASK)
    assert maps.tolist() == [[[0, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]]]
    assert there.tolist() == [[True, True], [True, False]]


def test_a_text_that_nobody_read_has_one_person_who_is_not_there():
    maps, there = by_person([[], []], TextGeometry(TEXTS, SPANS), MASK)
    assert maps.shape == (2, 1, 3) and not maps.any() and not there.any()


def test_somebody_who_is_not_there_sees_no_token():
    text = TextGeometry(TEXTS, SPANS)
    found = map_of(*by_person(MARKED, text, MASK), text, MASK)
    assert found.kind is Kind.AMOUNT and found.weights.shape == (2, 1, 1, 2, 3)
    assert found.visible.tolist() == [
        [[True, True, True], [True, True, True]],
        [[True, False, False], [False, False, False]],
    ]
