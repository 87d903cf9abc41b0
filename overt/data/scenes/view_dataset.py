"""Common parts of the scene datasets: balanced classes, item cache, texts and grounding."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from overt.attention import AttentionMap, Kind, regions, words
from overt.data.batch import Batch
from overt.data.scenes.noun_phrases import vocabulary
from overt.data.scenes.proposals import Proposals, make_proposals
from overt.data.scenes.render import RenderedScene, check_size, render
from overt.data.scenes.world import Scene, random_scene, scene_rng
from overt.data.vocabulary import ABSENT, BEGIN, END, PaddedTexts, pad_texts
from overt.errors import UserError
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry

PROBES = 16  # number of items in the digest of a dataset
CACHE_BYTES = 256 << 20  # largest size of the rendered images that a dataset caches
CACHED_TEXTS = 100_000  # largest number of texts that a dataset caches
MIN_OVERLAP = 0.5  # smallest IoU for which a region shows a thing
HELD_OUT = {0: "test", 1: "val"}  # two of ten parts by hash; the others are for training

Item = TypeVar("Item")


class ItemCache(Generic[Item]):
    """Items that are made on first use, and kept while there is room."""

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

    def __reduce__(self) -> tuple[type["ItemCache[Item]"], tuple[Callable[[int], Item], int]]:
        return type(self), (self.make, self.room)  # a worker process starts with an empty cache


class SceneView(Generic[Item]):
    """Base of the scene datasets: items that are generated on first use and cached.

    A subclass has a name, `_make` and `batch`. With a `size` its items are images of that side.
    """

    name: str

    def __init__(self, split: str, seed: int, count: int, size: int | None = None) -> None:
        check_settings(split, seed, count)
        self.split, self.seed, self.count = str(split), seed, count
        room = CACHED_TEXTS
        if size is not None:
            check_size(size)
            self.size = size
            room = cache_capacity(size)
        self._item = ItemCache(self._make, room)

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """Return a hash of every setting and of the first items."""
        settings = (self.name, self.split, self.seed, self.count, *self._settings())
        return digest_batch(self.batch(range(min(PROBES, self.count))), *settings)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples of the items at `indices`."""
        raise NotImplementedError

    def _make(self, index: int) -> Item:
        """Generate one item."""
        raise NotImplementedError

    def _settings(self) -> tuple[object, ...]:
        """Return the settings of the digest beside split, seed and count."""
        return ()

    def _items(self, indices: Sequence[int]) -> tuple[list[str], list[Item]]:
        """Return the ids and the items at `indices`."""
        chosen = check_items(indices, self.count)
        ids = [f"{self.name}-{self.split}-{self.seed}-{index:06d}" for index in chosen]
        return ids, [self._item(index) for index in chosen]

    def _images(self, images: Sequence[NDArray[np.uint8]]) -> dict[str, Any]:
        """Return the images of a batch and their geometry."""
        geometry = PixelGeometry.identity(len(images), (self.size, self.size))
        return {"images": stack_images(images), "geometry": geometry}


def cache_capacity(size: int) -> int:
    """Return how many images of this size are cached."""
    return CACHE_BYTES // (3 * size * size)


class GroundedView(SceneView[Item]):
    """Base of the scene datasets with texts that refer to region proposals."""

    def __init__(self, split: str, seed: int, count: int, size: int, regions: int) -> None:
        super().__init__(split, seed, count, size)
        self.regions, self.vocabulary = regions, vocabulary()

    def scene(self, index: int) -> Scene:
        """Return the scene of an item."""
        return random_scene(self.split, self.seed, check_items([index], self.count)[0])

    def _settings(self) -> tuple[object, ...]:
        return self.size, self.regions

    def _grounded(
        self,
        images: Sequence[NDArray[np.uint8]],
        padded: PaddedTexts,
        proposals: Sequence[Proposals],
        linked: Sequence[NDArray[np.bool_]],
    ) -> dict[str, Any]:
        """Return the images, texts and regions of a batch, and the regions of each word."""
        tokens, mask, text = padded
        boxes = torch.from_numpy(np.stack([one.boxes for one in proposals]))
        return {
            **self._images(images),
            "tokens": tokens,
            "token_mask": mask,
            "text": text,
            "boxes": boxes,
            "region_mask": torch.ones(boxes.shape[:2], dtype=torch.bool),
            "target": grounding_target(linked, boxes, text),
        }


def balanced_class(classes: int, split: str, seed: int, index: int, stream: int) -> int:
    """Return a random class in 0..classes-1, with each once in every block of `classes` items."""
    block, place = divmod(index, classes)
    return int(scene_rng(split, seed, block, stream).permutation(classes)[place])


def split_of_text(text: str) -> str:
    """Return the split of a text by its hash, so that no text is in two splits."""
    return HELD_OUT.get(hashlib.sha256(text.encode()).digest()[0] % 10, "train")


def check_settings(split: str, seed: int, count: int) -> None:
    """Raise `UserError` for an invalid split, seed or number of items."""
    scene_rng(split, seed, 0)
    if count < 1:
        raise UserError(f"count must be at least 1, got {count}.")


def check_items(indices: Sequence[int], count: int) -> list[int]:
    """Return the indices as integers; raise `UserError` if empty or out of range."""
    found = [int(index) for index in indices]
    if not found:
        raise UserError("A batch needs at least one item.")
    for index in found:
        if not 0 <= index < count:
            raise UserError(f"Index {index} is out of range for {count} items.")
    return found


def digest_batch(batch: Batch, *settings: object) -> str:
    """Return a hash of the settings and of a batch, to detect changes of the generator."""
    whole = hashlib.sha256(repr(settings).encode())
    target = None if batch.target is None else batch.target.values
    for value in (batch.images, batch.tokens, batch.boxes, batch.labels, target):
        if value is not None:
            whole.update(value.numpy().tobytes())
    whole.update(repr((batch.ids, batch.references, batch.groups)).encode())
    return whole.hexdigest()


@runtime_checkable
class SpannedText(Protocol):
    """Protocol: a text and its words with the characters of each."""

    @property
    def text(self) -> str: ...
    @property
    def words(self) -> tuple[str, ...]: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...


def encode_texts(
    said: Sequence[SpannedText], encode: Callable[[Sequence[str]], list[int]]
) -> PaddedTexts:
    """Return tokens between begin and end, their mask, and the text geometry."""
    return pad_texts(
        [one.text for one in said],
        [([BEGIN, *encode(one.words), END], [ABSENT, *one.spans, ABSENT]) for one in said],
    )


def render_with_proposals(
    shown: Scene, size: int, regions: int, stream: int
) -> tuple[RenderedScene, Proposals]:
    """Render a scene and draw region proposals from a stream of their own."""
    picture = render(shown, size)
    dice = scene_rng(shown.split, shown.seed, shown.index, stream)
    return picture, make_proposals(picture.boxes, size, dice, regions)


def stack_images(images: Sequence[NDArray[np.uint8]]) -> Tensor:
    """Stack images [h, w, 3] to one tensor of bytes [i, 3, h, w]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def grounding_target(
    linked: Sequence[NDArray[np.bool_]],
    boxes: Float[Tensor, "b m 4"],
    text: TextGeometry,
) -> AttentionMap:
    """Return a target where each word attends evenly to its regions; other words do not count.

    `linked[b][n, m]` is whether word n of sample b refers to region m.
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


def link_regions(
    marks: Sequence[tuple[int, int, tuple[int, ...]]],
    length: int,
    overlap: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Return the regions that each of `length` words refers to; marks are (start, end, things)."""
    linked = np.zeros((length, len(overlap)), dtype=bool)
    for start, end, things in marks:
        if things:
            linked[start:end] |= (overlap[:, list(things)] >= MIN_OVERLAP).any(axis=1)
    return linked
