"""Tables of maps and metrics, with intervals and tests, for scripts that evaluate maps."""

import json
import math
import platform
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt.io import write_json
from overt.metrics import confidence_interval, holm
from overt.metrics.statistics import Interval, effect_size

SHARES = ("pointing", "accuracy")  # measures that are 0 or 1 of a sample
Columns = Mapping[str, Mapping[str, Tensor]]  # map -> measure -> one number per sample


def rows_of(columns: Columns, against: Mapping[str, str], judged: Collection[str]) -> dict:
    """Return mean and 95 % interval per map and metric, and tests of `judged` against a control.

    `against` maps a metric to its control. Differences are paired by sample; intervals and p-values
    are of t over samples, Wilson's for shares; p-values are corrected by Holm over the judged maps.
    """
    table: dict[str, Any] = {}
    for name, found in columns.items():
        table[name] = {}
        for ask, values in found.items():
            hits = bool(((values == 0) | (values == 1) | values.isnan()).all())
            share = ask in SHARES and hits
            table[name][ask] = interval_to_dict(confidence_interval(values, share=share))
    for ask, control in against.items():
        there = [name for name in judged if ask in columns.get(name, {})]
        differences = {name: columns[name][ask] - columns[control][ask] for name in there}
        intervals = {name: confidence_interval(one) for name, one in differences.items()}
        p_values = holm([one.p for one in intervals.values()])
        for (name, difference), p in zip(differences.items(), p_values, strict=True):
            table[name][ask]["against"] = {
                "control": control,
                **interval_to_dict(intervals[name]),
                "p": _number(p),
                "effect": _number(effect_size(difference)),
            }
    return table


def interval_to_dict(one: Interval) -> dict[str, Any]:
    """Return a mean with its interval as JSON values."""
    numbers = {"mean": one.mean, "low": one.low, "high": one.high}
    return {name: _number(value) for name, value in numbers.items()} | {"n": one.count}


def _number(value: float) -> float | None:
    """Return a number as a JSON value; undefined numbers are null."""
    return value if math.isfinite(value) else None


def remake(path: Path) -> None:
    """Recompute the table of a result file from its numbers per sample.

    Rows over seeds have their numbers elsewhere, and are unchanged.
    """
    before = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as found:
        arrays = {name: torch.from_numpy(found[name].astype("f8")) for name in found.files}
    columns: dict[str, dict[str, Tensor]] = {}
    for name, values in arrays.items():
        row, _, ask = name.partition("/")
        columns.setdefault(row, {})[ask] = values
    comparisons = [
        (row, ask, one["against"]["control"])
        for row, asks in before["table"].items()
        for ask, one in asks.items()
        if "against" in one
    ]
    against = {ask: control for _, ask, control in comparisons}
    judged = list(dict.fromkeys(row for row, _, _ in comparisons))
    table = {**before["table"], **rows_of(columns, against, judged)}
    write_json(path.with_suffix(".json"), {**before, "table": table})


def write(path: Path, table: dict, columns: Columns, about: Mapping[str, Any]) -> None:
    """Write the table as JSON and the numbers per sample as npz, with their provenance."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write_json(
        path.with_suffix(".json"),
        {**about, "commit": commit, "versions": versions, "table": table},
    )
    arrays = {
        f"{name}/{ask}": values.numpy().astype("f4")
        for name, found in columns.items()
        for ask, values in found.items()
    }
    np.savez_compressed(path.with_suffix(".npz"), **arrays)


if __name__ == "__main__":  # python results/judging.py results/measure/osie
    for name in sys.argv[1:]:
        remake(Path(name))
