"""Generation of scenes and questions as arrays, in one process or several.

This module needs NumPy only: each worker is a fresh interpreter that runs `main`, so that it works
from any script, notebook or pipe, with or without a main guard, and starts without loading torch.
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

from overt.data.scenes.balanced_questions import check_families, generate_scene
from overt.data.scenes.questions import ALL_FAMILIES, ANSWERS, FAMILIES, WORDS
from overt.data.scenes.render import check_size, render
from overt.data.scenes.world import MOST, scene_rng
from overt.errors import RunError, UserError

MAX_WORDS = 13  # words of the longest question
CHUNK = 64
MIN_SCENES_FOR_WORKERS = 1000  # for fewer scenes, starting workers takes longer than the work

Progress = Callable[[int, int], None]
Arrays = Mapping[str, NDArray[Any]]

_WORD = {word: i + 1 for i, word in enumerate(WORDS)}
_ANSWER = {answer: i for i, answer in enumerate(ANSWERS)}
_FAMILY = {family: i for i, family in enumerate(FAMILIES)}


@dataclass(frozen=True)
class SceneSpec:
    """Settings of a set of scenes: everything that decides the arrays."""

    split: str
    seed: int
    count: int
    size: int = 64
    questions: int = 4
    families: tuple[str, ...] = ALL_FAMILIES

    def check(self) -> None:
        """Raise `UserError` if a setting is invalid."""
        scene_rng(self.split, self.seed, 0)
        check_size(self.size)
        check_families(self.families, self.questions)
        if self.count < 1:
            raise UserError(f"count must be at least 1, got {self.count}.")


def array_shapes(spec: SceneSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and type of every array.

    `owners` is the thing that each pixel shows (0: none, i + 1: thing i); `tokens` are indices into
    WORDS plus one; `truths` has one bit per thing, for the target, the mentioned things, the
    evidence.
    """
    n, q, side = spec.count, spec.questions, spec.size
    return {
        "images": ((n, 3, side, side), "uint8"),
        "owners": ((n, side, side), "uint8"),
        "boxes": ((n, MOST, 4), "float32"),
        "things": ((n,), "uint8"),
        "tokens": ((n, q, MAX_WORDS), "uint8"),
        "answers": ((n, q), "uint8"),
        "families": ((n, q), "uint8"),
        "truths": ((n, q, 3), "uint8"),
    }


def fill_arrays(arrays: Arrays, spec: SceneSpec, start: int, stop: int) -> None:
    """Generate scenes start..stop-1 and write them to their rows."""
    for i in range(start, stop):
        scene, questions = generate_scene(spec.split, spec.seed, i, spec.questions, spec.families)
        drawn = render(scene, spec.size)
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


def make_arrays(spec: SceneSpec) -> dict[str, NDArray[Any]]:
    """Return all arrays in memory."""
    arrays = {name: np.zeros(shape, kind) for name, (shape, kind) in array_shapes(spec).items()}
    fill_arrays(arrays, spec, 0, spec.count)
    return arrays


def write_arrays(
    folder: Path, spec: SceneSpec, workers: int, on_progress: Progress | None = None
) -> None:
    """Write every array to `<name>.npy`; the bytes do not depend on the number of workers."""
    for name, (shape, kind) in array_shapes(spec).items():
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.dtype(kind), shape).flush()
    say = on_progress or (lambda done, total: None)
    if workers < 2 or spec.count < MIN_SCENES_FOR_WORKERS or not sys.executable:
        for done in _fill_files(folder, spec, 0, spec.count):
            say(done, spec.count)
        return
    done = 0
    with _run_workers(folder, spec, workers) as lines:
        for line in lines:
            done += int(line)
            say(done, spec.count)


def main(text: str) -> None:
    """Run a worker: generate its share and print the number of scenes after each chunk."""
    job = json.loads(text)
    spec = SceneSpec(**(job["spec"] | {"families": tuple(job["spec"]["families"])}))
    before = 0
    for done in _fill_files(Path(job["folder"]), spec, job["start"], job["stop"]):
        os.write(1, b"%d\n" % (done - before))  # one write call: all workers share the pipe
        before = done


def _fill_files(folder: Path, spec: SceneSpec, start: int, stop: int) -> Iterator[int]:
    """Fill the files chunk by chunk, and yield the number of scenes done."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in array_shapes(spec)}
    for low in range(start, stop, CHUNK):
        high = min(low + CHUNK, stop)
        fill_arrays(arrays, spec, low, high)
        yield high - start
    for array in arrays.values():
        array.flush()


@contextmanager
def _run_workers(folder: Path, spec: SceneSpec, workers: int) -> Iterator[Iterator[str]]:
    """Run workers on equal shares; yield their output, and raise if one of them fails."""
    ends = [spec.count * k // workers for k in range(workers + 1)]
    home = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import sys; from overt.data.scenes.generate import main; main(sys.argv[1])"
    read, write = os.pipe()
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as said, os.fdopen(read) as lines:
        try:
            try:
                for start, stop in pairwise(ends):
                    job = {"spec": asdict(spec), "start": start, "stop": stop}
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
                os.close(write)  # so that reading ends when the last worker does
            yield lines
            codes = [worker.wait() for worker in running]
        finally:
            for worker in running:
                if worker.poll() is None:
                    worker.terminate()
                    worker.wait()
        if any(codes):
            said.seek(0)
            why = said.read().decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise RunError(
                f"A worker that generates scenes ended with status {next(filter(None, codes))}: "
                f"{why[0]}; try again, or with workers=1"
            )
