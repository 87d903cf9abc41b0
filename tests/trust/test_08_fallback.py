"""Pruning never takes the only verified checkpoint; a corrupt newest one is passed over, aloud."""

import itertools
import shutil
from pathlib import Path

from overt import files
from overt.train import Limits, Reporter
from tests.trust import lives, naive

STEPS = (1, 2, 3, 4)
LIMITS = Limits(epochs=1, batch=4, accumulate=2, save_every=3, steps=9, log_every=4)


def corrupt(folder: Path, how: str) -> None:
    """Half a file is missing, one bit is wrong, or the manifest is."""
    path = folder / (files.MANIFEST if how == "manifest" else "model.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)


def cases(parent: Path):
    """Four checkpoints of which some are corrupt in some way, and how many are to be kept."""
    whole = parent / "whole"
    for step in STEPS:
        with files.writing(whole / f"step-{step}") as folder:
            (folder / "model.safetensors").write_bytes(bytes(range(step, 100)))
    for count, how in itertools.product(range(len(STEPS) + 1), ("bit", "cut", "manifest")):
        for broken in itertools.combinations(STEPS, count):
            for keep in (1, 2, 3):
                shutil.rmtree(parent / "case", ignore_errors=True)
                shutil.copytree(whole, parent / "case")
                for step in broken:
                    corrupt(parent / "case" / f"step-{step}", how)
                yield parent / "case", [step for step in STEPS if step not in broken], keep


def newest_whole(parent: Path) -> int:
    good = [int(path.name[5:]) for path in parent.glob("step-*") if files.is_whole(path)]
    return max(good, default=0)


def lost(parent: Path, prune) -> tuple[int, int]:
    """In how many cases the newest whole checkpoint is gone afterwards, and of how many."""
    gone = total = 0
    for folder, good, keep in cases(parent):
        prune(folder, "step-", keep)
        total += 1
        gone += newest_whole(folder) != max(good, default=0)
    return gone, total


def test_pruning_never_takes_the_only_verified_checkpoint(tmp_path, reached) -> None:
    ours, total = lost(tmp_path / "ours", files.prune)
    theirs, _ = lost(tmp_path / "naive", naive.prune)
    assert ours == 0 and theirs > 0 and total == 144
    reached(
        8,
        "pruning never deletes the only verified checkpoint",
        f"the newest verified one kept in {total - ours} of {total} cases",
        f"lost in {theirs} of {total}",
    )


def test_a_corrupt_newest_checkpoint_is_passed_over_and_said(
    tmp_path, reached, monkeypatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Reporter, "say", lambda self, sentence: said.append(sentence))
    whole = tmp_path / "whole"
    lives.live(whole, LIMITS)
    told = 0
    for how in ("bit", "cut", "manifest"):
        out = tmp_path / how
        shutil.copytree(whole, out)
        newest = lives.saved(out)[-1]
        corrupt(newest, how)
        lives.live(out, LIMITS)
        told += f"checkpoint {newest} is damaged and was passed over" in said
        assert lives.fingerprint(out) == lives.fingerprint(whole)
    assert told == 3

    shutil.copytree(whole, tmp_path / "naive")
    corrupt(lives.saved(tmp_path / "naive")[-1], "bit")

    def naively() -> None:
        naive.take_over()
        lives.live(tmp_path / "naive", LIMITS)

    assert lives.outcome(lives.forked(naively)) == 0  # taken for good, without a word
    assert lives.fingerprint(tmp_path / "naive") != lives.fingerprint(whole)
    reached(
        8,
        "a corrupt newest checkpoint: the newest verified one is taken up, and it is said",
        f"said in {told} of 3 cases; the run ends in the same bytes",
        "the corrupt weights are taken for good",
    )
