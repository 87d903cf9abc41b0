"""The data sets that features are taken to (Table 3 of Learn to Pay Attention): those on disk.

Photos are brought to one size; the paper says no more than that it downsamples them. The two CIFARs
and scenes are not in its table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from overt import measure
from overt.data.batch import Batch
from overt.data.source import Source

FOLDS = 5
PORTION = 256
SIZE = 32  # of scenes
WORLD = 1  # the scenes that are drawn
SCENES = 1000  # as many as are drawn when all are asked for


@dataclass(frozen=True, eq=False)
class Probe:
    """Chosen items of a data set, which a linear SVM is to tell apart by a network's features."""

    data: Source
    rows: Sequence[int]
    device: torch.device
    side: int = SIZE

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        """The name of the data set."""
        return "scenes" if self.data.name.startswith("scenes") else self.data.name

    def batches(self) -> Iterator[Batch]:
        """The items, a portion at a time, none larger than `side`."""
        for start in range(0, len(self.rows), PORTION):
            batch = self.data.batch(self.rows[start : start + PORTION]).to(self.device)
            yield at_most(batch, self.side)


def right(model: Any, probe: Probe, prepare: Any = measure.as_they_are) -> Tensor:
    """1 where a linear SVM (C = 1) is right about an item of a fold it has not seen, else 0."""
    features, labels = [], []
    for batch in probe.batches():
        assert batch.labels is not None
        features.append(model.descriptor(model.encode(batch)).float())
        labels.append(batch.labels)
    found = measure.transfer_accuracy(torch.cat(features), torch.cat(labels), prepare, folds=FOLDS)
    return found


def probes(
    root: Path | None, own: str, most: int | None, device: torch.device, side: int = SIZE
) -> tuple[Probe, ...]:
    """Every data set below `root` but one's own, and scenes; `most` items of each, or all.

    As many of every class are taken, from the front, and one for each fold at least. A class with
    fewer is left out, and so is a set without two classes.
    """
    found = []
    for name, opened in readers(root, most, side).items():
        if name != own:
            data = opened()
            rows = spread(labels_of(data), most)
            if rows:
                found.append(Probe(data, rows, device, side))
    return tuple(found)


def readers(
    root: Path | None, most: int | None, side: int = SIZE
) -> dict[str, Callable[[], Source]]:
    """How the sets of Table 3 that lie below `root` are opened, the two CIFARs, and scenes."""
    from overt import data
    from overt.data import sets
    from overt.data.scenes.classify import DominantScenes

    def scenes() -> Source:
        drawn = SCENES if most is None else max(most, 6 * FOLDS)
        return DominantScenes("test", WORLD, min(drawn, SCENES), size=SIZE, cells=(8, 8))

    every: dict[str, Callable[[], Source]] = {"scenes": scenes}
    if root is None:
        return every
    size = (side, side)
    known: dict[str, Callable[[], Source]] = {
        "cifar10": lambda: data.Cifar10(root, "test"),
        "cifar100": lambda: data.Cifar100(root, "test"),
        "stl10": lambda: data.Stl10(root, "test"),
        "caltech101": lambda: data.caltech101(root, size=size),
        "caltech256": lambda: data.caltech256(root, size=size),
        "event8": lambda: data.event8(root, size=size),
        "action40": lambda: data.action40(root, "all", size=size),
        "scene67": lambda: data.scene67(root, "all", size=size),
    }
    here = sets.present(root)
    return {**{name: opened for name, opened in known.items() if name in here}, **every}


def labels_of(data: Source) -> Int[Tensor, " n"]:
    """The class of every item, without opening a photo where the set knows how."""
    everything = range(len(data))
    if hasattr(data, "labels"):
        found: Tensor = data.labels(everything)
        return found
    labels = data.batch(everything).labels
    assert labels is not None
    return labels


def spread(labels: Int[Tensor, " n"], most: int | None) -> list[int]:
    """The first items of every class, as many of each, `most` in all, in their order.

    Every class has one item a fold at least; those that have not are left out. No items where that
    leaves fewer than two classes.
    """
    places: dict[int, list[int]] = {}
    for place, label in enumerate(labels.tolist()):
        places.setdefault(label, []).append(place)
    enough = [rows for rows in places.values() if len(rows) >= FOLDS]
    if len(enough) < 2:
        return []
    each = None if most is None else max(FOLDS, most // len(enough))
    return sorted(row for rows in enough for row in rows[:each])


def at_most(batch: Batch, side: int) -> Batch:
    """The images, shrunk to `side` pixels by the mean of what a pixel covers if they are larger."""
    assert batch.images is not None
    if max(batch.images.shape[-2:]) <= side:
        return batch
    small = torch.nn.functional.interpolate(batch.images.float(), (side, side), mode="area")
    return replace(batch, images=small.round().to(torch.uint8), geometry=None, target=None)
