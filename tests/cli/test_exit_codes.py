"""Exit codes and one-line error messages of commands."""

import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from overt.cli import exit_codes
from overt.errors import (
    OPTIONAL_PACKAGES,
    CorruptFileError,
    PackageError,
    RunError,
    RunInterrupted,
    UserError,
)
from tests.cli.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("toy_recipes")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("no such thing."), 2, "overt: no such thing.\n"),
        (CorruptFileError("a file\nis broken."), 2, "overt: a file is broken.\n"),
        (PackageError("needs x 2 or newer"), 2, "overt: needs x 2 or newer.\n"),
        (RunError("disk full."), 1, "overt: disk full.\n"),
        (RunInterrupted("stopped and saved.", signal.SIGINT), 130, "overt: stopped and saved.\n"),
        (RunInterrupted("stopped and saved.", signal.SIGTERM), 143, "overt: stopped and saved.\n"),
        (KeyboardInterrupt(), 130, "overt: stopped at once"),
        (MemoryError(), 1, "overt: out of memory"),
        (OSError(28, "No space left on device"), 1, "overt: system error"),
        (ModuleNotFoundError("No", name="uvicorn"), 2, "overt: this needs the package uvicorn"),
        (ModuleNotFoundError("No", name="scipy.io"), 2, "overt: this needs the package scipy"),
        (ModuleNotFoundError("No", name="overt.gone"), 1, "overt: internal error"),
        (ZeroDivisionError("oh\x1b[31m no"), 1, "overt: internal error"),
    ],
)
def test_every_error_has_its_exit_code_and_one_line(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def run(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr("overt.experiments.runner.run", run)
    exit_code, _, err = call("run", "toy", "--out", tmp_path / "a")
    assert exit_code == code
    assert err.startswith(message) and err.count("\n") == 1
    assert "Traceback" not in err and "\x1b" not in err


def test_every_package_of_an_extra_has_its_pip_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"scikit-learn": "sklearn", "POT": "ot", "easy-vqa": "easy_vqa"}
    packages: dict[str, tuple[str, set[str]]] = {}
    for extra, wanted in extras["optional-dependencies"].items():
        for one in wanted if extra not in ("dev", "docs") else ():
            package = re.split("[<>=;[]", one)[0]
            if package != "overt":  # other extras
                packages.setdefault(modules.get(package, package), (package, set()))[1].add(extra)
    for name, (package, found) in packages.items():
        assert OPTIONAL_PACKAGES[name][0] == package and OPTIONAL_PACKAGES[name][1] in found
    others = OPTIONAL_PACKAGES.keys() - packages.keys()
    assert {OPTIONAL_PACKAGES[name][1] for name in others} <= {""}, "in no extra"


def test_a_missing_package_reported_by_a_library_is_recognized(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **options: Any) -> Any:
        try:
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
        except ImportError as problem:
            raise ImportError("attention flow needs scipy: pip install scipy") from problem

    monkeypatch.setattr("overt.experiments.runner.run", run)
    code, _, err = call("run", "toy", "--out", tmp_path / "a")
    assert (code, err) == (
        2,
        "overt: this needs the package scipy: pip install scipy (part of overt[measure]).\n",
    )


def test_the_traceback_is_printed_on_request(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("overt.experiments.runner.run", run)
    monkeypatch.setenv("OVERT_TRACEBACK", "1")
    code, _, err = call("run", "toy", "--out", tmp_path / "a")
    assert code == 1 and "Traceback" in err and "ZeroDivisionError: oh" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run", "lower train.batch, data.limit or model.width"),
        ("look", "use a smaller image"),
        ("measure", "lower --portion or --limit"),
        ("serve", "serve fewer or smaller models"),
        ("doctor", "close other programs"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=repr,
)
def test_the_out_of_memory_advice_depends_on_the_command(
    capsys: pytest.CaptureFixture[str], command: str, message: str, error: BaseException
) -> None:
    assert exit_codes.report_error(error, command) == 1
    err = capsys.readouterr().err
    assert "out of memory" in err and message in err and "internal" not in err
    assert ("train.batch" in err) == (command == "run")


def test_a_panic_of_a_library_is_not_an_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    panic = type("PanicException", (BaseException,), {})
    assert exit_codes.report_error(panic("index out of bounds")) == 2
    assert "a library could not read a file" in capsys.readouterr().err
