"""Calls that differ between Linux, macOS and Windows: file locks, processes, flushes, memory.

No other module of the package uses a call that only POSIX systems have. Everything here works, or
says that it cannot, if `fcntl`, `resource` or a function of `os` is missing.

A lock belongs to an open file descriptor, and the system releases it when its process ends: `flock`
on POSIX systems, and a lock of one byte far behind the text on Windows, where a locked byte cannot
be read by others.
"""

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def _import_optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


# Looked up by name, so that the types of one system do not decide how the others are checked.
_fcntl = _import_optional("fcntl")
_msvcrt = _import_optional("msvcrt")
_resource = _import_optional("resource")

_LOCKED_BYTE = 2**30
_WAIT = 0.05  # seconds between two attempts to lock, where the system cannot wait
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would convert line ends
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCKING = getattr(os, "O_NONBLOCK", 0)


# Files


def open_lock_file(path: Path) -> int:
    """Open a file to be locked, and create it if missing; child processes do not inherit it.

    Args:
        path: The file. It must not be a link, which could lead out of its folder.

    Returns:
        The file descriptor.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    if not _NO_LINK and os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, os.O_RDWR | os.O_CREAT | _BINARY | _NO_LINK, 0o666)


def open_existing_lock_file(path: Path) -> int:
    """Open a lock file for reading; see `open_lock_file`."""
    if not _NO_LINK and os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, os.O_RDONLY | _BINARY | _NO_LINK | _NONBLOCKING)


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting, as a pipe would until it has a writer; an `opener` of `open`."""
    return os.open(path, flags | _NONBLOCKING)


def lock_descriptor(descriptor: int, wait: bool = False) -> None:
    """Lock an open file for this process, until it is closed.

    Args:
        descriptor: A file descriptor of `open_lock_file`.
        wait: Wait until the lock is free instead of raising.

    Raises:
        BlockingIOError: Another descriptor, of this or another process, has the lock.
        OSError: The file system or this Python cannot lock files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first, second = (open_lock_file(Path(folder, "x")) for _ in range(2))
        ...     lock_descriptor(first)
        ...     print(is_locked(second))
        ...     os.close(first)
        ...     print(is_locked(second))
        ...     os.close(second)
        True
        False
    """
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
        return
    while not _lock_byte(descriptor):
        if not wait:
            raise BlockingIOError(errno.EAGAIN, "another process has the lock")
        time.sleep(_WAIT)


def is_locked(descriptor: int) -> bool:
    """Return whether another descriptor has the lock of this open file.

    Raises:
        OSError: The file system or this Python cannot lock files.
    """
    if _fcntl is not None:
        try:
            _fcntl.flock(descriptor, _fcntl.LOCK_SH | _fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        _fcntl.flock(descriptor, _fcntl.LOCK_UN)
        return False
    if not _lock_byte(descriptor):
        return True
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    _msvcrt.locking(descriptor, _msvcrt.LK_UNLCK, 1)
    return False


def _lock_byte(descriptor: int) -> bool:
    """Lock one byte as Windows does; return False if it is locked already."""
    if _msvcrt is None:
        raise OSError(errno.ENOSYS, "this Python has no file locks")
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EDEADLK):
            raise
        return False
    return True


def read_text_of(descriptor: int, size: int) -> str:
    """Return the text in the first `size` bytes of an open file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, size).decode("utf-8", "replace")


def replace_text_of(descriptor: int, text: str) -> None:
    """Replace the content of an open file."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, text.encode())


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk.

    Windows and some network file systems cannot flush a folder: there it is skipped.

    Raises:
        OSError: The disk failed.
    """
    folder = os.path.isdir(path)
    if folder and sys.platform == "win32":
        return
    # Windows flushes only files that are open for writing.
    flags = os.O_RDWR if sys.platform == "win32" else os.O_RDONLY
    descriptor = os.open(path, flags | _BINARY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not folder:
            raise
    finally:
        os.close(descriptor)


# Processes


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks (0: unknown, None: not running)."""
    if sys.platform == "win32":
        return 0 if _runs_on_windows(pid, ctypes.WinDLL("kernel32", use_last_error=True)) else None
    try:
        os.kill(pid, 0)  # on Windows this would end the process
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    try:
        # the command name is in parentheses and may contain spaces: split after the last one
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # fields[0] is the state (zombie, dead), fields[19] the start time (field 22 of proc(5))
    return None if fields[0] in "ZX" else int(fields[19])


def _runs_on_windows(pid: int, kernel32: Any) -> bool:
    """Return whether a process runs, by the functions of the Windows library `kernel32`."""
    query, access_denied, still_active = 0x1000, 5, 259
    kernel32.OpenProcess.restype = ctypes.c_void_p  # a handle has 64 bits
    process = kernel32.OpenProcess(query, False, pid & 0xFFFFFFFF)
    if not process:
        return ctypes.get_last_error() == access_denied  # type: ignore[attr-defined,unused-ignore]
    code = ctypes.c_ulong()
    known = kernel32.GetExitCodeProcess(ctypes.c_void_p(process), ctypes.byref(code))
    kernel32.CloseHandle(ctypes.c_void_p(process))
    return not known or code.value == still_active


def process_namespace() -> str:
    """Return the name of the process numbers' namespace on Linux, "" elsewhere.

    Containers may share the host name but not process numbers.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except (OSError, AttributeError):
        return ""


def call_in_forked_child(function: Callable[[], None]) -> None:
    """Call a function in every forked child of this process, where the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def terminate_this_process() -> None:
    """Send SIGTERM to this process, so that its signal handler runs."""
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGTERM)  # `os.kill` would end the process at once
    else:
        os.kill(os.getpid(), signal.SIGTERM)


# The machine


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # A container or a scheduler may allow fewer cores than the machine has.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, 0 if the system does not report it."""
    if _resource is None:
        return 0
    # `ru_maxrss` is in bytes on macOS, elsewhere in kilobytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * unit
