import json
import socket
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from overt.data.scenes import generate
from overt.data.scenes.balanced_questions import generate_scene
from overt.data.scenes.generate import MAX_WORDS, SceneSpec, array_shapes, make_arrays, write_arrays
from overt.data.scenes.questions import (
    ALL_FAMILIES,
    ANSWERS,
    RELATIONS,
    WORDS,
    QuestionProgram,
    program_words,
)
from overt.data.scenes.render import render
from overt.errors import RunError, UserError

SPEC = SceneSpec("train", 3, 6, size=48, questions=3)


@pytest.fixture(scope="module")
def arrays():
    return make_arrays(SPEC)


def test_arrays_match_the_generated_scenes(arrays):
    for name, (shape, kind) in array_shapes(SPEC).items():
        assert arrays[name].shape == shape and arrays[name].dtype == kind
    for i in range(SPEC.count):
        scene, questions = generate_scene("train", 3, i, 3)
        drawn = render(scene, 48)
        assert (arrays["images"][i].transpose(1, 2, 0) == drawn.image).all()
        assert arrays["things"][i] == len(scene.things)
        for k, mask in enumerate(drawn.masks):
            assert ((arrays["owners"][i] == k + 1) == mask).all()
            assert (arrays["boxes"][i, k] == drawn.boxes[k]).all()
        for j, question in enumerate(questions):
            words = [WORDS[t - 1] for t in arrays["tokens"][i, j] if t]
            assert tuple(words) == question.words
            assert ANSWERS[arrays["answers"][i, j]] == question.answer
            assert ALL_FAMILIES[arrays["families"][i, j]] == question.family
            bits = [
                {k for k in range(8) if bits >> k & 1} for bits in arrays["truths"][i, j].tolist()
            ]
            assert bits == [question.target, question.mentioned, question.evidence]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_questions_fit_into_max_words(family):
    for i in range(40 if family == "relate" else 5):
        for question in generate_scene("val", 1, i, families=[family])[1]:
            assert len(question.words) <= MAX_WORDS


def test_longest_question_has_max_words():
    longest = (("size", "large"), ("texture", "striped"))
    programs = [QuestionProgram("same", (longest,), "color")]
    programs += [QuestionProgram("relate", (longest, longest), about) for about in RELATIONS]
    assert max(len(program_words(program)) for program in programs) == MAX_WORDS


@pytest.mark.long
def test_workers_write_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "MIN_SCENES_FOR_WORKERS", 1)
    spec = SceneSpec("val", 1, 150, size=32, questions=1)
    progress: dict[int, list[int]] = {1: [], 3: []}
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        write_arrays(folder, spec, workers, lambda done, total, w=workers: progress[w].append(done))
        assert progress[workers] == sorted(progress[workers]) and progress[workers][-1] == 150
    for name in array_shapes(spec):
        one, three = ((tmp_path / k / f"{name}.npy").read_bytes() for k in "13")
        assert one == three


def test_worker_writes_each_progress_number_at_once(tmp_path):
    """All workers share a pipe, so a number and its newline must be one write.

    A datagram socket keeps the bounds of each write; unbuffered output splits the most.
    """
    spec = SceneSpec("val", 1, 2 * generate.CHUNK + 5, size=32, questions=1)
    for name, (shape, kind) in array_shapes(spec).items():
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.dtype(kind), shape).flush()
    job = {"spec": asdict(spec), "start": 0, "stop": spec.count, "folder": str(tmp_path)}
    code = "import sys; from overt.data.scenes.generate import main; main(sys.argv[1])"
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with receiver, sender:
        subprocess.run(
            [sys.executable, "-u", "-c", code, json.dumps(job)], stdout=sender, check=True
        )
        receiver.setblocking(False)
        assert [receiver.recv(100) for _ in range(3)] == [b"64\n", b"64\n", b"5\n"]
        with pytest.raises(BlockingIOError):
            receiver.recv(100)


def test_failing_worker_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "MIN_SCENES_FOR_WORKERS", 1)
    bad = SceneSpec("val", 1, 10, size=7)
    with pytest.raises(RunError, match="7"):
        write_arrays(tmp_path, bad, 2)


def test_script_without_a_main_guard_can_use_workers(tmp_path):
    code = (
        "from pathlib import Path; import overt.data.scenes.generate as m\n"
        "m.MIN_SCENES_FOR_WORKERS = 1\n"
        f"m.write_arrays(Path({str(tmp_path)!r}), m.SceneSpec('val', 1, 4, size=32), 2)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-"], input=code.encode(), check=True)
    assert np.load(tmp_path / "things.npy").min() >= 4


@pytest.mark.parametrize(
    "wrong",
    [
        SceneSpec("trial", 0, 1),
        SceneSpec("train", -1, 1),
        SceneSpec("train", 0, 0),
        SceneSpec("train", 0, 1, size=8),
        SceneSpec("train", 0, 1, questions=0),
        SceneSpec("train", 0, 1, families=("riddle",)),
    ],
)
def test_invalid_spec_raises(wrong):
    with pytest.raises(UserError):
        wrong.check()
