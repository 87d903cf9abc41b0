"""The demo: the same questions answered with and without attention, in minutes on two cores.

Each row is a recipe with a short plan, run as a command of its own; as many run side by side as
there are cores, because small networks make poor use of several. Finished rows are kept and used
again, so asking for one more row costs no more than that row.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from overt import files
from overt.errors import BadInput, Failed, Stopped
from overt.recipes import folder, scenes, settings
from overt.recipes.comparison import Row
from overt.recipes.recipe import Recipe

SHORT = (
    "data.train=4000",
    "data.val=100",
    "data.test=500",
    "train.epochs=10",
    "train.save_every=400",
)
ROWS = (
    Row("question-only", scenes.scenes_question, SHORT),
    Row("no-attention", scenes.scenes_none, SHORT),
    Row("soft-attention", scenes.scenes_soft, SHORT),
    Row("truth-supervised", scenes.scenes_truth, SHORT),
)
FIRST = tuple(row.label for row in ROWS)

Say = Callable[[str], None]


def pick(labels: Sequence[str]) -> tuple[Row, ...]:
    """The rows called so, in our order: the first four when none is named, every one for `all`."""
    known = [row.label for row in ROWS]
    for label in labels:
        if label not in (*known, "all"):
            near = settings.offer(label, known)
            raise BadInput(f"the demo has no row {label[:60]!r}; {near}.")
    wanted = known if "all" in labels else labels or FIRST
    return tuple(row for row in ROWS if row.label in wanted)


def recipe_of(row: Row) -> Recipe:
    """The recipe of a row with its short plan."""
    return settings.apply(row.recipe(), row.changes)


def run_demo(
    out: Path,
    rows: Sequence[Row],
    *,
    seed: int = 0,
    device: str = "auto",
    data_root: Path | None = None,
    say: Say = print,
) -> list[dict[str, Any]]:
    """Run these rows under `out`, a folder each, and write one page about all of them.

    A row that was begun goes on where it stopped. One that was run with other settings or another
    seed is refused by name, before anything is started.
    """
    from overt.show import page

    places = [out / row.label for row in rows]
    waiting = []
    for row, place in zip(rows, places, strict=True):
        begun = folder.look(place) is not None
        held = folder.claim(place, recipe_of(row), seed, resume=begun)
        if held is not None and held.done:
            files.verify(place)
            say(f"{row.label}: at hand in {place}")
        else:
            options = ["--seed", str(seed), "--device", device, *(["--resume"] if begun else [])]
            options += ["--data", str(data_root)] if data_root is not None else []
            waiting.append((row.label, command(row, place, options)))
    run_commands(waiting[::-1], say)  # the slowest are the last: begin with them
    page.report(out / "report.html", places)
    return [dict(files.read_json(place / folder.RESULTS)) for place in places]


def command(row: Row, place: Path, options: Sequence[str]) -> list[str]:
    """The command line that runs one row."""
    changes = [word for change in row.changes for word in ("--set", change)]
    named = ["--out", str(place), "--title", row.label]
    return ["run", recipe_of(row).name, *named, *options, *changes]


def run_commands(waiting: Sequence[tuple[str, Sequence[str]]], say: Say) -> None:
    """Run `overt` with each of these arguments, several at once, and pass on what they say.

    The first that ends badly is raised once the others have come to their end. Ctrl-C and SIGTERM
    reach all of them, and each saves what it has.
    """
    if not waiting:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_once = min(len(waiting), cores or 1)
    threads = str(max(1, (cores or 1) // at_once))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    started: list[subprocess.Popen[str]] = []

    def run(job: tuple[str, Sequence[str]]) -> tuple[int, str]:
        label, arguments = job
        process = subprocess.Popen(
            [sys.executable, "-m", "overt", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        last = ""
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip()
            say(f"{label}: {last.removeprefix('overt: ')}")
        return process.wait(), f"{label}: {last.removeprefix('overt: ')}"

    with _ending(started), ThreadPoolExecutor(at_once) as pool:
        ends = list(pool.map(run, waiting))
    for code, sentence in ends:
        if code in (130, 143):
            raise Stopped(f"{sentence} (the same command goes on from there)", code - 128)
        if code == 2:
            raise BadInput(sentence)
        if code:
            raise Failed(sentence)


@contextmanager
def _ending(started: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Pass SIGTERM on to the commands; Ctrl-C reaches them from the terminal."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
