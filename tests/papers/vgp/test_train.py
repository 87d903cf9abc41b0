"""Stages of a run: order, initial weights, and exact resume."""

import os
import signal
from pathlib import Path

import pytest
import torch

from overt import io
from overt.errors import RunInterrupted
from overt.experiments import builders, settings
from overt.experiments.recipe import RunContext
from overt.papers.catalog import build, find_recipe
from overt.train import Reporter
from tests.experiments import tiny
from tests.papers.vgp import small

QUIET = Reporter(enabled=False)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "vgp-cache"))


@pytest.mark.long
def test_stages_have_a_fixed_order(tmp_path: Path) -> None:
    for sets, names in (
        ((), ["tune", "refer", "ask"]),
        (("supervise.way=original",), ["refer", "ask"]),
        (("first.epochs=1", "after.epochs=0"), ["first", "tune"]),
        (
            ("first.epochs=1", "first.tasks=masked", "supervise.way=original"),
            ["first", "refer", "ask"],
        ),
    ):
        recipe = settings.apply(find_recipe("vgp-scenes"), [*small.SETS, *sets])
        built = build(recipe, RunContext(tmp_path, device="cpu"))
        assert [one.name for one in built.stages] == names


@pytest.mark.long
def test_downstream_tasks_start_from_the_fine_tuned_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = settings.apply(find_recipe("vgp-scenes"), small.SETS)
    weights: dict[str, torch.Tensor] = {}
    real = builders.fit

    def spy(net: torch.nn.Module, *rest: object, stage: str, **options: object) -> object:
        inner = getattr(net, "model", net)
        weights[f"{stage} before"] = inner.word.weight.detach().clone()
        done = real(net, *rest, stage=stage, **options)  # type: ignore[arg-type]
        weights[f"{stage} after"] = inner.word.weight.detach().clone()
        return done

    monkeypatch.setattr(builders, "fit", spy)
    built = build(recipe, RunContext(tmp_path, device="cpu"))
    for stage in built.stages:
        stage.run(False, QUIET)
    for name in ("refer", "ask"):
        assert torch.equal(weights["tune after"], weights[f"{name} before"])
        assert not torch.equal(weights[f"{name} before"], weights[f"{name} after"])
    assert torch.equal(weights["tune after"], built.model.word.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.long
def test_an_interrupted_run_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = settings.apply(
        find_recipe("vgp-scenes"),
        [*small.SETS, "train.save_every=1", "supervise.way=learned-heads", "model.dropout=0.1"],
    )
    tiny.run(recipe, tmp_path / "full")
    real = builders.fit

    def stop(*rest: object, stage: str, **options: object) -> object:
        if stage == "refer":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest, stage=stage, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(builders, "fit", stop)
        with pytest.raises(RunInterrupted):
            tiny.run(recipe, tmp_path / "cut")
    results = tiny.run(recipe, tmp_path / "cut", resume=True)
    io.verify(tmp_path / "cut")
    assert results["status"] == "done"
    for name in ("log.jsonl", "samples.npz", "elsewhere.npz", "model/model.safetensors"):
        full, cut = tmp_path / "full" / name, tmp_path / "cut" / name
        assert full.read_bytes() == cut.read_bytes(), name
