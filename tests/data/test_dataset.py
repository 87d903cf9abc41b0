"""Every dataset implements `Dataset`, and its batches are deterministic."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.cifar import CIFAR10_FOLDER, Cifar10
from overt.data.dataset import Dataset
from overt.data.easy_vqa import EasyVqa
from overt.data.in_memory_images import InMemoryImages
from overt.data.scenes.dataset import Scenes
from overt.data.trec import FOLDER, TEST_FILE, TRAIN_FILE, Trec


def make_cifar(root: Path) -> Dataset:
    (root / CIFAR10_FOLDER).mkdir()
    records = np.random.default_rng(0).integers(0, 10, (4, 3073), dtype=np.uint8)
    (root / CIFAR10_FOLDER / "test_batch.bin").write_bytes(records.tobytes())
    return Cifar10(root, "test", records=4)


def make_in_memory(root: Path) -> Dataset:
    return InMemoryImages.from_dataset(make_cifar(root))


def make_trec(root: Path) -> Dataset:
    (root / FOLDER).mkdir()
    for name in (TRAIN_FILE, TEST_FILE):
        (root / FOLDER / name).write_bytes(b"NUM:date When ?\nHUM:ind Who is he ?\n" * 2)
    return Trec(root, "test", records=4, validation=1)


def make_scenes(root: Path) -> Dataset:
    return Scenes("train", 0, 4, cache=root)


def make_easyvqa(root: Path) -> Dataset:
    pytest.importorskip("easy_vqa")
    return EasyVqa(root, "test")


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [make_cifar, make_in_memory, make_trec, make_scenes, make_easyvqa],
    ids=["cifar", "in_memory", "trec", "scenes", "easyvqa"],
)
def test_datasets_give_the_same_batch_twice(tmp_path, make):
    found = make(tmp_path)
    assert isinstance(found, Dataset) and len(found) >= 4
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


def test_a_list_is_not_a_dataset():
    assert not isinstance([1, 2], Dataset)
