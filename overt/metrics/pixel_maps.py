"""Maps as images: weights on the grid of an image, or on the pixels of its photo."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.geometry import PixelGeometry
from overt.metrics.metric import single_row


@dataclass(frozen=True, eq=False)
class PhotoMap:
    """Weights on the pixels of one photo, and the pixels that the model has seen."""

    weights: Float[Tensor, "y x"]
    seen: Bool[Tensor, "y x"]


def to_grid(attention: AttentionMap) -> Float[Tensor, "b y x"]:
    """Reshape the weights of a map to its grid of cells."""
    weights, _ = single_row(attention)
    return weights.reshape(len(weights), *_grid_shape(attention))


def to_photo_pixels(attention: AttentionMap) -> list[PhotoMap]:
    """Draw the weights on each photo at its original size, by the geometry of the map."""
    shape = _grid_shape(attention)
    geometry = attention.keys.spans[0].geometry
    if not isinstance(geometry, PixelGeometry):
        raise ValueError("the map has no photo geometry: give its span a PixelGeometry")
    weights, seen = single_row(attention)
    pictures = geometry.paint(weights, shape)
    shown = geometry.paint(seen.double(), shape)
    # a pixel interpolated from a hidden cell is hidden
    return [PhotoMap(one, all_of > 1 - 1e-6) for one, all_of in zip(pictures, shown, strict=True)]


def _grid_shape(attention: AttentionMap) -> tuple[int, int]:
    spans = attention.keys.spans
    if len(spans) != 1 or len(spans[0].shape) != 2 or len(spans[0]) != len(attention.keys):
        names = [span.name for span in spans]
        raise ValueError(
            f"expected the cells of one image, got {len(attention.keys)} keys of {names}: take "
            ".block(...) first"
        )
    height, width = spans[0].shape
    return height, width
