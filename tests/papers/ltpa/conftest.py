"""A fixture that runs a tiny recipe of Learn to Pay Attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import tiny

SMALL = ("model.width=0.05", "model.blocks=1", "train.precision=fp32", "judge.items=0")


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return `run("ltpa-cifar10", ...)`: it runs a small recipe; returns folder and results."""
    tiny.use_small_readers(monkeypatch)

    def run(name: str, *sets: str, out: str = "run") -> tuple[Path, dict[str, Any]]:
        place = tmp_path / out
        return place, tiny.run(tiny.recipe(name, *SMALL, *sets), place, data_root=few)

    return run
