"""A captioner asked for one word: the word, its map, and what a scorecard makes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overt import measure
from overt.recipes import find, settings
from overt.recipes.a2 import recipe as a2
from overt.recipes.a2.building import build
from overt.recipes.a2.data import Parts, scenes
from overt.recipes.a2.judging import NextWord, NextWords
from overt.recipes.a2.networks import network
from overt.recipes.recipe import Context
from overt.recipes.reporting import scored
from tests.recipes.a2.small import SETS


def made(label: str) -> Any:
    return settings.apply(find("a2-scenes"), [*SETS, *a2.rows()[label]])


@pytest.fixture(scope="module")
def parts() -> Parts:
    return scenes(made("none").data)


def net(parts: Parts, label: str) -> Any:
    recipe = made(label)
    torch.manual_seed(0)
    return network(recipe.model, recipe.align, parts.words.size, parts.eye).eval()


def test_a_sample_is_a_word_that_speaks_of_regions(parts: Parts) -> None:
    data = NextWords(parts.test, parts.truth)
    batch = data.batch([2, 0])
    assert len(batch) == 2 and batch.target is not None and batch.labels is not None
    assert batch.tokens is not None and batch.token_mask is not None
    torch.testing.assert_close(batch.target.weights.sum(dim=-1).flatten(), torch.ones(2))
    for row, picture in enumerate((2, 0)):
        whole = parts.test.batch([picture])
        truth = parts.truth.batch([picture]).target  # type: ignore[union-attr]
        name, number = batch.ids[row].split("#")
        assert name == parts.test.ids[picture] and whole.tokens is not None and truth is not None
        place = int(batch.token_mask[row].sum())
        said = whole.tokens[int(number)]
        assert torch.equal(batch.tokens[row, :place], said[:place])
        assert not batch.tokens[row, place:].any() and batch.labels[row] == said[place]
        assert torch.equal(
            batch.target.weights[row, 0, 0, 0], truth.weights[int(number), 0, 0, place]
        )


def test_which_word_it_is_depends_on_the_picture_alone(parts: Parts) -> None:
    data = NextWords(parts.test)  # without a truth, any word
    alone, beside = data.batch([3]), data.batch([1, 3])
    assert alone.ids == beside.ids[1:] and alone.target is None
    assert torch.equal(alone.tokens[0], beside.tokens[1])  # type: ignore[index]
    assert (data.name, data.split, data.digest()) == (
        *(parts.test.name, parts.test.split),
        parts.test.digest(),
    )


@pytest.mark.parametrize("label", ["none", "gate"])
@torch.no_grad()
def test_the_answer_and_the_map_are_those_of_the_row_it_is_written_from(
    parts: Parts, label: str
) -> None:
    model = net(parts, label)
    batch = NextWords(parts.test, parts.truth).batch([0, 1, 2])
    judge = NextWord(model)
    found = judge(batch)
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
    hidden = judge.decide(judge.encode(batch), {"regions": kept}).attention[0]
    assert not hidden.weights[..., :5].any()
    torch.testing.assert_close(hidden.weights.sum(dim=-1), torch.ones(3, 2, 8, 1))


def test_a_run_has_a_scorecard(tmp_path: Path) -> None:
    built = build(made("gate"), Context(tmp_path, device="cpu"))
    found = scored(built, tmp_path, wanted=4, flops=1e6, seed=0)
    assert (found.n, found.why) == (4, "")
    card = measure.Scorecard.load(tmp_path / "scorecard")
    asked = {"accuracy", "pointing_game", "mass_inside", "deletion_area@mask"}
    assert asked <= set(card.keys) and card.subject == "attention"


def test_words_are_needed(parts: Parts) -> None:
    with pytest.raises(ValueError, match="words before it"):
        NextWord(net(parts, "none")).encode(parts.test.pictures([0]))
