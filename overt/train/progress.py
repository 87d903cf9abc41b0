"""Progress of a run: a JSON log and TensorBoard, and a progress bar."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from overt.errors import RunError, print_to_stderr, silence_stderr

LOG = "log.jsonl"


class TrainLog:
    """Writes `log.jsonl`, one JSON object per line, and TensorBoard files if it is installed.

    Nothing in it depends on the time, so a run that was killed and resumed has the same log, byte
    for byte, as one that was not. The stages of a run append to the same log.
    """

    def __init__(self, out: Path, enabled: bool = True) -> None:
        self.path, self.enabled = out / LOG, enabled
        self.file: TextIO | None = None
        self.board: Any = None

    def open(self, size: int) -> None:
        """Truncate the log to `size` bytes, the state of the last checkpoint, and open it."""
        if not self.enabled:
            return
        with self._os_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            # lines after the last checkpoint belong to steps that will run again
            os.truncate(self.path, min(size, self.path.stat().st_size))
            self.file = self.path.open("a", encoding="utf-8")

    def size_before(self, stage: str) -> int:
        """Return the number of bytes of earlier stages, before the first line of this one."""
        size = 0
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines(keepends=True):
                try:
                    # a line without an end was cut by a crash
                    earlier = line.endswith(b"\n") and json.loads(line)["stage"] != stage
                except (ValueError, KeyError, TypeError):
                    earlier = False
                if not earlier:
                    break
                size += len(line)
        return size

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line and flush it."""
        if self.file is None:
            return
        with self._os_errors():
            # flushed per line, so that a killed run leaves complete lines
            self.file.write(json.dumps(line, allow_nan=True) + "\n")
            self.file.flush()
        self.write_tensorboard(line)

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Convert `OSError` to `RunError` with the path."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror or error}; free disk space and "
                "continue with --resume"
            ) from error

    def write_tensorboard(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line for TensorBoard."""
        if self.board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except (ImportError, RuntimeError):
                self.board = False
            else:
                folder = self.path.parent / "tensorboard" / str(line["stage"])
                # hides later steps of an interrupted attempt
                self.board = SummaryWriter(str(folder), purge_step=line["step"])
        if self.board:
            numbers = {**line.get("losses", {}), **line.get("measures", {})}
            for name, layers in line.get("layers", {}).items():
                numbers |= {f"attention {name}/{layer}": value for layer, value in layers.items()}
            for name, value in numbers.items():
                self.board.add_scalar(f"{line['split']}/{name}", value, line["step"])

    def size(self) -> int:
        """Sync the log to disk and return its size in bytes."""
        if self.file is None:
            return 0
        with self._os_errors():
            self.file.flush()
            # after a power failure the log must not be shorter than a checkpoint says
            os.fsync(self.file.fileno())
            return self.path.stat().st_size

    def close(self) -> None:
        """Close the files; a full disk was reported by an earlier write."""
        for one in (self.file, self.board):
            if one:
                with suppress(OSError):
                    one.close()
        self.file = self.board = None


class Reporter:
    """Shows a progress bar on a terminal, or prints a line every few seconds elsewhere.

    The run continues without output if the terminal or pipe is closed.

    Args:
        enabled: Whether anything is shown.
        every: Seconds between two lines where there is no terminal.

    Example:
        >>> quiet = Reporter(enabled=False)
        >>> quiet.every
        15.0
    """

    def __init__(self, enabled: bool = True, every: float = 15.0) -> None:
        self.enabled, self.every = enabled, every
        self.bar: Any = None
        self.task: Any = None
        self.label, self.steps, self.first, self.started, self.last_print = "", 0, 0, 0.0, 0.0

    @contextmanager
    def stage(self, name: str, steps: int, done: int) -> Iterator[None]:
        """Report the progress of one stage, from step `done`."""
        self.label, self.steps, self.first = name, steps, done
        # monotonic: the wall clock may be set back during a run
        self.started = self.last_print = time.monotonic()
        if self.enabled and _is_terminal():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            class QuietConsole(Console):
                def on_broken_pipe(self) -> None:
                    """Continue without output; rich would exit the process."""
                    self.quiet = True
                    silence_stderr()

            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=QuietConsole(stderr=True),
                transient=True,
            )
            with _ignore_lost_terminal():
                self.bar.start()
            self.task = self.bar.add_task(name, total=steps, completed=done, note="")
        try:
            yield
        finally:
            if self.bar is not None:
                with _ignore_lost_terminal():
                    self.bar.stop()
                self.bar = None

    def step(self, step: int, means: Mapping[str, float]) -> None:
        """Report a step; `means` are the mean losses since the last line of the log."""
        if not self.enabled:
            return
        now = time.monotonic()
        # steps of this call only: a resumed run starts at step `first`
        rate = (step - self.first) / max(now - self.started, 1e-9)
        note = " ".join(f"{name} {value:.3f}" for name, value in means.items())
        if self.bar is not None:
            with _ignore_lost_terminal():
                self.bar.update(self.task, completed=step, note=f"{rate:.1f} steps/s  {note}")
        elif now - self.last_print >= self.every:
            self.last_print = now
            left = (self.steps - step) / max(rate, 1e-9)
            self.say(
                f"{self.label}: step {step}/{self.steps}, {rate:.1f} steps/s, {left:.0f} s left, "
                f"{note}"
            )

    def validated(self, epoch: int, measures: Mapping[str, float]) -> None:
        """Report the metrics of a validation."""
        numbers = " ".join(f"{name} {value:.3f}" for name, value in measures.items())
        self.say(f"{self.label}: after epoch {epoch}: {numbers}")

    def say(self, sentence: str) -> None:
        """Print one line."""
        if not self.enabled:
            return
        if self.bar is not None:
            with _ignore_lost_terminal():
                self.bar.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        else:
            print_to_stderr(sentence)


@contextmanager
def _ignore_lost_terminal() -> Iterator[None]:
    """Ignore errors of a terminal that was closed, and stop writing to stderr."""
    try:
        yield
    except (OSError, ValueError):
        silence_stderr()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # stderr is closed
        return False
