"""The other data sets that a network is taken to: those on disk.

Features for a linear SVM and the classes of STL-10 (Table 3 of Learn to Pay Attention), and shapes
in the photos of Object Discovery (figure 9). Photos are brought to one size; the paper says no more
than that it downsamples them. The two CIFARs and scenes are not in its Table 3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt import measure, models
from overt.data.batch import Batch
from overt.data.source import Source
from overt.data.stl10 import AS_CIFAR10
from overt.measure.transfer import Prepare
from overt.recipes.ltpa.maps import join_of

FOLDS = 5
PORTION = 256
SIZE = 32  # of scenes
DISCOVERED = (0, 1, 7)  # airplane, automobile and horse of CIFAR-10
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


@dataclass(frozen=True, eq=False)
class Answers:
    """One number an item of another data set, with the items' names: two networks can be paired."""

    ids: tuple[str, ...]
    values: Float[Tensor, " n"]


# --- features for an SVM


def right(model: Any, probe: Probe, prepare: Prepare = measure.as_they_are) -> Answers:
    """1 where a linear SVM (C = 1) is right about an item of a fold it has not seen, else 0."""
    features, labels = [], []
    ids: list[str] = []
    for batch in probe.batches():
        assert batch.labels is not None
        features.append(model.descriptor(model.encode(batch)).float())
        labels.append(batch.labels)
        ids += batch.ids
    found = measure.transfer_accuracy(torch.cat(features), torch.cat(labels), prepare, folds=FOLDS)
    return Answers(tuple(ids), found)


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


# --- the classes of CIFAR-10 on STL-10


def as_they_stand(
    root: Path | None, own: str, most: int | None, device: torch.device, side: int = SIZE
) -> dict[str, Probe]:
    """The two parts of STL-10 for a network of CIFAR-10, `stl10_train` and `stl10_test`.

    They share nine classes, so the paper asks such a network directly, without an SVM.
    """
    from overt import data
    from overt.data import sets

    if root is None or own != "cifar10" or "stl10" not in sets.present(root):
        return {}
    found = {}
    for name, split in (("stl10_train", "train+val"), ("stl10_test", "test")):
        part = data.Stl10(root, split)
        found[name] = Probe(part, spread(labels_of(part), most), device, side)
    return found


def right_as_it_stands(model: Any, probe: Probe) -> Answers:
    """1 where the class of CIFAR-10 is that of STL-10, else 0; NaN for monkeys, which it lacks.

    The paper does not say what it made of them. They could not have been right.
    """
    same = torch.tensor(AS_CIFAR10, device=probe.device)
    parts = [torch.empty(0, device=probe.device)]
    ids: list[str] = []
    for batch in probe.batches():
        assert batch.labels is not None
        parts.append(measure.accuracy(model(batch).prediction, same[batch.labels]))
        ids += batch.ids
    return Answers(tuple(ids), torch.cat(parts))


# --- shapes in photos


@dataclass(frozen=True, eq=False)
class Shapes:
    """Photos of Object Discovery with the masks of what they show, so many of each kind."""

    data: Any
    rows: Sequence[int]
    device: torch.device

    def __len__(self) -> int:
        return len(self.rows)


def discovery(
    root: Path | None, most: int, device: torch.device, side: int = SIZE
) -> Shapes | None:
    """Object Discovery where it lies below `root`, at most `most` photos, as many of each kind."""
    from overt import data
    from overt.data import sets

    if root is None or "discovery" not in sets.present(root):
        return None
    photos = data.ObjectDiscovery(root, size=(side, side), cells=(8, 8))
    each = max(1, most // len(photos.classes))
    kinds = photos.labels(range(len(photos))).tolist()
    rows = [row for row, kind in enumerate(kinds) if kinds[:row].count(kind) < each]
    return Shapes(photos, rows, device)


def jaccards(model: Any, shapes: Shapes, own: str) -> dict[str, Answers]:
    """The Jaccard of each photo by its kind, at the photo's own size: `jaccard_airplane` ...

    The map is that of `network_map`. NaN for a photo that does not show its thing. Nothing for a
    network without a map of its own.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    for start in range(0, len(shapes.rows), PORTION):
        rows = shapes.rows[start : start + PORTION]
        batch = shapes.data.batch(rows).to(shapes.device)
        maps = network_map(model, batch, own)
        if maps is None:
            return {}
        masks = shapes.data.masks(rows)
        for name, kind, one, mask in zip(batch.ids, batch.groups, maps, masks, strict=True):
            shape = measure.binarised(one.cpu()[None])
            score = float(measure.jaccard(shape, mask[None])[0])
            found.setdefault(f"jaccard_{kind}", []).append((name, score))
    return {
        name: Answers(tuple(ids), torch.tensor(scores))
        for name, (ids, scores) in ((name, zip(*each, strict=True)) for name, each in found.items())
    }


def network_map(model: Any, batch: Batch, own: str) -> Sequence[Tensor] | None:
    """The map by which a network cuts out things, on each photo; None for one without maps.

    The last two levels joined, or the only one. Of class activations, those of the right class, as
    in the paper, where the network knows it (airplanes, cars and horses of CIFAR-10), else those
    of the class it chose.
    """
    features = model.encode(batch)
    if isinstance(model, models.VGGGap):
        assert batch.labels is not None
        classes = model.decide(features).prediction.argmax(dim=-1)
        if own == "cifar10":
            classes = torch.tensor(DISCOVERED, device=classes.device)[batch.labels]
        return measure.combined_on_photos([model.class_activation(features, classes)])
    attention = model.decide(features).attention[-2:]
    return measure.combined_on_photos(attention, join_of(attention)) if attention else None


# --- which there are, and of what size


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
