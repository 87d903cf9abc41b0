from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import cifar, stl10
from overt.data.dataset import Dataset
from overt.data.splits import hold_out_indices
from overt.data.stl10 import Stl10, read_folds, read_labels
from overt.errors import CorruptFileError, UserError

RECORDS = 6


def write_stl10(root: Path) -> Path:
    """The official files with six records each; the first byte of an image is its number."""
    folder = root / stl10.FOLDER
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part in ("train", "test", "unlabeled"):
        images = rng.integers(0, 256, (RECORDS, stl10.PIXELS), dtype=np.uint8)
        images[:, 0] = np.arange(RECORDS)
        (folder / f"{part}_X.bin").write_bytes(images.tobytes())
        if part != "unlabeled":
            labels = np.array([1, 10, 3, 8, 5, 2], dtype=np.uint8)
            (folder / f"{part}_y.bin").write_bytes(labels.tobytes())
    folds = [" ".join(map(str, [fold % 6, 5])) + " \n" for fold in range(10)]
    (folder / "fold_indices.txt").write_text("".join(folds))
    return folder


def test_images_agree_with_a_slow_reader(tmp_path):
    """The official page: three planes, each stored column by column."""
    folder = write_stl10(tmp_path)
    batch = Stl10(tmp_path, "test", RECORDS).batch([4, 1])
    data = (folder / "test_X.bin").read_bytes()
    for row, record in enumerate([4, 1]):
        expected = torch.zeros(3, 96, 96, dtype=torch.uint8)
        at = record * 3 * 96 * 96
        for channel in range(3):
            for x in range(96):
                column = data[at : at + 96]
                expected[channel, :, x] = torch.tensor(list(column), dtype=torch.uint8)
                at += 96
        assert torch.equal(batch.images[row], expected)
    assert batch.labels.tolist() == [4, 9] and batch.geometry.canvas == (96, 96)


def test_splits_hold_out_different_rows(tmp_path):
    write_stl10(tmp_path)
    train, val = (Stl10(tmp_path, split, RECORDS, 2) for split in ("train", "val"))
    assert isinstance(train, Dataset)
    for found, rows in zip((train, val), hold_out_indices(RECORDS, 2), strict=True):
        first = found.batch(range(len(found))).images[:, 0, 0, 0]
        assert first.tolist() == rows.tolist()
    unlabeled = Stl10(tmp_path, "unlabeled", RECORDS)
    assert unlabeled.batch([3]).labels is None and unlabeled.ids([3]) == ("stl10/unlabeled/000003",)
    splits = ("train", "val", "test", "unlabeled", "train+val")
    assert len({Stl10(tmp_path, split, RECORDS, 2).digest() for split in splits}) == 5
    assert (
        len({Stl10(tmp_path, "train", RECORDS, held_out).digest() for held_out in (1, 2, 3)}) == 3
    )
    with pytest.raises(UserError, match="split"):
        Stl10(tmp_path, "dev", RECORDS)


def test_as_cifar10_maps_the_common_classes():
    alike = {"car": "automobile"}
    for name, number in zip(stl10.NAMES, stl10.AS_CIFAR10, strict=True):
        if name == "monkey":
            assert number == -1
        else:
            assert cifar.CIFAR10_NAMES[number] == alike.get(name, name)


def test_folds_are_read_and_invalid_folds_raise(tmp_path):
    folder = write_stl10(tmp_path)
    folds = read_folds(tmp_path, RECORDS)
    assert len(folds) == 10 and folds[7].tolist() == [1, 5]
    for text, match in [
        ("0 1\n" * 9, "9 folds"),
        ("0 1\n0 6\n", "line 2"),
        ("0 -1\n", "line 1"),
        ("one\n", "line 1"),
        ("9" * 5000, "line 1"),
        ("", "empty"),
    ]:
        (folder / "fold_indices.txt").write_text(text)
        with pytest.raises(CorruptFileError, match=match):
            read_folds(tmp_path, RECORDS)
    (folder / "fold_indices.txt").unlink()
    with pytest.raises(UserError, match="missing"):
        read_folds(tmp_path)


@pytest.mark.parametrize("name", ["train_X.bin", "train_y.bin"])
@pytest.mark.parametrize("cut", [1, 5])
def test_truncated_and_missing_files_raise(tmp_path, name, cut):
    path = write_stl10(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptFileError, match=rf"{path} .*record"):
        Stl10(tmp_path, "train", RECORDS, 2)
    path.unlink()
    with pytest.raises(UserError, match=rf"{name}.*missing"):
        Stl10(tmp_path, "train", RECORDS, 2)


@pytest.mark.parametrize("label", [0, 11, 255])
def test_out_of_range_label_raises_with_its_record(tmp_path, label):
    path = write_stl10(tmp_path) / "test_y.bin"
    path.write_bytes(bytes([1, 2, label, 1, 1, 1]))
    with pytest.raises(CorruptFileError, match=rf"test_y\.bin.* 2 .*{label}"):
        read_labels(path, RECORDS)


def test_the_official_number_of_records_is_the_default(tmp_path):
    write_stl10(tmp_path)
    with pytest.raises(CorruptFileError, match="5000 records"):
        Stl10(tmp_path)
