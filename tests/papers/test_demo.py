"""The demo: its rows, run in parallel worker processes, interrupted and resumed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from overt import io
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.experiments import run_folder, scenes_recipes, settings, workers
from overt.experiments.table import RowSpec
from overt.experiments.workers import RunRequest
from overt.papers import demo, demo_chapters
from overt.papers.catalog import recipes
from tests.experiments import tiny

SHORT = (*tiny.SETS, "train.save_every=1")
ROWS = (
    RowSpec("mean", scenes_recipes.scenes_none, SHORT),
    RowSpec("soft", scenes_recipes.scenes_soft, SHORT),
)


# Rows


def test_each_row_is_a_listed_recipe_with_valid_settings() -> None:
    labels = [row.label for row in demo.ROWS]
    assert len(set(labels)) == len(labels) and set(demo.DEFAULT_ROWS) <= set(labels)
    for row in demo.ROWS:
        recipe = demo.demo_recipe(row)
        assert recipe.name in recipes() and recipe == settings.apply(row.recipe(), row.changes)
        assert row.label.isprintable() and "/" not in row.label and " " not in row.label


def test_the_default_rows_are_five_papers_beside_their_controls() -> None:
    chapters = demo_chapters.chapters_of(demo.DEFAULT_ROWS)
    assert {one.paper for one in chapters} == {"ltpa", "ssa", "han", "vgp", "a2"}
    assert set(demo.DEFAULT_ROWS) == {row for one in chapters for row in (one.control, one.method)}


@pytest.mark.parametrize(
    ("label", "name", "wanted"),
    [
        ("learned-attention", "ltpa-scenes", {"model.score": "parametrised"}),
        ("hard-attention", "han-sortclevr", {"model.select": "top", "model.cells": 6}),
        ("adaptive-attention", "han-sortclevr", {"model.select": "above-uniform"}),
        ("self-supervised", "ssa-shapes", {"supervise.target": "surrogate"}),
        ("grounded", "vgp-scenes", {"supervise.way": "direct"}),
        ("aligned-captions", "a2-scenes", {"align.fuse": "gate"}),
    ],
)
def test_each_paper_has_a_row(label: str, name: str, wanted: dict[str, object]) -> None:
    (row,) = (row for row in demo.select_rows([label]) if row.label == label)
    recipe = demo.demo_recipe(row)
    assert recipe.name == name and label in demo.DEFAULT_ROWS
    assert wanted.items() <= settings.to_json(recipe).items()


def test_rows_are_selected_with_their_controls_in_table_order() -> None:
    assert demo.select_rows([]) == tuple(row for row in demo.ROWS if row.label in demo.DEFAULT_ROWS)
    assert demo.select_rows(["all"]) == demo.select_rows(["soft-attention", "all"]) == demo.ROWS
    found = demo.select_rows(["soft-attention", "question-only"])
    assert [row.label for row in found] == ["question-only", "no-attention", "soft-attention"]
    assert [row.label for row in demo.select_rows(["random-cells"])] == ["random-cells"]
    with pytest.raises(UserError, match=r"'soft-atention'.* soft-attention"):
        demo.select_rows(["soft-atention"])
    with pytest.raises(UserError, match="question-only"):
        demo.select_rows(["?"])


def test_controls_start_before_the_methods_that_start_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(demo, "run_requests", lambda requests, say: started.extend(requests))
    with pytest.raises(UserError):  # nothing has run, so there are no runs to read
        demo.run_demo(tmp_path, demo.select_rows([]), device="cpu")
    assert sorted(started) == sorted(demo.DEFAULT_ROWS)
    for one in demo_chapters.chapters_of(started):
        if one.control != "hard-attention":  # a method itself
            assert started.index(one.control) < started.index(one.method)
    assert io.read_json(tmp_path / run_folder.ROWS) == {"rows": list(demo.DEFAULT_ROWS)}


def test_row_command_is_an_overt_run_command() -> None:
    found = demo.row_command(ROWS[1], Path("d/soft"), ["--seed", "3"])
    changes = [word for one in SHORT for word in ("--set", one)]
    named = ["--out", "d/soft", "--title", "soft"]
    assert found == ["overt", "run", "scenes-soft", *named, "--seed", "3", *changes]
    assert demo.row_title(demo.ROWS[-1]) == "truth-supervised"


# A full demo


@pytest.mark.long
def test_finished_rows_are_reused_and_checked(tmp_path: Path) -> None:
    messages: list[str] = []
    results = demo.run_demo(tmp_path, ROWS, device="cpu", say=messages.append)
    assert [one["title"] for one in results] == ["mean", "soft"]
    assert [one["status"] for one in results] == ["done", "done"]
    for row in ROWS:
        io.verify(tmp_path / row.label)
        assert any(line.startswith(f"{row.label}: ") for line in messages)
    page = (tmp_path / "report.html").read_text()
    assert "mean" in page and "soft" in page
    # finished rows are reused: no process starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        again = demo.run_demo(tmp_path, ROWS, device="cpu", say=messages.append)
        assert again == results and messages[-1] == f"soft: already finished in {tmp_path / 'soft'}"
        # rows with other settings are rejected by name before anything starts
        with pytest.raises(UserError, match=r"seed.* 1.* 0"):
            demo.run_demo(tmp_path, ROWS, seed=1, device="cpu")
        (tmp_path / "mean/samples.npz").write_bytes(b"")
        with pytest.raises(CorruptFileError, match=r"mean/samples\.npz"):
            demo.run_demo(tmp_path, ROWS, device="cpu", say=messages.append)


@pytest.mark.long
def test_chapters_have_a_page_a_report_each_and_a_table(tmp_path: Path) -> None:
    """Two chapters share a run; numbers of page and table are those of the runs."""
    rows = tuple(
        RowSpec(row.label, row.recipe, SHORT)
        for row in demo.ROWS
        if row.label in ("question-only", "no-attention", "soft-attention")
    )
    results = demo.run_demo(tmp_path, rows, device="cpu", say=lambda line: None)
    assert [one["title"] for one in results] == ["question only", "no attention", "soft attention"]
    page = (tmp_path / "report.html").read_text()
    assert demo_chapters.TITLE in page and "One seed is an illustration" in page
    for name in ("image", "attention"):
        assert f'href="{name}.html"' in page and (tmp_path / f"{name}.html").is_file()
    header, *lines = demo.comparison_table(tmp_path, rows)
    assert header[:4] == ["paper", "metric", "control", "method"]
    assert [line[:2] for line in lines] == [["image", "accuracy ↑"], ["attention", "accuracy ↑"]]
    accuracies = [f"{one['ours']['accuracy']['value']:.3f}" for one in results]
    assert [line[2:4] for line in lines] == [accuracies[:2], accuracies[1:]]
    assert demo.comparison_table(tmp_path, rows[:1]) == []


@pytest.mark.long
def test_an_interrupted_row_resumes_after_its_training(tmp_path: Path) -> None:
    out = tmp_path / "soft"
    with pytest.MonkeyPatch.context() as patch:
        from overt.experiments import evaluate

        patch.setattr(evaluate.Evaluator, "evaluate", None)
        with pytest.raises(TypeError):
            tiny.run(demo.demo_recipe(ROWS[1]), out)
    kept = {path: path.stat().st_mtime_ns for path in (out / "checkpoints").rglob("*.safetensors")}
    assert kept
    (results,) = demo.run_demo(tmp_path, ROWS[1:], device="cpu", say=lambda line: None)
    assert results["status"] == "done"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # not trained again


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_demo_resumes_to_the_same_weights(tmp_path: Path, number: int) -> None:
    changes = ("data.limit=32", "model.width=0.25", "train.epochs=40", "train.batch=4")
    rows = tuple(RowSpec(row.label, row.recipe, changes) for row in ROWS)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from overt.errors import RunInterrupted\n"
        "from overt.papers import demo; from overt.experiments import scenes_recipes as scenes\n"
        "from overt.experiments.table import RowSpec\n"
        f"makers = {{'mean': scenes.scenes_none, 'soft': scenes.scenes_soft}}\n"
        f"rows = [RowSpec(label, make, {changes!r}) for label, make in makers.items()]\n"
        "try:\n"
        f"    demo.run_demo(Path({str(tmp_path / 'a')!r}), rows, device='cpu')\n"
        "except RunInterrupted as stopped:\n"
        "    print(stopped)\n"
        "    sys.exit(stopped.code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    logs = [tmp_path / "a" / row.label / "log.jsonl" for row in rows]
    while process.poll() is None and not all(log.exists() and log.stat().st_size for log in logs):
        time.sleep(0.01)
    process.send_signal(number)
    messages, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + number, messages
    assert "the demo was interrupted" in messages and "--resume" not in messages.splitlines()[-1]
    for row in rows:
        stored = run_folder.read_run(tmp_path / "a" / row.label)
        assert stored is not None and stored.results["status"] in ("stopped", "done")
    for out in ("a", "b"):
        demo.run_demo(tmp_path / out, rows, device="cpu", say=lambda line: None)
    for row in rows:
        one, other = (
            (tmp_path / out / row.label / "model/model.safetensors").read_bytes() for out in "ab"
        )
        assert one == other


# How rows end, with workers that do not train

WORKER = """#!{python} -S
import json, os, sys, threading, time
for line in sys.stdin:
    order = json.loads(line)
    how = order["recipe"]
    open(order["out"], "w").close()
    with open(order["out"] + ".log", "a") as log:
        print("it", how, file=log)
    if how in ("sleep", "stubborn"):
        if how == "sleep":
            stop = lambda: (sys.stdin.read(), os._exit(143))
            threading.Thread(target=stop, daemon=True).start()
        time.sleep(60)
    if how == "die":
        os._exit(7)
    print(json.dumps([int(how), "" if how == "0" else "it " + how]), flush=True)
"""


@pytest.fixture
def run_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return `run_workers("sleep", "2")`: workers that end this way; it returns messages."""
    script = tmp_path / "ends"
    script.write_text(WORKER.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(workers, "sys", SimpleNamespace(executable=str(script)))
    monkeypatch.setattr(workers, "SHUTDOWN_TIMEOUT", 0.5)

    def run(*hows: str) -> list[str]:
        messages: list[str] = []
        requests = {
            f"row{i}": RunRequest(
                how, "toy", {}, str(tmp_path / f"mark{i}"), 0, "cpu", None, False, []
            )
            for i, how in enumerate(hows)
        }
        demo.run_requests(requests, messages.append)
        return sorted(messages)

    return run


def count_started(folder: Path) -> int:
    return sum(not path.suffix for path in folder.glob("mark*"))


def test_messages_of_rows_are_prefixed_with_their_label(
    run_workers: Callable[..., list[str]],
) -> None:
    assert run_workers() == []
    assert run_workers("0", "0", "0") == ["row0: it 0", "row1: it 0", "row2: it 0"]


@pytest.mark.parametrize(("how", "kind"), [("2", UserError), ("1", RunError)])
def test_a_row_error_is_raised_after_the_other_rows_finish(
    run_workers: Callable[..., list[str]], tmp_path: Path, how: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"^row1: it {how}$"):
        run_workers("0", how, "0", "1")
    assert count_started(tmp_path) == 4


def test_a_dead_worker_is_a_run_error_after_the_other_rows_finish(
    run_workers: Callable[..., list[str]], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"^row0: .* code 7\b.*mark0\.log$"):
        run_workers("die", "die", "0", "0")
    assert count_started(tmp_path) == 4


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("how", ["sleep", "stubborn"])
def test_a_signal_stops_all_workers_and_starts_no_more(
    run_workers: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    how: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    def send() -> None:
        while count_started(tmp_path) < 2:
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(RunInterrupted, match="same command") as caught:
        run_workers(how, how, how)
    sender.join()
    assert caught.value.code == code
    assert count_started(tmp_path) == 2
    after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert after == before


@pytest.mark.parametrize("started", [False, True])
def test_a_signal_while_a_reader_starts_stops_the_workers(
    run_workers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise RunInterrupted("stopped", signal.SIGTERM)

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(RunInterrupted, match="same command"):
        run_workers("sleep", "sleep")


def test_run_requests_works_in_a_thread(run_workers: Callable[..., list[str]]) -> None:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(run_workers("0")))
    thread.start()
    thread.join()
    assert found == [["row0: it 0"]]


def test_a_demo_is_not_written_into_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"run.*saved model"):
        demo.run_demo(tmp_path, demo.ROWS[:1])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["results.json"]
