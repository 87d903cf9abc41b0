"""Section 6: start-up time of the command line, compared with Python itself.

Byte code is cached in a separate folder, as in an installed package; the first round writes it and
is not counted.
"""

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from .clock import time_variants, wall_seconds
from .report import Report, Setting, at_most, relative_time_row, value_row

GOAL = 8.0
HEAVY = "torch numpy scipy transformers".split()
COMMANDS = {"--version": "--version", "--help": "--help", "list": "list"}


def section(setting: Setting, report: Report) -> None:
    """Time `overt --version`, `--help` and `list` in wall-clock seconds."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        _section(setting, report, env)


def _section(setting: Setting, report: Report, env: dict[str, str]) -> None:
    overt = str(Path(sys.executable).with_name("overt"))
    words = {f"overt {name}": [overt, argument] for name, argument in COMMANDS.items()}
    words["python -c pass"] = [sys.executable, "-c", "pass"]

    def run(command: list[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    assert metadata.version("overt") in run(words["overt --version"])
    assert "run" in run(words["overt --help"]) and run(words["overt list"]).strip()
    variants = {name: lambda command=command: run(command) for name, command in words.items()}
    times = time_variants(variants, setting.size(15, 3), wall_seconds)
    for name in words:
        if name != "python -c pass":
            report.add(relative_time_row(name, times, name, "python -c pass", at_most(GOAL)))
    report.add(value_row("heavy packages imported", "packages", _heavy(), at_most(0)))


def _heavy() -> int:
    """Count the slow packages that the commands import."""
    found: set[str] = set()
    for argument in COMMANDS.values():
        code = (
            "import contextlib, io, sys\n"
            f"sys.argv = ['overt', {argument!r}]\n"
            "from overt.__main__ import main\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
            "    main()\n"
            f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        found |= set(done.stderr.split())
    return len(found)
