"""Attention drawn on the photo it belongs to, cell by cell where the photo really was.

The map is laid over the original photo through the same geometry that aligns a loss target, so
that a picture can never disagree with a measure.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from overt import files
from overt.geometry import PixelGeometry

Point = tuple[int | float, int | float]


@dataclass(frozen=True)
class Style:
    """How a map is drawn.

    `colours` is one of matplotlib's perceptually uniform maps. The largest weight is drawn with
    opacity `strength`, no weight with none. `fade` is how much colour, and `dim` how much light, is
    taken out of the photo beneath, so that its own colours do not pass for heat. `top` is the
    weight that gets the last colour, for pictures that share one scale. A photo whose longer side
    is under `side` pixels is enlarged by a whole number, its pixels kept square.
    """

    colours: str = "inferno"
    strength: float = 0.85
    fade: float = 0.8
    dim: float = 0.25
    top: float | None = None
    side: int = 256
    outline: tuple[int, int, int] = (255, 255, 255)


PLAIN = Style()
_LUMA = np.array([0.2126, 0.7152, 0.0722])  # how bright red, green and blue look


def overlay(
    image: UInt8[np.ndarray, "y x 3"],
    cells: Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: Style = PLAIN,
    truth: Float[np.ndarray, "r c"] | None = None,
) -> UInt8[np.ndarray, "Y X 3"]:
    """The photo with its attention over it, and the cells that hold evidence outlined.

    The picture has the photo's own size, or a whole multiple of it where the photo is small; the
    heat is smooth at that size either way.
    """
    photo = enlarge(image, style.side)
    height, width = photo.shape[:2]
    geometry = resized(geometry or PixelGeometry.identity(1, image.shape[:2]), (height, width))
    levels = heat(cells, geometry, style)
    alpha = opacities(style)[levels][..., None]
    grey = photo @ _LUMA
    under = (photo + (grey[..., None] - photo) * style.fade) * (1 - style.dim)
    mixed = under * (1 - alpha) + colour_table(style.colours)[levels] * alpha
    picture = np.rint(mixed).clip(0, 255).astype(np.uint8)
    return picture if truth is None else outlined(picture, outline(truth, geometry), style)


def spotlight(
    image: UInt8[np.ndarray, "y x 3"],
    cells: Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: Style = PLAIN,
    truth: Float[np.ndarray, "r c"] | None = None,
) -> UInt8[np.ndarray, "Y X 3"]:
    """The photo where cells were kept, and a dim grey where they were dropped: hard attention.

    A cell is kept or it is not, so its edge is sharp and its strength plays no part. What holds
    evidence is outlined as in `overlay`.
    """
    if not np.isfinite(cells).all():
        raise ValueError(f"{int((~np.isfinite(cells)).sum())} weights of the map are not finite")
    photo = enlarge(image, style.side)
    height, width = photo.shape[:2]
    geometry = resized(geometry or PixelGeometry.identity(1, image.shape[:2]), (height, width))
    lit = np.zeros((height, width), bool)
    boxes = geometry.cells(cells.shape)[0].numpy().reshape(*cells.shape, 4)
    for x0, y0, x1, y1 in np.rint(boxes[cells > 0]).astype(int).tolist():
        lit[y0:y1, x0:x1] = True
    grey = np.repeat((photo @ _LUMA)[..., None], 3, axis=-1)
    dropped = (grey + (photo - grey) * (1 - style.fade)) * (1 - style.strength) + 20
    picture = np.rint(np.where(lit[..., None], photo, dropped)).clip(0, 255).astype(np.uint8)
    return picture if truth is None else outlined(picture, outline(truth, geometry), style)


def heat(
    cells: Float[np.ndarray, "r c"], geometry: PixelGeometry, style: Style = PLAIN
) -> UInt8[np.ndarray, "Y X"]:
    """How strong the attention on each pixel of the photo is, from 0 to 255.

    Weights below zero count as none.
    """
    if not np.isfinite(cells).all():
        raise ValueError(f"{int((~np.isfinite(cells)).sum())} weights of the map are not finite")
    amounts = torch.from_numpy(np.maximum(cells, 0).astype(np.float64))
    rows, columns = cells.shape
    painted = geometry.paint(amounts.reshape(1, -1), (rows, columns))[0].numpy()
    top = highest(cells) if style.top is None else style.top
    return np.rint(255 * (painted / top).clip(0, 1) if top > 0 else 0 * painted).astype(np.uint8)


def highest(cells: Float[np.ndarray, "r c"]) -> float:
    """The weight that gets the last colour: the largest, or four times the mean if that is more.

    So a map that prefers nothing looks pale, instead of bright all over.
    """
    amounts = np.maximum(cells, 0)
    return max(float(amounts.max(initial=0)), 4 * float(amounts.mean())) if amounts.size else 0.0


@cache
def colour_table(name: str) -> Float[np.ndarray, "256 3"]:
    """The 256 colours of a map, from the least weight to the largest, each from 0 to 255."""
    from matplotlib import colormaps

    known = ("inferno", "magma", "plasma", "viridis", "cividis")
    if name not in known:
        raise ValueError(f"no colour map {name!r}; the perceptually uniform ones are {known}")
    return colormaps[name](np.linspace(0, 1, 256))[:, :3] * 255


def opacities(style: Style = PLAIN) -> Float[np.ndarray, " 256"]:
    """How opaque each of the 256 levels is.

    It grows as the weight to the power of 0.6: in proportion, the middle would hardly show.
    """
    return style.strength * np.linspace(0, 1, 256) ** 0.6


def outline(
    truth: Float[np.ndarray, "r c"], geometry: PixelGeometry, share: float = 0.0
) -> list[list[Point]]:
    """Closed lines around the cells that hold evidence, as (x, y) in pixels of the photo.

    A cell counts when it holds more than `share` of what the fullest cell holds; with 0 these are
    the cells that pointing and mass inside count. The line follows the cells because the truth
    says no more than that. Cells beyond the photo are left out.
    """
    on = truth > share * truth.max(initial=0)
    boxes = geometry.cells(truth.shape)[0].numpy().reshape(*truth.shape, 4)
    on &= (boxes[..., 2] > boxes[..., 0]) & (boxes[..., 3] > boxes[..., 1])
    padded = np.pad(on, 1)
    after: dict[Point, list[Point]] = {}
    for r, c in np.argwhere(on).tolist():
        x0, y0, x1, y1 = (float(edge) for edge in boxes[r, c])
        left, right = (x0, x1) if _runs_right(boxes) else (x1, x0)
        if not padded[r, c + 1]:
            after.setdefault((left, y0), []).append((right, y0))
        if not padded[r + 1, c + 2]:
            after.setdefault((right, y0), []).append((right, y1))
        if not padded[r + 2, c + 1]:
            after.setdefault((right, y1), []).append((left, y1))
        if not padded[r + 1, c]:
            after.setdefault((left, y1), []).append((left, y0))
    return _loops(after)


def _runs_right(boxes: Float[np.ndarray, "r c 4"]) -> bool:
    """Whether the columns of the grid run to the right on the photo: not after a flip."""
    return bool(boxes[0, -1, 0] >= boxes[0, 0, 0])


def _loops(after: dict[Point, list[Point]]) -> list[list[Point]]:
    """Sides of cells joined end to end, straight runs as one."""
    loops = []
    while after:
        start = next(iter(after))
        loop, at = [start], start
        while True:
            following = after[at].pop()
            if not after[at]:
                del after[at]
            if len(loop) > 1 and _straight(loop[-2], loop[-1], following):
                loop[-1] = following
            else:
                loop.append(following)
            at = following
            if at == start:
                break
        loops.append(loop)
    return loops


def _straight(a: Point, b: Point, c: Point) -> bool:
    return a[0] == b[0] == c[0] or a[1] == b[1] == c[1]


def outlined(
    picture: UInt8[np.ndarray, "y x 3"], loops: list[list[Point]], style: Style
) -> UInt8[np.ndarray, "y x 3"]:
    """Each line in its colour on a wider dark one, so that it shows on any photo."""
    canvas = Image.fromarray(picture)
    draw = ImageDraw.Draw(canvas)
    thin = max(1, round(max(picture.shape[:2]) / 170))
    limit = np.array([picture.shape[1] - 1, picture.shape[0] - 1])
    for colour, width in (((20, 20, 20), thin * 2 + 1), (style.outline, thin)):
        for loop in loops:
            points = [tuple(np.minimum(point, limit).tolist()) for point in loop]
            draw.line(points, fill=colour, width=width, joint="curve")
    return np.asarray(canvas).copy()


def check_photo(image: UInt8[np.ndarray, "y x 3"]) -> None:
    """Raise when this is no photo: one of 0 to 1 would be drawn black, without a word."""
    if not isinstance(image, np.ndarray):
        found = f"a {type(image).__name__}"
    elif image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        found = f"{image.shape} of {image.dtype}"
    else:
        return
    raise ValueError(
        f"a photo is an array (y, x, 3) of uint8, 0 to 255, and this is {found}: "
        "np.asarray(image.convert('RGB')) makes one of a PIL image"
    )


def enlarge(image: UInt8[np.ndarray, "y x 3"], side: int) -> UInt8[np.ndarray, "Y X 3"]:
    """A small photo as many whole times larger as brings its longer side nearest to `side`."""
    check_photo(image)
    times = max(1, round(side / max(image.shape[:2])))
    return image.repeat(times, axis=0).repeat(times, axis=1)


def resized(geometry: PixelGeometry, size: tuple[int, int]) -> PixelGeometry:
    """The geometry of the same photo drawn at another size; the grid over it stays the same."""
    new = torch.tensor([size] * len(geometry), device=geometry.size.device)
    ratio = new / geometry.size.to(geometry.scale.dtype)
    kept = None if geometry.kept is None else geometry.kept * ratio.flip(-1).repeat(1, 2)
    return replace(geometry, size=new, scale=geometry.scale / ratio, kept=kept)


def scale_bar(
    width: int, height: int, style: Style = PLAIN, under: int = 255
) -> UInt8[np.ndarray, "height width 3"]:
    """The colours from no weight to the largest, as they look over a grey of `under`."""
    levels = np.rint(np.linspace(0, 255, width)).astype(np.uint8)
    alpha = opacities(style)[levels][:, None]
    line = under * (1 - alpha) + colour_table(style.colours)[levels] * alpha
    return np.repeat(np.rint(line).astype(np.uint8)[None], height, axis=0)


def save_png(path: Path | str, picture: UInt8[np.ndarray, "y x c"]) -> None:
    """Write a picture as PNG, whole or not at all."""
    with files.replacing(Path(path)) as temporary:
        Image.fromarray(picture).save(temporary, format="PNG", optimize=True)
