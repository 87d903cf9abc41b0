"""Fast start of the command line: version, cached list, and delegation to the commands."""

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
from overt import cli
from overt import io as overt_io

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the cache file of the list in a test."""
    found = tmp_path / "list.txt"
    monkeypatch.setattr(start, "_cache_path", lambda: str(found))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return found


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["overt", *words])
    return start.main()


def fail_on_commands() -> int:
    raise AssertionError("the commands were called")


def test_the_version_equals_that_of_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--version"]) == 0
    wanted = capsys.readouterr().out
    monkeypatch.setattr(start, "_run_command", fail_on_commands)
    assert run_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == wanted == f"overt {metadata.version('overt')}\n"


def test_the_list_equals_that_of_the_commands_and_is_cached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_file: Path
) -> None:
    assert run_main(monkeypatch, "list") == 0
    wanted = capsys.readouterr().out
    assert wanted == f"{cli.list_text()}\n" and "scenes-soft" in wanted
    assert cache_file.is_file()
    monkeypatch.setattr(start, "_run_command", fail_on_commands)
    assert run_main(monkeypatch, "list") == 0
    assert capsys.readouterr().out == wanted


@pytest.mark.parametrize("harm", ["a source", "a letter", "the end", "no text", "gone"])
def test_an_outdated_or_corrupt_cache_is_rebuilt(
    monkeypatch: pytest.MonkeyPatch, cache_file: Path, harm: str
) -> None:
    key = start._sources()
    start._write_cache(key)
    kept = cache_file.read_text()
    assert start._read_cache(key) == f"{cli.list_text()}\n"
    match harm:
        case "a source":
            key = key.replace("commands.py ", "commands.py 1", 1)
        case "a letter":
            cache_file.write_text(kept.replace("scenes-soft", "scenes-sofa"))
        case "the end":
            cache_file.write_text(kept[:-5])
        case "no text":
            cache_file.write_bytes(b"\xff\xfe\x00")
        case "gone":
            cache_file.unlink()
    assert start._read_cache(key) is None
    start._write_cache(key)
    assert start._read_cache(key) == f"{cli.list_text()}\n"


@pytest.mark.parametrize("why", ["no byte code", "no place", "no room"])
def test_the_list_is_printed_without_a_writable_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_file: Path, why: str
) -> None:
    match why:
        case "no byte code":
            monkeypatch.setattr(sys, "dont_write_bytecode", True)
        case "no place":
            monkeypatch.setattr(start, "_cache_path", lambda: None)
        case "no room":

            def full(path: Path, text: str) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(overt_io, "write_text", full)
    for _ in range(2):
        assert run_main(monkeypatch, "list") == 0
        assert "scenes-soft" in capsys.readouterr().out
    assert not cache_file.exists()


def test_other_arguments_are_passed_to_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_file: Path
) -> None:
    assert run_main(monkeypatch, "list", "scenes-soft") == 0
    assert "train.epochs" in capsys.readouterr().out
    assert run_main(monkeypatch, "lost") == 2
    assert "lost" in capsys.readouterr().err
    assert not cache_file.exists()


def test_output_can_be_a_text_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run_main(monkeypatch, "--version") == 0
    assert out.getvalue().startswith("overt ")


def test_the_list_of_a_terminal_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, cache_file: Path
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(start, "_run_command", lambda: 7)
    assert run_main(monkeypatch, "list") == 7
    assert not cache_file.exists()


def test_a_failed_list_is_not_cached(monkeypatch: pytest.MonkeyPatch, cache_file: Path) -> None:
    monkeypatch.setattr(start, "_run_command", lambda: 1)
    assert run_main(monkeypatch, "list") == 1
    assert not cache_file.exists()


# Subprocesses: imports and exit codes


def run_process(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
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
    return subprocess.run(command, text=True, check=False, timeout=600, cwd=ROOT, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.long
def test_cached_output_imports_neither_commands_nor_recipes(tmp_path: Path) -> None:
    """Run in a subprocess with a separate folder of byte code."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    first, second = (run_process("list", env=env) for _ in range(2))
    assert first.returncode == second.returncode == 0 and first.stdout == second.stdout
    assert "overt.experiments" in first.stderr.split()
    assert second.stderr.split() == ["overt", "overt.__main__"]
    assert run_process("--version", env=env).stderr.split() == ["overt", "overt.__main__"]
    made = {n for n in first.stderr.split() if n.startswith("overt.")}
    rest = {n for n in made if not n.startswith(("overt.cli", "overt.experiments", "overt.papers"))}
    # the list depends only on the sources in its cache key
    assert rest <= {"overt.__main__", "overt.errors", "overt.io", "overt.system"}


@pytest.mark.long
@pytest.mark.parametrize("words", [["list"], ["--version"]], ids=" ".join)
def test_closed_pipes_and_full_disks_keep_their_exit_codes(
    tmp_path: Path, words: list[str]
) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    run_process(*words, env=env)  # fill the cache
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_process(*words, env=env, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 141
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = run_process(*words, env=env, stdout=full)
        assert done.returncode == 1 and "No space left" in done.stderr


def test_the_script_entry_point_is_this_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"overt": f"{start.__name__}:{start.main.__name__}"}
