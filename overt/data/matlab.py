"""Plain arrays of a MATLAB 5 file, read without trust.

The format: https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf. A file is a header of
128 bytes and elements, each compressed or not. What an element says of its array is compared with
what is wanted before anything is read, so that no file makes us hold more than was asked for.
Cells, structures, objects and functions are never read. The reader of scipy ends the whole process
on some broken files, so it is only what the tests compare with.
"""

import io
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overt.errors import BadInput, Damaged

HEADER = 128
PIECE = 1 << 20
MOST_DIMENSIONS = 32
MOST_LETTERS = 64
COMPRESSED, MATRIX = 15, 14
BYTES, NUMBERS, WORDS = 1, 5, 6  # the kinds of data that names, sizes and flags are made of
COMPLEX = 0x08
# How numbers are stored, and the class of an array, by their codes in the file.
CODES = (1, 2, 3, 4, 5, 6, 7, 9, 12, 13)
STORED = dict(zip(CODES, "i1 u1 i2 u2 i4 u4 f4 f8 i8 u8".split(), strict=True))
CLASSES = dict(
    enumerate("double single int8 uint8 int16 uint16 int32 uint32 int64 uint64".split(), start=6)
)


@dataclass(frozen=True)
class Wanted:
    """An array that a file should have: its shape, and what its numbers may be."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...] = tuple(CLASSES.values())


def read_arrays(path: Path, wanted: Mapping[str, Wanted]) -> dict[str, NDArray[Any]]:
    """The arrays of these names, in MATLAB's order of axes; anything else in the file is left.

    An array of another shape or kind, one that is missing, a file that ends early or has another
    format is `Damaged`; a file that is not there is `BadInput`.
    """
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    found: dict[str, NDArray[Any]] = {}
    try:
        with open(path, "rb") as file:
            order = _order(file.read(HEADER))
            while len(found) < len(wanted) and (tag := file.read(8)):
                kind, size = struct.unpack(f"{order}II", _whole(tag, 8))
                end = file.tell() + size
                if kind == COMPRESSED:
                    stream = _Inflated(file, size)
                    _element(stream, order, wanted, found)
                elif kind == MATRIX:
                    _matrix(_Plain(file, size), order, wanted, found)
                file.seek(end)
    except (_Wrong, zlib.error) as problem:
        raise Damaged(f"{path}: {problem}; get it again.") from problem
    for name in wanted:
        if name not in found:
            raise Damaged(f"{path} has no array {name}; get it again.")
    return found


class _Wrong(Exception):
    """What is wrong with a file, without its name."""


class _Plain:
    """The next `left` bytes of a file."""

    def __init__(self, file: io.BufferedReader, left: int) -> None:
        self._file, self._left = file, left

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise _Wrong("an element is shorter than it says")
        self._left -= count
        return _whole(self._file.read(count), count)

    def finish(self) -> None:
        """Nothing to be held against: bytes that are not compressed have no checksum."""


class _Inflated:
    """What the next `left` bytes of a file unpack to, never more than is asked for."""

    def __init__(self, file: io.BufferedReader, left: int) -> None:
        self._file, self._left = file, left
        self._zlib = zlib.decompressobj()
        self._rest = b""

    def take(self, count: int) -> bytearray:
        found = bytearray()
        while len(found) < count:
            piece = self._more(count - len(found))
            if not piece and self._zlib.eof:
                raise _Wrong("an element is shorter than it says")
            found += piece
        return found

    def finish(self) -> None:
        """Read on to the checksum, over the few bytes that fill up an element."""
        for _ in range(16):
            if self._zlib.eof:
                return
            self._more(1)
        if not self._zlib.eof:
            raise _Wrong("an element is longer than it says")

    def _more(self, most: int) -> bytes:
        if not self._rest and not self._zlib.eof:
            self._rest = self._file.read(min(PIECE, self._left))
            self._left -= len(self._rest)
        fed = bool(self._rest)
        found = self._zlib.decompress(self._rest, most)
        self._rest = self._zlib.unconsumed_tail
        if not found and not fed and not self._zlib.eof:
            raise _Wrong("the file ends early")
        return found


_Stream = _Plain | _Inflated


def _order(header: bytes) -> str:
    """The order of bytes, from the header of a MATLAB 5 file."""
    mark = header[126:128]
    order = {b"IM": "<", b"MI": ">"}.get(mark)
    if order is None or struct.unpack(f"{order}H", header[124:126]) != (0x0100,):
        raise _Wrong("this is not a MATLAB 5 file")
    return order


def _element(
    stream: _Stream, order: str, wanted: Mapping[str, Wanted], found: dict[str, NDArray[Any]]
) -> None:
    """The array inside a compressed element."""
    kind, _ = struct.unpack(f"{order}II", stream.take(8))
    if kind != MATRIX:
        raise _Wrong("a compressed element is not an array")
    _matrix(stream, order, wanted, found)


def _matrix(
    stream: _Stream, order: str, wanted: Mapping[str, Wanted], found: dict[str, NDArray[Any]]
) -> None:
    """Read one array if it is wanted and what it should be."""
    flags = struct.unpack(f"{order}II", _data(stream, order, WORDS, 8, 8))[0]
    sizes = _data(stream, order, NUMBERS, 8, 4 * MOST_DIMENSIONS)
    if len(sizes) % 4:
        raise _Wrong("an array has a broken size")
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    name = _data(stream, order, BYTES, 0, MOST_LETTERS).decode("latin-1")
    if name not in wanted or name in found:
        return
    kind = CLASSES.get(flags & 0xFF, "something else")
    if flags >> 8 & COMPLEX:
        kind = "complex"
    should = wanted[name]
    if shape != should.shape or kind not in should.kinds:
        raise _Wrong(
            f"{name} is {kind} of {' x '.join(map(str, shape))}, not {' or '.join(should.kinds)} "
            f"of {' x '.join(map(str, should.shape))}"
        )
    code, size, small = _tag(stream, order)
    if code not in STORED:
        raise _Wrong(f"{name} is stored in no kind of numbers")
    stored = np.dtype(order + STORED[code])
    if size != prod(shape) * stored.itemsize:
        raise _Wrong(f"{name} has {size} bytes of data, not {prod(shape) * stored.itemsize}")
    if not np.can_cast(stored, np.dtype(kind)):
        raise _Wrong(f"{name} is stored as {stored.name}, which {kind} cannot hold")
    data = small[:size] if small is not None else stream.take(size)
    stream.finish()
    values = np.frombuffer(data, dtype=stored).reshape(shape, order="F")
    found[name] = values.astype(np.dtype(kind), copy=False)


def _data(stream: _Stream, order: str, kind: int, least: int, most: int) -> bytes | bytearray:
    """The bytes of a small part of an array's description."""
    code, size, small = _tag(stream, order)
    if code != kind or not least <= size <= most:
        raise _Wrong("the description of an array is broken")
    if small is not None:
        return small[:size]
    return stream.take(-(-size // 8) * 8)[:size]


def _tag(stream: _Stream, order: str) -> tuple[int, int, bytes | bytearray | None]:
    """The kind and size of what follows; up to four bytes stand in the tag itself."""
    head = stream.take(8)
    code, size = struct.unpack(f"{order}II", head)
    if code >> 16:
        if code >> 16 > 4:
            raise _Wrong("the description of an array is broken")
        return code & 0xFFFF, code >> 16, head[4:]
    return code, size, None


def _whole(found: bytes, count: int) -> bytes:
    if len(found) != count:
        raise _Wrong("the file ends early")
    return found
