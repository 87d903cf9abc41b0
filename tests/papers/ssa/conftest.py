"""A fixture that runs a tiny recipe of Self Supervision for Attention Networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import tiny

SMALL = ("surrogate.count=4", "surrogate.texts=4", "surrogate.probes=3")
Run = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return `run("ssa-trec", ...)`: it runs a small recipe; returns folder and results."""
    tiny.use_small_readers(monkeypatch)
    monkeypatch.setenv("OVERT_CACHE", str(few / "cache"))

    def run(name: str, *sets: str, root: Path = few) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / "run"
        return out, tiny.run(tiny.recipe(name, *SMALL, *sets), out, data_root=root)

    return run
