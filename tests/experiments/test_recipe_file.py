"""Recipes of Python files: loading, checks, errors in the file, and worker processes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overt.errors import UserError
from overt.experiments import runner, settings, table_runner, workers
from overt.experiments.evaluate import Evaluator
from overt.experiments.preflight import check_dataset
from overt.experiments.recipe import RunContext
from overt.experiments.recipe_file import (
    code_version,
    file_errors,
    find_recipe_of_run,
    is_recipe_file,
    load_recipe_file,
)
from overt.experiments.table import RowSpec, TableSpec
from overt.papers import catalog
from tests.toys import toy

RECIPE = """
from dataclasses import dataclass
from overt.experiments.recipe import CustomRecipe, TrainConfig
from overt.experiments.table import RowSpec, TableSpec

@dataclass(frozen=True)
class Data:
    limit: int | None = None
    noise: float = 0.5

def make_experiment(recipe, context):
    raise ValueError(f"noise is {recipe.data.noise}")

def experiment():
    "Learn nothing."
    return CustomRecipe("mine", "nothing", make_experiment, data=Data())

def other():
    return CustomRecipe("other", "nothing", make_experiment)

table = TableSpec("two", "two rows", (RowSpec("a", experiment), RowSpec("b", other)), ("accuracy",))
"""
UNTYPED = """
class Untyped:
    name, about, paper, build = "untyped", "", {}, print
    data = model = Data()
    train = 3
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Return a function that writes a module; imported modules are forgotten afterwards."""
    modules, paths = set(sys.modules), list(sys.path)

    def write_file(text: str = RECIPE, name: str = "overt_test_mine.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    yield write_file
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if name.startswith("overt_test_"):
            del sys.modules[name]


def test_only_words_with_a_python_file_are_files() -> None:
    for word in ("mine.py:experiment", "a/b/mine.py:x", "/a/mine.py", "mine.py:", "é x.py:y"):
        assert is_recipe_file(word)
    for word in ("scenes-soft", "mine", "mine.pyc:x", "mine.py/x", "hf:a/b.py.x", ""):
        assert not is_recipe_file(word)


def test_a_recipe_is_loaded_with_its_settings_and_docstring(write: Write) -> None:
    path = write()
    file = load_recipe_file(f"{path}:experiment")
    assert file.word == f"{path}:experiment" and file.path == path
    assert file.recipe.name == "mine" and file.doc == "Learn nothing."
    assert settings.flatten(file.recipe)["data.noise"] == 0.5
    changed = settings.apply(file.recipe, ["data.noise=2"])
    assert settings.restore(file.recipe, settings.to_json(changed)) == changed
    with pytest.raises(UserError, match=r"needed: .*TableSpec"):
        _ = file.table


def test_a_table_is_loaded_with_the_recipes_of_its_rows(write: Write) -> None:
    path = write()
    file = load_recipe_file(f"{path}:table")
    assert [row.label for row in file.table.rows] == ["a", "b"]
    assert sorted(file.recipes()) == ["mine", "other"]
    with pytest.raises(UserError, match=r"with `overt table"):
        _ = file.recipe


def test_a_table_may_have_rows_of_the_catalog(write: Write) -> None:
    text = RECIPE + "\nfrom overt.papers.catalog import find_recipe\n"
    text += "mixed = TableSpec('m', 'm', (RowSpec('a', experiment), RowSpec('soft', lambda: "
    text += "find_recipe('scenes-soft'))), ())\n"
    file = load_recipe_file(f"{write(text)}:mixed", catalog.recipes())
    assert sorted(file.recipes()) == ["mine", "scenes-soft"]


def test_the_file_can_import_its_neighbours_but_does_not_hide_packages(write: Write) -> None:
    write("VALUE = 3\n", "overt_test_near.py")
    write("raise SystemExit('hidden')\n", "json.py")
    path = write("from overt_test_near import VALUE\nimport json\n" + RECIPE)
    assert load_recipe_file(f"{path}:experiment").recipe.name == "mine"
    assert sys.path[-1] == str(path.parent) and sys.path.count(str(path.parent)) == 1


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (
            RECIPE,
            "nothing",
            r"'nothing'.*, table",
        ),
        (RECIPE, "make_experiment", "experiment must"),
        (RECIPE, "Data", "Data .*, build"),
        ("a = 3", "a", "int .*name"),
        ("", "a", "defines nothing"),
        ("def a():\n    return 1 / 0", "a", "line 2: Zero.*OVERT"),
        ("import missing_package_x", "a", "line 1: Module"),
        ("def a(:", "a", "line 1: SyntaxError"),
        ("raise SystemExit(0)", "a", "1: SystemExit: 0"),
        ("import sys\ndef a():\n    sys.exit()", "a", "line 3: SystemExit"),
        (RECIPE.replace('"mine"', '"a/b"'), "experiment", r"got 'a/b'"),
        (RECIPE.replace('"mine"', '"scenes-soft"'), "experiment", "'scenes-soft'"),
        (RECIPE.replace('"mine"', '"other"'), "table", "the name 'other'"),
        (
            RECIPE.replace("data=Data()", "data=3"),
            "experiment",
            "`data` .*got int",
        ),
        (RECIPE + UNTYPED, "Untyped", "TrainConfig.*int"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(
    write: Write, text: str, name: str, message: str
) -> None:
    path = write(text)
    with pytest.raises(UserError, match=message) as failed:
        load_recipe_file(f"{path}:{name}", catalog.recipes())
    assert "\n" not in str(failed.value) and str(path) in str(failed.value)


def test_files_that_cannot_be_imported_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"FILE\.py:NAME"):
        load_recipe_file(f"{tmp_path}/none.py:a")
    with pytest.raises(UserError, match=r"x\.py:experiment"):
        load_recipe_file(str(write(name="x.py")))
    with pytest.raises(UserError, match=r"json .*: rename"):
        load_recipe_file(f"{write(name='json.py')}:experiment")
    with pytest.raises(UserError, match=r"my_experiment\.py"):
        load_recipe_file(f"{write(name='my-file.py')}:experiment")
    first = write()
    load_recipe_file(f"{first}:experiment")
    second = write(name="below/overt_test_mine.py")
    with pytest.raises(UserError, match=r"_mine .*: rename"):
        load_recipe_file(f"{second}:experiment")


def test_errors_in_the_file_name_the_line_and_others_are_unchanged(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = load_recipe_file(f"{write()}:experiment")
    recipe = file.recipe
    with (
        pytest.raises(UserError, match="line 12: .*is 0.5"),
        file_errors(file.path),
    ):
        recipe.build(RunContext(tmp_path))  # type: ignore[attr-defined]
    with pytest.raises(KeyError), file_errors(file.path):
        _ = {}["a"]
    with pytest.raises(ZeroDivisionError), file_errors(None):
        _ = 1 / 0
    monkeypatch.setenv("OVERT_TRACEBACK", "1")
    with pytest.raises(ValueError, match=r"^noise is"), file_errors(file.path):
        recipe.build(RunContext(tmp_path))  # type: ignore[attr-defined]


def test_recipes_of_runs_are_found_by_name_in_the_given_files(write: Write) -> None:
    known = {"toy": toy}
    file = load_recipe_file(f"{write()}:table")
    assert find_recipe_of_run("toy", (), known).name == "toy"
    assert find_recipe_of_run("other", (file,), known).name == "other"
    with pytest.raises(UserError, match=r"--recipe FILE"):
        find_recipe_of_run("other", (), known)
    with pytest.raises(UserError, match=r"given: mine, other"):
        find_recipe_of_run("third", (file,), known)


def test_a_worker_imports_the_file_and_reports_the_line(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = load_recipe_file(f"{write()}:table")
    rest = {"seed": 0, "device": "cpu", "resume": False, "command": ["overt"], "file": file.word}
    changed = settings.apply(file.recipes()["mine"], ["data.noise=2"])
    request = workers.RunRequest.from_recipe(changed, tmp_path / "out", None, **rest)
    monkeypatch.setattr(
        "overt.experiments.runner.run", lambda recipe, out, build, **rest: build(recipe, None)
    )
    code, reason = request.run(
        catalog.find_recipe, lambda recipe, _: recipe.make_experiment(recipe, 0)
    )
    assert code == 2 and "line 12: ValueError: noise is 2.0" in reason


def test_a_custom_recipe_with_data_of_its_own_needs_no_catalog(write: Write) -> None:
    """A field `name` of the data is a dataset of overt only if it has the name of one."""
    named = RECIPE.replace("noise: float = 0.5", "noise: float = 0.5\n    name: str = 'my data'")
    check_dataset(load_recipe_file(f"{write(named)}:experiment").recipe, None)
    text = named.replace("my data", "cifar10")
    file = load_recipe_file(f"{write(text, 'overt_test_cifar.py')}:experiment")
    with pytest.raises(UserError, match="dataset cifar10"):
        check_dataset(file.recipe, None)


def fail(*args: object) -> None:
    raise ZeroDivisionError


@pytest.mark.long
def test_runs_of_another_version_of_the_file_are_named(write: Write, tmp_path: Path) -> None:
    """A run may be continued with mended code; its results then list both versions."""
    text = (Path(__file__).parents[2] / "examples" / "dots.py").read_text()
    file, out = write(text, "overt_test_dots.py"), tmp_path / "table" / "short" / "seed-0"
    recipe = settings.apply(
        load_recipe_file(f"{file}:experiment").recipe, ["train.epochs=1", "data.limit=16"]
    )
    first = code_version(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", fail)
        with pytest.raises(ZeroDivisionError):
            runner.run(recipe, out, catalog.build, seed=0, device="cpu", show_progress=False)
    write(text + "# mended", "overt_test_dots.py")
    second = code_version(recipe)
    with pytest.warns(UserWarning, match="dots has changed"):
        done = runner.run(
            recipe, out, catalog.build, seed=0, device="cpu", resume=True, show_progress=False
        )
    assert done["code"] == [first, second] and first != second
    table = TableSpec("dots", "", (RowSpec("short", lambda: recipe),), ("accuracy",))
    finished = table_runner._FinishedRuns(table, out.parents[1], None)
    job = table_runner._Job(table.rows[0], recipe, 0)
    assert finished.find(job) is not None  # by the present version, without a warning
    write(text, "overt_test_dots.py")
    with pytest.warns(UserWarning, match="has changed"):
        assert finished.find(job) is not None
    assert code_version(catalog.recipes()["scenes-soft"]()) is None
