"""Summary of a run in a few sentences: model, data, accuracy, attention and faithfulness.

Sentences are built from the results of the run; missing numbers are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overt.metrics.scorecard.metric_context import ATTENTION, GRADIENT, RANDOM, UNIFORM
from overt.metrics.scorecard.result import Difference, Scorecard
from overt.metrics.statistics import Interval
from overt.metrics.versions import version_of
from overt.viz.results_table import (
    decimal_places,
    finite_number,
    format_duration,
    format_interval,
    format_large,
    format_number,
    metric_title,
    task_metric,
)
from overt.viz.run_comparison import RunComparison, describe_verdict
from overt.viz.run_reader import Run

DELETION, INSERTION = "deletion_area@mask", "insertion_area@mask"
_MASS = ("mass_inside", "grounding_mass")
_POINTING = ("pointing", "grounding_accuracy")
_METRIC_PHRASES = {  # metrics in plain words
    "mass_inside": "Fraction of the attention on the evidence",
    "grounding_mass": "Fraction of the attention on the grounded regions",
    "pointing": "Pointing: largest weight on the evidence",
    "grounding_accuracy": "Grounding accuracy of words",
    "deletion": "Deletion: effect of removing the attended part, compared with random",
}


@dataclass(frozen=True)
class SummaryItem:
    """A question and its answer; `sign` is "good", "bad" or "" for neutral."""

    question: str
    answer: str
    sign: str = ""


def summarize_run(run: Run) -> list[SummaryItem]:
    """Return the summary of one run."""
    return [
        *_training_items(run.results),
        *_data_items(run.results),
        *_task_items(run.results),
        *_attention_items(run),
        *_faithfulness_items(run),
    ]


def summarize_comparison(runs: Sequence[Run], pairs: Sequence[RunComparison]) -> list[SummaryItem]:
    """Return the summary of a comparison: whether each run is better than the first.

    For each pair it states the task metric and the main attention metrics; the table has all.
    """
    found = []
    for pair in pairs:
        first, second = runs[pair.first].name, runs[pair.second].name
        task = task_metric(runs[pair.second].results)
        shown = [
            one
            for one in pair.differences
            if one.key == task or one.key in (*_MASS, *_POINTING, "deletion")
        ]
        if shown:
            signs = {describe_verdict(one) for one in shown if one.direction != "neither"}
            sign = "good" if signs == {"better"} else "bad" if signs == {"worse"} else ""
            answer = " ".join(_describe_difference(one) for one in shown)
            found.append(SummaryItem(f"Is {second} better than {first}?", answer, sign))
    return found


def _describe_difference(one: Difference) -> str:
    digits = decimal_places([one.mean, one.low, one.high])
    around = f"{format_interval(one.low, one.high, digits)}, n = {one.n:,}"
    way = "higher" if one.mean >= 0 else "lower"
    end = {
        "better": "a significant improvement",
        "worse": "significantly worse",
        "no difference shown": "not significant",
    }.get(describe_verdict(one), "significant")
    name = _METRIC_PHRASES.get(one.key, metric_title(one.key))
    return f"{name}: {way} by {format_number(abs(one.mean), digits)} ({around}), {end}."


# --- one run


def _training_items(results: Mapping[str, Any]) -> Iterator[SummaryItem]:
    about = str(results.get("about") or results.get("recipe") or "").strip().rstrip(".")
    facts = []
    for key, say in (
        ("parameters", lambda value: f"{format_large(value)} parameters"),
        ("steps", lambda value: f"{format_large(value)} steps"),
        ("seconds", lambda value: f"{format_duration(value)} of training"),
    ):
        value = finite_number(results.get(key))
        if value is not None:
            facts.append(say(value))
    if about or facts:
        start = f"{about[:1].upper()}{about[1:]}." if about else ""
        rest = f"{', '.join(facts)}." if facts else ""
        yield SummaryItem("What was trained?", f"{start} {rest[:1].upper()}{rest[1:]}".strip())


def _data_items(results: Mapping[str, Any]) -> Iterator[SummaryItem]:
    data = results.get("data")
    entries = [one for one in data if isinstance(one, Mapping)] if isinstance(data, list) else []
    names = list(dict.fromkeys(str(one.get("name") or "") for one in entries))
    parts = []
    for name in [name for name in names if name][:3]:
        used: list[str] = []
        for split, word in (
            ("train", "for training"),
            ("val", "for validation"),
            ("test", "for testing"),
        ):
            counts = [
                int(one["n"])
                for one in entries
                if one.get("name") == name and one.get("split") == split
                if isinstance(one.get("n"), int)
            ]
            if counts:
                used.append(
                    f"{max(counts):,} samples {word}" if not used else f"{max(counts):,} {word}"
                )
        parts.append(f"{name}: {', '.join(used)}" if used else name)
    if parts:
        more = f"; and {len(names) - 3} other datasets" if len(names) > 3 else ""
        yield SummaryItem("Which data?", "; ".join(parts) + more + ".")


def _task_items(results: Mapping[str, Any]) -> Iterator[SummaryItem]:
    task = task_metric(results)
    ours = _entry(results, "ours", task)
    value = finite_number(ours.get("value"))
    if not task or value is None:
        return
    digits = 3 if abs(value) < 10 else 1
    low, high = finite_number(ours.get("low")), finite_number(ours.get("high"))
    parts = []
    if low is not None and high is not None:
        parts.append(f"95 % interval {format_number(low, digits)} to {format_number(high, digits)}")
    if isinstance(ours.get("n"), int):
        parts.append(f"n = {ours['n']:,}")
    inside = f" ({', '.join(parts)})" if parts else ""
    lower = " Lower is better." if ours.get("direction") == "lower" else ""
    text = f"{metric_title(task)} {format_number(value, digits)}{inside}.{lower}"
    sign = ""
    chance = _chance(results, task)
    if chance is not None:
        text += f" Chance level is {format_number(chance, digits)}."
        if low is not None and high is not None:
            sign = "good" if low > chance else "bad" if high <= chance else ""
            if low <= chance < high:
                text += " It is not significantly better than chance."
    paper = finite_number(_entry(results, "paper", task).get("value"))
    if paper is not None:
        text += f" The paper reports {format_number(paper, digits)}."
    yield SummaryItem("How accurate is it?", text, sign)


def _attention_items(run: Run) -> Iterator[SummaryItem]:
    """State mass inside next to a uniform map, pointing, and the width of the map."""
    scorecard = run.scorecard
    sentences, sign = [], ""
    ours = {
        key: finite_number(_entry(run.results, "ours", key).get("value"))
        for key in (*_MASS, *_POINTING)
    }
    mass = next((ours[key] for key in _MASS if ours[key] is not None), None)
    pointing = next((ours[key] for key in _POINTING if ours[key] is not None), None)
    even = _interval(scorecard, UNIFORM, "mass_inside") if _same_definition(run) else None
    if mass is not None and 0 <= mass <= 1:
        text = f"{mass:.0%} of its attention is on the evidence for the answer"
        if even is not None:
            text += f"; a uniform map would have {even.mean:.0%}"
            gap = _control_difference(scorecard, UNIFORM, "mass_inside")
            sign = "" if gap is None else {"better": "good", "worse": "bad"}.get(gap.verdict, "")
        sentences.append(f"{text}.")
    if pointing is not None and 0 <= pointing <= 1:
        sentences.append(_describe_pointing(run.results, pointing))
    wide = (
        None if scorecard is None else _interval(scorecard, scorecard.subject, "effective_support")
    )
    every = _interval(scorecard, UNIFORM, "effective_support")
    if wide is not None and every is not None and scorecard is not None:
        what = {ATTENTION: "Its attention"}.get(scorecard.subject, f"Its map ({scorecard.subject})")
        sentences.append(
            f"{what} is as wide as a uniform map over {wide.mean:.0f} of "
            f"{every.mean:.0f} positions."
        )
    if sentences:
        yield SummaryItem("Where is its attention?", " ".join(sentences), sign)


def _describe_pointing(results: Mapping[str, Any], pointing: float) -> str:
    """Describe the pointing game; newer definitions count partly covered cells by fraction."""
    if version_of(_entry(results, "ours", "pointing")) > 1:
        return (
            f"The evidence covers {pointing:.0%} of the cell with the largest weight, on average."
        )
    return f"Its largest weight is on the evidence for {pointing:.0%} of the samples."


def _same_definition(run: Run) -> bool:
    """Return whether the run and its scorecard used the same definition of mass inside."""
    ours = _entry(run.results, "ours", "mass_inside")
    if run.scorecard is None or "mass_inside" not in run.scorecard.keys or not ours:
        return True
    return run.scorecard.version("mass_inside") == version_of(ours)


def _faithfulness_items(run: Run) -> Iterator[SummaryItem]:
    """State whether attended parts drive the answer more than random parts."""
    question = "Is its attention faithful?"
    scorecard = run.scorecard
    if scorecard is None:
        return
    gaps = [(key, _control_difference(scorecard, RANDOM, key)) for key in (DELETION, INSERTION)]
    known = [(key, gap) for key, gap in gaps if gap is not None]
    if not known:
        return
    verdicts = {gap.verdict for _, gap in known}
    parts = [_describe_perturbation(scorecard, key) for key, _ in known]
    if verdicts == {"better"}:
        start, sign = "Yes, by deletion and insertion", "good"
    elif "better" in verdicts and "worse" not in verdicts:
        start, sign = "Partly", ""
    elif "worse" in verdicts:
        start, sign = "No: a random order does better", "bad"
    else:
        start, sign = "Not shown", ""
    text = f"{start}. {' '.join(parts)} Evaluated on {len(scorecard):,} samples."
    beaten = [_control_difference(scorecard, GRADIENT, key) for key in (DELETION, INSERTION)]
    if any(one is not None and one.verdict == "worse" for one in beaten):
        text += " A gradient map is more faithful."
    yield SummaryItem(question, text, sign)


def _describe_perturbation(scorecard: Scorecard, key: str) -> str:
    own, random = scorecard.intervals[scorecard.subject, key], scorecard.intervals[RANDOM, key]
    if key == DELETION:
        return (
            "When the most attended parts are removed first, the mean probability of its answer is "
            f"{own.mean:.3f}, compared with {random.mean:.3f} in random order (lower is better)."
        )
    pair = f"{own.mean:.3f}, compared with {random.mean:.3f}"
    return f"When they are inserted first, it is {pair} (higher is better)."


def _interval(scorecard: Scorecard | None, name: str, key: str) -> Interval | None:
    found = None if scorecard is None else scorecard.intervals.get((name, key))
    return found if found is not None and found.count and abs(found.mean) < float("inf") else None


def _control_difference(scorecard: Scorecard | None, control: str, key: str) -> Difference | None:
    if scorecard is None or control not in scorecard.maps or control == scorecard.subject:
        return None
    return next((one for one in scorecard.against(control) if one.key == key), None)


def _chance(results: Mapping[str, Any], task: str) -> float | None:
    """Return the chance level: the mean over groups, if every group has one."""
    groups = results.get("groups")
    members = groups.get(task) if isinstance(groups, Mapping) else None
    if not isinstance(members, Mapping) or not members:
        return None
    pairs = []
    for one in members.values():
        chance = finite_number(one.get("chance")) if isinstance(one, Mapping) else None
        count = finite_number(one.get("n")) if isinstance(one, Mapping) else None
        if chance is None or not count:
            return None
        pairs.append((chance, count))
    return sum(chance * count for chance, count in pairs) / sum(count for _, count in pairs)


def _entry(results: Mapping[str, Any], section: str, key: str) -> Mapping[str, Any]:
    table = results.get(section)
    found = table.get(key) if isinstance(table, Mapping) else None
    return found if isinstance(found, Mapping) else {}
