"""A full disk: an error with path and bytes, the old checkpoint intact, no temporary files."""

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overt import io
from overt.errors import RunError
from overt.train import FitConfig, checkpoint
from tests.trust import child_process, naive

CONFIG = FitConfig(epochs=1, batch=4, accumulate=2, save_every=3, steps=9, log_every=4)
BUFFER_SIZE = 300_000  # 1.2 MB; the limit is 1 MB


def train(out: Path, buffer_size: int = BUFFER_SIZE) -> None:
    child_process.train(out, CONFIG, buffer_size)


def limit_file_size(after: int) -> None:
    """Limit files to a megabyte in saves after this step."""
    save = checkpoint.save

    def save_with_limit(parent, state, *rest, **options):
        if state.step > after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        return save(parent, state, *rest, **options)

    checkpoint.save = save_with_limit  # in a child process only


def has_path_and_bytes(error: BaseException, out: Path, reason: str) -> bool:
    """Whether the message has the path, the size and the free space."""
    path = re.escape(str(out / "checkpoints/train/step-"))
    pattern = rf"could not write {path}\d+\S* \(\d{{7}} bytes\): {reason}; \d+ bytes are free there"
    return re.search(pattern, str(error)) is not None


def is_intact(out: Path) -> bool:
    found, broken = io.newest(out / "checkpoints/train", checkpoint.PREFIX)
    return found is not None and not broken and io.is_intact(found)


def naive_is_intact(out: Path) -> bool:
    try:
        naive.read(child_process.checkpoint_folders(out)[-1])
    except Exception:
        return False
    return True


@pytest.mark.long
def test_a_file_size_limit_raises_with_path_and_bytes_and_the_run_resumes(
    tmp_path, record_result
) -> None:
    uninterrupted, out = tmp_path / "whole", tmp_path / "full"
    train(uninterrupted)

    def train_until_full() -> int:
        limit_file_size(after=3)
        try:
            train(out)
        except RunError as error:
            return 77 if has_path_and_bytes(error, out, "File too large") else print(error) or 1
        return 0

    assert child_process.exit_code(child_process.fork(train_until_full)) == 77
    assert [path.name for path in child_process.checkpoint_folders(out)] == [
        "step-000000003"
    ] and is_intact(out)
    assert child_process.temporary_files(out) == []
    train(out)
    assert child_process.fingerprint(out) == child_process.fingerprint(uninterrupted)

    def train_naively() -> None:
        naive.patch_checkpoints()
        limit_file_size(after=3)
        train(tmp_path / "naive")

    assert child_process.exit_code(child_process.fork(train_naively)) != 0
    assert not naive_is_intact(tmp_path / "naive")
    record_result(
        6,
        "RLIMIT_FSIZE: path and bytes in the error, previous checkpoint intact, no temporary files",
        "in the error, intact, 0 left; the run resumes to the same bytes",
        "the newest checkpoint is truncated",
    )


PROGRAM = """
import sys
from pathlib import Path
from overt import io
from overt.errors import RunError
from tests.trust import child_process, naive, test_06_full_disk as test
out = Path(sys.argv[1])
if len(sys.argv) > 2:
    naive.patch_checkpoints()
    try:
        test.train(out)
    except Exception:
        print("intact" if test.naive_is_intact(out) else "cut off")
    sys.exit()
try:
    test.train(out)
except RunError as error:
    assert test.has_path_and_bytes(error, out, "No space left on device"), error
    assert test.is_intact(out) and child_process.temporary_files(out) == []
    print("reported", len(child_process.checkpoint_folders(out)))
"""


@pytest.mark.long
def test_a_full_file_system_raises_with_path_and_bytes(tmp_path, record_result) -> None:
    """There is space for the first checkpoint, the log and half of the second one."""
    mount = ["unshare", "--mount", "sh", "-c"]
    mount_and_run = 'mount -t tmpfs -o size=2m none "$1" && shift && exec "$@"'
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*mount, mount_and_run, "-", tmp_path, "true"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small tmpfs needs more rights than this process has")
    command = [
        *mount,
        mount_and_run,
        "-",
        tmp_path,
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "reported 1\n", done.stderr
    naive_run = subprocess.run([*command, "naive"], capture_output=True, text=True, check=False)
    assert naive_run.stdout == "cut off\n", naive_run.stderr
    record_result(
        6,
        "small tmpfs: path and bytes in the error, previous checkpoint intact, no temporary files",
        "in the error, intact, 0 left",
        "the newest checkpoint is truncated",
    )
