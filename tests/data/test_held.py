"""Held batches are those of the data set, without what only people look at."""

import pytest
import torch

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.held import Held
from overt.data.source import Source
from overt.errors import BadInput


class Toy:
    """Five items of two samples each, about one of three pictures; texts of one to four words."""

    name, split = "toy", "train"

    def __len__(self) -> int:
        return 5

    def batch(self, indices) -> Batch:
        items = [int(one) for one in indices]
        rows = [2 * item + part for item in items for part in range(2)]
        lengths = torch.tensor([1 + row % 4 for row in rows])
        wide = int(lengths.max())
        there = torch.arange(wide) < lengths[:, None]
        pictures = sorted({item % 3 for item in items})
        return Batch(
            ids=tuple(f"toy/{row}" for row in rows),
            images=torch.stack([torch.full((3, 4, 4), 9 * n, dtype=torch.uint8) for n in pictures]),
            image_of=torch.tensor([pictures.index(item % 3) for item in items for _ in range(2)]),
            tokens=torch.where(there, torch.arange(1, wide + 1) + torch.tensor(rows)[:, None], 0),
            token_mask=there,
            labels=torch.tensor(rows),
            target=AttentionMap.from_cells(
                torch.tensor(rows)[:, None].float() + torch.arange(4), grid(2, 2)
            ),
        )

    def digest(self) -> str:
        return "abc"


def check_same(found: Batch, wanted: Batch) -> None:
    assert found.ids == wanted.ids
    for name in ("tokens", "token_mask", "labels"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    torch.testing.assert_close(found.images[found.image_index], wanted.images[wanted.image_index])
    torch.testing.assert_close(found.target.weights, wanted.target.weights)
    assert torch.equal(found.target.visible, wanted.target.visible)
    assert found.target.keys.spans[0].shape == wanted.target.keys.spans[0].shape


@pytest.mark.parametrize("items", [[0], [3, 1], [4, 0, 2], range(5)])
def test_batches_are_those_of_the_data_set(items):
    check_same(Held.of(Toy()).batch(items), Toy().batch(items))


def test_it_is_a_data_set_with_the_same_hash():
    held = Held.of(Toy())
    assert isinstance(held, Source) and len(held) == 5
    assert (held.name, held.split, held.digest()) == ("toy", "train", "abc")
    assert held.each == 2


def test_texts_without_pictures_or_truth():
    class Plain(Toy):
        def batch(self, indices) -> Batch:
            found = super().batch(indices)
            return Batch(
                found.ids, tokens=found.tokens, token_mask=found.token_mask, labels=found.labels
            )

    found = Held.of(Plain()).batch([1])
    assert found.images is None and found.target is None
    torch.testing.assert_close(found.tokens, Toy().batch([1]).tokens)


def test_what_cannot_be_held_is_refused():
    class Empty(Toy):
        def __len__(self) -> int:
            return 0

    class Wordless(Toy):
        def batch(self, indices) -> Batch:
            found = super().batch(indices)
            return Batch(found.ids, labels=found.labels)

    with pytest.raises(BadInput, match="toy train is empty"):
        Held.of(Empty())
    with pytest.raises(BadInput, match="has not words"):
        Held.of(Wordless())


def test_uncut_batches_have_all_words():
    held = Held.of(Toy())
    assert held.batch([0]).tokens.shape[1] == 2
    uncut = held.uncut().batch([0])
    assert uncut.tokens.shape == uncut.token_mask.shape == (2, 4)
    assert not uncut.token_mask[:, 2:].any()
    torch.testing.assert_close(uncut.tokens[:, :2], held.batch([0]).tokens)


def test_features_are_held_once_a_picture():
    asked: list[list[str]] = []

    def features(names):
        asked.append(list(names))
        return torch.stack([torch.full((4, 2), float(name)) for name in names])

    held = Held.of(Toy()).seen(["7", "8", "7", "9", "8"], features)
    assert asked == [["7", "8", "9"]] and len(held.features) == 3
    found = held.batch([4, 0])
    assert found.images is None and found.features.shape == (4, 4, 2)
    assert found.features[:, 0, 0].tolist() == [8, 8, 7, 7]
    with pytest.raises(ValueError, match="2 pictures are named for 5 items"):
        Held.of(Toy()).seen(["7", "8"], features)
