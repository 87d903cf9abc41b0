"""A run in a few sentences: what was trained, on what, how good, where it looks, can it be trusted.

Each sentence is made of numbers of the run, and a number that is not there is not spoken of.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overt.measure.scorecards.card import Difference, Scorecard
from overt.measure.scorecards.sight import ATTENTION, GRADIENT, RANDOM, UNIFORM
from overt.measure.statistics import Interval
from overt.show.run import Run
from overt.show.table import duration, large, number, task_of, titled
from overt.show.versus import Versus, verdict

DELETION, INSERTION = "deletion_area@mask", "insertion_area@mask"
_MASS = ("mass_inside", "grounding_mass")
_POINTING = ("pointing", "grounding_accuracy")
_PLAIN = {  # what measures are in plain words
    "mass_inside": "Share of the attention on the evidence",
    "grounding_mass": "Share of the attention on what words speak of",
    "pointing": "How often the largest weight is on the evidence",
    "grounding_accuracy": "How often a word looks most at what it speaks of",
    "deletion": "How much the answer depends on what it looks at, beyond random",
}


@dataclass(frozen=True)
class Said:
    """A question and its answer; `sign` is "good", "bad" or "" where it is neither."""

    question: str
    answer: str
    sign: str = ""


def summary(run: Run) -> list[Said]:
    """What a stranger asks first of one run, with the answers."""
    return [
        *_trained(run.results),
        *_data(run.results),
        *_good(run.results),
        *_looks(run),
        *_trusted(run),
    ]


def compared(runs: Sequence[Run], pairs: Sequence[Versus]) -> list[Said]:
    """What a stranger asks first of several runs: which is better, and whether that could be luck.

    Of each pair the task and the two best known measures of attention are told; all of them stand
    in the table.
    """
    found = []
    for pair in pairs:
        first, second = runs[pair.first].name, runs[pair.second].name
        task = task_of(runs[pair.second].results)
        told = [
            one
            for one in pair.differences
            if one.key == task or one.key in (*_MASS, *_POINTING, "deletion")
        ]
        if told:
            signs = {verdict(one) for one in told if one.direction != "neither"}
            sign = "good" if signs == {"better"} else "bad" if signs == {"worse"} else ""
            answer = " ".join(_differs(one) for one in told)
            found.append(Said(f"Is {second} better than {first}?", answer, sign))
    return found


def _differs(one: Difference) -> str:
    digits = 3 if max(abs(one.low), abs(one.high)) < 10 else 1
    around = f"{number(one.low, digits)} to {number(one.high, digits)}, n = {one.n:,}"
    way = "higher" if one.mean >= 0 else "lower"
    end = {
        "better": "more than luck would do",
        "worse": "worse, by more than luck would do",
        "no difference shown": "luck could do that",
    }.get(verdict(one), "more than luck would do")
    name = _PLAIN.get(one.key, titled(one.key))
    return f"{name}: {way} by {number(abs(one.mean), digits)} ({around}), {end}."


# --- one run


def _trained(results: Mapping[str, Any]) -> Iterator[Said]:
    about = str(results.get("about") or results.get("recipe") or "").strip().rstrip(".")
    facts = []
    for key, say in (
        ("parameters", lambda value: f"{large(value)} parameters"),
        ("steps", lambda value: f"{large(value)} steps"),
        ("seconds", lambda value: f"{duration(value)} of training"),
    ):
        value = _plain(results.get(key))
        if value is not None:
            facts.append(say(value))
    if about or facts:
        start = f"{about[:1].upper()}{about[1:]}." if about else ""
        rest = f"{', '.join(facts)}." if facts else ""
        yield Said("What was trained?", f"{start} {rest[:1].upper()}{rest[1:]}".strip())


def _data(results: Mapping[str, Any]) -> Iterator[Said]:
    data = results.get("data")
    entries = [one for one in data if isinstance(one, Mapping)] if isinstance(data, list) else []
    names = list(dict.fromkeys(str(one.get("name") or "") for one in entries))
    parts = []
    for name in [name for name in names if name][:3]:
        used: list[str] = []
        for split, word in (
            ("train", "to learn from"),
            ("val", "to choose by"),
            ("test", "to test"),
        ):
            counts = [
                int(one["n"])
                for one in entries
                if one.get("name") == name and one.get("split") == split
                if isinstance(one.get("n"), int)
            ]
            if counts:
                used.append(
                    f"{max(counts):,} items {word}" if not used else f"{max(counts):,} {word}"
                )
        parts.append(f"{name}: {', '.join(used)}" if used else name)
    if parts:
        more = f"; and {len(names) - 3} other sets" if len(names) > 3 else ""
        yield Said("On what?", "; ".join(parts) + more + ".")


def _good(results: Mapping[str, Any]) -> Iterator[Said]:
    task = task_of(results)
    ours = _entry(results, "ours", task)
    value = _plain(ours.get("value"))
    if not task or value is None:
        return
    digits = 3 if abs(value) < 10 else 1
    low, high = _plain(ours.get("low")), _plain(ours.get("high"))
    parts = []
    if low is not None and high is not None:
        parts.append(f"95 % interval {number(low, digits)} to {number(high, digits)}")
    if isinstance(ours.get("n"), int):
        parts.append(f"n = {ours['n']:,}")
    inside = f" ({', '.join(parts)})" if parts else ""
    lower = " Lower is better." if ours.get("direction") == "lower" else ""
    text = f"{titled(task)} {number(value, digits)}{inside}.{lower}"
    sign = ""
    chance = _chance(results, task)
    if chance is not None:
        text += f" Guessing would get {number(chance, digits)}."
        if low is not None and high is not None:
            sign = "good" if low > chance else "bad" if high <= chance else ""
            if low <= chance < high:
                text += " It was not shown to be better than guessing."
    paper = _plain(_entry(results, "paper", task).get("value"))
    if paper is not None:
        text += f" The paper states {number(paper, digits)}."
    yield Said("How good are its answers?", text, sign)


def _looks(run: Run) -> Iterator[Said]:
    """How much lies on the evidence beside an even map, and how wide the map is."""
    card = run.card
    sentences, sign = [], ""
    ours = {
        key: _plain(_entry(run.results, "ours", key).get("value")) for key in (*_MASS, *_POINTING)
    }
    mass = next((ours[key] for key in _MASS if ours[key] is not None), None)
    pointing = next((ours[key] for key in _POINTING if ours[key] is not None), None)
    even = _interval(card, UNIFORM, "mass_inside")
    if mass is not None and 0 <= mass <= 1:
        text = f"{mass:.0%} of its attention lies on the evidence for the answer"
        if even is not None:
            text += f"; a map that is even everywhere would have {even.mean:.0%} there"
            gap = _gap(card, UNIFORM, "mass_inside")
            sign = "" if gap is None else {"better": "good", "worse": "bad"}.get(gap.verdict, "")
        sentences.append(f"{text}.")
    if pointing is not None and 0 <= pointing <= 1:
        sentences.append(
            f"Its largest weight is on the evidence for {pointing:.0%} of the samples."
        )
    wide = None if card is None else _interval(card, card.subject, "effective_support")
    every = _interval(card, UNIFORM, "effective_support")
    if wide is not None and every is not None and card is not None:
        what = {ATTENTION: "Its attention"}.get(card.subject, f"Its map ({card.subject})")
        sentences.append(
            f"{what} spreads as wide as {wide.mean:.0f} of {every.mean:.0f} places would, evenly."
        )
    if sentences:
        yield Said("Where does it look?", " ".join(sentences), sign)


def _trusted(run: Run) -> Iterator[Said]:
    """Whether what is attended to drives the answer more than what is picked at random."""
    question = "Does that tell what drives its answers?"
    card = run.card
    if card is None:
        return
    gaps = [(key, _gap(card, RANDOM, key)) for key in (DELETION, INSERTION)]
    known = [(key, gap) for key, gap in gaps if gap is not None]
    if not known:
        return
    verdicts = {gap.verdict for _, gap in known}
    parts = [_removed(card, key) for key, _ in known]
    if verdicts == {"better"}:
        start, sign = "Yes, as far as removing parts can show", "good"
    elif "better" in verdicts and "worse" not in verdicts:
        start, sign = "In part", ""
    elif "worse" in verdicts:
        start, sign = "No: a random choice does better", "bad"
    else:
        start, sign = "That was not shown", ""
    text = f"{start}. {' '.join(parts)} Asked of {len(card):,} samples."
    beaten = [_gap(card, GRADIENT, key) for key in (DELETION, INSERTION)]
    if any(one is not None and one.verdict == "worse" for one in beaten):
        text += " A map made of the gradient tells more."
    yield Said(question, text, sign)


def _removed(card: Scorecard, key: str) -> str:
    own, random = card.intervals[card.subject, key], card.intervals[RANDOM, key]
    if key == DELETION:
        return (
            "When what it looks at most is taken away first, the mean probability of its answer "
            f"along the way is {own.mean:.3f}, against {random.mean:.3f} in random order (lower "
            "tells more)."
        )
    pair = f"{own.mean:.3f} against {random.mean:.3f}"
    return f"When that is given back first, it is {pair} (higher tells more)."


def _interval(card: Scorecard | None, name: str, key: str) -> Interval | None:
    found = None if card is None else card.intervals.get((name, key))
    return found if found is not None and found.count and abs(found.mean) < float("inf") else None


def _gap(card: Scorecard | None, control: str, key: str) -> Difference | None:
    if card is None or control not in card.maps or control == card.subject:
        return None
    return next((one for one in card.against(control) if one.key == key), None)


def _chance(results: Mapping[str, Any], task: str) -> float | None:
    """What guessing would get: the mean over groups of samples, where every group says it."""
    groups = results.get("groups")
    members = groups.get(task) if isinstance(groups, Mapping) else None
    if not isinstance(members, Mapping) or not members:
        return None
    pairs = []
    for one in members.values():
        chance = _plain(one.get("chance")) if isinstance(one, Mapping) else None
        count = _plain(one.get("n")) if isinstance(one, Mapping) else None
        if chance is None or not count:
            return None
        pairs.append((chance, count))
    return sum(chance * count for chance, count in pairs) / sum(count for _, count in pairs)


def _entry(results: Mapping[str, Any], section: str, key: str) -> Mapping[str, Any]:
    table = results.get(section)
    found = table.get(key) if isinstance(table, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _plain(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and abs(value) < float("inf") else None
