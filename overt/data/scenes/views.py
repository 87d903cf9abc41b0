"""What the views of the world share: even classes, kept items, texts and grounded phrases."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from overt.attention import AttentionMap, Kind, regions, words
from overt.data.batch import Batch
from overt.data.scenes.proposals import Proposals, propose
from overt.data.scenes.render import Rendered, render
from overt.data.scenes.world import Scene, key
from overt.data.vocabulary import ABSENT, BEGIN, END, pad
from overt.errors import BadInput
from overt.geometry import RegionGeometry, TextGeometry

PROBES = 16  # items whose contents go into the digest of a data set
ROOM = 256 << 20  # bytes of pixels a data set keeps once drawn
TEXTS = 100_000  # and how many texts
SHOWS = 0.5  # a region shows a thing from this overlap on
HELD_OUT = {0: "test", 1: "val"}  # of ten parts by hash; the others are for training

Item = TypeVar("Item")


class Kept(Generic[Item]):
    """Items made when they are first asked for, and kept while there is room."""

    def __init__(self, make: Callable[[int], Item], room: int) -> None:
        self.make, self.room = make, room
        self._items: dict[int, Item] = {}

    def __call__(self, index: int) -> Item:
        found = self._items.get(index)
        if found is None:
            found = self.make(index)
            if len(self._items) < self.room:
                self._items[index] = found
        return found

    def __reduce__(self) -> tuple[type["Kept[Item]"], tuple[Callable[[int], Item], int]]:
        return type(self), (self.make, self.room)  # a worker makes its own


def room_for(size: int) -> int:
    """How many images of this size are kept."""
    return ROOM // (3 * size * size)


def even(classes: int, split: str, seed: int, index: int, stream: int) -> int:
    """A class in 0..classes-1: random, yet each occurs once in every full run of `classes`."""
    block, place = divmod(index, classes)
    return int(key(split, seed, block, stream).permutation(classes)[place])


def part_of(text: str) -> str:
    """The split a text belongs to by its hash, so that no text is ever in two of them."""
    return HELD_OUT.get(hashlib.sha256(text.encode()).digest()[0] % 10, "train")


def check(split: str, seed: int, count: int) -> None:
    """BadInput unless there is such a split, seed and number of items."""
    key(split, seed, 0)
    if count < 1:
        raise BadInput(f"{count} items are none: ask for at least one")


def rows(indices: Sequence[int], count: int) -> list[int]:
    """The indices as whole numbers; BadInput for one that is not there, or for none at all."""
    found = [int(index) for index in indices]
    if not found:
        raise BadInput("a batch needs at least one item")
    for index in found:
        if not 0 <= index < count:
            raise BadInput(f"item {index} is not one of 0..{count - 1}")
    return found


def fingerprint(batch: Batch, *settings: object) -> str:
    """A hash of the settings and of the first items, which a change of the program would change."""
    whole = hashlib.sha256(repr(settings).encode())
    target = None if batch.target is None else batch.target.values
    for value in (batch.images, batch.tokens, batch.boxes, batch.labels, target):
        if value is not None:
            whole.update(value.numpy().tobytes())
    whole.update(repr((batch.ids, batch.references, batch.groups)).encode())
    return whole.hexdigest()


@runtime_checkable
class Words(Protocol):
    """What was said of a scene: a text, and its words with the characters of each."""

    @property
    def text(self) -> str: ...
    @property
    def words(self) -> tuple[str, ...]: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...


def framed(
    said: Sequence[Words], encode: Callable[[Sequence[str]], list[int]]
) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"], TextGeometry]:
    """Texts as tokens between those that begin and end one, which ones there are, and where."""
    tokens, mask, ranges = pad(
        [[BEGIN, *encode(one.words), END] for one in said],
        [[ABSENT, *one.spans, ABSENT] for one in said],
    )
    return tokens, mask, TextGeometry(tuple(one.text for one in said), ranges)


def drawn(shown: Scene, size: int, regions: int, stream: int) -> tuple[Rendered, Proposals]:
    """A scene at this size, and proposals of regions, which are drawn from a stream of its own."""
    picture = render(shown, size)
    dice = key(shown.split, shown.seed, shown.index, stream)
    return picture, propose(picture.boxes, size, dice, regions)


def pictures(images: Sequence[NDArray[np.uint8]]) -> Tensor:
    """Drawn scenes [h, w, 3] as one tensor of bytes [i, 3, h, w]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def grounding(
    linked: Sequence[NDArray[np.bool_]],
    boxes: Float[Tensor, "b m 4"],
    text: TextGeometry,
) -> AttentionMap:
    """Where each word should look: evenly at all regions it speaks of; other words do not count.

    `linked[b][n, m]` says whether word n of sample b speaks of region m.
    """
    b, n = text.spans.shape[:2]
    wanted: Bool[Tensor, "b n m"] = torch.zeros(b, n, boxes.shape[1], dtype=torch.bool)
    for row, link in enumerate(linked):
        wanted[row, : len(link)] = torch.from_numpy(link)
    return AttentionMap(
        values=wanted.float()[:, None, None],
        keys=regions(boxes.shape[1], geometry=RegionGeometry(boxes)),
        queries=words(n, geometry=text),
        mask=wanted.any(dim=-1, keepdim=True).expand_as(wanted),
        kind=Kind.AMOUNT,
    ).normalize()


def link(
    marks: Sequence[tuple[int, int, tuple[int, ...]]],
    length: int,
    overlap: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Which regions each of `length` words speaks of; marks are (start, end, things)."""
    linked = np.zeros((length, len(overlap)), dtype=bool)
    for start, end, things in marks:
        if things:
            linked[start:end] |= (overlap[:, list(things)] >= SHOWS).any(axis=1)
    return linked
