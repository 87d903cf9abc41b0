"""Caches of features: by which name a backbone goes, and that one cache serves every part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overt.data import daquar
from overt.data.asked import Look
from overt.errors import BadInput
from overt.models.photos.frozen import Frozen
from overt.recipes.han import features as han_features
from overt.recipes.han.features import Pictured, all_there, cache_of, frozen, photos_of
from overt.recipes.han.recipe import Files, Questions
from tests.recipes import asked_files

DATA = Questions(Files.DAQUAR, size=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asked_files.write(tmp_path_factory.mktemp("asked"))


def reader(root: Path) -> Any:
    return lambda split, look: daquar.Daquar(root, split, look=look, questions=None, validation=2)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A backbone that means four quarters; how many photos it was shown."""
    shown: list[int] = []

    def see(images: torch.Tensor) -> torch.Tensor:
        shown.append(len(images))
        return torch.nn.functional.avg_pool2d(images.float(), 16)

    monkeypatch.setattr(han_features, "frozen", lambda name, device: Frozen("toy", "w", "x", see))
    monkeypatch.setattr(han_features, "default_cache", lambda: tmp_path)
    return shown


def test_one_cache_serves_every_part_and_is_made_once(root: Path, toy: list[int]) -> None:
    cache = cache_of(DATA, root, reader(root))
    assert sum(toy) == 12 and len(cache) == 12 and cache.shape == (4, 3)
    for split in ("train", "val", "test"):
        part = reader(root)(split, Look((32, 32)))
        assert cache.get(part.photo_ids(range(len(part)))).shape == (len(part), 4, 3)
    again = cache_of(DATA, root, reader(root))
    assert sum(toy) == 12 and again.folder == cache.folder
    other = cache_of(Questions(Files.DAQUAR, size=64), root, reader(root))
    assert other.folder != cache.folder and other.shape == (16, 3)
    assert all_there(cache.folder, cache.key) and not all_there(cache.folder, other.key)
    assert not all_there(root, cache.key)


def test_a_build_that_was_stopped_is_finished(root: Path, toy: list[int]) -> None:
    cache = cache_of(DATA, root, reader(root))
    (cache.folder / "shard-00000/features.npy").write_bytes(b"cut off")
    assert cache_of(DATA, root, reader(root)).get(["daquar/image3.jpg"]).shape == (1, 4, 3)
    assert sum(toy) == 24


def test_a_photo_and_its_features_are_of_one_question(root: Path, toy: list[int]) -> None:
    cache = cache_of(DATA, root, reader(root))
    data = reader(root)("test", Look((32, 32)))
    batch = Pictured(data, cache).batch([7, 0, 1])
    assert batch.images is not None and batch.features is not None
    mean = torch.nn.functional.avg_pool2d(batch.images.float(), 16)[batch.image_index]
    torch.testing.assert_close(batch.features, mean.flatten(2).mT)
    assert Pictured(data, cache).digest() != data.digest()


def test_all_photos_stand_in_the_gallery_once(root: Path) -> None:
    found = photos_of(DATA, root, reader(root))
    assert len(found) == 12 and found.size == (32, 32)
    assert found.ids([0]) == ("daquar/image1.jpg",)


def test_names_of_backbones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def noted(name: str) -> Any:
        def make(what: object, device: object) -> Frozen:
            asked.append((name, what))
            return Frozen(name, "", "", lambda images: images.float())

        return make

    for name in ("of_timm", "of_efficientnet", "of_folder"):
        monkeypatch.setattr(han_features, name, noted(name))
    frozen("timm:resnet101")
    frozen("efficientnet-lite2")
    frozen(str(tmp_path))
    assert asked == [
        ("of_timm", "resnet101"),
        ("of_efficientnet", "efficientnet-lite2"),
        ("of_folder", tmp_path),
    ]
    with pytest.raises(BadInput, match=r"data\.backbone='resnet' is no folder"):
        frozen("resnet")


def test_a_build_says_how_far_it_is_and_goes_on_from_there(
    root: Path, toy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(han_features, "SHARD", 5)
    monkeypatch.setattr(han_features, "BATCH", 5)

    def step(self: Any, at: int, means: Any) -> None:
        told.append(at)
        if len(told) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(han_features.Reporter, "step", step)
    with pytest.raises(KeyboardInterrupt):
        cache_of(DATA, root, reader(root))
    assert told == [5, 10] and sum(toy) == 10
    assert len(cache_of(DATA, root, reader(root))) == 12
    assert told == [5, 10, 5, 10, 12] and sum(toy) == 12  # photos that were there stay
