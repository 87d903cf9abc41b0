"""`ScorecardMetric`: its description as plain values."""

import json

from overt.metrics.metric import MetricInfo
from overt.metrics.scorecard.entry import MetricQuestion, Requirement, ScorecardMetric


def entry(**more: object) -> ScorecardMetric:
    given: dict[str, object] = {
        "key": "drop@blur",
        "info": MetricInfo("drop", "share", False, 0.0),
        "question": MetricQuestion.FAITHFULNESS,
        "needs": (Requirement.MODEL,),
        "limitation": "Much.",
        "compute": lambda context, name: None,
    }
    return ScorecardMetric(**{**given, **more})  # type: ignore[arg-type]


def test_an_entry_is_described_by_json_values() -> None:
    description = entry().about()
    assert json.loads(json.dumps(description)) == description
    assert (
        description["low"] == 0
        and description["high"] is None
        and description["direction"] == "lower"
    )
    assert description["question"] == "faithfulness" and description["needs"] == ["model"]
    assert entry().name == "drop" and entry(key="drop").name == "drop"


def test_every_direction_has_a_name() -> None:
    words = [entry(info=MetricInfo("x", "y", b)).direction for b in (True, False, None)]
    assert words == ["higher", "lower", "neither"]
