"""Bootstrapping Hard Attention: features of photos, computed once by a frozen CNN and cached."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overt.data import feature_cache
from overt.data.batch import Batch
from overt.data.feature_cache import FeatureCache, FeatureKey
from overt.data.photo_dataset import PhotoDataset
from overt.data.scenes.dataset import default_cache
from overt.data.vqa_dataset import PhotoInput, open_photos
from overt.errors import CorruptFileError, UserError
from overt.experiments.dataset_views import DatasetView
from overt.nn.image_backbones.frozen import (
    FrozenBackbone,
    frozen_efficientnet,
    frozen_from_folder,
    frozen_timm,
)
from overt.papers.han.config import HanDataset, HanQuestions
from overt.train import Reporter, processes

PLACES = {HanDataset.DAQUAR: ("daquar", "images"), HanDataset.VQA_CP: ("coco",)}
PARTS = ("train+val", "test")
TIMM = "timm:"
SHARD, BATCH = 128, 32  # photos per file, and per forward pass

OpenSplit = Callable[[str, PhotoInput], Any]


def open_cache(
    data: HanQuestions, root: Path, reader: OpenSplit, device: torch.device | str = "cpu"
) -> FeatureCache:
    """Open the feature cache that a recipe names, or that of its backbone, building it if needed.

    An interrupted build is resumed. While one process builds the cache, others wait for it.
    """
    if data.features is not None:
        return FeatureCache(Path(data.features))
    return cache_cells(all_photos(data, root, reader), data.backbone, data.size, device)


def cache_cells(
    photos: PhotoDataset, name: str, size: int, device: torch.device | str = "cpu"
) -> FeatureCache:
    """Return the cells of these photos from a backbone, stored in the user cache.

    A build reports its progress, and an interrupted one is resumed.
    """
    backbone = frozen_backbone(name, device)
    # Features of another size or crop are another cache.
    transform = f"{size} x {size}, middle crop, {backbone.pixels}"
    key = FeatureKey(backbone.name, backbone.weights, transform, photos.digest())
    folder = default_cache() / "features" / f"{photos.name}-{backbone.name}-{key.digest()[:16]}"
    if is_complete(folder, key):
        return FeatureCache(folder)

    def encode(batch: Batch) -> Tensor:
        assert batch.images is not None
        return backbone.cells(batch.images.to(device))

    reporter = Reporter(enabled=processes(str(device)).is_main)
    with reporter.stage(f"features of {photos.name}", len(photos), 0):
        return feature_cache.build_feature_cache(
            folder,
            key,
            photos,
            encode,
            SHARD,
            BATCH,
            lambda done, _: reporter.step(done, {}),
            wait=True,
        )


def is_complete(folder: Path, key: FeatureKey) -> bool:
    """Return whether a cache of this key is finished; its bytes are verified on reading."""
    try:
        return FeatureCache(folder).key == key
    except (UserError, CorruptFileError):
        return False


def frozen_backbone(name: str, device: torch.device | str = "cpu") -> FrozenBackbone:
    """Load a backbone by name: an EfficientNet-Lite, `timm:NAME`, or a folder."""
    if name.startswith(TIMM):
        return frozen_timm(name.removeprefix(TIMM), device)
    if name.startswith("efficientnet-lite"):
        return frozen_efficientnet(name, device)
    if not Path(name).is_dir():
        raise UserError(
            f"data.backbone={name!r} is not a folder: use a folder with a Hugging Face CNN, "
            "efficientnet-lite0, or timm:NAME."
        )
    return frozen_from_folder(Path(name), device)


def all_photos(data: HanQuestions, root: Path, reader: OpenSplit) -> PhotoDataset:
    """Open all photos of a dataset, each once, at the size of the backbone input."""
    look = PhotoInput((data.size, data.size))
    # A dict keeps each name once and in order: the digest of the photos depends on the order.
    names: dict[str, None] = {}
    for part in PARTS:
        shown = reader(part, look).photos()
        known = shown.ids(range(len(shown)))
        names |= dict.fromkeys(name.removeprefix(f"{shown.name}/") for name in known)
    return open_photos(str(data.name), "all", root.joinpath(*PLACES[data.name]), list(names), look)


class PhotosWithFeatures(DatasetView[Any]):
    """Questions with both the photo, for the gallery, and its cached features, for the model."""

    def __init__(self, data: Any, cache: FeatureCache) -> None:
        super().__init__(data)
        self.cache, self.classes = cache, data.classes

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of the dataset, with the features of its photos."""
        found = super().batch(indices)
        return replace(found, features=self.cache.get(self.data.photo_ids(indices)))

    def digest(self) -> str:
        """Return a hash of the dataset and of the features."""
        return str(FeatureKey("", self.data.digest(), "", self.cache.digest()).digest())
