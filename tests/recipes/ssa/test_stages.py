"""Three stages, each of which goes on where it was stopped and comes to the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import files
from overt.errors import Stopped
from overt.recipes.ssa import stages as ssa_stages
from overt.recipes.ssa.recipe import Search
from overt.supervise import Surrogates
from overt.supervise.surrogate import kept
from tests.recipes import tiny

SETS = ("supervise.loss=adversarial", "surrogate.texts=6", "train.save_every=1")
SAME = ("model/model.safetensors", "baseline/model.safetensors", "log.jsonl", "samples.npz")


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`run(folder, ...)` runs TREC, tiny."""
    tiny.expect_few(monkeypatch)
    monkeypatch.setattr(ssa_stages, "SHARD", 4)

    def run(out: Path, *sets: str, resume: bool = False) -> dict[str, Any]:
        recipe = tiny.recipe("ssa-trec", *SETS, *sets)
        return tiny.run(recipe, out, data_root=few, resume=resume)

    return run


def found(out: Path) -> dict[str, bytes]:
    shards = {
        str(path.relative_to(out)): path.read_bytes() for path in out.glob("surrogates/*/*.npy")
    }
    return {**shards, **{name: (out / name).read_bytes() for name in SAME}}


def test_a_run_leaves_what_is_documented(run: Callable[..., Any], tmp_path: Path) -> None:
    results = run(tmp_path / "a")
    assert results["steps"] == 4  # two trainings of the same length
    assert files.verify(tmp_path / "a/baseline") and files.verify(tmp_path / "a/model")
    assert files.read_json(tmp_path / "a/ground.json") == {"baseline": None, "surrogates": None}
    targets = Surrogates(tmp_path / "a/surrogates")
    assert len(targets) == results["data"][0]["n"]
    assert (targets.best(targets.ids) >= targets.base(targets.ids)).all()
    stages = {files.json.loads(line)["stage"] for line in (tmp_path / "a/log.jsonl").open()}
    assert stages == {"baseline", "train"}


@pytest.mark.parametrize("when", ["search", "train", "between"])
def test_stopping_and_going_on_changes_no_byte(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, when)
        with pytest.raises(Stopped):
            run(tmp_path / "cut")
    run(tmp_path / "cut", resume=True)
    assert found(tmp_path / "cut") == found(tmp_path / "whole")


def stop_in(patch: pytest.MonkeyPatch, when: str) -> None:
    """Stop as a signal would: in the middle of the search, in the second training, or before it."""
    calls = {"search": 0, "train": 0}

    def count(what: str, most: int) -> None:
        calls[what] += 1
        if calls[what] > most:
            raise Stopped("stopped", 15)

    if when == "search":
        keep = kept.keep

        def stopping(*args: Any, **options: Any) -> None:
            count("search", 2)
            keep(*args, **options)

        patch.setattr(kept, "keep", stopping)
    elif when == "train":
        teach = ssa_stages.Lesson.__call__

        def step(self: Any, net: Any, batch: Any, progress: Any) -> Any:
            if self.targets:
                count("train", 1)
            return teach(self, net, batch, progress)

        patch.setattr(ssa_stages.Lesson, "__call__", step)
    else:
        patch.setattr(
            ssa_stages.Stages, "train_second", lambda self, resume, reporter: count("train", 0)
        )


@pytest.mark.parametrize("how", list(Search))
def test_every_search_by_name(run: Callable[..., Any], tmp_path: Path, how: Search) -> None:
    probes = run(tmp_path / "a", f"surrogate.search={how.value}", "surrogate.probes=3")["ours"]
    if how is Search.REFINE:
        assert probes["probes"]["value"] <= 3
    assert probes["search_seconds"]["value"] >= 0


def test_the_second_network_may_begin_with_the_first(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    run(tmp_path / "a", "supervise.start=baseline", "supervise.target=none", "train.rate=0")
    first, second = (
        files.read_tensors(tmp_path / "a" / name / "model.safetensors")
        for name in ("baseline", "model")
    )
    assert all((first[name] == one).all() for name, one in second.items())


@pytest.mark.parametrize("loss", ["mse", "adversarial"])
def test_what_prepares_recording_changes_nothing(
    run: Callable[..., Any], tmp_path: Path, loss: str
) -> None:
    """Targets come with the batch and texts have one width; off a card nothing is recorded."""
    for name, graph in (("plain", "false"), ("graph", "true")):
        run(tmp_path / name, f"train.graph={graph}", f"supervise.loss={loss}", "model.dropout=0")
    plain, graph = (
        files.read_tensors(tmp_path / name / "model/model.safetensors")
        for name in ("plain", "graph")
    )
    for name, one in plain.items():
        assert (graph[name] - one).abs().max() < 1e-4, name


def test_only_steps_with_one_target_are_prepared_for_recording(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    true = ssa_stages.Stages.aimed

    def aimed(self: Any, targets: Any) -> Any:
        found = true(self, targets)
        seen.append((type(found[0]).__name__, list(found[1].values())))
        return found

    monkeypatch.setattr(ssa_stages.Stages, "aimed", aimed)
    run(tmp_path / "a", "train.graph=true")
    run(tmp_path / "b")
    assert seen[0] == ("Aimed", [None]) and seen[1][0] == "Held" and seen[1][1] != [None]
