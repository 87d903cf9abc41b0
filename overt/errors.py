"""Exceptions mapped to CLI exit codes.

The command line prints the message of these exceptions without a traceback. Any other exception is
a bug in overt; set `OVERT_TRACEBACK=1` to see its traceback.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile

# OS errors that show that the file itself is wrong. All others (out of memory, too many open files,
# I/O or network failure, missing permission) say nothing about its content.
_FILE_ERRNOS = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.ESPIPE, errno.EOVERFLOW, errno.EILSEQ),
    }
)
_OUT_OF_MEMORY = "there was not enough memory"
# Texts of OS errors inside the exceptions of other libraries.
_RESOURCE_MESSAGES = {
    **{
        os.strerror(code): os.strerror(code)
        for code in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES)
    },
    **dict.fromkeys((os.strerror(errno.ENOMEM), "can't allocate memory"), _OUT_OF_MEMORY),
    **dict.fromkeys(("not enough memory", "out of memory"), _OUT_OF_MEMORY),
    "failed to map segment": _OUT_OF_MEMORY,  # a shared library could not be loaded
}
_RESOURCE_PATTERN = re.compile("|".join(map(re.escape, _RESOURCE_MESSAGES)), re.IGNORECASE)


# Optional packages by import name: the name to install, and the extra of overt that contains it.
OPTIONAL_PACKAGES = {
    "accelerate": ("accelerate", "train"),
    "anywidget": ("anywidget", "notebook"),
    "contourpy": ("contourpy", "viz"),
    "easy_vqa": ("easy-vqa", "data"),
    "fastapi": ("fastapi", "serve"),
    "h11": ("h11", "serve"),
    "jinja2": ("jinja2", "viz"),
    "lightning": ("lightning", ""),
    "markupsafe": ("markupsafe", "viz"),
    "matplotlib": ("matplotlib", "viz"),
    "mlflow": ("mlflow", ""),
    "numba": ("numba", "caption"),
    "ot": ("POT", "measure"),
    "pandas": ("pandas", ""),
    "pydantic": ("pydantic", "serve"),
    "rich": ("rich", "cli"),
    "scipy": ("scipy", "measure"),
    "sklearn": ("scikit-learn", "measure"),
    "starlette": ("starlette", "serve"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "timm": ("timm", "timm"),
    "tokenizers": ("tokenizers", "hf"),
    "torchmetrics": ("torchmetrics", "torchmetrics"),
    "traitlets": ("traitlets", "notebook"),
    "transformers": ("transformers", "hf"),
    "typer": ("typer", "cli"),
    "uvicorn": ("uvicorn", "serve"),
    "wandb": ("wandb", ""),
}


class UserError(ValueError):
    """Invalid user input. The message states what is wrong, where, and what to do. Exit code 2.

    Args:
        message: What is wrong, where, and what to do.

    Example:
        >>> raise UserError("rate is -1: use a positive number.")
        Traceback (most recent call last):
        overt.errors.UserError: rate is -1: use a positive number.
    """


class CorruptFileError(Exception):
    """A file is damaged or not in its format. The message names the file. Exit code 2.

    Args:
        message: Which file is damaged, and what to do.

    Example:
        >>> raise CorruptFileError("results.json has no key 'ours'.")
        Traceback (most recent call last):
        overt.errors.CorruptFileError: results.json has no key 'ours'.
    """


class RunError(RuntimeError):
    """A run failed. The message states what failed and which results are kept. Exit code 1.

    Args:
        message: What failed, and which results are kept.

    Example:
        >>> raise RunError("the loss is NaN at step 3.")
        Traceback (most recent call last):
        overt.errors.RunError: the loss is NaN at step 3.
    """


class PackageError(ImportError):
    """An optional package is missing or too old. The message says what to install. Exit code 2."""


class RunInterrupted(Exception):
    """A signal stopped the run. The message states what is saved and how to resume.

    Args:
        message: The text for the user.
        signal: The number of the signal.

    Attributes:
        code: The exit code, 128 plus the signal number: 130 for SIGINT, 143 for SIGTERM.

    Example:
        >>> RunInterrupted("stopped: resume with --resume", signal=2).code
        130
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.code = 128 + signal


def require_package(name: str, least: str = "") -> None:
    """Import an optional package; call it before a function imports from the package.

    Args:
        name: The import name, a key of `OPTIONAL_PACKAGES`.
        least: The oldest version that has what the function needs, if `pyproject.toml` allows older
            ones.

    Raises:
        PackageError: The package is not installed or too old. The message names it, how to install
            it, and the extra of overt that contains it.

    Example:
        >>> require_package("matplotlib", least="3.0")
    """
    try:
        found = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the package is there, and misses one of its own
            raise
        raise PackageError(missing_package_message(name), name=name) from error
    if least and _release(found.__version__) < _release(least):
        package = OPTIONAL_PACKAGES[name][0]
        raise PackageError(
            f"this needs {package} {least} or newer, found {found.__version__}: "
            f"pip install '{package}>={least}'",
            name=name,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (4, 57, 6) of "4.57.6" and of "4.57.6+cpu"."""
    parts = takewhile(str.isdecimal, re.split(r"[.+a-z]", version))
    return tuple(int(part) for part in parts)


def missing_package(error: BaseException | None) -> str:
    """Return the import name of the optional package that caused an error, "" if none did."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ if isinstance(error, ImportError) else None
    name = (error.name or "").partition(".")[0] if error is not None else ""
    return name if name in OPTIONAL_PACKAGES else ""


def missing_package_message(name: str) -> str:
    """Return what to install for a missing optional package.

    Example:
        >>> missing_package_message("ot")
        'this needs the package POT: pip install POT (part of overt[measure])'
    """
    package, extra = OPTIONAL_PACKAGES[name]
    part = f" (part of overt[{extra}])" if extra else ""
    return f"this needs the package {package}: pip install {package}{part}"


def missing_resource(error: BaseException) -> str:
    """Return the machine resource that was missing when a read failed, or "" if none was.

    Running out of memory or file descriptors, I/O errors and missing permissions do not prove that
    a file is damaged. The causes of `error` (`__cause__`, `__context__`) are inspected too.
    """
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        if resource := _missing_resource(current):
            return resource
        current = current.__cause__ or current.__context__
    return ""


def _missing_resource(error: BaseException) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in _FILE_ERRNOS:
            return ""
        return _RESOURCE_MESSAGES.get(os.strerror(error.errno), os.strerror(error.errno))
    if isinstance(error, UserError | CorruptFileError | RunError):
        return ""  # one of our own messages, which may quote any text
    match = _RESOURCE_PATTERN.search(str(error))
    messages = {key.lower(): value for key, value in _RESOURCE_MESSAGES.items()}
    return messages[match[0].lower()] if match else ""


@contextmanager
def rust_panic_as_corrupt_file(message: str) -> Iterator[None]:
    """Convert a panic of a Rust library into `CorruptFileError`.

    `tokenizers` and `safetensors` panic on some invalid files, and a panic is not an `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        details = " ".join(str(error).split())[:200]
        raise CorruptFileError(f"{message} ({details}).") from error


def is_rust_panic(error: BaseException) -> bool:
    """Return whether `error` is a panic of a Rust library; these have no common base class."""
    return type(error).__name__ == "PanicException"


def print_to_stderr(line: str, end: str = "\n") -> None:
    """Print a line to stderr, and ignore a stderr that cannot be written.

    A closed terminal, a broken pipe, a full disk or a closed stderr must not stop a run.
    """
    if sys.stderr is None:
        return
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: the stream is closed
        silence_stderr()


def silence_stderr() -> None:
    """Redirect stderr to the null device, so that later writes cannot fail."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, sys.stderr.fileno())
        finally:
            os.close(null)
