"""Atomic reads and writes of folders and files, with checksums.

A folder is filled under a temporary name in the same parent. Every file is flushed to disk, a
manifest of sizes and SHA-256 digests is written last, and then the folder is renamed into place. A
crash at any time leaves the old folder, the new one, or an old one under a temporary name, which
`newest`, `verify` and `remove_stale_temporaries` restore. Readers check every byte against the
manifest, because safetensors and NumPy files have no checksum of their own.

Read errors are `CorruptFileError` if the file is provably damaged, and `RunError` if the machine
lacked a resource (memory, file descriptors, a responding disk). Write errors are `UserError` if the
path is invalid, and `RunError` if the disk failed. Nothing here reads or writes pickle.
"""

import errno
import hashlib
import io
import itertools
import json
import math
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

from overt import system
from overt.errors import CorruptFileError, RunError, UserError, missing_resource

if TYPE_CHECKING:
    import zipfile

    import numpy
    import torch

MANIFEST = "manifest.json"
SET_ASIDE = "set-aside"

_LOCK = ".lock"
_LARGEST_JSON = 256 * 2**20
_MOST_WITHOUT_BYTES = 2**24  # elements of an array that has no data in its file
_TEMPORARY = re.compile(r"\.(tmp|old)-([0-9a-f]{8})-(\d+)-(\d+)-(\d+)-(?!\.{1,2}$)(.+)", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # in a JSON string; most come in pairs
_REPLACED = re.compile(r".+\.replaced-\d+", re.DOTALL)
_PATH_ERRNOS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})

_count = itertools.count()
_active: set[str] = set()  # temporary names this process is using now
_held_locks: set[int] = set()  # descriptors of the locks this process holds


# Folders


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename it to `folder` on success.

    An existing `folder` is replaced on success and unchanged on an error. If it contains files that
    its manifest does not list, it is kept as `<name>.replaced-1` instead of being deleted. Two
    processes that write the same folder at the same time need a `lock`.

    Args:
        folder: The folder to write.

    Yields:
        The path of the temporary folder.

    Raises:
        UserError: `folder` is a file, a link or not writable.
        RunError: The disk is full or failed.
    """
    folder = _writable_path(folder)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder} is a file; choose another name for the folder.")
    with _convert_write_errors(folder):
        _make_folders(folder.parent)
    for leftover in _find_stale(folder.parent, folder.name):
        _clean_up(leftover)
    with _temporary(folder) as temporary:
        # errors of the caller's own code pass unchanged, unless they are certainly about this disk
        with _convert_write_errors(folder, temporary, only=_DISK_ERRNOS):
            yield temporary
        with _convert_write_errors(folder, temporary):
            # first everything durable under the temporary name, then one rename
            _finish_folder(temporary)
            _install(temporary, folder)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of `folder` against its manifest.

    Hidden files that the manifest does not list are ignored. So is every unlisted file if the
    manifest was written by `write_manifest`.

    Returns:
        The manifest.

    Raises:
        CorruptFileError: A file is missing, changed, resized, swapped or added, or is a link or a
            path that leads out of the folder.
        RunError: A file could not be read because the machine lacked a resource.
    """
    folder = Path(os.path.abspath(folder))
    if not os.path.lexists(folder):
        for leftover in _find_stale(folder.parent, folder.name):
            _clean_up(leftover)
    manifest = _check_listing(folder)
    for name, entry in manifest["files"].items():
        # sizes were compared before: hashing is the expensive part
        if digest(folder / name) != entry["sha256"]:
            raise CorruptFileError(
                f"{folder / name} was changed after it was written: its SHA-256 differs."
            )
    return manifest


def is_intact(folder: Path) -> bool:
    """Return whether `verify` accepts the folder.

    Raises:
        RunError: The folder could not be read because the machine lacked a resource.
    """
    try:
        verify(folder)
    except CorruptFileError:
        return False
    return True


def verify_file(path: Path) -> None:
    """Check one file against the manifest of its folder; unlisted files are accepted.

    Raises:
        CorruptFileError: The SHA-256 of the file differs from the manifest.
    """
    path = Path(os.path.abspath(path))
    if _lstat(path.parent / MANIFEST) is None:
        return
    entry = _entries(path.parent).get(path.name)
    if entry is not None and digest(path) != entry["sha256"]:
        raise CorruptFileError(f"{path} was changed after it was written: its SHA-256 differs.")


def manifest_names(folder: Path) -> list[str]:
    """Return the file names in the manifest of a folder, whether or not the files exist."""
    return sorted(_entries(Path(os.path.abspath(folder))))


def write_manifest(folder: Path, names: Sequence[str]) -> None:
    """Write a manifest of some files of a folder that also contains other files."""
    folder = Path(os.path.abspath(folder))
    for name in names:
        _check_name(folder, name)
        if not stat.S_ISREG(_mode(folder / name)):
            raise UserError(
                f"{folder / name} is not a regular file, so it cannot be added to the manifest."
            )
    with _convert_write_errors(folder):
        text = _manifest(folder, names, closed=False)
    write_text(folder / MANIFEST, text)


def newest(parent: Path, prefix: str) -> tuple[Path | None, list[Path]]:
    """Find the newest intact folder whose name starts with `prefix`.

    Newest means last by name, in natural order: `step-10` comes after `step-9`.

    Returns:
        The newest intact folder (None if there is none), and the newer damaged folders.

    Raises:
        RunError: A folder could not be read because the machine lacked a resource.
    """
    _restore(parent)
    broken: list[Path] = []
    for folder in _candidates(parent, prefix):
        if is_intact(folder):
            return folder, broken
        broken.append(folder)
    return None, broken


def prune(parent: Path, prefix: str, keep: int) -> list[Path]:
    """Remove all but the newest `keep` folders whose names start with `prefix`.

    Folders with a wrong manifest or wrong sizes do not count towards `keep`. Nothing is removed
    unless one of the kept folders passes `verify`, or if a folder cannot be read. A folder that
    contains files not listed in its manifest is not removed.

    Returns:
        The removed folders.
    """
    if keep < 1:
        raise UserError(
            f"keep must be at least 1, got {keep}: the last checkpoint is never removed."
        )
    try:
        # a disk that cannot be read now may be readable later: remove nothing
        old = _prunable(parent, prefix, keep)
    except RunError:
        return []
    for folder in old:
        _discard(folder)
    return [folder for folder in old if not os.path.lexists(folder)]


def _prunable(parent: Path, prefix: str, keep: int) -> list[Path]:
    """List the folders that `prune` may remove: none unless one of the kept folders is intact."""
    kept: list[Path] = []
    old: list[Path] = []
    for folder in _candidates(parent, prefix):
        if len(kept) >= keep:
            old += [folder] if _is_removable(folder) else []
        # sizes only: hashing every old checkpoint after each save would take too long
        elif _looks_intact(folder):
            kept.append(folder)
    return old if old and any(is_intact(folder) for folder in kept) else []


def stale_temporaries(parent: Path) -> list[Path]:
    """List the temporary folders that dead processes left in `parent`."""
    return list(_find_stale(Path(os.path.abspath(parent))))


def remove_stale_temporaries(parent: Path) -> list[Path]:
    """Remove temporaries of dead processes in `parent`, and restore folders that they had replaced.

    Temporaries of live processes are kept, and those of other machines for a day.

    Returns:
        The temporaries that are gone.
    """
    found = stale_temporaries(parent)
    for leftover in found:
        _clean_up(leftover)
    return [leftover for leftover in found if not os.path.lexists(leftover)]


def set_aside(path: Path, root: Path) -> Path:
    """Move a file or folder below `root` to the same place below `root/set-aside`.

    A number is appended if the name is taken there.

    Returns:
        The new path.
    """
    path, root = Path(os.path.abspath(path)), Path(os.path.abspath(root))
    wanted = root / SET_ASIDE / path.relative_to(root)
    with _convert_write_errors(wanted):
        _make_folders(wanted.parent)
        # an earlier file of that name must not be overwritten
        names = itertools.chain([wanted.name], (f"{wanted.name}.{n}" for n in itertools.count(1)))
        place = next(one for one in map(wanted.with_name, names) if not os.path.lexists(one))
        os.replace(path, place)
        system.flush_to_disk(place.parent)
        system.flush_to_disk(path.parent)
    return place


@contextmanager
def lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock `folder` for this process.

    The kernel releases the lock when its process ends, so a stale lock never blocks. Forked
    workers do not inherit it.

    Args:
        folder: The folder to lock; created if missing.
        wait: Wait until the lock is free instead of raising.

    Raises:
        UserError: Another process holds the lock (the message names it), or the file system does
            not support locks.
    """
    folder = Path(os.path.abspath(folder))
    path = folder / _LOCK
    with _convert_write_errors(path):
        _make_folders(folder)
        descriptor = system.open_lock_file(path)
    try:
        try:
            system.lock_descriptor(descriptor, wait)
        except BlockingIOError:
            # the lock file names its holder, for this message
            holder = system.read_text_of(descriptor, 200).strip()
            raise UserError(
                f"{folder} is in use by {holder or 'another process'}; "
                "wait for it to end, or choose another folder."
            ) from None
        except OSError as error:
            raise UserError(
                f"{folder} is on a file system that cannot lock files ({error.strerror}); "
                "choose a folder on another one."
            ) from error
        with _convert_write_errors(path):
            name = f"process {os.getpid()} on {socket.gethostname()}\n"
            system.replace_text_of(descriptor, name)
    except BaseException:
        os.close(descriptor)
        raise
    _held_locks.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held_locks:  # not in a forked child, which has closed it
            _held_locks.discard(descriptor)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def lock_holder(folder: Path) -> tuple[str, bool]:
    """Return the process named in the lock of a folder ("" for none), and whether it holds it.

    A name without a held lock was left by a process that was killed.
    """
    path = Path(os.path.abspath(folder)) / _LOCK
    try:
        descriptor = system.open_existing_lock_file(path)
    except OSError:
        return "", False
    try:
        name = system.read_text_of(descriptor, 200).strip()
        return name, system.is_locked(descriptor)
    except OSError:
        return "", False
    finally:
        os.close(descriptor)


def _release_inherited_locks() -> None:
    """Close the locks of the parent in a forked child, which could outlive the parent."""
    for descriptor in _held_locks:
        with suppress(OSError):
            os.close(descriptor)
    _held_locks.clear()


# a lock belongs to the open file, which a fork shares: the child must close its copy
system.call_in_forked_child(_release_inherited_locks)


# Single files


@contextmanager
def atomic_file(path: Path, size: int = 0) -> Iterator[Path]:
    """Yield a temporary path to write, and rename it to `path` on success.

    The file is flushed to disk, unless it is inside a folder that `atomic_folder` will flush.

    Args:
        path: The file to write.
        size: The expected number of bytes, if known, for the message of a full disk.

    Yields:
        The temporary path.
    """
    path = _writable_path(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; choose another name for the file.")
    with _convert_write_errors(path):
        _make_folders(path.parent)
    with _temporary(path) as temporary:
        with _convert_write_errors(path, temporary, size, only=_DISK_ERRNOS):
            yield temporary / path.name
        with _convert_write_errors(path, temporary, size):
            if not _is_in_active_folder(path):
                system.flush_to_disk(temporary / path.name)
            os.replace(temporary / path.name, path)
            if not _is_in_active_folder(path):
                system.flush_to_disk(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"the text for {path} is not valid Unicode: {error}.") from error
    with atomic_file(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON atomically; NaN and infinity raise `UserError`.

    Args:
        path: The file.
        value: Anything that JSON can represent.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / "a.json", {"epochs": 3})
        ...     read_json(Path(folder) / "a.json")
        {'epochs': 3}
    """
    write_text(path, _as_json(path, value))


def write_checksummed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping as a JSON file that contains its own SHA-256, for `read_checksummed_json`."""
    # the digest is of the value without itself
    mark = hashlib.sha256(_as_json(path, dict(value)).encode()).hexdigest()
    write_json(path, {**value, "sha256": mark})


def read_checksummed_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_checksummed_json`.

    Raises:
        CorruptFileError: Any byte differs from the written file.
    """
    value = read_json(path)
    mark = value.pop("sha256", None) if isinstance(value, dict) else None
    if mark is None:
        raise CorruptFileError(
            f"{path} has no 'sha256' entry, which this version writes; create the file again."
        )
    whole = _as_json(path, {**value, "sha256": mark}).encode()
    # both: the value must match its digest, and the file must be exactly what would be written
    if mark != hashlib.sha256(_as_json(path, value).encode()).hexdigest() or whole != _read(
        path, _LARGEST_JSON
    ):
        raise CorruptFileError(f"{path} was changed after it was written: its SHA-256 differs.")
    return dict(value)


def _as_json(path: Path, value: Any) -> str:
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (ValueError, RecursionError) as error:
        raise UserError(f"the value for {path} is not JSON: {error}.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file strictly.

    Raises:
        CorruptFileError: The file is not valid JSON, repeats a key, has NaN or infinity, or is
            nested too deeply.
    """
    return parse_json(_read(path, _LARGEST_JSON), path)


def parse_json(raw: bytes, path: Path) -> Any:
    """Parse JSON strictly; `path` names its origin in errors.

    Raises:
        CorruptFileError: The bytes are not valid JSON, repeat a key, have NaN, infinity or half of
            a surrogate pair, or are nested too deeply.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_reject_constant,
            parse_float=_finite,
        )
        if _SURROGATE.search(raw):  # half a character can be neither written nor sent
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptFileError(f"{path} is not valid JSON: {what}.") from error
    except MemoryError as error:
        raise read_error(path, "is not valid JSON", error) from error


def write_tensors(
    path: Path,
    tensors: Mapping[str, "torch.Tensor"],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a safetensors file; equal tensors and metadata give equal bytes.

    Tensors that share memory, such as tied weights, are written once per name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors rejects tensors with common storage: all but the first are copied
        memory = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    # one key: safetensors writes several keys in an order that varies between runs
    about = {"json": json.dumps(dict(metadata), sort_keys=True)} if metadata else None
    with atomic_file(path, sum(tensor.nbytes for tensor in plain.values())) as temporary:
        try:
            save_file(plain, temporary, metadata=about)
        except SafetensorError as error:
            # safetensors (Rust) reports a full disk as text: recover the error number
            number = re.search(r"(?:os error |Os \{ code: )(\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        except (KeyError, ValueError) as error:
            raise UserError(f"the tensors for {path} cannot be written: {error}.") from error
        temporary.chmod(
            _mode(temporary.parent) & 0o666
        )  # safetensors gives access to the owner only


def read_tensors(path: Path) -> dict[str, "torch.Tensor"]:
    """Read a safetensors file onto the CPU."""
    from safetensors.torch import load_file

    with _check_format(path, "safetensors"):
        # safetensors has no code to run, unlike pickle
        return load_file(path)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor of a safetensors file from its header."""
    from safetensors import safe_open

    with _check_format(path, "safetensors"), safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file of `write_tensors`."""
    from safetensors import safe_open

    with _check_format(path, "safetensors"), safe_open(path, framework="pt") as file:
        about = (file.metadata() or {}).get("json", "{}")
        value = json.loads(about)
        if not isinstance(value, dict):
            raise ValueError("its metadata is not a JSON object")
        return value


def write_arrays(path: Path, arrays: Mapping[str, "numpy.ndarray"]) -> None:
    """Write arrays as an uncompressed .npz file; equal arrays give equal bytes.

    Args:
        path: The file, ending in .npz.
        arrays: NumPy arrays by name, of any numeric dtype.

    Raises:
        UserError: An array contains Python objects.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_arrays(Path(folder) / "a.npz", {"map": np.eye(2)})
        ...     np.load(Path(folder) / "a.npz")["map"].sum().item()
        2.0
    """
    import zipfile

    import numpy

    with (
        atomic_file(path, sum(array.nbytes for array in arrays.values())) as temporary,
        zipfile.ZipFile(temporary, "w", allowZip64=True) as archive,
    ):
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise UserError(
                    f"array {name!r} for {path} contains Python objects; use a numeric dtype."
                )
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                numpy.lib.format.write_array(member, numpy.asanyarray(array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, "numpy.ndarray"]:
    """Read the arrays of an uncompressed .npz file.

    Pickled or compressed members, members that overlap in the file, and arrays whose length differs
    from their header are rejected, so reading never takes more memory than the size of the file.

    Args:
        path: The file.

    Returns:
        The arrays by name.

    Raises:
        CorruptFileError: The file is not such an .npz file.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_arrays(Path(folder) / "a.npz", {"map": np.eye(2)})
        ...     read_arrays(Path(folder) / "a.npz")["map"].shape
        (2, 2)
    """
    import zipfile

    arrays: dict[str, numpy.ndarray] = {}
    with _check_format(path, ".npz"), zipfile.ZipFile(path) as archive:
        check_zip_overlap(archive)
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            # zip files may repeat a name; members without the suffix were not written by NumPy
            if name in arrays or name == info.filename:
                raise ValueError(f"{info.filename!r} is repeated or not an array")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{info.filename!r} is compressed, and its unpacked size is not bounded"
                )
            arrays[name] = _read_array(archive, info)
    return arrays


def check_zip_overlap(archive: "zipfile.ZipFile") -> None:
    """Raise `ValueError` if members of an archive overlap, as in a zip bomb."""
    members = sorted(archive.infolist(), key=lambda one: one.header_offset)
    ends = [*(one.header_offset for one in members), archive.start_dir][1:]
    for member, end in zip(members, ends, strict=True):
        # the local file header has at least 30 bytes and the name
        begins = member.header_offset + 30 + len(member.orig_filename.encode("utf-8", "replace"))
        if member.header_offset < 0 or begins + member.compress_size > end:
            raise ValueError(f"{member.filename!r} overlaps the next member")


def _read_array(archive: "zipfile.ZipFile", info: "zipfile.ZipInfo") -> "numpy.ndarray":
    """Read one array after comparing its header with the size of its data."""
    import numpy
    from numpy.lib import format as npy

    with archive.open(info) as member:
        headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        major = npy.read_magic(member)
        shape, _, dtype = headers.get(major, npy.read_array_header_2_0)(member)
        held = info.file_size - member.tell()
    # the header alone could ask for any amount of memory
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{info.filename!r} has {held} bytes, which differs from its header")
    # Elements of no bytes and empty axes cost nothing here, but any conversion allocates them.
    if not held and math.prod(max(one, 1) for one in shape) > _MOST_WITHOUT_BYTES:
        raise ValueError(f"{info.filename!r} has the shape {shape} without any data")
    with archive.open(info) as member:
        read: numpy.ndarray = npy.read_array(member, allow_pickle=False)
        return read


def digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with _open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Manifests


def _manifest(folder: Path, names: Sequence[str], *, closed: bool) -> str:
    """Flush files to disk and return their manifest."""
    files = {}
    for name in sorted(names):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            mark = hashlib.file_digest(file, "sha256").hexdigest()
            files[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": mark}
    return _manifest_text({"format": 1, "closed": closed, "files": files})


def _manifest_text(body: Mapping[str, Any]) -> str:
    """Return the text of a manifest with its own checksum."""
    # the manifest protects the files, and the seal protects the manifest
    body = {key: value for key, value in body.items() if key != "seal"}
    mark = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "seal": mark}, indent=1, sort_keys=True) + "\n"


def _finish_folder(folder: Path) -> None:
    """Flush all files and folders of `folder`, and write its manifest last."""
    found = _scan(folder)
    for name, about in found.items():
        if name == MANIFEST or not stat.S_ISREG(about.st_mode):
            raise UserError(
                f"{name} cannot be part of the folder: use a regular file with another name."
            )
    _check_letter_case(list(found))
    text = _manifest(folder, list(found), closed=True)
    with open(folder / MANIFEST, "xb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    # a new file is durable only when the entry in its folder is
    for below, _, _ in os.walk(folder, topdown=False):
        system.flush_to_disk(Path(below))


def _check_letter_case(names: Sequence[str]) -> None:
    """Raise if two names differ only in case: many file systems treat them as one file.

    The folder would be damaged when it is copied to macOS or Windows.
    """
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            raise UserError(
                f"{other} and {name} differ in upper and lower case only, which macOS and Windows "
                "do not distinguish; use another name."
            )


def _scan(folder: Path) -> dict[str, os.stat_result]:
    """Return the status of every file below `folder`; links are not followed."""
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


def _check_listing(folder: Path) -> dict[str, Any]:
    """Check the manifest, and the names, types and sizes of files, but not their contents."""
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        found = _scan(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CorruptFileError(f"{folder} is missing, or is not a folder.") from error
    except OSError as error:
        raise read_error(folder, "cannot be read", error) from error
    manifest = _read_manifest(folder, found)
    for name, entry in manifest["files"].items():
        if name not in found:
            raise CorruptFileError(f"{folder / name} is missing.")
        if not stat.S_ISREG(found[name].st_mode):
            raise CorruptFileError(f"{folder / name} is a link or a device, not a regular file.")
        size = found[name].st_size
        if size != entry["size"]:
            raise CorruptFileError(
                f"{folder / name} has {size} bytes; its manifest lists {entry['size']}."
            )
    # a closed manifest lists everything: a foreign file means that the folder was changed
    if manifest["closed"]:
        for name in sorted(found.keys() - manifest["files"].keys() - {MANIFEST}):
            if not any(part.startswith(".") for part in name.split("/")):
                raise CorruptFileError(
                    f"{folder / name} is not listed in the manifest of its folder."
                )
    return manifest


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of a folder by file name, without checking the files."""
    about = _lstat(folder / MANIFEST)
    found = {} if about is None else {MANIFEST: about}
    return dict(_read_manifest(folder, found)["files"])


def _read_manifest(folder: Path, found: Mapping[str, os.stat_result]) -> dict[str, Any]:
    path = folder / MANIFEST
    if MANIFEST not in found or not stat.S_ISREG(found[MANIFEST].st_mode):
        raise CorruptFileError(
            f"{path} is missing: the folder is incomplete or was not written by overt."
        )
    manifest = read_json(path)
    wrong = CorruptFileError(f"{path} was changed after it was written.")
    # byte for byte what this version would write, so the seal is checked too
    if not isinstance(manifest, dict) or _manifest_text(manifest).encode() != _read(
        path, _LARGEST_JSON
    ):
        raise wrong
    if manifest.get("format") != 1:
        raise CorruptFileError(
            f"{path} has an unsupported manifest format; use a newer version of overt."
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not isinstance(manifest.get("closed"), bool):
        raise wrong
    for name, entry in files.items():
        try:
            _check_name(folder, name)
        except UserError as error:
            raise CorruptFileError(f"{path} lists an invalid file name: {error}") from error
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise wrong
    return manifest


def _check_name(folder: Path, name: str) -> None:
    """Raise `UserError` for a name that could lead out of its folder."""
    plain = PurePosixPath(name)
    inside = bool(name) and not plain.is_absolute() and str(plain) == name and "\0" not in name
    if not inside or name in (".", MANIFEST) or ".." in plain.parts:
        raise UserError(f"{name!r} is not a plain name below {folder}.")


def _looks_intact(folder: Path) -> bool:
    try:
        _check_listing(folder)
    except CorruptFileError:
        return False
    return True


# Temporary folders and the processes that own them


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Create a temporary folder next to `path`, and remove it at the end unless it was renamed."""
    temporary = _temporary_path(path, "tmp")
    pid = os.getpid()
    _active.add(temporary.name)
    try:
        with _convert_write_errors(path):
            temporary.mkdir()
        yield temporary
    finally:
        if os.getpid() == pid:  # not in a forked child that unwinds a copy of this stack
            shutil.rmtree(temporary, ignore_errors=True)
            _active.discard(temporary.name)


def _install(temporary: Path, folder: Path) -> None:
    """Rename a finished folder into place; restore the old one on an error."""
    aside = _temporary_path(folder, "old")
    _active.add(aside.name)
    had = os.path.lexists(folder)
    try:
        try:
            # two renames: in between a crash leaves the old folder under its temporary name, which
            # is restored
            if had:
                os.replace(folder, aside)
            os.replace(temporary, folder)
            system.flush_to_disk(folder.parent)
        except BaseException:
            # undo in reverse order
            if os.path.lexists(folder) and not os.path.lexists(temporary):
                os.replace(folder, temporary)
            if os.path.lexists(aside):
                os.replace(aside, folder)
            raise
        if had:
            _remove_replaced(aside, folder)
    finally:
        _active.discard(aside.name)


def _remove_replaced(aside: Path, folder: Path) -> None:
    """Delete a replaced folder, or keep it under a visible name if it contains unlisted files."""
    if _is_removable(aside):
        _discard(aside, folder.name)
        return
    for number in itertools.count(1):
        kept = folder.with_name(f"{folder.name}.replaced-{number}")
        if not os.path.lexists(kept):
            with suppress(OSError):
                os.replace(aside, kept)
            return


def _is_removable(folder: Path) -> bool:
    """Return whether a folder may be deleted: it contains only files that its manifest lists."""
    try:
        found = _scan(folder)
        listed = _read_manifest(folder, found)["files"] if found else {}
    except (CorruptFileError, RunError, OSError):
        return False
    # unlisted files may be a user's own: they are never deleted
    return found.keys() <= {MANIFEST, _LOCK, *listed}


def _discard(path: Path, name: str = "") -> None:
    """Rename a folder and delete it, so that a crash does not leave a damaged folder."""
    doomed = _temporary_path(path.with_name(name or path.name), "tmp")
    with suppress(OSError):
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _temporary_path(path: Path, kind: str) -> Path:
    """Return a new hidden sibling path with the machine, process and process start in its name."""
    pid = os.getpid()
    return path.with_name(
        f".{kind}-{_machine_id()}-{pid}-{system.process_start(pid) or 0}-{next(_count)}-{path.name}"
    )


def _machine_id() -> str:
    """Return an eight-character identifier of this machine and container."""
    name = f"{socket.gethostname()} {system.process_namespace()}"
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _find_stale(parent: Path, name: str = "") -> Iterator[Path]:
    """Yield the temporaries of dead processes, for one name or for all."""
    try:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith("."))
    except (OSError, ValueError):
        return
    for hidden in names:
        match = _TEMPORARY.fullmatch(hidden)
        if match and name in ("", match[6]) and not _is_writer_alive(parent / hidden, match):
            yield parent / hidden


def _is_writer_alive(path: Path, match: re.Match[str]) -> bool:
    """Return whether the process that created this temporary may still use it."""
    kind, machine, pid, start = match[1], match[2], int(match[3]), int(match[4])
    if machine != _machine_id():  # its processes are not visible here: decide by age
        with suppress(OSError):
            return time.time() - os.lstat(path).st_ctime < (60 if kind == "old" else 86400)
        return True
    if pid == os.getpid():
        return path.name in _active
    # process numbers are reused: the start time tells whether it is the same process
    began = system.process_start(pid)
    return began is not None and (began == start or 0 in (began, start))


def _clean_up(leftover: Path) -> None:
    """Remove the temporary of a dead process, or restore the folder that it had replaced."""
    match = _TEMPORARY.fullmatch(leftover.name)
    assert match
    place = leftover.with_name(match[6])
    with suppress(OSError, RunError):
        if match[1] == "old" and not os.path.lexists(place):
            os.replace(leftover, place)
            system.flush_to_disk(place.parent)
        elif match[1] == "old":
            # the old folder is removed only if the new one is complete
            if is_intact(place):
                _remove_replaced(leftover, place)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _restore(parent: Path) -> None:
    """Restore the folders that dead processes had replaced."""
    for leftover in _find_stale(Path(os.path.abspath(parent))):
        if leftover.name.startswith(".old-"):
            _clean_up(leftover)


def _candidates(parent: Path, prefix: str) -> list[Path]:
    """List the folders whose names start with `prefix`, newest first, without links."""
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
        if missing_resource(error):
            raise read_error(parent, "cannot be listed", error) from error
        raise UserError(f"{parent} cannot be listed: {error}.") from error
    # folders that were never finished, or were replaced, are no candidates
    names = [name for name in names if not _TEMPORARY.fullmatch(name)]
    names = [name for name in names if not _REPLACED.fullmatch(name)]
    return [Path(parent, name) for name in sorted(names, key=_natural_key, reverse=True)]


def _natural_key(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", name)
    # numbers compare as numbers; split puts text and digits in turn, so types match by position
    return [int(part) if part[:1].isdecimal() else part for part in parts], name


# Conversion of OS errors


@contextmanager
def _convert_write_errors(
    path: Path, temporary: Path | None = None, size: int = 0, only: frozenset[int] = frozenset()
) -> Iterator[None]:
    """Convert an `OSError` into `UserError` or `RunError` with the path and the size.

    Around foreign code, `only` restricts this to error numbers that are certainly about writing.
    """
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        raise _write_error(error, path, max(size, _folder_size(temporary))) from error


def _write_error(error: OSError, path: Path, size: int) -> UserError | RunError:
    why = error.strerror or str(error)
    path = Path(*(_TEMPORARY.sub(r"\6", part) for part in path.parts))  # the final path
    if error.errno in _PATH_ERRNOS:
        return UserError(f"{path} cannot be written ({size} bytes): {why}; choose another folder.")
    # the folder may not exist yet: ask the nearest one that does
    there = next((one for one in path.parents if os.path.isdir(one)), path)
    try:
        free = f"{shutil.disk_usage(there).free} bytes are free there"
    except OSError:
        free = "the free space is unknown"
    return RunError(
        f"could not write {path} ({size} bytes): {why}; {free}. "
        "The previous content is unchanged; free some space and try again."
    )


def _folder_size(folder: Path | None) -> int:
    """Return the readable number of bytes below a folder."""
    total = 0
    if folder is not None:
        with suppress(OSError):
            total = sum(os.lstat(folder / name).st_size for name in _scan(folder))
    return total


def _writable_path(path: Path) -> Path:
    """Return the absolute path, or raise `UserError` if it cannot be written."""
    if "\0" in str(path):
        raise UserError(f"{str(path)!r} contains a NUL character and is not a valid path.")
    path = Path(os.path.abspath(path))
    if not path.name:
        raise UserError(f"{path} is the root of the file system; choose a folder below it.")
    if os.path.islink(path):
        raise UserError(
            f"{path} is a symbolic link, which is never followed or replaced; use its target."
        )
    return path


def _make_folders(folder: Path) -> None:
    """Create a folder and its parents, and flush each to disk."""
    if not os.path.isdir(folder):
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        if not _is_in_active_folder(folder):
            system.flush_to_disk(folder.parent)


def _is_in_active_folder(path: Path) -> bool:
    """Return whether the path is inside an unfinished folder, which is flushed at the end."""
    return any(name in _active for name in path.parts[:-1])


def _lstat(path: Path) -> os.stat_result | None:
    """Return the status of a path, or None if it does not exist."""
    try:
        return os.lstat(path)
    except (OSError, ValueError) as error:
        if missing_resource(error):
            raise read_error(path, "cannot be read", error) from error
        return None


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _read(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes."""
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(size + 1)  # allocate no more than the file needs
        if len(data) > size:  # it grows, or its size is not reported
            while len(data) <= limit and (more := file.read(2**20)):
                data += more
        if size > limit or len(data) > limit:
            raise CorruptFileError(
                f"{path} has {max(size, len(data))} bytes; at most {limit} are read."
            )
        return data


@contextmanager
def _open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file; raise `CorruptFileError` for anything else."""
    try:
        with open(path, "rb", opener=system.open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CorruptFileError(f"{path} is not a regular file.")
            yield file
    except (OSError, ValueError, MemoryError) as error:
        raise read_error(path, "cannot be read", error) from error


def read_error(path: Path, problem: str, error: BaseException) -> CorruptFileError | RunError:
    """Return the exception for a failed read: `CorruptFileError` if the file is provably damaged.

    Args:
        path: The file.
        problem: What is wrong with the file, such as "is not valid JSON".
        error: The exception of the reader.

    Returns:
        `RunError` if the machine lacked a resource, else `CorruptFileError`.
    """
    if resource := missing_resource(error):
        return RunError(
            f"{path} could not be read: {resource[:1].lower()}{resource[1:]}. The file may be "
            "intact and is unchanged; try again when the machine has what it needs."
        )
    return CorruptFileError(f"{path} {problem}: {error}.")


@contextmanager
def _check_format(path: Path, kind: str) -> Iterator[None]:
    """Convert every exception of a reader with `read_error`."""
    with _open_regular(path):
        pass
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in safetensors is not an Exception
        raise read_error(path, f"is not a complete {kind} file", error) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of repeated keys without an error
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is repeated")
    return table


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    # Python reads 1e999 as infinity, which is not a JSON number
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of range")
    return value
