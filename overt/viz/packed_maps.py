"""Maps inside a page: packed weights to read cell by cell, and images of differences.

Weights are packed in 8 or 16 bits per cell relative to the largest; the page draws word maps from
them.
"""

import base64

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from overt.geometry import PixelGeometry
from overt.viz.map_diff import diverging_colours, map_density
from overt.viz.photo_overlay import paint_map, resize_geometry
from overt.viz.templates import encode_image

BITS = {8: ("<u1", 255), 16: ("<u2", 65535)}


def pack_map(cells: Float[np.ndarray, "r c"], bits: int = 16) -> str:
    """Pack weights as text: rows, columns, maximum, mean, and 8 or 16 bits per cell in base64.

    Negative weights count as zero. `unpack_map` is the inverse.
    """
    kind, steps = BITS[bits]
    amounts = np.maximum(cells, 0).astype(np.float64)
    top = float(amounts.max(initial=0))
    levels = np.rint(amounts / (top or 1.0) * steps).astype(kind)
    rows, columns = cells.shape
    data = base64.b64encode(levels.tobytes()).decode()
    return f"{rows} {columns} {top:.6g} {amounts.mean():.6g} {data}"


def unpack_map(text: str) -> Float[np.ndarray, "r c"]:
    """Unpack the text of `pack_map`, exact to 1/255 or 1/65535 of the largest weight."""
    rows, columns, top, _, data = text.split(" ")
    raw = base64.b64decode(data)
    kind, steps = BITS[8 * len(raw) // (int(rows) * int(columns))]
    levels = np.frombuffer(raw, kind).reshape(int(rows), int(columns))
    return levels * (float(top) / steps)


def packed_size(cells: Float[np.ndarray, "r c"], bits: int = 16) -> int:
    """Estimate the length of the text of `pack_map`."""
    return cells.size * bits // 6 + 40


def grid_edges(geometry: PixelGeometry, shape: tuple[int, int]) -> tuple[str, str]:
    """Return the start and end of grid columns and rows on the photo, in percent of its sides.

    Each is "start end" pairs joined by commas in grid order: mirrored photos run backwards, and
    cells in the padding have no width.
    """
    rows, columns = shape
    boxes = geometry.cells(shape)[0].reshape(rows, columns, 4).double().numpy()
    height, width = geometry.size[0].tolist()
    across = boxes[0, :, [0, 2]] * (100 / width)
    down = boxes[:, 0, [1, 3]].T * (100 / height)
    return _pairs(across), _pairs(down)


def _pairs(both: Float[np.ndarray, "2 n"]) -> str:
    return ",".join(f"{start:.4g} {end:.4g}" for start, end in both.T.tolist())


def shrink_geometry(geometry: PixelGeometry, side: int) -> PixelGeometry:
    """Return the geometry of the photo with its longer side of `side` pixels."""
    height, width = geometry.size[0].tolist()
    ratio = side / max(height, width)
    return resize_geometry(geometry, (max(1, round(height * ratio)), max(1, round(width * ratio))))


def palette_png(
    levels: UInt8[np.ndarray, "y x"], colours: UInt8[np.ndarray, "n 3"], alpha: np.ndarray
) -> bytes:
    """Return a PNG of levels in these colours and opacities."""
    picture = Image.fromarray(levels)
    picture.putpalette(colours.tobytes())
    return encode_image(picture, "png", optimize=True, transparency=alpha.tobytes())


def difference_png(
    before: Float[np.ndarray, "r c"],
    after: Float[np.ndarray, "R C"],
    before_geometry: PixelGeometry,
    after_geometry: PixelGeometry,
    side: int,
) -> tuple[bytes, float]:
    """Draw the second map minus the first as a transparent PNG; also return the largest change.

    Both maps are densities relative to a uniform map, so their grids may differ. Blue is less,
    orange is more, no change is transparent.
    """
    own = shrink_geometry(before_geometry, side)
    height, width = own.size[0].tolist()
    one, other = (
        paint_map(map_density(cells), geometry)
        for cells, geometry in (
            (before, own),
            (after, resize_geometry(after_geometry, (height, width))),
        )
    )
    change = other - one
    most = float(np.abs(change).max(initial=0.0))
    share = change / most if most > 1e-9 else np.zeros_like(change)
    levels = np.rint(127.5 + 127.5 * share).clip(0, 255).astype(np.uint8)
    away = np.abs(np.linspace(-1, 1, 256))
    alpha = np.rint(255 * 0.9 * away**0.6).astype(np.uint8)
    return palette_png(levels, diverging_colours(), alpha), most if most > 1e-9 else 0.0


def is_hard_map(cells: Float[np.ndarray, "r c"]) -> bool:
    """Return whether a map is hard attention: ones and zeros that sum to more than 1."""
    return bool(((cells == 0) | (cells == 1)).all() and cells.sum() > 1)


def hard_mask_png(cells: Float[np.ndarray, "r c"], geometry: PixelGeometry, side: int) -> bytes:
    """Draw a dark transparent PNG with sharp holes at the kept cells."""
    small = shrink_geometry(geometry, side)
    rows, columns = cells.shape
    boxes = small.cells((rows, columns))[0].tolist()
    dropped = np.ones(small.size[0].tolist(), np.uint8)
    for (x0, y0, x1, y1), weight in zip(boxes, cells.ravel().tolist(), strict=True):
        if weight > 0:
            dropped[round(y0) : round(y1), round(x0) : round(x1)] = 0
    colours = np.array([[0, 0, 0], [10, 10, 16]], np.uint8)
    return palette_png(dropped, colours, np.array([0, 205], np.uint8))


def difference_scale_css() -> str:
    """Return the colours from less to more as a CSS gradient."""
    stops = [f"rgb({r} {g} {b})" for r, g, b in diverging_colours()[::51].tolist()]
    return f"linear-gradient(to right, {', '.join(stops)})"
