"""Two processes in one run folder: the second exits; the lock of a dead process is recovered."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from overt import cli, io
from overt.errors import UserError
from overt.train import loop
from tests.trust import child_process

SETS = ["data.limit=16", "model.width=0.25", "train.batch=4", "train.steps=3", "train.save_every=1"]


def run(out: Path, *words: str) -> int:
    return cli.main(
        ["run", "scenes-soft", "--out", str(out), "--device", "cpu", *words]
        + [word for one in SETS for word in ("--set", one)]
    )


def run_and_block(out: Path, writer: int) -> int:
    """A run that blocks in its third step."""
    forward = loop._FitLoop.forward

    def block(self, part, micro):
        if self.state.step == 2:
            os.write(writer, b".")
            os.read(os.pipe()[0], 1)
        return forward(self, part, micro)

    pytest.MonkeyPatch().setattr(loop._FitLoop, "forward", block)
    return run(out)


@contextmanager
def naive_lock(folder: Path):
    """A file with a process id, which stays when the process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.pid")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise UserError(f"{folder} is in use") from None
    os.write(descriptor, str(os.getpid()).encode())
    os.close(descriptor)
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.long
def test_a_second_process_exits_and_the_lock_of_a_dead_process_is_recovered(
    tmp_path, record_result, capfd, monkeypatch
) -> None:
    def run_second_and_third(out: Path) -> list[int]:
        """Exit codes of a second run while the first is running, and of a third after its kill."""
        reader, writer = os.pipe()
        first = child_process.fork(lambda: run_and_block(out, writer))
        os.close(writer)
        assert os.read(reader, 1) == b"."
        capfd.readouterr()
        codes = [run(out, "--resume")]
        message = capfd.readouterr().err
        assert "in use" in message and len(message.splitlines()) == 1
        has_process_id.append(f"process {first} " in message)
        assert child_process.kill(first)
        codes.append(run(out, "--resume"))
        return codes

    has_process_id: list[bool] = []
    assert run_second_and_third(tmp_path / "ours") == [2, 0]
    assert has_process_id == [True] and io.is_intact(tmp_path / "ours")
    monkeypatch.setattr(io, "lock", naive_lock)
    naive = run_second_and_third(tmp_path / "naive")
    assert naive == [2, 2]
    record_result(
        7,
        "the second exits; the lock of a dead process is recovered",
        "exit 2 with the process id; after SIGKILL the next run resumes and exits 0",
        "a file with the process id blocks all later runs: exit 2",
    )
