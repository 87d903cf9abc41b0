"""Maps inside a page: their numbers, to be read cell by cell, and what changed between two of them.

Numbers travel as 8 or 16 bits a cell, in steps of the largest weight, so that pages stay small; the
small maps of single words are drawn from them by the page itself.
"""

import base64
import io

import numpy as np
from jaxtyping import Float
from PIL import Image

from overt.geometry import PixelGeometry
from overt.show.beside import two_ways
from overt.show.contours import painted
from overt.show.overlay import resized

BITS = {8: ("<u1", 255), 16: ("<u2", 65535)}


def packed(cells: Float[np.ndarray, "r c"], bits: int = 16) -> str:
    """The weights as text: rows, columns, the largest, the mean, and 8 or 16 bits a cell in base64.

    Weights below zero count as none. `unpacked` reads it back.
    """
    kind, steps = BITS[bits]
    amounts = np.maximum(cells, 0).astype(np.float64)
    top = float(amounts.max(initial=0))
    levels = np.rint(amounts / (top or 1.0) * steps).astype(kind)
    rows, columns = cells.shape
    data = base64.b64encode(levels.tobytes()).decode()
    return f"{rows} {columns} {top:.6g} {amounts.mean():.6g} {data}"


def unpacked(text: str) -> Float[np.ndarray, "r c"]:
    """What `packed` has written, to a 255th or a 65535th of the largest weight."""
    rows, columns, top, _, data = text.split(" ")
    raw = base64.b64decode(data)
    kind, steps = BITS[8 * len(raw) // (int(rows) * int(columns))]
    levels = np.frombuffer(raw, kind).reshape(int(rows), int(columns))
    return levels * (float(top) / steps)


def packed_size(cells: Float[np.ndarray, "r c"], bits: int = 16) -> int:
    """How long the text of `packed` is, about."""
    return cells.size * bits // 6 + 40


def edges(geometry: PixelGeometry, shape: tuple[int, int]) -> tuple[str, str]:
    """Where columns and rows of a grid begin and end on the photo, in hundredths of its sides.

    Each is "start end" pairs joined by commas, in the order of the grid: mirrored photos run
    backwards, and what lies in padding has no width.
    """
    rows, columns = shape
    boxes = geometry.cells(shape)[0].reshape(rows, columns, 4).double().numpy()
    height, width = geometry.size[0].tolist()
    across = boxes[0, :, [0, 2]] * (100 / width)
    down = boxes[:, 0, [1, 3]].T * (100 / height)
    return _pairs(across), _pairs(down)


def _pairs(both: Float[np.ndarray, "2 n"]) -> str:
    return ",".join(f"{start:.4g} {end:.4g}" for start, end in both.T.tolist())


def density(cells: Float[np.ndarray, "r c"]) -> Float[np.ndarray, "r c"]:
    """Shares of the map times its cells: 1 is an even map, whatever the grid."""
    amounts = np.maximum(cells, 0).astype(np.float64)
    total = amounts.sum()
    return amounts * (amounts.size / total) if total > 0 else amounts


def change_layer(
    before: Float[np.ndarray, "r c"],
    after: Float[np.ndarray, "R C"],
    before_geometry: PixelGeometry,
    after_geometry: PixelGeometry,
    side: int,
) -> tuple[bytes, float]:
    """The second map less the first, as a picture to lie over the photo, and its largest change.

    Both are taken as densities, 1 being an even map, so their grids may differ. Blue is less,
    orange is more; where nothing changed the picture lets the photo through.
    """
    height, width = before_geometry.size[0].tolist()
    ratio = side / max(height, width)
    size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    one, other = (
        painted(density(cells), resized(geometry, size))
        for cells, geometry in ((before, before_geometry), (after, after_geometry))
    )
    change = other - one
    most = float(np.abs(change).max(initial=0.0))
    share = change / most if most > 1e-9 else np.zeros_like(change)
    picture = Image.fromarray(np.rint(127.5 + 127.5 * share).clip(0, 255).astype(np.uint8))
    picture.putpalette(two_ways().tobytes())
    away = np.abs(np.linspace(-1, 1, 256))
    alpha = np.rint(255 * 0.9 * away**0.6).astype(np.uint8).tobytes()
    out = io.BytesIO()
    picture.save(out, format="PNG", optimize=True, transparency=alpha)
    return out.getvalue(), most if most > 1e-9 else 0.0


def is_hard(cells: Float[np.ndarray, "r c"]) -> bool:
    """Whether a map keeps cells or drops them: ones and zeros, more than a probability can hold."""
    return bool(((cells == 0) | (cells == 1)).all() and cells.sum() > 1)


def kept_layer(cells: Float[np.ndarray, "r c"], geometry: PixelGeometry, side: int) -> bytes:
    """A veil over all of the photo but the cells that were kept, with sharp edges."""
    height, width = geometry.size[0].tolist()
    ratio = side / max(height, width)
    size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    rows, columns = cells.shape
    boxes = resized(geometry, size).cells((rows, columns))[0].tolist()
    dropped = np.ones(size, np.uint8)
    for (x0, y0, x1, y1), weight in zip(boxes, cells.ravel().tolist(), strict=True):
        if weight > 0:
            dropped[round(y0) : round(y1), round(x0) : round(x1)] = 0
    picture = Image.fromarray(dropped)
    picture.putpalette([0, 0, 0, 10, 10, 16])
    out = io.BytesIO()
    picture.save(out, format="PNG", optimize=True, transparency=bytes([0, 205]))
    return out.getvalue()


def change_css() -> str:
    """The colours from less to more as a CSS gradient."""
    stops = [f"rgb({r} {g} {b})" for r, g, b in two_ways()[::51].tolist()]
    return f"linear-gradient(to right, {', '.join(stops)})"
