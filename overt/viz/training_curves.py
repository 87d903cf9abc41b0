"""Training curves as inline SVG without scripts.

Colours come from the CSS variables `--run-0`, `--run-1` ... of a page, so that light and dark pages
share a drawing, with the colour-blind safe colours of Okabe and Ito as default.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from markupsafe import Markup

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8579a", "#b98a00", "#3a9fd4", "#7a5cc7", "#666666")
MAX_POINTS = 160

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 38

Number = int | float
Point = tuple[Number, Number]


@dataclass(frozen=True)
class Curve:
    """One curve: name, points from left to right, colour index, and whether it is faint."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    faint: bool = False


def plot_curves(lines: Sequence[Curve], title: str, x: str = "step") -> Markup:
    """Draw a chart of curves with axes, a legend and a text alternative.

    Points that are not finite are left out. A curve with more than 160 points is averaged over as
    many intervals.

    Args:
        lines: curves.
        title: title of the chart.
        x: name of the x axis.

    Returns:
        An inline SVG.

    Example:
        >>> svg = plot_curves([Curve("loss", ((0, 2.0), (100, 0.5)))], "training loss")
        >>> "loss goes from 2 to 0.5 at step 100" in svg
        True
    """
    lines = [Curve(one.name, downsample(one.points), one.colour, one.faint) for one in lines]
    shown = [line for line in lines if line.points]
    legend = _legend_rows(shown)
    start = (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH} {HEIGHT + 16 * len(legend)}" font-size="11" '
        f'font-family="system-ui,sans-serif" fill="currentColor">'
        f"<title>{escape(title)}</title><desc>{escape(_describe_curves(shown, x))}</desc>"
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{escape(title)}</text>'
    )
    if not shown:
        nothing = f'<text x="{LEFT}" y="{HEIGHT / 2}">no data</text>'
        return Markup(f"{start}{nothing}</svg>")
    axes = _axes(shown)
    behind_first = sorted(shown, key=lambda line: not line.faint)
    drawn = "".join(_draw_curve(line, axes) for line in behind_first)
    return Markup(f"{start}{_axis_labels(axes, x)}{drawn}{_legend(legend)}</svg>")


def curves_from_log(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Curve]]:
    """Return the curves of every chart, by title, from the `log.jsonl` rows of each run.

    Each loss and metric has a chart. Per-layer attention statistics have a chart with a curve per
    layer, at most eight, evenly spaced. Stages follow one another along the steps; repeated steps
    of a resumed run replace earlier ones. Training curves are faint if a chart has other splits.
    """
    found: dict[str, dict[tuple[int, str, str], list[Point]]] = {}
    for run, rows in enumerate(logs.values()):
        for step, split, row in _by_step(rows):
            for kind in ("measures", "losses"):
                values = row.get(kind)
                for name, value in (values if isinstance(values, Mapping) else {}).items():
                    title = str(name) if kind == "measures" else f"{name} loss"
                    if isinstance(value, int | float) and math.isfinite(value):
                        key = (run, list(logs)[run], split)
                        chart = found.setdefault(title.replace("_", " "), {})
                        _append_point(chart.setdefault(key, []), step, value)
    charts = _layer_charts(logs)
    for title, chart in sorted(found.items(), key=lambda item: item[0].endswith(" loss")):
        splits = {split for _, _, split in chart}
        charts[title] = [
            Curve(
                name=f"{run}, {split}" if len(splits) > 1 else run,
                points=tuple(points),
                colour=number,
                faint=len(splits) > 1 and split == "train",
            )
            for (number, run, split), points in sorted(chart.items())
        ]
    return charts


def _layer_charts(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Curve]]:
    """Return a chart for each per-layer statistic, such as entropy."""
    found: dict[str, dict[tuple[str, str], list[Point]]] = {}
    for run, rows in logs.items():
        for step, _, row in _by_step(rows):
            by_layer = row.get("layers")
            for number, layers in (by_layer if isinstance(by_layer, Mapping) else {}).items():
                for layer, value in (layers if isinstance(layers, Mapping) else {}).items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        chart = found.setdefault(f"attention {number} by layer", {})
                        _append_point(chart.setdefault((run, str(layer)), []), step, value)
    charts = {}
    for title, chart in found.items():
        shown = _evenly_spaced(list(chart), len(COLOURS))
        charts[title] = [
            Curve(layer if len(logs) == 1 else f"{run}, {layer}", tuple(chart[run, layer]), colour)
            for colour, (run, layer) in enumerate(shown)
        ]
    return charts


def _append_point(line: list[Point], step: float, value: Number) -> None:
    """Append a point; steps repeated after a resume replace earlier ones."""
    while line and line[-1][0] >= step:
        line.pop()
    line.append((step, float(value)))


def _evenly_spaced(keys: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Return at most `most` of the keys, evenly spaced, with the first and the last."""
    if len(keys) <= most:
        return keys
    return [keys[round(at * (len(keys) - 1) / (most - 1))] for at in range(most)]


def _by_step(rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[float, str, Mapping[str, Any]]]:
    """Yield rows with steps counted over all stages."""
    before: dict[str, float] = {}
    last = 0.0
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int | float) or not math.isfinite(step):
            continue
        at = before.setdefault(str(row.get("stage")), last) + step
        last = max(last, at)
        yield at, str(row.get("split", "train")), row


def downsample(points: Sequence[Point], most: int = MAX_POINTS) -> tuple[Point, ...]:
    """Return the finite points; more than `most` are averaged over `most` intervals."""
    good = [(float(a), float(b)) for a, b in points if math.isfinite(a) and math.isfinite(b)]
    if len(good) <= most:
        return tuple(good)
    cuts = [len(good) * i // most for i in range(most + 1)]
    stretches = [good[a:b] for a, b in pairwise(cuts)]
    return tuple(
        (sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part))
        for part in stretches
    )


def axis_ticks(low: Number, high: Number, count: int = 5) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten) from `low` to `high`.

    >>> axis_ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> axis_ticks(3, 47)
    [10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda times: abs(math.log(power * times / raw)))
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


@dataclass(frozen=True)
class _Axes:
    """Ranges of a chart and the mapping to drawing coordinates."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _axes(lines: Sequence[Curve]) -> _Axes:
    """Return axes around all points, from step 0, with margins above and below."""
    xs = [a for line in lines for a, _ in line.points]
    ys = [b for line in lines for _, b in line.points]
    left, right, low, high = min(0.0, *xs), max(xs), min(ys), max(ys)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = 0.0 if 0 <= low <= air else low - air  # start at zero if it is near
    return _Axes(left, right if right > left else left + 1, low, high + air)


def _axis_labels(axes: _Axes, x: str) -> str:
    """Draw grid lines and the numbers along both axes."""
    across = (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axes.y(value):.1f}" y2="{axes.y(value):.1f}" '
        f'stroke="currentColor" stroke-opacity=".14"/><text x="{LEFT - 7}" '
        f'y="{axes.y(value) + 3.5:.1f}" text-anchor="end" opacity=".7">{_short(value)}</text>'
        for value in axis_ticks(axes.low, axes.high, 4)
    )
    along = (
        f'<text x="{axes.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
        f'opacity=".7">{_short(value)}</text>'
        for value in axis_ticks(axes.left, axes.right, 4)
    )
    name = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end" opacity=".7">'
    return "".join(across) + "".join(along) + f"{name}{escape(x)}</text>"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _colour(number: int) -> str:
    number %= len(COLOURS)
    return f"var(--run-{number},{COLOURS[number]})"


def _stroke(line: Curve) -> str:
    dashes = ' stroke-dasharray="2 3" stroke-opacity=".75"' if line.faint else ""
    return f'stroke="{_colour(line.colour)}" stroke-width="{1.4 if line.faint else 2}"{dashes}'


def _draw_curve(line: Curve, axes: _Axes) -> str:
    points = [(axes.x(a), axes.y(b)) for a, b in line.points]
    last = f"{line.name}: {line.points[-1][1]:.4g} at {line.points[-1][0]:g}"
    x, y = points[-1]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return (
        f'<polyline points="{path}" fill="none" stroke-linejoin="round" {_stroke(line)}/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{2 if line.faint else 3}" '
        f'fill="{_colour(line.colour)}"><title>{escape(last)}</title></circle>'
    )


def _legend_rows(lines: Sequence[Curve]) -> list[list[tuple[Number, Curve]]]:
    """Arrange the names below the chart in rows."""
    rows: list[list[tuple[Number, Curve]]] = []
    at: Number = math.inf
    for line in lines:
        wide = 30 + 6.3 * len(line.name)
        if at + wide > WIDTH - RIGHT:
            rows.append([])
            at = LEFT
        rows[-1].append((at, line))
        at += wide
    return rows


def _legend(rows: Sequence[Sequence[tuple[Number, Curve]]]) -> str:
    out = []
    for number, row in enumerate(rows):
        y = HEIGHT + 16 * number + 6
        for x, line in row:
            out.append(
                f'<line x1="{x:.0f}" x2="{x + 16:.0f}" y1="{y}" y2="{y}" {_stroke(line)}/>'
                f'<text x="{x + 21:.0f}" y="{y + 4}">{escape(line.name)}</text>'
            )
    return "".join(out)


def _describe_curves(lines: Sequence[Curve], x: str) -> str:
    ends = [
        f"{line.name} goes from {line.points[0][1]:.3g} to {line.points[-1][1]:.3g} "
        f"at {x} {line.points[-1][0]:g}"
        for line in lines
    ]
    return "; ".join(ends) + "." if ends else "No data."
