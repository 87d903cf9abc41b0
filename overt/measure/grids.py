"""One map on the cells of another: what is compared must have the same keys."""

from dataclasses import replace

from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from overt.attention import AttentionMap, Form, Kind, grid
from overt.geometry import PixelGeometry


def on_grid(attention: AttentionMap, shape: tuple[int, int]) -> AttentionMap:
    """The map drawn smoothly on a grid of `shape`, over the same canvas; amounts, or signed.

    Finer cells take the bilinear mean of those around their centre, and coarser ones the mean of
    what they cover, so that no cell of the map is passed over. What a row held in all is not kept:
    `normalize` what comes out where a distribution is wanted. The same grid gives the same map.
    """
    spans = attention.keys.spans
    if len(spans) != 1 or len(spans[0].shape) != 2 or len(spans[0]) != len(attention.keys):
        raise ValueError(
            f"only a map over the cells of one image goes onto another grid, and this one is over "
            f"{[span.name for span in spans]}: take .between(query, key) first"
        )
    if min(shape) < 1:
        raise ValueError(f"a grid of {shape} has no cell")
    height, width = spans[0].shape
    if (height, width) == shape:
        return attention
    if attention.mask is not None and not bool(
        (attention.visible | ~attention.rows[..., None]).all()
    ):
        raise ValueError("cells that a map may not see have no weight to draw on another grid")
    b, l, h, q, _ = attention.values.shape
    picture = rearrange(attention.weights, "b l h q (y x) -> (b l h q) 1 y x", y=height, x=width)
    for axis, length in enumerate(shape):
        picture = _along(picture, axis, length)
    geometry = spans[0].geometry
    assert geometry is None or isinstance(geometry, PixelGeometry)
    keys = grid(*shape, name=spans[0].name, geometry=geometry)
    rows = attention.rows[..., None].expand(b, q, len(keys))
    return replace(
        attention,
        values=rearrange(picture, "(b l h q) 1 y x -> b l h q (y x)", b=b, l=l, h=h, q=q),
        keys=keys,
        mask=None if attention.mask is None else rows,
        kind=Kind.SIGNED if attention.kind is Kind.SIGNED else Kind.AMOUNT,
        form=Form.PLAIN,
    )


def _along(picture: Tensor, axis: int, length: int) -> Tensor:
    """One side of a picture at another length: finer by lines between, coarser by means."""
    size = list(picture.shape[-2:])
    now, size[axis] = size[axis], length
    if length >= now:
        return interpolate(picture, size, mode="bilinear", align_corners=False)
    return interpolate(picture, size, mode="area")
