"""Bootstrapping Hard Attention: training time to reach an accuracy (figure 3).

The log has no wall-clock times, so that a resumed run has the same log. They are in `clock.json`,
one row per validation. Only training time counts, not validation.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overt import io

FILE = "clock.json"
LEVELS = (50, 60, 70, 80, 85, 90, 92, 94, 96, 98)  # percent


class AccuracyTimer:
    """Seconds of training so far, with the metrics of each validation.

    A resumed run starts from the time of the last validation before the step it resumes from:
    training after that was lost and is not counted.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.path, self.writes = folder / FILE, writes
        self.rows: list[dict[str, float]] = []
        self.before = 0.0
        self.mark: float | None = None
        self.step = 0
        self.fresh = True

    def start(self, resume: bool) -> None:
        """Start, or read the rows of a run that is resumed."""
        if resume and self.path.is_file():
            self.rows = [dict(row) for row in io.read_json(self.path)["rows"]]
        self.fresh = True

    def begin_step(self, step: int) -> None:
        """Mark the start of a step; the first one starts the clock."""
        # Only the first step tells where training resumes.
        if self.fresh:
            self.rows = [row for row in self.rows if row["step"] <= step]
            self.before = self.rows[-1]["seconds"] if self.rows else 0.0
            self.mark, self.fresh = time.perf_counter(), False
        self.step = step + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside."""
        self._add()
        try:
            yield
        finally:
            # Without a first step there is nothing to pause.
            if self.mark is not None:
                self.mark = time.perf_counter()

    def record(self, found: Mapping[str, float]) -> None:
        """Record the metrics of a validation."""
        row: dict[str, float] = {"step": self.step, "seconds": self.before}
        self.rows = [*self.rows, {**row, **found}]
        if self.writes:
            io.write_json(self.path, {"rows": self.rows})

    def summary(self) -> dict[str, float]:
        """Return the total seconds, and those until each level was first reached: `seconds_to_90`.

        Question types have theirs too: `seconds_to_90_relational`. Levels that were never reached
        are left out.
        """
        if not self.rows:
            return {}
        found = {"training": self.rows[-1]["seconds"]}
        for level in LEVELS:
            for name in self.rows[-1]:
                if not name.startswith("accuracy"):
                    continue
                reached = [row["seconds"] for row in self.rows if _reached(row, name, level)]
                if reached:
                    found[f"seconds_to_{level}{name.removeprefix('accuracy')}"] = reached[0]
        return found

    def _add(self) -> None:
        if self.mark is not None:
            now = time.perf_counter()
            self.before, self.mark = self.before + now - self.mark, now


def _reached(row: Mapping[str, Any], name: str, level: int) -> bool:
    return bool(row.get(name, 0.0) * 100 >= level)
