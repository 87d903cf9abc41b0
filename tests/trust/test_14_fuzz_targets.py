"""Trust 14, further: readers of other people's bytes, fuzzed; `tests/fuzz` does it for longer."""

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
from tests.trust.hostile import mutated

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    yield
    clear()


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_ends_well_whatever_it_is_given(name: str) -> None:
    target, dice = TARGETS[name], random.Random(0)
    seeds = target.seeds()
    for data in (*seeds, b"", b"\0", b"{}", b"[]", b"\xff" * 64):
        target(data)
    for _ in range(40):
        target(mutated(dice.choice(seeds), dice))


def test_a_reader_that_does_not_is_found() -> None:
    from tests.fuzz.targets import Target

    with pytest.raises(UnicodeDecodeError):
        Target(lambda data: data.decode(), list)(b"\xff")


@pytest.mark.long
def test_fuzzing_led_by_coverage_finds_nothing(full: bool, reached: Callable[..., None]) -> None:
    """Some seconds on what strangers can send; ten minutes on all where that is asked for."""
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
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["inputs"]) == set(names) and told["bad"] == []
    naive = {name: ended_badly(name, 300) for name in USUAL}
    assert min(naive.values()) > 0
    reached(
        14,
        "readers of other people's bytes, fuzzed: a sentence or a value",
        f"{len(names)} readers, led by {told['led by']}, {told['seconds']} s: 0 ended badly",
        "Pillow, zipfile with tarfile, and json with look-ups end badly in "
        f"{', '.join(map(str, naive.values()))} of 300 mutations each",
    )


def usual_picture(data: bytes) -> object:
    return Image.open(io.BytesIO(data)).convert("RGB")


def usual_archive(data: bytes) -> object:
    stream = io.BytesIO(data)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            return [archive.read(name) for name in archive.namelist()]
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        return [opened.extractfile(one).read() for one in opened if one.isfile()]


def usual_question(data: bytes) -> object:
    asked = json.loads(data)
    return asked["model"] + asked.get("text", "")


USUAL = {"picture": usual_picture, "archive": usual_archive, "question": usual_question}


def ended_badly(name: str, count: int) -> int:
    """How many mutations of whole files end the usual reader of a kind with an exception."""
    dice, seeds, bad = random.Random(0), TARGETS[name].seeds(), 0
    for _ in range(count):
        try:
            USUAL[name](mutated(dice.choice(seeds), dice))
        except Exception:
            bad += 1
    return bad


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_readers_end_badly(name: str) -> None:
    assert ended_badly(name, 60) > 0
