"""The first sentences of a page are made of the run's numbers, and do not say more than they do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt.measure.scorecards.card import Scorecard
from overt.show.run import Run
from overt.show.summary import DELETION, INSERTION, compared, summary
from overt.show.versus import versus

N = 40
GAP = np.linspace(0.05, 0.15, N).astype(np.float32)


def a_card(deletion: float, insertion: float, mass: float = 0.3) -> Scorecard:
    """Attention that is so much lower by deletion, and higher by insertion, than random maps."""
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


def a_run(card: Scorecard | None = None, **results: Any) -> Run:
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


def answers(run: Run) -> dict[str, tuple[str, str]]:
    return {one.question: (one.answer, one.sign) for one in summary(run)}


def test_a_stranger_reads_what_was_done_and_how_well() -> None:
    said = answers(a_run())
    assert said["What was trained?"][0] == (
        "Scenes, soft attention. 412,345 parameters, 1,000 steps, 1 min 15 s of training."
    )
    assert said["On what?"][0] == "scenes: 4,000 items to learn from, 500 to test."
    answer, sign = said["How good are its answers?"]
    assert sign == "good" and answer == (
        "Accuracy 0.600 (95 % interval 0.550 to 0.650, n = 400). Guessing would get 0.200. The "
        "paper states 0.700."
    )
    assert "41% of its attention lies on the evidence" in said["Where does it look?"][0]
    assert "Does that tell what drives its answers?" not in said


@pytest.mark.parametrize(
    ("low", "high", "sign", "words"),
    [(0.25, 0.3, "good", ""), (0.1, 0.3, "", "not shown"), (0.1, 0.15, "bad", "")],
)
def test_guessing_is_the_mark(low: float, high: float, sign: str, words: str) -> None:
    value = {"value": (low + high) / 2, "low": low, "high": high, "n": 9}
    answer, found = answers(a_run(ours={"accuracy": value}))["How good are its answers?"]
    assert found == sign and words in answer


@pytest.mark.parametrize(
    ("deletion", "insertion", "start", "sign"),
    [
        (1, 1, "Yes, as far as removing parts can show", "good"),
        (1, 0, "In part", ""),
        (0, 0, "That was not shown", ""),
        (-1, 1, "No: a random choice does better", "bad"),
    ],
)
def test_trust_is_what_removing_parts_can_show(
    deletion: float, insertion: float, start: str, sign: str
) -> None:
    said = answers(a_run(a_card(float(deletion), float(insertion))))
    answer, found = said["Does that tell what drives its answers?"]
    assert answer.startswith(start) and found == sign and "Asked of 40 samples" in answer
    assert ("gradient tells more" in answer) == (deletion < 0)


def test_where_it_looks_stands_beside_an_even_map() -> None:
    answer, sign = answers(a_run(a_card(1.0, 1.0)))["Where does it look?"]
    assert "even everywhere would have 10% there" in answer and sign == "good"
    assert "spreads as wide as 20 of 64 places" in answer


def test_what_is_not_there_is_not_spoken_of() -> None:
    assert summary(Run(Path("r"), "r", {}, (), (), ())) == []
    strange = {"ours": [1], "groups": 3, "data": {"a": 1}, "paper": "x", "seconds": "long"}
    said = answers(a_run(**strange))
    assert set(said) == {"What was trained?"}


def test_two_runs_are_told_apart_only_beyond_luck() -> None:
    ids = np.array([f"q{i}" for i in range(N)])

    def run(name: str, right: np.ndarray) -> Run:
        ours = {"accuracy": {"value": 0.5, "direction": "higher"}}
        return Run(Path(name), name, {"ours": ours}, (), (), (), {"id": ids, "accuracy": right})

    none = np.zeros(N, np.float32)
    runs = [run("plain", none), run("same", none), run("good", none + 1)]
    same, good = compared(runs, versus(runs))
    assert same.question == "Is same better than plain?" and same.sign == ""
    assert "luck could do that" in same.answer
    assert good.sign == "good" and "Accuracy: higher by 1.000" in good.answer
