"""Scores of classes, contrasts and functions, for samples and for repeated rows."""

from types import SimpleNamespace

import pytest
import torch

from overt.attribution.target_scores import Contrast, score_target

LOGITS = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 8.0]])


def test_classes_are_shared_or_per_sample() -> None:
    assert score_target(LOGITS, 2).tolist() == [4, 8]
    assert score_target(LOGITS, [0, 1]).tolist() == [1, 5]
    assert score_target(LOGITS, torch.tensor([0, 1])).tolist() == [1, 5]
    assert score_target(SimpleNamespace(logits=LOGITS), 1).tolist() == [2, 5]
    assert score_target(LOGITS, 1, torch.softmax).tolist() == LOGITS.softmax(-1)[:, 1].tolist()


def test_contrast_subtracts_another_class() -> None:
    assert score_target(LOGITS, Contrast([2, 1], 0)).tolist() == [3, 2]


def test_rows_name_the_sample_of_each_row() -> None:
    rows = torch.tensor([1, 0, 1])
    assert score_target(LOGITS[rows], [0, 2], rows=rows, samples=2).tolist() == [8, 1, 8]
    found = score_target(LOGITS[rows], Contrast([0, 2], [1, 1]), rows=rows, samples=2)
    assert found.tolist() == [3, -1, 3]
    with pytest.raises(ValueError, match="shape"):
        score_target(LOGITS[rows], [0, 2, 1], rows=rows, samples=2)


def test_classes_have_to_be_whole_numbers() -> None:
    for given in (True, [True, False]):
        with pytest.raises(ValueError, match=r"class.*torch\.bool"):
            score_target(LOGITS, given)
    small = torch.tensor([0, 1], dtype=torch.int8)
    assert score_target(LOGITS, small).tolist() == [1, 5]


def test_wrong_targets_raise() -> None:
    with pytest.raises(ValueError, match="classes 0 to 2"):
        score_target(LOGITS, 3)
    with pytest.raises(ValueError, match="classes 0 to 2"):
        score_target(LOGITS, Contrast(0, -1))
    with pytest.raises(ValueError, match="one axis"):
        score_target(LOGITS, lambda out: out)
    with pytest.raises(ValueError, match="logits"):
        score_target({"scores": LOGITS}, 0)


def test_wrong_classes_are_named_once_each() -> None:
    many = torch.arange(3, 15)
    with pytest.raises(ValueError, match=r"6, 7 and 7 more$"):
        score_target(torch.rand(12, 3), many)
    with pytest.raises(ValueError, match=r"got 7$"):
        score_target(torch.rand(12, 3), torch.full((12,), 7))
