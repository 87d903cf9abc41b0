"""Where a command line begins: quick answers are those of the commands, or are left to them."""

import contextlib
import io
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from overt import __main__ as start
from overt import cli, files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the page of the list is kept in a test."""
    found = tmp_path / "list.txt"
    monkeypatch.setattr(start, "_place", lambda: str(found))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return found


def begun(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["overt", *words])
    return start.main()


def refused() -> int:
    raise AssertionError("the commands were asked")


def test_the_version_is_that_of_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--version"]) == 0
    wanted = capsys.readouterr().out
    monkeypatch.setattr(start, "_commands", refused)
    assert begun(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == wanted == f"overt {metadata.version('overt')}\n"


def test_the_list_is_that_of_the_commands_and_is_made_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert begun(monkeypatch, "list") == 0
    wanted = capsys.readouterr().out
    assert wanted == f"{cli.listed()}\n" and "scenes-soft" in wanted
    assert place.is_file()
    monkeypatch.setattr(start, "_commands", refused)
    assert begun(monkeypatch, "list") == 0
    assert capsys.readouterr().out == wanted


@pytest.mark.parametrize("harm", ["a source", "a letter", "the end", "no text", "gone"])
def test_a_page_that_is_old_or_damaged_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, place: Path, harm: str
) -> None:
    key = start._sources()
    start._keep(key)
    kept = place.read_text()
    assert start._kept(key) == f"{cli.listed()}\n"
    match harm:
        case "a source":
            key = key.replace("commands.py ", "commands.py 1", 1)
        case "a letter":
            place.write_text(kept.replace("scenes-soft", "scenes-sofa"))
        case "the end":
            place.write_text(kept[:-5])
        case "no text":
            place.write_bytes(b"\xff\xfe\x00")
        case "gone":
            place.unlink()
    assert start._kept(key) is None
    start._keep(key)
    assert start._kept(key) == f"{cli.listed()}\n"


@pytest.mark.parametrize("why", ["no byte code", "no place", "no room"])
def test_where_nothing_can_be_kept_the_list_is_made_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Path, why: str
) -> None:
    match why:
        case "no byte code":
            monkeypatch.setattr(sys, "dont_write_bytecode", True)
        case "no place":
            monkeypatch.setattr(start, "_place", lambda: None)
        case "no room":

            def full(path: Path, text: str) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(files, "write_text", full)
    for _ in range(2):
        assert begun(monkeypatch, "list") == 0
        assert "scenes-soft" in capsys.readouterr().out
    assert not place.exists()


def test_everything_else_is_left_to_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert begun(monkeypatch, "list", "scenes-soft") == 0
    assert "train.epochs" in capsys.readouterr().out
    assert begun(monkeypatch, "lost") == 2
    assert "lost" in capsys.readouterr().err
    assert not place.exists()


def test_a_stream_of_text_is_as_good_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert begun(monkeypatch, "--version") == 0
    assert out.getvalue().startswith("overt ")


def test_a_terminal_gets_its_own_list(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(start, "_commands", lambda: 7)
    assert begun(monkeypatch, "list") == 7
    assert not place.exists()


def test_a_list_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(start, "_commands", lambda: 1)
    assert begun(monkeypatch, "list") == 1
    assert not place.exists()


# Processes: what they import, and how they end


def process(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    code = (
        "import sys\n"
        "from overt.__main__ import main\n"
        "end = main()\n"
        "print(*sorted(n for n in sys.modules if n.split('.')[0] in "
        "('typer', 'rich', 'dataclasses', 'overt')), file=sys.stderr)\n"
        "sys.exit(end)\n"
    )
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, text=True, check=False, timeout=120, cwd=ROOT, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.long
def test_quick_answers_import_neither_commands_nor_recipes(tmp_path: Path) -> None:
    """In a process of its own, with byte code kept in a folder of its own."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    first, second = (process("list", env=env) for _ in range(2))
    assert first.returncode == second.returncode == 0 and first.stdout == second.stdout
    assert "overt.recipes" in first.stderr.split()
    assert second.stderr.split() == ["overt", "overt.__main__"]
    assert process("--version", env=env).stderr.split() == ["overt", "overt.__main__"]
    made = {n for n in first.stderr.split() if n.startswith("overt.")}
    rest = {n for n in made if not n.startswith(("overt.cli", "overt.recipes"))}
    # a list depends on no other source than those that its page is kept with
    assert rest <= {"overt.__main__", "overt.errors", "overt.files"}


@pytest.mark.long
@pytest.mark.parametrize("words", [["list"], ["--version"]], ids=" ".join)
def test_nobody_reads_on_and_a_full_disk_end_as_always(tmp_path: Path, words: list[str]) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    process(*words, env=env)  # now the page is kept
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = process(*words, env=env, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 141
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = process(*words, env=env, stdout=full)
        assert done.returncode == 1 and "No space left" in done.stderr


def test_the_command_begins_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"overt": f"{start.__name__}:{start.main.__name__}"}
