"""Resample a map to another grid, so that maps with different cells can be compared."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from overt.attention import AttentionMap, Kind, grid
from overt.geometry import PixelGeometry, resize_by_area


def resample_to_grid(attention: AttentionMap, shape: tuple[int, int]) -> AttentionMap:
    """Resample a map over the cells of one image to another grid over the same canvas.

    Finer cells are interpolated bilinearly. Coarser cells are the mean of what they cover: a cell
    that is covered in part counts by its covered area, so the mean of the map is kept at any
    ratio. The sum of a row is not kept: `normalize` the result where a distribution is needed. The
    same grid returns the same map.

    Args:
        attention: A map over the cells of one image.
        shape: Height and width of the new grid.

    Returns:
        The resampled map, of amounts or signed.

    Raises:
        ValueError: The map is not over the cells of one image, has hidden cells, or the grid is
            empty.

    Example:
        >>> attention = AttentionMap.from_cells(torch.tensor([[0, 1, 2, 3]]), grid(2, 2))
        >>> resample_to_grid(attention, (1, 2)).weights.flatten()  # means of the columns
        tensor([1., 2.])
    """
    spans = attention.keys.spans
    if len(spans) != 1 or len(spans[0].shape) != 2 or len(spans[0]) != len(attention.keys):
        raise ValueError(
            f"expected a map over the cells of one image, got keys of "
            f"{[span.name for span in spans]}: take .between(query, key) first"
        )
    if min(shape) < 1:
        raise ValueError(f"the sides of a grid must be at least 1, got {shape}")
    height, width = spans[0].shape
    if (height, width) == shape:
        return attention
    if attention.mask is not None and not bool(
        (attention.visible | ~attention.rows[..., None]).all()
    ):
        raise ValueError("a map with hidden cells cannot be resampled")
    b, l, h, q, _ = attention.values.shape
    picture = rearrange(attention.weights, "b l h q (y x) -> (b l h q) 1 y x", y=height, x=width)
    low, high = picture.amin(dim=(-2, -1), keepdim=True), picture.amax(dim=(-2, -1), keepdim=True)
    for axis, length in enumerate(shape):
        picture = _resize_axis(picture, axis, length)
    # means are between minimum and maximum; rounding beyond them would rank a constant map
    picture = torch.where(picture.isnan(), picture, picture.clamp(low, high))
    geometry = spans[0].geometry
    assert geometry is None or isinstance(geometry, PixelGeometry)
    keys = grid(*shape, name=spans[0].name, geometry=geometry)
    rows = attention.rows[..., None].expand(b, q, len(keys))
    return AttentionMap(
        rearrange(picture, "(b l h q) 1 y x -> b l h q (y x)", b=b, l=l, h=h, q=q),
        keys,
        attention.queries,
        None if attention.mask is None else rows,
        Kind.SIGNED if attention.kind is Kind.SIGNED else Kind.AMOUNT,
    )


def _resize_axis(picture: Tensor, axis: int, length: int) -> Tensor:
    """Resize one axis: bilinear to a finer grid, area means to a coarser one."""
    size = [picture.shape[-2], picture.shape[-1]]
    now, size[axis] = size[axis], length
    if length >= now:
        return interpolate(picture, size, mode="bilinear", align_corners=False)
    return resize_by_area(picture, (size[0], size[1]))
