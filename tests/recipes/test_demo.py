"""The demo: its rows, side by side in processes of their own, stopped and taken up again."""

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

from overt import files
from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.recipes import demo, folder, recipes, scenes, settings, workers
from overt.recipes.comparison import Row
from overt.recipes.workers import Order
from tests.recipes import tiny

SHORT = (*tiny.SETS, "train.save_every=1")
ROWS = (Row("mean", scenes.scenes_none, SHORT), Row("soft", scenes.scenes_soft, SHORT))


# Rows


def test_every_row_is_a_listed_recipe_with_settings_that_fit() -> None:
    labels = [row.label for row in demo.ROWS]
    assert len(set(labels)) == len(labels) and set(demo.FIRST) <= set(labels)
    for row in demo.ROWS:
        made = demo.recipe_of(row)
        assert made.name in recipes() and made == settings.apply(row.recipe(), row.changes)
        assert row.label.isprintable() and "/" not in row.label and " " not in row.label


def test_the_first_rows_ask_the_same_questions_in_the_same_time() -> None:
    first = [row for row in demo.ROWS if row.label in demo.FIRST]
    assert len(first) == 4 and {row.changes for row in first} == {demo.SHORT}


def test_learned_attention_is_a_row_and_says_what_it_is() -> None:
    (row,) = demo.pick(["learned-attention"])
    assert row.label not in demo.FIRST
    made = demo.recipe_of(row)
    assert made.name == "ltpa-scenes" and "largest thing" in made.about
    assert made.model.width < 1 and made.train.epochs <= 5


def test_hard_attention_is_a_row_and_asks_the_same_questions() -> None:
    (row,) = demo.pick(["hard-attention"])
    made, soft = demo.recipe_of(row), demo.recipe_of(demo.pick(["soft-attention"])[0])
    assert made.name == "han-scenes" and row.label not in demo.FIRST
    for key in ("train", "val", "test", "size", "world"):
        assert getattr(made.data, key) == getattr(soft.data, key)
    assert made.model.cells == 16


def test_the_self_supervised_row_searches_and_trains_twice() -> None:
    (row,) = demo.pick(["self-supervised"])
    made = demo.recipe_of(row)
    assert made.name == "ssa-scenes" and made.searched and made.taught  # type: ignore[attr-defined]
    assert row.label not in demo.FIRST


def test_the_grounded_row_supervises_directly_and_goes_on_to_other_tasks() -> None:
    (row,) = demo.pick(["grounded"])
    made = demo.recipe_of(row)
    assert made.name == "vgp-scenes" and row.label not in demo.FIRST
    assert made.supervise.way.value == "direct"  # type: ignore[attr-defined]
    assert made.after.epochs == 1  # type: ignore[attr-defined]


def test_the_captions_are_aligned_and_then_criticised() -> None:
    (row,) = demo.pick(["aligned-captions"])
    made = demo.recipe_of(row)
    assert made.name == "a2-scenes" and row.label not in demo.FIRST
    assert made.align.fuse.value == "gate" and made.critic.epochs == 1  # type: ignore[attr-defined]


def test_rows_are_picked_by_name_in_our_order() -> None:
    assert demo.pick([]) == tuple(row for row in demo.ROWS if row.label in demo.FIRST)
    assert demo.pick(["all"]) == demo.pick(["soft-attention", "all"]) == demo.ROWS
    found = demo.pick(["soft-attention", "question-only"])
    assert [row.label for row in found] == ["question-only", "soft-attention"]
    with pytest.raises(BadInput, match="no row 'soft-atention'; the nearest"):
        demo.pick(["soft-atention"])
    with pytest.raises(BadInput, match="there are question-only"):
        demo.pick(["?"])


def test_a_row_as_a_command_line() -> None:
    found = demo.command(ROWS[1], Path("d/soft"), ["--seed", "3"])
    changes = [word for one in SHORT for word in ("--set", one)]
    named = ["--out", "d/soft", "--title", "soft"]
    assert found == ["overt", "run", "scenes-soft", *named, "--seed", "3", *changes]


# A whole demo


@pytest.mark.long
def test_rows_run_are_kept_and_are_taken_up_again(tmp_path: Path) -> None:
    said: list[str] = []
    results = demo.run_demo(tmp_path, ROWS, device="cpu", say=said.append)
    assert [one["title"] for one in results] == ["mean", "soft"]
    assert [one["status"] for one in results] == ["done", "done"]
    for row in ROWS:
        files.verify(tmp_path / row.label)
        assert any(line.startswith(f"{row.label}: ") for line in said)
    page = (tmp_path / "report.html").read_text()
    assert "mean" in page and "soft" in page
    # finished rows are used again: nothing is started
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        again = demo.run_demo(tmp_path, ROWS, device="cpu", say=said.append)
        assert again == results and said[-1] == f"soft: at hand in {tmp_path / 'soft'}"
        # others are refused by name before anything starts
        with pytest.raises(BadInput, match="the seed is 1, was 0"):
            demo.run_demo(tmp_path, ROWS, seed=1, device="cpu")
        (tmp_path / "mean/samples.npz").write_bytes(b"")
        with pytest.raises(Damaged, match=r"mean/samples\.npz"):
            demo.run_demo(tmp_path, ROWS, device="cpu", say=said.append)


@pytest.mark.long
def test_a_begun_row_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "soft"
    with pytest.MonkeyPatch.context() as patch:
        from overt.recipes import evaluation

        patch.setattr(evaluation.Judge, "evaluate", None)
        with pytest.raises(TypeError):
            tiny.run(demo.recipe_of(ROWS[1]), out)
    kept = {path: path.stat().st_mtime_ns for path in (out / "checkpoints").rglob("*.safetensors")}
    assert kept
    (results,) = demo.run_demo(tmp_path, ROWS[1:], device="cpu", say=lambda line: None)
    assert results["status"] == "done"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # not trained again


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle_it_goes_on_and_ends_the_same(tmp_path: Path, number: int) -> None:
    changes = ("data.limit=32", "model.width=0.25", "train.epochs=40", "train.batch=4")
    rows = tuple(Row(row.label, row.recipe, changes) for row in ROWS)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from overt.errors import Stopped\n"
        "from overt.recipes import demo, scenes\n"
        "from overt.recipes.comparison import Row\n"
        f"makers = {{'mean': scenes.scenes_none, 'soft': scenes.scenes_soft}}\n"
        f"rows = [Row(label, make, {changes!r}) for label, make in makers.items()]\n"
        "try:\n"
        f"    demo.run_demo(Path({str(tmp_path / 'a')!r}), rows, device='cpu')\n"
        "except Stopped as stopped:\n"
        "    print(stopped)\n"
        "    sys.exit(stopped.code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    logs = [tmp_path / "a" / row.label / "log.jsonl" for row in rows]
    while process.poll() is None and not all(log.exists() and log.stat().st_size for log in logs):
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert "the demo was stopped" in said and "--resume" not in said.splitlines()[-1]
    for row in rows:
        held = folder.look(tmp_path / "a" / row.label)
        assert held is not None and held.results["status"] in ("stopped", "done")
    for out in ("a", "b"):
        demo.run_demo(tmp_path / out, rows, device="cpu", say=lambda line: None)
    for row in rows:
        one, other = (
            (tmp_path / out / row.label / "model/model.safetensors").read_bytes() for out in "ab"
        )
        assert one == other


# How rows end, with workers that train nothing

ENDS = """#!{python} -S
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
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`commands("sleep", "2")` runs orders that end so, and gives what was said."""
    script = tmp_path / "ends"
    script.write_text(ENDS.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(workers, "sys", SimpleNamespace(executable=str(script)))
    monkeypatch.setattr(workers, "PATIENCE", 0.5)

    def run(*hows: str) -> list[str]:
        said: list[str] = []
        orders = {
            f"row{i}": Order(how, {}, str(tmp_path / f"mark{i}"), 0, "cpu", None, False, [])
            for i, how in enumerate(hows)
        }
        demo.run_orders(orders, said.append)
        return sorted(said)

    return run


def marks(folder: Path) -> int:
    return sum(not path.suffix for path in folder.glob("mark*"))


def test_what_rows_say_is_passed_on_by_name(commands: Callable[..., list[str]]) -> None:
    assert commands() == []
    assert commands("0", "0", "0") == ["row0: it 0", "row1: it 0", "row2: it 0"]


@pytest.mark.parametrize(("how", "kind"), [("2", BadInput), ("1", Failed)])
def test_an_error_is_raised_in_its_class_after_the_others_are_done(
    commands: Callable[..., list[str]], tmp_path: Path, how: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"^row1: it {how}$"):
        commands("0", how, "0", "1")
    assert marks(tmp_path) == 4


def test_a_process_that_ends_is_an_error_and_the_others_are_done(
    commands: Callable[..., list[str]], tmp_path: Path
) -> None:
    with pytest.raises(Failed, match=r"^row0: its process ended with code 7; .* in .*mark0\.log$"):
        commands("die", "die", "0", "0")
    assert marks(tmp_path) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("how", ["sleep", "stubborn"])
def test_a_signal_ends_all_and_starts_no_more(
    commands: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    how: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    def send() -> None:
        while marks(tmp_path) < 2:
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Stopped, match="the same command goes on") as caught:
        commands(how, how, how)
    sender.join()
    assert caught.value.code == code
    assert marks(tmp_path) == 2
    after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert after == before


def test_it_runs_in_a_thread_too(commands: Callable[..., list[str]]) -> None:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(commands("0")))
    thread.start()
    thread.join()
    assert found == [["row0: it 0"]]
