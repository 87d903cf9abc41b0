"""Write the table of all metrics into docs/measure.md.

    python docs/metric_table.py

A test compares the table on the page with this one.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from overt import metrics
from overt.metrics.scorecard.catalog import available_metrics

PAGE = Path(__file__).resolve().parent / "measure.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"
HEADER = ["metric", "what it measures", "range", "better", "function"]


def declared_metrics() -> list[Any]:
    """List all functions of `overt.metrics` that are declared as metrics, by module."""
    found = []
    for module in pkgutil.walk_packages(metrics.__path__, "overt.metrics."):
        values = vars(importlib.import_module(module.name)).values()
        ours = (one for one in values if getattr(one, "__module__", "") == module.name)
        found.extend(one for one in ours if hasattr(one, "info"))
    return found


def table() -> str:
    """Return the table: metrics of scorecards by question, then all others by module."""
    functions = {function.info.key: function for function in declared_metrics()}
    order = dict.fromkeys(_function_key(entry.name, functions) for entry in available_metrics())
    keys = [*order, *(key for key in functions if key not in order)]
    rows = [_row(functions[key]) for key in keys]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, ["---"] * len(HEADER), *rows)]
    return "\n".join(lines)


def _function_key(name: str, functions: dict[str, Any]) -> str:
    """Return the key of the function behind a scorecard metric, which may name an edit too."""
    return name if name in functions else name.rpartition("_")[0]


def _row(function: Any) -> list[str]:
    info = function.info
    module = function.__module__.removeprefix("overt.metrics.")
    better = "–" if info.direction == "neither" else info.direction
    return [
        f"`{info.key}`",
        info.description,
        info.range,
        better,
        f"`{module}.{function.__name__}`",
    ]


def replaced(page: str) -> str:
    """Return the page with a new table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
