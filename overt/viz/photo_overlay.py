"""Attention maps drawn on photos.

The map is placed on the original photo by the same geometry that aligns loss targets, so images and
metrics always agree.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from overt import io
from overt.attention import AttentionMap, Kind, Layout
from overt.errors import require_package
from overt.geometry import PixelGeometry
from overt.viz.panel import (
    choose,
    grid_spans,
    grid_weights,
    make_panel,
    pixel_geometry,
    weight_row,
)

Point = tuple[int | float, int | float]
DrawFunction = Callable[..., UInt8[np.ndarray, "y x 3"]]  # with the signature of `overlay`


@dataclass(frozen=True)
class OverlayStyle:
    """How a map is drawn.

    Args:
        colours: name of one of matplotlib's perceptually uniform colour maps.
        strength: opacity of the largest weight; zero weight is transparent.
        fade: how much colour is taken out of the photo, so that it is not mistaken for heat.
        dim: how much the photo is darkened.
        top: weight of the last colour, for images on one scale; None: chosen per map.
        side: a photo with a shorter longer side, in pixels, is enlarged by an integer factor.
        outline: RGB colour of the outline of the evidence.

    Example:
        >>> style = OverlayStyle(colours="viridis", side=128)
        >>> overlay(np.zeros((64, 64, 3), np.uint8), np.eye(4), style=style).shape
        (128, 128, 3)
    """

    colours: str = "inferno"
    strength: float = 0.85
    fade: float = 0.8
    dim: float = 0.25
    top: float | None = None
    side: int = 256
    outline: tuple[int, int, int] = (255, 255, 255)


DEFAULT_STYLE = OverlayStyle()
_LUMA = np.array([0.2126, 0.7152, 0.0722])  # luminance of red, green and blue


def overlay(
    image: UInt8[np.ndarray, "y x 3"] | Image.Image,
    cells: AttentionMap | Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: OverlayStyle = DEFAULT_STYLE,
    truth: Float[np.ndarray, "r c"] | None = None,
) -> UInt8[np.ndarray, "Y X 3"]:
    """Draw attention as heat on a photo, with the evidence outlined.

    Args:
        image: photo, as an array of 8-bit colours or a PIL image.
        cells: a map of one sample whose keys include an image, or an array of weights, of which
            negative ones count as zero. Of a map, the last layer, the mean of the heads and the
            class token (else the mean of the queries) are drawn; `layer` and `head` of the map
            choose others.
        geometry: maps the photo to the grid; None: that of the map, else the grid covers the photo,
            with a warning if a map then has another aspect ratio.
        style: colours, opacity and size.
        truth: evidence on a grid of cells; it is outlined.

    Returns:
        An image of the photo's size, or an integer multiple of it for a small photo.

    Raises:
        ValueError: if the photo is not an 8-bit RGB image, a weight is not finite, or a map has
            several samples, signed weights or no image among its keys.

    Example:
        >>> from overt.attention import grid
        >>> heat = AttentionMap.from_cells(torch.eye(4).reshape(1, 16), grid(4, 4))
        >>> overlay(np.zeros((64, 64, 3), np.uint8), heat).shape
        (256, 256, 3)
    """
    cells, geometry = place_cells(cells, geometry, image)
    photo, geometry = place_photo(image, geometry, style)
    levels = heat_levels(cells, geometry, style)
    alpha = opacities(style)[levels][..., None]
    grey = photo @ _LUMA
    under = (photo + (grey[..., None] - photo) * style.fade) * (1 - style.dim)
    mixed = under * (1 - alpha) + colour_table(style.colours)[levels] * alpha
    picture = np.rint(mixed).clip(0, 255).astype(np.uint8)
    return picture if truth is None else draw_outline(picture, cell_outline(truth, geometry), style)


def place_cells(
    cells: AttentionMap | Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None,
    image: UInt8[np.ndarray, "y x 3"] | Image.Image,
) -> tuple[Float[np.ndarray, "r c"], PixelGeometry | None]:
    """Return a map or an array as an array of cells, with the given geometry or that of the map.

    A map without geometry warns as in `warn_if_stretched`.
    """
    if not isinstance(cells, AttentionMap):
        return cells, geometry
    weights, known = image_cells(cells)
    if geometry is None and known is None:
        warn_if_stretched((weights.shape[0], weights.shape[1]), image)
    return weights, known if geometry is None else geometry


def warn_if_stretched(
    shape: tuple[int, int], image: UInt8[np.ndarray, "y x 3"] | Image.Image
) -> None:
    """Warn if a grid without pixel geometry has another aspect ratio than the photo."""
    (rows, columns), (height, width) = shape, as_photo(image).shape[:2]
    # a grid rounds each side of the photo to whole cells
    if abs(height * columns - width * rows) > max(height, width):
        warnings.warn(
            f"{rows} x {columns} cells without pixel geometry are stretched over a photo of "
            f"{height} x {width} pixels: if it was cropped or padded for the model, use "
            "overt.layout_of(model, inputs, processor=processor, images=[photo])",
            stacklevel=4,
        )


def check_unsigned(attention: AttentionMap) -> None:
    """Raise if a map has signed weights, which are not drawn as heat."""
    if attention.kind is Kind.SIGNED:
        raise ValueError("expected weights that are not negative, got signed ones: use positive()")


def image_cells(
    attention: AttentionMap,
    layer: int | None = None,
    head: int | None = None,
    query: str | int | None = None,
) -> tuple[Float[np.ndarray, "r c"], PixelGeometry | None]:
    """Return the weights of one query on the cells of an image, and where the cells are.

    Args:
        attention: map of one sample.
        layer: layer; None: the last.
        head: head; None: the mean of all.
        query: query, by token, name or index; None: the class token, else the mean.

    Raises:
        ValueError: if the map has several samples, signed weights, or not one image among its keys.
        UserError: if the layer, head or query does not exist.
    """
    check_unsigned(attention)
    spans = grid_spans(attention.keys)
    if len(spans) != 1:
        raise ValueError(
            f"expected one image among the keys, got {len(spans)} in {attention.keys!r}: "
            f"{_image_remedy(attention.keys, len(spans))}; a map of text is saved without a photo"
        )
    shown = make_panel(attention)
    weights = weight_row(shown, choose(shown, layer, head, query))
    return grid_weights(spans[0], weights), pixel_geometry(spans[0])


def _image_remedy(keys: Layout, count: int) -> str:
    if count:
        return "choose one with attention.block(query, key)"
    return (
        "name the cells with watch(model, layout=overt.layout_of(model, inputs, "
        "processor=processor, images=[photo])) for a model of Hugging Face, or "
        'layout=overt.words(1, "class") + overt.grid(rows, columns, geometry=...)'
    )


def spotlight(
    image: UInt8[np.ndarray, "y x 3"] | Image.Image,
    cells: AttentionMap | Float[np.ndarray, "r c"],
    geometry: PixelGeometry | None = None,
    style: OverlayStyle = DEFAULT_STYLE,
    truth: Float[np.ndarray, "r c"] | None = None,
) -> UInt8[np.ndarray, "Y X 3"]:
    """Show the photo where hard attention kept cells, and dim grey where it dropped them.

    Args:
        image: photo, as an array of 8-bit colours or a PIL image.
        cells: hard attention, as for `overlay`; a cell is kept if its weight is positive.
        geometry: maps the photo to the grid; None: that of the map, else the grid covers the photo,
            with a warning if a map then has another aspect ratio.
        style: colours and size.
        truth: evidence on a grid of cells; it is outlined.

    Returns:
        An image of the photo's size, or an integer multiple of it for a small photo.

    Raises:
        ValueError: if the photo is not an 8-bit RGB array, or a weight is not finite.

    Example:
        >>> photo = np.full((256, 256, 3), 200, np.uint8)
        >>> picture = spotlight(photo, np.array([[1.0, 0.0], [0.0, 0.0]]))
        >>> picture[0, 0].tolist(), picture[255, 255].tolist()  # a kept cell, a dropped one
        ([200, 200, 200], [50, 50, 50])
    """
    cells, geometry = place_cells(cells, geometry, image)
    check_finite(cells)
    photo, geometry = place_photo(image, geometry, style)
    lit = np.zeros(photo.shape[:2], bool)
    boxes = geometry.cells(cells.shape)[0].numpy().reshape(*cells.shape, 4)
    for x0, y0, x1, y1 in np.rint(boxes[cells > 0]).astype(int).tolist():
        lit[y0:y1, x0:x1] = True
    grey = np.repeat((photo @ _LUMA)[..., None], 3, axis=-1)
    # 20 keeps dropped cells dark grey: black would look like a part of the photo
    dropped = (grey + (photo - grey) * (1 - style.fade)) * (1 - style.strength) + 20
    picture = np.rint(np.where(lit[..., None], photo, dropped)).clip(0, 255).astype(np.uint8)
    return picture if truth is None else draw_outline(picture, cell_outline(truth, geometry), style)


def heat_levels(
    cells: Float[np.ndarray, "r c"], geometry: PixelGeometry, style: OverlayStyle = DEFAULT_STYLE
) -> UInt8[np.ndarray, "Y X"]:
    """Return the attention on each pixel of the photo, from 0 to 255.

    Negative weights count as zero.
    """
    check_finite(cells)
    painted = paint_map(cells, geometry)
    top = colour_limit(cells) if style.top is None else style.top
    return np.rint(255 * (painted / top).clip(0, 1) if top > 0 else 0 * painted).astype(np.uint8)


def paint_map(cells: Float[np.ndarray, "r c"], geometry: PixelGeometry) -> Float[np.ndarray, "y x"]:
    """Interpolate the weights to the pixels of the photo of the geometry."""
    amounts = torch.from_numpy(np.maximum(cells, 0).astype(np.float64))
    rows, columns = cells.shape
    return geometry.paint(amounts.reshape(1, -1), (rows, columns))[0].numpy()


def check_finite(values: Float[np.ndarray, "..."]) -> None:
    """Raise ValueError if a weight is NaN or infinite."""
    count = int((~np.isfinite(values)).sum())
    if count:
        raise ValueError(f"{count} weights of the map are not finite")


def colour_limit(cells: Float[np.ndarray, "r c"]) -> float:
    """Return the weight of the last colour: the maximum, or four times the mean if that is larger.

    So a uniform map looks pale instead of bright all over.
    """
    amounts = np.maximum(cells, 0)
    return max(float(amounts.max(initial=0)), 4 * float(amounts.mean())) if amounts.size else 0.0


@cache
def colour_table(name: str) -> Float[np.ndarray, "256 3"]:
    """Return the 256 colours of a colour map, each from 0 to 255."""
    require_package("matplotlib")
    from matplotlib import colormaps

    known = ("inferno", "magma", "plasma", "viridis", "cividis")
    if name not in known:
        raise ValueError(f"unknown colour map {name!r}; choose one of {known}")
    return colormaps[name](np.linspace(0, 1, 256))[:, :3] * 255


def white_colour_table() -> UInt8[np.ndarray, "256 3"]:
    """Return the 256 heat colours as they look on white, from zero to the largest weight."""
    alpha = opacities(DEFAULT_STYLE)[:, None]
    colours = colour_table(DEFAULT_STYLE.colours)[::-1]  # on white, dark is strong
    return np.rint(255 * (1 - alpha) + colours * alpha).astype(np.uint8)


def opacities(style: OverlayStyle = DEFAULT_STYLE) -> Float[np.ndarray, " 256"]:
    """Return the opacity of each of the 256 levels.

    It grows as the weight to the power of 0.6; if it were proportional, medium weights would hardly
    be visible.
    """
    return style.strength * np.linspace(0, 1, 256) ** 0.6


def cell_outline(
    truth: Float[np.ndarray, "r c"], geometry: PixelGeometry, share: float = 0.0
) -> list[list[Point]]:
    """Return closed lines around the cells with evidence, as (x, y) in pixels of the photo.

    A cell counts if it has more than `share` of the maximum; with 0 these are the cells that the
    pointing game and mass inside count. Lines follow cell borders, which is the resolution of the
    evidence. Cells outside the photo are left out.
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
    return _join_edges(after)


def _runs_right(boxes: Float[np.ndarray, "r c 4"]) -> bool:
    """Return whether grid columns run to the right on the photo; they do not after a flip."""
    return bool(boxes[0, -1, 0] >= boxes[0, 0, 0])


def _join_edges(after: dict[Point, list[Point]]) -> list[list[Point]]:
    """Join cell edges end to end, merging straight runs."""
    loops = []
    while after:
        start = next(iter(after))
        loop, at = [start], start
        while True:
            following = after[at].pop()  # two edges start where cells touch at a corner only
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


def draw_outline(
    picture: UInt8[np.ndarray, "y x 3"], loops: list[list[Point]], style: OverlayStyle
) -> UInt8[np.ndarray, "y x 3"]:
    """Draw each line in its colour on a wider dark line, visible on any photo."""
    canvas = Image.fromarray(picture)
    draw = ImageDraw.Draw(canvas)
    thin = max(1, round(max(picture.shape[:2]) / 170))
    limit = np.array([picture.shape[1] - 1, picture.shape[0] - 1])
    for colour, width in (((20, 20, 20), thin * 2 + 1), (style.outline, thin)):
        for loop in loops:
            points = [tuple(np.minimum(point, limit).tolist()) for point in loop]
            draw.line(points, fill=colour, width=width, joint="curve")
    return np.asarray(canvas).copy()


def as_photo(image: UInt8[np.ndarray, "y x 3"] | Image.Image) -> UInt8[np.ndarray, "y x 3"]:
    """Return a photo as an 8-bit RGB array.

    Raises:
        ValueError: if it is neither such an array nor a PIL image; floats would be drawn black.
    """
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,):
        return image
    if isinstance(image, str | Path):
        found, remedy = f"the path {image}", "open it with PIL.Image.open"
    elif isinstance(image, np.ndarray):
        found = f"{image.shape} of {image.dtype}"
        grey = "use PIL.Image.fromarray(photo)"
        scaled = "convert numbers from 0 to 1 by (255 * photo).astype(np.uint8)"
        remedy = grey if image.dtype == np.uint8 else scaled
    elif isinstance(image, torch.Tensor):
        found = f"a Tensor {tuple(image.shape)}"
        remedy = "convert (3, y, x) from 0 to 1 by (255 * image).byte().permute(1, 2, 0).numpy()"
    else:
        found, remedy = f"a {type(image).__name__}", "open a file with PIL.Image.open"
    raise ValueError(
        "expected a photo as a uint8 array (height, width, 3) or a PIL image, got "
        f"{found}: {remedy}"
    )


def enlarge_photo(
    image: UInt8[np.ndarray, "y x 3"] | Image.Image, side: int
) -> UInt8[np.ndarray, "Y X 3"]:
    """Enlarge a small photo by the integer that brings its longer side nearest to `side`."""
    image = as_photo(image)
    times = max(1, round(side / max(image.shape[:2])))
    return image.repeat(times, axis=0).repeat(times, axis=1)


def place_photo(
    image: UInt8[np.ndarray, "y x 3"] | Image.Image,
    geometry: PixelGeometry | None,
    style: OverlayStyle,
) -> tuple[UInt8[np.ndarray, "Y X 3"], PixelGeometry]:
    """Enlarge a photo for drawing, and return its geometry at that size.

    Raises:
        ValueError: if the geometry is that of a photo with another aspect ratio.
    """
    image = as_photo(image)
    own = geometry or PixelGeometry.identity(1, image.shape[:2])
    check_aspect_ratio(image, own)
    photo = enlarge_photo(image, style.side)
    height, width = photo.shape[:2]
    return photo, resize_geometry(own, (height, width))


def check_aspect_ratio(image: UInt8[np.ndarray, "y x 3"], geometry: PixelGeometry) -> None:
    """Raise unless the geometry is that of this photo, at any size.

    Such as a cropped photo with the geometry of the whole one: the heat would be elsewhere.
    """
    (height, width), (rows, columns) = image.shape[:2], geometry.size[0].tolist()
    if abs(height * columns - width * rows) > max(rows, columns):  # a thumbnail rounds its sides
        raise ValueError(
            f"the photo has {height} x {width} pixels, but the map is of a photo of {rows} x "
            f"{columns} pixels: pass the photo before it was resized and cropped, or a map whose "
            "geometry is that of the photo"
        )


def resize_geometry(geometry: PixelGeometry, size: tuple[int, int]) -> PixelGeometry:
    """Return the geometry of the same photo at another size; the grid stays the same."""
    new = torch.tensor([size] * len(geometry), device=geometry.size.device)
    ratio = new / geometry.size.to(geometry.scale.dtype)
    kept = None if geometry.kept is None else geometry.kept * ratio.flip(-1).repeat(1, 2)
    return replace(geometry, size=new, scale=geometry.scale / ratio, kept=kept)


def colour_bar(
    width: int, height: int, style: OverlayStyle = DEFAULT_STYLE, under: int = 255
) -> UInt8[np.ndarray, "height width 3"]:
    """Return the colours from zero to the largest weight, over a grey of `under`."""
    levels = np.rint(np.linspace(0, 255, width)).astype(np.uint8)
    alpha = opacities(style)[levels][:, None]
    line = under * (1 - alpha) + colour_table(style.colours)[levels] * alpha
    return np.repeat(np.rint(line).astype(np.uint8)[None], height, axis=0)


def save_png(path: Path | str, picture: UInt8[np.ndarray, "y x c"]) -> None:
    """Write an image as PNG, atomically.

    Args:
        path: file to write.
        picture: image of 8-bit channels.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     save_png(f"{folder}/photo.png", np.zeros((4, 6, 3), np.uint8))
        ...     Image.open(f"{folder}/photo.png").size  # width, height
        (6, 4)
    """
    with io.atomic_file(Path(path)) as temporary:
        Image.fromarray(picture).save(temporary, format="PNG", optimize=True)
