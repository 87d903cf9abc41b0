import numpy as np
import pytest

from overt.data.splits import Split, held_out, labels_of, rows_of, split_of
from overt.errors import BadInput


@pytest.mark.parametrize(("count", "validation"), [(50_000, 5_000), (10, 3), (5, 0)])
def test_train_and_val_share_nothing_and_make_the_whole(count, validation):
    train, val = held_out(count, validation)
    assert len(val) == validation
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(count))
    assert np.array_equal(rows_of(Split.TRAIN, count, validation), train)
    assert np.array_equal(rows_of(Split.VAL, count, validation), val)


def test_test_and_train_val_are_everything():
    for split in (Split.TEST, Split.TRAIN_VAL):
        assert rows_of(split, 4, 2).tolist() == [0, 1, 2, 3]


def test_what_is_held_out_never_changes():
    # Written down when the split was made: the first ten of the 5,000 held out of CIFAR's 50,000.
    val = held_out(50_000, 5_000)[1]
    assert val[:10].tolist() == [4, 26, 39, 44, 58, 72, 76, 88, 92, 94]
    assert held_out(10, 3)[1].tolist() == [1, 2, 6]


@pytest.mark.parametrize(("count", "validation"), [(5, 5), (5, 6), (5, -1), (0, 0)])
def test_more_than_there_is_cannot_be_held_out(count, validation):
    with pytest.raises(BadInput, match=str(validation)):
        held_out(count, validation)


def test_names_are_checked():
    assert split_of("train+val") is Split.TRAIN_VAL
    with pytest.raises(BadInput, match="train, val, test"):
        split_of("dev")
    with pytest.raises(BadInput, match="fine or coarse"):
        labels_of("middle")
