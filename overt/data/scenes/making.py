"""Scenes and their questions as arrays, made by one process or by several.

This module needs numpy alone: each worker is a fresh interpreter that runs `main`, so that building
works from any script, notebook or pipe, guarded or not, and starts without loading torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overt.data.scenes.posing import check_families, pose
from overt.data.scenes.questions import ALL, ANSWERS, FAMILIES, WORDS
from overt.data.scenes.render import check_size, render
from overt.data.scenes.world import MOST, key
from overt.errors import BadInput, Failed

LONGEST = 13  # words of the longest question
CHUNK = 64
WORTH_WORKERS = 1000  # scenes below which starting workers takes longer than the work

Progress = Callable[[int, int], None]
Arrays = Mapping[str, NDArray[Any]]

_WORD = {word: i + 1 for i, word in enumerate(WORDS)}
_ANSWER = {answer: i for i, answer in enumerate(ANSWERS)}
_FAMILY = {family: i for i, family in enumerate(FAMILIES)}


@dataclass(frozen=True)
class Wanted:
    """Which scenes: everything that decides what the arrays hold."""

    split: str
    seed: int
    count: int
    size: int = 64
    questions: int = 4
    families: tuple[str, ...] = ALL

    def check(self) -> None:
        """BadInput unless there are such scenes."""
        key(self.split, self.seed, 0)
        check_size(self.size)
        check_families(self.families, self.questions)
        if self.count < 1:
            raise BadInput(f"{self.count} scenes are none: ask for at least one")


def shapes(wanted: Wanted) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and type of every array.

    `owners` says which thing each pixel shows (0: none, i + 1: thing i); `tokens` are places in
    WORDS plus one; `truths` has a bit a thing, for the target, what is mentioned, the evidence.
    """
    n, q, side = wanted.count, wanted.questions, wanted.size
    return {
        "images": ((n, 3, side, side), "uint8"),
        "owners": ((n, side, side), "uint8"),
        "boxes": ((n, MOST, 4), "float32"),
        "things": ((n,), "uint8"),
        "tokens": ((n, q, LONGEST), "uint8"),
        "answers": ((n, q), "uint8"),
        "families": ((n, q), "uint8"),
        "truths": ((n, q, 3), "uint8"),
    }


def fill(arrays: Arrays, wanted: Wanted, start: int, stop: int) -> None:
    """Make scenes start..stop-1 and write them to their places."""
    for i in range(start, stop):
        scene, questions = pose(wanted.split, wanted.seed, i, wanted.questions, wanted.families)
        drawn = render(scene, wanted.size)
        count = len(scene.things)
        arrays["images"][i] = drawn.image.transpose(2, 0, 1)
        arrays["owners"][i] = drawn.owners + 1
        arrays["boxes"][i, :count] = drawn.boxes
        arrays["things"][i] = count
        for j, question in enumerate(questions):
            arrays["tokens"][i, j, : len(question.words)] = [_WORD[w] for w in question.words]
            arrays["answers"][i, j] = _ANSWER[question.answer]
            arrays["families"][i, j] = _FAMILY[question.family]
            sets = (question.target, question.mentioned, question.evidence)
            arrays["truths"][i, j] = [sum(1 << thing for thing in things) for things in sets]


def make(wanted: Wanted) -> dict[str, NDArray[Any]]:
    """All arrays in memory."""
    arrays = {name: np.zeros(shape, kind) for name, (shape, kind) in shapes(wanted).items()}
    fill(arrays, wanted, 0, wanted.count)
    return arrays


def make_files(
    folder: Path, wanted: Wanted, workers: int, on_progress: Progress | None = None
) -> None:
    """Write every array to `<name>.npy`; the bytes do not depend on the number of workers."""
    for name, (shape, kind) in shapes(wanted).items():
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.dtype(kind), shape).flush()
    say = on_progress or (lambda done, total: None)
    if workers < 2 or wanted.count < WORTH_WORKERS or not sys.executable:
        for done in _steps(folder, wanted, 0, wanted.count):
            say(done, wanted.count)
        return
    done = 0
    with _started(folder, wanted, workers) as lines:
        for line in lines:
            done += int(line)
            say(done, wanted.count)


def main(text: str) -> None:
    """What a worker runs: make its share and print how much is done after each step."""
    job = json.loads(text)
    wanted = Wanted(**(job["wanted"] | {"families": tuple(job["wanted"]["families"])}))
    before = 0
    for done in _steps(Path(job["folder"]), wanted, job["start"], job["stop"]):
        os.write(1, b"%d\n" % (done - before))  # in one piece: all workers share the pipe
        before = done


def _steps(folder: Path, wanted: Wanted, start: int, stop: int) -> Iterator[int]:
    """Fill the files chunk by chunk, with how many are done after each."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in shapes(wanted)}
    for low in range(start, stop, CHUNK):
        high = min(low + CHUNK, stop)
        fill(arrays, wanted, low, high)
        yield high - start
    for array in arrays.values():
        array.flush()


@contextmanager
def _started(folder: Path, wanted: Wanted, workers: int) -> Iterator[Iterator[str]]:
    """Run workers on equal shares; yields what they print, and raises if one of them fails."""
    ends = [wanted.count * k // workers for k in range(workers + 1)]
    home = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import sys; from overt.data.scenes.making import main; main(sys.argv[1])"
    read, write = os.pipe()
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as said, os.fdopen(read) as lines:
        try:
            try:
                for start, stop in pairwise(ends):
                    job = {"wanted": asdict(wanted), "start": start, "stop": stop}
                    text = json.dumps(job | {"folder": str(folder.resolve())})
                    running.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-c", code, text],
                            stdin=subprocess.DEVNULL,
                            stdout=write,
                            stderr=said,
                            env=os.environ | {"PYTHONPATH": path},
                        )
                    )
            finally:
                os.close(write)  # so that the lines end when the last worker does
            yield lines
            codes = [worker.wait() for worker in running]
        finally:
            for worker in running:
                if worker.poll() is None:
                    worker.terminate()
                    worker.wait()
        if any(codes):
            said.seek(0)
            why = said.read().decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word"]
            raise Failed(
                f"a worker that makes scenes ended with status {next(filter(None, codes))}: "
                f"{why[0]}; try again, or with workers=1"
            )
