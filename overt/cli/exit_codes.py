"""Exit codes and error messages of commands."""

import os
import sys
from contextlib import suppress
from typing import Any

import typer

from overt.errors import (
    CorruptFileError,
    PackageError,
    RunError,
    RunInterrupted,
    UserError,
    is_rust_panic,
    missing_package,
    missing_package_message,
    missing_resource,
    print_to_stderr,
)


def report_error(error: BaseException, command: str = "") -> int:
    """Print the message of an exception and return its exit code."""
    code, message = _exit_code_and_message(error, command)
    if message:
        line = printable(message)
        stop = "" if line[-1] in ".?!)" else "."
        print_to_stderr(f"overt: {line}{stop}")
    if isinstance(error, OSError) and sys.stdout is not None:
        # stdout still has unwritten data: without this, Python prints an error at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def printable(text: str) -> str:
    """Return a text on one line, with control characters escaped."""
    line = " ".join(text.split())
    line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)
    return line if len(line) <= 2000 else line[:1997] + "..."


def _usage_message(error: Any) -> str:
    """Return the message of a usage error, with the help command."""
    message = error.format_message().strip().rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", None) or "overt"
    return f"{message}; see `{path} --help`."


# How to use less memory, by command.
_SMALLER = {
    **dict.fromkeys(("run", "table", "demo"), "lower train.batch, data.limit or model.width"),
    "look": "use a smaller image, a shorter text or a smaller model",
    "serve": "serve fewer or smaller models",
    "measure": "lower --portion or --limit, or use a smaller model",
}


def _out_of_memory(command: str, where: str = "") -> str:
    smaller = _SMALLER.get(command, "close other programs, or use a machine with more memory")
    return f"out of memory{where}: {smaller}."


def _exit_code_and_message(error: BaseException, command: str) -> tuple[int, str]:
    usage = typer.BadParameter.__mro__[1:3]  # typer carries its own click, or imports it
    match error:
        case UserError() | CorruptFileError() | PackageError():
            return 2, str(error)
        case RunError():
            return 1, str(error)
        case RunInterrupted():
            return error.code, str(error)
        case KeyboardInterrupt() | typer.Abort():
            return 130, "stopped at once; earlier checkpoints are complete."
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None), ""
        case BrokenPipeError():
            return 141, ""  # the reader of the pipe has exited
        case MemoryError():
            return 1, _out_of_memory(command)
    if isinstance(error, usage):
        return 2, _usage_message(error)
    if lacks := missing_package(error):
        return 2, f"{missing_package_message(lacks)}."
    said = f"{type(error).__name__}: {error}"[:300]
    if type(error).__name__ == "OutOfMemoryError":
        return 1, f"{_out_of_memory(command, ' on the device').rstrip('.')} ({said})."
    if not isinstance(error, OSError) and missing_resource(error) == missing_resource(
        MemoryError()
    ):
        return 1, f"{_out_of_memory(command).rstrip('.')} ({said})."
    if is_rust_panic(error):
        return 2, f"a library could not read a file ({said})."
    if isinstance(error, OSError):
        return 1, f"system error: {said}."
    return 1, f"internal error: {said}; set OVERT_TRACEBACK=1 for a traceback."
