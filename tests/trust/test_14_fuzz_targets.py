"""Trust 14: fuzzed readers of external files; `tests/fuzz` runs longer."""

import io
import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.fuzz.targets import TARGETS, clear
from tests.trust.hostile import mutate_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _clear_files() -> Iterator[None]:
    yield
    clear()


@pytest.mark.parametrize("name", TARGETS)
def test_readers_return_or_raise_expected_errors_on_mutated_files(name: str) -> None:
    target, rng = TARGETS[name], random.Random(0)
    seeds = target.seeds()
    for data in (*seeds, b"", b"\0", b"{}", b"[]", b"\xff" * 64):
        target(data)
    for _ in range(40):
        target(mutate_bytes(rng.choice(seeds), rng))


def test_an_unexpected_error_is_raised_by_a_target() -> None:
    from tests.fuzz.targets import Target

    with pytest.raises(UnicodeDecodeError):
        Target(lambda data: data.decode(), list)(b"\xff")


@pytest.mark.long
def test_coverage_guided_fuzzing_finds_no_failure(
    full: bool, record_result: Callable[..., None]
) -> None:
    """Some seconds on three readers, or ten minutes on all in the full version."""
    names, seconds = (list(TARGETS), 600) if full else (["picture", "archive", "question"], 9)
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", *names, "--seconds", str(seconds)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary["inputs"]) == set(names) and summary["bad"] == []
    naive = {name: count_failures(name, 300) for name in NAIVE_READERS}
    assert min(naive.values()) > 0
    record_result(
        14,
        "readers of external files, fuzzed: a value or a one-line error",
        f"{len(names)} readers, fuzzed with {summary['method']}, "
        f"{summary['seconds']} s: 0 failures",
        "Pillow, zipfile with tarfile, and json with look-ups fail in "
        f"{', '.join(map(str, naive.values()))} of 300 mutations each",
    )


def read_image_naively(data: bytes) -> object:
    return Image.open(io.BytesIO(data)).convert("RGB")


def read_archive_naively(data: bytes) -> object:
    stream = io.BytesIO(data)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            return [archive.read(name) for name in archive.namelist()]
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        return [opened.extractfile(one).read() for one in opened if one.isfile()]


def read_question_naively(data: bytes) -> object:
    question = json.loads(data)
    return question["model"] + question.get("text", "")


NAIVE_READERS = {
    "picture": read_image_naively,
    "archive": read_archive_naively,
    "question": read_question_naively,
}


def count_failures(name: str, count: int) -> int:
    """Count mutations of valid files that raise in the usual reader."""
    rng, seeds, failures = random.Random(0), TARGETS[name].seeds(), 0
    for _ in range(count):
        try:
            NAIVE_READERS[name](mutate_bytes(rng.choice(seeds), rng))
        except Exception:
            failures += 1
    return failures


@pytest.mark.parametrize("name", NAIVE_READERS)
def test_naive_readers_raise_on_mutated_files(name: str) -> None:
    assert count_failures(name, 60) > 0
