"""Runs side by side: the same results as one by one, and what dies takes nothing else with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from overt.errors import BadInput
from overt.recipes import find, settings, tables, workers
from overt.recipes.comparison import Row, Table
from overt.recipes.workers import Order, side_by_side
from tests.toys import toy

TINY = "data.train=24 data.val=8 data.test=8 train.epochs=1 train.card=0".split()
ENDLESS = ["train.epochs=100000"]


@pytest.fixture(autouse=True)
def kept_scenes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look for scenes where the environment says."""
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "scenes"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def order(out: Path, *sets: str, seed: int = 0, resume: bool = False) -> Order:
    recipe = settings.apply(find("scenes-question"), [*TINY, *sets])
    rest = {"seed": seed, "device": "cpu", "resume": resume, "command": ["overt"]}
    return Order.of(recipe, out, None, **rest)


def status(out: Path) -> str:
    return str(json.loads((out / "results.json").read_text())["status"])


def waited(ready: Callable[[], object], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


def test_every_row_of_every_table_can_be_ordered(tmp_path: Path) -> None:
    options = {"seed": 1, "device": "cpu", "resume": False, "command": []}
    for table in tables.tables().values():
        for row in table.rows:
            recipe = tables.made(row, [])
            told = Order.of(recipe, tmp_path, None, **options)
            again = Order(**json.loads(json.dumps(told.__dict__)))
            assert settings.restore(find(again.recipe), again.settings) == recipe


def test_a_recipe_that_its_name_does_not_lead_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"seed": 0, "device": "cpu", "resume": False, "command": []}
    with pytest.raises(BadInput, match="there is no recipe 'toy'"):
        Order.of(toy(), tmp_path, None, **options)
    monkeypatch.setattr(workers, "find", lambda name: find("scenes-question"))
    with pytest.raises(BadInput, match="toy is another recipe by its name; run it by itself"):
        Order.of(toy(), tmp_path, None, **options)


def test_cards_and_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    monkeypatch.setenv("PYTHONPATH", "there")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    found = workers._environments(3, {"auto"})
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["3", "5", "3"]
    assert {one["OMP_NUM_THREADS"] for one in found} == {"4"}
    root = str(Path(workers.__file__).parents[2])
    assert {one["PYTHONPATH"] for one in found} == {f"{root}{os.pathsep}there"}
    assert "CUDA_VISIBLE_DEVICES" not in workers._environments(2, {"cuda:1"})[0]
    assert "CUDA_VISIBLE_DEVICES" not in workers._environments(2, {"cpu"})[0]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in workers._environments(2, {"cpu"})[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert "CUDA_VISIBLE_DEVICES" not in workers._environments(2, {"cuda"})[0]


def test_nothing_to_do_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert list(side_by_side([], 4)) == []


def test_a_failure_is_told_and_the_others_come(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("not a run")
    orders = [order(taken), order(tmp_path / "a"), order(tmp_path / "b", seed=1)]
    begun: list[int] = []
    said: list[tuple[int, str]] = []
    ended = list(side_by_side(orders, 1, begun.append, lambda *line: said.append(line)))
    assert begun == [0, 1, 2]
    assert ended[1:] == [(1, 0, ""), (2, 0, "")]
    assert ended[0].code == 2 and "taken" in ended[0].why and "\n" not in ended[0].why
    assert [number for number, line in said if "after epoch 1" in line] == [1, 2]
    assert status(tmp_path / "a") == status(tmp_path / "b") == "done"
    assert "after epoch 1" in (tmp_path / "a.log").read_text()
    assert (taken / "mine.txt").read_text() == "not a run"


def test_a_run_that_cannot_tell_its_words_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "first.log").mkdir()
    orders = [order(tmp_path / "first"), order(tmp_path / "second")]
    ended = list(side_by_side(orders, 1))
    why = f"{tmp_path / 'first.log'} cannot be written: Is a directory"
    assert ended == [(0, 1, why), (1, 0, "")]
    assert status(tmp_path / "second") == "done"


@pytest.mark.long
def test_a_table_is_the_same_by_one_process_and_by_three(tmp_path: Path) -> None:
    table = Table(
        "two",
        "two rows",
        (
            Row("question", lambda: find("scenes-question")),
            Row("none", lambda: find("scenes-none")),
        ),
        ("accuracy",),
    )
    said: dict[int, list[str]] = {1: [], 3: []}
    found = {
        jobs: tables.run_table(
            table, tmp_path / str(jobs), seeds=2, device="cpu", sets=TINY, jobs=jobs,
            say=said[jobs].append, committed=tmp_path / "none", show_progress=False,
        )
        for jobs in (1, 3)
    }  # fmt: skip
    for label in ("question", "none"):
        ours = [
            [one.results["ours"] for one in filled.of_row(label) if one.results is not None]
            for filled in found.values()
        ]
        assert len(ours[0]) == 2 and ours[0] == ours[1]
    assert (tmp_path / "3" / "table.md").is_file()
    assert sum("runs in" in line for line in said[3]) == 4
    assert sum("done in" in line for line in said[3]) == 4
    weights = [tmp_path / str(jobs) / "none/seed-1/model/model.safetensors" for jobs in (1, 3)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
def test_a_worker_that_is_killed_costs_its_run_alone(tmp_path: Path) -> None:
    orders = [order(tmp_path / "endless", *ENDLESS), order(tmp_path / "a"), order(tmp_path / "b")]
    going = side_by_side(orders, 2)
    assert next(going) == (1, 0, "")
    waited((tmp_path / "endless" / "results.json").is_file)
    (victim,) = [
        one
        for one in psutil.Process().children()
        if any("endless.log" in file.path for file in one.open_files())
    ]
    victim.kill()
    ended = {one.number: one for one in going}
    assert ended[0].code == 1
    assert ended[0].why.startswith("its process was killed by signal 9; what it said last is in")
    assert ended[2].code == 0 and status(tmp_path / "b") == "done"


@pytest.mark.long
@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_outlives_the_table(tmp_path: Path, signal_: signal.Signals) -> None:
    """A table that ends, however, stops its runs, which save what they have and can go on."""
    words = [sys.executable, "-m", "overt", "table", "scenes", "--out", str(tmp_path / "out")]
    words += ["--rows", "question-only", "--seeds", "2", "--device", "cpu", "--jobs", "2"]
    for one in (*TINY, *ENDLESS, "train.save_every=1"):
        words += ["--set", one]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    places = [tmp_path / "out" / "question-only" / f"seed-{seed}" for seed in (0, 1)]
    waited(lambda: all(any(place.glob("checkpoints/*/step-*")) for place in places))
    crew = psutil.Process(process.pid).children()
    assert len(crew) == 2
    process.send_signal(signal_)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (128 + signal_ if signal_ != signal.SIGKILL else -signal_)
    _, alive = psutil.wait_procs(crew, timeout=120)
    assert not alive
    assert [status(place) for place in places] == ["stopped", "stopped"]
    if signal_ != signal.SIGKILL:
        assert "what was saved before is whole" in said.splitlines()[-1]
