"""Warm start: table rows share the first network and its targets, verified before use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import WARM_START_FILE, load_weights
from overt.nn import TextClassifier
from overt.papers.ssa import warm_start
from tests.experiments import tiny

SETS = ("surrogate.texts=6", "supervise.loss=mse")
RunFixture = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunFixture:
    """Return `run("row", ...)`: it runs a small row of a table in `tmp_path`."""
    tiny.use_small_readers(monkeypatch)

    def run(row: str, *sets: str, seed: int = 0) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / row / f"seed-{seed}"
        recipe = tiny.recipe("ssa-trec", *SETS, *sets)
        return out, tiny.run(recipe, out, data_root=few, seed=seed)

    return run


def read_warm_start(out: Path) -> list[str]:
    """Read which rows gave a run its first network and targets."""
    sources = io.read_json(out / WARM_START_FILE)
    return [str(one and Path(one).parent.parent.name) for one in sources.values()]


@pytest.mark.long
def test_rows_start_from_finished_sibling_runs(run: RunFixture) -> None:
    run("none", "supervise.target=none")
    first, found = run("mse")
    other, again = run("shuffled", "supervise.target=shuffled")
    assert read_warm_start(first) == ["none", "None"] and read_warm_start(other) == ["none", "mse"]
    assert found["steps"] == again["steps"] == 2  # the first training was reused
    assert not (other / "surrogates").exists() and not (other / "baseline").exists()
    for name in ("base_score", "best_score", "improved", "search_seconds", "accuracy_before"):
        assert found["ours"][name] == again["ours"][name]


@pytest.mark.long
def test_a_network_trained_twice_is_not_used_as_baseline(run: RunFixture) -> None:
    longer = "supervise.target=none", "supervise.start=baseline"
    assert read_warm_start(run("a-trained-on", *longer)[0]) == ["None", "None"]
    place, _ = run("mse")
    baseline = io.read_json(place / WARM_START_FILE)["baseline"]
    assert Path(baseline).parts[-3:] == ("a-trained-on", "seed-0", "baseline")


@pytest.mark.long
def test_a_warm_start_does_not_change_the_results(
    run: RunFixture, tmp_path: Path, few: Path
) -> None:
    run("none", "supervise.target=none")
    sibling, _ = run("mse")
    alone = tmp_path / "alone"
    tiny.run(tiny.recipe("ssa-trec", *SETS), alone, data_root=few)
    for name in ("model/model.safetensors", "samples.npz"):
        assert (sibling / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("sets", ["model.hops=2", "train.rate=0.1", "data.limit=8"])
def test_runs_with_other_settings_are_not_a_warm_start(run: RunFixture, sets: str) -> None:
    run("none", "supervise.target=none")
    assert read_warm_start(run("mse", sets)[0]) == ["None", "None"]


def test_settings_missing_in_old_runs_count_as_their_default() -> None:
    recipe = tiny.recipe("ssa-trec", *SETS)
    theirs = settings.to_json(recipe)
    del theirs["model.penalty"]
    assert warm_start.same_settings(theirs, recipe, warm_start.OF_BASELINE)
    other = tiny.recipe("ssa-trec", *SETS, "model.penalty=0.5")
    assert not warm_start.same_settings(theirs, other, warm_start.OF_BASELINE)


@pytest.mark.long
def test_targets_of_another_search_are_not_used(run: RunFixture) -> None:
    run("mse")
    assert read_warm_start(run("less", "surrogate.texts=3")[0]) == ["mse", "None"]
    assert read_warm_start(run("own", "supervise.target=own")[0]) == ["mse", "None"]
    assert read_warm_start(run("own-kl", "supervise.target=own", "supervise.loss=kl")[0]) == [
        "mse",
        "own",
    ]


@pytest.mark.long
def test_other_seeds_and_folders_are_not_a_warm_start(run: RunFixture, few: Path) -> None:
    out, _ = run("none", "supervise.target=none")
    assert read_warm_start(run("mse", seed=1)[0]) == ["None", "None"]
    single = out.parent.parent / "kl" / "mine"
    tiny.run(tiny.recipe("ssa-trec", *SETS), single, data_root=few)
    assert read_warm_start(single) == ["None", "None"]


def test_corrupt_runs_raise(run: RunFixture) -> None:
    out, _ = run("none", "supervise.target=none")
    weights = out / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptFileError):
        run("mse")


def test_missing_warm_starts_and_other_networks_raise(
    run: RunFixture, tmp_path: Path, few: Path
) -> None:
    out, _ = run("none", "supervise.target=none")
    recipe = tiny.recipe("ssa-trec", *SETS)
    context = RunContext(tmp_path / "gone" / "seed-0", 0, "cpu", few)
    io.write_json(context.out / "ground.json", {"baseline": str(tmp_path / "x")})
    with pytest.raises(CorruptFileError, match=r"x.*exists"):
        warm_start.find_warm_start(recipe, context)
    with pytest.raises(UserError, match="another network"):
        load_weights(TextClassifier(9, 6, 0.1), out / "model")
