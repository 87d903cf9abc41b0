"""Entry point of `overt` and `python -m overt`; answers frequent commands without heavy imports.

`overt --version` does not parse the command line. `overt list` would create about a hundred
recipes; its output is cached beside the byte code, with the names, sizes and modification times of
its sources, and made again when one of them changes. All other commands are in `overt.cli`.
"""

import os
import sys
from zlib import crc32


def main() -> int:
    """Run a command line and return its exit code."""
    words = sys.argv[1:]
    if words == ["--version"]:
        from overt import __version__

        return _print(f"overt {__version__}\n")
    if words != ["list"] or sys.stdout is None or sys.stdout.isatty():
        return _run_command()
    key = _sources()
    cached = _read_cache(key)
    if cached is not None:
        return _print(cached)
    code = _run_command()
    if code == 0:
        _write_cache(key)
    return code


def _run_command() -> int:
    try:
        from overt.cli import main as commands
    except ModuleNotFoundError as error:
        return _report_missing(error)
    return commands()


def _report_missing(error: ModuleNotFoundError) -> int:
    """Print what to install for the command line, which is an extra."""
    from overt.errors import missing_package, missing_package_message, print_to_stderr

    if not (lacks := missing_package(error)):
        raise error
    print_to_stderr(f"overt: {missing_package_message(lacks)}.")
    return 2


def _print(text: str) -> int:
    """Print a text; return the exit code, also when stdout is closed or full."""
    if sys.stdout is None:
        return 0
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # do not fail on a terminal without ±
        sys.stdout.write(text)
        sys.stdout.flush()
    except BaseException as error:
        from overt.cli import report_error

        return report_error(error)
    return 0


# The cached output of `overt list`


def _sources() -> str:
    """Return one line per source file: path, size and modification time."""
    package = os.path.dirname(__file__)
    found = []
    folders = [os.path.join(package, part) for part in ("cli", "experiments", "papers")]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir() and entry.name != "__pycache__":
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    found.append(entry.path)
    lines = []
    for path in sorted(found):
        about = os.stat(path)
        lines.append(f"{path[len(package) :]} {about.st_size} {about.st_mtime_ns}\n")
    return "".join(lines)


def _cache_path() -> str | None:
    """Return the path of the cache; None if there is no byte code."""
    cached = None if __spec__ is None else __spec__.cached
    return os.path.join(os.path.dirname(cached), "list.txt") if cached else None


def _read_cache(key: str) -> str | None:
    """Read the cache for these sources; None if it is missing, outdated or damaged."""
    path = _cache_path()
    try:
        with open(path or "", encoding="utf-8") as file:
            check, _, rest = file.read().partition("\n")
    except (OSError, ValueError):
        return None
    whole = check == str(crc32(rest.encode())) and rest.startswith(f"{key}\n")
    return rest[len(key) + 1 :] if whole else None


def _write_cache(key: str) -> None:
    """Write the cache, if possible and if Python writes byte code."""
    path = _cache_path()
    if path is None or sys.dont_write_bytecode:
        return
    from contextlib import suppress
    from pathlib import Path

    from overt import cli, io
    from overt.errors import RunError, UserError

    rest = f"{key}\n{cli.list_text()}\n"
    with suppress(OSError, RunError, UserError):
        io.write_text(Path(path), f"{crc32(rest.encode())}\n{rest}")


if __name__ == "__main__":
    sys.exit(main())
