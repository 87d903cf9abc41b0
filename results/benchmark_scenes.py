"""Write the tables of a run of `overt bench` into docs/benchmark.md, from `benchmark-scenes.zip`.

python results/benchmark_scenes.py
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from archive import unpacked

from overt import io
from overt.inspect.benchmark import FINISHED, SETTINGS, format_rank
from overt.inspect.map_methods import ATTENTION
from overt.metrics.scorecard.benchmark import TARGET, Benchmark, ModelResult
from overt.metrics.scorecard.result import Scorecard, format_interval

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmark.md"
MARKS = r"(<!-- benchmark -->\n).*?(<!-- /benchmark -->)"
KEYS = ("spearman", "mass_inside", "leave_one_out_agreement@mean")


def benchmark() -> Benchmark:
    """Read the scorecards of all models."""
    results = []
    for folder in sorted((unpacked() / "benchmark-scenes").iterdir()):
        held, card = io.read_json(folder / FINISHED / SETTINGS), Scorecard.load(folder)
        data = f"{card.data['name']} {card.data['split']}"
        # the run called attention `raw`
        reasons = {ATTENTION if n == "raw" else n: why for n, why in held["unavailable"].items()}
        results.append(ModelResult(held["name"], data, (card,), reasons))
    return Benchmark(tuple(results))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---")


def names(found: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    return ", ".join(found) if found else "none"


def decided_share(result: ModelResult, key: str) -> float:
    """Return the share of pairs of methods that differ significantly by a metric."""
    standings = result.standings(key)
    count = len(standings)
    return sum(one.first - 1 for one in standings) / (count * (count - 1) / 2)


def findings(found: Benchmark) -> str:
    """Return the answers to the questions of the log as a table."""
    reference = found.reference
    rows = []
    for one in found.results:
        standings = one.standings(reference)
        title = f"{one.model}, {len(one.cards[0])} samples, {len(standings)} methods"
        weak = [at.method for at in standings if not at.beats_controls]
        rows += [
            [
                f"{title}: which may rank first by `spearman`?",
                names([at.method for at in standings if at.first == 1]),
            ],
            [f"{one.model}: which do not beat every control by `spearman`?", names(weak)],
        ]
        own = next((at for at in standings if at.method == ATTENTION), None)
        if own is not None:
            rank = format_rank(own.first, own.last)
            rows.append([f"{one.model}: rank of its own attention", rank])
    (inside,) = [one for one in found.agreements if one.key == "mass_inside"]
    rows.append(
        [
            "Do two metrics that see the evidence, `spearman` and `mass_inside`, agree?",
            "tau " + names([f"{tau:+.2f} ({where})" for where, tau in inside.taus.items()]),
        ]
    )
    known = sorted(found.agreements, key=lambda one: -one.mean)
    unseen = [one for one in known if "@" in one.key]
    shown = [f"`{one.key}` ({one.mean:+.2f})" for one in unseen]
    rows.append(
        ["Which metric that does not see the evidence orders methods most like it?", shown[0]]
    )
    rows.append(["Which least?", shown[-1]])
    return table(["question", "answer"], rows)


def methods_table(found: Benchmark, key: str) -> str:
    """Return the table of one metric: methods by models, with sets of ranks."""
    ranked = [{at.method: at for at in one.standings(key)} for one in found.results]
    means = {
        name: fmean(at[name].interval.mean for at in ranked if name in at)
        for name in dict.fromkeys(name for at in ranked for name in at)
    }
    sign = 1 if found.results[0].cards[0].about(key)["direction"] == "higher" else -1
    rest = [*found.results[0].controls, TARGET]
    rows = []
    for name in (*sorted(means, key=lambda one: -sign * means[one]), *rest):
        cells = [name if name in means else f"*{name}*"]
        for one, at in zip(found.results, ranked, strict=True):
            interval, standing = one.interval(key, name), at.get(name)
            text = "–" if interval is None else format_interval(interval)
            if interval is not None and interval.count < len(one.cards[0]):
                text += f", n = {interval.count}"
            rank = "" if standing is None else format_rank(standing.first, standing.last)
            if standing is not None and standing.beats_controls:
                rank += " ✓"
            cells += [text, rank]
        rows.append(cells)
    header = [f"`{key}`", *(word for one in found.results for word in (one.model, "rank"))]
    return table(header, rows)


def metrics_table(found: Benchmark) -> str:
    """Return the table of metrics: trust, pairs decided, and agreement with the evidence."""
    rows = []
    trust = {one.key: one for one in found.agreements}
    for key in found.keys:
        one = trust[key]
        cells = [f"`{key}`", "–" if one.trust is None else f"{one.trust:.2f}"]
        decided = [decided_share(result, key) for result in found.results if key in result.keys]
        cells.append(f"{fmean(decided):.0%}")
        for result in found.results:
            tau = one.taus.get(f"{result.model} on {result.data}")
            cells.append("–" if tau is None else f"{tau:+.2f}")
        cells.append(f"{one.mean:+.2f}" if one.taus else "–")
        rows.append(cells)
    models = [f"tau, {one.model}" for one in found.results]
    return table(["metric", "planted tests", "pairs decided", *models, "mean tau"], rows)


def unavailable_table(found: Benchmark) -> str:
    """Return which methods do not apply, and why."""
    rows = []
    for one in found.results:
        reasons: dict[str, list[str]] = {}
        for name, why in one.unavailable.items():
            reasons.setdefault(why.removeprefix(f"{name} "), []).append(name)
        rows += [[one.model, names(methods), why] for why, methods in reasons.items()]
    return table(["model", "not applicable", "reason"], rows)


def tables() -> str:
    """Return everything between the marks of the page."""
    found = benchmark()
    parts = [findings(found), *(methods_table(found, key) for key in KEYS)]
    return "\n\n".join([*parts, metrics_table(found), unavailable_table(found)])


def filled(page: str) -> str:
    """Return the page with the tables between their marks."""
    return re.sub(MARKS, lambda m: f"{m[1]}{tables()}\n{m[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
