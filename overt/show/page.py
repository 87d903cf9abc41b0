"""One page about one run or several: self-contained, without a single request to any host.

The page is a file to send to a colleague: pictures are inside it, a policy in its head forbids
everything else, and all that comes from data is escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.measure.scorecards.card import Difference, Scorecard
from overt.show.cards import gallery, palette, scale_css, under_css
from overt.show.curves import COLOURS, curves, from_log
from overt.show.layers import change_css
from overt.show.run import Run, read_runs
from overt.show.scores import Part, parts_of
from overt.show.summary import compared, summary
from overt.show.table import columns, decimals, duration, groups, large, number, size, titled
from overt.show.template import POLICY, filled
from overt.show.versus import Versus, verdict, versus

__all__ = ["POLICY", "flat", "render", "report"]

OPEN = 12  # rows of the table of one run that are seen at once
_ORDER = (
    "how well the order of the cells by attention follows their order by evidence; "
    "1 is the same order, 0 no relation."
)
_MEANINGS = {
    "pointing": "the share of samples whose largest attention weight lies on the evidence.",
    "mass": "the share of the attention that lies on the evidence.",
    "rank": _ORDER,
    "spearman": _ORDER,
    "seconds": "the time the training took.",
    "deletion": (
        "how much more the probability of the answer falls when the attended half is removed than "
        "when as much is removed at random; 0 is no more."
    ),
    "flips": "how many more answers change when the attended half is removed than at random.",
    "entropy": "how wide the attention is spread; 0 is one place alone.",
}


def report(out: Path | str, runs: Sequence[Path | str], most: int = 64) -> Path:
    """Write the page about these run folders to `out`, an .html file or a folder; return its path.

    The gallery shows at most `most` samples; 64 of them stay under 5 MB. What a run lacks is said
    in a sentence on the page; a folder that is no run raises `BadInput`, and so do several runs
    that were tested on other samples.
    """
    page = render(read_runs([Path(run) for run in runs]), most)
    out = Path(out)
    target = out if out.suffix.lower() in {".html", ".htm"} else out / "report.html"
    files.write_text(target, page)
    return target


def render(runs: Sequence[Run], most: int = 64) -> str:
    """The page about these runs as text."""
    results = [run.results for run in runs]
    shown = columns(results)
    if len(runs) == 1:  # what a paper states is seen at once
        shown.sort(key=lambda column: column.cells[0].paper == "")
    charts = from_log({run.name: run.log for run in runs})
    pairs = versus(runs)
    return filled(
        "report.html.jinja",
        title=_title(runs),
        lead=_lead(runs),
        said=summary(runs[0]) if len(runs) == 1 else compared(runs, pairs),
        runs=[_about(run) for run in runs],
        colours=COLOURS,
        columns=shown,
        open=OPEN,
        meanings=_explained([column.title for column in shown]),
        sources=_sources(runs),
        pairs=[_paired(runs, pair) for pair in pairs],
        scored=[_scored(number, run) for number, run in enumerate(runs)],
        groups=groups(results),
        charts=[curves(lines, title) for title, lines in charts.items()],
        gallery=gallery([run.gallery for run in runs], most),
        palette=palette(),
        scale=scale_css(),
        under=under_css(),
        change=change_css(),
    )


@dataclass(frozen=True)
class Paired:
    """One run less another, ready to print; `note` says of which samples."""

    first: int
    second: int
    note: str
    lines: tuple[Mapping[str, str], ...]


def _paired(runs: Sequence[Run], pair: Versus) -> Paired:
    a, b = pair.sizes
    if pair.n == a == b:
        note = f"All {pair.n:,} test samples are the same."
    else:
        note = f"Compared on the {pair.n:,} samples that both have, of {a:,} and {b:,}."
    if pair.first_alone is not None and pair.second_alone is not None:
        note += f" Only {runs[pair.first].name} is right on {pair.first_alone:,} of them, only "
        note += f"{runs[pair.second].name} on {pair.second_alone:,}."
    if not pair.clustered:
        note += " The runs do not say which samples share an image: each was drawn by itself."
    return Paired(pair.first, pair.second, note, tuple(map(_line, pair.differences)))


def _line(one: Difference) -> dict[str, str]:
    digits = decimals([one.low, one.high])
    return {
        "measure": titled(one.key),
        "arrow": {"higher": "↑", "lower": "↓"}.get(one.direction, ""),
        "n": f"{one.n:,}",
        "mean": ("+" if one.mean > 0 else "") + number(one.mean, digits),
        "interval": f"{number(one.low, digits)} to {number(one.high, digits)}",
        "p": _chance(one.p),
        "holm": _chance(one.holm),
        "effect": number(one.effect, 2),
        "verdict": verdict(one),
        "sign": one.verdict,
    }


def _chance(p: float) -> str:
    return "–" if p != p else "< 0.001" if p < 0.001 else f"{p:.3f}"


@dataclass(frozen=True)
class Scored:
    """The scorecard of one run, ready to print, or the sentence that says why there is none."""

    run: int
    card: Scorecard | None
    parts: tuple[Part, ...]
    why: str


def _scored(number: int, run: Run) -> Scored:
    if run.card is not None:
        return Scored(number, run.card, tuple(parts_of(run.card)), "")
    said = run.results.get("scorecard")
    why = str(said.get("why") or "") if isinstance(said, Mapping) else ""
    return Scored(number, None, (), why or "the run has none")


@dataclass(frozen=True)
class About:
    """What the page says about one run, ready to print."""

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


def _about(run: Run) -> About:
    results = run.results
    return About(
        name=run.name,
        about=str(results.get("about") or ""),
        status=run.status,
        finished=run.finished,
        notes=run.notes,
        facts=tuple(_facts(results)),
        data=tuple(_data(results.get("data"))),
        command=_command(results.get("command")),
        settings=tuple(flat(results.get("settings"))),
        versions=tuple(flat(results.get("versions"))),
    )


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The plain facts of a run, those there are, each in words."""
    facts = []
    for label, key, say in (
        ("Recipe", "recipe", str),
        ("Seed", "seed", str),
        ("Device", "device", str),
        ("Processes", "world_size", lambda value: str(value) if value != 1 else ""),
        ("Steps", "steps", large),
        ("Epochs", "epochs", lambda value: f"{value:g}"),
        ("Time", "seconds", duration),
        ("Samples a second", "samples_per_second", lambda value: number(value, 0)),
        ("Parameters", "parameters", large),
        ("FLOPs a sample", "flops", large),
        ("Peak memory", "peak_memory", size),
        ("Started", "started", lambda value: str(value)[:16].replace("T", " ")),
        ("Commit", "commit", _commit),
    ):
        value = results.get(key)
        if value is None or value == "":
            continue
        try:
            text = say(value)
        except (TypeError, ValueError):  # not a number after all: as it stands
            text = str(value)
        if text:
            facts.append((label, text))
    return facts


def _commit(value: Any) -> str:
    """The first digits of a commit, and whether files were changed since."""
    digits, plus, changes = str(value).partition("+")
    return digits[:12] + plus + changes


def _data(value: Any) -> list[tuple[str, str, str, str]]:
    """Name, split, size and hash of each data set."""
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
    """A command as one line, also when it was kept as a list of words."""
    if isinstance(value, list):
        import shlex

        return shlex.join(str(word) for word in value)
    return str(value or "")


def flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """A tree of settings as (dotted name, value) pairs.

    >>> flat({"train": {"epochs": 8, "rate": 0.001}, "data": {}})
    [('train.epochs', '8'), ('train.rate', '0.001')]
    """
    if isinstance(value, Mapping):
        return [
            pair
            for key, inner in value.items()
            for pair in flat(inner, f"{name}.{key}" if name else str(key))
        ]
    return [(name, "none" if value is None else str(value))] if name else []


def _title(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    if len(names) > 4 or len("".join(names)) > 90:
        return f"{len(names)} runs compared"
    title = _listed(names)
    return title[:1].upper() + title[1:]


def _lead(runs: Sequence[Run]) -> str:
    """What was run, in a sentence."""
    recipes = list(dict.fromkeys(str(run.results.get("recipe") or "") for run in runs))
    recipes = [recipe for recipe in recipes if recipe]
    data = [entry for run in runs for entry in _data(run.results.get("data"))]
    tested = [entry for entry in data if entry[1] == "test"] or data[-1:]
    said = list(
        dict.fromkeys(
            f"{name}" + (f" ({split}, {n} items)" if split and n else "")
            for name, split, n, _ in tested
        )
    )
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    sentence = count + (f" of {_listed(recipes)}" if 0 < len(recipes) <= 4 else "")
    sentence += f", measured on {_listed(said)}" if said else ""
    ended = sum(run.finished for run in runs)
    if ended < len(runs):
        sentence += (
            f"; {ended} of {len(runs)} came to the end" if len(runs) > 1 else ", not finished"
        )
    return sentence + "."


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _explained(titles: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (title, meaning)
        for title in titles
        for start, meaning in _MEANINGS.items()
        if start in title.lower().split()
    ]


def _sources(runs: Sequence[Run]) -> list[str]:
    """Where the papers' figures stand, each once."""
    found = []
    for run in runs:
        paper = run.results.get("paper")
        entries = paper.values() if isinstance(paper, Mapping) else []
        found += [str(entry.get("source") or "") for entry in entries if isinstance(entry, Mapping)]
    return [source for source in dict.fromkeys(found) if source]
