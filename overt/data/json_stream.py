"""Streaming reader for long JSON lists.

The official files of VQA and CLEVR have up to a gigabyte, and would take many times that if parsed
at once.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overt.data.download import require_file
from overt.errors import CorruptFileError

CHUNK = 1 << 22
LONGEST = 1 << 26  # characters of one entry: official ones have a few thousand


def iterate_records(path: Path, key: str | None) -> Iterator[dict[str, Any]]:
    """Yield the entries of the list called `key` in a JSON object, or of a list that is the whole
    file.

    Everything around the list is skipped. A missing file raises `UserError`; a file that is not
    JSON, has no such list, or has an entry that is not an object raises `CorruptFileError`.
    """
    require_file(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = _JsonStream(path, file)
            yield from text.entries() if key is None else text.entries_of(key)
    except UnicodeDecodeError as problem:
        raise CorruptFileError(
            f"{path} is not text ({problem.reason}); download the file again."
        ) from problem


class _JsonStream:
    """A file with a window of it in memory; `_at` is the position in the window."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self._window, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder()

    def entries_of(self, key: str) -> Iterator[dict[str, Any]]:
        """Yield the list called `key` of the object in the file."""
        self._expect("{")
        while True:
            name = self._value("its first names")
            self._expect(":")
            if name == key:
                yield from self.entries()
                return
            self._value(f"the value of {name!r}")
            if self._next() != ",":
                raise CorruptFileError(
                    f"{self._path} has no list called {key!r}; download the file again."
                )
            self._expect(",")

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the list that starts here."""
        self._expect("[")
        number = 0
        if self._next() == "]":
            return
        while True:
            found = self._value(f"entry {number}")
            if not isinstance(found, dict):
                raise CorruptFileError(
                    f"{self._path}: entry {number} is not an object but {found!r:.40}."
                )
            yield found
            number += 1
            mark = self._next()
            if mark == "]":
                return
            if mark != ",":
                raise CorruptFileError(
                    f"{self._path} ends after entry {number - 1}; download it again."
                )
            self._expect(",")

    def _value(self, what: str) -> Any:
        """Return the complete value that starts here."""
        self._next()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._window, self._at)
            except RecursionError as problem:
                raise CorruptFileError(f"{self._path}: {what} is nested too deeply.") from problem
            except json.JSONDecodeError as problem:
                if self._ended or len(self._window) - self._at > LONGEST:
                    raise CorruptFileError(
                        f"{self._path}: {what} is not JSON: {problem.msg}."
                    ) from problem
                self._fill()
                continue
            if end < len(self._window) or self._ended:  # a number may continue after the window
                self._at = end
                return found
            self._fill()

    def _next(self) -> str:
        """Return the next character that is not a space, or an empty string at the end."""
        while True:
            while self._at < len(self._window):
                if self._window[self._at] not in " \t\r\n":
                    return self._window[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._fill()

    def _expect(self, mark: str) -> None:
        if self._next() != mark:
            raise CorruptFileError(
                f"{self._path} lacks an expected {mark!r}; download the file again."
            )
        self._at += 1

    def _fill(self) -> None:
        more = self._file.read(CHUNK)
        self._ended = not more
        self._window, self._at = self._window[self._at :] + more, 0
