"""Maps side by side on one colour scale: two maps with their difference, or one map per word."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from overt.attention import AttentionMap
from overt.geometry import PixelGeometry
from overt.viz.figure import (
    FONT_SIZE,
    PAGE_WIDTH,
    SOFT,
    add_axes,
    add_colour_bar,
    add_text,
    new_figure,
    show_image,
)
from overt.viz.photo_overlay import (
    DEFAULT_STYLE,
    DrawFunction,
    OverlayStyle,
    as_photo,
    cell_outline,
    check_finite,
    colour_bar,
    colour_limit,
    draw_outline,
    enlarge_photo,
    overlay,
    paint_map,
    place_cells,
    place_photo,
    resize_geometry,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP, EDGE = 0.12, 0.08  # inches


def compare_maps(
    photo: UInt8[np.ndarray, "y x 3"] | Image.Image,
    before: AttentionMap | Float[np.ndarray, "r c"],
    after: AttentionMap | Float[np.ndarray, "R C"],
    geometry: PixelGeometry | None = None,
    truth: Float[np.ndarray, "_ _"] | None = None,
    names: tuple[str, str] = ("before", "after"),
    draw: DrawFunction = overlay,
) -> "Figure":
    """Draw two maps of one photo on one colour scale, and their difference.

    Maps are shown as densities relative to a uniform map, so the grids may differ.

    Args:
        photo: photo, as an array of 8-bit colours or a PIL image.
        before: first map, as for `overlay`.
        after: second map; its grid may differ.
        geometry: maps the photo to the grids; None: that of the maps, else they cover the photo.
        truth: evidence on a grid of cells; it is outlined.
        names: titles of the two maps.
        draw: function that draws a map on its photo.

    Returns:
        A matplotlib figure: first map, second map, difference.

    Raises:
        ValueError: if a weight is not finite.

    Example:
        >>> photo = np.zeros((32, 32, 3), np.uint8)
        >>> figure = compare_maps(photo, before=np.ones((4, 4)), after=np.eye(8))
        >>> [text.get_text() for text in figure.texts][:3]
        ['before', 'after', 'after − before']
    """
    photo = as_photo(photo)
    after, geometry = place_cells(after, geometry, photo)
    before, geometry = place_cells(before, geometry, photo)
    for cells in (before, after):
        check_finite(cells)
    top = max(colour_limit(map_density(cells)) for cells in (before, after))
    style = OverlayStyle(top=top)
    pictures = [draw(photo, map_density(cells), geometry, style) for cells in (before, after)]
    if truth is not None:
        pictures = [_outline_evidence(one, photo, geometry, truth, style) for one in pictures]
    shift, most = difference_image(photo, before, after, geometry, truth=truth)
    wide = (PAGE_WIDTH - 2 * EDGE - 2 * GAP) / 3
    tall = wide * photo.shape[0] / photo.shape[1]
    figure = new_figure(PAGE_WIDTH, tall + 0.78)
    for number, (name, picture) in enumerate(
        zip((*names, f"{names[1]} − {names[0]}"), (*pictures, shift), strict=True)
    ):
        left = EDGE + number * (wide + GAP)
        add_text(figure, left, 0.13, name, weight="bold")
        show_image(add_axes(figure, left, 0.26, wide, tall), picture)
    bar = tall + 0.47
    heat = colour_bar(256, 1, style, under=138)[0]
    ends = ("0", _format_density(top))
    add_colour_bar(figure, (EDGE, bar, 2 * wide + GAP, 0.1), heat, ends, "attention per pixel")
    left = EDGE + 2 * (wide + GAP)
    ends = (f"− {_format_density(most)}", f"+ {_format_density(most)}")
    add_colour_bar(figure, (left, bar, wide, 0.1), diverging_colours(), ends, "change")
    return figure


def difference_image(
    photo: UInt8[np.ndarray, "y x 3"],
    before: Float[np.ndarray, "r c"],
    after: Float[np.ndarray, "R C"],
    geometry: PixelGeometry | None = None,
    style: OverlayStyle = DEFAULT_STYLE,
    truth: Float[np.ndarray, "_ _"] | None = None,
) -> tuple[UInt8[np.ndarray, "Y X 3"], float]:
    """Draw the second map minus the first on the grey photo; also return the largest change.

    Blue is less, orange is more; the scale is symmetric. Maps are shares of their sum times their
    number of cells.
    """
    under, own = place_photo(photo, geometry, style)
    change = paint_map(map_density(after), own) - paint_map(map_density(before), own)
    change = np.where(np.abs(change) < 1e-9, 0.0, change)  # ignore rounding
    most = float(np.abs(change).max(initial=0.0))
    share = change / most if most > 0 else change
    colour = diverging_colours()[np.rint(127.5 + 127.5 * share).astype(int).clip(0, 255)]
    grey = np.repeat((under @ np.array([0.2126, 0.7152, 0.0722]))[..., None], 3, axis=-1)
    grey = grey * 0.5 + 100
    alpha = 0.9 * np.abs(share[..., None]) ** 0.6
    picture = np.rint(grey * (1 - alpha) + colour * alpha).astype(np.uint8)
    if truth is not None:
        picture = _outline_evidence(picture, photo, geometry, truth, style)
    return picture, most


def _outline_evidence(
    picture: UInt8[np.ndarray, "Y X 3"],
    photo: UInt8[np.ndarray, "y x 3"],
    geometry: PixelGeometry | None,
    truth: Float[np.ndarray, "r c"],
    style: OverlayStyle,
) -> UInt8[np.ndarray, "Y X 3"]:
    own = geometry or PixelGeometry.identity(1, photo.shape[:2])
    height, width = picture.shape[:2]
    return draw_outline(picture, cell_outline(truth, resize_geometry(own, (height, width))), style)


def diverging_colours() -> UInt8[np.ndarray, "256 3"]:
    """Return 256 colours from blue over white to orange, safe for colour-blind readers."""
    ends = np.array([[5, 80, 160], [255, 255, 255], [200, 80, 0]], float)
    at = np.linspace(0, 2, 256)
    return np.rint(
        np.stack([np.interp(at, range(3), ends[:, channel]) for channel in range(3)], axis=-1)
    ).astype(np.uint8)


def word_maps(
    photo: UInt8[np.ndarray, "y x 3"],
    words: Sequence[str],
    maps: Float[np.ndarray, "n r c"],
    geometry: PixelGeometry | None = None,
    columns: int = 6,
    draw: DrawFunction = overlay,
) -> "Figure":
    """Draw the photo and then one small map per word, on one colour scale.

    Args:
        photo: photo.
        words: words of a caption or question.
        maps: one map per word.
        geometry: maps the photo to the grid; None: the grid covers the photo.
        columns: images per row.
        draw: function that draws a map on its photo.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: if the number of maps does not match, or a weight is not finite.

    Example:
        >>> photo = np.zeros((32, 32, 3), np.uint8)
        >>> figure = word_maps(photo, ["a", "red", "ring"], np.ones((3, 4, 4)))
        >>> [text.get_text() for text in figure.texts][:4]
        ['photo', 'a', 'red', 'ring']
    """
    if len(words) != len(maps):
        raise ValueError(f"got {len(maps)} maps for {len(words)} words: one per word is needed")
    check_finite(maps)
    densities = [map_density(cells) for cells in maps]
    top = max((colour_limit(cells) for cells in densities), default=0.0)
    style = OverlayStyle(top=top or None)
    pictures = [enlarge_photo(photo, style.side)]
    pictures += [draw(photo, cells, geometry, style) for cells in densities]
    columns = min(columns, len(pictures))
    wide = (PAGE_WIDTH - 2 * EDGE - (columns - 1) * GAP) / columns
    tall = wide * photo.shape[0] / photo.shape[1]
    down = tall + 0.3
    rows = math.ceil(len(pictures) / columns)
    figure = new_figure(PAGE_WIDTH, rows * down + 0.5)
    for number, (word, picture) in enumerate(zip(("photo", *words), pictures, strict=True)):
        left = EDGE + (number % columns) * (wide + GAP)
        y = (number // columns) * down
        look = {"color": SOFT} if number == 0 else {"weight": "bold"}
        add_text(figure, left, y + 0.14, _truncate(word, wide), **look)
        show_image(add_axes(figure, left, y + 0.26, wide, tall), picture)
    heat = colour_bar(256, 1, style, under=138)[0]
    ends = ("0", _format_density(top))
    box = (EDGE, rows * down + 0.22, min(2.4, PAGE_WIDTH / 2), 0.1)
    add_colour_bar(figure, box, heat, ends, "attention per pixel")
    return figure


def map_density(cells: Float[np.ndarray, "r c"]) -> Float[np.ndarray, "r c"]:
    """Return shares of the total times the number of cells: 1 is uniform for any grid."""
    amounts = np.maximum(cells, 0).astype(np.float64)
    total = amounts.sum()
    return amounts * (amounts.size / total) if total > 0 else amounts


def _format_density(amount: float) -> str:
    """Format a density relative to a uniform map."""
    return f"{amount:.2g} × uniform"


def _truncate(word: str, inches: float) -> str:
    room = max(3, int(inches * 72 / (FONT_SIZE * 0.62)))
    return word if len(word) <= room else word[: room - 1] + "…"
