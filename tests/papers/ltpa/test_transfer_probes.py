"""Transfer datasets: selection, number of items, and image size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overt.data.batch import Batch
from overt.data.scenes.classification import DominantScenes
from overt.metrics.transfer import transfer_accuracy, zca_whitening
from overt.papers.ltpa.config import LtpaModel, LtpaNetwork
from overt.papers.ltpa.model import build_network
from overt.papers.ltpa.transfer_probes import (
    FOLDS,
    TransferProbe,
    balanced_rows,
    class_labels,
    dataset_openers,
    open_probes,
    shrink_images,
    svm_scores,
)
from tests.experiments import tiny

CPU = torch.device("cpu")


class ToyDataset:
    """Images whose brightness is their class."""

    name, split = "toy", "test"

    def __init__(self, labels: list[int], side: int = 32) -> None:
        self.classes, self.side = torch.tensor(labels), side

    def __len__(self) -> int:
        return len(self.classes)

    def labels(self, rows: Any) -> torch.Tensor:
        return self.classes[list(rows)]

    def batch(self, rows: Any) -> Batch:
        chosen = self.labels(rows)
        side = self.side
        images = (100 * chosen.view(-1, 1, 1, 1) + 20).expand(-1, 3, side, side).to(torch.uint8)
        return Batch(tuple(map(str, rows)), images, labels=chosen)

    def digest(self) -> str:
        return "abc"


def test_balanced_rows_are_the_first_of_each_class() -> None:
    labels = torch.tensor([0, 1, 0, 1, 2] * 6)  # 12 zeros, 12 ones, 6 twos
    rows = balanced_rows(labels, 18)
    assert rows == sorted(rows) and len(rows) == 18
    assert torch.bincount(labels[rows]).tolist() == [6, 6, 6]
    assert rows[:5] == [0, 1, 2, 3, 4]
    assert torch.bincount(labels[balanced_rows(labels, 1)]).tolist() == [FOLDS] * 3
    assert balanced_rows(labels, None) == list(range(30))


def test_a_class_with_fewer_items_than_folds_is_left_out() -> None:
    labels = torch.tensor([0] * 5 + [1] * 4 + [2] * 7)
    assert set(labels[balanced_rows(labels, None)].tolist()) == {0, 2}
    assert balanced_rows(torch.tensor([0] * 5 + [1] * 4), None) == []


def test_an_svm_separates_classes_with_separable_features() -> None:
    torch.manual_seed(0)
    model = build_network(LtpaModel(LtpaNetwork.GAP, width=0.05), 3).eval()
    data = ToyDataset([0, 1] * 10)
    probe = TransferProbe(data, range(20), CPU)
    with torch.no_grad():
        found = svm_scores(model, probe)
        assert found.values.shape == (20,) and float(found.values.mean()) == 1
        assert found.ids == tuple(map(str, range(20)))
        features = model.descriptor(model.encode(data.batch(range(20))))
        wanted = transfer_accuracy(features, data.classes, zca_whitening)
        assert torch.equal(svm_scores(model, probe, zca_whitening).values, wanted)


def test_large_images_are_shrunk_by_block_means() -> None:
    images = torch.arange(4 * 4, dtype=torch.uint8).view(1, 1, 4, 4).expand(1, 3, 4, 4)
    found = shrink_images(Batch(("a",), images), 2)
    assert found.images is not None
    # 0 1 4 5 have the mean 2.5, which rounds to even
    assert found.images[0, 0].tolist() == [[2, 4], [10, 12]]
    assert shrink_images(found, 2) is found
    assert shrink_images(found, 32) is found  # nothing is enlarged
    large = ToyDataset([0, 1], 96)
    for probe, side in (
        (TransferProbe(large, [0, 1], CPU), 32),
        (TransferProbe(large, [0, 1], CPU, 48), 48),
    ):
        (batch,) = probe.batches()
        assert batch.images is not None and batch.images.shape[-1] == side


def test_scenes_are_always_a_probe_except_for_scenes_networks() -> None:
    (found,) = open_probes(None, "cifar10", 60, CPU)
    assert found.name == "scenes" and len(found) == 60
    assert open_probes(None, "scenes", 60, CPU) == ()
    assert len(open_probes(None, "cifar10", 3, CPU)[0]) == 30


def test_datasets_on_disk_are_found(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use_small_readers(monkeypatch)
    monkeypatch.setattr(
        "overt.data.catalog.available_datasets", lambda root: ("cifar10", "cifar100", "trec")
    )
    found = dataset_openers(few, 100)
    assert list(found) == ["cifar10", "cifar100", "scenes"]
    assert len(found["cifar10"]()) == 8
    # eight images of ten classes: no class has one for each fold
    assert [one.name for one in open_probes(few, "cifar100", 100, CPU)] == ["scenes"]


def test_class_labels_are_read_without_images_if_possible() -> None:
    scenes = DominantScenes("test", 1, 12, size=32)
    assert class_labels(scenes).tolist() == scenes.batch(range(12)).labels.tolist()
    assert class_labels(ToyDataset([2, 0])).tolist() == [2, 0]
