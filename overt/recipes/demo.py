"""The demo: the same questions answered with and without attention, in minutes on two cores.

Each row is a recipe with a short plan, run as a command of its own; as many run side by side as
there are cores, because small networks make poor use of several. Finished rows are kept and used
again, so asking for one more row costs no more than that row. The rows after the first four are
other tasks on scenes, one a paper.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from overt import files
from overt.errors import BadInput, Failed, Stopped
from overt.recipes import folder, scenes, settings
from overt.recipes.a2 import recipe as a2
from overt.recipes.comparison import Row
from overt.recipes.han import recipe as han
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.recipe import Recipe
from overt.recipes.ssa import recipe as ssa
from overt.recipes.vgp import recipe as vgp

SHORT = (
    "data.train=4000",
    "data.val=100",
    "data.test=504",
    "train.epochs=10",
    "train.save_every=400",
)
LEARNED = (
    "data.train=3000",
    "data.val=100",
    "data.test=504",
    "model.width=0.125",
    "train.epochs=5",
    "train.precision=fp32",
    "train.save_every=400",
    "judge.items=200",
    "judge.fgsm=0",
    "judge.pgd=0",
)
OWN = (*SHORT, "supervise.loss=kl", "surrogate.probes=24")
HARD = (*SHORT, "model.select=top", "model.cells=16")
GROUNDED = (
    "data.train=3000",
    "data.val=100",
    "data.test=300",
    "data.expressions=300",
    "data.questions=300",
    "model.features=64",
    "train.epochs=4",
    "train.batch=32",
    "train.save_every=400",
    "after.epochs=1",
)
ALIGNED = (
    "data.train=1000",
    "data.val=60",
    "data.test=100",
    "model.width=0.125",
    "model.layers=2",
    "train.epochs=4",
    "train.batch=32",
    "train.rate=2e-3",
    "train.save_every=400",
    "critic.epochs=1",
    "critic.steps=12",
    "critic.batch=32",
)
ROWS = (
    Row("question-only", scenes.scenes_question, SHORT),
    Row("no-attention", scenes.scenes_none, SHORT),
    Row("soft-attention", scenes.scenes_soft, SHORT),
    Row("truth-supervised", scenes.scenes_truth, SHORT),
    Row("learned-attention", ltpa.ltpa_scenes, LEARNED),
    Row("hard-attention", han.han_scenes, HARD),
    Row("self-supervised", ssa.ssa_scenes, OWN),
    Row("grounded", vgp.vgp_scenes, GROUNDED),
    Row("aligned-captions", a2.a2_scenes, ALIGNED),
)
FIRST = tuple(row.label for row in ROWS[:4])

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
        begun = folder.begun(place)
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
    reach all of them, each saves what it has, and none that waits is started any more.
    """
    if not waiting:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_once = min(len(waiting), cores or 1)
    threads = str(max(1, (cores or 1) // at_once))
    running = _Running(say, {"OMP_NUM_THREADS": threads, **os.environ})
    with _signals(running.stop), ThreadPoolExecutor(at_once) as pool:
        ends = list(pool.map(running.run, waiting))
    stopped = [code for code, _ in ends if code in (130, 143)]
    if stopped:
        raise Stopped(
            "the demo was stopped and saved what it had; the same command goes on from there.",
            stopped[0] - 128,
        )
    for code, sentence in ends:
        if code == 2:
            raise BadInput(sentence)
        if code:
            raise Failed(sentence)


class _Running:
    """Commands that run side by side, and the signal that ends them."""

    def __init__(self, say: Say, environment: Mapping[str, str]) -> None:
        self.say, self.environment = say, environment
        self.started: list[subprocess.Popen[str]] = []
        self.signal = 0

    def run(self, job: tuple[str, Sequence[str]]) -> tuple[int, str]:
        """The exit code of one command and the last that it said; 128 and more for a signal."""
        label, arguments = job
        if self.signal:
            return 128 + self.signal, label
        process = subprocess.Popen(
            [sys.executable, "-m", "overt", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # else a terminal's Ctrl-C would come twice: a second one is not kind
        )
        self.started.append(process)
        if self.signal:  # it came while the command was started
            process.send_signal(self.signal)
        last = ""
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip()
            self.say(f"{label}: {last.removeprefix('overt: ')}")
        code = process.wait()
        return 128 - code if code < 0 else code, f"{label}: {last.removeprefix('overt: ')}"

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the commands; a closed terminal ends them as SIGTERM would."""
        self.signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        for process in self.started:
            if process.poll() is None:
                process.send_signal(self.signal)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Answer SIGINT, SIGTERM and SIGHUP with `handler`; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in former.items():
            signal.signal(number, one)
