"""The commands: what they print, what they pass on, and what they import."""

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

from overt import cli, files
from overt.cli.arguments import split_values
from overt.errors import BadInput, Failed
from overt.recipes import find, folder, recipes, settings, tables
from overt.recipes.recipe import Recipe
from tests import toys
from tests.cli.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "scipy", "transformers", "accelerate", "matplotlib", "PIL")
REAL, TABLES = recipes(), tables.tables()

pytestmark = pytest.mark.usefixtures("toy_recipes")


# What there is


def test_the_version_is_the_installed_one(call: Call) -> None:
    from importlib.metadata import version

    assert call("--version") == (0, f"overt {version('overt')}\n", "")


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["run", "--help"], ["data", "--help"]])
def test_help_is_help(call: Call, args: list[str]) -> None:
    code, out, err = call(*args)
    assert code == 0 and "Usage: overt" in out and err == ""


@pytest.mark.parametrize("args", [["--help"], ["data", "--help"]])
def test_every_command_is_told_in_a_line_that_is_not_cut_off(call: Call, args: list[str]) -> None:
    _, out, _ = call(*args)
    lines = out.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 4 and not any(line.endswith("...") for line in lines)
    assert all(re.fullmatch(r"  [a-z]+ +[A-Z].*[.]", line) for line in lines)


def examples() -> list[str]:
    """The command lines that stand below the options of every command."""
    found = [one.epilog or "" for one in cli.app.registered_commands]
    return re.findall(r"^  [$] (.*)$", "\n".join(found), re.MULTILINE)


@pytest.mark.parametrize("line", examples())
def test_an_example_can_be_copied(line: str) -> None:
    from typer.main import get_command

    command: Any = get_command(cli.app)
    overt, name, *words = shlex.split(line)
    above = command.make_context(overt, [name, "--help"])
    given = command.commands[name].make_context(name, words, parent=above).params
    if name == "run":
        settings.apply(REAL[given["recipe"]](), given["sets"] or [])
    elif name == "table":
        tables.pick(TABLES[given["name"]], split_values(given["rows"], "--rows"))
    elif name == "list" and given["name"] is not None:
        assert given["name"] in {**REAL, **TABLES}


def test_every_command_that_takes_something_has_an_example() -> None:
    assert {shlex.split(line)[1] for line in examples()} == {
        one.name or one.callback.__name__ for one in cli.app.registered_commands if one.callback
    }


def test_list_names_every_recipe_and_table(call: Call) -> None:
    code, out, _ = call("list")
    assert code == 0
    for name in ("toy", "toy-stated", "toys", "needy"):
        assert f"\n{name} " in out
    assert "\x1b" not in out


def test_the_list_fits_a_screen_and_a_name_tells_the_rest(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real ones
    out = call("list")[1]
    assert max(map(len, out.splitlines())) <= 200
    code, out, _ = call("list", "ltpa-1")
    assert code == 0 and out.startswith("Table ltpa-1: ") and "\ncifar10-att2-mean " in out
    _, out, _ = call("list", "ltpa-scenes")  # a recipe and a table
    assert "train.epochs" in out and "\nTable ltpa-scenes: " in out
    found = json.loads(call("list", "ltpa-1", "--json")[1])
    assert found["recipes"] == [] and [one["name"] for one in found["tables"]] == ["ltpa-1"]


def test_a_name_of_nothing_is_refused_in_the_list(call: Call) -> None:
    code, out, err = call("list", "nothing-at-all")
    assert code == 2 and out == "" and "there is no recipe or table 'nothing-at-all'" in err


def test_list_json_is_for_programs(call: Call) -> None:
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
def test_every_recipe_has_the_common_keys_and_states_what_it_is(name: str) -> None:
    recipe = REAL[name]()
    assert recipe.name == name and recipe.about
    assert {"data.limit", "model.width", "train.epochs", "train.steps"} <= set(
        settings.flatten(recipe)
    )
    assert settings.restore(recipe, json.loads(json.dumps(settings.to_json(recipe)))) == recipe
    assert REAL[name].__doc__


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"no recipe 'toy-state'; the nearest are toy-stated, toy"):
        find("toy-state")
    with pytest.raises(BadInput, match="there are toy, toy-stated, toy-files"):
        find("?")


# Run


def test_run_passes_on_what_it_is_given(
    call: Call, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    args = ["run", "toy", "--out", tmp_path / "a", "--seed", "7", "--device", "cpu"]
    args += ["--data", tmp_path, "--set", "data.limit=5", "--set", "train.rate=0.5"]
    args += ["--title", "narrow"]
    code, out, err = call(*args)
    assert (code, err) == (0, "")
    (given,) = asked
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


def test_a_finished_run_is_shown_again_and_not_run(
    call: Call, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    call("run", "toy", "--out", tmp_path / "a")
    code, out, _ = call("run", "toy", "--out", tmp_path / "a", "--resume")
    assert code == 0 and "accuracy" in out and "nothing was run" in out
    assert len(asked) == 1


def test_nothing_is_made_before_all_is_checked(
    call: Call, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    code, _, _ = call("run", "toy", "--out", tmp_path / "a", "--set", "train.rate=x")
    assert (code, asked, list(tmp_path.iterdir())) == (2, [], [])


# Tables


def test_table_prints_mean_and_deviation_and_reuses_rows(
    call: Call, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    args = ["table", "toys", "--out", tmp_path, "--rows", "stated", "--seeds", "2"]
    args += ["--set", "data.limit=8"]
    code, out, err = call(*args)
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("stated"))
    assert line.split() == "stated 0.255 ± 0.007 0.750 19.50 ± 0.71 2 2 run".split()
    assert [one["seed"] for one in asked] == [0, 1]
    code, out, err = call(*args)
    assert code == 0 and "2 reused" in out and len(asked) == 2
    assert err.count("reused from") == 2


def test_a_failed_row_is_exit_1_and_the_table_is_printed(
    call: Call, asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.recipes import running

    working = running.run

    def run(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
        if options["seed"] == 1:
            raise Failed("the loss is not finite.")
        return working(recipe, out, **options)

    monkeypatch.setattr(running, "run", run)
    args = ["table", "toys", "--out", tmp_path, "--rows", "plain, wide", "--seeds", "2"]
    code, out, err = call(*args)
    assert code == 1 and "1 run, 1 failed" in out
    last = err.splitlines()[-1]
    assert last.startswith("overt: 2 of 4 runs failed") and "the loss is not finite" in last


def test_tables_run_in_one_process(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call("table", "toys", "--out", tmp_path)
    assert code == 2 and "runs in one process" in err


# The demo


def test_demo_prints_its_rows_and_where_to_look(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def run_demo(out: Path, rows: Any, **options: Any) -> list[dict[str, Any]]:
        asked.update(options, out=out, rows=rows)
        pointing = {"value": 0.75, "unit": "share", "split": "test", "n": 9}
        first, second = toys.results_of(toys.toy()), toys.results_of(toys.toy(), 1)
        return [
            {**first, "title": "no attention"},
            {**second, "title": "soft", "ours": {**second["ours"], "pointing": pointing}},
        ]

    fake = SimpleNamespace(pick=lambda labels: tuple(labels or ("a", "b")), run_demo=run_demo)
    monkeypatch.setitem(sys.modules, "overt.recipes.demo", fake)
    monkeypatch.setattr("overt.recipes.demo", fake, raising=False)
    code, out, err = call("demo", "--out", tmp_path / "d", "--rows", "a,b", "--seed", "3")
    assert code == 0, err
    assert (asked["out"], asked["rows"], asked["seed"]) == (tmp_path / "d", ("a", "b"), 3)
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "accuracy" in lines["row"].lower() and "pointing" in lines["row"].lower()
    assert "0.750" in lines["soft"] and "0.250" in lines["no attention"]
    assert str(tmp_path / "d" / "report.html") in out


def test_demo_knows_its_rows(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("overt.recipes.demo")
    code, _, err = call("demo", "--out", tmp_path / "d", "--rows", "nothing")
    assert code == 2 and "nothing" in err and not (tmp_path / "d").exists()


# Report, doctor, data


def test_report_writes_one_page_about_runs_and_folders_of_runs(call: Call, tmp_path: Path) -> None:
    for seed in (0, 1):
        toys.leave(tmp_path / "t/soft" / f"seed-{seed}", toys.toy(), seed)
    code, out, err = call("report", tmp_path / "t", "--out", tmp_path / "page.html")
    assert (code, out) == (0, f"{tmp_path / 'page.html'}\n"), err
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def two_tested(root: Path, second: str = "scenes") -> list[Path]:
    """Two runs with numbers of 30 samples each; the second was right more often."""
    places = []
    for number, data in enumerate(("scenes", second)):
        place = root / f"run-{number}"
        toys.leave(place, toys.toy(), number)
        results = files.read_json(place / folder.RESULTS)
        results |= {"data": [{"name": data, "split": "test", "n": 30, "hash": "0"}]}
        results["title"] = f"run {number}"
        files.write_json(place / folder.RESULTS, results)
        right = np.arange(30) % 3 <= number
        samples = {
            "id": np.array([f"q{i}" for i in range(30)]),
            "prediction": np.where(right, "a", "b"),
            "truth": np.full(30, "a"),
            "accuracy": right.astype(np.float32),
        }
        files.write_arrays(place / "samples.npz", samples)
        places.append(place)
    return places


def test_report_compares_two_runs_on_the_same_samples(call: Call, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    code, _, err = call("report", *two_tested(tmp_path), "--out", page, "--samples", "8")
    assert code == 0, err
    text = " ".join(page.read_text().split())
    assert "Is run 1 better than run 0?" in text and "All 30 test samples are the same." in text
    assert "Only run 0 is right on 0 of them, only run 1 on 10." in text
    assert '<span class="value">+0.333</span>' in text


def test_report_refuses_runs_on_other_data(call: Call, tmp_path: Path) -> None:
    runs = two_tested(tmp_path, "cifar10")
    code, out, err = call("report", *runs, "--out", tmp_path / "page.html")
    assert code == 2 and out == "" and not (tmp_path / "page.html").exists()
    assert "run 0 was tested on scenes and run 1 on cifar10: they share no sample" in err
    code, _, err = call("report", runs[0], "--out", tmp_path / "page.html", "--samples", "0")
    assert code == 2 and "--samples" in err


def test_report_does_not_change_a_finished_run(call: Call, tmp_path: Path) -> None:
    toys.leave(tmp_path, toys.toy())
    code, _, err = call("report", tmp_path, "--out", tmp_path / "report.html")
    assert code == 2 and "would change a finished run" in err
    assert files.is_whole(tmp_path)


def test_doctor_tells_a_whole_run_from_a_broken_one(call: Call, tmp_path: Path) -> None:
    toys.leave(tmp_path, toys.toy())
    code, out, err = call("doctor", tmp_path)
    assert code == 0 and "a finished run of" in out, err
    (tmp_path / folder.RESULTS).write_text("{}")
    code, out, err = call("doctor", tmp_path)
    assert code == 2 and "results.json" in err and "lock" in out


def test_doctor_looks_at_the_machine(call: Call, tmp_path: Path) -> None:
    code, out, err = call("doctor", "--data", tmp_path)
    assert code == 0, err
    for word in ("python", "torch", "accelerate", "cpu", "data cifar10", "cache folder", "browser"):
        assert f"\n{word} " in out


# In a process of its own

TOYS = (
    "from tests import toys\n"
    "import overt.recipes\n"
    "from overt.recipes import tables\n"
    "overt.recipes.recipes = lambda: toys.RECIPES\n"
    "tables.tables = lambda: {'toys': toys.TABLE}\n"
)


def python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, **options}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, text=True, check=False, timeout=120, cwd=ROOT, **options)


def test_quick_answers_import_nothing_heavy() -> None:
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
        "assert main(['list', '--json']) == 0\n"  # the real recipes
        f"{TOYS}"
        f"for code, lines in {lines!r}.items():\n"
        "    for line in lines:\n"
        "        assert main(line) == code, line\n"
        f"        heavy = set({HEAVY!r}) & set(sys.modules)\n"
        "        assert not heavy, (line, heavy)\n"
    )
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("overt: ") == len(lines[2])
    assert not Path("/tmp/never-made").exists()


def test_nobody_reads_on_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = python(LIST, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


LIST = "import sys; from overt.cli import main; sys.exit(main(['list']))"


def test_a_full_disk_behind_stdout_is_said() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = python(LIST, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


def test_a_narrow_encoding_is_no_error() -> None:
    program = f"{TOYS}import sys; from overt.cli import main; sys.exit(main(['list', 'toy']))"
    done = python(program, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr


def test_python_m_overt_is_overt() -> None:
    command = [sys.executable, "-m", "overt", "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("overt: Missing argument")
