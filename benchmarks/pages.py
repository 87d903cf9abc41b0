"""Write tables and figures of docs/speed.md and docs/scale.md from committed results.

    python benchmarks/pages.py

Text between the markers `<!-- NAME -->` and `<!-- /NAME -->` of a page is replaced, and the figures
are drawn again. Nothing is measured here: the same files give the same pages.
"""

import json
import re
from pathlib import Path
from typing import Any

import scale
from sections import NAMES
from sections.report import markdown_table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "results" / "speed"
DEVICES = ("cpu", "h200")
FIGURES = {  # prefix of a curve's title: name of its figure
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
NUM_OPERATIONS = 5  # operations listed per profile
COLORS = ("#0b6e4f", "#b3541e", "#3d5a98", "#7b4b94")  # ours is the first


def load_results(device: str) -> dict[str, Any] | None:
    """Return the results of a device; None if nothing is committed."""
    path = RESULTS / f"{device}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# --- tables


def run_table(run: dict[str, Any]) -> str:
    """Return the table of one run, with its machine and versions."""
    about_machine, goals = run["machine"], run["goals"]
    device_name = about_machine.get(
        "gpu", f"one thread of {about_machine['cpu']}, {about_machine['cores']} cores"
    )
    peers = ", ".join(f"{name} {version}" for name, version in run["peers"].items())
    by_title = {NAMES[name]: one for name, one in run["sections"].items()}
    page_parts = run["sections"].values()
    days = " and ".join(sorted({one["date"][:10] for one in page_parts}))
    loads = [one["load"] for one in page_parts]
    commands = "; ".join(run_commands(run["sections"]))
    text = (
        f"{commands}, {days}, {device_name}, with a load of {min(loads):g} to {max(loads):g}, "
        f"Python {about_machine['python']}, {peers}. {goals['reached']} goals reached, "
        f"{goals['missed']} missed, {goals['not measured']} not measured."
    )
    missing = [NAMES[name] for name in NAMES if name not in run["sections"]]
    if missing:
        text += f" Not measured yet: {', '.join(missing)}."
    return f"{text}\n\n{markdown_table(by_title)}"


def run_commands(sections: dict[str, Any]) -> list[str]:
    """Return the commands of a run, each with its commit and, if needed, its sections."""
    found: dict[str, list[str]] = {}
    for name, one in sections.items():
        at = f" at {one['commit']}" if one.get("commit") else ""
        found.setdefault(f"`{one['command']}`{at}", []).append(NAMES[name])
    if len(found) == 1:
        return list(found)
    return [f"{', '.join(names)} by {command}" for command, names in found.items()]


def no_results(device: str) -> str:
    """Return the text of a page without results."""
    flags = "" if device == "cpu" else " --device cuda"
    return (
        f"Not measured yet: `python benchmarks/speed.py{flags} --out "
        f"results/speed/{device}.json`, then `python benchmarks/pages.py`."
    )


def fill_page(page: str, page_parts: dict[str, str]) -> str:
    """Replace the marked parts of a page; every part must have its marker."""
    for name, text in page_parts.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not marks.search(page):
            raise SystemExit(
                f"the page has no marker for {name!r}: <!-- {name} --> ... <!-- /{name} -->"
            )
        page = marks.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
    return page


# --- figures


def figure_name(title: str) -> str | None:
    """Return the name of the figure of a curve; the longest matching prefix wins."""
    fit = [start for start in FIGURES if title.startswith(start)]
    return FIGURES[max(fit, key=len)] if fit else None


def sort_ours_first(names: list[str]) -> list[str]:
    """Sort the lines of a figure, those of overt first."""
    own = ("ours", "metrics.", "search", "ids", "kept")
    return sorted(names, key=lambda name: not name.startswith(own))


def draw_curve(curve: dict[str, Any], path: Path) -> None:
    """Draw one figure as SVG; the same curve gives the same bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": "overt", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
        for number, name in enumerate(sort_ours_first(list(curve["lines"]))):
            style = "-" if name.startswith(("ours", "metrics.", "search", "ids", "kept")) else "--"
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


def curves(run: dict[str, Any], device: str) -> dict[str, dict[str, Any]]:
    """Return the curves of a run that have a figure, by file name; the first of each."""
    found: dict[str, dict[str, Any]] = {}
    for section in run["sections"].values():
        for curve in section["curves"]:
            name = figure_name(curve["title"])
            if name is not None:
                found.setdefault(f"speed-{device}-{name}.svg", curve)
    return found


def figure_table(names: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table, two per row, with alternative texts."""
    cells = [f"![{curve['title']}: {curve['cost']}]({name})" for name, curve in names.items()]
    pairs = [[*cells[start : start + 2], ""][:2] for start in range(0, len(cells), 2)]
    return "\n".join(["| | |", "|---|---|", *(f"| {one} | {two} |" for one, two in pairs)])


def profile_table() -> str:
    """Return the table of profiles, one per line: the operations with the largest time."""
    heads = ("profile", "ours", "theirs", "operations of ours with the largest time (theirs)")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for device in DEVICES:
        run = load_results(f"profiles-{device}")
        for name, one in ({} if run is None else run["profiles"]).items():
            times = [_milliseconds(one["seconds"][side]) for side in ("ours", "theirs")]
            if device != "cpu":
                busy = [_milliseconds(one["busy"][side]) for side in ("ours", "theirs")]
                pairs = zip(times, busy, strict=True)
                times = [f"{all_in}, of which kernels {some}" for all_in, some in pairs]
            text = [
                f"`{operation.removeprefix('aten::')}` {_milliseconds(row['ours'])}"
                f" ({_milliseconds(row['theirs'])})"
                for operation, row in list(one["operations"].items())[:NUM_OPERATIONS]
            ]
            device_name = "CPU" if device == "cpu" else "H200"
            device_name += f" at {one['commit']}" if one.get("commit") else ""
            lines.append(f"| {name}, {device_name} | {times[0]} | {times[1]} | {', '.join(text)} |")
    return "\n".join(lines)


def _milliseconds(times: float) -> str:
    return f"{times * 1000:.3g} ms"


def page_parts() -> dict[str, str]:
    """Return the marked parts of docs/speed.md."""
    found = {}
    figures: dict[str, dict[str, Any]] = {}
    for device in DEVICES:
        run = load_results(device)
        found[device] = no_results(device) if run is None else run_table(run)
        figures |= {} if run is None else curves(run, device)
    return {**found, "figures": figure_table(figures), "profiles": profile_table()}


def main() -> None:
    """Write both pages and all figures."""
    for device in DEVICES:
        run = load_results(device)
        for name, curve in ({} if run is None else curves(run, device)).items():
            draw_curve(curve, DOCS / name)
            print(name)
    for name, texts in (("speed.md", page_parts()), ("scale.md", scale.page_parts())):
        page = DOCS / name
        page.write_text(fill_page(page.read_text(), texts))
        print(name)


if __name__ == "__main__":
    main()
