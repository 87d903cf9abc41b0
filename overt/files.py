"""Files that are whole or not there: every artefact on disk goes through this module.

A folder is filled under a temporary name beside its place, every file is flushed to the disk, a
manifest of sizes and SHA-256 is written last, and only then is the folder renamed into place. A
crash at any moment leaves the old folder, the new one, or an old one set aside that `newest`,
`verify` and `sweep` put back. A reader checks every byte against the manifest, because safetensors
and NumPy files carry no checksum of their own that would catch a changed value.

What cannot be read back is `Damaged`, whatever was wrong with it. What cannot be written is
`BadInput` where the path itself is at fault and `Failed` where the disk gave out.
Nothing here reads or writes pickle.
"""

import errno
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput, Damaged, Failed

if TYPE_CHECKING:
    import numpy
    import torch

MANIFEST = "manifest.json"
ASIDE = "set-aside"

_LOCK = ".lock"
_LARGEST_JSON = 256 * 2**20
_TEMPORARY = re.compile(r"\.(tmp|old)-([0-9a-f]{8})-(\d+)-(\d+)-(\d+)-(.+)", re.DOTALL)
_REPLACED = re.compile(r".+\.replaced-\d+", re.DOTALL)
_PATH_AT_FAULT = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
_DISK_AT_FAULT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})

_count = itertools.count()
_active: set[str] = set()  # temporary names this process is using now
_held: set[int] = set()  # descriptors of the locks this process holds


# Folders


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Fill the folder that this yields; on a clean exit it becomes `folder`, whole, in one step.

    An old `folder` is replaced, and stays as it was if anything goes wrong. Files in it that no
    manifest of ours lists are never deleted: such a folder is kept as `<name>.replaced-1`.
    Two processes that write one folder at the same time need a `lock`.
    """
    folder = _place(folder)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise BadInput(f"{folder} is a file; choose another name for the folder.")
    with _told(folder):
        _make(folder.parent)
    for leftover in _leftovers(folder.parent, folder.name):
        _tidy(leftover)
    with _temporary(folder) as temporary:
        with _told(folder, temporary, only=_DISK_AT_FAULT):
            yield temporary
        with _told(folder, temporary):
            _close(temporary)
            _install(temporary, folder)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of `folder` against its manifest, which is returned.

    A missing, changed, resized, swapped or added file raises `Damaged` and is named; so does a
    link or a path that leads out of the folder. Hidden files that the manifest does not list are
    passed over, and so is any unlisted file of a folder that was only `seal`ed.
    """
    folder = Path(os.path.abspath(folder))
    if not os.path.lexists(folder):
        for leftover in _leftovers(folder.parent, folder.name):
            _tidy(leftover)
    manifest = _glance(folder)
    for name, entry in manifest["files"].items():
        if digest(folder / name) != entry["sha256"]:
            raise Damaged(f"{folder / name} is not what was written: its SHA-256 differs.")
    return manifest


def is_whole(folder: Path) -> bool:
    """Whether `verify` accepts the folder."""
    try:
        verify(folder)
    except Damaged:
        return False
    return True


def check(path: Path) -> None:
    """Check one file against the manifest beside it; without one, or unlisted, it is let pass."""
    path = Path(os.path.abspath(path))
    if not os.path.lexists(path.parent / MANIFEST):
        return
    entry = _entries(path.parent).get(path.name)
    if entry is not None and digest(path) != entry["sha256"]:
        raise Damaged(f"{path} is not what was written: its SHA-256 differs.")


def listed(folder: Path) -> list[str]:
    """The names that the manifest of a folder lists, whether or not they are there."""
    return sorted(_entries(Path(os.path.abspath(folder))))


def seal(folder: Path, names: Sequence[str]) -> None:
    """Write a manifest over these files of a folder that also holds others."""
    folder = Path(os.path.abspath(folder))
    for name in names:
        _check_name(folder, name)
        if not stat.S_ISREG(_mode(folder / name)):
            raise BadInput(f"{folder / name} is not a plain file, so it cannot be sealed.")
    with _told(folder):
        text = _manifest(folder, names, closed=False)
    write_text(folder / MANIFEST, text)


def newest(parent: Path, prefix: str) -> tuple[Path | None, list[Path]]:
    """The newest whole folder called `prefix...`, and the broken newer ones that were skipped.

    Newest is last by name, numbers taken as numbers: `step-10` comes after `step-9`.
    """
    _restore(parent)
    broken: list[Path] = []
    for folder in _candidates(parent, prefix):
        if is_whole(folder):
            return folder, broken
        broken.append(folder)
    return None, broken


def prune(parent: Path, prefix: str, keep: int) -> list[Path]:
    """Remove the folders called `prefix...` that are older than the newest `keep`; return them.

    Folders whose manifest or sizes are wrong do not count among the kept, nothing at all is
    removed unless at least one that stays passes `verify`, and a folder is left alone when it
    holds files that its manifest does not list.
    """
    if keep < 1:
        raise BadInput(
            f"keep must be at least 1, not {keep}: the last checkpoint is never removed."
        )
    kept: list[Path] = []
    old: list[Path] = []
    for folder in _candidates(parent, prefix):
        if len(kept) >= keep:
            old += [folder] if _ours(folder) else []
        elif _looks_whole(folder):
            kept.append(folder)
    if not old or not any(is_whole(folder) for folder in kept):
        return []
    for folder in old:
        _discard(folder)
    return [folder for folder in old if not os.path.lexists(folder)]


def leftovers(parent: Path) -> list[Path]:
    """What dead writers left in `parent`, for `sweep` to clear."""
    return list(_leftovers(Path(os.path.abspath(parent))))


def sweep(parent: Path) -> list[Path]:
    """Clear what dead writers left in `parent`: temporaries go, a folder set aside comes back.

    A live writer's files are left alone. So are those of another machine, until a day has passed.
    """
    found = leftovers(parent)
    for leftover in found:
        _tidy(leftover)
    return [leftover for leftover in found if not os.path.lexists(leftover)]


def set_aside(path: Path, root: Path) -> Path:
    """Move a file or a folder below `root` out of the way, into `root/set-aside`; where it is now.

    What stands there already under its name is left alone: the new one gets a number.
    """
    path, root = Path(os.path.abspath(path)), Path(os.path.abspath(root))
    wanted = root / ASIDE / path.relative_to(root)
    with _told(wanted):
        _make(wanted.parent)
        names = itertools.chain([wanted.name], (f"{wanted.name}.{n}" for n in itertools.count(1)))
        place = next(one for one in map(wanted.with_name, names) if not os.path.lexists(one))
        os.replace(path, place)
        _sync(place.parent)
        _sync(path.parent)
    return place


@contextmanager
def lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold `folder` for this process; a second one gets `BadInput` that names the holder.

    With `wait` it gets the folder when the first has let go of it.
    The kernel drops the lock when its holder dies, however it dies, so a stale one never blocks.
    Forked workers do not inherit it.
    """
    folder = Path(os.path.abspath(folder))
    path = folder / _LOCK
    with _told(path):
        _make(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
            raise BadInput(
                f"{folder} is in use by {holder or 'another process'}; "
                "wait for it to end, or choose another folder."
            ) from None
        except OSError as error:
            raise BadInput(
                f"{folder} is on a file system that cannot lock files ({error.strerror}); "
                "choose a folder on another one."
            ) from error
        with _told(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a forked child, which has let go of it
            _held.discard(descriptor)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def holder(folder: Path) -> tuple[str, bool]:
    """Who the lock of a folder names, "" for nobody, and whether they still hold it.

    A name that holds nothing was left by a process that did not live to take it back.
    """
    path = Path(os.path.abspath(folder)) / _LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return "", False
    try:
        name = os.read(descriptor, 200).decode("utf-8", "replace").strip()
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return name, True
    except OSError:
        return "", False
    finally:
        os.close(descriptor)
    return name, False


def _let_go() -> None:
    """In a forked child: close the parent's locks, or an orphan would keep them for a dead run."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


# Single files


@contextmanager
def replacing(path: Path, size: int = 0) -> Iterator[Path]:
    """Write one file at the path that this yields; on a clean exit it becomes `path` in one step.

    It is flushed to the disk, unless it lies in a folder that `writing` will flush as a whole.
    `size` is how many bytes are coming, where that is known, for the sentence of a full disk.
    """
    path = _place(path)
    if os.path.isdir(path):
        raise BadInput(f"{path} is a folder; choose another name for the file.")
    with _told(path):
        _make(path.parent)
    with _temporary(path) as temporary:
        with _told(path, temporary, size, only=_DISK_AT_FAULT):
            yield temporary / path.name
        with _told(path, temporary, size):
            if not _unfinished(path):
                _sync(temporary / path.name)
            os.replace(temporary / path.name, path)
            if not _unfinished(path):
                _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(f"the text for {path} is not valid Unicode: {error}.") from error
    with replacing(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all; NaN and infinity are not JSON and are refused."""
    write_text(path, _as_json(path, value))


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a table as one JSON file that holds its own SHA-256, for `read_sealed`."""
    mark = hashlib.sha256(_as_json(path, dict(value)).encode()).hexdigest()
    write_json(path, {**value, "sha256": mark})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote; a byte more, less or other than that is `Damaged`."""
    value = read_json(path)
    mark = value.pop("sha256", None) if isinstance(value, dict) else None
    if mark is None:
        raise Damaged(f"{path} holds no SHA-256 of itself, as overt now writes it; make it again.")
    whole = _as_json(path, {**value, "sha256": mark}).encode()
    if mark != hashlib.sha256(_as_json(path, value).encode()).hexdigest() or whole != _read(
        path, _LARGEST_JSON
    ):
        raise Damaged(f"{path} is not what was written: its SHA-256 differs.")
    return dict(value)


def _as_json(path: Path, value: Any) -> str:
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the value for {path} is not JSON: {error}.") from error


def read_json(path: Path) -> Any:
    """Read one JSON file strictly: no repeated key, NaN, infinity, or nesting beyond reason."""
    try:
        return json.loads(
            _read(path, _LARGEST_JSON).decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_not_json,
            parse_float=_finite,
        )
    except (ValueError, RecursionError, MemoryError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Damaged(f"{path} is not valid JSON: {what}.") from error


def write_tensors(
    path: Path,
    tensors: Mapping[str, "torch.Tensor"],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as safetensors; the same tensors and metadata always give the same bytes.

    Tensors that share memory, such as tied weights, are written once for each name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    # one key: safetensors writes several in an order that changes from run to run
    about = {"json": json.dumps(dict(metadata), sort_keys=True)} if metadata else None
    with replacing(path, sum(tensor.nbytes for tensor in plain.values())) as temporary:
        try:
            save_file(plain, temporary, metadata=about)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        except (KeyError, ValueError) as error:
            raise BadInput(f"the tensors for {path} cannot be written: {error}.") from error
        temporary.chmod(_mode(temporary.parent) & 0o666)  # safetensors makes it the owner's alone


def read_tensors(path: Path) -> dict[str, "torch.Tensor"]:
    """Read a safetensors file onto the CPU."""
    from safetensors.torch import load_file

    with _format(path, "safetensors"):
        return load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata that `write_tensors` put beside the tensors."""
    from safetensors import safe_open

    with _format(path, "safetensors"), safe_open(path, framework="pt") as file:
        about = (file.metadata() or {}).get("json", "{}")
        value = json.loads(about)
        if not isinstance(value, dict):
            raise ValueError("its metadata is not a table")
        return value


def write_arrays(path: Path, arrays: Mapping[str, "numpy.ndarray"]) -> None:
    """Write arrays as an uncompressed .npz; the same arrays always give the same bytes."""
    import zipfile

    import numpy

    with (
        replacing(path, sum(array.nbytes for array in arrays.values())) as temporary,
        zipfile.ZipFile(temporary, "w", allowZip64=True) as archive,
    ):
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise BadInput(f"array {name!r} for {path} holds Python objects, not numbers.")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                numpy.lib.format.write_array(member, numpy.asanyarray(array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, "numpy.ndarray"]:
    """Read the arrays of an uncompressed .npz file; one that would need pickle is refused."""
    import zipfile

    import numpy

    arrays: dict[str, numpy.ndarray] = {}
    with _format(path, ".npz"), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in arrays or name == info.filename:
                raise ValueError(f"{info.filename!r} is repeated or not an array")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename!r} is compressed, and could unpack without end")
            with archive.open(info) as member:
                arrays[name] = numpy.lib.format.read_array(member, allow_pickle=False)
                if member.read(1):
                    raise ValueError(f"{info.filename!r} is longer than its header says")
    return arrays


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read a piece at a time."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Manifests


def _manifest(folder: Path, names: Sequence[str], *, closed: bool) -> str:
    """Flush these files to the disk and describe them."""
    files = {}
    for name in sorted(names):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            mark = hashlib.file_digest(file, "sha256").hexdigest()
            files[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": mark}
    return _render({"format": 1, "closed": closed, "files": files})


def _render(body: Mapping[str, Any]) -> str:
    """The manifest's text, with a sum of its own, so that no byte of it can change unseen."""
    body = {key: value for key, value in body.items() if key != "seal"}
    mark = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "seal": mark}, indent=1, sort_keys=True) + "\n"


def _close(folder: Path) -> None:
    """Flush all files and folders of `folder`, and write the manifest as the last of them."""
    found = _scan(folder)
    for name, about in found.items():
        if name == MANIFEST or not stat.S_ISREG(about.st_mode):
            raise BadInput(f"{name} cannot be part of an artefact: it must be another plain file.")
    text = _manifest(folder, list(found), closed=True)
    with open(folder / MANIFEST, "xb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    for below, _, _ in os.walk(folder, topdown=False):
        _sync(Path(below))


def _scan(folder: Path) -> dict[str, os.stat_result]:
    """Everything below `folder` that is not itself a folder; links are not followed."""
    found: dict[str, os.stat_result] = {}
    todo = [""]
    while todo:
        under = todo.pop()
        with os.scandir(folder / under) as entries:
            for entry in entries:
                name = f"{under}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    todo.append(f"{name}/")
                else:
                    found[name] = entry.stat(follow_symlinks=False)
    return found


def _glance(folder: Path) -> dict[str, Any]:
    """Check everything but the contents: the manifest itself, names, kinds and sizes of files."""
    if not os.path.isdir(folder):
        raise Damaged(f"{folder} is missing, or is not a folder.")
    try:
        found = _scan(folder)
    except OSError as error:
        raise Damaged(f"{folder} cannot be read: {error.strerror}.") from error
    manifest = _read_manifest(folder, found)
    for name, entry in manifest["files"].items():
        if name not in found:
            raise Damaged(f"{folder / name} is missing.")
        if not stat.S_ISREG(found[name].st_mode):
            raise Damaged(f"{folder / name} is a link or a device, not a plain file.")
        size = found[name].st_size
        if size != entry["size"]:
            raise Damaged(f"{folder / name} has {size} bytes; {entry['size']} were written.")
    if manifest["closed"]:
        for name in sorted(found.keys() - manifest["files"].keys() - {MANIFEST}):
            if not any(part.startswith(".") for part in name.split("/")):
                raise Damaged(f"{folder / name} was not there when the folder was written.")
    return manifest


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifest of a folder says of each file, by name; the files are not looked at."""
    path = folder / MANIFEST
    found = {MANIFEST: os.lstat(path)} if os.path.lexists(path) else {}
    return dict(_read_manifest(folder, found)["files"])


def _read_manifest(folder: Path, found: Mapping[str, os.stat_result]) -> dict[str, Any]:
    path = folder / MANIFEST
    if MANIFEST not in found or not stat.S_ISREG(found[MANIFEST].st_mode):
        raise Damaged(f"{path} is missing: the folder was not finished, or is not one of ours.")
    manifest = read_json(path)
    wrong = Damaged(f"{path} is not what was written.")
    if not isinstance(manifest, dict) or _render(manifest).encode() != _read(path, _LARGEST_JSON):
        raise wrong
    if manifest.get("format") != 1:
        raise Damaged(f"{path} is of a format this version does not know; use a newer one.")
    files = manifest.get("files")
    if not isinstance(files, dict) or not isinstance(manifest.get("closed"), bool):
        raise wrong
    for name, entry in files.items():
        try:
            _check_name(folder, name)
        except BadInput as error:
            raise Damaged(f"{path} lists a file out of bounds: {error}") from error
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise wrong
    return manifest


def _check_name(folder: Path, name: str) -> None:
    """Refuse a name that could lead out of its folder."""
    plain = PurePosixPath(name)
    inside = bool(name) and not plain.is_absolute() and str(plain) == name and "\0" not in name
    if not inside or name in (".", MANIFEST) or ".." in plain.parts:
        raise BadInput(f"{name!r} is not a plain name below {folder}.")


def _looks_whole(folder: Path) -> bool:
    try:
        _glance(folder)
    except Damaged:
        return False
    return True


# Temporary names, and who they belong to


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A fresh folder beside `path`, gone at the end unless it was renamed."""
    temporary = _beside(path, "tmp")
    pid = os.getpid()
    _active.add(temporary.name)
    try:
        with _told(path):
            temporary.mkdir()
        yield temporary
    finally:
        if os.getpid() == pid:  # not in a forked child that unwinds its copy of our stack
            shutil.rmtree(temporary, ignore_errors=True)
            _active.discard(temporary.name)


def _install(temporary: Path, folder: Path) -> None:
    """Rename a finished folder into place; on an error the old one is put back first."""
    aside = _beside(folder, "old")
    _active.add(aside.name)
    had = os.path.lexists(folder)
    try:
        try:
            if had:
                os.replace(folder, aside)
            os.replace(temporary, folder)
            _sync(folder.parent)
        except BaseException:
            if os.path.lexists(folder) and not os.path.lexists(temporary):
                os.replace(folder, temporary)
            if os.path.lexists(aside):
                os.replace(aside, folder)
            raise
        if had:
            _dismiss(aside, folder)
    finally:
        _active.discard(aside.name)


def _dismiss(aside: Path, folder: Path) -> None:
    """Delete a replaced folder, or keep it under a visible name where it holds files not ours."""
    if _ours(aside):
        _discard(aside, folder.name)
        return
    for number in itertools.count(1):
        kept = folder.with_name(f"{folder.name}.replaced-{number}")
        if not os.path.lexists(kept):
            with suppress(OSError):
                os.replace(aside, kept)
            return


def _ours(folder: Path) -> bool:
    """Whether a folder may be deleted: it holds nothing but what its manifest lists."""
    try:
        found = _scan(folder)
        listed = _read_manifest(folder, found)["files"] if found else {}
    except (Damaged, OSError):
        return False
    return found.keys() <= {MANIFEST, _LOCK, *listed}


def _discard(path: Path, name: str = "") -> None:
    """Delete a folder; renamed first, so that a crash half-way leaves nothing that looks broken."""
    doomed = _beside(path.with_name(name or path.name), "tmp")
    with suppress(OSError):
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _beside(path: Path, kind: str) -> Path:
    """A new name in the same folder that says whose it is: machine, process, start of process."""
    pid = os.getpid()
    return path.with_name(
        f".{kind}-{_machine()}-{pid}-{_started(pid) or 0}-{next(_count)}-{path.name}"
    )


def _machine() -> str:
    """Eight letters for this machine and, in a container, this container."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks; 0 where the system does not say; None: not running."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return None if fields[0] in "ZX" else int(fields[19])


def _leftovers(parent: Path, name: str = "") -> Iterator[Path]:
    """The temporaries of writers that are no more, of one name or of all."""
    try:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith("."))
    except (OSError, ValueError):
        return
    for hidden in names:
        match = _TEMPORARY.fullmatch(hidden)
        if match and name in ("", match[6]) and not _alive(parent / hidden, match):
            yield parent / hidden


def _alive(path: Path, match: re.Match[str]) -> bool:
    """Whether the process that made this temporary may still be at work on it."""
    kind, machine, pid, start = match[1], match[2], int(match[3]), int(match[4])
    if machine != _machine():  # its processes cannot be seen from here: go by age
        with suppress(OSError):
            return time.time() - os.lstat(path).st_ctime < (60 if kind == "old" else 86400)
        return True
    if pid == os.getpid():
        return path.name in _active
    began = _started(pid)
    return began is not None and (began == start or 0 in (began, start))


def _tidy(leftover: Path) -> None:
    """Remove a dead writer's temporary, or put back the folder that it had set aside."""
    match = _TEMPORARY.fullmatch(leftover.name)
    assert match
    place = leftover.with_name(match[6])
    with suppress(OSError):
        if match[1] == "old" and not os.path.lexists(place):
            os.replace(leftover, place)
            _sync(place.parent)
        elif match[1] == "old":
            if is_whole(place):
                _dismiss(leftover, place)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _restore(parent: Path) -> None:
    """Put back the folders that dead writers had set aside."""
    for leftover in _leftovers(Path(os.path.abspath(parent))):
        if leftover.name.startswith(".old-"):
            _tidy(leftover)


def _candidates(parent: Path, prefix: str) -> list[Path]:
    """The folders called `prefix...`, the newest first; links and temporaries left out."""
    try:
        with os.scandir(parent) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise BadInput(f"{parent} cannot be listed: {error}.") from error
    names = [name for name in names if not _TEMPORARY.fullmatch(name)]
    names = [name for name in names if not _REPLACED.fullmatch(name)]
    return [Path(parent, name) for name in sorted(names, key=_natural, reverse=True)]


def _natural(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if part[:1].isdecimal() else part for part in parts], name


# The system's errors, in sentences


@contextmanager
def _told(
    path: Path, temporary: Path | None = None, size: int = 0, only: frozenset[int] = frozenset()
) -> Iterator[None]:
    """Turn the system's refusal to write `path` into a sentence with the path and the bytes.

    Around code that is not ours, `only` the errors that surely come from writing are turned.
    """
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        raise _sentence(error, path, max(size, _weight(temporary))) from error


def _sentence(error: OSError, path: Path, size: int) -> BadInput | Failed:
    why = error.strerror or str(error)
    path = Path(*(_TEMPORARY.sub(r"\6", part) for part in path.parts))  # where it was to end up
    if error.errno in _PATH_AT_FAULT:
        return BadInput(f"{path} cannot be written ({size} bytes): {why}; choose another folder.")
    there = next((one for one in path.parents if os.path.isdir(one)), path)
    try:
        free = f"{shutil.disk_usage(there).free} bytes are free there"
    except OSError:
        free = "the free space there is not known"
    return Failed(
        f"could not write {path} ({size} bytes): {why}; {free}. "
        "What was there before is untouched; make room and try again."
    )


def _weight(folder: Path | None) -> int:
    """How many bytes are below a folder, as far as can be seen."""
    total = 0
    if folder is not None:
        with suppress(OSError):
            total = sum(os.lstat(folder / name).st_size for name in _scan(folder))
    return total


def _place(path: Path) -> Path:
    """The full path of something to be written, if anything may be written there at all."""
    if "\0" in str(path):
        raise BadInput(f"{str(path)!r} holds a NUL character and cannot be a path.")
    path = Path(os.path.abspath(path))
    if not path.name:
        raise BadInput(f"{path} is the root of the file system; choose a folder below it.")
    if os.path.islink(path):
        raise BadInput(f"{path} is a symbolic link, which is never written through or replaced.")
    return path


def _make(folder: Path) -> None:
    """Make a folder and its parents, each flushed to the disk."""
    if not os.path.isdir(folder):
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        if not _unfinished(folder):
            _sync(folder.parent)


def _unfinished(path: Path) -> bool:
    """Whether this lies in a folder that is still being filled: all of it is flushed at the end."""
    return any(name in _active for name in path.parts[:-1])


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise  # some network file systems cannot flush a folder
    finally:
        os.close(descriptor)


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _read(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit` of them."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise Damaged(f"{path} has {size} bytes; at most {limit} are read.")
        return file.read(limit)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """A plain file to read; whatever else stands there, or goes wrong, is `Damaged`."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Damaged(f"{path} is not a plain file.")
            yield file
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}.") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for a writer for ever


@contextmanager
def _format(path: Path, kind: str) -> Iterator[None]:
    """Whatever a reader of this format raises means one thing: the file is damaged."""
    with _opened(path):
        pass
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic inside safetensors is no Exception
        raise Damaged(f"{path} is not a whole {kind} file: {error}.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is repeated")
    return table


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of range")
    return value
