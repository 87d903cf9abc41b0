"""Download files and extract archives safely.

An interrupted download resumes from where it stopped, in this process or the next, and is accepted
only if its checksum is right. An archive is extracted to a temporary folder and renamed when
complete; members that would leave the folder and archives above a size limit are rejected.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from overt.errors import CorruptFileError, RunError, UserError, missing_resource
from overt.io import check_zip_overlap

CHUNK = 1 << 16
TIMEOUT = 30.0
MOST_BYTES = 50_000_000_000
MOST_MEMBERS = 1_000_000
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, LZMAError, EOFError, UnicodeError),
    NotImplementedError,  # an unknown version of zip
    *(ValueError, OverflowError, RecursionError, struct.error),  # malformed numbers
)
LONGEST_HEADER = 1 << 20  # bytes of a long name or a list of attributes in a tar archive
_DIGITS = re.compile(rb"[0-9]{257}")  # parsing them takes quadratic time before Python 3.11.10

Progress = Callable[[int, int | None], None]


@runtime_checkable
class Stream(Protocol):
    """Anything with `read(count)` that returns bytes."""

    def read(self, count: int, /) -> bytes: ...


def download(
    url: str,
    path: Path,
    checksum: str | None = None,
    on_progress: Progress | None = None,
    tries: int = 5,
    pause: float = 1.0,
) -> Path:
    """Download `url` to `path`.

    Received bytes are kept as `path`.part, and a later call resumes there if there is a checksum to
    verify that the pieces fit. A file that exists and is correct is not downloaded again.

    Args:
        url: http or https address.
        path: Target file.
        checksum: "sha1:..." or any other algorithm of hashlib.
        on_progress: Called with the bytes so far and, if known, the total.
        tries: Number of attempts in a row without new bytes after which to give up.
        pause: Seconds before the second attempt; doubled each time, up to 60.

    Returns:
        `path`.

    Raises:
        RunError: The server cannot be reached, or the disk cannot be written.
        CorruptFileError: The bytes do not match the checksum; they are deleted.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url} is not an http or https address.")
    if path.is_file() and (checksum is None or matches(path, checksum)):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if checksum is None:
        part.unlink(missing_ok=True)
    fruitless = 0
    while True:
        before = _size(part)
        try:
            if _fetch(url, part, on_progress):
                break
            reason = "the connection broke"
        except HTTPError as problem:
            if problem.code < 500 and problem.code not in (408, 429):
                raise RunError(f"{url} returned {problem.code} {problem.reason}.") from problem
            reason = f"{problem.code} {problem.reason}"
        except (OSError, HTTPException) as problem:
            if getattr(problem, "errno", None) in (*FULL, errno.EACCES, errno.EPERM, errno.EROFS):
                raise RunError(f"{part} could not be written: {problem}.") from problem
            reason = str(getattr(problem, "reason", problem)) or type(problem).__name__
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless >= tries:
            raise RunError(
                f"{url} could not be downloaded: {reason}. {_size(part)} bytes are kept in {part}; "
                "try again later to resume."
            )
        time.sleep(min(pause * 2**fruitless, 60.0))
    if checksum is not None and not matches(part, checksum):
        part.unlink()
        raise CorruptFileError(
            f"{url} does not have checksum {checksum}; the download was deleted."
        )
    os.replace(part, path)
    return path


def matches(path: Path, checksum: str) -> bool:
    """Return whether the file has the checksum, given as "kind:hexadecimal"."""
    kind, _, value = checksum.partition(":")
    if kind not in hashlib.algorithms_guaranteed or not value:
        raise UserError(f"{checksum!r} is not a checksum such as sha256:0123...")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest() == value.lower()


def extract(archive: Path, folder: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Extract a zip or tar archive to the new folder `folder`, completely or not at all.

    Only plain files and folders are created. An archive with an absolute name, a `..`, a backslash,
    a NUL, a link, a device, a duplicate name, an encrypted member, overlapping members, or more
    than `most_bytes` in all raises `UserError`; a broken one raises `CorruptFileError`.

    Args:
        archive: Archive file.
        folder: Folder to create.
        most_bytes: Largest total size of the extracted files.

    Returns:
        The names of the files.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists; remove it or choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        inside = temporary / "inside"
        inside.mkdir()
        names = _unpack(archive, inside, most_bytes)
        os.replace(inside, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return names


def require_file(path: Path) -> None:
    """Raise `UserError` if a file of a dataset is missing."""
    if not path.is_file():
        raise UserError(f"{path} is missing; see `overt data list` for how to get it.")


def require_folder(path: Path) -> None:
    """Raise `UserError` if a folder of a dataset is missing."""
    if not path.is_dir():
        raise UserError(f"{path} is missing; see `overt data list` for how to get it.")


def safe_join(root: Path, name: str) -> Path:
    """Return the path of `name` below `root`; raise `UserError` if it would leave `root`."""
    parts = PurePosixPath(name).parts
    wrong = (
        not parts
        or "\0" in name
        or "\\" in name
        or name.startswith("/")
        or ".." in parts
        or re.match(r"[A-Za-z]:", name)
    )
    if wrong:
        raise UserError(f"The name {name!r} points outside its folder.")
    return root.joinpath(*parts)


def _fetch(url: str, part: Path, on_progress: Progress | None) -> bool:
    """Make one attempt, from where the last one stopped; return whether the file is complete."""
    have = _size(part)
    headers = {"User-Agent": "overt", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        answer = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as problem:
        if problem.code != 416 or not have:
            raise
        whole = re.fullmatch(r"bytes \*/(\d+)", problem.headers.get("Content-Range", ""))
        if whole and int(whole[1]) == have:
            return True
        part.unlink()  # longer than the file: another version of it
        return False
    with answer:
        if have and not _goes_on(answer, have):
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        with open(part, "ab" if have else "wb") as file:
            for piece in _pieces(answer):
                file.write(piece)
                have += len(piece)
                if on_progress is not None:
                    on_progress(have, total)
            file.flush()
            os.fsync(file.fileno())
    return total is None or have == total


def _goes_on(answer: Any, have: int) -> bool:
    """Return whether the server resumes; many send everything again instead."""
    place = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return answer.status == 206 and place is not None and int(place[1]) == have


def _pieces(stream: Stream) -> Iterator[bytes]:
    while piece := stream.read(CHUNK):
        yield piece


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _unpack(archive: Path, folder: Path, most_bytes: int) -> list[str]:
    names: list[str] = []
    left = most_bytes
    try:
        for count, (name, stream) in enumerate(_members(archive)):
            if count >= MOST_MEMBERS:
                raise UserError(f"It has more than {MOST_MEMBERS} members.")
            target = safe_join(folder, name)
            if stream is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            left -= _copy(stream, target, left)
            names.append(name)
    except UserError as problem:
        raise UserError(f"{archive} is rejected: {problem} Nothing was extracted.") from problem
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as problem:
        raise UserError(f"{archive} is rejected: a name is used twice.") from problem
    except BROKEN as problem:
        raise CorruptFileError(
            f"{archive} is corrupt: {_reason(problem)}. Download it again."
        ) from problem
    except OSError as problem:
        if missing_resource(problem):
            raise RunError(f"{archive} cannot be extracted: {problem.strerror}.") from problem
        raise CorruptFileError(f"{archive} cannot be extracted: {_reason(problem)}.") from problem
    return names


def _reason(problem: Exception) -> str:
    """Return the first line of an error: for an unknown format it lists all attempts."""
    return str(problem).partition("\n")[0].rstrip(":. ") or type(problem).__name__


def _copy(stream: Stream, target: Path, most: int) -> int:
    """Copy and count the real bytes, since sizes in a header can be wrong."""
    done = 0
    with open(target, "xb") as file:
        for piece in _pieces(stream):
            done += len(piece)
            if done > most:
                raise UserError(f"It has more than {most} bytes.")
            file.write(piece)
    return done


def _members(archive: Path) -> Iterator[tuple[str, Stream | None]]:
    """Yield each member's name, and its bytes or None for a folder."""
    if not archive.is_file():
        raise CorruptFileError(f"{archive} is missing.")
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened_zip:
            yield from _zip_members(opened_zip)
    else:
        with tarfile.open(archive, tarinfo=_Member) as opened:
            yield from _tar_members(opened)


def _zip_members(archive: zipfile.ZipFile) -> Iterator[tuple[str, Stream | None]]:
    try:
        check_zip_overlap(archive)
    except ValueError as problem:
        raise UserError(f"{problem}.") from problem
    for member in archive.infolist():
        safe_join(Path(), member.orig_filename)  # zipfile truncates a name at its first NUL
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise UserError(f"{member.filename!r} is a link or a device.")
        if member.flag_bits & 1:
            raise UserError(f"{member.filename!r} is encrypted.")
        if member.is_dir():
            yield member.filename, None
        else:
            try:
                with archive.open(member) as stream:
                    yield member.filename, stream
            except NotImplementedError as problem:
                raise UserError(f"{member.filename!r}: {problem}.") from problem


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, Stream | None]]:
    for member in archive:
        if member.size < 0 or member.issparse():
            raise UserError(f"{member.name!r} has no plain size.")
        if member.isdir():
            if PurePosixPath(member.name).parts:  # "." is the folder itself
                yield member.name, None
        elif member.isreg():
            stream = archive.extractfile(member)
            assert stream is not None
            with stream:
                yield member.name, stream
        else:
            raise UserError(f"{member.name!r} is a link or a device.")


class _Member(tarfile.TarInfo):
    """A tar header that is checked before it is followed."""

    def _proc_member(self, archive: Any) -> Any:
        if self.size < 0:  # the next header would be before this one: an endless loop
            raise tarfile.ReadError("a member has a size below zero")
        if self.type in _LONG and self.size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header has {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_pax(self, archive: Any) -> Any:
        held, data = archive.fileobj, archive.fileobj.read(self._block(self.size))  # type: ignore[attr-defined]
        if _DIGITS.search(data):
            raise tarfile.ReadError("a header has a number of more than 256 digits")
        archive.fileobj = _Replay(held, data)
        try:
            return super()._proc_pax(archive)  # type: ignore[misc]
        finally:
            archive.fileobj = held


_LONG = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)


class _Replay:
    """A file whose last piece can be read a second time."""

    def __init__(self, file: Any, piece: bytes) -> None:
        self._file, self._piece = file, piece

    def read(self, *count: int) -> bytes:
        """Return the piece, and after it the rest of the file."""
        piece, self._piece = self._piece, b""
        found: bytes = piece or self._file.read(*count)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
