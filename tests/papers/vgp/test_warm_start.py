"""Rows of a table start from the network that the row "original" pretrained."""

from pathlib import Path
from typing import Any

import pytest

from overt import io
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import WARM_START_FILE
from overt.papers.catalog import find_recipe
from overt.papers.vgp import warm_start
from tests.experiments import tiny
from tests.papers.vgp import small

SETS = (*small.SETS, "first.epochs=1", "after.epochs=0", "train.card=0")


def recipe(*sets: str) -> Any:
    return settings.apply(find_recipe("vgp-scenes-pretrained"), [*SETS, *sets])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "vgp-cache"))


def test_only_pretrained_rows_look_for_a_network(tmp_path: Path) -> None:
    context = RunContext(tmp_path / "none" / "seed-0")
    context.out.mkdir(parents=True)
    assert warm_start.find_pretrained(recipe("first.tasks=pairs"), context) is None
    assert warm_start.find_pretrained(recipe("supervise.way=original"), context) is None
    assert not (context.out / WARM_START_FILE).exists()
    assert warm_start.find_pretrained(recipe(), context) is None
    assert io.read_json(context.out / WARM_START_FILE) == {"pretrained": None}


@pytest.mark.long
def test_a_warm_start_does_not_change_the_results(tmp_path: Path) -> None:
    tiny.run(recipe("supervise.way=original"), tmp_path / "table" / "original" / "seed-0")
    for row, sets in (("none", ["supervise.way=none"]), ("ewc", ["against.keep=ewc"])):
        beside, alone = tmp_path / "table" / row / "seed-0", tmp_path / row / "seed-0"
        tiny.run(recipe(*sets), beside)
        tiny.run(recipe(*sets), alone)
        assert Path(io.read_json(beside / WARM_START_FILE)["pretrained"]).name == "model"
        assert io.read_json(alone / WARM_START_FILE) == {"pretrained": None}
        for name in ("model/model.safetensors", "samples.npz"):
            assert (beside / name).read_bytes() == (alone / name).read_bytes(), (row, name)


@pytest.mark.long
def test_runs_with_other_settings_are_not_a_warm_start(tmp_path: Path) -> None:
    tiny.run(recipe("supervise.way=original"), tmp_path / "original" / "seed-0")
    for at, other in enumerate(("first.share=0.3", "train.rate=0.01", "model.gain=0.5")):
        context = RunContext(tmp_path / str(at) / "seed-0")
        context.out.mkdir(parents=True)
        assert warm_start.find_pretrained(recipe(other), context) is None
