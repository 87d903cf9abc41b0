"""Count how often each metric ranks the truthful map of a planted model first, and write the table.

The counts are a file of the package, because every scorecard states them.

python results/metric_trust.py           # compute the counts and docs/metric-trust.md
python results/metric_trust.py --table   # only the table, from the counts
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overt import io
from overt.metrics.scorecard.catalog import available_metrics
from overt.metrics.scorecard.trust import FILE
from overt.testing.metric_trust import rank_truthful_maps
from overt.testing.planted_rules import planted_rules

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "metric-trust.md"
SETTINGS: dict[str, Any] = {"names": ["all"], "repeats": 20, "samples": 16, "seed": 0}
MARKS = r"(<!-- trust -->\n).*?(<!-- /trust -->)"


def compute() -> None:
    """Compute all metrics and write the counts."""
    write([asdict(row) for row in rank_truthful_maps(**SETTINGS)])


def write(rows: list[dict[str, Any]]) -> None:
    """Write the counts, one line per metric and rule, with the versions of the metrics."""
    counted = {row["key"] for row in rows}
    versions = {e.key: e.info.version for e in available_metrics() if e.key in counted}
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'"settings": {json.dumps(SETTINGS)},\n"versions": {json.dumps(versions)},\n'
    io.write_text(FILE, f'{{\n{head}"rows": [\n{lines}\n]\n}}\n')


def table() -> str:
    """Return a line per metric: the share of draws for each rule, and what it lost to most."""
    rules = [rule.name for rule in planted_rules(0)]
    found: dict[str, dict[str, Any]] = {}
    for row in io.read_json(FILE)["rows"]:
        found.setdefault(row["key"], {})[row["rule"]] = row
    lines = [f"| metric | {' | '.join(rules)} | mean | loses most to |"]
    lines.append("|---" * (len(rules) + 3) + "|")
    for key, by_rule in found.items():
        shares = [
            None if rule not in by_rule else by_rule[rule]["first"] / by_rule[rule]["repeats"]
            for rule in rules
        ]
        known = [one for one in shares if one is not None]
        lost = [
            (count, f"{name} ({rule})")
            for rule, row in by_rule.items()
            for name, count in row["lost_to"].items()
        ]
        worst = max(lost, key=lambda one: one[0])[1] if lost else ""
        cells = ["" if one is None else f"{one:.2f}" for one in shares]
        mean = f"{sum(known) / len(known):.2f}"
        lines.append(f"| `{key}` | {' | '.join(cells)} | {mean} | {worst} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with the table between its marks."""
    return re.sub(MARKS, lambda m: f"{m[1]}{table()}\n{m[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    if "--table" not in sys.argv:
        compute()
    PAGE.write_text(filled(PAGE.read_text()))
