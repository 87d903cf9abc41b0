"""Command-line arguments: completion, lists and empty values."""

import inspect
from pathlib import Path
from typing import get_type_hints

import pytest

from overt.cli import app, data_app
from overt.cli.arguments import split_values
from overt.cli.commands import PATH_OPTIONS
from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("toy_recipes")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("overt run toy", "toy-stated"),
        ("overt run toy --set train.e", "train.epochs="),
        ("overt table toys --set train.e", "train.epochs="),
        ("overt table to", "toys"),
        ("overt data check cif", "cifar100"),
        ("overt do", "doctor"),
    ],
)
def test_shell_completion_lists_names_and_settings(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: str, wanted: str
) -> None:
    monkeypatch.setenv("_OVERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    code, out, _ = call()
    assert code == 0 and wanted in out.split()


def test_lists_are_split_at_commas_and_repeated_options() -> None:
    assert split_values(None, "--rows") == [] == split_values([], "--rows")
    assert split_values(["a, b,", "c"], "--rows") == ["a", "b", "c"]


@pytest.mark.parametrize("empty", ["", " ", ",", " , "])
def test_an_empty_list_option_is_rejected(call: Call, tmp_path: Path, empty: str) -> None:
    """As with `--rows "$UNSET"`: neither the table nor the demo starts."""
    for command in (("table", "toys"), ("demo",)):
        code, _, err = call(*command, "--out", tmp_path / "out", "--rows", empty)
        assert code == 2 and err == "overt: --rows is empty: name some rows, or leave it out.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [["report", ""], ["serve", "runs", ""]])
def test_an_empty_name_is_rejected(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*given)
    assert code == 2 and "is empty" in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    [
        ["demo", "--out", ""],
        ["run", "ltpa-scenes", "--out="],
        ["measure", "model", "data", "--maps", "", "--out", "x"],
        ["run", "ltpa-scenes", "--out", "x", "--data", ""],
        ["data", "vocabulary", "captions.txt", "--out", "x", "--images="],
    ],
)
def test_an_empty_path_is_rejected(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*given)
    assert code == 2 and "is empty: give a path" in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_path_options_are_complete() -> None:
    found = set()
    for one in (*app.registered_commands, *data_app.registered_commands):
        hints = get_type_hints(one.callback)
        named = inspect.signature(one.callback).parameters
        found |= {
            f"--{name}"
            for name, hint in hints.items()
            if name in named and hint in (Path, Path | None)
        }
    assert found == PATH_OPTIONS


def test_a_run_argument_is_a_path(call: Call, tmp_path: Path) -> None:
    code, _, err = call("report", tmp_path / "gone")
    assert code == 2 and "which is not a folder" in err
