"""How a command ends: its exit code, and one sentence."""

import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from overt.cli import ending
from overt.errors import BadInput, Damaged, Failed, Stopped
from tests.cli.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("toy_recipes")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BadInput("no such thing."), 2, "overt: no such thing.\n"),
        (Damaged("a file\nis broken."), 2, "overt: a file is broken.\n"),
        (Failed("disk full."), 1, "overt: disk full.\n"),
        (Stopped("stopped and saved.", signal.SIGINT), 130, "overt: stopped and saved.\n"),
        (Stopped("stopped and saved.", signal.SIGTERM), 143, "overt: stopped and saved.\n"),
        (KeyboardInterrupt(), 130, "overt: stopped at once"),
        (MemoryError(), 1, "overt: there was not enough memory"),
        (OSError(28, "No space left on device"), 1, "overt: the system refused"),
        (ModuleNotFoundError("No", name="uvicorn"), 2, "overt: this needs uvicorn, which is not"),
        (ModuleNotFoundError("No", name="scipy.io"), 2, "overt: this needs scipy, which is not he"),
        (ModuleNotFoundError("No", name="overt.gone"), 1, "overt: a defect in overt"),
        (ZeroDivisionError("oh\x1b[31m no"), 1, "overt: a defect in overt, not in what you gave"),
    ],
)
def test_every_end_has_its_code_and_one_sentence(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def run(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr("overt.recipes.running.run", run)
    ended, _, err = call("run", "toy", "--out", tmp_path / "a")
    assert ended == code
    assert err.startswith(said) and err.count("\n") == 1
    assert "Traceback" not in err and "\x1b" not in err


def test_every_package_of_an_extra_is_known_by_the_name_that_pip_has_for_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"scikit-learn": "sklearn", "POT": "ot", "easy-vqa": "easy_vqa"}
    brought: dict[str, str] = {}
    for extra, wanted in extras["optional-dependencies"].items():
        for one in wanted if extra not in ("dev", "docs") else ():
            package = re.split("[<>=;]", one)[0]
            brought[modules.get(package, package)] = package
    assert brought == ending.PACKAGES


def test_a_library_that_says_what_it_lacks_is_understood(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **options: Any) -> Any:
        try:
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
        except ImportError as problem:
            raise ImportError("attention flow needs scipy: pip install scipy") from problem

    monkeypatch.setattr("overt.recipes.running.run", run)
    code, _, err = call("run", "toy", "--out", tmp_path / "a")
    assert (code, err) == (
        2,
        "overt: this needs scipy, which is not here; pip install scipy.\n",
    )


def test_the_traceback_is_there_for_who_asks(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("overt.recipes.running.run", run)
    monkeypatch.setenv("OVERT_TRACEBACK", "1")
    code, _, err = call("run", "toy", "--out", tmp_path / "a")
    assert code == 1 and "Traceback" in err and "ZeroDivisionError: oh" in err
