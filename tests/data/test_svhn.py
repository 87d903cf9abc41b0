from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from overt.data import svhn
from overt.data.resident import Resident
from overt.data.source import Source
from overt.data.splits import held_out
from overt.data.svhn import Svhn, read_mat
from overt.errors import BadInput, Damaged

RECORDS = 12


def arrays(records: int = RECORDS, seed: int = 0) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    pictures = dice.integers(0, 256, (32, 32, 3, records), dtype=np.uint8)
    labels = (np.arange(records) % 10 + 1).astype(np.uint8)[:, None]
    return {"X": pictures, "y": labels}


def write(root: Path, part: str = "train", **changes: np.ndarray) -> Path:
    """A file as MATLAB writes it, compressed, with other arrays where `changes` has them."""
    path = root / svhn.FOLDER / f"{part}_32x32.mat"
    path.parent.mkdir(exist_ok=True)
    savemat(path, {**arrays(), **changes}, do_compression=True)
    return path


def test_pictures_agree_with_a_slow_reader(tmp_path):
    write(tmp_path)
    batch = Svhn(tmp_path, "train+val", RECORDS, 3).batch([0, 7])
    pictures = arrays()["X"]
    for row, record in enumerate([0, 7]):
        for channel in range(3):
            for y in range(32):
                expected = [int(pictures[y, x, channel, record]) for x in range(32)]
                assert batch.images[row, channel, y].tolist() == expected


def test_ten_is_the_digit_zero(tmp_path):
    write(tmp_path)
    found = Svhn(tmp_path, "train+val", RECORDS, 3)
    assert found.labels(range(RECORDS)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert found.classes[0] == "0" and isinstance(found, Source)


def test_splits_and_the_extra_part(tmp_path):
    for part in ("train", "test", "extra"):
        write(tmp_path, part)
    train, val = (Svhn(tmp_path, split, RECORDS, 3) for split in ("train", "val"))
    names = [f"svhn/train/{row:06d}" for rows in held_out(RECORDS, 3) for row in rows]
    assert [*train.ids(range(9)), *val.ids(range(3))] == names
    extra = Svhn(tmp_path, "extra", RECORDS)
    assert len(extra) == RECORDS and extra.ids([1]) == ("svhn/extra/000001",)
    assert Svhn(tmp_path, "test", RECORDS).ids([0]) == ("svhn/test/000000",)
    splits = ("train", "val", "test", "extra", "train+val")
    assert len({Svhn(tmp_path, split, RECORDS, 3).digest() for split in splits}) == 5
    with pytest.raises(BadInput, match="split"):
        Svhn(tmp_path, "more", RECORDS)


def test_it_becomes_resident(tmp_path):
    write(tmp_path)
    found = Svhn(tmp_path, "train", RECORDS, 3)
    resident = Resident.of(found)
    assert torch.equal(resident.images, found.images(range(9)))
    assert resident.digest() == found.digest()


def test_a_label_of_another_kind_of_number_is_read(tmp_path):
    write(tmp_path, y=arrays()["y"].astype(np.float64))
    assert Svhn(tmp_path, "train+val", RECORDS, 3).labels([9]).tolist() == [0]


@pytest.mark.parametrize("label", [0, 11, 2.5, np.nan])
def test_a_wrong_label_is_named_with_its_record(tmp_path, label):
    labels = arrays()["y"].astype(np.float64)
    labels[4] = label
    path = write(tmp_path, y=labels)
    with pytest.raises(Damaged, match=rf"{path}: record 4 has label {label}"):
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
def test_other_arrays_are_refused(tmp_path, name, array):
    path = write(tmp_path, **{name: array})
    with pytest.raises(Damaged, match=rf"{path}: {name} is [\w ]+ of"):
        read_mat(path, RECORDS)


def test_the_official_number_of_records_is_the_default(tmp_path):
    write(tmp_path, "test")
    with pytest.raises(Damaged, match="26032"):
        Svhn(tmp_path, "test")


def test_a_missing_file_says_where_to_look(tmp_path):
    with pytest.raises(BadInput, match=r"train_32x32\.mat is missing.*overt data list"):
        Svhn(tmp_path)


def test_a_truncated_file_is_one_sentence(tmp_path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Damaged, match=rf"{path}"):
        Svhn(tmp_path, "train", RECORDS)


def test_a_copy_of_the_official_size_is_read(tmp_path):
    """As many records as the official test part has, so that no limit is in the way."""
    count = svhn.RECORDS["test"]
    pictures = np.zeros((32, 32, 3, count), np.uint8)
    pictures[0, 0, 0] = np.arange(count) % 251
    write(tmp_path, "test", X=pictures, y=np.ones((count, 1), np.uint8))
    found = Svhn(tmp_path, "test")
    assert len(found) == count and int(found.images([count - 1])[0, 0, 0, 0]) == (count - 1) % 251
