"""Where `overt` and `python -m overt` begin: what is asked most is answered before it is imported.

`overt --version` needs no command line to be read. `overt list` needs every recipe, which are a
hundred dataclasses to make; its page is kept beside the byte code, as Python keeps that: with the
names, sizes and times of the sources it was made from, and made anew when one of them is another.
Everything else, and all that goes wrong, is `overt.cli`.
"""

import os
import sys
from zlib import crc32


def main() -> int:
    """Answer a command line and return its exit code."""
    words = sys.argv[1:]
    if words == ["--version"]:
        from overt import __version__

        return _printed(f"overt {__version__}\n")
    if words != ["list"] or sys.stdout is None or sys.stdout.isatty():
        return _commands()
    key = _sources()
    page = _kept(key)
    if page is not None:
        return _printed(page)
    code = _commands()
    if code == 0:
        _keep(key)
    return code


def _commands() -> int:
    from overt.cli import main as commands

    return commands()


def _printed(text: str) -> int:
    """Print, and end as every command does when nobody reads or nothing can be written."""
    if sys.stdout is None:
        return 0
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
        sys.stdout.write(text)
        sys.stdout.flush()
    except BaseException as error:
        from overt.cli import ended

        return ended(error)
    return 0


# The page of `overt list`


def _sources() -> str:
    """What the page is made from: a line a file, its size and the time of its last change."""
    package = os.path.dirname(__file__)
    found = []
    folders = [os.path.join(package, room) for room in ("cli", "recipes")]
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


def _place() -> str | None:
    """Where the page is kept; None where byte code has no place."""
    cached = None if __spec__ is None else __spec__.cached
    return os.path.join(os.path.dirname(cached), "list.txt") if cached else None


def _kept(key: str) -> str | None:
    """The page that was made from these sources; None where there is none, or it is damaged."""
    place = _place()
    try:
        with open(place or "", encoding="utf-8") as file:
            check, _, rest = file.read().partition("\n")
    except (OSError, ValueError):
        return None
    whole = check == str(crc32(rest.encode())) and rest.startswith(f"{key}\n")
    return rest[len(key) + 1 :] if whole else None


def _keep(key: str) -> None:
    """Keep the page for the next time, where that is possible and byte code is kept too."""
    place = _place()
    if place is None or sys.dont_write_bytecode:
        return
    from contextlib import suppress
    from pathlib import Path

    from overt import cli, files
    from overt.errors import BadInput, Failed

    rest = f"{key}\n{cli.listed()}\n"
    with suppress(OSError, Failed, BadInput):
        files.write_text(Path(place), f"{crc32(rest.encode())}\n{rest}")


if __name__ == "__main__":
    sys.exit(main())
