"""Parallel runs: same results as sequential runs, and isolated failures."""

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

from overt.errors import UserError
from overt.experiments import settings, table_runner, workers
from overt.experiments.table import RowSpec, TableSpec
from overt.experiments.workers import RunRequest, run_parallel
from overt.papers import catalog
from overt.papers.catalog import build, find_recipe
from tests.toys import toy

TINY = "data.train=24 data.val=8 data.test=8 train.epochs=1 train.card=0".split()
ENDLESS = ["train.epochs=100000"]


@pytest.fixture(autouse=True)
def scenes_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache folder of scenes for the workers."""
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "scenes"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def make_request(out: Path, *sets: str, seed: int = 0, resume: bool = False) -> RunRequest:
    recipe = settings.apply(find_recipe("scenes-question"), [*TINY, *sets])
    rest = {"seed": seed, "device": "cpu", "resume": resume, "command": ["overt"]}
    return RunRequest.from_recipe(recipe, out, None, **rest)


def status(out: Path) -> str:
    return str(json.loads((out / "results.json").read_text())["status"])


def wait_until(ready: Callable[[], object], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


@pytest.mark.long
def test_requests_of_every_row_of_every_table_are_json(tmp_path: Path) -> None:
    options = {"seed": 1, "device": "cpu", "resume": False, "command": []}
    for table in catalog.tables().values():
        for row in table.rows:
            recipe = table_runner.row_recipe(row, [])
            request = RunRequest.from_recipe(recipe, tmp_path, None, **options)
            again = RunRequest(**json.loads(json.dumps(request.__dict__)))
            assert settings.restore(find_recipe(again.recipe), again.settings) == recipe


def test_a_recipe_not_found_by_its_name_fails(tmp_path: Path) -> None:
    options = {"seed": 0, "device": "cpu", "resume": False, "command": []}
    request = RunRequest.from_recipe(toy(), tmp_path, None, **options)
    code, reason = request.run(find_recipe, build)
    assert code == 2 and "'toy'" in reason
    code, reason = request.run(lambda name: find_recipe("scenes-question"), build)
    assert code == 2 and "toy" in reason and "--jobs" in reason
    assert not any(tmp_path.iterdir())


def test_gpus_and_threads_are_divided_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_launcher_chooses_gpus_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS")
    found = workers._environments(2, {"auto"}, local=False)
    assert [set(one) for one in found] == [{"PYTHONPATH"}] * 2


@pytest.mark.parametrize(("text", "word"), [("srun 'x", "quotation"), ("no-such-srun", "srun")])
def test_a_launcher_is_checked_before_the_first_run(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        workers.split_launcher(text)
    assert workers.split_launcher("") == ()


def test_no_requests_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert list(run_parallel([], 4)) == []


@pytest.mark.long
def test_a_failed_run_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("not a run")
    requests = [
        make_request(taken),
        make_request(tmp_path / "a"),
        make_request(tmp_path / "b", seed=1),
    ]
    started: list[int] = []
    output: list[tuple[int, str]] = []
    ended = list(run_parallel(requests, 1, started.append, lambda *line: output.append(line)))
    assert started == [0, 1, 2]
    assert ended[1:] == [(1, 0, ""), (2, 0, "")]
    assert ended[0].code == 2 and "taken" in ended[0].reason and "\n" not in ended[0].reason
    assert [number for number, line in output if "after epoch 1" in line] == [1, 2]
    assert status(tmp_path / "a") == status(tmp_path / "b") == "done"
    assert "after epoch 1" in (tmp_path / "a.log").read_text()
    assert (taken / "mine.txt").read_text() == "not a run"


@pytest.mark.long
def test_a_run_without_writable_log_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "first.log").mkdir()
    requests = [make_request(tmp_path / "first"), make_request(tmp_path / "second")]
    ended = list(run_parallel(requests, 1))
    why = f"{tmp_path / 'first.log'} cannot be written: Is a directory"
    assert ended == [(0, 1, why), (1, 0, "")]
    assert status(tmp_path / "second") == "done"


@pytest.mark.long
def test_a_table_is_equal_with_one_and_three_jobs(tmp_path: Path) -> None:
    table = TableSpec(
        "two",
        "two rows",
        (
            RowSpec("question", lambda: find_recipe("scenes-question")),
            RowSpec("none", lambda: find_recipe("scenes-none")),
        ),
        ("accuracy",),
    )
    output: dict[int, list[str]] = {1: [], 3: []}
    found = {
        jobs: table_runner.run_table(
            table, tmp_path / str(jobs), build, seeds=2, device="cpu", sets=TINY, jobs=jobs,
            say=output[jobs].append, reuse=tmp_path / "none", show_progress=False,
        )
        for jobs in (1, 3)
    }  # fmt: skip
    for label in ("question", "none"):
        ours = [
            [one.results["ours"] for one in filled.runs_of_row(label) if one.results is not None]
            for filled in found.values()
        ]
        assert len(ours[0]) == 2 and ours[0] == ours[1]
    assert (tmp_path / "3" / "table.md").is_file()
    assert sum("running in" in line for line in output[3]) == 4
    assert sum("done in" in line for line in output[3]) == 4
    weights = [tmp_path / str(jobs) / "none/seed-1/model/model.safetensors" for jobs in (1, 3)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# Stdin has ended before the request is handled, as on a loaded machine after an early Ctrl-C.
RACE = """
import sys, threading
from overt.experiments import workers

def wait_for_the_end_of_stdin(log):
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()

workers._redirect_output = wait_for_the_end_of_stdin
workers.RunRequest.run = lambda *_: (0, "it ran")
sys.exit(workers.run_worker(None, None))
"""


def test_a_worker_whose_parent_has_gone_starts_no_run(tmp_path: Path) -> None:
    line = json.dumps(make_request(tmp_path / "a").__dict__) + "\n"
    for given in (line, line[:-20]):
        done = subprocess.run(
            [sys.executable, "-c", RACE], input=given, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def make_launcher(folder: Path) -> Path:
    """Write a launcher that starts a command elsewhere, with another environment, as ssh does."""
    launcher = folder / "launch"
    launcher.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$1" >> {folder}/partitions\n'
        "shift\n"
        f'cd / && exec env -i PATH="$PATH" OVERT_CACHE={os.environ["OVERT_CACHE"]} "$@"\n'
    )
    launcher.chmod(0o755)
    return launcher


@pytest.mark.long
def test_a_launcher_starts_workers_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    requests = [make_request(Path("a")), make_request(Path("b"), seed=1)]  # relative paths
    launcher = [str(make_launcher(tmp_path)), "--gpus=1"]
    ended = sorted(run_parallel(requests, 2, launcher=launcher))
    assert ended == [(0, 0, ""), (1, 0, "")]
    assert (tmp_path / "partitions").read_text().split() == ["--gpus=1"] * 2
    assert status(tmp_path / "a") == status(tmp_path / "b") == "done"


@pytest.mark.long
def test_a_launcher_that_fails_fails_its_runs(tmp_path: Path) -> None:
    (ended,) = run_parallel([make_request(tmp_path / "a")], 1, launcher=["false"])
    assert ended.code == 1 and "code 1" in ended.reason


@pytest.mark.long
def test_a_killed_worker_fails_only_its_run(tmp_path: Path) -> None:
    requests = [
        make_request(tmp_path / "endless", *ENDLESS),
        make_request(tmp_path / "a"),
        make_request(tmp_path / "b"),
    ]
    going = run_parallel(requests, 2)
    assert next(going) == (1, 0, "")
    wait_until((tmp_path / "endless" / "results.json").is_file)
    (victim,) = [
        one
        for one in psutil.Process().children()
        if any("endless.log" in file.path for file in one.open_files())
    ]
    victim.kill()
    ended = {one.number: one for one in going}
    assert ended[0].code == 1
    assert ended[0].reason.startswith("its process was killed by signal 9; its output is in")
    assert ended[2].code == 0 and status(tmp_path / "b") == "done"


@pytest.mark.long
@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_table(tmp_path: Path, signal_: signal.Signals) -> None:
    """When a table ends in any way its runs stop and save, and can be resumed."""
    words = [sys.executable, "-m", "overt", "table", "scenes", "--out", str(tmp_path / "out")]
    words += ["--rows", "question-only", "--seeds", "2", "--device", "cpu", "--jobs", "2"]
    for one in (*TINY, *ENDLESS, "train.save_every=1"):
        words += ["--set", one]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    places = [tmp_path / "out" / "question-only" / f"seed-{seed}" for seed in (0, 1)]
    wait_until(lambda: all(any(place.glob("checkpoints/*/step-*")) for place in places))
    crew = psutil.Process(process.pid).children()
    assert len(crew) == 2
    process.send_signal(signal_)
    _, output = process.communicate(timeout=600)
    assert process.returncode == (128 + signal_ if signal_ != signal.SIGKILL else -signal_)
    _, alive = psutil.wait_procs(crew, timeout=600)
    assert not alive
    assert [status(place) for place in places] == ["stopped", "stopped"]
    if signal_ != signal.SIGKILL:
        assert "earlier checkpoints are complete" in output.splitlines()[-1]
