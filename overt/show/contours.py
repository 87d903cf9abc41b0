"""Two more ways to draw attention on a photo: lines around most of it, and nothing else lit.

Both take what `overlay` takes, so they stand wherever a way of drawing is an argument.
"""

import numpy as np
from jaxtyping import Bool, Float, UInt8

from overt.geometry import PixelGeometry
from overt.show.figure import finite
from overt.show.overlay import (
    PLAIN,
    Point,
    Style,
    enlarge,
    outline,
    outlined,
    resized,
    spotlight,
)
from overt.show.overlay import colour_table as colours

SHARES = (0.25, 0.5, 0.75)  # of the attention on the photo, inside a line


def contours(
    image: UInt8[np.ndarray, "y x 3"],
    cells: Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: Style = PLAIN,
    truth: Float[np.ndarray, "r c"] | None = None,
    shares: tuple[float, ...] = SHARES,
) -> UInt8[np.ndarray, "Y X 3"]:
    """The photo as it is, with lines around the smallest areas that hold these shares of the heat.

    The innermost line is the brightest. The photo keeps its colours, so what is looked at can be
    seen. The evidence is outlined as in `overlay`.
    """
    finite(cells)
    photo = enlarge(image, style.side)
    height, width = photo.shape[:2]
    geometry = resized(geometry or PixelGeometry.identity(1, image.shape[:2]), (height, width))
    heat = painted(cells, geometry)
    table = colours(style.colours)
    places = np.linspace(235, 120, len(shares))
    picture = photo
    for share, at in sorted(zip(shares, places, strict=True), reverse=True):
        red, green, blue = (round(float(value)) for value in table[round(at)])
        line = Style(outline=(red, green, blue))
        picture = outlined(picture, lines(heat, height_of(heat, share)), line)
    if truth is None:
        return picture.copy()
    return outlined(picture, outline(truth, geometry), style)


def hard_mask(
    image: UInt8[np.ndarray, "y x 3"],
    cells: Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: Style = PLAIN,
    truth: Float[np.ndarray, "r c"] | None = None,
    share: float = 0.5,
) -> UInt8[np.ndarray, "Y X 3"]:
    """The photo where the strongest cells are that together hold this share, dim grey elsewhere.

    For soft maps; `spotlight` is for those that are hard already.
    """
    finite(cells)
    kept = fullest(cells, share)
    return spotlight(image, np.where(kept, 1.0, 0.0), geometry, style, truth)


def fullest(cells: Float[np.ndarray, "r c"], share: float) -> Bool[np.ndarray, "r c"]:
    """The fewest cells that hold this share of the whole; weights below zero count as none."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share} of a map; it lies above 0 and at most at 1")
    amounts = np.maximum(cells, 0).ravel().astype(np.float64)
    order = np.argsort(-amounts, kind="stable")
    before = np.cumsum(amounts[order]) - amounts[order]
    kept = np.zeros(amounts.size, bool)
    kept[order[(before < share * amounts.sum() * (1 - 1e-12)) & (amounts[order] > 0)]] = True
    return kept.reshape(cells.shape)


def painted(cells: Float[np.ndarray, "r c"], geometry: PixelGeometry) -> Float[np.ndarray, "y x"]:
    """The weights drawn smoothly on the photo of the geometry, at its size."""
    import torch

    amounts = torch.from_numpy(np.maximum(cells, 0).astype(np.float64))
    rows, columns = cells.shape
    return geometry.paint(amounts.reshape(1, -1), (rows, columns))[0].numpy()


def height_of(heat: Float[np.ndarray, "y x"], share: float) -> float:
    """The level at which the pixels that are at least as hot hold this share of the heat."""
    if not 0 < share < 1:
        raise ValueError(f"a line around {share} of a map; it lies between 0 and 1")
    ordered = np.sort(heat.ravel())[::-1]
    total = np.cumsum(ordered)
    if total.size == 0 or total[-1] <= 0:
        return 0.0
    return float(ordered[int(np.searchsorted(total, share * total[-1]))])


def lines(heat: Float[np.ndarray, "y x"], level: float) -> list[list[Point]]:
    """Lines along which the heat has this level, as (x, y) in pixels; they close at the edge."""
    from contourpy import contour_generator

    if level <= 0:
        return []
    padded = np.pad(heat, 1)  # a line that runs off the photo follows its edge
    limit = np.array([heat.shape[1], heat.shape[0]])
    found = [np.asarray(line, float) for line in contour_generator(z=padded).lines(level)]
    return [[(x, y) for x, y in (line - 0.5).clip(0, limit).tolist()] for line in found]
