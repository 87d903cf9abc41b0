from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from overt.data import svhn
from overt.data.dataset import Dataset
from overt.data.in_memory_images import InMemoryImages
from overt.data.splits import hold_out_indices
from overt.data.svhn import Svhn, read_mat
from overt.errors import CorruptFileError, UserError

RECORDS = 12


def make_arrays(records: int = RECORDS, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (32, 32, 3, records), dtype=np.uint8)
    labels = (np.arange(records) % 10 + 1).astype(np.uint8)[:, None]
    return {"X": images, "y": labels}


def write_svhn(root: Path, part: str = "train", **changes: np.ndarray) -> Path:
    """A file as MATLAB writes it, compressed, with other arrays where `changes` has them."""
    path = root / svhn.FOLDER / f"{part}_32x32.mat"
    path.parent.mkdir(exist_ok=True)
    savemat(path, {**make_arrays(), **changes}, do_compression=True)
    return path


def test_images_agree_with_a_slow_reader(tmp_path):
    write_svhn(tmp_path)
    batch = Svhn(tmp_path, "train+val", RECORDS, 3).batch([0, 7])
    images = make_arrays()["X"]
    for row, record in enumerate([0, 7]):
        for channel in range(3):
            for y in range(32):
                expected = [int(images[y, x, channel, record]) for x in range(32)]
                assert batch.images[row, channel, y].tolist() == expected


def test_label_10_is_the_digit_0(tmp_path):
    write_svhn(tmp_path)
    found = Svhn(tmp_path, "train+val", RECORDS, 3)
    assert found.labels(range(RECORDS)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert found.classes[0] == "0" and isinstance(found, Dataset)


def test_splits_and_extra_part_are_read(tmp_path):
    for part in ("train", "test", "extra"):
        write_svhn(tmp_path, part)
    train, val = (Svhn(tmp_path, split, RECORDS, 3) for split in ("train", "val"))
    names = [f"svhn/train/{row:06d}" for rows in hold_out_indices(RECORDS, 3) for row in rows]
    assert [*train.ids(range(9)), *val.ids(range(3))] == names
    extra = Svhn(tmp_path, "extra", RECORDS)
    assert len(extra) == RECORDS and extra.ids([1]) == ("svhn/extra/000001",)
    assert Svhn(tmp_path, "test", RECORDS).ids([0]) == ("svhn/test/000000",)
    splits = ("train", "val", "test", "extra", "train+val")
    assert len({Svhn(tmp_path, split, RECORDS, 3).digest() for split in splits}) == 5
    with pytest.raises(UserError, match="split"):
        Svhn(tmp_path, "more", RECORDS)


def test_dataset_can_be_loaded_in_memory(tmp_path):
    write_svhn(tmp_path)
    found = Svhn(tmp_path, "train", RECORDS, 3)
    in_memory = InMemoryImages.from_dataset(found)
    assert torch.equal(in_memory.images, found.images(range(9)))
    assert in_memory.digest() == found.digest()


def test_float_labels_are_read(tmp_path):
    write_svhn(tmp_path, y=make_arrays()["y"].astype(np.float64))
    assert Svhn(tmp_path, "train+val", RECORDS, 3).labels([9]).tolist() == [0]


@pytest.mark.parametrize("label", [0, 11, 2.5, np.nan])
def test_invalid_label_raises_with_its_record(tmp_path, label):
    labels = make_arrays()["y"].astype(np.float64)
    labels[4] = label
    path = write_svhn(tmp_path, y=labels)
    with pytest.raises(CorruptFileError, match=rf"{path}.* 4 .*{label}"):
        read_mat(path, RECORDS)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("X", np.zeros((32, 32, 3, RECORDS + 1), np.uint8)),
        ("X", np.zeros((32, 32, 3, RECORDS), np.float32)),
        ("X", np.zeros((28, 28, 3, RECORDS), np.uint8)),
        ("y", np.ones((RECORDS - 1, 1), np.uint8)),
        ("y", np.array([["a"]], dtype=object)),
    ],
)
def test_arrays_of_another_dtype_or_shape_raise(tmp_path, name, array):
    path = write_svhn(tmp_path, **{name: array})
    with pytest.raises(CorruptFileError, match=rf"{path}: {name} is [\w ]+ of"):
        read_mat(path, RECORDS)


def test_the_official_number_of_records_is_the_default(tmp_path):
    write_svhn(tmp_path, "test")
    with pytest.raises(CorruptFileError, match="26032"):
        Svhn(tmp_path, "test")


def test_missing_file_raises_with_the_list_command(tmp_path):
    with pytest.raises(UserError, match=r"train_32x32\.mat.*overt data list"):
        Svhn(tmp_path)


def test_truncated_file_raises_with_its_name(tmp_path):
    path = write_svhn(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match=rf"{path}"):
        Svhn(tmp_path, "train", RECORDS)


def test_file_of_the_official_size_is_read(tmp_path):
    """The file has as many records as the official test part, below every limit."""
    count = svhn.RECORDS["test"]
    images = np.zeros((32, 32, 3, count), np.uint8)
    images[0, 0, 0] = np.arange(count) % 251
    write_svhn(tmp_path, "test", X=images, y=np.ones((count, 1), np.uint8))
    found = Svhn(tmp_path, "test")
    assert len(found) == count and int(found.images([count - 1])[0, 0, 0, 0]) == (count - 1) % 251
