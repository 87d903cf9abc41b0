import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import cifar
from overt.data.catalog import find_dataset
from overt.data.cifar import Cifar10, Cifar100
from overt.data.splits import hold_out_indices
from overt.errors import CorruptFileError, UserError

RECORDS, VALIDATION = 6, 7
STEMS = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def write_cifar10(root: Path) -> None:
    """The six official files with six records each; the first pixel of a record is its number."""
    folder = root / cifar.CIFAR10_FOLDER
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, stem in enumerate(STEMS):
        records = rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        records[:, 0] = rng.integers(0, 10, RECORDS)
        records[:, 1] = np.arange(RECORDS) + part * RECORDS
        (folder / f"{stem}.bin").write_bytes(records.tobytes())


def write_cifar100(root: Path) -> None:
    folder = root / cifar.CIFAR100_FOLDER
    folder.mkdir()
    rng = np.random.default_rng(1)
    for stem in ("train", "test"):
        records = rng.integers(0, 256, (30, 3074), dtype=np.uint8)
        records[:, 0] = np.arange(30) % 20
        records[:, 1] = np.arange(30) + 70
        (folder / f"{stem}.bin").write_bytes(records.tobytes())


@pytest.fixture
def cifar10_root(tmp_path) -> Path:
    write_cifar10(tmp_path)
    return tmp_path


@pytest.fixture
def cifar100_root(tmp_path) -> Path:
    write_cifar100(tmp_path)
    return tmp_path


def open_cifar10(root: Path, split: str = "train") -> Cifar10:
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


def test_records_agree_with_a_slow_reader(cifar10_root):
    everything = open_cifar10(cifar10_root, "train+val").batch([0, 29, 7, 7])
    for row, (stem, number) in enumerate(
        [("data_batch_1", 0), ("data_batch_5", 5), ("data_batch_2", 1), ("data_batch_2", 1)]
    ):
        labels, image = slow_record(cifar10_root / cifar.CIFAR10_FOLDER / f"{stem}.bin", number, 1)
        assert torch.equal(everything.images[row], image)
        assert everything.labels[row] == labels[0]


def test_both_labels_of_cifar100_agree_with_a_slow_reader(cifar100_root):
    path = cifar100_root / cifar.CIFAR100_FOLDER / "test.bin"
    coarse = Cifar100(cifar100_root, "test", "coarse", 30, 3).batch([4, 21])
    fine = Cifar100(cifar100_root, "test", "fine", 30, 3).batch([4, 21])
    for row, number in enumerate([4, 21]):
        labels, image = slow_record(path, number, 2)
        assert [int(coarse.labels[row]), int(fine.labels[row])] == labels
        assert torch.equal(fine.images[row], image) and torch.equal(coarse.images[row], image)


def test_train_and_val_follow_hold_out_indices(cifar10_root):
    train, val = (open_cifar10(cifar10_root, split) for split in ("train", "val"))
    expected = hold_out_indices(5 * RECORDS, VALIDATION)
    for found, rows in zip((train, val), expected, strict=True):
        assert len(found) == len(rows)
        assert found.batch(range(len(found))).images[:, 0, 0, 0].tolist() == rows.tolist()
    assert open_cifar10(cifar10_root, "test").batch([2]).images[0, 0, 0, 0] == 5 * RECORDS + 2


def test_each_image_has_one_id_in_every_split(cifar10_root):
    whole = open_cifar10(cifar10_root, "train+val")
    names = whole.ids(range(len(whole)))
    assert len(set(names)) == 30 and names[7] == "cifar10/train/00007"
    train, val = (open_cifar10(cifar10_root, split) for split in ("train", "val"))
    parts = train.ids(range(len(train))) + val.ids(range(len(val)))
    assert set(parts) == set(names)
    assert open_cifar10(cifar10_root, "test").ids([0]) == ("cifar10/test/00000",)


def test_batches_are_deterministic_copies(cifar10_root):
    found = open_cifar10(cifar10_root)
    batch = found.batch([3, 1])
    assert torch.equal(batch.images, found.batch([3, 1]).images)
    assert batch.geometry.canvas == (32, 32) and len(batch.geometry) == 2
    assert batch.images.dtype == torch.uint8 and batch.labels.dtype == torch.long
    batch.images.zero_()
    assert found.batch([3]).images.any()
    assert len(found.batch([])) == 0


@pytest.mark.parametrize("place", [-1, 23])
def test_out_of_range_index_raises(cifar10_root, place):
    with pytest.raises(UserError, match=str(place)):
        open_cifar10(cifar10_root).batch([0, place])


@pytest.mark.parametrize("cut", [1, 3072, 3073, 5 * 3073, 6 * 3073])
def test_truncated_file_raises_with_record_and_bytes(cifar10_root, cut):
    path = cifar10_root / cifar.CIFAR10_FOLDER / "data_batch_3.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(CorruptFileError) as caught:
        open_cifar10(cifar10_root)
    assert str(path) in str(caught.value)
    assert f"record {(len(data) - cut) // 3073}" in str(caught.value)
    assert str(6 * 3073) in str(caught.value)


def test_longer_file_raises(cifar10_root):
    path = cifar10_root / cifar.CIFAR10_FOLDER / "data_batch_3.bin"
    path.write_bytes(path.read_bytes() + bytes(3073))
    with pytest.raises(CorruptFileError, match="data_batch_3"):
        open_cifar10(cifar10_root)


def test_out_of_range_label_raises_with_its_record(cifar10_root, tmp_path_factory):
    path = cifar10_root / cifar.CIFAR10_FOLDER / "data_batch_2.bin"
    data = bytearray(path.read_bytes())
    data[4 * 3073] = 10
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"batch_2.* 4 .* 10"):
        open_cifar10(cifar10_root)


@pytest.mark.parametrize(("place", "value"), [(0, 20), (1, 100)])
def test_labels_of_cifar100_are_checked(cifar100_root, place, value):
    path = cifar100_root / cifar.CIFAR100_FOLDER / "train.bin"
    data = bytearray(path.read_bytes())
    data[9 * 3074 + place] = value
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=rf"train\.bin.* 9 .*{value}"):
        Cifar100(cifar100_root, "train", "fine", 30, 3)


def test_the_official_number_of_records_is_the_default(cifar10_root):
    with pytest.raises(CorruptFileError, match="10000 records"):
        Cifar10(cifar10_root)


def test_missing_files_and_unknown_options_raise(tmp_path, cifar10_root):
    (cifar10_root / cifar.CIFAR10_FOLDER / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"batch_4.*missing"):
        open_cifar10(cifar10_root)
    with pytest.raises(UserError, match="split"):
        Cifar10(cifar10_root, "dev")
    with pytest.raises(UserError, match="labels"):
        Cifar100(cifar10_root, "train", "middle")


def test_class_names_are_read_from_the_file_if_present(cifar10_root, cifar100_root):
    assert open_cifar10(cifar10_root).classes == cifar.CIFAR10_NAMES
    (cifar10_root / cifar.CIFAR10_FOLDER / "batches.meta.txt").write_text(
        "\n".join("abcdefghij") + "\n\n"
    )
    assert open_cifar10(cifar10_root).classes == tuple("abcdefghij")
    (cifar10_root / cifar.CIFAR10_FOLDER / "batches.meta.txt").write_text("a b")
    with pytest.raises(CorruptFileError, match="has 2 class names"):
        open_cifar10(cifar10_root)
    (cifar10_root / cifar.CIFAR10_FOLDER / "batches.meta.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CorruptFileError, match="not text"):
        open_cifar10(cifar10_root)
    coarse = Cifar100(cifar100_root, "train", "coarse", 30, 3)
    assert coarse.classes == cifar.COARSE_NAMES and len(cifar.COARSE_NAMES) == 20
    assert len(cifar.FINE_NAMES) == 100 and list(cifar.FINE_NAMES) == sorted(cifar.FINE_NAMES)


def test_digest_depends_on_data_split_and_labels(cifar10_root, cifar100_root):
    digests = {
        open_cifar10(cifar10_root, split).digest()
        for split in ("train", "val", "test", "train+val")
    }
    digests |= {
        Cifar100(cifar100_root, "train", kind, 30, 3).digest() for kind in ("fine", "coarse")
    }
    assert len(digests) == 6
    before = open_cifar10(cifar10_root).digest()
    assert before == open_cifar10(cifar10_root).digest()
    path = cifar10_root / cifar.CIFAR10_FOLDER / "data_batch_5.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert open_cifar10(cifar10_root).digest() != before


def test_real_cifar10(data_root, needs):
    needs(data_root, "cifar10")
    sizes = {"train": 45_000, "val": 5_000, "test": 10_000, "train+val": 50_000}
    for split, count in sizes.items():
        assert len(Cifar10(data_root, split)) == count
    whole = Cifar10(data_root, "train+val")
    assert torch.bincount(whole.labels(range(50_000))).tolist() == [5_000] * 10
    # The first training picture is a frog; its bytes are those of the published file.
    assert whole.classes[whole.labels([0])[0]] == "frog"
    published = find_dataset("cifar10").files[0]
    first = data_root / published.path
    assert f"sha1:{hashlib.sha1(first.read_bytes()).hexdigest()}" == published.checksum
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
