"""A demo's worth of runs that take no training, and the models of other people."""

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import files
from overt.models import VQA, MeanPool, Sizes, SoftAttention
from overt.recipes.spoken import Spoken, beside
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
