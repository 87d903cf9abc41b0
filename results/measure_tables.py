"""Write the tables of measure.md from run results: `python results/measure_tables.py`.

Scenes: every row of any of the five papers on the synthetic scenes, with the same columns. Each
task has its own dataset: rows are comparable within a dataset and not between them. OSIE and
Yelp-HAT: `measure/osie.json` and `measure/yelp.json`, written by `measure_osie.py` and
`measure_yelp.py`. Also writes `measure/scenes.json`.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from archive import unpacked

from overt.io import write_json
from overt.metrics.versions import label_with_version, newest_version, version_of

HERE = unpacked()
COLUMNS = {  # column, and its names in results.json
    "answer": ("accuracy", "identification", "cider_d"),
    "pointing": ("pointing",),
    "mass": ("mass_inside", "grounding_mass"),
    "rank correlation": ("rank_correlation",),
    "deletion": ("deletion",),
    "entropy": ("entropy",),
}
WORLDS = {
    "scenes": "questions about 24,000 training scenes",
    "ssa-scenes": "questions about 12,000 training scenes (Self Supervision for Attention)",
    "han-scenes": "questions about scenes (Bootstrapping Hard Attention)",
    "han-sortclevr": "Sort-of-CLEVR in full (Bootstrapping Hard Attention)",
    "han-sortclevr-short": "Sort-of-CLEVR, a third of the steps (Bootstrapping Hard Attention)",
    "ltpa-scenes": "the shape of the largest object (Learn To Pay Attention)",
    "vgp-scenes": "captions of scenes, words to regions (grounded supervision)",
    "a2-scenes": "captions of scenes in full (Aligning Attention), answer: CIDEr-D",
    "a2-scenes-short": "captions of scenes, 10 epochs (Aligning Attention), answer: CIDEr-D",
}


def rows(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the numbers of every seed, by row and column; definitions have separate columns."""
    found: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*/seed-*/results.json")):
        results = json.loads(path.read_text())
        if results.get("status") != "done":
            continue
        columns = found.setdefault(path.parts[-3], {})
        for column, names in COLUMNS.items():
            for name in names:
                entry = results["ours"].get(name, {})
                if entry.get("value") is not None:
                    version, last = version_of(entry), newest_version(name, [results["ours"]])
                    columns.setdefault(label_with_version(column, version, last), []).append(
                        entry["value"]
                    )
                    break
    return found


def scenes() -> dict[str, Any]:
    """Return mean and standard deviation over seeds of every row of every dataset."""
    table: dict[str, Any] = {}
    for world in WORLDS:
        table[world] = {
            row: {
                column: {
                    "mean": statistics.fmean(values),
                    "deviation": statistics.stdev(values) if len(values) > 1 else None,
                    "seeds": len(values),
                }
                for column, values in columns.items()
            }
            for row, columns in rows(HERE / world).items()
        }
    return table


def of_scenes(table: Mapping[str, Any]) -> Iterator[str]:
    for world, found in table.items():
        yield f"\n**{WORLDS[world]}** (`{world}/`)\n"
        if not found:
            yield "No runs."
            continue
        titles = [
            title
            for column in COLUMNS
            for title in sorted(
                {one for columns in found.values() for one in columns if _is(one, column)}
                or {column}
            )
        ]
        yield f"| row | seeds | {' | '.join(titles)} |"
        yield "|---" * (2 + len(titles)) + "|"
        for row, columns in found.items():
            seeds = max((one["seeds"] for one in columns.values()), default=0)
            cells = [_spread(columns.get(column)) for column in titles]
            yield f"| {row} | {seeds} | {' | '.join(cells)} |"


def of_maps(path: Path) -> Iterator[str]:
    """Yield a table of maps and metrics, with intervals, and tests below."""
    table = json.loads(path.read_text())["table"]
    asks = list(dict.fromkeys(ask for found in table.values() for ask in found))
    yield f"| map | {' | '.join(asks)} |"
    yield "|---" * (1 + len(asks)) + "|"
    for name, found in table.items():
        yield f"| {name} | {' | '.join(_interval(found.get(ask)) for ask in asks)} |"
    yield "\n| map | measure | against | difference | p (Holm) | effect |"
    yield "|---|---|---|---|---|---|"
    for name, found in table.items():
        for ask, one in found.items():
            if "against" in one:
                test = one["against"]
                effect = "" if test["effect"] is None else f"{test['effect']:+.2f}"
                yield (
                    f"| {name} | {ask} | {test['control']} | {_interval(test, sign='+')} | "
                    f"{'< 0.0001' if test['p'] < 1e-4 else format(test['p'], '.4f')} | {effect} |"
                )


def _is(title: str, column: str) -> bool:
    return title.partition(" (definition")[0] == column


def _spread(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    deviation = "" if one["deviation"] is None else f" ± {one['deviation']:.3f}"
    return f"{one['mean']:.3f}{deviation}"


def _interval(one: Mapping[str, Any] | None, sign: str = "") -> str:
    if one is None or one["mean"] is None:
        return ""
    if one["low"] is None:  # constant numbers
        return f"{one['mean']:{sign}.3f}"
    return f"{one['mean']:{sign}.3f} ({one['low']:{sign}.3f} to {one['high']:{sign}.3f})"


def main() -> None:
    table = scenes()
    write_json(Path(__file__).parent / "measure" / "scenes.json", table)
    for name in ("osie", "yelp"):
        path = Path(__file__).parent / "measure" / f"{name}.json"
        if path.is_file():
            print(f"\n## {name}\n")
            print("\n".join(of_maps(path)))
    print("\n## scenes")
    print("\n".join(of_scenes(table)))


if __name__ == "__main__":
    main()
