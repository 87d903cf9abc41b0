"""Figures of panels: heat on the photo, weights on the words, and small multiples of all heads.

The figure shows one layer, head and query in large and states which. Weights are not renormalized:
weights on tokens outside image and text, such as separators, are listed.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8

from overt import io as overt_io
from overt.attention import Span
from overt.errors import UserError, require_package
from overt.geometry import RegionGeometry
from overt.viz.block_grid import max_pool
from overt.viz.browse_page import render_page
from overt.viz.figure import INK, SOFT, reproducible_output
from overt.viz.panel import (
    Choice,
    Panel,
    default_choice,
    describe_choice,
    grid_spans,
    grid_weights,
    is_hard_attention,
    other_positions,
    pixel_geometry,
    region_spans,
    span_positions,
    text_spans,
    text_weights,
    weight_matrix,
    weight_row,
)
from overt.viz.photo_overlay import (
    DEFAULT_STYLE,
    colour_limit,
    colour_table,
    opacities,
    overlay,
    spotlight,
    white_colour_table,
)
from overt.viz.text_heatmap import MIN_OPACITY, WeightedPiece, weighted_pieces, wrap_pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, MARGIN = 9.0, 0.45  # inches
MARK = "#f5a623"
SIZE = 11  # points, of words
MAX_LABELS = 48  # a larger matrix has no room for token names
MAX_TILES = 48  # more layers or heads have no room for an image each
MAX_TILE_CELLS = 64  # a larger map is shrunk by block maxima


def save_panels(
    path: Path | str, panels: Sequence[Panel], choices: Sequence[Choice] | None = None
) -> Path:
    """Write panels as an image (.png, .svg) or as an interactive page (.html)."""
    chosen = list(choices) if choices is not None else [default_choice(one) for one in panels]
    path = Path(path)
    kind = path.suffix.lower()
    if kind in (".html", ".htm"):
        overt_io.write_text(path, render_page(panels, chosen))
    elif kind in (".png", ".svg"):
        with reproducible_output(), overt_io.atomic_file(path) as temporary:
            about = {"Date": None} if kind == ".svg" else {"Software": None}
            draw_panels(panels, chosen).savefig(temporary, format=kind[1:], dpi=144, metadata=about)
    else:
        raise UserError(f"Unsupported format {path.suffix!r} of {path}: use .png, .svg or .html.")
    return path


def panels_png(panels: Sequence[Panel], choices: Sequence[Choice]) -> bytes:
    """Return the PNG that `save_panels` writes, as bytes."""
    stream = io.BytesIO()
    with reproducible_output():
        draw_panels(panels, choices).savefig(
            stream, format="png", dpi=144, metadata={"Software": None}
        )
    return stream.getvalue()


@dataclass(frozen=True)
class FigureStrip:
    """A horizontal strip of the figure: its height in inches and the function that draws it."""

    height: float
    draw: Callable[[Any, "FigureBox"], None]


@dataclass(frozen=True)
class FigureBox:
    """A rectangle in inches from the upper left corner of a figure that is `sheet` inches high."""

    left: float
    top: float
    width: float
    height: float
    sheet: float

    def axes(self, figure: Any) -> Any:
        """Add empty axes that fill the box."""
        bottom = self.sheet - self.top - self.height
        size = (self.left / WIDTH, bottom / self.sheet, self.width / WIDTH)
        axes = figure.add_axes((*size, self.height / self.sheet))
        axes.set_axis_off()
        return axes

    def text(self, figure: Any, x: float, y: float, text: str, **style: Any) -> None:
        """Add a line of text centred `y` inches below the top, without mathtext."""
        at = ((self.left + x) / WIDTH, 1 - (self.top + y) / self.sheet)
        figure.text(*at, text, va="center", parse_math=False, **style)


def draw_panels(panels: Sequence[Panel], choices: Sequence[Choice]) -> "Figure":
    """Draw all panels into one figure, one below the other."""
    require_package("matplotlib")
    from matplotlib.figure import Figure

    strips = [
        strip
        for one, choice in zip(panels, choices, strict=True)
        for strip in (*_panel_strips(one, choice), FigureStrip(0.3, lambda figure, box: None))
    ]
    height = sum(strip.height for strip in strips) + 2 * MARGIN
    drawn = Figure(figsize=(WIDTH, height), facecolor="white")
    top = MARGIN
    for strip in strips:
        strip.draw(drawn, FigureBox(MARGIN, top, WIDTH - 2 * MARGIN, strip.height, height))
        top += strip.height
    return drawn


def _panel_strips(shown: Panel, choice: Choice) -> Iterator[FigureStrip]:
    weights = weight_row(shown, choice)
    yield _text_strip(shown.title, 0.36, size=15, color=INK, weight="bold")
    yield from _paragraph_strips(
        f"{describe_choice(shown, choice)}; {describe_strongest(shown, weights)}", INK
    )
    if shown.about:
        yield from _paragraph_strips(shown.about, SOFT)
    weights = np.where(np.isnan(weights), 0.0, weights)  # the panel notes the NaNs
    keys = shown.attention.keys
    pictures = [span for span in grid_spans(keys) if span.name in shown.photos]
    for span in pictures:
        draw = spotlight if is_hard_attention(shown.attention) else overlay
        yield _photo_strip(shown.photos[span.name], span, weights, draw)
    for span in grid_spans(keys):
        if span not in pictures:
            yield _grid_strip(span, weights)
    for span in region_spans(keys):
        if span.name in shown.photos:
            yield _regions_strip(shown.photos[span.name], span, weights)
    for span in text_spans(keys):
        yield _words_strip(span, weights)
    rest = describe_other_keys(shown, weights)
    if rest:
        yield from _paragraph_strips(rest, SOFT)
    if not grid_spans(keys) and not region_spans(keys):
        yield from _matrix_strip(shown, choice)
    yield from _multiples_strips(shown, choice)


def describe_strongest(shown: Panel, weights: Float[np.ndarray, " k"], most: int = 3) -> str:
    """Return a phrase with the keys of the largest weights."""
    if np.isnan(weights).any():
        return f"{int(np.isnan(weights).sum())} of {len(weights)} weights are NaN"
    found = [at for at in np.argsort(-weights, kind="stable")[:most].tolist() if weights[at] > 0]
    if not found:
        return "no weight on any key"
    return "most on " + ", ".join(f"{shown.keys[at].strip()} {weights[at]:.3f}" for at in found)


def describe_other_keys(shown: Panel, weights: Float[np.ndarray, " k"], most: int = 6) -> str:
    """Return a phrase with the weights on keys outside image and text."""
    keys = shown.attention.keys
    if not grid_spans(keys) and not text_spans(keys) and not region_spans(keys):
        return ""
    found = sorted(other_positions(keys), key=lambda at: -weights[at])
    total = float(weights[found].sum())
    if not found or total == 0:
        return ""
    listed = ", ".join(f"{shown.keys[at]} {weights[at]:.3f}" for at in found[:most])
    where = (
        "outside the text"
        if not grid_spans(keys) and not region_spans(keys)
        else "outside the image"
    )
    return f"{where}: {total:.3f} ({listed}{', ...' if len(found) > most else ''})"


# Strips


def _text_strip(text: str, height: float, **style: Any) -> FigureStrip:
    return FigureStrip(height, lambda figure, box: box.text(figure, 0.0, height / 2, text, **style))


def _paragraph_strips(text: str, colour: str, columns: int = 110) -> Iterator[FigureStrip]:
    import textwrap

    for line in textwrap.wrap(text, columns) or [""]:
        yield _text_strip(line, 0.24, size=10, color=colour)


def _photo_strip(
    photo: UInt8[np.ndarray, "y x 3"],
    span: Span,
    weights: np.ndarray,
    draw_on: Callable[..., UInt8[np.ndarray, "Y X 3"]] = overlay,
) -> FigureStrip:
    picture = draw_on(photo, grid_weights(span, weights), pixel_geometry(span))
    return _image_strip(*_photo_size(photo), lambda axes: axes.imshow(picture, aspect="auto"))


def _photo_size(photo: UInt8[np.ndarray, "y x 3"]) -> tuple[float, float]:
    """Return the width and height in inches at which a photo is drawn."""
    width = min(WIDTH - 2 * MARGIN, 4.6 * photo.shape[1] / photo.shape[0])
    return width, width * photo.shape[0] / photo.shape[1]


def _image_strip(width: float, height: float, paint: Callable[[Any], object]) -> FigureStrip:
    """Return a strip with an image of this size, which `paint` draws on axes."""

    def draw(figure: Any, box: FigureBox) -> None:
        paint(FigureBox(box.left, box.top + 0.1, width, height, box.sheet).axes(figure))

    return FigureStrip(height + 0.25, draw)


def _regions_strip(
    photo: UInt8[np.ndarray, "y x 3"], span: Span, weights: np.ndarray
) -> FigureStrip:
    """Draw the photo with its boxes, filled by weight; the three strongest are labelled."""
    from matplotlib.patches import Rectangle

    assert isinstance(span.geometry, RegionGeometry)
    boxes, at = span.geometry.boxes[0].tolist(), span_positions(span)
    top = colour_limit(weights[at][None]) or 1.0
    table, alphas = colour_table(DEFAULT_STYLE.colours) / 255, opacities(DEFAULT_STYLE)
    strongest = sorted(range(len(at)), key=lambda n: -weights[at[n]])[:3]

    def paint(axes: Any) -> None:
        axes.imshow(photo // 2, aspect="auto", extent=(0, photo.shape[1], photo.shape[0], 0))
        axes.set_xlim(0, photo.shape[1])
        axes.set_ylim(photo.shape[0], 0)
        for n, (left, upper, right, lower) in enumerate(boxes):
            level = min(255, round(255 * max(0.0, weights[at[n]]) / top))
            face = (*table[level], float(alphas[level]))
            edge = "white" if n in strongest else (1, 1, 1, 0.35)
            size = right - left, lower - upper
            axes.add_patch(Rectangle((left, upper), *size, facecolor=face, edgecolor=edge))
            if n in strongest and weights[at[n]] > 0:
                text = {"color": "white", "size": 8, "va": "top", "parse_math": False}
                axes.text(left, upper, f" {weights[at[n]]:.3f}", **text)

    return _image_strip(*_photo_size(photo), paint)


def _grid_strip(span: Span, weights: np.ndarray) -> FigureStrip:
    """Draw a grid without a photo."""
    rows, columns = span.shape
    height = min(3.2, (WIDTH - 2 * MARGIN) * rows / columns)
    picture = colour_on_white(grid_weights(span, weights))
    return _image_strip(
        height * columns / rows, height, lambda axes: axes.imshow(picture, aspect="auto")
    )


def _words_strip(span: Span, weights: np.ndarray) -> FigureStrip:
    """Draw the text with each word marked by its weight."""
    text, spans, amounts = text_weights(span, weights)
    plain = "".join(
        " " if sign.isspace() else sign for sign in text
    )  # no line breaks inside a line
    parts = list(weighted_pieces(plain, spans, amounts))
    wide, line = SIZE * 0.602 / 72, 0.27  # inches, of a monospaced character and a line
    lines = wrap_pieces(parts, int((WIDTH - 2 * MARGIN) / wide))

    def draw(figure: Any, box: FigureBox) -> None:
        for number, inside in enumerate(lines):
            _draw_words(figure, box, inside, 0.15 + line * (number + 0.5), wide)

    return FigureStrip(line * len(lines) + 0.3, draw)


def _draw_words(
    figure: Any, box: FigureBox, inside: Sequence[WeightedPiece], y: float, wide: float
) -> None:
    from matplotlib.patches import Rectangle

    x = 0.0
    for piece, weight, level in inside:
        if weight is not None:
            corner = (box.left + x) / WIDTH, 1 - (box.top + y + 0.115) / box.sheet
            size = wide * len(piece) / WIDTH, 0.23 / box.sheet
            mark = Rectangle(
                corner, *size, color=MARK, alpha=level, lw=0, transform=figure.transFigure
            )
            figure.add_artist(mark)
        faint = 1.0 if weight is None else MIN_OPACITY + (1 - MIN_OPACITY) * level
        if piece.strip():
            style = {"family": "monospace", "size": SIZE, "color": INK, "alpha": faint}
            box.text(figure, x, y, piece, **style)
        x += wide * len(piece)


def _matrix_strip(shown: Panel, choice: Choice) -> Iterator[FigureStrip]:
    """Draw the attention matrix, queries down and keys across, with token names."""
    queries, keys = len(shown.queries), len(shown.keys)
    named = max(queries, keys) <= MAX_LABELS
    side = 0.9 if named else 0.0
    room = WIDTH - 2 * MARGIN - side
    cell = min(0.22, room / keys, 7.0 / queries)
    weights = weight_matrix(shown, choice)

    def draw(figure: Any, box: FigureBox) -> None:
        inner = FigureBox(
            box.left + side, box.top + side + 0.05, cell * keys, cell * queries, box.sheet
        )
        axes = inner.axes(figure)
        axes.imshow(colour_on_white(weights), aspect="auto")
        if choice.query is not None:
            edge = (-0.5, choice.query - 0.5)
            axes.add_patch(_frame(edge, keys, 1))
        if named:
            style: dict[str, Any] = {"size": 8, "color": INK}
            for n, label in enumerate(shown.queries):
                box.text(
                    figure, side - 0.06, side + 0.05 + cell * (n + 0.5), _short(label), ha="right",
                    **style,
                )  # fmt: skip
            for n, label in enumerate(shown.keys):
                at = (box.left + side + cell * (n + 0.5)) / WIDTH
                figure.text(
                    at, 1 - (box.top + side) / box.sheet, _short(label), rotation=90, ha="center",
                    va="bottom", parse_math=False, **style,
                )  # fmt: skip

    yield FigureStrip(cell * queries + side + 0.2, draw)


def _frame(corner: tuple[float, float], width: int, height: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, fill=False, edgecolor=INK, lw=0.8)


def _short(label: str, most: int = 12) -> str:
    label = label.strip() or "␣"
    return label if len(label) <= most else label[: most - 1] + "…"


def _multiples_strips(shown: Panel, choice: Choice) -> Iterator[FigureStrip]:
    """Draw small multiples of all layers and heads, each on its own colour scale."""
    layers, heads = len(shown.layers), shown.heads
    if layers * heads == 1:
        return
    if max(layers, heads) > MAX_TILES:
        yield from _paragraph_strips(
            f"{layers} layers of {heads} heads do not fit side by side; "
            "the page (.html) shows all of them.",
            SOFT,
        )
        return
    tiles = small_multiples(shown, choice)
    what = (
        "where this query looks"
        if grid_spans(shown.attention.keys)
        else "queries down, keys across"
    )
    yield from _paragraph_strips(
        f"every layer (down) and head (across): {what}, each on its own scale", SOFT
    )
    room = WIDTH - 2 * MARGIN - 0.3
    tall, wide = tiles.shape[2:4]
    tile = min(0.95, room / heads, room / heads * wide / tall)
    across, down = tile * min(1.0, wide / tall), tile * min(1.0, tall / wide)

    def draw(figure: Any, box: FigureBox) -> None:
        for layer in range(layers):
            y = 0.2 + (down + 0.04) * layer
            box.text(figure, 0.2, y + down / 2, str(layer), size=7, color=SOFT, ha="right")
        for head in range(heads):
            x = 0.3 + across * (head + 0.5)
            box.text(figure, x, 0.08, str(head), size=7, color=SOFT, ha="center")
        inner = FigureBox(
            box.left + 0.3, box.top + 0.2, across * heads, (down + 0.04) * layers, box.sheet
        )
        inner.axes(figure).imshow(
            tile_sheet(tiles), aspect="auto", interpolation="nearest", interpolation_stage="rgba"
        )

    yield FigureStrip((down + 0.04) * layers + 0.3, draw)


def small_multiples(shown: Panel, choice: Choice) -> UInt8[np.ndarray, "l h r c 3"]:
    """Return a small image for each layer and head.

    With an image grid among the keys it shows the weights of the chosen query on that grid,
    otherwise the whole attention matrix.
    """
    first = grid_spans(shown.attention.keys)[:1]
    made = []
    for layer in range(len(shown.layers)):
        of_layer = []
        for head in range(shown.heads):
            one = Choice(layer, head, choice.query)
            weights = (
                grid_weights(first[0], weight_row(shown, one))
                if first
                else weight_matrix(shown, one)
            )
            down, across = (math.ceil(count / MAX_TILE_CELLS) for count in weights.shape)
            of_layer.append(colour_on_white(max_pool(weights, max(1, down), max(1, across))))
        made.append(of_layer)
    return np.array(made)


def tile_sheet(tiles: UInt8[np.ndarray, "l h r c 3"]) -> UInt8[np.ndarray, "Y X 3"]:
    """Arrange small images side by side with white gaps, each pixel enlarged."""
    tall, wide = tiles.shape[2:4]
    times = max(1, round(72 / max(tall, wide)))
    large = tiles.repeat(times, axis=2).repeat(times, axis=3)
    framed = np.pad(large, [(0, 0), (0, 0), (3, 3), (3, 3), (0, 0)], constant_values=255)
    return framed.transpose(0, 2, 1, 3, 4).reshape(
        tiles.shape[0] * framed.shape[2], tiles.shape[1] * framed.shape[3], 3
    )


def colour_on_white(weights: Float[np.ndarray, "r c"]) -> UInt8[np.ndarray, "r c 3"]:
    """Map weights to colours: zero is white, the largest weight has the last colour.

    As on a photo, a uniform map stays pale. NaN is drawn as zero.
    """
    weights = np.where(np.isnan(weights), 0.0, weights)
    top = colour_limit(weights)
    levels = np.rint(255 * (np.maximum(weights, 0) / top if top else 0 * weights)).astype(np.uint8)
    return white_colour_table()[levels]
