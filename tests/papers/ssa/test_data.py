"""Datasets of Self Supervision for Attention Networks, from files in the official formats."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from overt.data import daquar, vqa, vqa_hat, yelp_hat
from overt.data.in_memory import InMemoryDataset
from overt.experiments.recipe import RunContext
from overt.papers.ssa import data as ssa_data
from overt.papers.ssa.config import (
    SsaDataset,
    SsaQuestions,
    SsaVqaModel,
    SsaVqaNetwork,
)
from tests.data import test_daquar
from tests.data import test_vqa_hat as test_hat
from tests.data import test_yelp_hat as test_yelp

SMALL_EDITION = replace(vqa.V1, questions={})
RunFixture = Callable[..., tuple[Path, dict[str, Any]]]


def write_photo(path: Path, size: tuple[int, int] = (6, 8), value: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path, quality=95)
    return path


@pytest.mark.parametrize("target", ["surrogate", "truth"])
def test_yelp_attention_is_compared_with_human_attention(
    run: RunFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    test_yelp.write_yelp_hat(tmp_path)
    small = partial(yelp_hat.YelpHat, reviews=10, test=2, validation=3)
    monkeypatch.setattr("overt.data.YelpHat", small)
    sets = ("supervise.loss=mse", f"supervise.target={target}")
    ours = run("ssa-yelp", *sets, root=tmp_path)[1]["ours"]
    assert {"rank_correlation", "emd", "mass_inside"} <= set(ours)
    searched = {"surrogate_mass_inside", "own_pointing", "emd_before", "rank_correlation_before"}
    assert searched <= set(ours) if target == "surrogate" else not searched & set(ours)


@pytest.mark.long
def test_daquar_runs_and_counts_unknown_answers_as_wrong(
    run: RunFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_daquar.write_daquar(tmp_path, write_photo)
    small = partial(daquar.Daquar, questions=None, validation=1)
    monkeypatch.setattr("overt.data.Daquar", small)
    sets = ("data.size=32", "model.width=0.02", "supervise.over=question")
    ours = run("ssa-daquar", *sets, root=tmp_path)[1]["ours"]
    # an answer outside the training answers is wrong here, and not counted in `accuracy`
    assert ours["vqa_accuracy"]["n"] == 2 > ours["accuracy"]["n"]


def test_daquar_is_in_memory_unless_an_answer_is_not_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_daquar.write_daquar(tmp_path, write_photo)
    small = partial(daquar.Daquar, questions=None, validation=1)
    monkeypatch.setattr("overt.data.Daquar", small)
    context = RunContext(tmp_path / "out", device="cpu", data_root=tmp_path)
    every = SsaQuestions(SsaDataset.DAQUAR, size=32)
    model = SsaVqaModel(SsaVqaNetwork.SHOW_ASK_ATTEND, width=0.02)
    in_memory = ssa_data.load_questions(every, model, context)[0].train
    read = ssa_data.load_questions(replace(every, answers=1), model, context)[0].train
    assert isinstance(in_memory, InMemoryDataset) and not isinstance(read, InMemoryDataset)
    assert (in_memory.labels >= 0).all()
    assert (read.batch(range(len(read))).labels < 0).any()


@pytest.mark.long
def test_vqa_attention_is_compared_with_human_attention(
    run: RunFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_hat.write_vqa_hat(tmp_path, write_photo)
    monkeypatch.setattr("overt.data.vqa.V1", SMALL_EDITION)
    monkeypatch.setattr(
        "overt.papers.ssa.data.VqaHat", partial(vqa_hat.VqaHat, maps=None, edition=SMALL_EDITION)
    )
    sets = ("data.size=32", "data.answers=2", "model.width=0.02", "surrogate.scale=1")
    results = run("ssa-vqa", *sets, root=tmp_path)[1]
    assert {"vqa_accuracy", "rank_correlation", "emd", "emd_before"} <= set(results["ours"])
    assert results["groups"]["vqa_accuracy"]
    assert results["paper"]["vqa_accuracy"]["value"] == pytest.approx(0.6176)
