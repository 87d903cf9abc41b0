"""Fixtures of the trust tests: short or full version, and the result for the table."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RecordResult = Callable[..., None]


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether tests use the numbers of their thresholds (OVERT_TRUST=full) or smaller ones."""
    return os.environ.get("OVERT_TRUST") == "full"


@pytest.fixture
def record_result(request: pytest.FixtureRequest) -> RecordResult:
    """`record_result(number, threshold, result, naive)` writes the result of a test for the table.

    A test calls it last, after its assertions. `naive` is the result of the usual implementation,
    which must fail. Each test writes a separate file under build/trust, so that parallel processes
    do not conflict; `python results/trust.py` builds the table from these files. A test that does
    not use the fixture `full` has only one version, the full one.
    """
    full = "full" not in request.fixturenames or request.getfixturevalue("full")

    def write(number: int, threshold: str, result: str, naive: str = "") -> None:
        test = request.node.nodeid.rpartition("tests/trust/")[2]
        row = {
            "number": number,
            "test": test,
            "mark": threshold,
            "figure": result,
            "naive": naive,
            "full": full,
        }
        folder = Path(os.environ.get("OVERT_TRUST_FIGURES") or ROOT / "build" / "trust")
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", f"{number:02d}-{test}-{'full' if full else 'short'}")
        (folder / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")

    return write
