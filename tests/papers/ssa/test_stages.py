"""Stages of self-supervision: each resumes after an interruption and ends with the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import io
from overt.errors import RunInterrupted
from overt.papers.ssa import stages as ssa_stages
from overt.papers.ssa.config import SsaSearch
from overt.targets import Surrogates
from overt.targets.surrogate import store
from tests.experiments import tiny

SETS = ("supervise.loss=adversarial", "surrogate.texts=6", "train.save_every=1")
SAME = ("model/model.safetensors", "baseline/model.safetensors", "log.jsonl", "samples.npz")


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return `run(folder, ...)`: it runs the recipe ssa-trec with small settings."""
    tiny.use_small_readers(monkeypatch)
    monkeypatch.setattr(ssa_stages, "SHARD", 4)

    def run(out: Path, *sets: str, resume: bool = False) -> dict[str, Any]:
        recipe = tiny.recipe("ssa-trec", *SETS, *sets)
        return tiny.run(recipe, out, data_root=few, resume=resume)

    return run


def read_outputs(out: Path) -> dict[str, bytes]:
    shards = {
        str(path.relative_to(out)): path.read_bytes() for path in out.glob("surrogates/*/*.npy")
    }
    return {**shards, **{name: (out / name).read_bytes() for name in SAME}}


def test_a_run_writes_the_documented_files(run: Callable[..., Any], tmp_path: Path) -> None:
    results = run(tmp_path / "a")
    assert results["steps"] == 4  # two trainings of the same length
    assert io.verify(tmp_path / "a/baseline") and io.verify(tmp_path / "a/model")
    assert io.read_json(tmp_path / "a/ground.json") == {"baseline": None, "surrogates": None}
    targets = Surrogates(tmp_path / "a/surrogates")
    assert len(targets) == results["data"][0]["n"]
    assert (targets.best(targets.ids) >= targets.base(targets.ids)).all()
    stages = {io.json.loads(line)["stage"] for line in (tmp_path / "a/log.jsonl").open()}
    assert stages == {"baseline", "train"}


@pytest.mark.long
@pytest.mark.parametrize("when", ["search", "train", "between"])
def test_resuming_an_interrupted_run_gives_the_same_bytes(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run(tmp_path / "full")
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, when)
        with pytest.raises(RunInterrupted):
            run(tmp_path / "cut")
    run(tmp_path / "cut", resume=True)
    assert read_outputs(tmp_path / "cut") == read_outputs(tmp_path / "full")


def stop_in(patch: pytest.MonkeyPatch, when: str) -> None:
    """Stop like a signal: during the search, during the second training, or before it."""
    calls = {"search": 0, "train": 0}

    def count(stage: str, most: int) -> None:
        calls[stage] += 1
        if calls[stage] > most:
            raise RunInterrupted("stopped", 15)

    if when == "search":
        keep = store.write_shard

        def write_or_stop(*args: Any, **options: Any) -> None:
            count("search", 2)
            keep(*args, **options)

        patch.setattr(store, "write_shard", write_or_stop)
    elif when == "train":
        call = ssa_stages.SsaStep.__call__

        def step(self: Any, net: Any, batch: Any, progress: Any) -> Any:
            if self.targets:
                count("train", 1)
            return call(self, net, batch, progress)

        patch.setattr(ssa_stages.SsaStep, "__call__", step)
    else:
        patch.setattr(
            ssa_stages.SsaStages, "train_second", lambda self, resume, reporter: count("train", 0)
        )


@pytest.mark.long
@pytest.mark.parametrize("how", list(SsaSearch))
def test_each_search_runs_by_name(run: Callable[..., Any], tmp_path: Path, how: SsaSearch) -> None:
    probes = run(tmp_path / "a", f"surrogate.search={how.value}", "surrogate.probes=3")["ours"]
    if how is SsaSearch.REFINE:
        assert probes["probes"]["value"] <= 3
    assert probes["search_seconds"]["value"] >= 0


@pytest.mark.long
def test_the_second_network_can_start_from_the_first(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    run(tmp_path / "a", "supervise.start=baseline", "supervise.target=none", "train.rate=0")
    first, second = (
        io.read_tensors(tmp_path / "a" / name / "model.safetensors")
        for name in ("baseline", "model")
    )
    assert all((first[name] == one).all() for name, one in second.items())


@pytest.mark.long
@pytest.mark.parametrize("loss", ["mse", "adversarial"])
def test_the_cuda_graph_setting_does_not_change_the_weights(
    run: Callable[..., Any], tmp_path: Path, loss: str
) -> None:
    """Batches carry targets and texts have one width; without a GPU nothing is captured."""
    for name, graph in (("plain", "false"), ("graph", "true")):
        run(tmp_path / name, f"train.graph={graph}", f"supervise.loss={loss}", "model.dropout=0")
    plain, graph = (
        io.read_tensors(tmp_path / name / "model/model.safetensors") for name in ("plain", "graph")
    )
    for name, one in plain.items():
        assert (graph[name] - one).abs().max() < 1e-4, name


@pytest.mark.long
def test_only_steps_with_one_target_are_prepared_for_a_cuda_graph(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    true = ssa_stages.SsaStages.training_data

    def training_data(self: Any, targets: Any) -> Any:
        found = true(self, targets)
        calls.append((type(found[0]).__name__, list(found[1].values())))
        return found

    monkeypatch.setattr(ssa_stages.SsaStages, "training_data", training_data)
    run(tmp_path / "a", "train.graph=true")
    run(tmp_path / "b")
    assert (
        calls[0] == ("TargetedDataset", [None])
        and calls[1][0] == "InMemoryDataset"
        and calls[1][1] != [None]
    )
