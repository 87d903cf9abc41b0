"""HTML report of one or several runs: one file without network requests.

Images are embedded, a content security policy forbids requests, and all data is escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.metrics.scorecard.result import Difference, Scorecard
from overt.viz.gallery import build_gallery, colour_scale_css, dimmed_photo_css, heat_palette
from overt.viz.packed_maps import difference_scale_css
from overt.viz.results_table import (
    decimal_places,
    format_bytes,
    format_duration,
    format_interval,
    format_large,
    format_number,
    group_results,
    join_words,
    metric_title,
    result_columns,
)
from overt.viz.run_comparison import RunComparison, compare_runs, describe_verdict
from overt.viz.run_reader import Run, read_runs
from overt.viz.run_summary import summarize_comparison, summarize_run
from overt.viz.scorecard_page import ScorecardSection, scorecard_sections
from overt.viz.templates import render_template
from overt.viz.training_curves import COLOURS, curves_from_log, plot_curves

OPEN_ROWS = 12  # of the results table of one run, before "more"
_ORDER = (
    "rank correlation of attention and evidence over cells; 1 is the same order, 0 no relation."
)
_MEANINGS = {
    "pointing": "fraction of samples whose largest attention weight is on the evidence.",
    "mass": "fraction of the attention on the evidence.",
    "rank": _ORDER,
    "spearman": _ORDER,
    "seconds": "training time.",
    "deletion": (
        "how much more the answer's probability falls when the attended half is removed than when "
        "a random half is removed; 0 is no difference."
    ),
    "flips": "how many more answers change when the attended half is removed than a random half.",
    "entropy": "entropy of the attention; 0 is a single position.",
}


def write_report(out: Path | str, runs: Sequence[Path | str], max_samples: int = 64) -> Path:
    """Write the HTML report of run folders.

    Parts that a run lacks are noted on the page.

    Args:
        out: .html file to write, or a folder for `report.html`.
        runs: run folders; later runs are compared with the first.
        max_samples: samples in the gallery; 64 keep the page below 5 MB.

    Returns:
        Path of the page.

    Raises:
        UserError: if a folder is not a run, or the runs share no test samples.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     io.write_json(Path(folder, "results.json"), {"title": "soft attention"})
        ...     page = write_report(folder, [folder])
        ...     page.name, "soft attention" in page.read_text()
        ('report.html', True)
    """
    page = render_report(read_runs([Path(run) for run in runs]), max_samples)
    out = Path(out)
    target = out if out.suffix.lower() in {".html", ".htm"} else out / "report.html"
    io.write_text(target, page)
    return target


def render_report(runs: Sequence[Run], max_samples: int = 64) -> str:
    """Render the report of these runs."""
    results = [run.results for run in runs]
    shown = result_columns(results)
    if len(runs) == 1:  # metrics with a published number first
        shown.sort(key=lambda column: column.cells[0].paper == "")
    charts = curves_from_log({run.name: run.log for run in runs})
    pairs = compare_runs(runs)
    return render_template(
        "report.html.jinja",
        title=_title(runs),
        lead=_lead(runs),
        summary=summarize_run(runs[0]) if len(runs) == 1 else summarize_comparison(runs, pairs),
        runs=[_run_details(run) for run in runs],
        colours=COLOURS,
        columns=shown,
        open=OPEN_ROWS,
        meanings=_meanings([column.title for column in shown]),
        sources=_sources(runs),
        pairs=[_paired_runs(runs, pair) for pair in pairs],
        scorecards=[_run_scorecard(number, run) for number, run in enumerate(runs)],
        groups=group_results(results),
        charts=[plot_curves(lines, title) for title, lines in charts.items()],
        gallery=build_gallery([run.gallery for run in runs], max_samples),
        palette=heat_palette(),
        scale=colour_scale_css(),
        under=dimmed_photo_css(),
        change=difference_scale_css(),
    )


@dataclass(frozen=True)
class PairedRuns:
    """Differences between two runs as table rows; `note` states the samples."""

    first: int
    second: int
    note: str
    lines: tuple[Mapping[str, str], ...]


def _paired_runs(runs: Sequence[Run], pair: RunComparison) -> PairedRuns:
    a, b = pair.sizes
    if pair.n == a == b:
        note = f"Both runs have the same {pair.n:,} test samples."
    else:
        note = f"Compared on the {pair.n:,} shared samples, of {a:,} and {b:,}."
    if pair.first_only is not None and pair.second_only is not None:
        note += f" Only {runs[pair.first].name} is correct on {pair.first_only:,}, only "
        note += f"{runs[pair.second].name} on {pair.second_only:,}."
    if not pair.clustered:
        note += " Samples are treated as independent: the runs do not record which share an image."
    if pair.redefined:
        names = ", ".join(metric_title(key) for key in pair.redefined)
        note += f" Not compared, because the definition changed between the runs: {names}."
    return PairedRuns(pair.first, pair.second, note, tuple(map(_difference_row, pair.differences)))


def _difference_row(one: Difference) -> dict[str, str]:
    digits = decimal_places([one.mean, one.low, one.high])
    return {
        "measure": metric_title(one.key),
        "arrow": {"higher": "↑", "lower": "↓"}.get(one.direction, ""),
        "n": f"{one.n:,}",
        "mean": ("+" if one.mean > 0 else "") + format_number(one.mean, digits),
        "interval": format_interval(one.low, one.high, digits),
        "p": _p_value(one.p),
        "holm": _p_value(one.holm),
        "effect": format_number(one.effect, 2),
        "verdict": describe_verdict(one),
        "sign": one.verdict,
    }


def _p_value(p: float) -> str:
    return "–" if p != p else "< 0.001" if p < 0.001 else f"{p:.3f}"


@dataclass(frozen=True)
class RunScorecard:
    """Scorecard of one run as table sections, or the reason why there is none."""

    run: int
    card: Scorecard | None
    parts: tuple[ScorecardSection, ...]
    why: str


def _run_scorecard(number: int, run: Run) -> RunScorecard:
    if run.scorecard is not None:
        return RunScorecard(number, run.scorecard, tuple(scorecard_sections(run.scorecard)), "")
    entry = run.results.get("scorecard")
    why = str(entry.get("why") or "") if isinstance(entry, Mapping) else ""
    return RunScorecard(number, None, (), why or "the run has no scorecard")


@dataclass(frozen=True)
class RunDetails:
    """Facts of one run as text."""

    name: str
    about: str
    status: str
    finished: bool
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str, str, str], ...]
    command: str
    settings: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]


def _run_details(run: Run) -> RunDetails:
    results = run.results
    return RunDetails(
        name=run.name,
        about=str(results.get("about") or ""),
        status=run.status,
        finished=run.finished,
        notes=run.notes,
        facts=tuple(_facts(results)),
        data=tuple(_data(results.get("data"))),
        command=_command(results.get("command")),
        settings=tuple(flatten_settings(results.get("settings"))),
        versions=tuple(flatten_settings(results.get("versions"))),
    )


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the available facts of a run as (label, text)."""
    facts = []
    for label, key, say in (
        ("Recipe", "recipe", str),
        ("Seed", "seed", str),
        ("Device", "device", str),
        ("Processes", "world_size", lambda value: str(value) if value != 1 else ""),
        ("Steps", "steps", format_large),
        ("Epochs", "epochs", lambda value: f"{value:g}"),
        ("Time", "seconds", format_duration),
        ("Samples per second", "samples_per_second", lambda value: format_number(value, 0)),
        ("Parameters", "parameters", format_large),
        ("FLOPs per sample", "flops", format_large),
        ("Peak memory", "peak_memory", format_bytes),
        ("Started", "started", lambda value: str(value)[:16].replace("T", " ")),
        ("Commit", "commit", _commit),
    ):
        value = results.get(key)
        if value is None or value == "":
            continue
        try:
            text = say(value)
        except (TypeError, ValueError):  # not a number: print as is
            text = str(value)
        if text:
            facts.append((label, text))
    return facts


def _commit(value: Any) -> str:
    """Return the first digits of a commit, and whether files had changed."""
    digits, plus, changes = str(value).partition("+")
    return digits[:12] + plus + changes


def _data(value: Any) -> list[tuple[str, str, str, str]]:
    """Return name, split, size and hash of each dataset."""
    entries = value if isinstance(value, list) else []
    return [
        (
            str(entry.get("name", "")),
            str(entry.get("split", "")),
            f"{entry['n']:,}" if isinstance(entry.get("n"), int) else "",
            str(entry.get("hash", "")),
        )
        for entry in entries
        if isinstance(entry, Mapping)
    ]


def _command(value: Any) -> str:
    """Return a command as one line, also if it was saved as a list."""
    if isinstance(value, list):
        import shlex

        return shlex.join(str(word) for word in value)
    return str(value or "")


def flatten_settings(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings to (dotted name, value) pairs.

    >>> flatten_settings({"train": {"epochs": 8, "rate": 0.001}, "data": {}})
    [('train.epochs', '8'), ('train.rate', '0.001')]
    """
    if isinstance(value, Mapping):
        return [
            pair
            for key, inner in value.items()
            for pair in flatten_settings(inner, f"{name}.{key}" if name else str(key))
        ]
    return [(name, "none" if value is None else str(value))] if name else []


def _title(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    if len(names) > 4 or len("".join(names)) > 90:
        return f"{len(names)} runs compared"
    about = str(runs[0].results.get("about") or "").strip().rstrip(".")
    if len(runs) == 1 and about and names[0] == runs[0].results.get("recipe"):
        names = [about]  # words instead of the recipe's name
    title = join_words(names)
    return title[:1].upper() + title[1:]


def _lead(runs: Sequence[Run]) -> str:
    """Return a sentence on recipe and test data."""
    recipes = list(dict.fromkeys(str(run.results.get("recipe") or "") for run in runs))
    recipes = [recipe for recipe in recipes if recipe]
    data = [entry for run in runs for entry in _data(run.results.get("data"))]
    tested = [entry for entry in data if entry[1] == "test"] or data[-1:]
    tested_on = list(
        dict.fromkeys(
            f"{name}" + (f" ({split}, {n} items)" if split and n else "")
            for name, split, n, _ in tested
        )
    )
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    sentence = count + (f" of {join_words(recipes)}" if 0 < len(recipes) <= 4 else "")
    sentence += f", evaluated on {join_words(tested_on)}" if tested_on else ""
    ended = sum(run.finished for run in runs)
    if ended < len(runs):
        sentence += f"; {ended} of {len(runs)} finished" if len(runs) > 1 else ", not finished"
    return sentence + "."


def _meanings(titles: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (title, meaning)
        for title in titles
        for start, meaning in _MEANINGS.items()
        if start in title.lower().split()
    ]


def _sources(runs: Sequence[Run]) -> list[str]:
    """Return the sources of the papers' numbers, without repeats."""
    found = []
    for run in runs:
        paper = run.results.get("paper")
        entries = paper.values() if isinstance(paper, Mapping) else []
        found += [str(entry.get("source") or "") for entry in entries if isinstance(entry, Mapping)]
    return [source for source in dict.fromkeys(found) if source]
