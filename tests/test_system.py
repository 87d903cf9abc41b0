"""Calls that differ between systems, with POSIX simulated as absent, and names for all systems."""

import ast
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from overt import io, system
from overt.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(sys.platform == "win32", reason="hides the calls that Windows lacks")

# A machine without POSIX calls: modules and functions of `os` that Windows does not have. `msvcrt`
# is replaced by a lock of the whole file, which excludes the same descriptors.
WITHOUT_POSIX = """
import ctypes, errno, multiprocessing, os, random, signal, socket, subprocess, sys, tempfile, types
import fcntl as real

def locking(descriptor, mode, count):
    assert os.lseek(descriptor, 0, os.SEEK_CUR) > 2**20 and count == 1
    kind = real.LOCK_UN if mode == 0 else real.LOCK_EX | real.LOCK_NB
    try:
        real.flock(descriptor, kind)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "locked") from None

for name in "fcntl resource pwd grp termios tty pty".split():
    sys.modules[name] = None
for name in '''sync fork forkpty register_at_fork pread pwrite preadv pwritev fchmod fchown chown
               getuid geteuid getgid getpgid setsid killpg nice uname statvfs mkfifo
               sched_getaffinity sched_setaffinity O_NOFOLLOW O_CLOEXEC O_NONBLOCK
               O_DIRECTORY getloadavg'''.split():
    if hasattr(os, name):
        delattr(os, name)
if "--no-locks" in sys.argv:
    sys.modules["msvcrt"] = None
else:
    fake = types.ModuleType("msvcrt")
    fake.locking, fake.LK_NBLCK, fake.LK_UNLCK = locking, 2, 0
    sys.modules["msvcrt"] = fake
"""


def run_without_posix(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX + code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@posix
def test_files_and_locks_work_without_posix_calls(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from overt import io
from overt.errors import UserError
folder = Path(sys.argv[1])
with io.atomic_folder(folder / "run") as new:
    io.write_json(new / "a.json", {"b": 1})
io.verify(folder / "run")
with io.lock(folder):
    print(io.lock_holder(folder)[1])
    try:
        with io.lock(folder):
            raise AssertionError("held twice")
    except UserError as error:
        print(f"process {os.getpid()} " in str(error))
    child = "import sys; from pathlib import Path; from overt import io\\n"
    child += "try:\\n  with io.lock(Path(sys.argv[1])): print('twice')\\n"
    child += "except Exception as error: print(type(error).__name__)"
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", child, str(folder)])
with io.lock(folder, wait=True):
    pass
print(io.lock_holder(folder))
"""
    printed = run_without_posix(code, str(tmp_path)).split("\n")
    assert printed[:4] == ["True", "True", "UserError", "('', False)"]


@posix
def test_a_python_without_file_locks_is_named(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from overt import io
try:
    with io.lock(Path(sys.argv[1])):
        pass
except Exception as error:
    print(type(error).__name__, error)
print(io.lock_holder(Path(sys.argv[1])))
"""
    printed = run_without_posix(code, str(tmp_path), "--no-locks")
    assert printed.startswith("UserError") and "no file locks" in printed
    assert printed.endswith("('', False)\n")


@posix
@pytest.mark.long
def test_every_module_imports_and_trains_without_posix_calls(tmp_path: Path) -> None:
    """Libraries are imported first: they have their own answers to a missing call."""
    code = """
import importlib, pkgutil, uvicorn, fastapi, typer, transformers, accelerate, matplotlib.figure
import overt
skip = {  # these import Triton
    "overt.capture.kernels.row_softmax",
    "overt.capture.kernels.statistics_kernels",
    "overt.nn.hard_attention.triton_kernels",
}
skip |= {"overt.__main__", "overt.papers.worker"}
for found in pkgutil.walk_packages(overt.__path__, "overt."):
    if found.name not in skip:
        importlib.import_module(found.name)
from overt.papers import demo
from overt.experiments import runner, settings
from overt.papers.catalog import build, find_recipe
tiny = "data.train=24 data.val=8 data.test=8 train.epochs=1 train.card=0".split()
recipe = settings.apply(find_recipe("scenes-question"), tiny)
from pathlib import Path
print(runner.run(recipe, Path(sys.argv[1]), build, device="cpu")["status"])
"""
    before = "import torch, numpy, scipy\nimport torch._dynamo\n"
    environment = {**os.environ, "OVERT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", before + WITHOUT_POSIX + code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("done\n")


# --- the other calls, with their own replacements


@pytest.fixture
def windows_locks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace `flock` by the locks of Windows; return the errors that the next attempts raise."""
    real, failures = system._fcntl, list[int]()

    def locking(descriptor: int, mode: int, count: int) -> None:
        if failures:
            raise OSError(failures.pop(0), "no")
        real.flock(descriptor, real.LOCK_UN if mode == 0 else real.LOCK_EX | real.LOCK_NB)

    fake = ModuleType("msvcrt")
    vars(fake).update(locking=locking, LK_NBLCK=2, LK_UNLCK=0)
    monkeypatch.setattr(system, "_fcntl", None)
    monkeypatch.setattr(system, "_msvcrt", fake)
    return failures


@posix
def test_the_lock_of_windows_waits_and_reports_other_errors(
    tmp_path: Path, windows_locks: list[int]
) -> None:
    descriptor = system.open_lock_file(tmp_path / "x")
    system.replace_text_of(descriptor, "a name")
    try:
        windows_locks[:] = [errno.EACCES, errno.EDEADLK]
        system.lock_descriptor(descriptor, wait=True)  # the third attempt succeeds
        assert windows_locks == []
        windows_locks[:] = [errno.EACCES]
        with pytest.raises(BlockingIOError):
            system.lock_descriptor(descriptor)
        windows_locks[:] = [errno.EINVAL]
        with pytest.raises(OSError, match="no"):
            system.lock_descriptor(descriptor, wait=True)
        assert system.read_text_of(descriptor, 6) == "a name"  # the lock is not on the text
    finally:
        os.close(descriptor)


def test_a_link_is_never_opened_as_a_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "precious")
    for flag in (system._NO_LINK, 0):  # 0: a system without O_NOFOLLOW
        monkeypatch.setattr(system, "_NO_LINK", flag)
        for opened in (system.open_lock_file, system.open_existing_lock_file):
            with pytest.raises(OSError, match="x"):
                opened(tmp_path / "x")
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("handle", "error", "code", "runs"),
    [(0, 5, 0, True), (0, 87, 0, False), (7, 0, 259, True), (7, 0, 1, False)],
)
def test_a_process_of_windows_runs_or_has_ended(
    monkeypatch: pytest.MonkeyPatch, handle: int, error: int, code: int, runs: bool
) -> None:
    """No handle: access denied (5) or no such process (87). A handle: 259 is "still active"."""
    closed = []

    class OpenProcess:
        restype: object = None

        def __call__(self, *_: object) -> int:
            return handle

    def write_exit_code(_: object, place: object) -> int:
        place._obj.value = code  # type: ignore[attr-defined]
        return 1

    kernel32 = SimpleNamespace(
        OpenProcess=OpenProcess(), GetExitCodeProcess=write_exit_code, CloseHandle=closed.append
    )
    monkeypatch.setattr(ctypes, "get_last_error", lambda: error, raising=False)
    assert system._runs_on_windows(4321, kernel32) is runs
    assert len(closed) == (handle != 0)


def test_a_live_process_has_a_start_time_and_a_dead_one_none() -> None:
    first, second = (system.process_start(os.getpid()) for _ in range(2))
    assert first is not None and first == second
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert system.process_start(child.pid) is None
    assert system.process_start(2**200) is None


def test_a_folder_that_cannot_be_flushed_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").touch()
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    system.flush_to_disk(tmp_path)
    system.flush_to_disk(tmp_path / "x")
    assert len(synced) == 2
    monkeypatch.setattr(sys, "platform", "win32")
    system.flush_to_disk(tmp_path)
    assert len(synced) == 2, "a folder cannot be opened on Windows"
    system.flush_to_disk(tmp_path / "x")
    assert len(synced) == 3


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_this_process_gets_its_own_sigterm(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    got: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        system.terminate_this_process()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert got == [signal.SIGTERM]


def test_memory_and_cores_have_answers_without_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.peak_memory() > 2**20 and 1 <= system.available_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(system, "_resource", None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert system.peak_memory() == 0 and system.available_cores() == (os.cpu_count() or 1)


# --- one module, and names for every system

POSIX_ONLY = set("fcntl resource pwd grp termios tty pty posix selectors".split())
POSIX_CALLS = set(
    """sync fork forkpty register_at_fork pread pwrite preadv pwritev fchmod fchown chown lchown
    getuid geteuid getgid getegid getpgid getpgrp setsid setpgid killpg kill nice uname statvfs
    mkfifo mknod sched_getaffinity sched_setaffinity O_NOFOLLOW O_CLOEXEC O_NONBLOCK
    O_DIRECTORY wait waitpid SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGPIPE
    alarm pthread_kill sigwait""".split()
)


def posix_calls(path: Path) -> Iterator[str]:
    """Yield the imports and attributes of `os` and `signal` that Windows does not have."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from POSIX_ONLY & set(names)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("os", "signal"):
            yield from {node.attr} & POSIX_CALLS


@pytest.mark.long
def test_posix_only_calls_are_in_one_module() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): calls
        for path in sorted((ROOT / "overt").rglob("*.py"))
        if (calls := sorted(posix_calls(path)))
    }
    assert set(found) == {"overt/system.py"}
    assert {"kill", "register_at_fork", "sched_getaffinity"} <= set(found["overt/system.py"])


def test_names_that_differ_in_letter_case_only_raise(tmp_path: Path) -> None:
    """On macOS and Windows the second file would replace the first."""

    def write_both() -> None:
        with io.atomic_folder(tmp_path / "run") as new:
            io.write_json(new / "A.json", 1)
            io.write_json(new / "a.json", 2)

    with pytest.raises(UserError, match=r"A\.json"):
        write_both()
    assert not (tmp_path / "run").exists()
    with io.atomic_folder(tmp_path / "run") as new:
        io.write_json(new / "A.json", 1)
        io.write_json(new / "b" / "a.json", 2)
    io.verify(tmp_path / "run")


def test_files_of_the_project_can_be_checked_out_on_every_system() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    assert len(listed) > 500
    assert len({name.casefold() for name in listed}) == len(listed)
    reserved = {"con", "prn", "aux", "nul", *(f"{n}{k}" for n in ("com", "lpt") for k in range(10))}
    for name in listed:
        assert not set(name) & set('<>:"\\|?*') and len(name) < 150, name
        for part in Path(name).parts:
            assert part.split(".")[0].lower() not in reserved and part[-1] not in ". ", name
