"""Tables of maps by measures, with intervals and tests: shared by the scripts that judge maps."""

import math
import platform
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt.files import write_json
from overt.measure import bootstrap, effect_size, holm, permutation_test
from overt.measure.statistics import Interval

Columns = Mapping[str, Mapping[str, Tensor]]  # map -> measure -> one number a sample


def rows_of(columns: Columns, against: Mapping[str, str], judged: Collection[str]) -> dict:
    """Mean and 95 % interval of every map and measure; tests of `judged` maps against a control.

    `against` names the control of a measure. Differences are paired by sample, and p is corrected
    by Holm over the maps that are judged.
    """
    table: dict[str, Any] = {}
    for name, found in columns.items():
        table[name] = {}
        for ask, values in found.items():
            table[name][ask] = told(bootstrap(values))
    for ask, control in against.items():
        there = [name for name in judged if ask in columns.get(name, {})]
        differences = {name: columns[name][ask] - columns[control][ask] for name in there}
        tested = holm([permutation_test(one) for one in differences.values()])
        for (name, difference), p in zip(differences.items(), tested, strict=True):
            table[name][ask]["against"] = {
                "control": control,
                **told(bootstrap(difference)),
                "p": _number(p),
                "effect": _number(effect_size(difference)),
            }
    return table


def told(one: Interval) -> dict[str, Any]:
    """A mean with its interval, as JSON has it."""
    numbers = {"mean": one.mean, "low": one.low, "high": one.high}
    return {name: _number(value) for name, value in numbers.items()} | {"n": one.count}


def _number(value: float) -> float | None:
    """A number as JSON has it; what is not defined is null."""
    return value if math.isfinite(value) else None


def write(path: Path, table: dict, columns: Columns, about: Mapping[str, Any]) -> None:
    """The table as JSON and one number a sample as npz, with what made them."""
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
