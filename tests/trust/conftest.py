"""What the trust tests share: the figure that each one reached is written down for the table."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Reached = Callable[..., None]


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether tests take the numbers of their pass marks, as OVERT_TRUST=full asks, or fewer."""
    return os.environ.get("OVERT_TRUST") == "full"


@pytest.fixture
def reached(request: pytest.FixtureRequest) -> Reached:
    """`reached(number, mark, figure, naive)` writes down what a test came to, for the table.

    It is called last, after what the test asserts. `mark` is what must be reached, `figure` what
    was, `naive` what the counterpart came to that must fail, where there is one. Each test has a
    file of its own under build/trust, so that processes side by side do not meet;
    `python benchmarks/trust.py` makes the table of them. A test that does not ask for `full` has
    one form only, and that is the full one.
    """
    full = "full" not in request.fixturenames or request.getfixturevalue("full")

    def write(number: int, mark: str, figure: str, naive: str = "") -> None:
        test = request.node.nodeid.rpartition("tests/trust/")[2]
        row = {
            "number": number,
            "test": test,
            "mark": mark,
            "figure": figure,
            "naive": naive,
            "full": full,
        }
        folder = Path(os.environ.get("OVERT_TRUST_FIGURES") or ROOT / "build" / "trust")
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", f"{number:02d}-{test}-{'full' if full else 'short'}")
        (folder / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")

    return write
