"""What a run tells while it runs: one log that machines read, and one line that people watch."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from overt.errors import Failed

LOG = "log.jsonl"


class Log:
    """`log.jsonl`, one JSON object a line, and TensorBoard beside it where that is installed.

    It holds nothing that depends on the clock, so the log of a run that was killed and resumed is
    byte for byte that of a run that was not. The stages of a run share it, one after the other.
    """

    def __init__(self, out: Path, enabled: bool = True) -> None:
        self.path, self.enabled = out / LOG, enabled
        self.file: TextIO | None = None
        self.board: Any = None

    def open(self, size: int) -> None:
        """Start writing after the first `size` bytes; no checkpoint knows of later lines."""
        if not self.enabled:
            return
        with self.told():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            os.truncate(self.path, min(size, self.path.stat().st_size))
            self.file = self.path.open("a", encoding="utf-8")

    def before(self, stage: str) -> int:
        """How many bytes stand before the first line of a stage: those of the stages before it."""
        size = 0
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines(keepends=True):
                try:
                    theirs = line.endswith(b"\n") and json.loads(line)["stage"] != stage
                except (ValueError, KeyError, TypeError):
                    theirs = False
                if not theirs:
                    break
                size += len(line)
        return size

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, which others can read at once."""
        if self.file is None:
            return
        with self.told():
            self.file.write(json.dumps(line, allow_nan=True) + "\n")
            self.file.flush()
        self.chart(line)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn the system's refusal into a sentence with the path."""
        try:
            yield
        except OSError as error:
            raise Failed(
                f"{self.path} cannot be written: {error.strerror or error}; make room and go on "
                "with --resume"
            ) from error

    def chart(self, line: Mapping[str, Any]) -> None:
        """The same numbers for TensorBoard."""
        if self.board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except (ImportError, RuntimeError):
                self.board = False
            else:
                folder = self.path.parent / "tensorboard" / str(line["stage"])
                # what an earlier attempt charted from here on is not shown
                self.board = SummaryWriter(str(folder), purge_step=line["step"])
        if self.board:
            numbers = {**line.get("losses", {}), **line.get("measures", {})}
            for name, layers in line.get("layers", {}).items():
                numbers |= {f"attention {name}/{layer}": value for layer, value in layers.items()}
            for name, value in numbers.items():
                self.board.add_scalar(f"{line['split']}/{name}", value, line["step"])

    def size(self) -> int:
        """Bytes written so far, all of them on the disk."""
        if self.file is None:
            return 0
        with self.told():
            self.file.flush()
            os.fsync(self.file.fileno())
            return self.path.stat().st_size

    def close(self) -> None:
        """Let go of the files; a disk that is full was told of before."""
        for one in (self.file, self.board):
            if one:
                with suppress(OSError):
                    one.close()
        self.file = self.board = None


class Reporter:
    """A progress bar with rate and time left on a terminal, plain lines now and then elsewhere."""

    def __init__(self, enabled: bool = True, every: float = 15.0) -> None:
        self.enabled, self.every = enabled, every
        self.bar: Any = None
        self.task: Any = None
        self.label, self.steps, self.first, self.begun, self.told = "", 0, 0, 0.0, 0.0

    @contextmanager
    def stage(self, name: str, steps: int, done: int) -> Iterator[None]:
        """Report on one stage, from step `done` on."""
        self.label, self.steps, self.first = name, steps, done
        self.begun = self.told = time.monotonic()
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(name, total=steps, completed=done, note="")
        try:
            yield
        finally:
            if self.bar is not None:
                self.bar.stop()
                self.bar = None

    def step(self, step: int, means: Mapping[str, float]) -> None:
        """One more step is done; `means` are the losses since the last line of the log."""
        if not self.enabled:
            return
        now = time.monotonic()
        rate = (step - self.first) / max(now - self.begun, 1e-9)
        note = " ".join(f"{name} {value:.3f}" for name, value in means.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=step, note=f"{rate:.1f} steps/s  {note}")
        elif now - self.told >= self.every:
            self.told = now
            left = (self.steps - step) / max(rate, 1e-9)
            self.say(
                f"{self.label}: step {step}/{self.steps}, {rate:.1f} steps/s, {left:.0f} s left, "
                f"{note}"
            )

    def measured(self, epoch: int, measures: Mapping[str, float]) -> None:
        """A validation is done."""
        numbers = " ".join(f"{name} {value:.3f}" for name, value in measures.items())
        self.say(f"{self.label}: after epoch {epoch}: {numbers}")

    def say(self, sentence: str) -> None:
        """One line for the person watching."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        else:
            print(sentence, file=sys.stderr, flush=True)
