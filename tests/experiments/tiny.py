"""Tiny runs: settings, and datasets in their official formats with a few records each."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from overt.data import cifar, cub, easy_vqa, svhn, trec
from overt.experiments import settings
from overt.experiments.recipe import Recipe
from overt.experiments.table import TableSpec
from overt.papers.catalog import find_recipe

SETS = ("data.limit=16", "model.width=0.25", "train.steps=2", "train.card=0")
NARROW = ("model.width=0.05",)  # for networks that convolve at the size of the image
QUESTIONS = (
    b"DESC:manner How did serfdom develop ?",
    b"ENTY:cremat What films featured Popeye ?",
    b"LOC:city Which city has the castle ?",
    b"HUM:ind Who is the king ?",
    b"NUM:date When ?",
)
EASY_VQA_QUESTIONS = (
    ["what shape is it?", "circle"],
    ["is it red?", "no"],
    ["what color is it?", "red"],
)


def recipe(name: str, *sets: str) -> Any:
    """Return the recipe of this name with tiny settings."""
    more = NARROW if name.startswith("ltpa") else ()
    return settings.apply(find_recipe(name), [*SETS, *more, *sets])


def write_datasets(root: Path) -> Path:
    """Write all datasets that recipes read from disk below `root`."""
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
    write_svhn(root)
    write_cub(root)
    for name in (trec.TRAIN_FILE, trec.TEST_FILE):
        (root / trec.FOLDER / name).write_bytes(b"\n".join(QUESTIONS * 8) + b"\n")
    for part in ("train", "test"):
        folder = root / "easy-vqa" / part
        (folder / "images").mkdir(parents=True)
        for number in range(12):
            image = dice.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / "images" / f"{number}.png")
        questions = [[*words, number] for number in range(12) for words in EASY_VQA_QUESTIONS]
        (folder / "questions.json").write_text(json.dumps(questions))
    (root / "easy-vqa" / "answers.txt").write_text("circle\nred\nno\nyes\n")
    return root


def write_svhn(root: Path, records: int = 40) -> None:
    """Write digits in the MATLAB format: 32 x 32 x 3 x n bytes, and 10 for the digit 0."""
    (root / svhn.FOLDER).mkdir(parents=True)
    dice = np.random.default_rng(1)
    for part in ("train", "test"):
        pictures = dice.integers(0, 256, (32, 32, 3, records), dtype=np.uint8)
        digits = (np.arange(records) % 10 + 1).astype(np.uint8)[:, None]
        savemat(root / svhn.FOLDER / f"{part}_32x32.mat", {"X": pictures, "y": digits})


def write_cub(root: Path, photos: int = 40) -> None:
    """Write birds of four classes with their lists; every fifth photo is in the test split."""
    folder = root / cub.FOLDER
    (folder / "parts").mkdir(parents=True)
    dice = np.random.default_rng(2)
    kinds = [f"{number:03d}.Bird_{number}" for number in range(1, 5)]
    names = [f"{kinds[row % 4]}/bird_{row:04d}.jpg" for row in range(photos)]
    for name in names:
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        photo = dice.integers(0, 256, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(photo).save(folder / "images" / name)
    lists = {
        "classes.txt": kinds,
        "images.txt": names,
        "image_class_labels.txt": [row % 4 + 1 for row in range(photos)],
        "train_test_split.txt": [int(row % 5 > 0) for row in range(photos)],
        "bounding_boxes.txt": ["10.0 5.0 30.0 20.0"] * photos,
        "parts/parts.txt": ["beak"],
    }
    for name, values in lists.items():
        lines = [f"{number} {value}" for number, value in enumerate(values, start=1)]
        (folder / name).write_text("\n".join(lines) + "\n")
    spots = [f"{number} 1 12.0 8.0 1" for number in range(1, photos + 1)]
    (folder / "parts" / "part_locs.txt").write_text("\n".join(spots) + "\n")


def use_small_readers(patch: pytest.MonkeyPatch) -> None:
    """Make the readers accept as few records as `write_datasets` writes."""
    patch.setattr("overt.data.Cifar10", partial(cifar.Cifar10, records=8, validation=8))
    patch.setattr("overt.data.Cifar100", partial(cifar.Cifar100, records=40, validation=8))
    patch.setattr("overt.data.Svhn", partial(svhn.Svhn, records=40, validation=8))
    patch.setattr("overt.data.Cub", partial(cub.Cub, photos=None, validation=8))
    patch.setattr("overt.data.Trec", partial(trec.Trec, records=40, validation=8))
    patch.setattr("overt.data.EasyVqa", partial(easy_vqa.EasyVqa, validation=4))


def run(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    """Run a recipe on the CPU without output."""
    from overt.experiments import runner
    from overt.papers.catalog import build

    return runner.run(recipe, out, build, device="cpu", show_progress=False, **options)


def fill(table: TableSpec, out: Path, *rows: str, sets: Sequence[str], **options: Any) -> Any:
    """Run each of these rows of a table once on the CPU, without output or reuse."""
    from overt.experiments.table_runner import run_table
    from overt.papers.catalog import build

    quiet = {"show_progress": False, "say": lambda line: None, "reuse": out / "none"}
    fixed = {"seeds": 1, "device": "cpu", **quiet}
    return run_table(table, out, build, rows=rows, sets=sets, **fixed, **options)
