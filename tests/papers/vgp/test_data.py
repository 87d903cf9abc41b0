"""Data for fine-tuning and for the downstream tasks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt.data.scenes.dataset import Scenes as World
from overt.data.vocabulary import BEGIN, END, MASK
from overt.papers.vgp import data
from overt.papers.vgp.config import VgpAnswerToken, VgpQuestions, VgpScenes, VgpWords
from tests.papers.vgp import small

CPU = torch.device("cpu")
SMALL_SCENES = VgpScenes(limit=4, size=32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))


def test_a_slice_of_pairs_equals_the_rows_of_all_pairs() -> None:
    source = small.drawn()
    full, part = data.pairs_in_memory(source), data.pairs_in_memory(source, 3, 6)
    assert part.ids == full.ids[3:6]
    assert full.links is not None and part.links is not None
    inside = (full.links[:, 0] >= 3) & (full.links[:, 0] < 6)
    expected = full.links[inside] - torch.tensor([3, 0, 0, 0, 0, 0])
    assert torch.equal(part.links, expected)


def test_splits_are_disjoint_and_limited() -> None:
    parts = data.load_scenes(SMALL_SCENES, CPU)
    ids = [set(one.texts.ids) for one in (parts.train, parts.val, parts.test)]
    assert [len(one) for one in ids] == [4, 4, 4] and not ids[0] & ids[1] & ids[2]
    assert parts.relations == 5
    assert parts.shown is not None and parts.shown().text is not None


def test_expressions_have_true_detected_and_all_candidates() -> None:
    task = data.load_expressions(SMALL_SCENES, CPU)
    assert list(task.tests) == ["true", "all", "detected"]
    true, every, detected = task.tests.values()
    assert true.ids == every.ids == detected.ids
    assert torch.equal(true.there | detected.there, every.there)
    assert not (true.there & detected.there).any()
    labels = true.labels[:, None]
    assert true.there.gather(1, labels).all() and not detected.there.gather(1, labels).any()
    assert torch.equal(true.boxes, every.boxes)


def test_questions_have_object_boxes_and_special_tokens() -> None:
    task = data.load_questions(SMALL_SCENES, CPU)
    batch = task.train.batch(range(8))
    assert batch.tokens is not None and batch.region_mask is not None
    assert (batch.tokens[:, 0] == data.BEGIN).all()
    assert ((batch.tokens == data.END).sum(dim=1) == 1).all()
    assert (batch.region_mask.sum(dim=1) >= 4).all()
    assert task.classes > int(task.train.labels.max()) and len(task.train) == 16


def test_shared_words_have_one_id_in_captions_and_questions() -> None:
    """The id of a word in a question is that of a caption, unless it is in no caption."""
    shared = replace(SMALL_SCENES, words=VgpWords.SHARED)
    captions = data.scene_pairs(SMALL_SCENES, "val", 1).vocabulary
    both = data.scene_vocabulary(shared)
    assert both.words[: len(captions.words)] == captions.words
    assert data.scene_vocabulary(SMALL_SCENES) == captions and len(set(both.words)) == both.size - 5
    apart, joined = (data.load_questions(one, CPU).train for one in (SMALL_SCENES, shared))
    source = data.BoxedScenes(World("train", 1, 4, 32))
    text = source.batch([0, 1, 2, 3]).text
    assert text is not None and joined.digest() == apart.digest()
    for row, said in enumerate(text.texts):
        ids = joined.tokens[row, : joined.lengths[row]].tolist()
        assert ids == [BEGIN, *both.encode(said.split()), END]
        # with separate vocabularies, a network that knows captions reads other words
        assert ids != apart.tokens[row, : apart.lengths[row]].tolist()


def test_attribute_questions_are_about_one_thing() -> None:
    some = replace(SMALL_SCENES, asked=VgpQuestions.ATTRIBUTES, limit=8)
    task = data.load_questions(some, CPU)
    world = World("train", 1, 8, 32, families=data.ATTRIBUTE_QUESTIONS)
    groups = world.batch(range(8)).groups
    assert groups is not None and {one.split("-")[0] for one in groups} == {"query"}
    assert len(task.train) == len(groups) and task.train.digest() == world.digest()


def test_masked_questions_end_with_a_mask_token() -> None:
    some = replace(SMALL_SCENES, words=VgpWords.SHARED, answer=VgpAnswerToken.MASK)
    texts = data.load_questions(some, CPU).train
    for row, length in enumerate(texts.lengths.tolist()):
        assert texts.tokens[row, length - 2 : length].tolist() == [MASK, END]


def test_captions_to_pretrain_on_are_of_another_world() -> None:
    found = data.load_captions(SMALL_SCENES, 6, CPU)
    own = data.load_scenes(SMALL_SCENES, CPU)
    assert len(found.texts) == 6 and own.captions is not None
    assert len(own.captions().texts) == 4  # `limit` caps them
    assert not set(found.texts.ids) & set(own.train.texts.ids)
    batch = found.texts.batch(range(6))
    assert batch.tokens is not None and int((batch.tokens == END).sum()) == 6
    assert (found.mask, found.specials) == (2, 5)
