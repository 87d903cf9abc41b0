"""Region encoders of VL-BERT: pooled from a feature map, or precomputed.

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
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.nn.cnn import ConvBackbone

FREQUENCIES = 8  # per coordinate
MAX_PERIOD = 1000.0


@dataclass(frozen=True, eq=False)
class RegionFeatures:
    """Features of the regions, features of the whole image, and which regions exist."""

    values: Float[Tensor, "b m f"]
    whole: Float[Tensor, "b f"]
    present: Bool[Tensor, "b m"]


@runtime_checkable
class RegionEncoder(Protocol):
    """Protocol of an encoder from a batch to regions with `width` features each."""

    width: int

    def __call__(self, batch: Batch) -> RegionFeatures: ...

    def config(self) -> dict[str, Any]:
        """Return plain values from which `region_encoder_from_config` builds the same module."""
        ...


class PooledRegionEncoder(nn.Module):
    """CNN trained with the rest; a region is the mean of the feature map inside its box.

    The mean is exact: every cell is weighted by the area that the box covers. The paper's detector
    samples points instead. Sinusoidal embeddings of the box corners are appended.

    Args:
        channels: channels of each block.
        strides: stride of each block.

    Example:
        >>> from dataclasses import replace
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> encoder = PooledRegionEncoder([8, 8], strides=[4, 2])
        >>> encoder(replace(toy_batch(3), boxes=boxes)).values.shape  # 8 channels + 64 of the box
        torch.Size([3, 2, 72])
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.made_with = {"channels": [*channels], "strides": [*strides]}
        self.backbone = ConvBackbone(channels, strides)
        self.width = self.backbone.channels + 8 * FREQUENCIES

    def forward(self, batch: Batch) -> RegionFeatures:
        """Encode each image once, also if several samples share it."""
        if batch.images is None:
            raise ValueError("batch.images is None: pooled regions need images")
        boxes, geometry, present = _require_boxes(batch)
        # indexing after the backbone: an image shared by samples is encoded once
        maps = self.backbone(batch.images)[batch.image_index]
        means = pool_boxes(maps, boxes, geometry)
        return _append_positions(means, maps.mean(dim=(2, 3)), boxes, geometry, present)

    def config(self) -> dict[str, Any]:
        """Return the channels and strides of the blocks."""
        return {"kind": "pooled", **{name: [*many] for name, many in self.made_with.items()}}


class PrecomputedRegionEncoder(nn.Module):
    """Precomputed features, `batch.features`, with sinusoidal embeddings of their boxes.

    The whole image is the mean of its regions.

    Args:
        size: number of features.

    Example:
        >>> from dataclasses import replace
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> batch = replace(toy_batch(3), boxes=boxes, features=torch.rand(3, 2, 4))
        >>> PrecomputedRegionEncoder(4)(batch).values.shape  # 4 features + 64 of the box
        torch.Size([3, 2, 68])
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.width = size, size + 8 * FREQUENCIES

    def forward(self, batch: Batch) -> RegionFeatures:
        """Return the features of the batch with their positions."""
        if batch.features is None:
            raise ValueError("batch.features is None: this model needs region features")
        if batch.features.shape[-1] != self.size:
            raise ValueError(
                f"batch.features has {batch.features.shape[-1]} features, expected {self.size}"
            )
        boxes, geometry, present = _require_boxes(batch)
        there = present[..., None].to(batch.features.dtype)
        whole = (batch.features * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)
        return _append_positions(batch.features, whole, boxes, geometry, present)

    def config(self) -> dict[str, Any]:
        """Return the size of the features."""
        return {"kind": "given", "size": self.size}


def region_encoder_from_config(config: Mapping[str, Any]) -> RegionEncoder:
    """Build the region encoder of a saved model."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "pooled":
            return PooledRegionEncoder(**sizes)
        case "given":
            return PrecomputedRegionEncoder(**sizes)
        case other:
            raise UserError(f"unknown region encoder {other!r}: expected pooled or given")


def pool_boxes(
    maps: Float[Tensor, "b d y x"], boxes: Float[Tensor, "b m 4"], geometry: PixelGeometry
) -> Float[Tensor, "b m d"]:
    """Average a feature map inside each box; a box outside the image gets the mean of the whole."""
    cover = geometry.cover_any_boxes(boxes, (maps.shape[-2], maps.shape[-1])).to(maps.dtype)
    some = cover.sum(dim=-1, keepdim=True)
    # the clamp keeps 0 / 0 out of the branch that is not selected
    shares = torch.where(some > 0, cover / some.clamp_min(1e-12), 1 / cover.shape[-1])
    return einsum(shares, rearrange(maps, "b d y x -> b (y x) d"), "b m k, b k d -> b m d")


def normalize_boxes(
    boxes: Float[Tensor, "b m 4"], geometry: PixelGeometry
) -> Float[Tensor, "b m 4"]:
    """Convert boxes from photo pixels to [0, 1] of the model's input, x before y."""
    height, width = geometry.canvas
    # geometry is (y, x) and boxes are (x, y, x, y): hence the flip
    scale = geometry.scale.flip(-1).repeat(1, 2)[:, None].to(boxes)
    offset = geometry.offset.flip(-1).repeat(1, 2)[:, None].to(boxes)
    # new_full instead of torch.tensor: a copy from the host would synchronize the GPU
    whole = torch.stack([boxes.new_full((), width), boxes.new_full((), height)])
    one, two = (boxes * scale + offset).split(2, dim=-1)  # a flip swaps the two edges
    edges = torch.minimum(one, two) / whole, torch.maximum(one, two) / whole
    return torch.cat(edges, dim=-1).clamp(0, 1)


def sinusoidal_boxes(places: Float[Tensor, "*b 4"]) -> Float[Tensor, "*b e"]:
    """Embed four coordinates in [0, 1] as sines and cosines (section 3.2)."""
    steps = torch.arange(FREQUENCIES, device=places.device, dtype=places.dtype) / FREQUENCIES
    angles = 100 * places[..., None] / MAX_PERIOD**steps  # 100 as in VL-BERT's code
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def _require_boxes(batch: Batch) -> tuple[Tensor, PixelGeometry, Tensor]:
    geometry = batch.sample_geometry
    if batch.boxes is None or geometry is None:
        raise ValueError("regions need a batch with boxes and image geometry")
    present = batch.region_mask
    if present is None:
        present = torch.ones_like(batch.boxes[..., 0], dtype=torch.bool)
    return batch.boxes, geometry, present


def _append_positions(
    values: Tensor, whole: Tensor, boxes: Tensor, geometry: PixelGeometry, present: Tensor
) -> RegionFeatures:
    """Append sinusoidal box embeddings to the features."""
    corner = boxes.new_zeros(len(boxes), 2)
    # the box of the whole image in normalised coordinates: 0, 0, 1, 1
    everything = torch.cat([corner, corner + 1], dim=-1)
    places = [
        sinusoidal_boxes(one).to(values.dtype)
        for one in (normalize_boxes(boxes, geometry), everything)
    ]
    return RegionFeatures(
        torch.cat([values, places[0]], dim=-1), torch.cat([whole, places[1]], dim=-1), present
    )
