"""Every data set is a `Source`, and its batches are pure."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.cifar import CIFAR10_FOLDER, Cifar10
from overt.data.easyvqa import EasyVqa
from overt.data.resident import Resident
from overt.data.scenes.store import Scenes
from overt.data.source import Source
from overt.data.trec import FOLDER, TEST_FILE, TRAIN_FILE, Trec


def cifar(root: Path) -> Source:
    (root / CIFAR10_FOLDER).mkdir()
    records = np.random.default_rng(0).integers(0, 10, (4, 3073), dtype=np.uint8)
    (root / CIFAR10_FOLDER / "test_batch.bin").write_bytes(records.tobytes())
    return Cifar10(root, "test", records=4)


def resident(root: Path) -> Source:
    return Resident.of(cifar(root))


def trec(root: Path) -> Source:
    (root / FOLDER).mkdir()
    for name in (TRAIN_FILE, TEST_FILE):
        (root / FOLDER / name).write_bytes(b"NUM:date When ?\nHUM:ind Who is he ?\n" * 2)
    return Trec(root, "test", records=4, validation=1)


def scenes(root: Path) -> Source:
    return Scenes("train", 0, 4, cache=root)


def easyvqa(root: Path) -> Source:
    pytest.importorskip("easy_vqa")
    return EasyVqa(root, "test")


@pytest.mark.parametrize("make", [cifar, resident, trec, scenes, easyvqa])
def test_a_data_set_is_a_source_with_pure_batches(tmp_path, make):
    found = make(tmp_path)
    assert isinstance(found, Source) and len(found) >= 4
    assert isinstance(found.name, str) and isinstance(found.split, str)
    assert found.digest() == found.digest() and len(found.digest()) == 64
    first, second = found.batch([2, 0]), found.batch([2, 0])
    assert first.ids == second.ids and len(set(first.ids)) == len(first.ids)
    for field in fields(first):
        one, two = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, two), field.name
    alone = found.batch([0])
    assert alone.ids == first.ids[-len(alone) :]
    assert torch.equal(alone.labels, first.labels[-len(alone) :])


def test_other_things_are_no_source():
    assert not isinstance([1, 2], Source)
