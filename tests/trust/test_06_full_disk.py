"""A full disk: an error with path and bytes, the previous copy intact, nothing temporary left."""

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overt import files
from overt.errors import Failed
from overt.train import Limits, checkpoint
from tests.trust import lives, naive

LIMITS = Limits(epochs=1, batch=4, accumulate=2, save_every=3, steps=9, log_every=4)
BALLAST = 300_000  # 1.2 MB, where files may have 1 MB


def live(out: Path, ballast: int = BALLAST) -> None:
    lives.live(out, LIMITS, ballast)


def fill_up(after: int) -> None:
    """From the save of this step on no file may have more than a megabyte."""
    save = checkpoint.save

    def tight(parent, state, *rest, **options):
        if state.step > after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        return save(parent, state, *rest, **options)

    checkpoint.save = tight  # in a process that is about to end


def told(error: BaseException, out: Path, why: str) -> bool:
    """Whether the sentence has the path, the bytes and what is free."""
    place = re.escape(str(out / "checkpoints/train/step-"))
    pattern = rf"could not write {place}\d+\S* \(\d{{7}} bytes\): {why}; \d+ bytes are free there"
    return re.search(pattern, str(error)) is not None


def is_intact(out: Path) -> bool:
    found, broken = files.newest(out / "checkpoints/train", checkpoint.PREFIX)
    return found is not None and not broken and files.is_whole(found)


def naive_is_intact(out: Path) -> bool:
    try:
        naive.read(lives.saved(out)[-1])
    except Exception:
        return False
    return True


def test_a_limit_on_files_is_told_and_the_run_goes_on_once_there_is_room(tmp_path, reached) -> None:
    whole, out = tmp_path / "whole", tmp_path / "full"
    live(whole)

    def until_full() -> int:
        fill_up(after=3)
        try:
            live(out)
        except Failed as error:
            return 77 if told(error, out, "File too large") else print(error) or 1
        return 0

    assert lives.outcome(lives.forked(until_full)) == 77
    assert [path.name for path in lives.saved(out)] == ["step-000000003"] and is_intact(out)
    assert lives.leftovers(out) == []
    live(out)
    assert lives.fingerprint(out) == lives.fingerprint(whole)

    def naively() -> None:
        naive.take_over()
        fill_up(after=3)
        live(tmp_path / "naive")

    assert lives.outcome(lives.forked(naively)) != 0
    assert not naive_is_intact(tmp_path / "naive")
    reached(
        6,
        "RLIMIT_FSIZE: path and bytes named, previous checkpoint intact, nothing temporary left",
        "named, intact, 0 left; the run goes on to the same bytes",
        "the newest checkpoint is cut off",
    )


PROGRAM = """
import sys
from pathlib import Path
from overt import files
from overt.errors import Failed
from tests.trust import lives, naive, test_06_full_disk as test
out = Path(sys.argv[1])
if len(sys.argv) > 2:
    naive.take_over()
    try:
        test.live(out)
    except Exception:
        print("intact" if test.naive_is_intact(out) else "cut off")
    sys.exit()
try:
    test.live(out)
except Failed as error:
    assert test.told(error, out, "No space left on device"), error
    assert test.is_intact(out) and lives.leftovers(out) == []
    print("told", len(lives.saved(out)))
"""


@pytest.mark.long
def test_a_small_file_system_is_told_too(tmp_path, reached) -> None:
    """Room for the first checkpoint, the log, and half of the second one."""
    mount = ["unshare", "--mount", "sh", "-c"]
    there = 'mount -t tmpfs -o size=2m none "$1" && shift && exec "$@"'
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*mount, there, "-", tmp_path, "true"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small tmpfs needs more rights than this process has")
    command = [*mount, there, "-", tmp_path, sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "told 1\n", done.stderr
    usual = subprocess.run([*command, "naive"], capture_output=True, text=True, check=False)
    assert usual.stdout == "cut off\n", usual.stderr
    reached(
        6,
        "small tmpfs: path and bytes named, previous checkpoint intact, nothing temporary left",
        "named, intact, 0 left",
        "the newest checkpoint is cut off",
    )
