"""Benchmark as an HTML page: which method finds the evidence, and which metric can be trusted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from overt.metrics.scorecard.benchmark import Benchmark, MetricAgreement, ModelResult, Standing
from overt.metrics.scorecard.catalog import describe
from overt.metrics.statistics import Interval
from overt.viz.results_table import decimal_places, format_interval, format_number
from overt.viz.templates import render_template

ARROWS = {"higher": "↑", "lower": "↓"}
UNKNOWN = "–"


@dataclass(frozen=True)
class BenchmarkCell:
    """A map by a metric as text; `sort` orders cells, the best first, and is empty if unknown."""

    text: str = UNKNOWN
    rank: str = ""
    interval: str = ""
    sort: str = ""
    best: bool = False
    beats: bool = False


@dataclass(frozen=True)
class BenchmarkRow:
    """A map: its name, what it is ("method", "control" or "ceiling"), and a cell per column."""

    name: str
    kind: str
    about: str
    cells: tuple[BenchmarkCell, ...]


@dataclass(frozen=True)
class BenchmarkColumn:
    """A column: a metric, or a model on a dataset."""

    title: str
    arrow: str = ""
    note: str = ""
    about: str = ""


@dataclass(frozen=True)
class BenchmarkTable:
    """A table of maps; `name` is its anchor, `title` its heading or its entry of a menu."""

    name: str
    title: str
    note: str
    columns: tuple[BenchmarkColumn, ...]
    rows: tuple[BenchmarkRow, ...]


@dataclass(frozen=True)
class MetricRow:
    """A metric: its trust, and Kendall's tau with the reference by model."""

    key: str
    about: str
    trust: str
    worst: str
    taus: tuple[tuple[str, str], ...]  # text and number for sorting
    mean: str
    sort: tuple[str, str]


def render_benchmark(found: Benchmark, methods: Mapping[str, str], command: str = "") -> str:
    """Render the page.

    Args:
        found: The benchmark.
        methods: What each method computes, by name.
        command: The command line that made it.

    Returns:
        One HTML file without network requests.
    """
    count = len({name for one in found.results for name in one.methods})
    return render_template(
        "benchmark.html.jinja",
        lead=f"{_count(count, 'method')} on {_count(len(found.results), 'model')} by "
        f"{_count(len(found.keys), 'metric')}. Click a heading to sort.",
        note=_note(found),
        overview=[_overview(found, key, methods) for key in _reference_first(found)],
        pairs=[f"{one.model} on {one.data}" for one in found.results],
        metrics=[_metric_row(found, one) for one in found.agreements],
        reference=found.reference,
        tables=[_model_table(number, one, methods) for number, one in enumerate(found.results)],
        unavailable=[
            (f"{one.model} on {one.data}", sorted(one.unavailable.items()))
            for one in found.results
            if one.unavailable
        ],
        command=command,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _note(found: Benchmark) -> str:
    """Return how much the numbers are based on."""
    runs = min((len(one.cards) for one in found.results), default=0)
    samples = sorted({len(one.cards[0]) for one in found.results})
    note = f"{' to '.join(str(n) for n in samples[:: max(1, len(samples) - 1)])} samples per model."
    if runs < 5:
        note += (
            f" With fewer than five seeds ({runs} here) the numbers are about these networks, not "
            "about the way in which they were trained."
        )
    return note


def _reference_first(found: Benchmark) -> tuple[str, ...]:
    return tuple(sorted(found.keys, key=lambda key: key != found.reference))


def _kind(result: ModelResult, name: str) -> str:
    if name in result.methods:
        return "method"
    return "control" if name in result.controls else "ceiling"


def _about(name: str, kind: str, methods: Mapping[str, str]) -> str:
    known = {"control": "a map without information", "ceiling": "a map from the dataset"}
    return methods.get(name, known.get(kind, "")).partition(";")[0]


def _overview(found: Benchmark, key: str, methods: Mapping[str, str]) -> BenchmarkTable:
    """Make the table of one metric: maps by models."""
    there = [one for one in found.results if key in one.keys]
    kinds = {name: _kind(one, name) for one in there for name in one.maps}
    columns = tuple(
        BenchmarkColumn(one.model, note=f"{one.data}, n = {len(one.cards[0])}") for one in there
    )
    cells = {name: tuple(_cells(one, key).get(name, BenchmarkCell()) for one in there)
             for name in kinds}  # fmt: skip
    about = there[0].cards[0].about(key)
    trust = there[0].cards[0].trust(key)
    note = f"{describe(key) or str(about['name'])}."
    note += f" It {trust}." if trust is not None else " It was not counted in planted tests."
    return BenchmarkTable(key, key, note, columns, _rows(cells, kinds, methods))


def _model_table(number: int, result: ModelResult, methods: Mapping[str, str]) -> BenchmarkTable:
    """Make the table of one model: maps by metrics."""
    first = result.cards[0]
    columns = []
    for key in result.keys:
        trust = first.trust(key)
        note = "planted tests: not counted" if trust is None else f"planted tests {trust.share:.0%}"
        arrow = ARROWS[str(first.about(key)["direction"])]
        columns.append(BenchmarkColumn(key, arrow, note, str(first.about(key)["cannot_say"])))
    by_key = [_cells(result, key) for key in result.keys]
    kinds = {name: _kind(result, name) for name in result.maps}
    cells = {name: tuple(one.get(name, BenchmarkCell()) for one in by_key) for name in kinds}
    clusters = len(set(first.clusters))
    note = f"{_count(len(first), 'sample')} of {_count(clusters, 'image or text')}"
    note = note.replace("image or texts", "images or texts")
    note += f", {_count(len(result.cards), 'run')}. {first.judged[:1].upper()}{first.judged[1:]}."
    title = f"{result.model} on {result.data}"
    rows = _rows(cells, kinds, methods)
    return BenchmarkTable(f"model-{number}", title, note, tuple(columns), rows)


def _rows(
    cells: Mapping[str, tuple[BenchmarkCell, ...]],
    kinds: Mapping[str, str],
    methods: Mapping[str, str],
) -> tuple[BenchmarkRow, ...]:
    """Return methods by their first column, the best first, then controls and ceilings."""
    order = ["method", "control", "ceiling"]

    def place(name: str) -> tuple[int, float]:
        known = [float(cell.sort) for cell in cells[name] if cell.sort]
        return order.index(kinds[name]), known[0] if cells[name][0].sort and known else math.inf

    return tuple(
        BenchmarkRow(name, kinds[name], _about(name, kinds[name], methods), cells[name])
        for name in sorted(cells, key=place)
    )


def _cells(result: ModelResult, key: str) -> dict[str, BenchmarkCell]:
    """Return the cell of every map by one metric."""
    sign = -1 if result.cards[0].about(key)["direction"] == "higher" else 1
    ranked = {one.method: one for one in result.standings(key)}
    known = {name: result.interval(key, name) for name in result.maps}
    there = {name: one for name, one in known.items() if one is not None and one.count}
    finite = [one for one in there.values() if math.isfinite(one.mean)]
    digits = decimal_places(end for one in finite for end in (one.mean, one.low, one.high))
    most = max((one.count for one in there.values()), default=0)
    return {name: _cell(one, ranked.get(name), digits, sign, most) for name, one in there.items()}


def _cell(
    one: Interval, standing: Standing | None, digits: int, sign: int, most: int
) -> BenchmarkCell:
    if not math.isfinite(one.mean):
        text = "∞" if one.mean > 0 else "−∞" if one.mean < 0 else UNKNOWN
        return BenchmarkCell(text)
    around = format_interval(one.low, one.high, digits)
    if one.count < most:  # undefined for some samples, as for a map without any positive value
        around = f"{around}, n = {one.count}".removeprefix(", ")
    sort = f"{sign * one.mean:.9g}"
    if standing is None:
        return BenchmarkCell(format_number(one.mean, digits), "", around, sort)
    ends = dict.fromkeys((standing.first, standing.last))
    rank = f"rank {'–'.join(map(str, ends))}"
    best = standing.first == 1
    return BenchmarkCell(
        format_number(one.mean, digits), rank, around, sort, best, standing.beats_controls
    )


def _metric_row(found: Benchmark, one: MetricAgreement) -> MetricRow:
    trust = next((r.cards[0].trust(one.key) for r in found.results if one.key in r.keys), None)
    taus = []
    for result in found.results:
        tau = one.taus.get(f"{result.model} on {result.data}", math.nan)
        taus.append((_signed(tau), _sort(tau)))
    return MetricRow(
        one.key,
        describe(one.key) or one.key,
        UNKNOWN if trust is None else f"{trust.share:.0%}",
        "" if trust is None else f"least for “{trust.worst}”: {trust.shares[trust.worst]:.0%}",
        tuple(taus),
        _signed(one.mean),
        ("" if trust is None else f"{-trust.share:.6g}", _sort(one.mean)),
    )


def _signed(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _sort(value: float) -> str:
    return "" if math.isnan(value) else f"{-value:.6g}"
