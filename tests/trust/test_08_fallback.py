"""Pruning keeps the only verified checkpoint; a corrupt newest one is skipped with a message."""

import itertools
import shutil
from pathlib import Path

import pytest

from overt import io
from overt.train import FitConfig, Reporter
from tests.trust import child_process, naive

STEPS = (1, 2, 3, 4)
CONFIG = FitConfig(epochs=1, batch=4, accumulate=2, save_every=3, steps=9, log_every=4)


def corrupt(folder: Path, damage: str) -> None:
    """Truncate a file, flip one of its bits, or flip a bit of the manifest."""
    path = folder / (io.MANIFEST if damage == "manifest" else "model.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)


def cases(parent: Path):
    """Yield four checkpoints, some corrupt, with the intact steps and the number to keep."""
    intact = parent / "whole"
    for step in STEPS:
        with io.atomic_folder(intact / f"step-{step}") as folder:
            (folder / "model.safetensors").write_bytes(bytes(range(step, 100)))
    for count, damage in itertools.product(range(len(STEPS) + 1), ("bit", "cut", "manifest")):
        for broken in itertools.combinations(STEPS, count):
            for keep in (1, 2, 3):
                shutil.rmtree(parent / "case", ignore_errors=True)
                shutil.copytree(intact, parent / "case")
                for step in broken:
                    corrupt(parent / "case" / f"step-{step}", damage)
                yield parent / "case", [step for step in STEPS if step not in broken], keep


def newest_intact(parent: Path) -> int:
    good = [int(path.name[5:]) for path in parent.glob("step-*") if io.is_intact(path)]
    return max(good, default=0)


def count_lost(parent: Path, prune) -> tuple[int, int]:
    """Count the cases in which pruning deletes the newest intact checkpoint, and all cases."""
    lost = total = 0
    for folder, good, keep in cases(parent):
        prune(folder, "step-", keep)
        total += 1
        lost += newest_intact(folder) != max(good, default=0)
    return lost, total


@pytest.mark.long
def test_pruning_never_deletes_the_only_verified_checkpoint(tmp_path, record_result) -> None:
    ours, total = count_lost(tmp_path / "ours", io.prune)
    naive_lost, _ = count_lost(tmp_path / "naive", naive.prune)
    assert ours == 0 and naive_lost > 0 and total == 144
    record_result(
        8,
        "pruning never deletes the only verified checkpoint",
        f"the newest verified one kept in {total - ours} of {total} cases",
        f"lost in {naive_lost} of {total}",
    )


def test_a_corrupt_newest_checkpoint_is_skipped_with_a_message(
    tmp_path, record_result, monkeypatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Reporter, "say", lambda self, message: messages.append(message))
    intact = tmp_path / "whole"
    child_process.train(intact, CONFIG)
    reported = 0
    for damage in ("bit", "cut", "manifest"):
        out = tmp_path / damage
        shutil.copytree(intact, out)
        newest = child_process.checkpoint_folders(out)[-1]
        corrupt(newest, damage)
        child_process.train(out, CONFIG)
        reported += f"skipped the damaged checkpoint {newest}" in messages
        assert child_process.fingerprint(out) == child_process.fingerprint(intact)
    assert reported == 3

    shutil.copytree(intact, tmp_path / "naive")
    corrupt(child_process.checkpoint_folders(tmp_path / "naive")[-1], "bit")

    def train_naively() -> None:
        naive.patch_checkpoints()
        child_process.train(tmp_path / "naive", CONFIG)

    assert child_process.exit_code(child_process.fork(train_naively)) == 0  # no error
    assert child_process.fingerprint(tmp_path / "naive") != child_process.fingerprint(intact)
    record_result(
        8,
        "a corrupt newest checkpoint: the newest verified one is loaded, with a message",
        f"message in {reported} of 3 cases; the run ends with the same bytes",
        "the corrupt weights are loaded",
    )
