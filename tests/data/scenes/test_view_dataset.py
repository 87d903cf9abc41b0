import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.scenes.caption_pairs import CaptionPairScenes
from overt.data.scenes.captions import CaptionScenes
from overt.data.scenes.classification import DominantScenes
from overt.data.scenes.phrase_relations import PhrasePairs
from overt.data.scenes.proposals import only_true
from overt.data.scenes.referring_expressions import ReferringScenes
from overt.data.scenes.sentences import Sentences
from overt.data.scenes.view_dataset import (
    ItemCache,
    balanced_class,
    cache_capacity,
    check_items,
    digest_batch,
    encode_texts,
    grounding_target,
    link_regions,
    render_with_proposals,
    split_of_text,
    stack_images,
)
from overt.data.scenes.world import SHAPES, random_scene
from overt.data.vocabulary import BEGIN, END
from overt.errors import UserError
from overt.geometry import TextGeometry
from tests.data.cache_checks import content, rng_state

VIEWS = {  # with settings on which the digest must depend
    CaptionPairScenes: ({"size": 48}, {"regions": 20}),
    CaptionScenes: ({"size": 48}, {"regions": 10}, {"each": 2}),
    DominantScenes: ({"size": 32}, {"cells": (4, 4)}, {"classes": SHAPES[:2]}),
    PhrasePairs: (),
    ReferringScenes: ({"size": 48}, {"regions": 10}, {"each": 1}, {"keep": only_true}),
    Sentences: (),
}
PLAIN = {"split": "val", "seed": 0, "count": 6}


@pytest.mark.long
@pytest.mark.parametrize(("view", "changes"), VIEWS.items())
def test_digest_depends_on_every_setting(view, changes):
    settings = [{}, {"split": "test"}, {"seed": 1}, {"count": 7}, *changes]
    digests = [view(**(PLAIN | one)).digest() for one in settings]
    assert len(set(digests)) == len(digests) and view(**PLAIN).digest() == digests[0]


@pytest.mark.parametrize("view", VIEWS)
def test_cached_items_equal_generated_items_to_the_last_bit(view):
    data, found = view(**PLAIN), []
    for room in (0, 6, 6):  # never kept, kept, read
        if room == 0 or not data._item.room:
            data._item = ItemCache(data._make, room)
        torch.manual_seed(0)
        found.append((content(data.batch([1, 4, 1])), rng_state()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("view", VIEWS)
def test_batches_are_the_same_after_pickling(view):
    data = view(**PLAIN)
    assert isinstance(data, Dataset) and len(data) == 6
    both = data.batch([1, 4])
    copy = pickle.loads(pickle.dumps(data)).batch([4])  # noqa: S301
    rows = torch.arange(len(both) - len(copy), len(both))
    same = both.select(rows)
    assert copy.ids == same.ids and copy.references == same.references
    for name in ("images", "labels", "boxes"):
        one, other = getattr(copy, name), getattr(same, name)
        assert other is None if one is None else torch.equal(one, other)


@pytest.mark.parametrize("view", VIEWS)
def test_invalid_settings_and_indices_raise(view):
    for wrong in ({"split": "dev"}, {"seed": -1}, {"count": 0}):
        with pytest.raises(UserError):
            view(**(PLAIN | wrong))
    with pytest.raises(UserError, match=r"6 .* 6 items"):
        view(**PLAIN).batch([6])


def test_balanced_class_is_uniform_in_every_block():
    drawn = [balanced_class(4, "train", 0, index, 99) for index in range(80)]
    assert all(sorted(drawn[n : n + 4]) == [0, 1, 2, 3] for n in range(0, 80, 4))
    assert len({tuple(drawn[n : n + 4]) for n in range(0, 80, 4)}) > 5
    assert drawn != [balanced_class(4, "val", 0, index, 99) for index in range(80)]


def test_split_of_text_gives_the_expected_shares():
    found = Counter(split_of_text(f"text {n}") for n in range(3000))
    assert set(found) == {"train", "val", "test"}
    assert 0.75 < found["train"] / 3000 < 0.85
    assert 0.07 < found["val"] / 3000 < 0.13 and 0.07 < found["test"] / 3000 < 0.13


class CountingMaker:
    """Makes items and records each call."""

    def __init__(self):
        self.calls = []
        self.cache = ItemCache(self.make, 2)

    def make(self, index):
        self.calls.append(index)
        return [index]


def test_items_are_made_once_up_to_the_capacity():
    maker = CountingMaker()
    first = maker.cache(5)
    assert maker.cache(5) is first and maker.calls == [5]
    assert [maker.cache(n) for n in (6, 7, 7)] == [[6], [7], [7]]
    assert maker.calls == [5, 6, 7, 7]  # the cache is full


def test_pickled_cache_is_empty():
    maker = CountingMaker()
    maker.cache(5)
    copy = pickle.loads(pickle.dumps(maker))  # noqa: S301
    assert copy.cache(5) == [5] and copy.calls == [5, 5] and maker.calls == [5]


def test_cache_capacity_depends_on_the_image_size():
    assert cache_capacity(64) // 4 == cache_capacity(128) > 5_000


def test_check_items_rejects_invalid_indices():
    assert check_items(range(2), 2) == [0, 1] and check_items((1, 0), 2) == [1, 0]
    for wrong in (-1, 2):
        with pytest.raises(UserError, match=rf"Index {wrong} .* 2 items"):
            check_items([0, wrong], 2)
    with pytest.raises(UserError, match="least one item"):
        check_items([], 2)


def test_link_regions_matches_hand_computed_values():
    overlap = np.array([[1.0, 0.0], [0.6, 0.1], [0.4, 0.4], [0.0, 1.0]], np.float32)
    found = link_regions([(1, 3, (0,)), (4, 5, (0, 1)), (3, 4, ())], 6, overlap)
    assert found.astype(int).tolist() == [
        [0, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 0, 0],
        [1, 1, 0, 1],
        [0, 0, 0, 0],
    ]


def test_grounding_target_matches_hand_computed_values():
    text = TextGeometry(("a", "b c"), torch.tensor([[[0, 1], [-1, -1]], [[0, 1], [2, 3]]]))
    linked = [np.array([[True, True]]), np.array([[False, False], [False, True]])]
    found = grounding_target(linked, torch.zeros(2, 2, 4), text).check()
    assert found.weights[:, 0, 0].tolist() == [[[0.5, 0.5], [0, 0]], [[0, 0], [0, 1]]]
    assert found.rows.tolist() == [[True, False], [False, True]]
    assert found.keys.spans[0].name == "regions" and found.queries.spans[0].name == "text"


def test_stack_images_puts_channels_first():
    image = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)
    assert stack_images([image])[0, :, 1, 0].tolist() == image[1, 0].tolist()


def test_digest_batch_depends_on_settings_and_contents():
    batch = Batch(ids=("a",), labels=torch.tensor([1]))
    assert digest_batch(batch, 1) == digest_batch(Batch(("a",), labels=torch.tensor([1])), 1)
    others = [digest_batch(batch, 2), digest_batch(Batch(("a",), labels=torch.tensor([2])), 1)]
    others += [digest_batch(Batch(("b",), labels=torch.tensor([1])), 1)]
    assert len({digest_batch(batch, 1), *others}) == 4


def test_encode_texts_adds_begin_and_end_tokens() -> None:
    texts = [SimpleNamespace(text="a ring", words=("a", "ring"), spans=((0, 1), (2, 6))),
            SimpleNamespace(text="a", words=("a",), spans=((0, 1),))]  # fmt: skip
    tokens, mask, text = encode_texts(texts, lambda words: [len(word) + 10 for word in words])
    assert tokens.tolist() == [[BEGIN, 11, 14, END], [BEGIN, 11, END, 0]]
    assert mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert text.texts == ("a ring", "a") and text.spans[0, 2].tolist() == [2, 6]


def test_render_with_proposals_is_deterministic() -> None:
    shown = random_scene("train", 3, 5)
    (image, found), (again, same) = (render_with_proposals(shown, 64, 8, 11) for _ in range(2))
    assert (image.image == again.image).all() and (found.boxes == same.boxes).all()
    # another seed
    assert (found.boxes != render_with_proposals(shown, 64, 8, 12)[1].boxes).any()
