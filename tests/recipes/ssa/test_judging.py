"""Numbers before and after, and what is said of a search."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt import files
from overt.show.sample import load_gallery
from overt.supervise import Surrogates
from tests.recipes import tiny

SETS = ("data.train=6", "data.val=2", "data.test=6", "surrogate.probes=4", "supervise.loss=kl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Scenes with nothing taught, with what was found, and with the truth."""
    root = tmp_path_factory.mktemp("scenes")
    found = {}
    for target in ("none", "surrogate", "truth"):
        out = root / target / "seed-0"
        recipe = tiny.recipe("ssa-scenes", *SETS, f"supervise.target={target}")
        found[target] = out, tiny.run(recipe, out)
    return found


def test_before_is_what_the_first_network_reached(rows: dict[str, Any]) -> None:
    none, after = rows["none"][1]["ours"], rows["surrogate"][1]["ours"]
    for name in ("accuracy", "pointing", "mass_inside", "rank_correlation", "emd"):
        assert after[f"{name}_before"]["value"] == pytest.approx(none[name]["value"], abs=1e-6)
        assert f"{name}_before" not in none


def test_numbers_of_the_search_are_means_over_all_targets(rows: dict[str, Any]) -> None:
    out, results = rows["surrogate"]
    kept, ours = Surrogates(out / "surrogates"), results["ours"]
    base, best = kept.base(kept.ids).exp(), kept.best(kept.ids).exp()
    assert ours["base_score"]["value"] == pytest.approx(float(base.mean()), abs=1e-6)
    assert ours["best_score"]["value"] == pytest.approx(float(best.mean()), abs=1e-6)
    assert ours["improved"]["value"] == pytest.approx(float((best > base).float().mean()))
    assert ours["base_score"]["split"] == "train" and ours["base_score"]["n"] == len(kept)
    assert ours["search_seconds"]["value"] == files.read_json(out / "search.json")["seconds"]


def test_what_was_found_is_held_against_the_truth(rows: dict[str, Any]) -> None:
    ours = rows["surrogate"][1]["ours"]
    for who in ("surrogate", "own"):
        for name in ("pointing", "mass_inside", "rank_correlation"):
            assert ours[f"{who}_{name}"]["split"] == "train"


def test_the_truth_needs_no_first_network(rows: dict[str, Any]) -> None:
    out, results = rows["truth"]
    assert results["steps"] == 2 and not (out / "baseline").exists()
    assert not [name for name in results["ours"] if name.endswith("_before")]


def test_distances_are_of_the_first_samples_and_missing_elsewhere(rows: dict[str, Any]) -> None:
    out, results = rows["none"]
    samples = files.read_arrays(out / "samples.npz")
    there = ~np.isnan(samples["emd"])
    assert there.sum() == results["ours"]["emd"]["n"]
    assert results["ours"]["emd"]["direction"] == "lower"


def test_looks_before_and_after_the_search_are_drawn(rows: dict[str, Any]) -> None:
    out, _ = rows["surrogate"]
    shown = [one for one in load_gallery(out / "gallery") if one.group.endswith("look")]
    own = [one for one in shown if one.group == "own look"]
    best = [one for one in shown if one.group == "best look"]
    assert len(own) == len(best) > 0
    for before, after in zip(own, best, strict=True):
        assert before.id.rpartition(",")[0] == after.id.rpartition(",")[0]
        assert after.scores["probability_of_truth"] >= before.scores["probability_of_truth"]
        assert before.cells is not None and after.cells is not None
    kept = Surrogates(out / "surrogates")
    (first, *_) = best
    wanted = kept.target([first.id.rpartition(",")[0]]).weights.flatten().numpy()
    np.testing.assert_allclose(first.cells.flatten(), wanted, atol=1e-6)
