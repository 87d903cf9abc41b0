"""The commands: output, passed options, exit codes and imports."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from overt import cli, io
from overt.cli.arguments import split_values
from overt.errors import RunError, UserError
from overt.experiments import run_folder, settings, table_runner
from overt.experiments.recipe import Recipe
from overt.experiments.recipe_file import is_recipe_file
from overt.papers import catalog
from overt.papers.catalog import find_recipe, recipes
from tests import toys
from tests.cli.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "scipy", "transformers", "accelerate", "matplotlib", "PIL")
REAL, TABLES = recipes(), catalog.tables()

pytestmark = pytest.mark.usefixtures("toy_recipes")


# Help and lists


def test_the_version_is_the_installed_one(call: Call) -> None:
    from importlib.metadata import version

    assert call("--version") == (0, f"overt {version('overt')}\n", "")


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["run", "--help"], ["data", "--help"]])
def test_help_is_printed(call: Call, args: list[str]) -> None:
    code, out, err = call(*args)
    assert code == 0 and "Usage: overt" in out and err == ""


@pytest.mark.parametrize("args", [["--help"], ["data", "--help"]])
def test_every_command_has_a_complete_help_line(call: Call, args: list[str]) -> None:
    _, out, _ = call(*args)
    lines = out.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 4 and not any(line.endswith("...") for line in lines)
    assert all(re.fullmatch(r"  [a-z]+ +[A-Z].*[.]", line) for line in lines)


def examples() -> list[str]:
    """Return the example command lines in the help of every command."""
    found = [one.epilog or "" for one in cli.app.registered_commands]
    return re.findall(r"^  [$] (.*)$", "\n".join(found), re.MULTILINE)


@pytest.mark.parametrize("line", examples())
def test_help_examples_are_valid_commands(line: str) -> None:
    from typer.main import get_command

    command: Any = get_command(cli.app)
    overt, name, *words = shlex.split(line)
    above = command.make_context(overt, [name, "--help"])
    given = command.commands[name].make_context(name, words, parent=above).params
    word = given.get("recipe") if name == "run" else given.get("name")
    if word is not None and ".py" in word:
        assert is_recipe_file(word)
    elif name == "run" and word is None:
        assert given["resume"]  # the recipe is that of the run
    elif name == "run":
        settings.apply(REAL[given["recipe"]](), given["sets"] or [])
    elif name == "table":
        table_runner.select_rows(TABLES[given["name"]], split_values(given["rows"], "--rows"))
    elif name == "list" and given["name"] is not None:
        assert given["name"] in {**REAL, **TABLES}


def test_every_command_has_an_example() -> None:
    assert {shlex.split(line)[1] for line in examples()} == {
        one.name or one.callback.__name__ for one in cli.app.registered_commands if one.callback
    }


def test_list_names_every_recipe_and_table(call: Call) -> None:
    code, out, _ = call("list")
    assert code == 0
    for name in ("toy", "toy-stated", "toys", "needy"):
        assert f"\n{name} " in out
    assert "\x1b" not in out


def test_list_has_short_lines_and_details_by_name(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # use the real recipes
    out = call("list")[1]
    assert max(map(len, out.splitlines())) <= 200
    code, out, _ = call("list", "ltpa-1")
    assert code == 0 and out.startswith("Table ltpa-1: ") and "\ncifar10-att2-mean " in out
    _, out, _ = call("list", "ltpa-scenes")  # a recipe and a table of the same name
    assert "train.epochs" in out and "\nTable ltpa-scenes: " in out
    found = json.loads(call("list", "ltpa-1", "--json")[1])
    assert found["recipes"] == [] and [one["name"] for one in found["tables"]] == ["ltpa-1"]


def test_list_of_an_unknown_name_fails(call: Call) -> None:
    code, out, err = call("list", "nothing-at-all")
    assert code == 2 and out == "" and "unknown recipe or table 'nothing-at-all'" in err


def test_list_json_has_all_fields(call: Call) -> None:
    code, out, _ = call("list", "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["name"] for one in found["recipes"]] == list(toys.RECIPES)
    mine = found["recipes"][1]
    assert mine["settings"] == settings.to_json(toys.toy_stated())
    assert mine["takes"]["train.epochs"] == "a whole number of at least 1"
    assert mine["paper"]["accuracy"]["value"] == 0.75
    assert json.loads(call("list", "toy-stated", "--json")[1])["recipes"] == [mine]
    assert found["tables"][0]["rows"][1] == {
        "row": "wide",
        "recipe": "toy",
        "set": ["model.width=2"],
    }


def test_list_of_one_recipe_shows_its_paper_and_settings(call: Call) -> None:
    code, out, _ = call("list", "toy-stated")
    assert code == 0
    for word in ("75 % of all toys are accurate", "0.75 share", "Table 1, row 2"):
        assert word in out
    for key in settings.flatten(toys.toy_stated()):
        assert f"\n{key} " in out


@pytest.mark.parametrize("name", list(REAL))
def test_every_recipe_has_the_common_settings_and_a_description(name: str) -> None:
    recipe = REAL[name]()
    assert recipe.name == name and recipe.about
    assert {"data.limit", "model.width", "train.epochs", "train.steps"} <= set(
        settings.flatten(recipe)
    )
    assert settings.restore(recipe, json.loads(json.dumps(settings.to_json(recipe)))) == recipe
    assert REAL[name].__doc__


def test_an_unknown_recipe_raises_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"'toy-state'.* toy-stated"):
        find_recipe("toy-state")
    with pytest.raises(UserError, match="toy, toy-stated, toy-files"):
        find_recipe("?")


# Run


def test_run_passes_its_options_to_the_runner(
    call: Call, runner_calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    args = ["run", "toy", "--out", tmp_path / "a", "--seed", "7", "--device", "cpu"]
    args += ["--data", tmp_path, "--set", "data.limit=5", "--set", "train.rate=0.5"]
    args += ["--title", "narrow"]
    code, out, err = call(*args)
    assert (code, err) == (0, "")
    (given,) = runner_calls
    assert given["recipe"] == settings.apply(toys.toy(), ["data.limit=5", "train.rate=0.5"])
    assert given["command"] == ["overt", *map(str, args)]
    del given["recipe"], given["command"]
    assert given == {
        "out": tmp_path / "a",
        "seed": 7,
        "device": "cpu",
        "data_root": tmp_path,
        "resume": False,
        "title": "narrow",
    }
    assert "accuracy" in out and "0.32 [0.2, 0.6]" in out and str(tmp_path / "a") in out


def test_a_finished_run_is_shown_without_running(
    call: Call, runner_calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    call("run", "toy", "--out", tmp_path / "a")
    code, out, _ = call("run", "toy", "--out", tmp_path / "a", "--resume")
    assert code == 0 and "accuracy" in out and "nothing was run" in out
    assert len(runner_calls) == 1


def test_invalid_settings_fail_before_files_are_written(
    call: Call, runner_calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    code, _, _ = call("run", "toy", "--out", tmp_path / "a", "--set", "train.rate=x")
    assert (code, runner_calls, list(tmp_path.iterdir())) == (2, [], [])


# Tables


def test_table_prints_mean_and_deviation_and_reuses_rows(
    call: Call, runner_calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    args = ["table", "toys", "--out", tmp_path, "--rows", "stated", "--seeds", "2"]
    args += ["--set", "data.limit=8"]
    code, out, err = call(*args)
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("stated"))
    assert line.split() == "stated 0.255 ± 0.007 0.750 19.50 ± 0.71 2 2 run".split()
    assert [one["seed"] for one in runner_calls] == [0, 1]
    code, out, err = call(*args)
    assert code == 0 and "2 reused" in out and len(runner_calls) == 2
    assert err.count("reused from") == 2


def test_table_runs_seeds_from_the_first_one(
    call: Call, runner_calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    args = ["table", "toys", "--out", tmp_path, "--rows", "plain", "--seeds", "3"]
    code, _, err = call(*args, "--first-seed", "20")
    assert code == 0 and "plain, seed 20: done" in err
    assert [one["seed"] for one in runner_calls] == [20, 21, 22]


def test_a_failed_row_exits_with_1_and_prints_the_table(
    call: Call, runner_calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.experiments import runner

    working = runner.run

    def run(recipe: Recipe, out: Path, build: Any, **options: Any) -> dict[str, Any]:
        if options["seed"] == 1:
            raise RunError("the loss is not finite.")
        return working(recipe, out, **options)

    monkeypatch.setattr(runner, "run", run)
    args = ["table", "toys", "--out", tmp_path, "--rows", "plain, wide", "--seeds", "2"]
    code, out, err = call(*args)
    assert code == 1 and "1 run, 1 failed" in out
    last = err.splitlines()[-1]
    assert last.startswith("overt: 2 of 4 runs failed") and "the loss is not finite" in last


def test_a_table_in_several_processes_fails(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call("table", "toys", "--out", tmp_path)
    assert code == 2 and "runs in one process" in err


# The demo


def test_demo_prints_its_rows_and_the_report_path(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner_calls: dict[str, Any] = {}

    def run_demo(out: Path, rows: Any, **options: Any) -> list[dict[str, Any]]:
        runner_calls.update(options, out=out, rows=rows)
        pointing = {"value": 0.75, "unit": "share", "split": "test", "n": 9}
        first, second = toys.results_of(toys.toy()), toys.results_of(toys.toy(), 1)
        return [
            {**first, "title": "no attention"},
            {**second, "title": "soft", "ours": {**second["ours"], "pointing": pointing}},
        ]

    compared: list[list[str]] = []
    fake = SimpleNamespace(
        select_rows=lambda labels: tuple(labels or ("a", "b")),
        run_demo=run_demo,
        comparison_table=lambda out, rows: compared,
    )
    monkeypatch.setitem(sys.modules, "overt.papers.demo", fake)
    monkeypatch.setattr("overt.papers.demo", fake, raising=False)
    code, out, err = call("demo", "--out", tmp_path / "d", "--rows", "a,b", "--seed", "3")
    assert code == 0, err
    assert (runner_calls["out"], runner_calls["rows"], runner_calls["seed"]) == (
        tmp_path / "d",
        ("a", "b"),
        3,
    )
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "accuracy" in lines["row"].lower() and "pointing" in lines["row"].lower()
    assert "0.750" in lines["soft"] and "0.250" in lines["no attention"]
    assert str(tmp_path / "d" / "report.html") in out
    # with a method and its control, a line per paper instead
    compared += [["paper", "metric", "difference"], ["HAN", "accuracy ↑", "+0.033"]]
    code, out, err = call("demo", "--out", tmp_path / "d")
    assert code == 0, err
    assert "HAN    accuracy ↑  +0.033" in out and "one seed is an illustration" in out


def test_demo_rejects_unknown_rows(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("overt.papers.demo")
    code, _, err = call("demo", "--out", tmp_path / "d", "--rows", "nothing")
    assert code == 2 and "nothing" in err and not (tmp_path / "d").exists()


# Report, doctor, data


def test_report_writes_one_page_of_runs_and_folders_of_runs(call: Call, tmp_path: Path) -> None:
    for seed in (0, 1):
        toys.write_run_folder(tmp_path / "t/soft" / f"seed-{seed}", toys.toy(), seed)
    code, out, err = call("report", tmp_path / "t", "--out", tmp_path / "page.html")
    assert (code, out) == (0, f"{tmp_path / 'page.html'}\n"), err
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def write_two_runs(root: Path, second: str = "scenes") -> list[Path]:
    """Write two runs with 30 samples each; the second has a higher accuracy."""
    places = []
    for number, data in enumerate(("scenes", second)):
        place = root / f"run-{number}"
        toys.write_run_folder(place, toys.toy(), number)
        results = io.read_json(place / run_folder.RESULTS)
        results |= {"data": [{"name": data, "split": "test", "n": 30, "hash": "0"}]}
        results["title"] = f"run {number}"
        io.write_json(place / run_folder.RESULTS, results)
        right = np.arange(30) % 3 <= number
        samples = {
            "id": np.array([f"q{i}" for i in range(30)]),
            "prediction": np.where(right, "a", "b"),
            "truth": np.full(30, "a"),
            "accuracy": right.astype(np.float32),
        }
        io.write_arrays(place / "samples.npz", samples)
        places.append(place)
    return places


def test_report_compares_two_runs_on_the_same_samples(call: Call, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, _, err = call("report", *write_two_runs(tmp_path), "--out", page, "--samples", "8")
    assert code == 0, err
    text = " ".join(page.read_text().split())
    assert (
        "Is run 1 better than run 0?" in text and "Both runs have the same 30 test samples." in text
    )
    assert "Only run 0 is correct on 0, only run 1 on 10." in text
    assert '<span class="value">+0.333</span>' in text


def test_report_rejects_runs_on_different_data(call: Call, tmp_path: Path) -> None:
    runs = write_two_runs(tmp_path, "cifar10")
    code, out, err = call("report", *runs, "--out", tmp_path / "page.html")
    assert code == 2 and out == "" and not (tmp_path / "page.html").exists()
    assert "share no samples" in err
    code, _, err = call("report", runs[0], "--out", tmp_path / "page.html", "--samples", "0")
    assert code == 2 and "--samples" in err


def test_report_does_not_change_a_finished_run(call: Call, tmp_path: Path) -> None:
    toys.write_run_folder(tmp_path, toys.toy())
    code, _, err = call("report", tmp_path, "--out", tmp_path / "report.html")
    assert code == 2 and "is a finished run" in err
    assert io.is_intact(tmp_path)


def test_doctor_distinguishes_intact_and_corrupt_runs(call: Call, tmp_path: Path) -> None:
    toys.write_run_folder(tmp_path, toys.toy())
    code, out, err = call("doctor", tmp_path)
    assert code == 0 and "a finished run of" in out, err
    (tmp_path / run_folder.RESULTS).write_text("{}")
    code, out, err = call("doctor", tmp_path)
    assert code == 2 and "results.json" in err and "lock" in out


def test_doctor_checks_the_machine(call: Call, tmp_path: Path) -> None:
    code, out, err = call("doctor", "--data", tmp_path)
    assert code == 0, err
    order = (
        "overt",
        "python",
        "torch",
        "cpu",
        "einops",
        "cache folder",
        "browser",
        "data scenes",
    )
    places = [out.index(f"\n{word} ") for word in (*order, "data not found")]
    assert places == sorted(places)
    assert "cifar10" in out and "\ndata cifar10" not in out  # absent datasets share a line


def test_loading_is_announced_before_heavy_imports(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner_calls: list[dict[str, Any]]
) -> None:
    assert call("run", "toy", "--out", tmp_path / "a")[2] == ""  # here stderr is no terminal
    announced: list[str] = []
    monkeypatch.setattr("overt.cli.commands.announce", announced.append)
    assert call("run", "toy", "--out", tmp_path / "b")[0] == 0
    call("doctor", tmp_path / "b")
    assert [line.split()[0] for line in announced] == ["running", "checking"]
    assert all(str(tmp_path / "b") in line for line in announced)


# In a subprocess

TOYS_PROGRAM = (
    "from tests import toys\n"
    "from overt.papers import catalog\n"
    "catalog.recipes = lambda: toys.RECIPES\n"
    "catalog.tables = lambda: {'toys': toys.TABLE}\n"
)


def run_python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, **options}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, text=True, check=False, timeout=600, cwd=ROOT, **options)


def test_quick_commands_import_no_heavy_packages() -> None:
    run = ["run", "toy", "--out", "/tmp/never-made"]
    lines = {
        0: [["--help"], ["--version"], ["list"], ["list", "toy", "--json"], ["data", "list"]],
        2: [
            [*run, "--set", "train.epochs=0"],
            [*run, "--device", "gpu"],
            [*run, "--data", "/dev/null"],
            [*run, "--resume"],
            ["run", "toy", "--out", "/dev/null/never"],
            ["run", "toy-files", "--out", "/tmp/never-made"],
            ["table", "nothing", "--out", "/tmp/never-made"],
            ["table", "toys", "--out", "/tmp/never-made", "--set", "x=1"],
        ],
    }
    program = (
        "import sys\n"
        "from overt.cli import main\n"
        "assert main(['list', '--json']) == 0\n"  # with the real recipes
        f"{TOYS_PROGRAM}"
        f"for code, lines in {lines!r}.items():\n"
        "    for line in lines:\n"
        "        assert main(line) == code, line\n"
        f"        heavy = set({HEAVY!r}) & set(sys.modules)\n"
        "        assert not heavy, (line, heavy)\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("overt: ") == len(lines[2])
    assert not Path("/tmp/never-made").exists()


def test_a_closed_pipe_exits_with_141() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_python(LIST_PROGRAM, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


LIST_PROGRAM = "import sys; from overt.cli import main; sys.exit(main(['list']))"


def test_a_full_disk_on_stdout_is_reported() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = run_python(LIST_PROGRAM, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


def test_an_ascii_encoding_is_supported() -> None:
    program = (
        f"{TOYS_PROGRAM}import sys; from overt.cli import main; sys.exit(main(['list', 'toy']))"
    )
    done = run_python(program, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr


def test_python_m_overt_runs_the_command_line() -> None:
    command = [sys.executable, "-m", "overt", "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and done.stderr.startswith("overt: Missing option '--out'")


def test_a_recipe_is_needed_except_to_resume(call: Call, tmp_path: Path) -> None:
    for more in ([], ["--resume"]):
        code, _, err = call("run", "--out", tmp_path / "new", *more)
        assert code == 2 and err.startswith("overt: Missing argument 'RECIPE'") and "FILE.py" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("named", [["toy"], []], ids=["recipe", "no recipe"])
def test_resume_takes_the_settings_and_the_seed_of_the_run(
    call: Call, tmp_path: Path, runner_calls: list[dict[str, Any]], named: list[str]
) -> None:
    changed = settings.apply(find_recipe("toy"), ["model.width=2", "train.batch=8"])
    toys.write_run_folder(tmp_path / "a", changed, 5, "stopped")
    code, _, err = call("run", *named, "--out", tmp_path / "a", "--resume")
    assert (code, err) == (0, "")
    assert runner_calls[0]["recipe"] == changed and runner_calls[0]["seed"] == 5


def test_resume_accepts_the_settings_of_the_run_and_refuses_others(
    call: Call, tmp_path: Path, runner_calls: list[dict[str, Any]]
) -> None:
    changed = settings.apply(find_recipe("toy"), ["model.width=2"])
    toys.write_run_folder(tmp_path / "a", changed, 5, "stopped")
    resume = ["run", "toy", "--out", tmp_path / "a", "--resume"]
    code, _, err = call(*resume, "--set", "model.width=3")
    assert code == 2 and "model.width is 3.0, was 2.0" in err
    code, _, err = call(*resume, "--seed", "0")
    assert code == 2 and "the seed is 0, was 5" in err
    assert runner_calls == []
    assert call(*resume, "--set", "model.width=2", "--seed", "5")[0] == 0
    assert runner_calls[0]["recipe"] == changed


def test_the_code_of_a_run_is_never_read_from_its_folder(call: Call, tmp_path: Path) -> None:
    toys.write_run_folder(tmp_path / "a", toys.Toy("mine.py:experiment"), status="stopped")
    code, _, err = call("run", "--out", tmp_path / "a", "--resume")
    assert code == 2 and "FILE.py:NAME" in err and "never read from the folder" in err


@pytest.mark.parametrize("suffix", [".txt", ".pdf", ".PNG"])
def test_report_rejects_other_formats(call: Call, tmp_path: Path, suffix: str) -> None:
    code, _, err = call("report", *write_two_runs(tmp_path), "--out", tmp_path / f"page{suffix}")
    assert code == 2 and f"Unsupported format {suffix!r}" in err and "use .html" in err
    assert not (tmp_path / f"page{suffix}").exists()


def test_run_without_its_device_creates_no_folder(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", "toy", "--out", tmp_path / "a", "--device", "cuda:99")
    assert code == 2 and "device 'cuda:99' is not available" in err
    assert not (tmp_path / "a").exists()


def test_report_does_not_create_parent_folders(call: Call, tmp_path: Path) -> None:
    runs = write_two_runs(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for out in ("no/x.html", "no/deep/x.html", "no/deep"):
        code, _, err = call("report", *runs, "--out", tmp_path / out)
        assert code == 2 and "does not exist" in err, err
    assert sorted(tmp_path.rglob("*")) == before
    code, _, err = call("report", *runs, "--out", tmp_path / "page")
    assert code == 0 and (tmp_path / "page" / "report.html").is_file(), err


def test_a_table_inside_a_run_is_rejected(call: Call, tmp_path: Path) -> None:
    run = write_two_runs(tmp_path)[0]
    before = sorted(tmp_path.rglob("*"))
    code, _, err = call("table", "toys", "--out", run)
    assert code == 2 and "is a run" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_closed_standard_streams_are_reopened() -> None:
    code = "import os; from overt.cli.commands import _open_streams; _open_streams(); "
    code += "os.write(1, str([os.fstat(n).st_rdev == os.stat('/dev/null').st_rdev"
    code += " for n in (0, 2)]).encode())"
    command = f"{shlex.join([sys.executable, '-c', code])} <&- 2>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True]"
