"""Fetch a file and unpack an archive, whatever the line and the archive do.

A download that breaks off goes on from where it stopped, in this process or the next, and counts
only when its checksum is right. An archive is unpacked beside its place and renamed when it is
whole; a member that would land anywhere else is refused, and so is more data than agreed.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
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

from overt.errors import BadInput, Damaged, Failed

CHUNK = 1 << 16
TIMEOUT = 30.0
MOST_BYTES = 50_000_000_000
MOST_MEMBERS = 1_000_000
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, LZMAError, EOFError, UnicodeError),
    NotImplementedError,  # of a version of zip that there never was
)

Progress = Callable[[int, int | None], None]


@runtime_checkable
class Stream(Protocol):
    """Anything that bytes can be read from, a piece at a time."""

    def read(self, count: int, /) -> bytes: ...


def download(
    url: str,
    path: Path,
    checksum: str | None = None,
    on_progress: Progress | None = None,
    tries: int = 5,
    pause: float = 1.0,
) -> Path:
    """Fetch `url` to `path`; `checksum` is "sha1:..." or any other kind that hashlib knows.

    What has arrived is kept as `path`.part and a later call goes on from there, if there is a
    checksum to tell that the pieces fit. `tries` attempts in a row that bring nothing are too many
    and raise `Failed`; wrong bytes are deleted and raise `Damaged`. A file that is already there
    and right is not fetched again. `on_progress` hears the bytes so far and, if known, of how many.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise BadInput(f"{url} is not an http or https address.")
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
            reason = "the line broke off"
        except HTTPError as problem:
            if problem.code < 500 and problem.code not in (408, 429):
                raise Failed(f"{url} answers {problem.code} {problem.reason}.") from problem
            reason = f"{problem.code} {problem.reason}"
        except (OSError, HTTPException) as problem:
            if getattr(problem, "errno", None) in (*FULL, errno.EACCES, errno.EPERM, errno.EROFS):
                raise Failed(f"{part} could not be written: {problem}.") from problem
            reason = str(getattr(problem, "reason", problem)) or type(problem).__name__
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless >= tries:
            raise Failed(
                f"{url} could not be fetched: {reason}. {_size(part)} bytes are kept in {part}; "
                "try again later to go on from there."
            )
        time.sleep(min(pause * 2**fruitless, 60.0))
    if checksum is not None and not matches(part, checksum):
        part.unlink()
        raise Damaged(f"{url} brought other bytes than {checksum}; they were deleted.")
    os.replace(part, path)
    return path


def matches(path: Path, checksum: str) -> bool:
    """Whether the file has the checksum, given as "kind:hexadecimal"."""
    kind, _, value = checksum.partition(":")
    if kind not in hashlib.algorithms_guaranteed or not value:
        raise BadInput(f"{checksum!r} is not a checksum such as sha256:0123...")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest() == value.lower()


def extract(archive: Path, folder: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Unpack a zip or tar archive as the new folder `folder`, all of it or nothing; name the files.

    Only plain files and folders are made. An archive with an absolute name, a `..`, a backslash,
    a NUL, a link, a device, a name that comes twice, an encrypted member, or more than `most_bytes`
    in all is refused with `BadInput`; one that is broken is `Damaged`.
    """
    if os.path.lexists(folder):
        raise BadInput(f"{folder} is already there; remove it or choose another place.")
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


def safe_join(root: Path, name: str) -> Path:
    """The path of `name` below `root`, for a name from an archive or a request; else `BadInput`."""
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
        raise BadInput(f"The name {name!r} would lead out of its folder.")
    return root.joinpath(*parts)


def _fetch(url: str, part: Path, on_progress: Progress | None) -> bool:
    """One attempt, from where the last one stopped; whether the file is whole now."""
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
        part.unlink()  # longer than the file: of another version
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
    """Whether the server sends the rest; many send everything again instead."""
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
                raise BadInput(f"It has more than {MOST_MEMBERS} members.")
            target = safe_join(folder, name)
            if stream is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            left -= _copy(stream, target, left)
            names.append(name)
    except BadInput as problem:
        raise BadInput(f"{archive} is refused: {problem} Nothing was unpacked.") from problem
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as problem:
        raise BadInput(f"{archive} is refused: one name is used twice.") from problem
    except BROKEN as problem:
        raise Damaged(f"{archive} is broken: {_reason(problem)}. Fetch it again.") from problem
    except OSError as problem:
        if problem.errno in FULL:
            raise Failed(f"{archive} cannot be unpacked: {problem.strerror}.") from problem
        raise Damaged(f"{archive} cannot be unpacked: {_reason(problem)}.") from problem
    return names


def _reason(problem: Exception) -> str:
    """What a library says, on one line: of a file in no known format it tells all it has tried."""
    return str(problem).partition("\n")[0].rstrip(":. ") or type(problem).__name__


def _copy(stream: Stream, target: Path, most: int) -> int:
    """Copy by what really comes out, since a header can lie about sizes."""
    done = 0
    with open(target, "xb") as file:
        for piece in _pieces(stream):
            done += len(piece)
            if done > most:
                raise BadInput("It unpacks to more bytes than agreed.")
            file.write(piece)
    return done


def _members(archive: Path) -> Iterator[tuple[str, Stream | None]]:
    """Each member's name, and its bytes or None for a folder."""
    if not archive.is_file():
        raise Damaged(f"{archive} is missing.")
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened_zip:
            yield from _zip_members(opened_zip)
    else:
        with tarfile.open(archive) as opened:
            yield from _tar_members(opened)


def _zip_members(archive: zipfile.ZipFile) -> Iterator[tuple[str, Stream | None]]:
    for member in archive.infolist():
        safe_join(Path(), member.orig_filename)  # zipfile cuts a name at its first NUL
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise BadInput(f"{member.filename!r} is a link or a device.")
        if member.flag_bits & 1:
            raise BadInput(f"{member.filename!r} is encrypted.")
        if member.is_dir():
            yield member.filename, None
        else:
            try:
                with archive.open(member) as stream:
                    yield member.filename, stream
            except NotImplementedError as problem:
                raise BadInput(f"{member.filename!r}: {problem}.") from problem


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, Stream | None]]:
    for member in archive:
        if member.isdir():
            if PurePosixPath(member.name).parts:  # "." is the folder itself
                yield member.name, None
        elif member.isreg():
            stream = archive.extractfile(member)
            assert stream is not None
            with stream:
                yield member.name, stream
        else:
            raise BadInput(f"{member.name!r} is a link or a device.")
