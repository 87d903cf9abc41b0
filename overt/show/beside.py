"""Maps side by side on one scale: before and after and what changed, and one map a word."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8

from overt.geometry import PixelGeometry
from overt.show.contours import painted
from overt.show.figure import PAGE, SIZE, blank, finite, place, say, scale, show
from overt.show.look import SOFT
from overt.show.overlay import (
    PLAIN,
    Style,
    enlarge,
    highest,
    outline,
    outlined,
    overlay,
    resized,
    scale_bar,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP, EDGE = 0.12, 0.08  # inches
Draw = Callable[..., UInt8[np.ndarray, "y x 3"]]


def changed(
    photo: UInt8[np.ndarray, "y x 3"],
    before: Float[np.ndarray, "r c"],
    after: Float[np.ndarray, "R C"],
    geometry: PixelGeometry | None = None,
    truth: Float[np.ndarray, "_ _"] | None = None,
    names: tuple[str, str] = ("before", "after"),
    draw: Draw = overlay,
) -> "Figure":
    """Two maps of one photo on one scale, and their difference, where more and less have a colour.

    The second map may have a grid of its own. What holds evidence is outlined in all.
    """
    for cells in (before, after):
        finite(cells)
    top = max(_densest(before), _densest(after))
    style = Style(top=top)
    pictures = [draw(photo, _as_density(cells), geometry, style) for cells in (before, after)]
    if truth is not None:
        pictures = [_evidence(one, photo, geometry, truth, style) for one in pictures]
    shift, most = difference(photo, before, after, geometry, truth=truth)
    wide = (PAGE - 2 * EDGE - 2 * GAP) / 3
    tall = wide * photo.shape[0] / photo.shape[1]
    figure = blank(PAGE, tall + 0.78)
    for number, (name, picture) in enumerate(
        zip((*names, f"{names[1]} less {names[0]}"), (*pictures, shift), strict=True)
    ):
        left = EDGE + number * (wide + GAP)
        say(figure, left, 0.13, name, weight="bold")
        show(place(figure, left, 0.26, wide, tall), picture)
    bar = tall + 0.47
    heat = scale_bar(256, 1, style, under=138)[0]
    ends = ("0", _times(top))
    scale(figure, (EDGE, bar, 2 * wide + GAP, 0.1), heat, ends, "attention a pixel")
    left = EDGE + 2 * (wide + GAP)
    ends = (f"− {_times(most)}", f"+ {_times(most)}")
    scale(figure, (left, bar, wide, 0.1), two_ways(), ends, "change")
    return figure


def difference(
    photo: UInt8[np.ndarray, "y x 3"],
    before: Float[np.ndarray, "r c"],
    after: Float[np.ndarray, "R C"],
    geometry: PixelGeometry | None = None,
    style: Style = PLAIN,
    truth: Float[np.ndarray, "_ _"] | None = None,
) -> tuple[UInt8[np.ndarray, "Y X 3"], float]:
    """The second map less the first on a grey photo, and the change that gets the last colour.

    Blue is less and orange is more, as far as the larger of the two goes. Maps are taken as shares
    of their sum, times their cells.
    """
    under = enlarge(photo, style.side)
    height, width = under.shape[:2]
    own = resized(geometry or PixelGeometry.identity(1, photo.shape[:2]), (height, width))
    change = painted(_as_density(after), own) - painted(_as_density(before), own)
    change = np.where(np.abs(change) < 1e-9, 0.0, change)  # rounding is no change
    most = float(np.abs(change).max(initial=0.0))
    share = change / most if most > 0 else change
    colour = two_ways()[np.rint(127.5 + 127.5 * share).astype(int).clip(0, 255)]
    grey = np.repeat((under @ np.array([0.2126, 0.7152, 0.0722]))[..., None], 3, axis=-1)
    grey = grey * 0.5 + 100
    alpha = 0.9 * np.abs(share[..., None]) ** 0.6
    picture = np.rint(grey * (1 - alpha) + colour * alpha).astype(np.uint8)
    if truth is not None:
        picture = _evidence(picture, photo, geometry, truth, style)
    return picture, most


def _evidence(
    picture: UInt8[np.ndarray, "Y X 3"],
    photo: UInt8[np.ndarray, "y x 3"],
    geometry: PixelGeometry | None,
    truth: Float[np.ndarray, "r c"],
    style: Style,
) -> UInt8[np.ndarray, "Y X 3"]:
    own = geometry or PixelGeometry.identity(1, photo.shape[:2])
    height, width = picture.shape[:2]
    return outlined(picture, outline(truth, resized(own, (height, width))), style)


def two_ways() -> UInt8[np.ndarray, "256 3"]:
    """Colours from less to more with white between: blue and orange differ for everybody."""
    ends = np.array([[5, 80, 160], [255, 255, 255], [200, 80, 0]], float)
    at = np.linspace(0, 2, 256)
    return np.rint(
        np.stack([np.interp(at, range(3), ends[:, channel]) for channel in range(3)], axis=-1)
    ).astype(np.uint8)


def word_by_word(
    photo: UInt8[np.ndarray, "y x 3"],
    words: Sequence[str],
    maps: Float[np.ndarray, "n r c"],
    geometry: PixelGeometry | None = None,
    columns: int = 6,
    draw: Draw = overlay,
) -> "Figure":
    """A caption as it was written: the photo first, then one small map a word, on one scale."""
    if len(words) != len(maps):
        raise ValueError(f"{len(maps)} maps for {len(words)} words")
    finite(maps)
    densities = [_as_density(cells) for cells in maps]
    top = max((highest(cells) for cells in densities), default=0.0)
    style = Style(top=top or None)
    pictures = [enlarge(photo, style.side)]
    pictures += [draw(photo, cells, geometry, style) for cells in densities]
    columns = min(columns, len(pictures))
    wide = (PAGE - 2 * EDGE - (columns - 1) * GAP) / columns
    tall = wide * photo.shape[0] / photo.shape[1]
    down = tall + 0.3
    rows = math.ceil(len(pictures) / columns)
    figure = blank(PAGE, rows * down + 0.5)
    for number, (word, picture) in enumerate(zip(("photo", *words), pictures, strict=True)):
        left = EDGE + (number % columns) * (wide + GAP)
        y = (number // columns) * down
        look = {"color": SOFT} if number == 0 else {"weight": "bold"}
        say(figure, left, y + 0.14, _within(word, wide), **look)
        show(place(figure, left, y + 0.26, wide, tall), picture)
    heat = scale_bar(256, 1, style, under=138)[0]
    ends = ("0", _times(top))
    box = (EDGE, rows * down + 0.22, min(2.4, PAGE / 2), 0.1)
    scale(figure, box, heat, ends, "attention a pixel")
    return figure


def _as_density(cells: Float[np.ndarray, "r c"]) -> Float[np.ndarray, "r c"]:
    """Shares of the map times its cells: 1 is an even map, whatever the grid."""
    amounts = np.maximum(cells, 0).astype(np.float64)
    total = amounts.sum()
    return amounts * (amounts.size / total) if total > 0 else amounts


def _densest(cells: Float[np.ndarray, "r c"]) -> float:
    return highest(_as_density(cells))


def _times(amount: float) -> str:
    """How often as dense as an even map."""
    return f"{amount:.2g} × even"


def _within(word: str, inches: float) -> str:
    room = max(3, int(inches * 72 / (SIZE * 0.62)))
    return word if len(word) <= room else word[: room - 1] + "…"
