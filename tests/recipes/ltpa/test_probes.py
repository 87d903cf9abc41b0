"""Other data sets that features are taken to: which, how many items, at what size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overt import measure
from overt.data.batch import Batch
from overt.data.scenes.classify import DominantScenes
from overt.recipes.ltpa.building import network
from overt.recipes.ltpa.probes import (
    FOLDS,
    Probe,
    at_most,
    labels_of,
    probes,
    readers,
    right,
    spread,
)
from overt.recipes.ltpa.recipe import Model, Net
from tests.recipes import tiny

CPU = torch.device("cpu")


class Toy:
    """Pictures of 2 x 2 whose brightness is their class."""

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


def test_items_are_the_first_of_every_class() -> None:
    labels = torch.tensor([0, 1, 0, 1, 2] * 6)  # 12 zeros, 12 ones, 6 twos
    rows = spread(labels, 18)
    assert rows == sorted(rows) and len(rows) == 18
    assert torch.bincount(labels[rows]).tolist() == [6, 6, 6]
    assert rows[:5] == [0, 1, 2, 3, 4]
    assert torch.bincount(labels[spread(labels, 1)]).tolist() == [FOLDS] * 3
    assert spread(labels, None) == list(range(30))


def test_a_class_that_cannot_be_in_every_fold_is_left_out() -> None:
    labels = torch.tensor([0] * 5 + [1] * 4 + [2] * 7)
    assert set(labels[spread(labels, None)].tolist()) == {0, 2}
    assert spread(torch.tensor([0] * 5 + [1] * 4), None) == []


def test_an_svm_tells_apart_what_the_features_tell_apart() -> None:
    torch.manual_seed(0)
    model = network(Model(Net.GAP, width=0.05), 3).eval()
    data = Toy([0, 1] * 10)
    probe = Probe(data, range(20), CPU)
    with torch.no_grad():
        found = right(model, probe)
        assert found.values.shape == (20,) and float(found.values.mean()) == 1
        assert found.ids == tuple(map(str, range(20)))
        features = model.descriptor(model.encode(data.batch(range(20))))
        wanted = measure.transfer_accuracy(features, data.classes, measure.whitening)
        assert torch.equal(right(model, probe, measure.whitening).values, wanted)


def test_large_pictures_are_shrunk_by_their_means() -> None:
    images = torch.arange(4 * 4, dtype=torch.uint8).view(1, 1, 4, 4).expand(1, 3, 4, 4)
    found = at_most(Batch(("a",), images), 2)
    assert found.images is not None
    # 0 1 4 5 have the mean 2.5, which rounds to even
    assert found.images[0, 0].tolist() == [[2, 4], [10, 12]]
    assert at_most(found, 2) is found
    assert at_most(found, 32) is found  # nothing is enlarged
    large = Toy([0, 1], 96)
    for probe, side in ((Probe(large, [0, 1], CPU), 32), (Probe(large, [0, 1], CPU, 48), 48)):
        (batch,) = probe.batches()
        assert batch.images is not None and batch.images.shape[-1] == side


def test_scenes_are_always_there_and_never_their_own_probe() -> None:
    (found,) = probes(None, "cifar10", 60, CPU)
    assert found.name == "scenes" and len(found) == 60
    assert probes(None, "scenes", 60, CPU) == ()
    assert len(probes(None, "cifar10", 3, CPU)[0]) == 30


def test_sets_on_disk_are_found(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.expect_few(monkeypatch)
    monkeypatch.setattr("overt.data.sets.present", lambda root: ("cifar10", "cifar100", "trec"))
    found = readers(few, 100)
    assert list(found) == ["cifar10", "cifar100", "scenes"]
    assert len(found["cifar10"]()) == 8
    # eight pictures of ten classes: no class has one for each fold
    assert [one.name for one in probes(few, "cifar100", 100, CPU)] == ["scenes"]


def test_labels_are_read_without_pictures_where_they_can_be() -> None:
    scenes = DominantScenes("test", 1, 12, size=32)
    assert labels_of(scenes).tolist() == scenes.batch(range(12)).labels.tolist()
    assert labels_of(Toy([2, 0])).tolist() == [2, 0]
