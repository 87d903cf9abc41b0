"""Questions with images, features or neither, in memory on any device.

A batch is then only indexing, which is faster than loading for a small network. Texts and geometry
are left out: this is for training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from overt.attention import AttentionMap, Kind, Layout
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.errors import UserError

PORTION = 64

Features = Callable[[Sequence[str]], Float[Tensor, "i c d"]]


@dataclass(frozen=True, eq=False)
class InMemoryDataset:
    """All samples of a dataset as tensors, with the same items and samples.

    An item has `each` samples about one image, of which there are pixels or `features`. Tokens are
    cut to the longest text of a batch, as in a batch of the original dataset.
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
    coverage: Float[Tensor, "n k"] | None = None
    features: Float[Tensor, "i c d"] | None = None

    @classmethod
    def from_dataset(cls, data: Dataset, device: torch.device | str = "cpu") -> "InMemoryDataset":
        """Copy all of `data` to `device`; features are added by `with_features`."""
        portions = (
            data.batch(range(start, min(start + PORTION, len(data))))
            for start in range(0, len(data), PORTION)
        )
        parts = [replace(one, features=None) for one in portions]
        if not parts:
            raise UserError(f"{data.name} {data.split} is empty.")
        tokens, masks = [one.tokens for one in parts], [one.token_mask for one in parts]
        labels = [one.labels for one in parts]
        ids = tuple(name for one in parts for name in one.ids)
        if None in tokens or None in masks or None in labels or len(ids) % len(data):
            raise UserError(
                f"{data.name} needs tokens, labels and the same number of samples per item."
            )
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

    def with_full_length(self) -> "InMemoryDataset":
        """Return a copy whose batches have all token positions, so that shapes are constant."""
        return replace(self, lengths=torch.full_like(self.lengths, self.tokens.shape[1]))

    def with_features(self, pictures: Sequence[str], features: Features) -> "InMemoryDataset":
        """Return a copy with image features in place of images, each stored once.

        `pictures` names the image of each item; `features` returns those of many names at once.
        """
        if len(pictures) != len(self):
            raise ValueError(f"got {len(pictures)} image names for {len(self)} items")
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
        """Return the samples of these items, on the device of the tensors."""
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
            covered = None if self.coverage is None else self.coverage[at, None]
            target = AttentionMap(
                weights, self.keys, mask=self.visible[at, None], kind=self.kind, coverage=covered
            )
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
        """Return the hash of the original dataset."""
        return self.source


def _pictures(parts: Sequence[Batch], each: int, device: torch.device | str) -> dict[str, Any]:
    """Return all images, and the index of the image of each item."""
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
    """Return the targets on their common grid; empty if the dataset has none."""
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
        "coverage": _coverage(maps, device),
    }


def _coverage(maps: Sequence[AttentionMap], device: torch.device | str) -> Tensor | None:
    """Return the coverage of each cell, if every map has it."""
    known = [one.coverage for one in maps if one.coverage is not None]
    return torch.cat([one[:, 0] for one in known]).to(device) if len(known) == len(maps) else None
