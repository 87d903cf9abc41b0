"""Next-word prediction of a captioner: the word, its attention map, and its scorecard."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overt import metrics
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.experiments.run_scorecard import write_scorecard
from overt.papers.a2 import config as a2
from overt.papers.a2.data import A2Data, load_scenes
from overt.papers.a2.model import build_captioner
from overt.papers.a2.next_word import NextWordClassifier, NextWordDataset
from overt.papers.a2.train import build
from overt.papers.catalog import find_recipe
from tests.papers.a2.small import SETS


def find_row_recipe(label: str) -> Any:
    return settings.apply(find_recipe("a2-scenes"), [*SETS, *a2.table_rows()[label]])


@pytest.fixture(scope="module")
def parts() -> A2Data:
    return load_scenes(find_row_recipe("none").data)


def build_model(parts: A2Data, label: str) -> Any:
    recipe = find_row_recipe(label)
    torch.manual_seed(0)
    return build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()


def test_a_sample_is_a_word_with_annotated_regions(parts: A2Data) -> None:
    data = NextWordDataset(parts.test, parts.truth)
    batch = data.batch([2, 0])
    assert len(batch) == 2 and batch.target is not None and batch.labels is not None
    assert batch.tokens is not None and batch.token_mask is not None
    torch.testing.assert_close(batch.target.weights.sum(dim=-1).flatten(), torch.ones(2))
    for row, picture in enumerate((2, 0)):
        full = parts.test.batch([picture])
        truth = parts.truth.batch([picture]).target  # type: ignore[union-attr]
        name, number = batch.ids[row].split("#")
        assert name == parts.test.ids[picture] and full.tokens is not None and truth is not None
        place = int(batch.token_mask[row].sum())
        caption = full.tokens[int(number)]
        assert torch.equal(batch.tokens[row, :place], caption[:place])
        assert not batch.tokens[row, place:].any() and batch.labels[row] == caption[place]
        assert torch.equal(
            batch.target.weights[row, 0, 0, 0], truth.weights[int(number), 0, 0, place]
        )


def test_the_chosen_word_depends_on_the_image_only(parts: A2Data) -> None:
    data = NextWordDataset(parts.test)  # without a truth, any word
    alone, batched = data.batch([3]), data.batch([1, 3])
    assert alone.ids == batched.ids[1:] and alone.target is None
    assert torch.equal(alone.tokens[0], batched.tokens[1])  # type: ignore[index]
    assert (data.name, data.split, data.digest()) == (
        *(parts.test.name, parts.test.split),
        parts.test.digest(),
    )


@pytest.mark.parametrize("label", ["none", "gate"])
@torch.no_grad()
def test_prediction_and_map_equal_those_of_the_decoding_step(parts: A2Data, label: str) -> None:
    model = build_model(parts, label)
    batch = NextWordDataset(parts.test, parts.truth).batch([0, 1, 2])
    classifier = NextWordClassifier(model)
    found = classifier(batch)
    assert batch.tokens is not None and batch.token_mask is not None
    for row in range(3):
        short = batch.tokens[row : row + 1, : int(batch.token_mask[row].sum())]
        one = batch.select(torch.tensor([row]))
        plain = model.captioner if label == "gate" else model
        state = model.start(plain.encode(one))
        for token in short.T:
            output, state = model.step(state, token)
        torch.testing.assert_close(found.prediction[row], output.prediction[0])
        ours, theirs = found.attention[0].weights[row], output.attention[0].weights[0]
        torch.testing.assert_close(ours, theirs)
    kept = torch.ones(3, 16)
    kept[:, :5] = 0
    hidden = classifier.decide(classifier.encode(batch), {"regions": kept}).attention[0]
    assert not hidden.weights[..., :5].any()
    torch.testing.assert_close(hidden.weights.sum(dim=-1), torch.ones(3, 2, 8, 1))


@pytest.mark.long
def test_a_run_has_a_scorecard(tmp_path: Path) -> None:
    built = build(find_row_recipe("gate"), RunContext(tmp_path, device="cpu"))
    found = write_scorecard(built, tmp_path, wanted=4, flops=1e6, seed=0)
    assert (found.n, found.reason) == (4, "")
    scorecard = metrics.Scorecard.load(tmp_path / "scorecard")
    expected = {"accuracy", "pointing_game", "mass_inside", "deletion_area@mask"}
    assert expected <= set(scorecard.keys) and scorecard.subject == "attention"


def test_encoding_without_tokens_raises(parts: A2Data) -> None:
    with pytest.raises(ValueError, match=r"batch\.tokens"):
        NextWordClassifier(build_model(parts, "none")).encode(parts.test.without_captions([0]))
