"""`Batch`: the samples that a dataset returns and a model takes, for every task."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from overt.attention import AttentionMap
from overt.geometry import PixelGeometry, TextGeometry

# Fields with one row per sample.
_TENSORS = ("tokens", "token_mask", "boxes", "features", "region_mask", "labels", "answers")
_TUPLES = ("references", "groups")


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of b samples over i images, where several samples may share an image.

    A shared image is encoded once. A field that a task does not have is None.

    Args:
        ids: Unique name of each sample.
        images: Pixels of the i images.
        image_of: Index into `images` for each sample; None if there is one image per sample.
        geometry: How each image was made from its photo.
        tokens: Token ids, padded.
        token_mask: Which tokens are present.
        text: Texts and the characters that each token covers.
        boxes: Regions in pixels of the original photo.
        features: Features of regions or grid cells.
        region_mask: Which regions are present.
        labels: Class indices.
        answers: Soft score of every class.
        references: Reference texts to compare with.
        groups: Kind of each sample, such as the family of a question.
        target: Ground-truth attention.

    Raises:
        ValueError: Fields have different numbers of rows.

    Example:
        >>> Batch(ids=("a", "b"), labels=torch.tensor([3, 5])).select(torch.tensor([1])).ids
        ('b',)
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
                raise ValueError(
                    f"{name} has {len(value)} rows, expected {len(self.ids)} (one per id)"
                )
        for name in ("images", "geometry"):
            value = getattr(self, name)
            if value is not None and self.image_of is None and len(value) != len(self.ids):
                raise ValueError(
                    f"{name} has {len(value)} rows for {len(self.ids)} samples: "
                    "give image_of, the image of each sample"
                )
        counts = [len(one) for one in (self.images, self.geometry) if one is not None]
        if len(set(counts)) > 1:
            raise ValueError(
                f"images has {counts[0]} rows and geometry has {counts[1]}: give one each"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def image_index(self) -> Int[Tensor, " b"]:
        """Index of the image of each sample."""
        if self.image_of is not None:
            return self.image_of
        if self.images is not None:
            return torch.arange(len(self.ids), device=self.images.device)
        device = None if self.geometry is None else self.geometry.size.device
        return torch.arange(len(self.ids), device=device)

    @property
    def sample_geometry(self) -> PixelGeometry | None:
        """Geometry of the image of each sample, one row per sample."""
        if self.geometry is None or self.image_of is None:
            return self.geometry
        return self.geometry[self.image_of.to(self.geometry.size.device)]

    def with_own_images(self) -> "Batch":
        """Return the batch with one image per sample, repeated where several samples share one.

        `images` then has one row per sample, in their order, and `image_of` is None. A batch
        without shared images is returned unchanged.
        """
        if self.image_of is None:
            return self
        images = None if self.images is None else self.images[self.image_index]
        return replace(self, images=images, geometry=self.sample_geometry, image_of=None)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on `device`.

        Args:
            device: Target device.
        """
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if hasattr(value := getattr(self, field.name), "to")
        }
        return replace(self, **moved)

    def select(self, rows: Int[Tensor, " n"]) -> "Batch":
        """Return the samples at `rows`, in that order, with only the images that they use.

        Args:
            rows: Indices of samples.
        """
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
