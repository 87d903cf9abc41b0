"""The tables of measure.md, from what runs left: `python benchmarks/measure_tables.py`.

Scenes: every row that any of the five papers left on the embedded world, by the same few columns.
They stand on several worlds, one a task: rows compare within a world and not between them. OSIE
and Yelp-HAT: `measure/osie.json` and `measure/yelp.json`, as `measure_osie.py` and
`measure_yelp.py` wrote them. Also writes `measure/scenes.json`.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overt.files import write_json

HERE = Path(__file__).parent
COLUMNS = {  # what is shown, and the names it has in results.json
    "answer": ("accuracy", "identification", "cider_d"),
    "pointing": ("pointing",),
    "mass": ("mass_inside", "grounding_mass"),
    "rank correlation": ("rank_correlation",),
    "deletion": ("deletion",),
    "entropy": ("entropy",),
}
WORLDS = {
    "scenes": "questions about scenes, 24,000 to learn from",
    "ssa-scenes": "questions about scenes, 12,000 to learn from (Self Supervision for Attention)",
    "han-scenes": "questions about scenes (Bootstrapping Hard Attention)",
    "han-sortclevr": "Sort-of-CLEVR in full (Bootstrapping Hard Attention)",
    "han-sortclevr-short": "Sort-of-CLEVR, a third of the steps (Bootstrapping Hard Attention)",
    "ltpa-scenes": "the color of the largest thing (Learn To Pay Attention)",
    "vgp-scenes": "captions of scenes, words to regions (grounded supervision)",
    "a2-scenes": "captions of scenes in full (Aligning Attention), answer: CIDEr-D",
    "a2-scenes-short": "captions of scenes, 10 epochs (Aligning Attention), answer: CIDEr-D",
}


def rows(folder: Path) -> dict[str, dict[str, list[float]]]:
    """The numbers of every seed, by row and column."""
    found: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*/seed-*/results.json")):
        told = json.loads(path.read_text())
        if told.get("status") != "done":
            continue
        columns = found.setdefault(path.parts[-3], {})
        for column, names in COLUMNS.items():
            for name in names:
                value = told["ours"].get(name, {}).get("value")
                if value is not None:
                    columns.setdefault(column, []).append(value)
                    break
    return found


def scenes() -> dict[str, Any]:
    """Mean and deviation over seeds of every row of every world."""
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
            yield "No run is kept."
            continue
        yield f"| row | seeds | {' | '.join(COLUMNS)} |"
        yield "|---" * (2 + len(COLUMNS)) + "|"
        for row, columns in found.items():
            seeds = max((one["seeds"] for one in columns.values()), default=0)
            cells = [_spread(columns.get(column)) for column in COLUMNS]
            yield f"| {row} | {seeds} | {' | '.join(cells)} |"


def of_maps(path: Path) -> Iterator[str]:
    """Maps down, measures across, with the interval of each mean, and tests below."""
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
                    f"{test['p']:.4f} | {effect} |"
                )


def _spread(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    deviation = "" if one["deviation"] is None else f" ± {one['deviation']:.3f}"
    return f"{one['mean']:.3f}{deviation}"


def _interval(one: Mapping[str, Any] | None, sign: str = "") -> str:
    if one is None or one["mean"] is None:
        return ""
    return f"{one['mean']:{sign}.3f} ({one['low']:{sign}.3f} to {one['high']:{sign}.3f})"


def main() -> None:
    table = scenes()
    write_json(HERE / "measure" / "scenes.json", table)
    for name in ("osie", "yelp"):
        path = HERE / "measure" / f"{name}.json"
        if path.is_file():
            print(f"\n## {name}\n")
            print("\n".join(of_maps(path)))
    print("\n## scenes")
    print("\n".join(of_scenes(table)))


if __name__ == "__main__":
    main()
