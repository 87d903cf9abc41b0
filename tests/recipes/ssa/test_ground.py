"""Rows of a table share the first network and its targets, checked before they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import settings
from overt.recipes.ssa import ground as ssa_ground
from tests.recipes import tiny

SETS = ("surrogate.texts=6", "supervise.loss=mse")
Run = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("row", ...)` runs a row of a table in `tmp_path`, tiny."""
    tiny.expect_few(monkeypatch)

    def run(row: str, *sets: str, seed: int = 0) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / row / f"seed-{seed}"
        recipe = tiny.recipe("ssa-trec", *SETS, *sets)
        return out, tiny.run(recipe, out, data_root=few, seed=seed)

    return run


def ground(out: Path) -> list[str]:
    """The rows whose first network and targets a run stands on."""
    said = files.read_json(out / ssa_ground.GROUND)
    return [str(one and Path(one).parent.parent.name) for one in said.values()]


def test_rows_stand_on_finished_runs_beside_them(run: Run) -> None:
    run("none", "supervise.target=none")
    first, found = run("mse")
    other, again = run("shuffled", "supervise.target=shuffled")
    assert ground(first) == ["none", "None"] and ground(other) == ["none", "mse"]
    assert found["steps"] == again["steps"] == 2  # the first training was another's
    assert not (other / "surrogates").exists() and not (other / "baseline").exists()
    for name in ("base_score", "best_score", "improved", "search_seconds", "accuracy_before"):
        assert found["ours"][name] == again["ours"][name]


def test_a_network_that_was_trained_on_is_nobodys_first(run: Run) -> None:
    longer = "supervise.target=none", "supervise.start=baseline"
    assert ground(run("a-trained-on", *longer)[0]) == ["None", "None"]
    place, _ = run("mse")
    said = files.read_json(place / ssa_ground.GROUND)["baseline"]
    assert Path(said).parts[-3:] == ("a-trained-on", "seed-0", "baseline")


def test_standing_on_another_changes_no_result(run: Run, tmp_path: Path, few: Path) -> None:
    run("none", "supervise.target=none")
    beside, _ = run("mse")
    alone = tmp_path / "alone"
    tiny.run(tiny.recipe("ssa-trec", *SETS), alone, data_root=few)
    for name in ("model/model.safetensors", "samples.npz"):
        assert (beside / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.parametrize("sets", ["model.hops=2", "train.rate=0.1", "data.limit=8"])
def test_what_differs_is_not_stood_on(run: Run, sets: str) -> None:
    run("none", "supervise.target=none")
    assert ground(run("mse", sets)[0]) == ["None", "None"]


def test_what_came_later_is_stood_on_at_its_default() -> None:
    recipe = tiny.recipe("ssa-trec", *SETS)
    theirs = settings.to_json(recipe)
    del theirs["model.penalty"]
    assert ssa_ground.alike(theirs, recipe, ssa_ground.OF_BASELINE)
    other = tiny.recipe("ssa-trec", *SETS, "model.penalty=0.5")
    assert not ssa_ground.alike(theirs, other, ssa_ground.OF_BASELINE)


def test_targets_of_another_search_are_not_used(run: Run) -> None:
    run("mse")
    assert ground(run("less", "surrogate.texts=3")[0]) == ["mse", "None"]
    assert ground(run("own", "supervise.target=own")[0]) == ["mse", "None"]
    assert ground(run("own-kl", "supervise.target=own", "supervise.loss=kl")[0]) == ["mse", "own"]


def test_other_seeds_and_other_folders_are_not_looked_at(run: Run, few: Path) -> None:
    out, _ = run("none", "supervise.target=none")
    assert ground(run("mse", seed=1)[0]) == ["None", "None"]
    single = out.parent.parent / "kl" / "mine"
    tiny.run(tiny.recipe("ssa-trec", *SETS), single, data_root=few)
    assert ground(single) == ["None", "None"]


def test_damaged_runs_are_refused(run: Run) -> None:
    out, _ = run("none", "supervise.target=none")
    weights = out / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(Damaged):
        run("mse")


def test_ground_that_is_gone_and_other_networks_are_refused(
    run: Run, tmp_path: Path, few: Path
) -> None:
    out, _ = run("none", "supervise.target=none")
    recipe = tiny.recipe("ssa-trec", *SETS)
    context = ssa_ground.Context(tmp_path / "gone" / "seed-0", 0, "cpu", few)
    files.write_json(context.out / "ground.json", {"baseline": str(tmp_path / "x")})
    with pytest.raises(Damaged, match="which is gone"):
        ssa_ground.ground_of(recipe, context)
    from overt.models import TextClassifier

    with pytest.raises(BadInput, match="holds another network"):
        ssa_ground.load(TextClassifier(9, 6, 0.1), out / "model")
