"""Regions as features: cut out of a feature map, or computed before.

Su, Zhu, Cao, Li, Lu, Wei and Dai, "VL-BERT: Pre-training of Generic Visual-Linguistic
Representations", ICLR 2020, https://arxiv.org/abs/1908.08530, section 3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.models.cnn import Backbone

WAVES = 8  # wavelengths a coordinate
LONGEST = 1000.0


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of each image, what the image is as a whole, and which regions there are."""

    values: Float[Tensor, "b m f"]
    whole: Float[Tensor, "b f"]
    present: Bool[Tensor, "b m"]


@runtime_checkable
class RegionEye(Protocol):
    """A batch in, its regions out, `width` numbers each."""

    width: int

    def __call__(self, batch: Batch) -> Regions: ...

    def config(self) -> dict[str, Any]:
        """Plain values from which `region_eye_from` builds the same module."""
        ...


class PooledRegions(nn.Module):
    """A CNN that learns with the rest; a region is the mean of the feature map under its box.

    The mean is exact: every cell counts by the share that the box covers. The paper's detector
    samples points instead. Behind the features stand waves of the box's corners.
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.made_with = {"channels": [*channels], "strides": [*strides]}
        self.backbone = Backbone(channels, strides)
        self.width = self.backbone.channels + 8 * WAVES

    def forward(self, batch: Batch) -> Regions:
        """Each image once, however many samples look at it."""
        if batch.images is None:
            raise ValueError("regions are cut out of images, and the batch has none")
        boxes, geometry, present = _boxes(batch)
        maps = self.backbone(batch.images)[batch.image_index]
        means = box_means(maps, boxes, geometry)
        return _placed(means, maps.mean(dim=(2, 3)), boxes, geometry, present)

    def config(self) -> dict[str, Any]:
        """The channels and strides of the blocks."""
        return {"kind": "pooled", **{name: [*many] for name, many in self.made_with.items()}}


class GivenRegions(nn.Module):
    """Features computed before, `batch.features`, with waves of their boxes behind them.

    The image as a whole is the mean of its regions.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.width = size, size + 8 * WAVES

    def forward(self, batch: Batch) -> Regions:
        """The features as they are."""
        if batch.features is None:
            raise ValueError("this model looks at features of regions, and the batch has none")
        if batch.features.shape[-1] != self.size:
            raise ValueError(
                f"features of {batch.features.shape[-1]} numbers for a model of {self.size}"
            )
        boxes, geometry, present = _boxes(batch)
        there = present[..., None].to(batch.features.dtype)
        whole = (batch.features * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)
        return _placed(batch.features, whole, boxes, geometry, present)

    def config(self) -> dict[str, Any]:
        """The size of the features."""
        return {"kind": "given", "size": self.size}


def region_eye_from(config: Mapping[str, Any]) -> RegionEye:
    """The eye that a saved model was made with."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "pooled":
            return PooledRegions(**sizes)
        case "given":
            return GivenRegions(**sizes)
        case other:
            raise BadInput(f"an eye for regions of kind {other!r} is not one of pooled, given")


def box_means(
    maps: Float[Tensor, "b d y x"], boxes: Float[Tensor, "b m 4"], geometry: PixelGeometry
) -> Float[Tensor, "b m d"]:
    """The mean of a feature map under each box; a box off the image has that of the whole."""
    cover = geometry.cover_boxes(boxes, (maps.shape[-2], maps.shape[-1])).to(maps.dtype)
    some = cover.sum(dim=-1, keepdim=True)
    shares = torch.where(some > 0, cover / some.clamp_min(1e-12), 1 / cover.shape[-1])
    return einsum(shares, rearrange(maps, "b d y x -> b (y x) d"), "b m k, b k d -> b m d")


def on_canvas(boxes: Float[Tensor, "b m 4"], geometry: PixelGeometry) -> Float[Tensor, "b m 4"]:
    """Boxes of photos as shares of what the model sees, from 0 to 1, left and top first."""
    height, width = geometry.canvas
    scale = geometry.scale.flip(-1).repeat(1, 2)[:, None].to(boxes)
    offset = geometry.offset.flip(-1).repeat(1, 2)[:, None].to(boxes)
    # filled in, as numbers that are copied to a card are waited for
    whole = torch.stack([boxes.new_full((), width), boxes.new_full((), height)])
    one, two = (boxes * scale + offset).split(2, dim=-1)  # a flip swaps the two edges
    edges = torch.minimum(one, two) / whole, torch.maximum(one, two) / whole
    return torch.cat(edges, dim=-1).clamp(0, 1)


def waves(places: Float[Tensor, "*b 4"]) -> Float[Tensor, "*b e"]:
    """Four coordinates from 0 to 1 as sines and cosines of different wavelengths (section 3.2)."""
    steps = torch.arange(WAVES, device=places.device, dtype=places.dtype) / WAVES
    angles = 100 * places[..., None] / LONGEST**steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def _boxes(batch: Batch) -> tuple[Tensor, PixelGeometry, Tensor]:
    geometry = batch.sample_geometry
    if batch.boxes is None or geometry is None:
        raise ValueError("regions need a batch with boxes and the geometry of its images")
    present = batch.region_mask
    if present is None:
        present = torch.ones_like(batch.boxes[..., 0], dtype=torch.bool)
    return batch.boxes, geometry, present


def _placed(
    values: Tensor, whole: Tensor, boxes: Tensor, geometry: PixelGeometry, present: Tensor
) -> Regions:
    """Features with the waves of where they stand."""
    corner = boxes.new_zeros(len(boxes), 2)
    everything = torch.cat([corner, corner + 1], dim=-1)
    places = [waves(one).to(values.dtype) for one in (on_canvas(boxes, geometry), everything)]
    return Regions(
        torch.cat([values, places[0]], dim=-1), torch.cat([whole, places[1]], dim=-1), present
    )
