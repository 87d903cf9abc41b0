"""Stages of a run: what starts from what, and that a stopped run goes on exactly."""

import os
import signal
from pathlib import Path

import pytest
import torch

from overt import files
from overt.errors import Stopped
from overt.recipes import find, settings
from overt.recipes.recipe import Context
from overt.recipes.vgp import stages as module
from overt.train import Reporter
from tests.recipes import tiny
from tests.recipes.vgp import small

QUIET = Reporter(enabled=False)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "vgp-cache"))


def test_stages_come_in_their_order(tmp_path: Path) -> None:
    for sets, names in (
        ((), ["tune", "refer", "ask"]),
        (("supervise.way=original",), ["refer", "ask"]),
        (("first.epochs=1", "after.epochs=0"), ["first", "tune"]),
    ):
        recipe = settings.apply(find("vgp-scenes"), [*small.SETS, *sets])
        built = recipe.build(Context(tmp_path, device="cpu"))
        assert [one.name for one in built.stages] == names


def test_tasks_afterwards_start_from_the_tuned_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = settings.apply(find("vgp-scenes"), small.SETS)
    seen: dict[str, torch.Tensor] = {}
    real = module.fit

    def spy(net: torch.nn.Module, *rest: object, stage: str, **options: object) -> object:
        inner = getattr(net, "model", net)
        seen[f"{stage} before"] = inner.word.weight.detach().clone()
        done = real(net, *rest, stage=stage, **options)  # type: ignore[arg-type]
        seen[f"{stage} after"] = inner.word.weight.detach().clone()
        return done

    monkeypatch.setattr(module, "fit", spy)
    built = recipe.build(Context(tmp_path, device="cpu"))
    for stage in built.stages:
        stage.run(False, QUIET)
    for name in ("refer", "ask"):
        assert torch.equal(seen["tune after"], seen[f"{name} before"])
        assert not torch.equal(seen[f"{name} before"], seen[f"{name} after"])
    assert torch.equal(seen["tune after"], built.model.word.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = settings.apply(
        find("vgp-scenes"),
        [*small.SETS, "train.save_every=1", "supervise.way=learned-heads", "model.dropout=0.1"],
    )
    tiny.run(recipe, tmp_path / "whole")
    real = module.fit

    def stop(*rest: object, stage: str, **options: object) -> object:
        if stage == "refer":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest, stage=stage, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module, "fit", stop)
        with pytest.raises(Stopped):
            tiny.run(recipe, tmp_path / "cut")
    results = tiny.run(recipe, tmp_path / "cut", resume=True)
    files.verify(tmp_path / "cut")
    assert results["status"] == "done"
    for name in ("log.jsonl", "samples.npz", "elsewhere.npz", "model/model.safetensors"):
        whole, cut = tmp_path / "whole" / name, tmp_path / "cut" / name
        assert whole.read_bytes() == cut.read_bytes(), name
