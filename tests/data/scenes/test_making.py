import json
import socket
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from overt.data.scenes import making
from overt.data.scenes.making import LONGEST, Wanted, make, make_files, shapes
from overt.data.scenes.posing import pose
from overt.data.scenes.questions import ALL, ANSWERS, RELATIONS, WORDS, Program, words
from overt.data.scenes.render import render
from overt.errors import BadInput, Failed

WANTED = Wanted("train", 3, 6, size=48, questions=3)


@pytest.fixture(scope="module")
def made():
    return make(WANTED)


def test_arrays_hold_what_the_program_makes(made):
    for name, (shape, kind) in shapes(WANTED).items():
        assert made[name].shape == shape and made[name].dtype == kind
    for i in range(WANTED.count):
        scene, questions = pose("train", 3, i, 3)
        drawn = render(scene, 48)
        assert (made["images"][i].transpose(1, 2, 0) == drawn.image).all()
        assert made["things"][i] == len(scene.things)
        for k, mask in enumerate(drawn.masks):
            assert ((made["owners"][i] == k + 1) == mask).all()
            assert (made["boxes"][i, k] == drawn.boxes[k]).all()
        for j, question in enumerate(questions):
            spoken = [WORDS[t - 1] for t in made["tokens"][i, j] if t]
            assert tuple(spoken) == question.words
            assert ANSWERS[made["answers"][i, j]] == question.answer
            assert ALL[made["families"][i, j]] == question.family
            bits = [
                {k for k in range(8) if bits >> k & 1} for bits in made["truths"][i, j].tolist()
            ]
            assert bits == [question.target, question.mentioned, question.evidence]


@pytest.mark.parametrize("family", ALL)
def test_the_longest_question_fits(family):
    for i in range(40 if family == "relate" else 5):
        for question in pose("val", 1, i, families=[family])[1]:
            assert len(question.words) <= LONGEST


def test_the_longest_question_by_hand():
    longest = (("size", "large"), ("texture", "striped"))
    programs = [Program("same", (longest,), "color")]
    programs += [Program("relate", (longest, longest), about) for about in RELATIONS]
    assert max(len(words(program)) for program in programs) == LONGEST


def test_workers_make_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "WORTH_WORKERS", 1)
    wanted = Wanted("val", 1, 150, size=32, questions=1)
    said: dict[int, list[int]] = {1: [], 3: []}
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        make_files(folder, wanted, workers, lambda done, total, w=workers: said[w].append(done))
        assert said[workers] == sorted(said[workers]) and said[workers][-1] == 150
    for name in shapes(wanted):
        one, three = ((tmp_path / k / f"{name}.npy").read_bytes() for k in "13")
        assert one == three


def test_a_worker_says_each_number_in_one_piece(tmp_path):
    """All workers share a pipe: a number and its newline in two writes can come apart.

    A datagram keeps the bounds of each write, and a standard output without a buffer splits most.
    """
    wanted = Wanted("val", 1, 2 * making.CHUNK + 5, size=32, questions=1)
    for name, (shape, kind) in shapes(wanted).items():
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.dtype(kind), shape).flush()
    job = {"wanted": asdict(wanted), "start": 0, "stop": wanted.count, "folder": str(tmp_path)}
    code = "import sys; from overt.data.scenes.making import main; main(sys.argv[1])"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-u", "-c", code, json.dumps(job)], stdout=theirs, check=True
        )
        ours.setblocking(False)
        assert [ours.recv(100) for _ in range(3)] == [b"64\n", b"64\n", b"5\n"]
        with pytest.raises(BlockingIOError):
            ours.recv(100)


def test_a_worker_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "WORTH_WORKERS", 1)
    bad = Wanted("val", 1, 10, size=7)
    with pytest.raises(Failed, match="7"):
        make_files(tmp_path, bad, 2)


def test_a_script_without_a_guard_can_use_workers(tmp_path):
    code = (
        "from pathlib import Path; import overt.data.scenes.making as m; m.WORTH_WORKERS = 1\n"
        f"m.make_files(Path({str(tmp_path)!r}), m.Wanted('val', 1, 4, size=32), 2)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-"], input=code.encode(), check=True)
    assert np.load(tmp_path / "things.npy").min() >= 4


@pytest.mark.parametrize(
    "wrong",
    [
        Wanted("trial", 0, 1),
        Wanted("train", -1, 1),
        Wanted("train", 0, 0),
        Wanted("train", 0, 1, size=8),
        Wanted("train", 0, 1, questions=0),
        Wanted("train", 0, 1, families=("riddle",)),
    ],
)
def test_what_cannot_be_made_is_refused(wrong):
    with pytest.raises(BadInput):
        wrong.check()
