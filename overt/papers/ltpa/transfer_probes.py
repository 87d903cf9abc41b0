"""Learn to Pay Attention: transfer of a network to other datasets on disk.

Features for a linear SVM and the classes of STL-10 (Table 3), and segmentation of Object Discovery
photos (figure 9). Photos are resized to one size; the paper only says that it downsamples them. The
two CIFARs and scenes are not in its Table 3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt import data as datasets
from overt import metrics
from overt.data import catalog
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.scenes.classification import DominantScenes
from overt.data.stl10 import AS_CIFAR10
from overt.geometry import resize_by_area
from overt.metrics.segmentation import binarize_otsu, combine_levels_on_photos, jaccard
from overt.metrics.transfer import FitTransform, no_preprocessing, transfer_accuracy
from overt.papers.ltpa.maps import join_function
from overt.papers.ltpa.vgg import VGGGap

FOLDS = 5
PORTION = 256
SIZE = 32  # of scenes
DISCOVERED = (0, 1, 7)  # airplane, automobile and horse of CIFAR-10
WORLD = 1  # seed of the scenes
SCENES = 1000  # maximum number of scenes


@dataclass(frozen=True, eq=False)
class TransferProbe:
    """Items of a dataset that a linear SVM classifies by a network's features."""

    data: Dataset
    rows: Sequence[int]
    device: torch.device
    side: int = SIZE

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        """Return the name of the dataset."""
        return "scenes" if self.data.name.startswith("scenes") else self.data.name

    def batches(self) -> Iterator[Batch]:
        """Yield the items in batches, none larger than `side`."""
        for start in range(0, len(self.rows), PORTION):
            batch = self.data.batch(self.rows[start : start + PORTION]).to(self.device)
            yield shrink_images(batch, self.side)


@dataclass(frozen=True, eq=False)
class TransferScores:
    """One score per item of another dataset, with the item ids, so that networks can be paired."""

    ids: tuple[str, ...]
    values: Float[Tensor, " n"]


# --- features for an SVM


def svm_scores(
    model: Any, probe: TransferProbe, prepare: FitTransform = no_preprocessing
) -> TransferScores:
    """Return 1 where a linear SVM (C = 1) is right about an item of a held-out fold, else 0."""
    features, labels = [], []
    ids: list[str] = []
    for batch in probe.batches():
        assert batch.labels is not None
        features.append(model.descriptor(model.encode(batch)).float())
        labels.append(batch.labels)
        ids += batch.ids
    found = transfer_accuracy(torch.cat(features), torch.cat(labels), prepare, folds=FOLDS)
    return TransferScores(tuple(ids), found)


def open_probes(
    root: Path | None, own: str, most: int | None, device: torch.device, side: int = SIZE
) -> tuple[TransferProbe, ...]:
    """Open scenes and every dataset below `root` except `own`; `most` items of each, or all.

    The same number per class is taken, from the front, at least one per fold. Classes with fewer
    items are dropped, and so is a dataset without two classes.
    """
    found = []
    for name, opened in dataset_openers(root, most, side).items():
        if name != own:
            data = opened()
            rows = balanced_rows(class_labels(data), most)
            if rows:
                found.append(TransferProbe(data, rows, device, side))
    return tuple(found)


# --- the classes of CIFAR-10 on STL-10


def open_stl10(
    root: Path | None, own: str, most: int | None, device: torch.device, side: int = SIZE
) -> dict[str, TransferProbe]:
    """Open the two splits of STL-10 for a network of CIFAR-10, `stl10_train` and `stl10_test`.

    They share nine classes, so the paper evaluates such a network directly, without an SVM.
    """
    if root is None or own != "cifar10" or "stl10" not in catalog.available_datasets(root):
        return {}
    found = {}
    # Both splits are test data here: the network was trained on CIFAR-10 alone.
    for name, split in (("stl10_train", "train+val"), ("stl10_test", "test")):
        part = datasets.Stl10(root, split)
        found[name] = TransferProbe(part, balanced_rows(class_labels(part), most), device, side)
    return found


def stl10_scores(model: Any, probe: TransferProbe) -> TransferScores:
    """Return 1 where the predicted class of CIFAR-10 is that of STL-10, else 0; NaN for monkeys.

    CIFAR-10 has no monkeys, and the paper does not say how it counts them; they could not be right.
    """
    same = torch.tensor(AS_CIFAR10, device=probe.device)
    # An empty part, so that `cat` also works without items.
    parts = [torch.empty(0, device=probe.device)]
    ids: list[str] = []
    for batch in probe.batches():
        assert batch.labels is not None
        parts.append(metrics.accuracy(model(batch).prediction, same[batch.labels]))
        ids += batch.ids
    return TransferScores(tuple(ids), torch.cat(parts))


# --- segmentation of photos


@dataclass(frozen=True, eq=False)
class DiscoveryPhotos:
    """Photos of Object Discovery with object masks, the same number per class."""

    data: Any
    rows: Sequence[int]
    device: torch.device

    def __len__(self) -> int:
        return len(self.rows)


def open_discovery(
    root: Path | None, most: int, device: torch.device, side: int = SIZE
) -> DiscoveryPhotos | None:
    """Open at most `most` photos of Object Discovery below `root`, the same number per class."""
    if root is None or "discovery" not in catalog.available_datasets(root):
        return None
    photos = datasets.ObjectDiscovery(root, size=(side, side), cells=(8, 8))
    each = max(1, most // len(photos.classes))
    kinds = photos.labels(range(len(photos))).tolist()
    rows = [row for row, kind in enumerate(kinds) if kinds[:row].count(kind) < each]
    return DiscoveryPhotos(photos, rows, device)


def discovery_jaccard(model: Any, shapes: DiscoveryPhotos, own: str) -> dict[str, TransferScores]:
    """Return the Jaccard of each photo by class, at its own size: `jaccard_airplane` ...

    The map is that of `network_map`. NaN for a photo that does not show its object. Empty for a
    network without a map.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    for start in range(0, len(shapes.rows), PORTION):
        rows = shapes.rows[start : start + PORTION]
        batch = shapes.data.batch(rows).to(shapes.device)
        maps = network_map(model, batch, own)
        if maps is None:
            return {}
        masks = shapes.data.masks(rows)
        # Photos have different sizes, so their maps are thresholded one at a time.
        for name, kind, one, mask in zip(batch.ids, batch.groups, maps, masks, strict=True):
            shape = binarize_otsu(one.cpu()[None])
            score = float(jaccard(shape, mask[None])[0])
            found.setdefault(f"jaccard_{kind}", []).append((name, score))
    return {
        name: TransferScores(tuple(ids), torch.tensor(scores))
        for name, (ids, scores) in ((name, zip(*each, strict=True)) for name, each in found.items())
    }


def network_map(model: Any, batch: Batch, own: str) -> Sequence[Tensor] | None:
    """Return the map that segments each photo; None for a network without maps.

    The last two levels joined, or the only one. With class activations, those of the true class, as
    in the paper, if the network has it (airplanes, cars and horses of CIFAR-10), else those of the
    predicted class.
    """
    features = model.encode(batch)
    if isinstance(model, VGGGap):
        assert batch.labels is not None
        classes = model.decide(features).prediction.argmax(dim=-1)
        if own == "cifar10":
            classes = torch.tensor(DISCOVERED, device=classes.device)[batch.labels]
        return combine_levels_on_photos([model.class_activation(features, classes)])
    attention = model.decide(features).attention[-2:]
    return combine_levels_on_photos(attention, join_function(attention)) if attention else None


# --- datasets


def dataset_openers(
    root: Path | None, most: int | None, side: int = SIZE
) -> dict[str, Callable[[], Dataset]]:
    """Return functions that open scenes, and the CIFARs and Table 3 datasets below `root`."""

    def scenes() -> Dataset:
        drawn = SCENES if most is None else max(most, 6 * FOLDS)
        return DominantScenes("test", WORLD, min(drawn, SCENES), size=SIZE, cells=(8, 8))

    every: dict[str, Callable[[], Dataset]] = {"scenes": scenes}
    if root is None:
        return every
    size = (side, side)
    known: dict[str, Callable[[], Dataset]] = {
        "cifar10": lambda: datasets.Cifar10(root, "test"),
        "cifar100": lambda: datasets.Cifar100(root, "test"),
        "stl10": lambda: datasets.Stl10(root, "test"),
        "caltech101": lambda: datasets.caltech101(root, size=size),
        "caltech256": lambda: datasets.caltech256(root, size=size),
        "event8": lambda: datasets.event8(root, size=size),
        "action40": lambda: datasets.action40(root, "all", size=size),
        "scene67": lambda: datasets.scene67(root, "all", size=size),
    }
    here = catalog.available_datasets(root)
    return {**{name: opened for name, opened in known.items() if name in here}, **every}


def class_labels(data: Dataset) -> Int[Tensor, " n"]:
    """Return the class of every item, without opening photos where the dataset can."""
    everything = range(len(data))
    if hasattr(data, "labels"):
        found: Tensor = data.labels(everything)
        return found
    labels = data.batch(everything).labels
    assert labels is not None
    return labels


def balanced_rows(labels: Int[Tensor, " n"], most: int | None) -> list[int]:
    """Return the first items of every class, the same number per class, `most` in all, in order.

    Every class has at least one item per fold; others are dropped. Empty if that leaves fewer than
    two classes.
    """
    places: dict[int, list[int]] = {}
    for place, label in enumerate(labels.tolist()):
        places.setdefault(label, []).append(place)
    enough = [rows for rows in places.values() if len(rows) >= FOLDS]
    if len(enough) < 2:
        return []
    each = None if most is None else max(FOLDS, most // len(enough))
    return sorted(row for rows in enough for row in rows[:each])


def shrink_images(batch: Batch, side: int) -> Batch:
    """Downsample images larger than `side` pixels by area averaging."""
    assert batch.images is not None
    if max(batch.images.shape[-2:]) <= side:
        return batch
    # Back to bytes: networks normalize bytes only. The geometry and the target describe the
    # original pixels.
    small = resize_by_area(batch.images.float(), (side, side))
    return replace(batch, images=small.round().to(torch.uint8), geometry=None, target=None)
