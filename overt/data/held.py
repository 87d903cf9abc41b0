"""Questions, with pictures, their features or neither, held whole in memory on any device.

A batch is then a few indices, where making it anew takes longer than a small network's step. What
only people look at, texts and geometry, is left out: this is for training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from overt.attention import AttentionMap, Kind, Layout
from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import BadInput

PORTION = 64

Features = Callable[[Sequence[str]], Float[Tensor, "i c d"]]


@dataclass(frozen=True, eq=False)
class Held:
    """All samples of a data set as tensors; a data set itself, with the same items and samples.

    An item has `each` samples about one picture, of which there are pixels or `features`. Words are
    cut to the longest text of a batch, as they are in a batch that is made anew.
    """

    name: str
    split: str
    source: str
    ids: tuple[str, ...]
    each: int
    tokens: Int[Tensor, "n w"]
    token_mask: Bool[Tensor, "n w"]
    lengths: Int[Tensor, " n"]
    labels: Int[Tensor, " n"]
    images: UInt8[Tensor, "i 3 y x"] | None = None
    picture: Int[Tensor, " m"] | None = None
    target: Float[Tensor, "n k"] | None = None
    visible: Bool[Tensor, "n k"] | None = None
    keys: Layout | None = None
    kind: Kind = Kind.PROBABILITY
    features: Float[Tensor, "i c d"] | None = None

    @classmethod
    def of(cls, data: Source, device: torch.device | str = "cpu") -> "Held":
        """The whole of `data`, copied to `device` once; features are added by `seen`."""
        portions = (
            data.batch(range(start, min(start + PORTION, len(data))))
            for start in range(0, len(data), PORTION)
        )
        parts = [replace(one, features=None) for one in portions]
        if not parts:
            raise BadInput(f"{data.name} {data.split} is empty.")
        tokens, masks = [one.tokens for one in parts], [one.token_mask for one in parts]
        labels = [one.labels for one in parts]
        ids = tuple(name for one in parts for name in one.ids)
        if None in tokens or None in masks or None in labels or len(ids) % len(data):
            raise BadInput(f"{data.name} has not words, a label and as many samples in each item.")
        wide = max(one.shape[1] for one in tokens if one is not None)

        def joined(some: Sequence[Tensor | None]) -> Tensor:
            known = [one for one in some if one is not None]
            pad = torch.nn.functional.pad
            return torch.cat([pad(one, (0, wide - one.shape[1])) for one in known])

        mask = joined(masks)
        return cls(
            data.name,
            str(data.split),
            data.digest(),
            ids,
            len(ids) // len(data),
            joined(tokens).to(device),
            mask.to(device),
            mask.sum(dim=1),
            torch.cat([one for one in labels if one is not None]).to(device),
            **_pictures(parts, len(ids) // len(data), device),
            **_targets(parts, device),
        )

    def uncut(self) -> "Held":
        """The same with all words in every batch, whose form is then always the same."""
        return replace(self, lengths=torch.full_like(self.lengths, self.tokens.shape[1]))

    def seen(self, pictures: Sequence[str], features: Features) -> "Held":
        """The same with features of pictures: `pictures` names that of each item, each held once.

        As many names as items; `features` gives those of many names at once.
        """
        if len(pictures) != len(self):
            raise ValueError(f"{len(pictures)} pictures are named for {len(self)} items")
        names = list(dict.fromkeys(pictures))
        place = {name: number for number, name in enumerate(names)}
        return replace(
            self,
            images=None,
            features=features(names).to(self.labels.device),
            picture=torch.tensor([place[name] for name in pictures], device=self.labels.device),
        )

    def __len__(self) -> int:
        return len(self.ids) // self.each

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of these items, on the device where the tensors are."""
        items = torch.as_tensor(list(indices), dtype=torch.long)
        rows = (items[:, None] * self.each + torch.arange(self.each)).flatten()
        wide = max(1, int(self.lengths[rows].max())) if len(rows) else 1
        at = rows.to(self.labels.device)
        images = image_of = features = None
        if self.images is not None and self.picture is not None:
            images = self.images[self.picture[items.to(self.labels.device)]]
            image_of = torch.arange(len(items), device=at.device).repeat_interleave(self.each)
        if self.features is not None and self.picture is not None:
            features = self.features[self.picture[at // self.each]]
        target = None
        if self.target is not None and self.keys is not None and self.visible is not None:
            weights = self.target[at][:, None, None, None]
            target = AttentionMap(weights, self.keys, mask=self.visible[at, None], kind=self.kind)
        return Batch(
            ids=tuple(self.ids[row] for row in rows.tolist()),
            images=images,
            image_of=image_of,
            tokens=self.tokens[at, :wide],
            token_mask=self.token_mask[at, :wide],
            features=features,
            labels=self.labels[at],
            target=target,
        )

    def digest(self) -> str:
        """The hash of the data set the tensors were read from."""
        return self.source


def _pictures(parts: Sequence[Batch], each: int, device: torch.device | str) -> dict[str, Any]:
    """Every picture, and which of them each item is about."""
    if parts[0].images is None:
        return {}
    images, picture, before = [], [], 0
    for one in parts:
        assert one.images is not None
        images.append(one.images.to(device))
        picture.append(one.image_index[::each] + before)
        before += len(one.images)
    return {"images": torch.cat(images), "picture": torch.cat(picture).to(device)}


def _targets(parts: Sequence[Batch], device: torch.device | str) -> dict[str, Any]:
    """Where to look, on a grid that is the same for all; nothing where the data does not say."""
    maps = [one.target for one in parts if one.target is not None]
    if len(maps) < len(parts) or len(maps[0].keys.spans[0].shape) < 2:
        return {}
    span = maps[0].keys.spans[0]
    keys = Layout((type(span)(span.name, span.shape, span.index),), len(maps[0].keys))
    return {
        "target": torch.cat([one.weights[:, 0, 0, 0] for one in maps]).to(device),
        "visible": torch.cat([one.visible[:, 0] for one in maps]).to(device),
        "keys": keys,
        "kind": maps[0].kind,
    }
