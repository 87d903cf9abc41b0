"""Accuracy against time: when in its training a network was as good as what (figure 3).

The log has no clock times, so that a run that was stopped and resumed has the same log. They are in
a file of their own, `clock.json`: one row a validation. Time goes by in training alone; judging
does not count.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overt import files

FILE = "clock.json"
LEVELS = (50, 60, 70, 80, 85, 90, 92, 94, 96, 98)  # percent


class Clock:
    """The seconds of training so far, with what each validation found.

    A run that goes on begins at the time of the last validation before the step it goes on from:
    what was trained after that and lost is not counted.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.path, self.writes = folder / FILE, writes
        self.rows: list[dict[str, float]] = []
        self.before = 0.0
        self.mark: float | None = None
        self.step = 0
        self.fresh = True

    def start(self, resume: bool) -> None:
        """Begin, or take up the rows of a run that goes on."""
        if resume and self.path.is_file():
            self.rows = [dict(row) for row in files.read_json(self.path)["rows"]]
        self.fresh = True

    def at(self, step: int) -> None:
        """Say which step begins; the first one starts the clock."""
        if self.fresh:
            self.rows = [row for row in self.rows if row["step"] <= step]
            self.before = self.rows[-1]["seconds"] if self.rows else 0.0
            self.mark, self.fresh = time.perf_counter(), False
        self.step = step + 1

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time go by."""
        self._add()
        try:
            yield
        finally:
            if self.mark is not None:
                self.mark = time.perf_counter()

    def note(self, found: Mapping[str, float]) -> None:
        """Write down what a validation found now."""
        row: dict[str, float] = {"step": self.step, "seconds": self.before}
        self.rows = [*self.rows, {**row, **found}]
        if self.writes:
            files.write_json(self.path, {"rows": self.rows})

    def marks(self) -> dict[str, float]:
        """All seconds, and after how many each level was first reached: `seconds_to_90`.

        Kinds of question have theirs too: `seconds_to_90_relational`. A level that was never
        reached is left out.
        """
        if not self.rows:
            return {}
        found = {"training": self.rows[-1]["seconds"]}
        for level in LEVELS:
            for name in self.rows[-1]:
                if not name.startswith("accuracy"):
                    continue
                reached = [row["seconds"] for row in self.rows if _over(row, name, level)]
                if reached:
                    found[f"seconds_to_{level}{name.removeprefix('accuracy')}"] = reached[0]
        return found

    def _add(self) -> None:
        if self.mark is not None:
            now = time.perf_counter()
            self.before, self.mark = self.before + now - self.mark, now


def _over(row: Mapping[str, Any], name: str, level: int) -> bool:
    return bool(row.get(name, 0.0) * 100 >= level)
