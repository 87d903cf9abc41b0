import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import cifar
from overt.data.cifar import Cifar10, Cifar100
from overt.data.sets import CIFAR_SHA1
from overt.data.splits import held_out
from overt.errors import BadInput, Damaged

RECORDS, VALIDATION = 6, 7
STEMS = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def write_cifar10(root: Path) -> None:
    """The six official files with six records each; the first pixel of a record is its number."""
    folder = root / cifar.CIFAR10_FOLDER
    folder.mkdir()
    dice = np.random.default_rng(0)
    for part, stem in enumerate(STEMS):
        records = dice.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        records[:, 0] = dice.integers(0, 10, RECORDS)
        records[:, 1] = np.arange(RECORDS) + part * RECORDS
        (folder / f"{stem}.bin").write_bytes(records.tobytes())


def write_cifar100(root: Path) -> None:
    folder = root / cifar.CIFAR100_FOLDER
    folder.mkdir()
    dice = np.random.default_rng(1)
    for stem in ("train", "test"):
        records = dice.integers(0, 256, (30, 3074), dtype=np.uint8)
        records[:, 0] = np.arange(30) % 20
        records[:, 1] = np.arange(30) + 70
        (folder / f"{stem}.bin").write_bytes(records.tobytes())


@pytest.fixture
def ten(tmp_path) -> Path:
    write_cifar10(tmp_path)
    return tmp_path


@pytest.fixture
def hundred(tmp_path) -> Path:
    write_cifar100(tmp_path)
    return tmp_path


def open_ten(root: Path, split: str = "train") -> Cifar10:
    return Cifar10(root, split, RECORDS, VALIDATION)


def slow_record(path: Path, number: int, labels: int) -> tuple[list[int], torch.Tensor]:
    """A record read byte by byte, as the official page describes it."""
    data = path.read_bytes()[number * (labels + 3072) :][: labels + 3072]
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    for channel in range(3):
        for y in range(32):
            for x in range(32):
                image[channel, y, x] = data[labels + channel * 1024 + y * 32 + x]
    return list(data[:labels]), image


def test_records_agree_with_a_slow_reader(ten):
    everything = open_ten(ten, "train+val").batch([0, 29, 7, 7])
    for row, (stem, number) in enumerate(
        [("data_batch_1", 0), ("data_batch_5", 5), ("data_batch_2", 1), ("data_batch_2", 1)]
    ):
        labels, image = slow_record(ten / cifar.CIFAR10_FOLDER / f"{stem}.bin", number, 1)
        assert torch.equal(everything.images[row], image)
        assert everything.labels[row] == labels[0]


def test_both_labels_of_cifar100_agree_with_a_slow_reader(hundred):
    path = hundred / cifar.CIFAR100_FOLDER / "test.bin"
    coarse = Cifar100(hundred, "test", "coarse", 30, 3).batch([4, 21])
    fine = Cifar100(hundred, "test", "fine", 30, 3).batch([4, 21])
    for row, number in enumerate([4, 21]):
        labels, image = slow_record(path, number, 2)
        assert [int(coarse.labels[row]), int(fine.labels[row])] == labels
        assert torch.equal(fine.images[row], image) and torch.equal(coarse.images[row], image)


def test_splits_follow_what_is_held_out(ten):
    train, val = (open_ten(ten, split) for split in ("train", "val"))
    expected = held_out(5 * RECORDS, VALIDATION)
    for found, rows in zip((train, val), expected, strict=True):
        assert len(found) == len(rows)
        assert found.batch(range(len(found))).images[:, 0, 0, 0].tolist() == rows.tolist()
    assert open_ten(ten, "test").batch([2]).images[0, 0, 0, 0] == 5 * RECORDS + 2


def test_a_picture_has_one_id_in_every_split(ten):
    whole = open_ten(ten, "train+val")
    names = whole.ids(range(len(whole)))
    assert len(set(names)) == 30 and names[7] == "cifar10/train/00007"
    train, val = (open_ten(ten, split) for split in ("train", "val"))
    parts = train.ids(range(len(train))) + val.ids(range(len(val)))
    assert set(parts) == set(names)
    assert open_ten(ten, "test").ids([0]) == ("cifar10/test/00000",)


def test_a_batch_is_pure_and_complete(ten):
    found = open_ten(ten)
    batch = found.batch([3, 1])
    assert torch.equal(batch.images, found.batch([3, 1]).images)
    assert batch.geometry.canvas == (32, 32) and len(batch.geometry) == 2
    assert batch.images.dtype == torch.uint8 and batch.labels.dtype == torch.long
    batch.images.zero_()
    assert found.batch([3]).images.any()
    assert len(found.batch([])) == 0


@pytest.mark.parametrize("place", [-1, 23])
def test_a_place_out_of_range_is_refused(ten, place):
    with pytest.raises(BadInput, match=str(place)):
        open_ten(ten).batch([0, place])


@pytest.mark.parametrize("cut", [1, 3072, 3073, 5 * 3073, 6 * 3073])
def test_a_truncated_file_is_named_with_record_and_bytes(ten, cut):
    path = ten / cifar.CIFAR10_FOLDER / "data_batch_3.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(Damaged) as caught:
        open_ten(ten)
    assert str(path) in str(caught.value)
    assert f"record {(len(data) - cut) // 3073}" in str(caught.value)
    assert str(6 * 3073) in str(caught.value)


def test_a_longer_file_is_damaged(ten):
    path = ten / cifar.CIFAR10_FOLDER / "data_batch_3.bin"
    path.write_bytes(path.read_bytes() + bytes(3073))
    with pytest.raises(Damaged, match="data_batch_3"):
        open_ten(ten)


def test_a_label_out_of_range_is_named_with_its_record(ten, tmp_path_factory):
    path = ten / cifar.CIFAR10_FOLDER / "data_batch_2.bin"
    data = bytearray(path.read_bytes())
    data[4 * 3073] = 10
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"data_batch_2\.bin: record 4 has label 10"):
        open_ten(ten)


@pytest.mark.parametrize(("place", "value"), [(0, 20), (1, 100)])
def test_labels_of_cifar100_are_checked(hundred, place, value):
    path = hundred / cifar.CIFAR100_FOLDER / "train.bin"
    data = bytearray(path.read_bytes())
    data[9 * 3074 + place] = value
    path.write_bytes(data)
    with pytest.raises(Damaged, match=rf"train\.bin: record 9 has label {value}"):
        Cifar100(hundred, "train", "fine", 30, 3)


def test_the_official_number_of_records_is_the_default(ten):
    with pytest.raises(Damaged, match="10000 records"):
        Cifar10(ten)


def test_missing_files_and_wrong_names(tmp_path, ten):
    (ten / cifar.CIFAR10_FOLDER / "data_batch_4.bin").unlink()
    with pytest.raises(BadInput, match=r"data_batch_4\.bin is missing"):
        open_ten(ten)
    with pytest.raises(BadInput, match="split"):
        Cifar10(ten, "dev")
    with pytest.raises(BadInput, match="labels"):
        Cifar100(ten, "train", "middle")


def test_class_names_come_from_the_file_if_there_is_one(ten, hundred):
    assert open_ten(ten).classes == cifar.CIFAR10_NAMES
    (ten / cifar.CIFAR10_FOLDER / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    assert open_ten(ten).classes == tuple("abcdefghij")
    (ten / cifar.CIFAR10_FOLDER / "batches.meta.txt").write_text("a b")
    with pytest.raises(Damaged, match="names 2 classes"):
        open_ten(ten)
    (ten / cifar.CIFAR10_FOLDER / "batches.meta.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(Damaged, match="not text"):
        open_ten(ten)
    coarse = Cifar100(hundred, "train", "coarse", 30, 3)
    assert coarse.classes == cifar.COARSE_NAMES and len(cifar.COARSE_NAMES) == 20
    assert len(cifar.FINE_NAMES) == 100 and list(cifar.FINE_NAMES) == sorted(cifar.FINE_NAMES)


def test_digest_tells_data_splits_and_labels_apart(ten, hundred):
    digests = {open_ten(ten, split).digest() for split in ("train", "val", "test", "train+val")}
    digests |= {Cifar100(hundred, "train", kind, 30, 3).digest() for kind in ("fine", "coarse")}
    assert len(digests) == 6
    before = open_ten(ten).digest()
    assert before == open_ten(ten).digest()
    path = ten / cifar.CIFAR10_FOLDER / "data_batch_5.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert open_ten(ten).digest() != before


def test_real_cifar10(data_root, needs):
    needs(data_root, "cifar10")
    sizes = {"train": 45_000, "val": 5_000, "test": 10_000, "train+val": 50_000}
    for split, count in sizes.items():
        assert len(Cifar10(data_root, split)) == count
    whole = Cifar10(data_root, "train+val")
    assert torch.bincount(whole.labels(range(50_000))).tolist() == [5_000] * 10
    # The first training picture is a frog; its bytes are those of the published file.
    assert whole.classes[whole.labels([0])[0]] == "frog"
    first = data_root / cifar.CIFAR10_FOLDER / "data_batch_1.bin"
    assert hashlib.sha1(first.read_bytes()).hexdigest() == CIFAR_SHA1["data_batch_1"]
    assert bytes(whole.images([0]).flatten().tolist()) == first.read_bytes()[1:3073]


def test_real_cifar100(data_root, needs):
    needs(data_root, "cifar100")
    fine = Cifar100(data_root, "test", "fine")
    coarse = Cifar100(data_root, "test", "coarse")
    assert torch.bincount(fine.labels(range(10_000))).tolist() == [100] * 100
    assert torch.bincount(coarse.labels(range(10_000))).tolist() == [500] * 20
    assert fine.classes == cifar.FINE_NAMES and coarse.classes == cifar.COARSE_NAMES
    both = torch.stack([fine.labels(range(10_000)), coarse.labels(range(10_000))])
    assert both.unique(dim=1).shape[1] == 100  # a fine class has one coarse class
