"""How a command ends: its exit code, and one sentence on what went wrong."""

import os
import sys
from contextlib import suppress
from typing import Any

import typer

from overt.errors import BadInput, Damaged, Failed, Stopped


def ended(error: BaseException) -> int:
    """The exit code of an exception, after its sentence was said."""
    code, sentence = _verdict(error)
    if sentence and sys.stderr is not None:
        with suppress(OSError):
            line = _one_line(sentence)
            stop = "" if line[-1] in ".?!)" else "."
            print(f"overt: {line}{stop}", file=sys.stderr, flush=True)
    if isinstance(error, OSError) and sys.stdout is not None:
        # What is still in the buffer cannot be written; without this, Python complains at its end.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _one_line(text: str) -> str:
    """The text on one line that no terminal takes for anything but text."""
    line = " ".join(text.split())
    line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)
    return line if len(line) <= 2000 else line[:1997] + "..."


def _usage(error: Any) -> str:
    """What is wrong with the options of a command, and where they are explained."""
    said = error.format_message().strip().rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", None) or "overt"
    return f"{said}; `{path} --help` shows what it takes."


# What an install without extras lacks, by the name it is imported under, and what pip calls it.
PACKAGES = {
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "numba": "numba",
    "fastapi": "fastapi",
    "starlette": "starlette",
    "pydantic": "pydantic",
    "uvicorn": "uvicorn",
    "timm": "timm",
    "tensorboard": "tensorboard",
    "easy_vqa": "easy-vqa",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "ot": "POT",
    "anywidget": "anywidget",
    "traitlets": "traitlets",
}


def _missing(error: BaseException | None) -> str | None:
    """The package that this fails for the lack of, where an extra of ours brings it."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ if isinstance(error, ImportError) else None
    name = (error.name or "").partition(".")[0] if error is not None else ""
    return name if name in PACKAGES else None


def _verdict(error: BaseException) -> tuple[int, str]:
    usage = typer.BadParameter.__mro__[1:3]  # typer carries its own click, or imports it
    match error:
        case BadInput() | Damaged():
            return 2, str(error)
        case Failed():
            return 1, str(error)
        case Stopped():
            return error.code, str(error)
        case KeyboardInterrupt() | typer.Abort():
            return 130, "stopped at once; what was saved before is whole."
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None), ""
        case BrokenPipeError():
            return 141, ""  # nobody reads on, as for any program in a pipe
        case MemoryError():
            return 1, "there was not enough memory; lower train.batch, data.limit or model.width."
    if isinstance(error, usage):
        return 2, _usage(error)
    if (lacks := _missing(error)) is not None:
        return 2, f"this needs {lacks}, which is not here; pip install {PACKAGES[lacks]}."
    said = f"{type(error).__name__}: {error}"[:300]
    if type(error).__name__ == "OutOfMemoryError":
        return 1, f"the device ran out of memory; lower train.batch or model.width ({said})."
    if isinstance(error, OSError):
        return 1, f"the system refused: {said}."
    return 1, f"a defect in overt, not in what you gave: {said}; OVERT_TRACEBACK=1 shows where."
