"""Two processes on one run folder: the second refuses; the lock of a dead holder is recovered."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from overt import cli, files
from overt.errors import BadInput
from overt.train import loop
from tests.trust import lives

SETS = ["data.limit=16", "model.width=0.25", "train.batch=4", "train.steps=3", "train.save_every=1"]


def run(out: Path, *words: str) -> int:
    return cli.main(
        ["run", "scenes-soft", "--out", str(out), "--device", "cpu", *words]
        + [word for one in SETS for word in ("--set", one)]
    )


def run_that_waits(out: Path, writer: int) -> int:
    """A run that stands still in its third step, for ever."""
    forward = loop._Run.forward

    def waiting(self, part, micro):
        if self.state.step == 2:
            os.write(writer, b".")
            os.read(os.pipe()[0], 1)
        return forward(self, part, micro)

    pytest.MonkeyPatch().setattr(loop._Run, "forward", waiting)
    return run(out)


@contextmanager
def naive_lock(folder: Path):
    """A file that says who is here: as good as a lock until somebody dies."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.pid"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise BadInput(f"{folder} is in use") from None
    os.write(descriptor, str(os.getpid()).encode())
    os.close(descriptor)
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.long
def test_the_second_process_refuses_and_a_dead_holders_lock_is_recovered(
    tmp_path, reached, capfd, monkeypatch
) -> None:
    def second_and_third(out: Path) -> list[int]:
        """Exit codes of a second run while the first is at work, and of one after its death."""
        reader, writer = os.pipe()
        first = lives.forked(lambda: run_that_waits(out, writer))
        os.close(writer)
        assert os.read(reader, 1) == b"."
        capfd.readouterr()
        codes = [run(out, "--resume")]
        said = capfd.readouterr().err
        assert "in use" in said and len(said.splitlines()) == 1
        holders.append(f"process {first} " in said)
        assert lives.kill(first)
        codes.append(run(out, "--resume"))
        return codes

    holders: list[bool] = []
    assert second_and_third(tmp_path / "ours") == [2, 0]
    assert holders == [True] and files.is_whole(tmp_path / "ours")
    monkeypatch.setattr(files, "lock", naive_lock)
    naive = second_and_third(tmp_path / "naive")
    assert naive == [2, 2]
    reached(
        7,
        "the second refuses; a dead holder's lock is recovered",
        "exit 2 with the holder's number; after SIGKILL the next goes on and exits 0",
        "a file with the holder's number keeps everybody out for ever: exit 2",
    )
