"""Tables and figures of docs/speed.md and docs/scale.md, out of the results that are committed.

    python benchmarks/pages.py

What stands between the marks `<!-- NAME -->` and `<!-- /NAME -->` of a page is written anew, and so
are the figures beside it. Nothing is measured here: the same files give the same pages.
"""

import json
import re
from pathlib import Path
from typing import Any

import scale
from sections import NAMES
from sections.report import markdown

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "speed"
DEVICES = ("cpu", "h200")
FIGURES = {  # the beginning of a curve's title: the name of its figure
    "A supervised step": "tokens",
    "Memory of a supervised step": "tokens-memory",
    "Rollout of": "rollout",
    "A search, one image": "masks",
    "Memory of a search": "masks-memory",
    "non-local": "kept",
    "relation": "kept-relation",
    "CIDEr-D": "captions",
    "Rank correlation": "maps",
}
MOST = 5  # operations of a profile that are told
COLORS = ("#0b6e4f", "#b3541e", "#3d5a98", "#7b4b94")  # ours is the first


def results(device: str) -> dict[str, Any] | None:
    """What was measured there; None where nothing is committed."""
    path = RESULTS / f"{device}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# --- tables


def table(kept: dict[str, Any]) -> str:
    """The table of one run, with what it was run on."""
    about, goals = kept["machine"], kept["goals"]
    where = about.get("gpu", f"one thread of {about['cpu']}, {about['cores']} cores")
    peers = ", ".join(f"{name} {version}" for name, version in kept["peers"].items())
    named = {NAMES[name]: one for name, one in kept["sections"].items()}
    parts = kept["sections"].values()
    days = " and ".join(sorted({one["date"][:10] for one in parts}))
    loads = [one["load"] for one in parts]
    commands = "; ".join(runs(kept["sections"]))
    told = (
        f"{commands}, {days}, {where}, with a load of {min(loads):g} to {max(loads):g}, "
        f"Python {about['python']}, {peers}. {goals['reached']} goals reached, "
        f"{goals['missed']} missed, {goals['not measured']} not measured there."
    )
    absent = [NAMES[name] for name in NAMES if name not in kept["sections"]]
    if absent:
        told += f" Not measured yet: {', '.join(absent)}."
    return f"{told}\n\n{markdown(named)}"


def runs(sections: dict[str, Any]) -> list[str]:
    """The commands that were run, each with its commit and, where there are several, its parts."""
    found: dict[str, list[str]] = {}
    for name, one in sections.items():
        at = f" at {one['commit']}" if one.get("commit") else ""
        found.setdefault(f"`{one['command']}`{at}", []).append(NAMES[name])
    if len(found) == 1:
        return list(found)
    return [f"{', '.join(names)} by {command}" for command, names in found.items()]


def nothing(device: str) -> str:
    """What a page says until there is a result."""
    flags = "" if device == "cpu" else " --device cuda"
    return (
        f"Not measured yet: `python benchmarks/speed.py{flags} --out "
        f"benchmarks/speed/{device}.json`, then `python benchmarks/pages.py`."
    )


def filled(page: str, parts: dict[str, str]) -> str:
    """A page with its marked parts written anew; every part must have its mark."""
    for name, text in parts.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not marks.search(page):
            raise SystemExit(
                f"the page has no place for {name!r}: <!-- {name} --> ... <!-- /{name} -->"
            )
        page = marks.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
    return page


# --- figures


def figure_name(title: str) -> str | None:
    """The file that a curve is drawn into; the longest beginning wins."""
    fit = [start for start in FIGURES if title.startswith(start)]
    return FIGURES[max(fit, key=len)] if fit else None


def ours_first(names: list[str]) -> list[str]:
    """The lines of a figure, those of overt before the others."""
    own = ("ours", "measure.", "search", "ids", "kept")
    return sorted(names, key=lambda name: not name.startswith(own))


def draw(curve: dict[str, Any], path: Path) -> None:
    """One figure as SVG; the same curve gives the same bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": "overt", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
        for number, name in enumerate(ours_first(list(curve["lines"]))):
            style = "-" if name.startswith(("ours", "measure.", "search", "ids", "kept")) else "--"
            axes.plot(curve["sizes"], curve["lines"][name], style, marker="o", markersize=3.5,
                      label=name, color=COLORS[number % len(COLORS)])  # fmt: skip
        if curve["logarithmic"]:
            axes.set_xscale("log", base=10)
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=curve["title"], xlabel=curve["size"], ylabel=curve["cost"])
        axes.grid(alpha=0.25, which="both", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def curves(kept: dict[str, Any], device: str) -> dict[str, dict[str, Any]]:
    """The curves of one run that have a figure, by the name of its file; the first of each."""
    found: dict[str, dict[str, Any]] = {}
    for section in kept["sections"].values():
        for curve in section["curves"]:
            name = figure_name(curve["title"])
            if name is not None:
                found.setdefault(f"speed-{device}-{name}.svg", curve)
    return found


def gallery(names: dict[str, dict[str, Any]]) -> str:
    """Two figures a row; a text for who does not see them."""
    cells = [f"![{curve['title']}: {curve['cost']}]({name})" for name, curve in names.items()]
    pairs = [[*cells[start : start + 2], ""][:2] for start in range(0, len(cells), 2)]
    return "\n".join(["| | |", "|---|---|", *(f"| {one} | {two} |" for one, two in pairs)])


def profiles() -> str:
    """Where the time of ours goes, a line a profile: the operations that take most of it."""
    heads = ("profile", "ours", "theirs", "where the time of ours goes, and of theirs there")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for device in DEVICES:
        kept = results(f"profiles-{device}")
        for name, one in ({} if kept is None else kept["profiles"]).items():
            taken = [_milliseconds(one["seconds"][side]) for side in ("ours", "theirs")]
            if device != "cpu":
                busy = [_milliseconds(one["busy"][side]) for side in ("ours", "theirs")]
                pairs = zip(taken, busy, strict=True)
                taken = [f"{all_in}, of which kernels {some}" for all_in, some in pairs]
            told = [
                f"`{operation.removeprefix('aten::')}` {_milliseconds(row['ours'])}"
                f" ({_milliseconds(row['theirs'])})"
                for operation, row in list(one["operations"].items())[:MOST]
            ]
            where = "CPU" if device == "cpu" else "H200"
            where += f" at {one['commit']}" if one.get("commit") else ""
            lines.append(f"| {name}, {where} | {taken[0]} | {taken[1]} | {', '.join(told)} |")
    return "\n".join(lines)


def _milliseconds(taken: float) -> str:
    return f"{taken * 1000:.3g} ms"


def parts() -> dict[str, str]:
    """What stands between the marks of docs/speed.md."""
    found = {}
    drawn: dict[str, dict[str, Any]] = {}
    for device in DEVICES:
        kept = results(device)
        found[device] = nothing(device) if kept is None else table(kept)
        drawn |= {} if kept is None else curves(kept, device)
    return {**found, "figures": gallery(drawn), "profiles": profiles()}


def main() -> None:
    """Write both pages and all figures."""
    for device in DEVICES:
        kept = results(device)
        for name, curve in ({} if kept is None else curves(kept, device)).items():
            draw(curve, DOCS / name)
            print(name)
    for name, texts in (("speed.md", parts()), ("scale.md", scale.parts())):
        page = DOCS / name
        page.write_text(filled(page.read_text(), texts))
        print(name)


if __name__ == "__main__":
    main()
