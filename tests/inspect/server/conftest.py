"""Fixtures of the inspection server: small untrained runs of each kind, and request bodies."""

import base64
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import io as overt_io
from overt.experiments.inference_spec import ImageInput, InferenceSpec, spec_files
from overt.nn import (
    VQA,
    Captioner,
    CaptionerSizes,
    CNNEncoder,
    HardAttention,
    MeanPooling,
    SoftAttention,
    VLBert,
    VLBertSizes,
    VQASizes,
    keep_top,
)
from overt.nn.captioning.captioner import CachedRegionEncoder
from overt.nn.vlbert.model import ClassificationHead
from overt.nn.vlbert.regions import PooledRegionEncoder
from overt.nn.vqa.question_encoders import LSTMQuestionEncoder
from overt.papers.a2.data import REGION_WIDTH
from overt.papers.han.networks import HAN, AnswerHead
from overt.viz.gallery_sample import GallerySample, save_gallery

WORDS = tuple("what colour is the red ball".split())
ANSWERS = ("red", "green", "blue")
PHOTO = np.random.default_rng(3).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def encode_png(photo: np.ndarray = PHOTO) -> str:
    stream = io.BytesIO()
    Image.fromarray(photo).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


def write_run(folder: Path, attends: bool = True) -> Path:
    """Write a finished run: model, results, gallery."""
    torch.manual_seed(0)
    sizes = VQASizes(5 + len(WORDS), len(ANSWERS), cell=8, word=6, question=8, hidden=8)
    attend = SoftAttention(sizes.seen, 8, 8, 2) if attends else MeanPooling()
    known = InferenceSpec("VQA", ANSWERS, WORDS, (32, 32))
    VQA(sizes, attend).eval().save_pretrained(folder / "model", spec_files(known))
    samples = [
        GallerySample(
            f"s{n}", PHOTO, text="what colour is the ball", truth="red", prediction="blue"
        )
        for n in range(3)
    ]
    save_gallery(folder / "gallery", samples)
    overt_io.write_json(
        folder / "results.json", {"recipe": "toy", "about": "a toy", "status": "done"}
    )
    return folder


def _write_results(folder: Path, text: str | None) -> Path:
    """Write the results and the gallery of a run."""
    sample = GallerySample("s0", PHOTO, text=text, truth="first", prediction="blue")
    save_gallery(folder / "gallery", [sample])
    overt_io.write_json(
        folder / "results.json", {"recipe": "toy", "about": "a toy", "status": "done"}
    )
    return folder


def write_hard(folder: Path) -> Path:
    """Write a run of hard attention that keeps a few cells of a CNN."""
    torch.manual_seed(0)
    eye, reader = CNNEncoder([4, 6], [2, 2]), LSTMQuestionEncoder(5 + len(WORDS), 6, 8)
    attend = HardAttention(eye.width, reader.width, 8, 1, partial(keep_top, count=5))
    net = HAN(eye, reader, attend, AnswerHead((8,), len(ANSWERS)))
    known = InferenceSpec("HAN", ANSWERS, WORDS, (32, 32))
    net.eval().save_pretrained(folder / "model", spec_files(known))
    return _write_results(folder, "what colour is the ball")


def write_boxes(folder: Path) -> Path:
    """Write a run of a model that grounds words in boxes."""
    torch.manual_seed(0)
    sizes = VLBertSizes(5 + len(WORDS), 12, 2, 3, 16, positions=80, dropout=0.0, gain=1.0)
    net = VLBert(sizes, PooledRegionEncoder([4, 6], [2, 2]), ClassificationHead(12, 3, 0.0))
    known = InferenceSpec("VLBert", ("both", "first", "second"), WORDS, (32, 32), ImageInput.BOXES)
    net.eval().save_pretrained(folder / "model", spec_files(known))
    return _write_results(folder, "the red ball / what colour")


def write_captioner(folder: Path) -> Path:
    """Write a run of a captioner."""
    torch.manual_seed(1)
    sizes = CaptionerSizes(5 + len(WORDS), width=16, layers=2, heads=2, inner=16, dropout=0.0)
    net = Captioner(sizes, CachedRegionEncoder(REGION_WIDTH))
    known = InferenceSpec("Captioner", (), WORDS, (32, 32), ImageInput.CROPS, longest=5)
    net.eval().save_pretrained(folder / "model", spec_files(known))
    return _write_results(folder, "the red ball / a ball")


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of each kind of model."""
    folder = tmp_path_factory.mktemp("kinds")
    write_hard(folder / "hard")
    write_boxes(folder / "boxes")
    write_captioner(folder / "captioner")
    return folder


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs: one with attention, one without."""
    folder = tmp_path_factory.mktemp("demo")
    write_run(folder / "average", attends=False)
    write_run(folder / "soft")
    return folder


@pytest.fixture(scope="session")
def ask() -> Callable[..., dict]:
    """Return a function that makes the body of a question about the toy network."""

    def body(**changes: object) -> dict:
        base = {"model": "soft", "picture": encode_png(), "text": "what colour is the ball"}
        return {name: value for name, value in {**base, **changes}.items() if value is not None}

    return body
