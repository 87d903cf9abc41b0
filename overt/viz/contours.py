"""Contour lines and masks of an attention map on its photo.

Both functions have the signature of `overlay`, so they can replace it as `draw=`.
"""

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from overt.attention import AttentionMap
from overt.errors import require_package
from overt.geometry import PixelGeometry
from overt.viz.photo_overlay import (
    DEFAULT_STYLE,
    OverlayStyle,
    Point,
    cell_outline,
    check_finite,
    draw_outline,
    paint_map,
    place_cells,
    place_photo,
    spotlight,
)
from overt.viz.photo_overlay import colour_table as colours

SHARES = (0.25, 0.5, 0.75)  # of the attention, inside a line


def contours(
    image: UInt8[np.ndarray, "y x 3"] | Image.Image,
    cells: AttentionMap | Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: OverlayStyle = DEFAULT_STYLE,
    truth: Float[np.ndarray, "r c"] | None = None,
    shares: tuple[float, ...] = SHARES,
) -> UInt8[np.ndarray, "Y X 3"]:
    """Draw contour lines around the smallest areas that contain given shares of the attention.

    The innermost line is the brightest. The photo keeps its colours.

    Args:
        image: photo, as an array of 8-bit colours or a PIL image.
        cells: a map of one sample or an array of cells, as for `overlay`.
        geometry: maps the photo to the grid; None: that of the map, else the grid covers the photo.
        style: colours and size.
        truth: evidence on a grid of cells; it is outlined.
        shares: shares of the attention inside the lines, between 0 and 1.

    Returns:
        The photo with lines, enlarged if it is small.

    Raises:
        ValueError: if a weight is not finite or a share is out of range.

    Example:
        >>> contours(np.zeros((8, 8, 3), np.uint8), np.eye(4)).shape
        (256, 256, 3)
    """
    cells, geometry = place_cells(cells, geometry, image)
    check_finite(cells)
    photo, geometry = place_photo(image, geometry, style)
    heat = paint_map(cells, geometry)
    table = colours(style.colours)
    places = np.linspace(235, 120, len(shares))
    picture = photo
    for share, at in sorted(zip(shares, places, strict=True), reverse=True):
        red, green, blue = (round(float(value)) for value in table[round(at)])
        line = OverlayStyle(outline=(red, green, blue))
        picture = draw_outline(picture, contour_lines(heat, contour_level(heat, share)), line)
    if truth is None:
        return picture.copy()
    return draw_outline(picture, cell_outline(truth, geometry), style)


def hard_mask(
    image: UInt8[np.ndarray, "y x 3"] | Image.Image,
    cells: AttentionMap | Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: OverlayStyle = DEFAULT_STYLE,
    truth: Float[np.ndarray, "r c"] | None = None,
    share: float = 0.5,
) -> UInt8[np.ndarray, "Y X 3"]:
    """Show the photo in the strongest cells and dim grey elsewhere.

    The visible cells are the fewest that contain `share` of the attention. For soft maps; use
    `spotlight` for hard attention.

    Args:
        image: photo, as an array of 8-bit colours or a PIL image.
        cells: a map of one sample or an array of cells, as for `overlay`.
        geometry: maps the photo to the grid; None: that of the map, else the grid covers the photo.
        style: colours and size.
        truth: evidence on a grid of cells; it is outlined.
        share: share of the attention in the visible cells, above 0 and at most 1.

    Returns:
        The masked photo, enlarged if it is small.

    Raises:
        ValueError: if a weight is not finite or the share is out of range.

    Example:
        >>> photo = np.full((256, 256, 3), 200, np.uint8)
        >>> picture = hard_mask(photo, np.array([[0.6, 0.2], [0.1, 0.1]]), share=0.5)
        >>> picture[0, 0].tolist(), picture[0, 255].tolist()  # the first cell has 60 %
        ([200, 200, 200], [50, 50, 50])
    """
    cells, geometry = place_cells(cells, geometry, image)
    check_finite(cells)
    kept = top_share_mask(cells, share)
    return spotlight(image, np.where(kept, 1.0, 0.0), geometry, style, truth)


def top_share_mask(cells: Float[np.ndarray, "r c"], share: float) -> Bool[np.ndarray, "r c"]:
    """Return the fewest cells with this share of the total; negative weights count as zero."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    amounts = np.maximum(cells, 0).ravel().astype(np.float64)
    order = np.argsort(-amounts, kind="stable")
    before = np.cumsum(amounts[order]) - amounts[order]
    kept = np.zeros(amounts.size, bool)
    # the margin: rounding of the sum must not add one more cell to an exact share
    kept[order[(before < share * amounts.sum() * (1 - 1e-12)) & (amounts[order] > 0)]] = True
    return kept.reshape(cells.shape)


def contour_level(heat: Float[np.ndarray, "y x"], share: float) -> float:
    """Return the level at which the pixels at or above it contain this share of the heat."""
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    ordered = np.sort(heat.ravel())[::-1]
    total = np.cumsum(ordered)
    if total.size == 0 or total[-1] <= 0:
        return 0.0
    return float(ordered[int(np.searchsorted(total, share * total[-1]))])


def contour_lines(heat: Float[np.ndarray, "y x"], level: float) -> list[list[Point]]:
    """Return the lines of this level as (x, y) in pixels; they follow the edge of the photo."""
    require_package("contourpy")
    from contourpy import contour_generator

    if level <= 0:
        return []
    padded = np.pad(heat, 1)  # close lines at the edge of the photo
    limit = np.array([heat.shape[1], heat.shape[0]])
    found = [np.asarray(line, float) for line in contour_generator(z=padded).lines(level)]
    return [[(x, y) for x, y in (line - 0.5).clip(0, limit).tolist()] for line in found]
