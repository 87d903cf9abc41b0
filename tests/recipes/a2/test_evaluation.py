"""How a captioner is judged, against slow copies and the measures themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import files
from overt.data.batch import Batch
from overt.measure.captions import caption_scores
from overt.models.captioning.decoding import Rules, Texts, beam
from overt.models.output import Decoder
from overt.recipes import find, measuring, settings
from overt.recipes.a2 import evaluation
from overt.recipes.a2.data import Parts, scenes
from overt.recipes.a2.evaluation import Scorer, of_words, shown, spoken, texts_of
from overt.recipes.a2.judging import NextWord, NextWords
from overt.recipes.a2.networks import AlignedCaptioner, network
from overt.recipes.a2.recipe import a2_scenes
from overt.show.sample import load_gallery
from tests.recipes import askable, tiny
from tests.recipes.a2.small import PHOTO_SETS, SETS, write_coco

OURS = ("a dog runs", "a cat on a mat", "two birds")
THEIRS = (("a dog runs fast", "the dog"), ("a cat", "cat on the mat"), ("a bird", "two birds fly"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("a2") / "run"
    recipe = settings.apply(find("a2-scenes"), SETS)
    return out, tiny.run(recipe, out)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return scenes(settings.apply(a2_scenes(), SETS).data)  # type: ignore[arg-type]


def test_a_run_says_all_of_it(run: tuple[Path, dict[str, Any]]) -> None:
    out, results = run
    files.verify(out)
    ours = results["ours"]
    names = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "meteor", "rouge_l", "cider_d")
    for name in (*names, *(f"greedy_{one}" for one in names), "words", "val_cider_d"):
        assert ours[name]["n"] == 4, name
    assert ours["val_cider_d"]["split"] == "val" and ours["cider_d"]["split"] == "test"
    assert ours["val_pointing"]["split"] == "val" and 0 <= ours["val_pointing"]["value"] <= 1
    for name in ("mask_mean", "mask_spread", "divergence", "pointing", "pointing_before"):
        assert name in ours and set(results["groups"][name]) == {"layer 1", "layer 2"}
    for name in ("tau_removal", "tau_removal_before", "tau_removal_masks", "tau_gradient_masks"):
        assert -1 <= ours[name]["value"] <= 1
    samples = files.read_arrays(out / "samples.npz")
    assert samples["prediction"].shape == samples["greedy_prediction"].shape == (4,)
    mean = samples["cider_d"].mean(dtype=np.float64)
    assert ours["cider_d"]["value"] == pytest.approx(mean, abs=1e-6)
    again = caption_scores(samples["prediction"].tolist(), THEIRS[:1] * 4)
    assert len(again) == 4
    [panel] = askable.ask(out, None).panels
    assert len(panel.keys) == 16 and panel.heads == 8


def test_a_finished_run_can_be_measured_word_by_word(run: tuple[Path, dict[str, Any]]) -> None:
    found = measuring.from_run(run[0], None, torch.device("cpu"))
    assert isinstance(found.model, NextWord) and isinstance(found.judged, NextWords)
    kept = AlignedCaptioner.from_pretrained(run[0] / "model").state_dict()
    ours = found.model.captioner.state_dict()
    assert all(bool(torch.equal(ours[name], kept[name])) for name in kept)


def test_the_page_shows_each_word_with_its_look(run: tuple[Path, dict[str, Any]]) -> None:
    gallery = load_gallery(run[0] / "gallery")
    assert len(gallery) == 4
    for one in gallery:
        assert one.image is not None and one.image.shape == (64, 64, 3)
        words = one.prediction.split()
        assert one.answer_cells is not None and len(one.answer_cells) == len(words)
        for grid in one.answer_cells:
            assert grid.shape == (16, 16) and grid.sum() == pytest.approx(1, abs=1e-3)


def test_intervals_are_around_what_the_measures_say():
    scores = caption_scores(OURS, THEIRS)
    found = spoken(scores, "test", "greedy_")
    table = scores.table()
    assert found["greedy_bleu_1"].value == pytest.approx(table["BLEU-1"])
    assert found["greedy_cider_d"].unit == "score"
    for one in found.values():
        assert one.low is not None and one.high is not None and one.low <= one.high


def test_validation_scores_as_the_measure_does():
    scorer = Scorer(THEIRS)
    wanted = caption_scores(OURS, THEIRS).cider_d
    for _ in range(2):  # words of candidates that nobody said must not count the next time
        np.testing.assert_allclose(scorer(OURS), wanted.numpy(), atol=1e-9)
        scorer(["zebras never seen", "xylophones", "a"])


def test_portions_do_not_change_what_is_written(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = settings.apply(a2_scenes(), SETS)
    torch.manual_seed(0)
    model = network(recipe.model, recipe.align, parts.words.size, parts.eye).eval()
    rules, sizes = Rules(longest=6), []

    def write(net: Decoder, batch: Batch) -> Texts:
        sizes.append(len(batch))
        return beam(net, batch, 3, rules)

    whole = texts_of(model, parts.test, parts.words, write, each=3)
    monkeypatch.setattr(evaluation, "PORTION", 8)
    assert texts_of(model, parts.test, parts.words, write, each=3) == whole
    assert sizes == [4, 2, 2]


def test_what_is_before_and_after_alignment_is_of_one_pass(parts: Parts) -> None:
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=max"])
    torch.manual_seed(0)
    model = network(recipe.model, recipe.align, parts.words.size, parts.eye).eval()
    assert isinstance(model, AlignedCaptioner) and parts.truth is not None
    batch = parts.test.batch([0, 1])
    batch = replace(batch, target=parts.truth.batch([0, 1]).target)
    found = of_words(model, batch)
    assert all(one.shape == (10, 2) for one in found.values())
    assert (found["divergence"] > 0).all() and (found["divergence"] < 0.05).all()
    assert not torch.equal(found["mass_inside"], found["mass_inside_before"])
    with model.aligned() as seen:
        model.captioner.write(
            model.encode(batch),
            batch.tokens[:, :-1],  # type: ignore[index]
        )
    rows = batch.token_mask[:, 1:]  # type: ignore[index]
    reports = seen.report(rows)
    mask = found["mask_mean"] * rows.sum(dim=1, keepdim=True) / rows.sum()
    for layer, report in enumerate(reports):
        assert report.mean == pytest.approx(float(mask.sum(dim=0)[layer]), abs=1e-4)


def test_mass_is_counted_word_by_word(parts: Parts) -> None:
    """The slow way: the row that writes a word, against the regions that the word speaks of."""
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=none"])
    torch.manual_seed(0)
    model = network(recipe.model, recipe.align, parts.words.size, parts.eye).eval()
    assert parts.truth is not None
    batch = replace(parts.test.batch([2]), target=parts.truth.batch([2]).target)
    found = of_words(model, batch)["mass_inside"]
    attention = model(batch).attention.weights.mean(dim=2).detach()  # type: ignore[operator]
    assert batch.target is not None and batch.token_mask is not None
    truth = batch.target.weights[:, 0, 0] > 0
    for row in range(5):
        inside = [
            float(attention[row, 0, at - 1][truth[row, at]].sum())
            for at in range(1, int(batch.token_mask[row].sum()))
            if truth[row, at].any()
        ]
        assert float(found[row, 0]) == pytest.approx(np.mean(inside), abs=1e-5)


def test_photos_that_are_not_there_are_not_shown(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    sets = [*PHOTO_SETS, f"data.features={folder}", "data.minimum=1", "train.steps=1"]
    recipe = settings.apply(find("a2-coco"), sets)
    results = tiny.run(recipe, tmp_path / "run", data_root=tmp_path)
    assert results["status"] == "done" and results["paper"]["cider_d"]["value"] == 1.25
    assert not (tmp_path / "run" / "gallery").exists()
    assert "pointing" not in results["ours"] and "tau_removal" in results["ours"]


def test_nothing_is_shown_of_a_caption_without_words(parts: Parts) -> None:
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=none"])
    model = network(recipe.model, recipe.align, parts.words.size, parts.eye).eval()
    for one in shown(model, parts, Rules(longest=1)):
        looked = () if one.answer_cells is None else one.answer_cells
        assert len(looked) == len(one.prediction.split()) <= 1
