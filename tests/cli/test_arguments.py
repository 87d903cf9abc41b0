"""What commands take: words that name something, and what the shell completes."""

import inspect
from pathlib import Path
from typing import get_type_hints

import pytest

from overt.cli import app, data_app
from overt.cli.arguments import split_values
from overt.cli.commands import PATHS
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
def test_the_shell_completes(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: str, wanted: str
) -> None:
    monkeypatch.setenv("_OVERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    code, out, _ = call()
    assert code == 0 and wanted in out.split()


def test_words_are_split_at_commas_and_repetitions() -> None:
    assert split_values(None, "--rows") == [] == split_values([], "--rows")
    assert split_values(["a, b,", "c"], "--rows") == ["a", "b", "c"]


@pytest.mark.parametrize("empty", ["", " ", ",", " , "])
def test_an_option_that_names_nothing_is_not_everything(
    call: Call, tmp_path: Path, empty: str
) -> None:
    """As of `--rows "$UNSET"`: neither the table nor the demo begins."""
    for command in (("table", "toys"), ("demo",)):
        code, _, err = call(*command, "--out", tmp_path / "out", "--rows", empty)
        assert (
            code == 2 and err == "overt: --rows names nothing; leave it out for the usual rows.\n"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [["report", ""], ["serve", "runs", ""]])
def test_an_empty_name_is_not_the_folder_one_is_in(
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
def test_an_empty_path_is_not_the_folder_one_is_in(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*given)
    assert code == 2 and "is empty; give it a path" in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_option_that_names_a_path_is_known() -> None:
    found = set()
    for one in (*app.registered_commands, *data_app.registered_commands):
        hints = get_type_hints(one.callback)
        named = inspect.signature(one.callback).parameters
        found |= {
            f"--{name}"
            for name, hint in hints.items()
            if name in named and hint in (Path, Path | None)
        }
    assert found == PATHS


def test_a_run_is_still_a_path(call: Call, tmp_path: Path) -> None:
    code, _, err = call("report", tmp_path / "gone")
    assert code == 2 and "is not a folder; name the folder of a run" in err
