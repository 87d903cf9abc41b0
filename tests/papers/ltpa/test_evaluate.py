"""Evaluation of Learn to Pay Attention, in a run and per function."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overt import io
from overt.attention import Kind
from overt.data import object_discovery, stl10, uiuc_sports
from overt.papers.ltpa import config as ltpa
from overt.papers.ltpa.config import LtpaEvaluation, LtpaModel, LtpaNetwork
from overt.papers.ltpa.evaluate import LastLevel, cap_evaluation, positive_class_activation
from overt.papers.ltpa.model import build_network
from overt.testing import toy_batch
from overt.viz.gallery_sample import load_gallery
from tests.experiments import tiny
from tests.papers.ltpa.conftest import SMALL

EVALUATED = ("judge.items=8", "data.limit=64", "judge.pgd=2", "train.steps=1")
FOOLED = [f"fooled_{attack}_{steps}" for attack in ("fgsm", "pgd") for steps in (1, 2, 4, 8, 16)]


@pytest.mark.long
def test_a_run_reports_attacks_swaps_consistency_and_transfer(run: Callable[..., Any]) -> None:
    place, results = run("ltpa-cifar10", "model.score=scaled-dot", *EVALUATED)
    ours, samples = results["ours"], io.read_arrays(place / "samples.npz")
    swap = [f"{word}_{who}" for word in ("swapped",) for who in ("alike", "unlike")]
    swap += [f"moved_{who}_{g}x{g}" for who in ("alike", "unlike") for g in (8, 16)]
    wanted = {"ece", *FOOLED, *swap, "consistency", "consistency_others", "transfer_scenes"}
    assert wanted <= ours.keys()
    for name in wanted:
        assert ours[name]["direction"] in ("higher", "lower", "neither") and ours[name]["unit"]
    assert (ours["fooled_fgsm_8"]["n"], ours["fooled_pgd_8"]["n"]) == (8, 1)
    assert ours["transfer_scenes"]["n"] == 30  # a scene of each class for each fold
    for name in wanted & samples.keys():  # one row per sample, NaN where it was not evaluated
        assert len(samples[name]) == len(samples["id"])
        assert ours[name]["value"] == pytest.approx(float(np.nanmean(samples[name])), abs=1e-6)
        assert ours[name]["n"] == int((~np.isnan(samples[name])).sum())
    assert results["data"][-1]["name"] == "scenes" and results["data"][-1]["n"] == 30


@pytest.mark.long
def test_parametrised_scores_do_not_depend_on_the_query(run: Callable[..., Any]) -> None:
    _, results = run("ltpa-cifar10", *EVALUATED, "judge.fgsm=0", "judge.pgd=0", "judge.transfer=0")
    ours = results["ours"]
    for grid in ("8x8", "16x16"):
        assert ours[f"moved_unlike_{grid}"]["value"] < 1e-6
    assert ours["swapped_unlike"]["value"] == 0
    assert not [name for name in ours if name.startswith(("fooled", "transfer"))]


MAPS = {
    "vgg": [],
    "vgg-gap": ["activation_8x8", "cam_chosen", "cam_true"],
    "vgg-pan": ["16x16", "8x8", "joined", "activation_8x8"],
    "att2-concat-pc": [
        *("16x16", "8x8", "joined"),
        *("activation_16x16", "activation_8x8", "activation_joined"),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("label", list(MAPS))
def test_scenes_are_evaluated_with_their_masks(run: Callable[..., Any], label: str) -> None:
    sets = ltpa.model_changes(ltpa.table_models()[label])
    _, results = run("ltpa-scenes", *sets, *EVALUATED, "judge.fgsm=0", "judge.pgd=0")
    ours, names = results["ours"], [*MAPS[label], "gradient", "gradient_input", "centre", "uniform"]
    found = sorted(name.removeprefix("mass_") for name in ours if name.startswith("mass_"))
    assert found == sorted([*names, *(["inside"] if label != "vgg" else [])])
    for name in names:
        assert ours[f"pointing_{name}"]["n"] == 8
        assert (f"jaccard_{name}" in ours) is (name != "uniform")
    assert ours["pointing_uniform"]["value"] == pytest.approx(ours["mass_uniform"]["value"])


@pytest.mark.long
def test_the_report_shows_each_level_and_the_last_two_joined(run: Callable[..., Any]) -> None:
    place, _ = run("ltpa-cifar10", "model.levels=3")
    shown = load_gallery(place / "gallery")
    page = (place / "report.html").read_text()
    for sample in shown:
        shapes = {name: one.shape for name, one in sample.levels.items()}
        assert list(shapes) == ["32x32", "16x16", "8x8", "joined"]
        assert shapes["8x8"] == (8, 8) and shapes["joined"] == (32, 32)
        assert sample.cells is not None
        np.testing.assert_allclose(sample.levels["8x8"], sample.cells, rtol=1e-5)
        assert sample.levels["32x32"].sum() == pytest.approx(1, abs=1e-4)
    assert page.count('<figure class="level"') == 4 * len(shown)
    place, _ = run("ltpa-cifar10", "model.levels=1", out="one")
    assert all(not sample.levels for sample in load_gallery(place / "gallery"))
    assert '<figure class="level">' not in (place / "report.html").read_text()


# --- functions


def test_cap_evaluation_limits_items_for_small_test_sets() -> None:
    default = LtpaEvaluation()
    assert cap_evaluation(default, None) is default
    few = cap_evaluation(default, 512)
    assert (few.items, few.pgd, few.transfer) == (64, 8, 128)
    assert cap_evaluation(replace(default, transfer=None), 8).transfer == 2
    least = cap_evaluation(default, 1)
    assert (least.items, least.pgd, least.transfer) == (1, 1, 1)
    nothing = replace(default, items=0, pgd=0, transfer=0)
    assert cap_evaluation(nothing, 100) == nothing  # disabled analyses stay disabled


def test_last_level_evaluates_the_last_map() -> None:
    torch.manual_seed(0)
    net = build_network(LtpaModel(levels=3, width=0.05), 3).eval()
    last_level = LastLevel(net)
    features = last_level.encode(toy_batch())
    (one,) = last_level.decide(features).attention
    assert one.keys.find("image").shape == (8, 8)
    assert set(last_level.entropies) == {"entropy_8x8", "entropy_16x16", "entropy_32x32"}
    keep = {"image": torch.zeros(4, 64)}
    assert not torch.equal(
        last_level.decide(features, keep).prediction, last_level(toy_batch()).prediction
    )


def test_class_activation_maps_are_of_the_predicted_class() -> None:
    torch.manual_seed(0)
    net: Any = build_network(LtpaModel(LtpaNetwork.GAP, width=0.05), 3).eval()
    features = net.encode(toy_batch())
    chosen = net.decide(features).prediction.argmax(dim=-1)
    found = positive_class_activation(net, features, chosen)
    positive = net.class_activation(features, chosen).weights.clamp_min(0)
    torch.testing.assert_close(found.weights, positive / positive.sum(dim=-1, keepdim=True))
    assert found.kind is Kind.PROBABILITY
    (last_level,) = LastLevel(net).decide(features).attention
    assert torch.equal(last_level.weights, found.weights)


# --- other datasets


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a few items of CIFAR, STL-10, Event-8 and Object Discovery in official layouts."""
    root = tiny.write_datasets(tmp_path_factory.mktemp("more") / "root")
    dice = np.random.default_rng(3)
    folder = root / stl10.FOLDER
    folder.mkdir()
    for part in ("train", "test"):
        pictures = dice.integers(0, 256, (20, stl10.PIXELS), dtype=np.uint8)
        (folder / f"{part}_X.bin").write_bytes(pictures.tobytes())
        labels = np.array([1, 8] * 10, dtype=np.uint8)  # airplanes and monkeys
        (folder / f"{part}_y.bin").write_bytes(labels.tobytes())
    (folder / "fold_indices.txt").write_text("0 1\n" * 10)
    for name in ("a", "b", "c", "d", "e", "f", "g", "h"):
        (root / uiuc_sports.FOLDER / name).mkdir(parents=True)
        for number in range(5):
            photo = dice.integers(0, 256, (50, 40, 3), dtype=np.uint8)
            Image.fromarray(photo).save(root / uiuc_sports.FOLDER / name / f"{number}.jpg")
    for kind in object_discovery.KINDS:
        here = root / object_discovery.FOLDER / f"{kind.capitalize()}100"
        (here / "GroundTruth").mkdir(parents=True)
        for number in range(3):
            photo = dice.integers(0, 256, (30, 44, 3), dtype=np.uint8)
            Image.fromarray(photo).save(here / f"{number:04d}.jpg")
            mask = np.zeros((30, 44), dtype=bool)
            mask[5:20, 8:30] = number < 2  # the last photo does not show its object
            Image.fromarray(mask).save(here / "GroundTruth" / f"{number:04d}.png")
    return root


def allow_small_datasets(patch: pytest.MonkeyPatch) -> None:
    tiny.use_small_readers(patch)
    patch.setattr("overt.data.Stl10", partial(stl10.Stl10, records=20, validation=5))
    patch.setattr(
        "overt.data.ObjectDiscovery", partial(object_discovery.ObjectDiscovery, photos=None)
    )


ONLY = ("judge.fgsm=0", "judge.pgd=0", "judge.views=0", "judge.swap=false", "data.limit=100")


@pytest.mark.long
@pytest.mark.parametrize("label", ["att2-concat-pc", "vgg-gap", "vgg"])
def test_datasets_found_on_disk_are_evaluated(
    more: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, label: str
) -> None:
    allow_small_datasets(monkeypatch)
    sets = (
        *SMALL,
        *ltpa.model_changes(ltpa.table_models()[label]),
        *ONLY,
        "judge.items=24",
        "train.steps=1",
    )
    results = tiny.run(tiny.recipe("ltpa-cifar10", *sets), tmp_path / "run", data_root=more)
    ours = results["ours"]
    assert (ours["stl10_train"]["n"], ours["stl10_train"]["split"]) == (10, "train+val")
    assert (ours["stl10_test"]["n"], ours["stl10_test"]["split"]) == (10, "test")  # no monkeys
    assert ours["transfer_event8"]["n"] == 40 and ours["transfer_stl10"]["n"] == 20
    assert ours["transfer_scenes"]["n"] == 30
    for kind in object_discovery.KINDS:  # a network without maps has no segmentation
        assert (f"jaccard_{kind}" in ours) is (label != "vgg")
        if label != "vgg":
            assert ours[f"jaccard_{kind}"]["n"] == 2
    names = [(one["name"], one["split"], one["n"]) for one in results["data"][3:]]
    assert names == [
        ("stl10", "test", 20),
        ("event8", "all", 40),
        ("scenes", "test", 30),
        ("stl10", "train+val", 20),
        ("discovery", "all", 9),
    ]
    kept = io.read_arrays(tmp_path / "run" / "elsewhere.npz")
    for name in ("stl10_train", "transfer_event8", *(["jaccard_car"] if label != "vgg" else [])):
        assert len(kept[name]) == len(set(kept[f"{name}.id"].tolist()))
        assert ours[name]["value"] == pytest.approx(float(np.nanmean(kept[name])), abs=1e-6)
        assert ours[name]["n"] == int((~np.isnan(kept[name])).sum())
    assert kept["transfer_event8.id"][0] == "event8/a/0.jpg"
    assert set(results["groups"]["transfer"]) == {"stl10", "event8", "scenes"}
    paper = results["paper"]
    assert ("transfer_event8" in paper) and paper["transfer_event8"]["direction"] == "higher"


@pytest.mark.long
def test_networks_of_other_datasets_are_not_evaluated_on_stl10_classes(
    more: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow_small_datasets(monkeypatch)
    sets = (*SMALL, *ONLY, "judge.items=8", "train.steps=1", "judge.segment=false")
    recipe = tiny.recipe("ltpa-cifar100", *sets, "judge.whiten=true", "model.net=vgg-gap")
    ours = tiny.run(recipe, tmp_path / "run", data_root=more)["ours"]
    assert "transfer_stl10" in ours and "stl10_test" not in ours
    assert not [name for name in ours if name.startswith("jaccard")]
