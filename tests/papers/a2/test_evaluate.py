"""Evaluation of a captioner, compared with slow references and the metrics themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import io
from overt.data.batch import Batch
from overt.experiments import settings
from overt.inspect import measure
from overt.metrics.captions import caption_scores
from overt.nn.captioning.captioner import Captioner
from overt.nn.captioning.decoding import DecodingRules, GeneratedTexts, beam_search
from overt.nn.mask_perturbation import Aligner, max_pooling
from overt.nn.output import Decoder
from overt.papers.a2 import evaluate
from overt.papers.a2.config import a2_scenes
from overt.papers.a2.data import A2Data, load_scenes
from overt.papers.a2.evaluate import (
    CiderScorer,
    caption_texts,
    caption_values,
    gallery_samples,
    word_metrics,
)
from overt.papers.a2.model import AlignedCaptioner, build_captioner, cross_attention_places
from overt.papers.a2.next_word import NextWordClassifier, NextWordDataset
from overt.papers.catalog import find_recipe
from overt.viz.gallery_sample import load_gallery
from tests.experiments import tiny, view_checks
from tests.papers.a2.small import PHOTO_SETS, SETS, write_coco

OURS = ("a dog runs", "a cat on a mat", "two birds")
THEIRS = (("a dog runs fast", "the dog"), ("a cat", "cat on the mat"), ("a bird", "two birds fly"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("a2") / "run"
    recipe = settings.apply(find_recipe("a2-scenes"), SETS)
    return out, tiny.run(recipe, out)


@pytest.fixture(scope="module")
def parts() -> A2Data:
    return load_scenes(settings.apply(a2_scenes(), SETS).data)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_run_writes_all_metrics_samples_and_panels(run: tuple[Path, dict[str, Any]]) -> None:
    out, results = run
    io.verify(out)
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
    samples = io.read_arrays(out / "samples.npz")
    assert samples["prediction"].shape == samples["greedy_prediction"].shape == (4,)
    mean = samples["cider_d"].mean(dtype=np.float64)
    assert ours["cider_d"]["value"] == pytest.approx(mean, abs=1e-6)
    again = caption_scores(samples["prediction"].tolist(), THEIRS[:1] * 4)
    assert len(again) == 4
    # attention per caption, five of each image, under the name of the image
    others = io.read_arrays(out / "elsewhere.npz")
    assert others["pointing"].shape == others["pointing.id"].shape == (20,)
    assert others["pointing.id"].tolist() == [
        one for one in samples["id"].tolist() for _ in "12345"
    ]
    [panel] = view_checks.check_view(out, None).panels
    assert len(panel.keys) == 16 and panel.heads == 8


@pytest.mark.long
def test_a_finished_run_is_measured_per_word(run: tuple[Path, dict[str, Any]]) -> None:
    found = measure.from_run(run[0], None, torch.device("cpu"))
    assert isinstance(found.model, NextWordClassifier) and isinstance(found.judged, NextWordDataset)
    kept = AlignedCaptioner.from_pretrained(run[0] / "model").state_dict()
    ours = found.model.captioner.state_dict()
    assert all(bool(torch.equal(ours[name], kept[name])) for name in kept)


@pytest.mark.long
def test_the_gallery_has_one_attention_map_per_word(run: tuple[Path, dict[str, Any]]) -> None:
    gallery = load_gallery(run[0] / "gallery")
    assert len(gallery) == 4
    for one in gallery:
        assert one.image is not None and one.image.shape == (64, 64, 3)
        words = one.prediction.split()
        assert one.answer_cells is not None and len(one.answer_cells) == len(words)
        for grid in one.answer_cells:
            assert grid.shape == (16, 16) and grid.sum() == pytest.approx(1, abs=1e-3)


def test_confidence_intervals_contain_the_scores():
    scores = caption_scores(OURS, THEIRS)
    found = caption_values(scores, "test", "greedy_")
    table = scores.table()
    assert found["greedy_bleu_1"].value == pytest.approx(table["BLEU-1"])
    assert found["greedy_cider_d"].unit == "score"
    for one in found.values():
        assert one.low is not None and one.high is not None and one.low <= one.high


def test_captions_of_one_image_have_no_interval():
    found = caption_values(caption_scores(OURS[:1], THEIRS[:1]), "test")
    assert all(one.low is None and one.high is None for one in found.values())


def test_cider_scorer_equals_the_metric():
    scorer = CiderScorer(THEIRS)
    wanted = caption_scores(OURS, THEIRS).cider_d
    for _ in range(2):  # unknown words of candidates must not change the next call
        np.testing.assert_allclose(scorer(OURS), wanted.numpy(), atol=1e-9)
        scorer(["zebras never seen", "xylophones", "a"])


@pytest.mark.long
def test_chunk_size_does_not_change_the_captions(
    parts: A2Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = settings.apply(a2_scenes(), SETS)
    torch.manual_seed(0)
    model = build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()
    rules, sizes = DecodingRules(max_length=6), []

    def write(net: Decoder, batch: Batch) -> GeneratedTexts:
        sizes.append(len(batch))
        return beam_search(net, batch, 3, rules)

    full = caption_texts(model, parts.test, parts.words, write, each=3)
    monkeypatch.setattr(evaluate, "PORTION", 8)
    assert caption_texts(model, parts.test, parts.words, write, each=3) == full
    assert sizes == [4, 2, 2]


@pytest.mark.long
def test_metrics_before_and_after_alignment_come_from_one_pass(parts: A2Data) -> None:
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=max"])
    torch.manual_seed(0)
    model = build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()
    assert isinstance(model, AlignedCaptioner) and parts.truth is not None
    batch = parts.test.batch([0, 1])
    batch = replace(batch, target=parts.truth.batch([0, 1]).target)
    found = word_metrics(model, batch)
    assert all(one.shape == (10, 2) for one in found.values())
    assert (found["divergence"] > 0).all() and (found["divergence"] < 0.05).all()
    assert not torch.equal(found["mass_inside"], found["mass_inside_before"])
    with model.aligned() as trace:
        model.captioner.decode_captions(
            model.encode(batch),
            batch.tokens[:, :-1],  # type: ignore[index]
        )
    rows = batch.token_mask[:, 1:]  # type: ignore[index]
    reports = trace.report(rows)
    mask = found["mask_mean"] * rows.sum(dim=1, keepdim=True) / rows.sum()
    for layer, report in enumerate(reports):
        assert report.mean == pytest.approx(float(mask.sum(dim=0)[layer]), abs=1e-4)


@pytest.mark.long
def test_mass_inside_equals_a_loop_over_words(parts: A2Data) -> None:
    """Slow reference: attention of the row that predicts a word, in the regions of that word."""
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=none"])
    torch.manual_seed(0)
    model = build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()
    assert parts.truth is not None
    batch = replace(parts.test.batch([2]), target=parts.truth.batch([2]).target)
    found = word_metrics(model, batch)["mass_inside"]
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


class TrueMask(torch.nn.Module):
    """Mask that perturbs the true regions of each word only."""

    def __init__(self, regions: torch.Tensor) -> None:
        super().__init__()
        self.regions = regions

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return 1 - self.regions[:, None].expand(-1, query.shape[1], -1, -1)


@pytest.mark.long
def test_the_oracle_is_max_pooling_with_masks_on_the_true_regions(parts: A2Data) -> None:
    """The aligner gives the same log-probabilities; e m / (1 + (e - 1) m) is the mass."""
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=none"])
    torch.manual_seed(0)
    model = build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()
    assert parts.truth is not None and isinstance(model, Captioner)
    batch = replace(parts.test.batch([0, 1]), target=parts.truth.batch([0, 1]).target)
    found = word_metrics(model, batch)
    assert found["oracle_gain"].shape == (10, 1)
    assert (found["mass_inside_oracle"] > found["mass_inside"]).all()
    assert batch.tokens is not None and batch.token_mask is not None and batch.target is not None
    regions = (batch.target.weights[:, 0, 0, 1:] > 0).float()
    wide = regions.shape[1] + 1  # tokens are padded to the longest caption of the dataset
    tokens, targets = batch.tokens[:, : wide - 1], batch.tokens[:, 1:wide]
    aligner = Aligner(
        model,
        cross_attention_places(model.sizes),
        fuse=max_pooling,
        mask=lambda place: TrueMask(regions),
    )
    memory = model.encode(batch)
    with torch.no_grad():
        plain = model.decode_captions(memory, tokens)
        before = plain.logits.log_softmax(dim=-1)
        with aligner.aligned():
            after = model.decode_captions(memory, tokens).logits.log_softmax(dim=-1)
    gain = (after - before).gather(-1, targets[..., None])[..., 0]
    mass = (plain.attention.weights[:, 0] * regions[:, None]).sum(dim=-1)
    stronger = (np.e * mass / (1 + (np.e - 1) * mass)).mean(dim=1)
    mentioned = regions.any(dim=-1) & batch.token_mask[:, 1:wide]
    for row, there in enumerate(mentioned):
        wanted = float(gain[row][there].mean()), float(stronger[row][there].mean())
        given = found["oracle_gain"][row, 0], found["mass_inside_oracle"][row, 0]
        assert [float(one) for one in given] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.long
def test_runs_without_photos_have_no_gallery(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    sets = [*PHOTO_SETS, f"data.features={folder}", "data.minimum=1", "train.steps=1"]
    recipe = settings.apply(find_recipe("a2-coco"), sets)
    results = tiny.run(recipe, tmp_path / "run", data_root=tmp_path)
    assert results["status"] == "done" and results["paper"]["cider_d"]["value"] == 1.25
    assert not (tmp_path / "run" / "gallery").exists()
    assert "pointing" not in results["ours"] and "tau_removal" in results["ours"]


@pytest.mark.long
def test_a_caption_without_words_has_no_maps(parts: A2Data) -> None:
    recipe = settings.apply(a2_scenes(), [*SETS, "align.fuse=none"])
    model = build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()
    for one in gallery_samples(model, parts, DecodingRules(max_length=1)):
        grids = () if one.answer_cells is None else one.answer_cells
        assert len(grids) == len(one.prediction.split()) <= 1
