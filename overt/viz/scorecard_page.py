"""Scorecard as an HTML page: every score next to those of control maps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from overt import io
from overt.metrics.scorecard.catalog import describe
from overt.metrics.scorecard.entry import MetricQuestion
from overt.metrics.scorecard.result import MODEL, Difference, Scorecard, format_counts
from overt.metrics.scorecard.trust import Trust, find_trust
from overt.metrics.statistics import Interval
from overt.viz.results_table import (
    decimal_places,
    format_duration,
    format_interval,
    format_number,
    format_p_value,
    join_words,
)
from overt.viz.templates import render_template

WIDTH, HEIGHT, EDGE = 150, 30, 8  # pixels of the strip plot
_VERDICTS = {"better": "worse", "worse": "better", "": "no difference shown"}


@dataclass(frozen=True)
class ScorecardCell:
    """One map and metric as text; `verdict` is that of the evaluated map against this one."""

    text: str = "–"
    interval: str = ""
    verdict: str = ""
    aside: str = ""
    n: int = 0


@dataclass(frozen=True)
class ScorecardRow:
    """One metric: name, scores of all maps, and a drawing of them."""

    key: str
    name: str
    arrow: str
    unit: str
    span: str
    n: str
    cannot: str
    cells: tuple[ScorecardCell, ...]
    drawing: Markup
    seconds: str
    trust: str = ""


@dataclass(frozen=True)
class ScorecardSection:
    """The metrics of one question; `maps` is False for metrics of the model itself."""

    title: str
    name: str
    maps: bool
    lines: tuple[ScorecardRow, ...]


def write_scorecard_page(
    out: Path, card: Scorecard, other: Scorecard | None = None, command: str = ""
) -> Path:
    """Write the page of a scorecard, optionally compared with another one, and return its path."""
    io.write_text(out, render_scorecard(card, other, command))
    return out


def render_scorecard(card: Scorecard, other: Scorecard | None = None, command: str = "") -> str:
    """Render the page."""
    gaps = () if other is None else card.compare(other)
    parts = scorecard_sections(card)
    first = {part.name: at for at, part in reversed(list(enumerate(parts)))}
    return render_template(
        "scores.html.jinja",
        title=card.name if other is None else f"{card.name} and {other.name}",
        card=card,
        other=other,
        lead=_lead(card),
        notes=[
            note
            for note in card.notes()
            if not note.startswith(("not computed", "ranks the truthful"))
        ],
        parts=parts,
        sections=sorted((at, name) for name, at in first.items()),
        gaps=[_difference_row(one) for one in gaps],
        left_out="" if other is None else _sentence(card.not_compared(other)),
        skipped=_reasons(card.skipped),
        images=len(set(card.clusters)),
        took=format_duration(sum(card.seconds.values())),
        command=command,
    )


def _sentence(words: str) -> str:
    """Return words as a sentence; an empty string stays empty."""
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _lead(card: Scorecard) -> str:
    data = card.data
    images = len(set(card.clusters))
    shared = f" of {images:,} images" if images < len(card) else ""
    return (
        f"Evaluated on {data['name']} ({data['split']}), {len(card):,} samples{shared}. Every "
        "score stands next to those of control maps that ignore the sample; it is meaningful "
        "only in comparison with them."
    )


def scorecard_sections(card: Scorecard) -> list[ScorecardSection]:
    """Return the rows of a scorecard by question."""
    against = {name: {one.key: one for one in card.against(name)} for name in card.maps[1:]}
    found = []
    for question in MetricQuestion:
        named = [one for one in card.measures if one["question"] == question.name.lower()]
        for maps in (True, False):
            chosen = [one for one in named if ((MODEL, one["key"]) in card.intervals) is not maps]
            if chosen:
                lines = tuple(_scorecard_row(card, one, against) for one in chosen)
                found.append(ScorecardSection(question.value, question.name.lower(), maps, lines))
    return found


def _scorecard_row(
    card: Scorecard, about: Mapping[str, Any], against: Mapping[str, Mapping[str, Difference]]
) -> ScorecardRow:
    key = str(about["key"])
    names = (MODEL,) if (MODEL, key) in card.intervals else card.maps
    there = {name: card.intervals[name, key] for name in names if (name, key) in card.intervals}
    finite = [one for one in there.values() if abs(one.mean) < float("inf")]
    digits = decimal_places(end for one in finite for end in (one.mean, one.low, one.high))
    cells = tuple(
        _cell(there.get(name), against.get(name, {}).get(key), digits, about) for name in names
    )
    if len({one.count for one in there.values()}) > 1:  # counts differ: state each
        cells = tuple(_with_n(cell) for cell in cells)
    low, high = (about[word] for word in ("low", "high"))
    ends = ["−∞" if low is None else f"{low:.3g}", "∞" if high is None else f"{high:.3g}"]
    return ScorecardRow(
        key,
        str(about["name"]),
        {"higher": "↑", "lower": "↓", "neither": ""}[str(about["direction"])],
        str(about["unit"]),
        f"{ends[0]} to {ends[1]}".replace("-", "−"),
        format_counts(there.values()),
        _meaning(key, about),
        cells,
        strip_plot(there),
        format_duration(card.seconds[key]) if key in card.seconds else "",
        describe_trust(card.trust(key)),
    )


def describe_trust(trust: Trust | None) -> str:
    """Return how far a metric can be trusted, in a few words; empty if that is unknown."""
    return "" if trust is None else f"finds the truth in {trust.share:.0%} of planted tests"


def _meaning(key: str, about: Mapping[str, Any]) -> str:
    """Return what a metric measures, its range and direction, and what it cannot show."""
    summary, limitation = describe(key), str(about["cannot_say"])
    trust = find_trust(key, int(about.get("version", 1)))
    counted = "" if trust is None else f" It {trust}."
    return f"{summary}. Cannot show: {limitation}{counted}" if summary else limitation


def _cell(
    one: Interval | None, gap: Difference | None, digits: int, about: Mapping[str, Any]
) -> ScorecardCell:
    if one is None or not one.count:
        return ScorecardCell()
    if abs(one.mean) == float("inf"):
        return ScorecardCell("∞" if one.mean > 0 else "−∞", verdict=_verdict(gap), n=one.count)
    around = format_interval(one.low, one.high, digits)
    if gap is None or about["direction"] == "neither":
        return ScorecardCell(format_number(one.mean, digits), around, n=one.count)
    aside = (
        f"difference {format_number(gap.mean, digits)} "
        f"({format_interval(gap.low, gap.high, digits)}), p {format_p_value(gap.p)}, "
        f"Holm {format_p_value(gap.holm)}, FDR {format_p_value(gap.fdr)}, "
        f"effect size {format_number(gap.effect, 2)}: {_VERDICTS[gap.verdict]}"
    )
    return ScorecardCell(format_number(one.mean, digits), around, gap.verdict, aside, one.count)


def _with_n(cell: ScorecardCell) -> ScorecardCell:
    if not cell.n:
        return cell
    return replace(cell, interval=f"{cell.interval}, n = {cell.n}".removeprefix(", "))


def _verdict(gap: Difference | None) -> str:
    return "" if gap is None else gap.verdict


def strip_plot(there: Mapping[str, Interval]) -> Markup:
    """Draw all maps on one line: the evaluated one as a dot with interval, others as strokes."""
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
            if one.low == one.low:  # not NaN
                reach = f'x1="{place(one.low)}" x2="{place(one.high)}"'
                marks.append(f'<line class="reach" {reach} y1="{middle}" y2="{middle}"/>')
            marks.append(f'<circle cx="{place(one.mean)}" cy="{middle}" r="5">{label}</circle>')
    description = "; ".join(f"{name} {one.mean:.3g}" for name, one in known.items())
    return Markup(
        f'<svg class="strip" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}"><desc>{escape(description)}</desc>'
        f'<line class="axis" x1="0" x2="{WIDTH}" y1="{middle}" y2="{middle}"/>'
        f"{''.join(marks)}</svg>"
    )


def _difference_row(one: Difference) -> dict[str, str]:
    digits = decimal_places([one.mean, one.low, one.high])
    return {
        "key": one.key,
        "n": f"{one.n:,}",
        "mean": format_number(one.mean, digits),
        "interval": format_interval(one.low, one.high, digits),
        "p": format_p_value(one.p),
        "holm": format_p_value(one.holm),
        "fdr": format_p_value(one.fdr),
        "effect": format_number(one.effect, 2),
        "superiority": f"{one.superiority:.0%}",
        "verdict": one.verdict,
    }


def _reasons(skipped: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return why metrics were skipped: each reason once, with its metrics."""
    found: dict[str, list[str]] = {}
    for key, why in skipped.items():
        found.setdefault(why, []).append(key)
    return [(join_words(keys), why) for why, keys in found.items()]
