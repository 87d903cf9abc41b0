"""Crowded scenes: a thing per cell, and evidence that only the question can tell."""

import math

import numpy as np
import pytest
import torch

from overt.data.scenes.crowded_scenes import (
    CrowdedScenes,
    crowded_questions,
    crowded_scene,
    texture_question,
)
from overt.data.scenes.questions import find_evidence, run_program
from overt.data.scenes.render import render
from overt.data.scenes.world import TEXTURES
from overt.errors import UserError

SIDE, KEPT = 6, 9
DATA = CrowdedScenes("test", 0, 24)


def covered(cover: torch.Tensor, kept: torch.Tensor) -> float:
    """Return the mean share of the evidence that lies in kept cells."""
    return float(((cover * kept).sum(dim=1) / cover.sum(dim=1)).mean())


def test_every_cell_has_one_thing_with_a_name_of_its_own() -> None:
    for index in range(6):
        scene = crowded_scene("train", 1, index)
        assert len({(thing.color, thing.shape) for thing in scene.things}) == SIDE * SIDE
        for cell, mask in enumerate(render(scene, 16 * SIDE).masks):
            rows, columns = np.nonzero(mask)
            assert len(rows) > 50
            assert set(rows // 16 * SIDE + columns // 16) == {cell}


def test_the_evidence_is_the_asked_thing_alone() -> None:
    scene = crowded_scene("val", 0, 0)
    for thing, asked in enumerate(scene.things):
        program = texture_question(scene, thing)
        assert find_evidence(program, scene) == {thing}
        assert run_program(program, scene) == asked.texture
    texts = [" ".join(question.words) for question in crowded_questions(scene, 36)]
    assert len(set(texts)) == 36 and all(text.startswith("what texture is the") for text in texts)


def test_any_cells_chosen_without_the_question_cover_exactly_chance() -> None:
    """Of all questions about an image, k of n cells hold the evidence of k / n, whichever k."""
    every = CrowdedScenes("test", 0, 3, questions=SIDE * SIDE)
    dice = torch.Generator().manual_seed(0)
    for index in range(len(every)):
        cover = every.batch([index]).target.coverage[:, 0]
        assert torch.equal((cover > 0).sum(dim=0), torch.ones(36, dtype=torch.long))
        for k in (1, KEPT, 20):
            kept = torch.zeros(36)
            kept[torch.randperm(36, generator=dice)[:k]] = 1
            assert covered(cover, kept) == pytest.approx(k / 36)


def test_choices_by_the_image_cover_no_more_than_chance_of_the_asked_questions() -> None:
    """Rules that see the image, the answers of other scenes, or both; four deviations of chance."""
    batch = DATA.batch(range(len(DATA)))
    cover, chance = batch.target.coverage[:, 0], KEPT / 36
    pixels = batch.images[batch.image_of].float()
    cells = pixels.unfold(2, 16, 16).unfold(3, 16, 16).flatten(4)  # b c y x pixels
    past = CrowdedScenes("train", 0, 24).batch(range(24)).target.coverage[:, 0]
    rules = {
        "brightest": cells.mean(dim=(1, 4)).flatten(1),
        "strongest contrast": cells.std(dim=4).mean(dim=1).flatten(1),
        "largest norm": cells.square().sum(dim=(1, 4)).flatten(1),
        "most often asked before": past.mean(dim=0).expand(len(cover), -1),
    }
    bound = 4 * math.sqrt(chance * (1 - chance) / len(cover))
    for name, scores in rules.items():
        top = scores.topk(KEPT, dim=1).indices
        kept = torch.zeros_like(cover).scatter(1, top, 1.0)
        assert abs(covered(cover, kept) - chance) < bound, name
    oracle = torch.zeros_like(cover).scatter(1, cover.topk(KEPT, dim=1).indices, 1.0)
    assert covered(cover, oracle) == 1


def test_there_are_more_distractors_than_kept_cells_and_answers_are_balanced() -> None:
    batch = DATA.batch(range(len(DATA)))
    assert SIDE * SIDE - 1 > KEPT
    assert abs(float(batch.labels.float().mean()) - 0.5) < 4 * 0.5 / math.sqrt(len(batch))
    assert DATA.answers == TEXTURES


def test_the_place_of_the_evidence_is_uniform() -> None:
    """Chi-squared over 36 cells, at the 99.99 % quantile of 35 degrees of freedom: 74.9."""
    drawn = [
        next(iter(question.evidence))
        for index in range(150)
        for question in crowded_questions(crowded_scene("train", 3, index), 4)
    ]
    counts = np.bincount(drawn, minlength=36)
    expected = len(drawn) / 36
    assert ((counts - expected) ** 2 / expected).sum() < 74.9


def test_batches_repeat_and_depend_on_split_and_seed() -> None:
    one, again = (CrowdedScenes("train", 0, 4, 2).batch([1, 3]) for _ in range(2))
    assert torch.equal(one.images, again.images) and one.text.texts == again.text.texts
    digests = {
        CrowdedScenes(split, seed, 4, questions, side).digest()
        for split, seed, questions, side in (
            *(("train", 0, 2, 6), ("val", 0, 2, 6), ("train", 1, 2, 6)),
            *(("train", 0, 3, 6), ("train", 0, 2, 5)),
        )
    }
    assert len(digests) == 5


@pytest.mark.parametrize("wrong", [{"side": 7}, {"side": 1}, {"questions": 0}, {"questions": 37}])
def test_invalid_settings_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        CrowdedScenes("train", 0, 4, **wrong)
