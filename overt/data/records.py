"""Long JSON lists read one entry at a time: the official files of VQA and CLEVR have up to a
gigabyte, and as one value they would take many times that.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overt.errors import BadInput, Damaged

CHUNK = 1 << 22
LONGEST = 1 << 26  # of one entry: no official one has more than a few thousand letters


def records(path: Path, key: str | None) -> Iterator[dict[str, Any]]:
    """The entries of the list called `key` in a JSON object, or of a list that is the whole file.

    What stands around the list is skipped. A file that is missing is `BadInput`; one that is no
    JSON, has no such list, or has an entry that is no object, is `Damaged` and the entry is named.
    """
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    try:
        with open(path, encoding="utf-8") as file:
            text = _Text(path, file)
            yield from text.entries() if key is None else text.entries_of(key)
    except UnicodeDecodeError as problem:
        raise Damaged(f"{path} is not text ({problem.reason}); get the file again.") from problem


class _Text:
    """A file of which a window is in memory; `at` is how far it has been read."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self._window, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder()

    def entries_of(self, key: str) -> Iterator[dict[str, Any]]:
        """The list called `key` of the object that the file holds."""
        self._expect("{")
        while True:
            name = self._value("its first names")
            self._expect(":")
            if name == key:
                yield from self.entries()
                return
            self._value(f"what is called {name!r}")
            if self._next() != ",":
                raise Damaged(f"{self._path} has no list called {key!r}; get the file again.")
            self._expect(",")

    def entries(self) -> Iterator[dict[str, Any]]:
        """The list that starts here."""
        self._expect("[")
        number = 0
        if self._next() == "]":
            return
        while True:
            found = self._value(f"entry {number}")
            if not isinstance(found, dict):
                raise Damaged(f"{self._path}: entry {number} is no object but {found!r:.40}.")
            yield found
            number += 1
            mark = self._next()
            if mark == "]":
                return
            if mark != ",":
                raise Damaged(f"{self._path} breaks off after entry {number - 1}; get it again.")
            self._expect(",")

    def _value(self, what: str) -> Any:
        """The value that starts here, whole."""
        self._next()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._window, self._at)
            except RecursionError as problem:
                raise Damaged(f"{self._path}: {what} is nested too deeply.") from problem
            except json.JSONDecodeError as problem:
                if self._ended or len(self._window) - self._at > LONGEST:
                    raise Damaged(f"{self._path}: {what} is not JSON: {problem.msg}.") from problem
                self._fill()
                continue
            if end < len(self._window) or self._ended:  # a number may go on in what is not yet read
                self._at = end
                return found
            self._fill()

    def _next(self) -> str:
        """The next character that is no space, and nothing at the end."""
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
            raise Damaged(f"{self._path} has no {mark!r} where one belongs; get the file again.")
        self._at += 1

    def _fill(self) -> None:
        more = self._file.read(CHUNK)
        self._ended = not more
        self._window, self._at = self._window[self._at :] + more, 0
