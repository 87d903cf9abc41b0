import numpy as np
import pytest

from overt.data.splits import Split, hold_out_indices, parse_labels, parse_split, split_indices
from overt.errors import UserError


@pytest.mark.parametrize(("count", "validation"), [(50_000, 5_000), (10, 3), (5, 0)])
def test_train_and_val_are_disjoint_and_complete(count, validation):
    train, val = hold_out_indices(count, validation)
    assert len(val) == validation
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(count))
    assert np.array_equal(split_indices(Split.TRAIN, count, validation), train)
    assert np.array_equal(split_indices(Split.VAL, count, validation), val)


def test_test_and_train_val_contain_all_indices():
    for split in (Split.TEST, Split.TRAIN_VAL):
        assert split_indices(split, 4, 2).tolist() == [0, 1, 2, 3]


def test_hold_out_gives_the_recorded_indices():
    # Recorded with the first version: the first ten of 5,000 held out of CIFAR's 50,000.
    val = hold_out_indices(50_000, 5_000)[1]
    assert val[:10].tolist() == [4, 26, 39, 44, 58, 72, 76, 88, 92, 94]
    assert hold_out_indices(10, 3)[1].tolist() == [1, 2, 6]


@pytest.mark.parametrize(("count", "validation"), [(5, 5), (5, 6), (5, -1), (0, 0)])
def test_holding_out_too_many_samples_raises(count, validation):
    with pytest.raises(UserError, match=str(validation)):
        hold_out_indices(count, validation)


def test_unknown_split_and_label_names_raise():
    assert parse_split("train+val") is Split.TRAIN_VAL
    with pytest.raises(UserError, match="train, val, test"):
        parse_split("dev")
    with pytest.raises(UserError, match="fine or coarse"):
        parse_labels("middle")
