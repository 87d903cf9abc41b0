import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overt.data.batch import Batch
from overt.data.scenes.views import (
    Kept,
    drawn,
    even,
    fingerprint,
    framed,
    grounding,
    link,
    part_of,
    pictures,
    room_for,
    rows,
)
from overt.data.scenes.world import scene
from overt.data.vocabulary import BEGIN, END
from overt.errors import BadInput
from overt.geometry import TextGeometry


def test_classes_are_even_in_every_full_run_and_in_random_order():
    drawn = [even(4, "train", 0, index, 99) for index in range(80)]
    assert all(sorted(drawn[n : n + 4]) == [0, 1, 2, 3] for n in range(0, 80, 4))
    assert len({tuple(drawn[n : n + 4]) for n in range(0, 80, 4)}) > 5
    assert drawn != [even(4, "val", 0, index, 99) for index in range(80)]


def test_texts_fall_into_parts_by_their_hash():
    found = Counter(part_of(f"text {n}") for n in range(3000))
    assert set(found) == {"train", "val", "test"}
    assert 0.75 < found["train"] / 3000 < 0.85
    assert 0.07 < found["val"] / 3000 < 0.13 and 0.07 < found["test"] / 3000 < 0.13


class Maker:
    """Counts how often it is asked."""

    def __init__(self):
        self.asked = []
        self.kept = Kept(self.make, 2)

    def make(self, index):
        self.asked.append(index)
        return [index]


def test_items_are_made_once_while_there_is_room():
    maker = Maker()
    first = maker.kept(5)
    assert maker.kept(5) is first and maker.asked == [5]
    assert [maker.kept(n) for n in (6, 7, 7)] == [[6], [7], [7]]
    assert maker.asked == [5, 6, 7, 7]  # no room for 7


def test_a_worker_gets_no_kept_items():
    maker = Maker()
    maker.kept(5)
    copy = pickle.loads(pickle.dumps(maker))  # noqa: S301
    assert copy.kept(5) == [5] and copy.asked == [5, 5] and maker.asked == [5]


def test_room_is_counted_in_bytes():
    assert room_for(64) // 4 == room_for(128) > 5_000


def test_indices_are_checked():
    assert rows(range(2), 2) == [0, 1] and rows((1, 0), 2) == [1, 0]
    for wrong in (-1, 2):
        with pytest.raises(BadInput, match=f"item {wrong} is not one of 0..1"):
            rows([0, wrong], 2)
    with pytest.raises(BadInput, match="at least one item"):
        rows([], 2)


def test_links_by_hand():
    overlap = np.array([[1.0, 0.0], [0.6, 0.1], [0.4, 0.4], [0.0, 1.0]], np.float32)
    found = link([(1, 3, (0,)), (4, 5, (0, 1)), (3, 4, ())], 6, overlap)
    assert found.astype(int).tolist() == [
        [0, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 0, 0],
        [1, 1, 0, 1],
        [0, 0, 0, 0],
    ]


def test_grounding_by_hand():
    text = TextGeometry(("a", "b c"), torch.tensor([[[0, 1], [-1, -1]], [[0, 1], [2, 3]]]))
    linked = [np.array([[True, True]]), np.array([[False, False], [False, True]])]
    found = grounding(linked, torch.zeros(2, 2, 4), text).check()
    assert found.weights[:, 0, 0].tolist() == [[[0.5, 0.5], [0, 0]], [[0, 0], [0, 1]]]
    assert found.rows.tolist() == [[True, False], [False, True]]
    assert found.keys.spans[0].name == "regions" and found.queries.spans[0].name == "text"


def test_pictures_stand_with_their_channels_first():
    image = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)
    assert pictures([image])[0, :, 1, 0].tolist() == image[1, 0].tolist()


def test_a_fingerprint_sees_settings_and_contents():
    batch = Batch(ids=("a",), labels=torch.tensor([1]))
    assert fingerprint(batch, 1) == fingerprint(Batch(("a",), labels=torch.tensor([1])), 1)
    others = [fingerprint(batch, 2), fingerprint(Batch(("a",), labels=torch.tensor([2])), 1)]
    others += [fingerprint(Batch(("b",), labels=torch.tensor([1])), 1)]
    assert len({fingerprint(batch, 1), *others}) == 4


def test_texts_stand_between_their_ends_with_their_characters() -> None:
    said = [SimpleNamespace(text="a ring", words=("a", "ring"), spans=((0, 1), (2, 6))),
            SimpleNamespace(text="a", words=("a",), spans=((0, 1),))]  # fmt: skip
    tokens, mask, text = framed(said, lambda words: [len(word) + 10 for word in words])
    assert tokens.tolist() == [[BEGIN, 11, 14, END], [BEGIN, 11, END, 0]]
    assert mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert text.texts == ("a ring", "a") and text.spans[0, 2].tolist() == [2, 6]


def test_a_scene_has_the_same_proposals_whoever_asks() -> None:
    shown = scene("train", 3, 5)
    (picture, found), (again, same) = (drawn(shown, 64, 8, 11) for _ in range(2))
    assert (picture.image == again.image).all() and (found.boxes == same.boxes).all()
    assert (found.boxes != drawn(shown, 64, 8, 12)[1].boxes).any()  # a stream of its own
