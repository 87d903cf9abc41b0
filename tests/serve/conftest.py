"""A demo's worth of runs that take no training, and the models of other people."""

import base64
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import files
from overt.models import (
    HAN,
    VQA,
    Captioner,
    CaptionSizes,
    HardAttention,
    MeanPool,
    Sizes,
    SoftAttention,
    TrainedEye,
    VLBert,
    VLSizes,
    keep_top,
)
from overt.models.answering.questions import Recurrent
from overt.models.captioning.captioner import CachedRegions
from overt.models.hard.nets import Decision
from overt.models.vlbert.model import Classify
from overt.models.vlbert.regions import PooledRegions
from overt.recipes.a2.data import WIDTH
from overt.recipes.spoken import Sees, Spoken, beside
from overt.show.sample import Sample, save_gallery

WORDS = tuple("what colour is the red ball".split())
ANSWERS = ("red", "green", "blue")
PHOTO = np.random.default_rng(3).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def encoded(photo: np.ndarray = PHOTO) -> str:
    stream = io.BytesIO()
    Image.fromarray(photo).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


def write_run(folder: Path, attends: bool = True) -> Path:
    """A finished run as `overt serve` meets it: model, results, gallery."""
    torch.manual_seed(0)
    sizes = Sizes(5 + len(WORDS), len(ANSWERS), cell=8, word=6, question=8, hidden=8)
    attend = SoftAttention(sizes.seen, 8, 8, 2) if attends else MeanPool()
    known = Spoken("VQA", ANSWERS, WORDS, (32, 32))
    VQA(sizes, attend).eval().save_pretrained(folder / "model", beside(known))
    samples = [
        Sample(f"s{n}", PHOTO, text="what colour is the ball", truth="red", prediction="blue")
        for n in range(3)
    ]
    save_gallery(folder / "gallery", samples)
    files.write_json(folder / "results.json", {"recipe": "toy", "about": "a toy", "status": "done"})
    return folder


def _finished(folder: Path, text: str | None) -> Path:
    """What a run leaves beside its model."""
    sample = Sample("s0", PHOTO, text=text, truth="first", prediction="blue")
    save_gallery(folder / "gallery", [sample])
    files.write_json(folder / "results.json", {"recipe": "toy", "about": "a toy", "status": "done"})
    return folder


def write_hard(folder: Path) -> Path:
    """A run of hard attention: a few cells of a CNN are kept."""
    torch.manual_seed(0)
    eye, reader = TrainedEye([4, 6], [2, 2]), Recurrent(5 + len(WORDS), 6, 8)
    attend = HardAttention(eye.width, reader.width, 8, 1, partial(keep_top, count=5))
    net = HAN(eye, reader, attend, Decision((8,), len(ANSWERS)))
    known = Spoken("HAN", ANSWERS, WORDS, (32, 32))
    net.eval().save_pretrained(folder / "model", beside(known))
    return _finished(folder, "what colour is the ball")


def write_boxes(folder: Path) -> Path:
    """A run that ties words to boxes."""
    torch.manual_seed(0)
    sizes = VLSizes(5 + len(WORDS), 12, 2, 3, 16, positions=80, dropout=0.0, gain=1.0)
    net = VLBert(sizes, PooledRegions([4, 6], [2, 2]), Classify(12, 3, 0.0))
    known = Spoken("VLBert", ("both", "first", "second"), WORDS, (32, 32), Sees.BOXES)
    net.eval().save_pretrained(folder / "model", beside(known))
    return _finished(folder, "the red ball / what colour")


def write_captioner(folder: Path) -> Path:
    """A run that describes pictures."""
    torch.manual_seed(1)
    sizes = CaptionSizes(5 + len(WORDS), width=16, layers=2, heads=2, inner=16, dropout=0.0)
    net = Captioner(sizes, CachedRegions(WIDTH))
    known = Spoken("Captioner", (), WORDS, (32, 32), Sees.CROPS, longest=5)
    net.eval().save_pretrained(folder / "model", beside(known))
    return _finished(folder, "the red ball / a ball")


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one run of each kind that is asked in its own way."""
    folder = tmp_path_factory.mktemp("kinds")
    write_hard(folder / "hard")
    write_boxes(folder / "boxes")
    write_captioner(folder / "captioner")
    return folder


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs: one that attends, one that does not."""
    folder = tmp_path_factory.mktemp("demo")
    write_run(folder / "average", attends=False)
    write_run(folder / "soft")
    return folder


@pytest.fixture(scope="session")
def ask() -> Callable[..., dict]:
    """The body of a question about the toy network."""

    def body(**changes: object) -> dict:
        base = {"model": "soft", "picture": encoded(), "text": "what colour is the ball"}
        return {name: value for name, value in {**base, **changes}.items() if value is not None}

    return body
