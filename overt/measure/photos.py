"""Maps as pictures: the weights on the cells of an image, and on the pixels of its photo."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.geometry import PixelGeometry
from overt.measure.measured import row


@dataclass(frozen=True, eq=False)
class Painted:
    """Weights drawn on one photo, and which of its pixels the model was shown."""

    weights: Float[Tensor, "y x"]
    seen: Bool[Tensor, "y x"]


def squares(attention: AttentionMap) -> Float[Tensor, "b y x"]:
    """The weights of a map over the cells of one image, as a picture of its grid."""
    weights, _ = row(attention)
    return weights.reshape(len(weights), *_grid(attention))


def painted(attention: AttentionMap) -> list[Painted]:
    """The weights drawn on each photo at its own size, as its geometry leads back to it."""
    shape = _grid(attention)
    geometry = attention.keys.spans[0].geometry
    if not isinstance(geometry, PixelGeometry):
        raise ValueError("this map does not know its photos: give its span a PixelGeometry")
    weights, seen = row(attention)
    pictures = geometry.paint(weights, shape)
    shown = geometry.paint(seen.double(), shape)
    # a pixel between a cell that may be seen and one that may not is not seen
    return [Painted(one, all_of > 1 - 1e-6) for one, all_of in zip(pictures, shown, strict=True)]


def _grid(attention: AttentionMap) -> tuple[int, int]:
    spans = attention.keys.spans
    if len(spans) != 1 or len(spans[0].shape) != 2 or len(spans[0]) != len(attention.keys):
        names = [span.name for span in spans]
        raise ValueError(
            f"only a map over the cells of one image is a picture, and this one is over {names} "
            f"with {len(attention.keys)} keys: take .block(...) first"
        )
    height, width = spans[0].shape
    return height, width
