"""A scorecard as one page: self-contained, every number beside those of maps that know nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from overt import files
from overt.measure.scorecards.card import MODEL, Difference, Scorecard
from overt.measure.scorecards.entries import Question
from overt.measure.statistics import Interval
from overt.show.table import decimals, duration, number
from overt.show.template import filled

WIDTH, HEIGHT, EDGE = 150, 30, 8  # of the drawing in a line
_VERDICTS = {"better": "beaten", "worse": "beats it", "": "no difference shown"}


@dataclass(frozen=True)
class Cell:
    """One map by one measure, ready to print; `verdict` is that of the judged map against it."""

    text: str = "–"
    interval: str = ""
    verdict: str = ""
    aside: str = ""


@dataclass(frozen=True)
class Line:
    """One measure: what it is called, its maps, and a drawing of all of them."""

    key: str
    name: str
    arrow: str
    unit: str
    span: str
    n: int
    cannot: str
    cells: tuple[Cell, ...]
    drawing: Markup
    seconds: str


@dataclass(frozen=True)
class Part:
    """The measures that answer one question; `maps` is False for those of the model alone."""

    title: str
    name: str
    maps: bool
    lines: tuple[Line, ...]


def scores_page(
    out: Path, card: Scorecard, other: Scorecard | None = None, command: str = ""
) -> Path:
    """Write the page about a scorecard, compared with another one if there is any, to `out`."""
    files.write_text(out, render(card, other, command))
    return out


def render(card: Scorecard, other: Scorecard | None = None, command: str = "") -> str:
    """The page as text."""
    gaps = () if other is None else card.compare(other)
    parts = parts_of(card)
    first = {part.name: at for at, part in reversed(list(enumerate(parts)))}
    return filled(
        "scores.html.jinja",
        title=card.name if other is None else f"{card.name} and {other.name}",
        card=card,
        other=other,
        lead=_lead(card),
        notes=[note for note in card.notes() if not note.startswith("not asked")],
        parts=parts,
        sections=sorted((at, name) for name, at in first.items()),
        gaps=[_gap(one) for one in gaps],
        left_out="" if other is None else _said(card.not_compared(other)),
        skipped=_reasons(card.skipped),
        images=len(set(card.clusters)),
        took=duration(sum(card.seconds.values())),
        command=command,
    )


def _said(words: str) -> str:
    """Words as a sentence; nothing stays nothing."""
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _lead(card: Scorecard) -> str:
    data = card.data
    images = len(set(card.clusters))
    shared = f" of {images:,} images" if images < len(card) else ""
    return (
        f"Measured on {data['name']} ({data['split']}), {len(card):,} samples{shared}. Every "
        "number stands beside those of maps that know nothing of the sample: a score means "
        "something only beside them."
    )


def parts_of(card: Scorecard) -> list[Part]:
    """A card by the questions that its measures answer, ready to print."""
    against = {name: {one.key: one for one in card.against(name)} for name in card.maps[1:]}
    found = []
    for question in Question:
        named = [one for one in card.measures if one["question"] == question.name.lower()]
        for maps in (True, False):
            chosen = [one for one in named if ((MODEL, one["key"]) in card.intervals) is not maps]
            if chosen:
                lines = tuple(_line(card, one, against) for one in chosen)
                found.append(Part(question.value, question.name.lower(), maps, lines))
    return found


def _line(
    card: Scorecard, about: Mapping[str, Any], against: Mapping[str, Mapping[str, Difference]]
) -> Line:
    key = str(about["key"])
    names = (MODEL,) if (MODEL, key) in card.intervals else card.maps
    there = {name: card.intervals[name, key] for name in names if (name, key) in card.intervals}
    finite = [one for one in there.values() if abs(one.mean) < float("inf")]
    digits = decimals(end for one in finite for end in (one.mean, one.low, one.high))
    cells = tuple(
        _cell(there.get(name), against.get(name, {}).get(key), digits, about) for name in names
    )
    low, high = (about[word] for word in ("low", "high"))
    ends = ["−∞" if low is None else f"{low:.3g}", "∞" if high is None else f"{high:.3g}"]
    first = next(iter(there.values()))
    return Line(
        key,
        str(about["name"]),
        {"higher": "↑", "lower": "↓", "neither": ""}[str(about["direction"])],
        str(about["unit"]),
        f"{ends[0]} to {ends[1]}".replace("-", "−"),
        first.count,
        str(about["cannot_say"]),
        cells,
        drawn(there),
        duration(card.seconds[key]) if key in card.seconds else "",
    )


def _cell(
    one: Interval | None, gap: Difference | None, digits: int, about: Mapping[str, Any]
) -> Cell:
    if one is None or not one.count:
        return Cell()
    if one.mean == float("inf"):
        return Cell("∞")
    around = f"{number(one.low, digits)} to {number(one.high, digits)}"
    if gap is None or about["direction"] == "neither":
        return Cell(number(one.mean, digits), around)
    aside = (
        f"difference {number(gap.mean, digits)} ({number(gap.low, digits)} to "
        f"{number(gap.high, digits)}), p = {gap.p:.4f}, Holm {gap.holm:.4f}, FDR {gap.fdr:.4f}, "
        f"effect {number(gap.effect, 2)}: {_VERDICTS[gap.verdict]}"
    )
    return Cell(number(one.mean, digits), around, gap.verdict, aside)


def drawn(there: Mapping[str, Interval]) -> Markup:
    """All maps on one line: the judged one as a dot with its interval, the others as strokes."""
    known = {name: one for name, one in there.items() if abs(one.mean) < float("inf")}
    ends = [end for one in known.values() for end in (one.low, one.high, one.mean)]
    ends = [end for end in ends if end == end]
    if not ends:
        return Markup("")
    low, high = min(ends), max(ends)
    wide = high - low or 1.0

    def place(value: float) -> str:
        return f"{EDGE + (WIDTH - 2 * EDGE) * (value - low) / wide:.1f}"

    middle = HEIGHT / 2
    marks = []
    for at, (name, one) in reversed(list(enumerate(known.items()))):
        label = f"<title>{escape(name)}: {one.mean:.4g}</title>"
        if at:
            marks.append(
                f'<line class="other" x1="{place(one.mean)}" x2="{place(one.mean)}" y1="7" '
                f'y2="{HEIGHT - 7}">{label}</line>'
            )
        else:
            marks.append(
                f'<line class="reach" x1="{place(one.low)}" x2="{place(one.high)}" y1="{middle}" '
                f'y2="{middle}"/>'
                f'<circle cx="{place(one.mean)}" cy="{middle}" r="5">{label}</circle>'
            )
    spoken = "; ".join(f"{name} {one.mean:.3g}" for name, one in known.items())
    return Markup(
        f'<svg class="strip" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}"><desc>{escape(spoken)}</desc><line class="axis" x1="0" x2="{WIDTH}" '
        f'y1="{middle}" y2="{middle}"/>{"".join(marks)}</svg>'
    )


def _gap(one: Difference) -> dict[str, str]:
    digits = decimals([one.low, one.high])
    return {
        "key": one.key,
        "n": f"{one.n:,}",
        "mean": number(one.mean, digits),
        "interval": f"{number(one.low, digits)} to {number(one.high, digits)}",
        "p": f"{one.p:.4f}",
        "holm": f"{one.holm:.4f}",
        "fdr": f"{one.fdr:.4f}",
        "effect": number(one.effect, 2),
        "superiority": f"{one.superiority:.0%}",
        "verdict": one.verdict,
    }


def _reasons(skipped: Mapping[str, str]) -> list[tuple[str, str]]:
    """Why measures were not asked, each reason once, with the measures it keeps out."""
    found: dict[str, list[str]] = {}
    for key, why in skipped.items():
        found.setdefault(why, []).append(key)
    return [(_listed(keys), why) for why, keys in found.items()]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
