"""Every task of self-supervision runs, tiny, on files in the official formats."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overt import files, models
from overt.data import daquar, hat, vqa, yelp
from overt.data.held import Held
from overt.errors import BadInput
from overt.recipes.recipe import Context
from overt.recipes.ssa import building as ssa_building
from overt.recipes.ssa.recipe import (
    Answerer,
    AskModel,
    Files,
    Pretrained,
    Questions,
    Reader,
    TextModel,
)
from tests.data import test_daquar, test_hat, test_yelp
from tests.recipes import foreign, tiny

SMALL = ("surrogate.count=4", "surrogate.texts=4", "surrogate.probes=3")
FEW = replace(vqa.V1, questions={})
Run = Callable[..., tuple[Path, dict[str, Any]]]


def write_photo(path: Path, size: tuple[int, int] = (6, 8), value: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path, quality=95)
    return path


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("ssa-trec", ...)` runs a recipe, tiny; its folder and results."""
    tiny.expect_few(monkeypatch)
    monkeypatch.setenv("OVERT_CACHE", str(few / "cache"))

    def run(name: str, *sets: str, root: Path = few) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / "run"
        return out, tiny.run(tiny.recipe(name, *SMALL, *sets), out, data_root=root)

    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ssa-trec", models.TextClassifier),
        ("ssa-cifar10", models.AttentiveCNN),
        ("ssa-easyvqa", models.VQA),
        ("ssa-scenes", models.VQA),
    ],
)
def test_a_task_runs_and_says_what_it_found(run: Run, name: str, kind: Any) -> None:
    more = ("data.train=4", "data.val=4", "data.test=4") if name == "ssa-scenes" else ()
    out, results = run(name, *more)
    assert results["status"] == "done" and results["steps"] == 4
    assert [one["split"] for one in results["data"]] == ["train", "val", "test"]
    ours = results["ours"]
    assert {"accuracy", "accuracy_before", "base_score", "best_score", "improved"} <= set(ours)
    assert ours["best_score"]["value"] >= ours["base_score"]["value"]
    assert 0 <= ours["improved"]["value"] <= 1
    assert ours[f"gamma_{'text' if name == 'ssa-trec' else 'image'}"]["value"] > 0
    assert ("pointing_before" in ours) is (name == "ssa-scenes")
    assert ("deletion_overwritten" in ours) is (name == "ssa-trec")
    assert isinstance(kind.from_pretrained(out / "model"), kind)


def test_image_question_and_both_are_taught(run: Run) -> None:
    ours = run("ssa-easyvqa", "supervise.over=both")[1]["ours"]
    assert {"gamma_image", "gamma_text", "improved_image", "improved_text"} <= set(ours)
    assert {"whole_text_score", "two_words_score"} <= set(ours)


def test_the_structured_reader_of_the_paper() -> None:
    full = TextModel(Reader.STRUCTURED, hops=30)
    net = ssa_building.text_classifier(full, 50, 6)
    assert isinstance(net, models.StructuredClassifier)
    made = net.config()
    assert (made["state"], made["hidden"], made["hops"], made["joint"]) == (256, 350, 30, 2000)


def test_a_pretrained_encoder_is_tuned(run: Run, tmp_path: Path) -> None:
    folder = foreign.bert(tmp_path / "bert")
    out, results = run("ssa-minilm", f"model.folder={folder}", "model.width=0.5")
    assert results["steps"] == 4 and "gamma_text" in results["ours"]
    net = models.TextTransformer.from_pretrained(out / "model")
    assert len(net.model.base_model.encoder.layer) == 1  # half of two
    with pytest.raises(BadInput, match=r"config\.json is missing"):
        ssa_building.tuner(Pretrained(str(tmp_path / "none")))(2)


@pytest.mark.parametrize("target", ["surrogate", "truth"])
def test_reviews_are_held_against_people(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    test_yelp.write(tmp_path)
    small = partial(yelp.YelpHat, reviews=10, test=2, validation=3)
    monkeypatch.setattr("overt.data.YelpHat", small)
    sets = ("supervise.loss=mse", f"supervise.target={target}")
    ours = run("ssa-yelp", *sets, root=tmp_path)[1]["ours"]
    assert {"rank_correlation", "emd", "mass_inside"} <= set(ours)
    searched = {"surrogate_mass_inside", "own_pointing", "emd_before", "rank_correlation_before"}
    assert searched <= set(ours) if target == "surrogate" else not searched & set(ours)


def test_rooms_are_asked_about(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_daquar.write(tmp_path, write_photo)
    small = partial(daquar.Daquar, questions=None, validation=1)
    monkeypatch.setattr("overt.data.Daquar", small)
    sets = ("data.size=32", "model.width=0.02", "supervise.over=question")
    ours = run("ssa-daquar", *sets, root=tmp_path)[1]["ours"]
    # an answer that training does not know counts as wrong here, and not at all in `accuracy`
    assert ours["vqa_accuracy"]["n"] == 2 > ours["accuracy"]["n"]


def test_rooms_are_held_unless_an_answer_is_no_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_daquar.write(tmp_path, write_photo)
    small = partial(daquar.Daquar, questions=None, validation=1)
    monkeypatch.setattr("overt.data.Daquar", small)
    context = Context(tmp_path / "out", device="cpu", data_root=tmp_path)
    every = Questions(Files.DAQUAR, size=32)
    model = AskModel(Answerer.SHOW_ASK_ATTEND, width=0.02)
    held = ssa_building.questions(every, model, context)[0].train
    read = ssa_building.questions(replace(every, answers=1), model, context)[0].train
    assert isinstance(held, Held) and not isinstance(read, Held)
    assert (held.labels >= 0).all()
    assert (read.batch(range(len(read))).labels < 0).any()


def test_vqa_is_held_against_people(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_hat.write(tmp_path, write_photo)
    monkeypatch.setattr("overt.data.vqa.V1", FEW)
    monkeypatch.setattr("overt.data.hat.VqaHat", partial(hat.VqaHat, maps=None, edition=FEW))
    sets = ("data.size=32", "data.answers=2", "model.width=0.02", "surrogate.scale=1")
    results = run("ssa-vqa", *sets, root=tmp_path)[1]
    assert {"vqa_accuracy", "rank_correlation", "emd", "emd_before"} <= set(results["ours"])
    assert results["groups"]["vqa_accuracy"]
    assert results["paper"]["vqa_accuracy"]["value"] == pytest.approx(0.6176)


def test_targets_that_a_task_does_not_have_are_refused(run: Run) -> None:
    with pytest.raises(BadInput, match="does not say where to look in text"):
        run("ssa-trec", "supervise.target=truth")


def test_the_first_network_is_the_same_whatever_is_taught(run: Run, tmp_path: Path) -> None:
    found = []
    for loss in ("mse", "adversarial"):
        out, _ = run("ssa-trec", f"supervise.loss={loss}")
        found.append(files.read_tensors(out / "baseline/model.safetensors"))
        out.rename(tmp_path / loss)
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
