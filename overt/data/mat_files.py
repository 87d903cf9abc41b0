"""Reader for plain arrays of MATLAB 5 files from untrusted sources.

The format: https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf. A file is a header of
128 bytes and elements, each compressed or not. The declared shape and type of an array are compared
with the expected ones before its data is read, so that a file cannot make us allocate more. Cells,
structures, objects and functions are never read. SciPy's reader crashes the process on some broken
files, so it is used in the tests only.
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

from overt.data.download import require_file
from overt.errors import CorruptFileError

HEADER = 128
PIECE = 1 << 20
MOST_DIMENSIONS = 32
MOST_LETTERS = 64
COMPRESSED, MATRIX = 15, 14
BYTES, NUMBERS, WORDS = 1, 5, 6  # data types of names, sizes and flags
COMPLEX = 0x08
# How numbers are stored, and the class of an array, by their codes in the file.
CODES = (1, 2, 3, 4, 5, 6, 7, 9, 12, 13)
STORED = dict(zip(CODES, "i1 u1 i2 u2 i4 u4 f4 f8 i8 u8".split(), strict=True))
CLASSES = dict(
    enumerate("double single int8 uint8 int16 uint16 int32 uint32 int64 uint64".split(), start=6)
)


@dataclass(frozen=True)
class ArraySpec:
    """Expected shape and types of an array."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...] = tuple(CLASSES.values())


def read_arrays(path: Path, wanted: Mapping[str, ArraySpec]) -> dict[str, NDArray[Any]]:
    """Read the named arrays in MATLAB's order of axes; the rest of the file is ignored.

    A missing array, an array of another shape or type, a truncated file or another format raises
    `CorruptFileError`; a missing file raises `UserError`.
    """
    require_file(path)
    found: dict[str, NDArray[Any]] = {}
    try:
        with open(path, "rb") as file:
            order = _order(file.read(HEADER))
            while len(found) < len(wanted) and (tag := file.read(8)):
                kind, size = struct.unpack(f"{order}II", _check_length(tag, 8))
                end = file.tell() + size
                if kind == COMPRESSED:
                    stream = _ZlibElement(file, size)
                    _element(stream, order, wanted, found)
                elif kind == MATRIX:
                    _matrix(_RawElement(file, size), order, wanted, found)
                file.seek(end)
    except (_FormatError, zlib.error) as problem:
        raise CorruptFileError(f"{path}: {problem}; download it again.") from problem
    for name in wanted:
        if name not in found:
            raise CorruptFileError(f"{path} has no array {name}; download it again.")
    return found


class _FormatError(Exception):
    """A problem with a file, without the file name."""


class _RawElement:
    """The next `left` bytes of a file."""

    def __init__(self, file: io.BufferedReader, left: int) -> None:
        self._file, self._left = file, left

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise _FormatError("an element is shorter than it says")
        self._left -= count
        return _check_length(self._file.read(count), count)

    def finish(self) -> None:
        """Do nothing: uncompressed data has no checksum."""


class _ZlibElement:
    """The decompressed next `left` bytes of a file, never more than requested."""

    def __init__(self, file: io.BufferedReader, left: int) -> None:
        self._file, self._left = file, left
        self._zlib = zlib.decompressobj()
        self._rest = b""

    def take(self, count: int) -> bytearray:
        found = bytearray()
        while len(found) < count:
            piece = self._more(count - len(found))
            if not piece and self._zlib.eof:
                raise _FormatError("an element is shorter than it says")
            found += piece
        return found

    def finish(self) -> None:
        """Read to the checksum, past the padding of the element."""
        for _ in range(16):
            if self._zlib.eof:
                return
            self._more(1)
        if not self._zlib.eof:
            raise _FormatError("an element is longer than it says")

    def _more(self, most: int) -> bytes:
        if not self._rest and not self._zlib.eof:
            self._rest = self._file.read(min(PIECE, self._left))
            self._left -= len(self._rest)
        fed = bool(self._rest)
        found = self._zlib.decompress(self._rest, most)
        self._rest = self._zlib.unconsumed_tail
        if not found and not fed and not self._zlib.eof:
            raise _FormatError("the file ends early")
        return found


_Stream = _RawElement | _ZlibElement


def _order(header: bytes) -> str:
    """Return the byte order from the header of a MATLAB 5 file."""
    mark = header[126:128]
    order = {b"IM": "<", b"MI": ">"}.get(mark)
    if order is None or struct.unpack(f"{order}H", header[124:126]) != (0x0100,):
        raise _FormatError("this is not a MATLAB 5 file")
    return order


def _element(
    stream: _Stream, order: str, wanted: Mapping[str, ArraySpec], found: dict[str, NDArray[Any]]
) -> None:
    """Read the array inside a compressed element."""
    kind, _ = struct.unpack(f"{order}II", stream.take(8))
    if kind != MATRIX:
        raise _FormatError("a compressed element is not an array")
    _matrix(stream, order, wanted, found)


def _matrix(
    stream: _Stream, order: str, wanted: Mapping[str, ArraySpec], found: dict[str, NDArray[Any]]
) -> None:
    """Read one array if it is expected, and check its shape and type."""
    flags = struct.unpack(f"{order}II", _data(stream, order, WORDS, 8, 8))[0]
    sizes = _data(stream, order, NUMBERS, 8, 4 * MOST_DIMENSIONS)
    if len(sizes) % 4:
        raise _FormatError("an array has a broken size")
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    name = _data(stream, order, BYTES, 0, MOST_LETTERS).decode("latin-1")
    if name not in wanted or name in found:
        return
    kind = CLASSES.get(flags & 0xFF, "something else")
    if flags >> 8 & COMPLEX:
        kind = "complex"
    should = wanted[name]
    if shape != should.shape or kind not in should.kinds:
        raise _FormatError(
            f"{name} is {kind} of {' x '.join(map(str, shape))}, not {' or '.join(should.kinds)} "
            f"of {' x '.join(map(str, should.shape))}"
        )
    code, size, small = _tag(stream, order)
    if code not in STORED:
        raise _FormatError(f"{name} is not stored as numbers")
    stored = np.dtype(order + STORED[code])
    if size != prod(shape) * stored.itemsize:
        raise _FormatError(f"{name} has {size} bytes of data, not {prod(shape) * stored.itemsize}")
    if not np.can_cast(stored, np.dtype(kind)):
        raise _FormatError(f"{name} is stored as {stored.name}, which {kind} cannot hold")
    data = small[:size] if small is not None else stream.take(size)
    stream.finish()
    values = np.frombuffer(data, dtype=stored).reshape(shape, order="F")
    found[name] = values.astype(np.dtype(kind), copy=False)


def _data(stream: _Stream, order: str, kind: int, least: int, most: int) -> bytes | bytearray:
    """Return the bytes of a small part of an array's description."""
    code, size, small = _tag(stream, order)
    if code != kind or not least <= size <= most:
        raise _FormatError("the description of an array is broken")
    if small is not None:
        return small[:size]
    return stream.take(-(-size // 8) * 8)[:size]


def _tag(stream: _Stream, order: str) -> tuple[int, int, bytes | bytearray | None]:
    """Return type and size of the next element; up to four bytes are in the tag itself."""
    head = stream.take(8)
    code, size = struct.unpack(f"{order}II", head)
    if code >> 16:
        if code >> 16 > 4:
            raise _FormatError("the description of an array is broken")
        return code & 0xFFFF, code >> 16, head[4:]
    return code, size, None


def _check_length(found: bytes, count: int) -> bytes:
    if len(found) != count:
        raise _FormatError("the file ends early")
    return found
