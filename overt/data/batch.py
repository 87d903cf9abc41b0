"""What a data set hands to a model: samples with ids, whatever the task."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from overt.attention import AttentionMap
from overt.geometry import PixelGeometry, TextGeometry

# What has one row a sample.
_TENSORS = ("tokens", "token_mask", "boxes", "features", "region_mask", "labels", "answers")
_TUPLES = ("references", "groups")


@dataclass(frozen=True, eq=False)
class Batch:
    """b samples over i images. Several samples may look at one image, which is then encoded once.

    What a task does not have is None. `boxes` are in pixels of the original photo. `labels` are
    class numbers, `answers` soft scores a class, `references` texts to compare with, `groups` the
    kind of each sample (a question's family), `target` where attention should go.
    """

    ids: tuple[str, ...]
    images: Shaped[Tensor, "i 3 y x"] | None = None
    image_of: Int[Tensor, " b"] | None = None
    geometry: PixelGeometry | None = None
    tokens: Int[Tensor, "b n"] | None = None
    token_mask: Bool[Tensor, "b n"] | None = None
    text: TextGeometry | None = None
    boxes: Float[Tensor, "b m 4"] | None = None
    features: Float[Tensor, "b m d"] | None = None
    region_mask: Bool[Tensor, "b m"] | None = None
    labels: Int[Tensor, " b"] | None = None
    answers: Float[Tensor, "b c"] | None = None
    references: tuple[tuple[str, ...], ...] | None = None
    groups: tuple[str, ...] | None = None
    target: AttentionMap | None = None

    def __post_init__(self) -> None:
        for name in (*_TENSORS, *_TUPLES, "image_of", "text", "target"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.ids):
                raise ValueError(f"{name} has {len(value)} rows for {len(self.ids)} samples")
        for name in ("images", "geometry"):
            value = getattr(self, name)
            if value is not None and self.image_of is None and len(value) != len(self.ids):
                raise ValueError(
                    f"{name} has {len(value)} rows for {len(self.ids)} samples, "
                    "and no image_of says which is whose"
                )
        counts = [len(one) for one in (self.images, self.geometry) if one is not None]
        if len(set(counts)) > 1:
            raise ValueError(f"{counts[0]} images with the geometry of {counts[1]}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def image_index(self) -> Int[Tensor, " b"]:
        """The image each sample looks at."""
        if self.image_of is not None:
            return self.image_of
        if self.images is not None:
            return torch.arange(len(self.ids), device=self.images.device)
        device = None if self.geometry is None else self.geometry.size.device
        return torch.arange(len(self.ids), device=device)

    @property
    def sample_geometry(self) -> PixelGeometry | None:
        """The geometry of the image of each sample, one row a sample."""
        if self.geometry is None or self.image_of is None:
            return self.geometry
        return self.geometry[self.image_of.to(self.geometry.size.device)]

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on another device."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if hasattr(value := getattr(self, field.name), "to")
        }
        return replace(self, **moved)

    def select(self, rows: Int[Tensor, " n"]) -> "Batch":
        """The samples named, in their order, with only the images they look at."""
        chosen = rows.tolist()
        kept: dict[str, object] = {"ids": tuple(self.ids[row] for row in chosen)}
        for name in (*_TENSORS, "text"):
            value = getattr(self, name)
            kept[name] = None if value is None else value[rows]
        for name in _TUPLES:
            value = getattr(self, name)
            kept[name] = None if value is None else tuple(value[row] for row in chosen)
        kept["target"] = None if self.target is None else self.target.select(rows)
        if any(one is not None for one in (self.images, self.geometry, self.image_of)):
            used, kept["image_of"] = self.image_index[rows].unique(return_inverse=True)
            kept["images"] = None if self.images is None else self.images[used]
            kept["geometry"] = None if self.geometry is None else self.geometry[used]
        return replace(self, **kept)  # type: ignore[arg-type]
