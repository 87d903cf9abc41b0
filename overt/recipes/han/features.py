"""Features of the photos of a data set: made once by a frozen CNN, and kept in a cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overt.data import features
from overt.data.asked import Look, gallery
from overt.data.batch import Batch
from overt.data.features import FeatureCache, Key
from overt.data.photos import PhotoSet
from overt.data.scenes.store import default_cache
from overt.errors import BadInput, Damaged
from overt.models.photos.frozen import Frozen, of_efficientnet, of_folder, of_timm
from overt.recipes.han.recipe import Files, Questions
from overt.train import Reporter, processes

PLACES = {Files.DAQUAR: ("daquar", "images"), Files.VQA_CP: ("coco",)}
PARTS = ("train+val", "test")
TIMM = "timm:"
SHARD, BATCH = 128, 32  # photos that are written, and looked at, together

Open = Callable[[str, Look], Any]


def cache_of(
    data: Questions, root: Path, reader: Open, device: torch.device | str = "cpu"
) -> FeatureCache:
    """The cache that a recipe names, or that of its backbone, made where it is not there yet.

    A build that was stopped goes on where it was. While one process makes it, others wait for it.
    """
    if data.features is not None:
        return FeatureCache(Path(data.features))
    return cells_of(photos_of(data, root, reader), data.backbone, data.size, device)


def cells_of(
    photos: PhotoSet, name: str, size: int, device: torch.device | str = "cpu"
) -> FeatureCache:
    """The cells that a backbone makes of these photos, kept under the cache of the user.

    A build says how far it is, and one that was stopped goes on where it was.
    """
    backbone = frozen(name, device)
    transform = f"{size} x {size}, middle crop, {backbone.pixels}"
    key = Key(backbone.name, backbone.weights, transform, photos.digest())
    folder = default_cache() / "features" / f"{photos.name}-{backbone.name}-{key.digest()[:16]}"
    if all_there(folder, key):
        return FeatureCache(folder)

    def encode(batch: Batch) -> Tensor:
        assert batch.images is not None
        return backbone.cells(batch.images.to(device))

    reporter = Reporter(enabled=processes(str(device)).first)
    with reporter.stage(f"features of {photos.name}", len(photos), 0):
        return features.build(
            folder,
            key,
            photos,
            encode,
            SHARD,
            BATCH,
            lambda done, _: reporter.step(done, {}),
            wait=True,
        )


def all_there(folder: Path, key: Key) -> bool:
    """Whether a cache of this key is finished; its bytes are checked when they are read."""
    try:
        return FeatureCache(folder).key == key
    except (BadInput, Damaged):
        return False


def frozen(name: str, device: torch.device | str = "cpu") -> Frozen:
    """The backbone of a name: an EfficientNet-Lite, `timm:NAME`, or a folder."""
    if name.startswith(TIMM):
        return of_timm(name.removeprefix(TIMM), device)
    if name.startswith("efficientnet-lite"):
        return of_efficientnet(name, device)
    if not Path(name).is_dir():
        raise BadInput(
            f"data.backbone={name!r} is no folder; name one with a CNN as Hugging Face writes it, "
            "efficientnet-lite0, or timm:NAME."
        )
    return of_folder(Path(name), device)


def photos_of(data: Questions, root: Path, reader: Open) -> PhotoSet:
    """All photos of a set, each once, on the canvas that the backbone sees."""
    look = Look((data.size, data.size))
    names: dict[str, None] = {}
    for part in PARTS:
        shown = reader(part, look).photos()
        known = shown.ids(range(len(shown)))
        names |= dict.fromkeys(name.removeprefix(f"{shown.name}/") for name in known)
    return gallery(str(data.name), "all", root.joinpath(*PLACES[data.name]), list(names), look)


class Pictured:
    """Questions with the photo and with its cached features: to look at one, and show the other."""

    def __init__(self, dataset: Any, cache: FeatureCache) -> None:
        self.dataset, self.cache = dataset, cache
        self.name, self.split, self.classes = dataset.name, dataset.split, dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The batch of the data set, with the features of its photos."""
        found = self.dataset.batch(indices)
        return replace(found, features=self.cache.get(self.dataset.photo_ids(indices)))

    def digest(self) -> str:
        """A hash of the data set and of what the features are."""
        return str(Key("", self.dataset.digest(), "", self.cache.digest()).digest())
