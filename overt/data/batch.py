"""What a data set hands to a model: samples with ids, whatever the task."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from overt.attention import AttentionMap
from overt.geometry import PixelGeometry, TextGeometry


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
        for field in ("tokens", "token_mask", "boxes", "features", "labels", "answers", "groups"):
            value = getattr(self, field)
            if value is not None and len(value) != len(self.ids):
                raise ValueError(f"{field} has {len(value)} rows for {len(self.ids)} samples")
        if self.images is not None and self.image_of is None and len(self.images) != len(self.ids):
            raise ValueError(
                f"{len(self.images)} images for {len(self.ids)} samples, and no image_of to say which"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def image_index(self) -> Int[Tensor, " b"]:
        """The image each sample looks at."""
        if self.image_of is not None:
            return self.image_of
        device = None if self.images is None else self.images.device
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
        for name in ("tokens", "token_mask", "boxes", "features", "region_mask", "labels"):
            value = getattr(self, name)
            kept[name] = None if value is None else value[rows]
        kept["answers"] = None if self.answers is None else self.answers[rows]
        kept["text"] = None if self.text is None else self.text[rows]
        kept["target"] = None if self.target is None else self.target.select(rows)
        for name in ("references", "groups"):
            value = getattr(self, name)
            kept[name] = None if value is None else tuple(value[row] for row in chosen)
        if self.images is not None:
            used, image_of = self.image_index[rows].unique(return_inverse=True)
            kept["images"], kept["image_of"] = self.images[used], image_of
            kept["geometry"] = None if self.geometry is None else self.geometry[used]
        return replace(self, **kept)  # type: ignore[arg-type]
