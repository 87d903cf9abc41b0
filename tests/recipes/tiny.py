"""Runs of a second: settings, and data sets in their official formats with a few records each."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from overt.data import cifar, easyvqa, trec
from overt.recipes import find, settings
from overt.recipes.recipe import Recipe

SETS = ("data.limit=16", "model.width=0.25", "train.steps=2")
QUESTIONS = (
    b"DESC:manner How did serfdom develop ?",
    b"ENTY:cremat What films featured Popeye ?",
    b"LOC:city Which city has the castle ?",
    b"HUM:ind Who is the king ?",
    b"NUM:date When ?",
)
ASKED = (["what shape is it?", "circle"], ["is it red?", "no"], ["what color is it?", "red"])


def recipe(name: str, *sets: str) -> Any:
    """The recipe of this name, made tiny."""
    return settings.apply(find(name), [*SETS, *sets])


def write(root: Path) -> Path:
    """All data sets that recipes read from disk, below `root`."""
    dice = np.random.default_rng(0)
    for folder in (cifar.CIFAR10_FOLDER, cifar.CIFAR100_FOLDER, trec.FOLDER):
        (root / folder).mkdir(parents=True)
    for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = dice.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (root / cifar.CIFAR10_FOLDER / f"{stem}.bin").write_bytes(records.tobytes())
    for stem in ("train", "test"):
        records = dice.integers(0, 256, (40, 3074), dtype=np.uint8)
        records[:, :2] %= np.array([20, 100], dtype=np.uint8)
        (root / cifar.CIFAR100_FOLDER / f"{stem}.bin").write_bytes(records.tobytes())
    for name in (trec.TRAIN_FILE, trec.TEST_FILE):
        (root / trec.FOLDER / name).write_bytes(b"\n".join(QUESTIONS * 8) + b"\n")
    for part in ("train", "test"):
        folder = root / "easy-vqa" / part
        (folder / "images").mkdir(parents=True)
        for number in range(12):
            image = dice.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / "images" / f"{number}.png")
        asked = [[*words, number] for number in range(12) for words in ASKED]
        (folder / "questions.json").write_text(json.dumps(asked))
    (root / "easy-vqa" / "answers.txt").write_text("circle\nred\nno\nyes\n")
    return root


def expect_few(patch: pytest.MonkeyPatch) -> None:
    """The readers take files with as few records as `write` gives them."""
    patch.setattr("overt.data.Cifar10", partial(cifar.Cifar10, records=8, validation=8))
    patch.setattr("overt.data.Cifar100", partial(cifar.Cifar100, records=40, validation=8))
    patch.setattr("overt.data.Trec", partial(trec.Trec, records=40, validation=8))
    patch.setattr("overt.data.EasyVqa", partial(easyvqa.EasyVqa, validation=4))


def run(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    """A run on the CPU that prints nothing."""
    from overt.recipes import running

    return running.run(recipe, out, device="cpu", show_progress=False, **options)
