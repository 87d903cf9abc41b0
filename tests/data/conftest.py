"""Fixtures that write image files, copy datasets and cache pixels as features."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.data.feature_cache import FeatureCache, FeatureKey, build_feature_cache
from overt.data.photo_dataset import PhotoDataset

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def write_photo() -> Write:
    """`write_photo(path, (height, width), value)` writes a uniform grey JPEG or PNG."""

    def write(path: Path, size: tuple[int, int] = (6, 8), value: int = 100) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path, quality=95)
        return path

    return write


@pytest.fixture
def root(shared_root: Path, tmp_path: Path) -> Path:
    """A writable copy of the files that the module's fixture `shared_root` writes once."""
    return shutil.copytree(shared_root, tmp_path / "copy")


@pytest.fixture(scope="session")
def cache_pixels() -> Callable[[Path, PhotoDataset], FeatureCache]:
    """`cache_pixels(folder, photos)` caches the pixels of photos as features, one per position."""

    def cache(folder: Path, photos: PhotoDataset) -> FeatureCache:
        key = FeatureKey("pixels", "none", "none", photos.digest())
        return build_feature_cache(folder, key, photos, lambda b: b.images.float().flatten(2).mT)

    return cache
