"""VQA datasets in their official formats, with a few records each."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.data import clevr, daquar, vqa
from overt.data.vqa import CP2
from tests.data import test_clevr as clevr_files
from tests.data import vqa_files

SMALL = ("model.width=0.1", "train.steps=2")
QUESTIONS = (
    "what is on the table,cup",
    "how many chairs are there,{number}",
    "what is the colour of the wall,white",
)


def write_photo(path: Path, size: tuple[int, int], level: int) -> None:
    """Write an image of one grey level with noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(level).integers(0, 20, (*size, 3))
    Image.fromarray((noise + level).clip(0, 255).astype(np.uint8)).save(path)


def write_datasets(root: Path) -> Path:
    """Write DAQUAR, VQA-CP v2 and CLEVR below `root`."""
    folder = root / daquar.FOLDER
    names = [f"image{number}" for number in range(1, 13)]
    lines = ["question,answer,image_id"]
    for number, name in enumerate(names):
        write_photo(folder / "images" / f"{name}.jpg", (48, 64), 20 * number)
        lines += [f"{one.format(number=number % 3)},{name}" for one in QUESTIONS]
    (folder / daquar.TABLE).write_text("\n".join(lines) + "\n")
    (folder / daquar.TRAIN_LIST).write_text("\n".join(names[:8]) + "\n")
    (folder / daquar.TEST_LIST).write_text("\n".join(names[8:]) + "\n")
    vqa_files.write_vqa(root, write_photo, CP2)
    clevr_files.write_clevr(root)
    return root


def use_small_readers(patch: pytest.MonkeyPatch) -> None:
    """Make the readers accept as few records as `write_datasets` writes."""
    few = partial(daquar.Daquar, questions=None, validation=2)
    edition = replace(CP2, questions={})
    patch.setattr("overt.data.Daquar", few)
    patch.setattr("overt.data.vqacp2", partial(vqa.Vqa, edition=edition, validation=1))
    patch.setattr("overt.data.Clevr", partial(clevr.Clevr, questions=None))
