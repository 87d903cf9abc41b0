"""Run summaries: sentences about training, data, accuracy and faithfulness."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt.metrics.scorecard.result import Scorecard
from overt.viz.run_comparison import compare_runs
from overt.viz.run_reader import Run
from overt.viz.run_summary import DELETION, INSERTION, summarize_comparison, summarize_run

N = 40
GAP = np.linspace(0.05, 0.15, N).astype(np.float32)


def make_card(deletion: float, insertion: float, mass: float = 0.3) -> Scorecard:
    """A scorecard in which attention beats random maps by these factors."""
    base = np.full(N, 0.5, np.float32)
    about = {"unit": "share", "low": 0.0, "high": 1.0, "needs": [], "cannot_say": "", "name": "x"}
    ways = {DELETION: "lower", INSERTION: "higher", "mass_inside": "higher"}
    numbers = {
        ("attention", DELETION): base - deletion * GAP,
        ("attention", INSERTION): base + insertion * GAP,
        ("attention", "mass_inside"): base * 0 + mass + GAP,
        ("uniform", "mass_inside"): base * 0 + 0.1,
        ("attention", "effective_support"): base * 40,
        ("uniform", "effective_support"): base * 128,
    }
    for name in ("random", "gradient"):
        numbers |= {(name, DELETION): base, (name, INSERTION): base}
    measures = [
        {**about, "key": key, "direction": way, "question": "faithfulness"}
        for key, way in {**ways, "effective_support": "neither"}.items()
    ]
    ids = tuple(f"q{i}" for i in range(N))
    return Scorecard(
        "x", {"name": "scenes", "split": "test"}, 0, ("attention", "random", "gradient", "uniform"),
        tuple(measures), ids, ids, numbers,
    )  # fmt: skip


def make_run(card: Scorecard | None = None, **results: Any) -> Run:
    value = {"value": 0.6, "low": 0.55, "high": 0.65, "n": 400, "direction": "higher"}
    given = {
        "about": "scenes, soft attention",
        "parameters": 412_345,
        "steps": 1000,
        "seconds": 75,
        "data": [
            {"name": "scenes", "split": "train", "n": 4000},
            {"name": "scenes", "split": "test", "n": 500},
        ],
        "ours": {"accuracy": value, "mass_inside": {"value": 0.41}, "pointing": {"value": 0.5}},
        "groups": {"accuracy": {"a": {"n": 100, "chance": 0.5}, "b": {"n": 300, "chance": 0.1}}},
        "paper": {"accuracy": {"value": 0.7}},
        **results,
    }
    return Run(Path("r"), "r", given, (), (), (), {}, card)


def summarize(run: Run) -> dict[str, tuple[str, str]]:
    return {one.question: (one.answer, one.sign) for one in summarize_run(run)}


def test_summary_describes_training_data_and_accuracy() -> None:
    summary = summarize(make_run())
    assert summary["What was trained?"][0] == (
        "Scenes, soft attention. 412,345 parameters, 1,000 steps, 1 min 15 s of training."
    )
    assert summary["Which data?"][0] == "scenes: 4,000 samples for training, 500 for testing."
    answer, sign = summary["How accurate is it?"]
    assert sign == "good" and answer == (
        "Accuracy 0.600 (95 % interval 0.550 to 0.650, n = 400). Chance level is 0.200. The "
        "paper reports 0.700."
    )
    assert "41% of its attention is on the evidence" in summary["Where is its attention?"][0]
    assert "Is its attention faithful?" not in summary


@pytest.mark.parametrize(
    ("low", "high", "sign", "words"),
    [(0.25, 0.3, "good", ""), (0.1, 0.3, "", "not significantly"), (0.1, 0.15, "bad", "")],
)
def test_accuracy_is_compared_with_chance(low: float, high: float, sign: str, words: str) -> None:
    value = {"value": (low + high) / 2, "low": low, "high": high, "n": 9}
    answer, found = summarize(make_run(ours={"accuracy": value}))["How accurate is it?"]
    assert found == sign and words in answer


@pytest.mark.parametrize(
    ("deletion", "insertion", "start", "sign"),
    [
        (1, 1, "Yes", "good"),
        (1, 0, "Partly", ""),
        (0, 0, "Not shown", ""),
        (-1, 1, "No", "bad"),
    ],
)
def test_faithfulness_follows_deletion_and_insertion(
    deletion: float, insertion: float, start: str, sign: str
) -> None:
    summary = summarize(make_run(make_card(float(deletion), float(insertion))))
    answer, found = summary["Is its attention faithful?"]
    assert answer.startswith(start) and found == sign and "on 40 samples" in answer
    assert ("gradient map is more faithful" in answer) == (deletion < 0)


def test_attention_on_evidence_is_compared_with_a_uniform_map() -> None:
    answer, sign = summarize(make_run(make_card(1.0, 1.0)))["Where is its attention?"]
    assert "uniform map would have 10%" in answer and sign == "good"
    assert "20 of 64 positions" in answer


def test_missing_values_are_left_out() -> None:
    assert summarize_run(Run(Path("r"), "r", {}, (), (), ())) == []
    malformed = {"ours": [1], "groups": 3, "data": {"a": 1}, "paper": "x", "seconds": "long"}
    summary = summarize(make_run(**malformed))
    assert set(summary) == {"What was trained?"}


def test_runs_differ_only_if_significant() -> None:
    ids = np.array([f"q{i}" for i in range(N)])

    def run(name: str, right: np.ndarray) -> Run:
        ours = {"accuracy": {"value": 0.5, "direction": "higher"}}
        return Run(Path(name), name, {"ours": ours}, (), (), (), {"id": ids, "accuracy": right})

    none = np.zeros(N, np.float32)
    runs = [run("plain", none), run("same", none), run("good", none + 1)]
    same, good = summarize_comparison(runs, compare_runs(runs))
    assert same.question == "Is same better than plain?" and same.sign == ""
    assert "not significant" in same.answer
    assert good.sign == "good" and "Accuracy: higher by 1.000" in good.answer


def test_pointing_sentence_follows_its_definition() -> None:
    assert (
        "on the evidence for 50% of the samples"
        in summarize(make_run())["Where is its attention?"][0]
    )
    newer = make_run(ours={"pointing": {"value": 0.5, "version": 2}})
    summary = summarize(newer)["Where is its attention?"][0]
    assert summary.startswith("The evidence covers 50% of the cell")


def test_mass_of_another_definition_is_not_compared_with_uniform() -> None:
    card = make_card(1.0, 1.0)
    older = make_run(card, ours={"mass_inside": {"value": 0.41}})
    newer = make_run(card, ours={"mass_inside": {"value": 0.41, "version": 2}})
    assert "uniform map would" in summarize(older)["Where is its attention?"][0]
    assert "uniform map would" not in summarize(newer)["Where is its attention?"][0]
