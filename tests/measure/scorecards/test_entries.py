"""What an entry says of itself."""

import json

from overt.measure.measured import Measure
from overt.measure.scorecards.entries import Entry, Need, Question


def entry(**more: object) -> Entry:
    given: dict[str, object] = {
        "key": "drop@blur",
        "measure": Measure("drop", "share", False, 0.0),
        "question": Question.FAITHFULNESS,
        "needs": (Need.MODEL,),
        "cannot": "Much.",
        "ask": lambda sight, name: None,
    }
    return Entry(**{**given, **more})  # type: ignore[arg-type]


def test_an_entry_is_plain_values() -> None:
    said = entry().about()
    assert json.loads(json.dumps(said)) == said
    assert said["low"] == 0 and said["high"] is None and said["direction"] == "lower"
    assert said["question"] == "faithfulness" and said["needs"] == ["model"]
    assert entry().name == "drop" and entry(key="drop").name == "drop"


def test_every_direction_has_a_word() -> None:
    words = [entry(measure=Measure("x", "y", b)).direction for b in (True, False, None)]
    assert words == ["higher", "lower", "neither"]
