"""Captured attention as a picture: on the photo, in the words, every layer and head side by side.

What is drawn large is a choice of layer, head and query, said above it. Weights are shown as they
are: what goes to neither picture nor text, such as a separator, is listed and never left out.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from overt import files
from overt.attention import Span
from overt.errors import BadInput
from overt.geometry import RegionGeometry, TextGeometry
from overt.show.overlay import PLAIN, colour_table, highest, opacities, overlay, spotlight
from overt.show.panel import (
    Choice,
    Panel,
    block,
    boxed,
    caption,
    cells,
    geometry,
    grids,
    is_hard,
    others,
    positions,
    row,
    texts,
    usual,
)
from overt.show.text import FAINTEST, Piece, in_lines, pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, MARGIN = 9.0, 0.45  # inches
INK, SOFT, MARK = "#1d1d1f", "#66666c", "#f5a623"
SIZE = 11  # of words, in points
MOST_LABELS = 48  # tokens that still have room for their names beside a table
MOST_TILES = 48  # layers or heads that still have room for a picture each


def save(
    path: Path | str, panels: Sequence[Panel], choices: Sequence[Choice] | None = None
) -> Path:
    """Write a view of these panels: a picture (.png, .svg) or a page to look around in (.html)."""
    chosen = list(choices) if choices is not None else [usual(one) for one in panels]
    path = Path(path)
    kind = path.suffix.lower()
    if kind in (".html", ".htm"):
        from overt.show.browse import page

        files.write_text(path, page(panels, chosen))
    elif kind in (".png", ".svg"):
        with _settings(), files.replacing(path) as temporary:
            about = {"Date": None} if kind == ".svg" else {"Software": None}
            figure(panels, chosen).savefig(temporary, format=kind[1:], dpi=144, metadata=about)
    else:
        raise BadInput(f"{path} is no kind of view: its name ends in .png, .svg or .html.")
    return path


def png(panels: Sequence[Panel], choices: Sequence[Choice]) -> bytes:
    """The picture that `save` writes, as bytes."""
    stream = io.BytesIO()
    with _settings():
        figure(panels, choices).savefig(stream, format="png", dpi=144, metadata={"Software": None})
    return stream.getvalue()


@contextmanager
def _settings() -> "Iterator[None]":
    """Letters stay letters in an SVG, and the same view is always the same bytes.

    Letters that the font lacks are boxes in a PNG; saying so once for each helps nobody.
    """
    import matplotlib

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "overt"}):
            yield


@dataclass(frozen=True)
class Strip:
    """A strip of the sheet: how tall it is, in inches, and what draws it into its box."""

    height: float
    draw: Callable[[Any, "Box"], None]


@dataclass(frozen=True)
class Box:
    """A place on the sheet, in inches from its upper left corner, on a sheet of this height."""

    left: float
    top: float
    width: float
    height: float
    sheet: float

    def axes(self, figure: Any) -> Any:
        """Empty axes that fill the box."""
        bottom = self.sheet - self.top - self.height
        size = (self.left / WIDTH, bottom / self.sheet, self.width / WIDTH)
        axes = figure.add_axes((*size, self.height / self.sheet))
        axes.set_axis_off()
        return axes

    def text(self, figure: Any, x: float, y: float, text: str, **style: Any) -> None:
        """A line of text, its middle `y` inches below the top; no sign in it means anything."""
        at = ((self.left + x) / WIDTH, 1 - (self.top + y) / self.sheet)
        figure.text(*at, text, va="center", parse_math=False, **style)


def figure(panels: Sequence[Panel], choices: Sequence[Choice]) -> "Figure":
    """The sheet with all panels, one below the other."""
    from matplotlib.figure import Figure

    strips = [
        strip
        for one, choice in zip(panels, choices, strict=True)
        for strip in (*_panel(one, choice), Strip(0.3, lambda figure, box: None))
    ]
    height = sum(strip.height for strip in strips) + 2 * MARGIN
    drawn = Figure(figsize=(WIDTH, height), facecolor="white")
    top = MARGIN
    for strip in strips:
        strip.draw(drawn, Box(MARGIN, top, WIDTH - 2 * MARGIN, strip.height, height))
        top += strip.height
    return drawn


def _panel(shown: Panel, choice: Choice) -> Iterator[Strip]:
    weights = row(shown, choice)
    yield _line(shown.title, 0.36, size=15, color=INK, weight="bold")
    yield from _paragraph(f"{caption(shown, choice)}; {strongest(shown, weights)}", INK)
    if shown.about:
        yield from _paragraph(shown.about, SOFT)
    weights = np.where(np.isnan(weights), 0.0, weights)  # as the panel says
    keys = shown.attention.keys
    pictures = [span for span in grids(keys) if span.name in shown.photos]
    for span in pictures:
        draw = spotlight if is_hard(shown.attention) else overlay
        yield _photo(shown.photos[span.name], span, weights, draw)
    for span in grids(keys):
        if span not in pictures:
            yield _cells(span, weights)
    for span in boxed(keys):
        if span.name in shown.photos:
            yield _boxes(shown.photos[span.name], span, weights)
    for span in texts(keys):
        yield _words(span, weights)
    rest = elsewhere(shown, weights)
    if rest:
        yield from _paragraph(rest, SOFT)
    if not grids(keys) and not boxed(keys):
        yield from _table(shown, choice)
    yield from _multiples(shown, choice)


def marked(
    span: Span, weights: Float[np.ndarray, " k"]
) -> tuple[str, Int[np.ndarray, "n 2"], Float[np.ndarray, " n"]]:
    """A text, the characters of its tokens, and their weights; none on tokens without characters.

    So the strongest word is the strongest mark, however much a separator takes.
    """
    assert isinstance(span.geometry, TextGeometry)
    spans = span.geometry.spans[0].numpy()
    at = np.array(positions(span))
    there = (at >= 0) & (spans[:, 1] > spans[:, 0])
    return span.geometry.texts[0], spans, np.where(there, weights[at], 0.0)


def strongest(shown: Panel, weights: Float[np.ndarray, " k"], most: int = 3) -> str:
    """The keys with the largest weights, in a phrase."""
    if np.isnan(weights).any():
        return f"{int(np.isnan(weights).sum())} of {len(weights)} weights are NaN"
    found = [at for at in np.argsort(-weights, kind="stable")[:most].tolist() if weights[at] > 0]
    if not found:
        return "no weight on any key"
    return "most on " + ", ".join(f"{shown.keys[at].strip()} {weights[at]:.3f}" for at in found)


def elsewhere(shown: Panel, weights: Float[np.ndarray, " k"], most: int = 6) -> str:
    """Where the weight goes that is on no picture and on no word, in a phrase."""
    keys = shown.attention.keys
    if not grids(keys) and not texts(keys) and not boxed(keys):
        return ""
    found = sorted(others(keys), key=lambda at: -weights[at])
    total = float(weights[found].sum())
    if not found or total == 0:
        return ""
    said = ", ".join(f"{shown.keys[at]} {weights[at]:.3f}" for at in found[:most])
    where = "beside the words" if not grids(keys) and not boxed(keys) else "beside the picture"
    return f"{where}: {total:.3f} ({said}{', ...' if len(found) > most else ''})"


# The strips


def _line(text: str, height: float, **style: Any) -> Strip:
    return Strip(height, lambda figure, box: box.text(figure, 0.0, height / 2, text, **style))


def _paragraph(text: str, colour: str, columns: int = 110) -> Iterator[Strip]:
    import textwrap

    for line in textwrap.wrap(text, columns) or [""]:
        yield _line(line, 0.24, size=10, color=colour)


def _photo(
    photo: UInt8[np.ndarray, "y x 3"],
    span: Span,
    weights: np.ndarray,
    draw_on: Callable[..., UInt8[np.ndarray, "Y X 3"]] = overlay,
) -> Strip:
    room = WIDTH - 2 * MARGIN
    width = min(room, 4.6 * photo.shape[1] / photo.shape[0])
    height = width * photo.shape[0] / photo.shape[1]

    def draw(figure: Any, box: Box) -> None:
        inner = Box(box.left, box.top + 0.1, width, height, box.sheet)
        inner.axes(figure).imshow(
            draw_on(photo, cells(span, weights), geometry(span)), aspect="auto"
        )

    return Strip(height + 0.25, draw)


def _boxes(photo: UInt8[np.ndarray, "y x 3"], span: Span, weights: np.ndarray) -> Strip:
    """The photo with its boxes over it, each filled by its weight, the strongest with its share."""
    from matplotlib.patches import Rectangle

    assert isinstance(span.geometry, RegionGeometry)
    boxes, at = span.geometry.boxes[0].tolist(), positions(span)
    width = min(WIDTH - 2 * MARGIN, 4.6 * photo.shape[1] / photo.shape[0])
    height = width * photo.shape[0] / photo.shape[1]
    top = highest(weights[at][None]) or 1.0
    table, alphas = colour_table(PLAIN.colours) / 255, opacities(PLAIN)
    strongest = sorted(range(len(at)), key=lambda n: -weights[at[n]])[:3]

    def draw(figure: Any, box: Box) -> None:
        axes = Box(box.left, box.top + 0.1, width, height, box.sheet).axes(figure)
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

    return Strip(height + 0.25, draw)


def _cells(span: Span, weights: np.ndarray) -> Strip:
    """The cells of a picture that is not there."""
    rows, columns = span.shape
    height = min(3.2, (WIDTH - 2 * MARGIN) * rows / columns)

    def draw(figure: Any, box: Box) -> None:
        inner = Box(box.left, box.top + 0.1, height * columns / rows, height, box.sheet)
        inner.axes(figure).imshow(coloured(cells(span, weights)), aspect="auto")

    return Strip(height + 0.25, draw)


def _words(span: Span, weights: np.ndarray) -> Strip:
    """The text, each word marked by its weight, in lines that fit."""
    text, spans, amounts = marked(span, weights)
    plain = "".join(" " if sign.isspace() else sign for sign in text)  # a line break breaks no line
    parts = list(pieces(plain, spans, amounts))
    wide, line = SIZE * 0.602 / 72, 0.27  # a character of a monospaced face, and a line, in inches
    lines = in_lines(parts, int((WIDTH - 2 * MARGIN) / wide))

    def draw(figure: Any, box: Box) -> None:
        for number, inside in enumerate(lines):
            _one_line(figure, box, inside, 0.15 + line * (number + 0.5), wide)

    return Strip(line * len(lines) + 0.3, draw)


def _one_line(figure: Any, box: Box, inside: Sequence[Piece], y: float, wide: float) -> None:
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
        faint = 1.0 if weight is None else FAINTEST + (1 - FAINTEST) * level
        if piece.strip():
            style = {"family": "monospace", "size": SIZE, "color": INK, "alpha": faint}
            box.text(figure, x, y, piece, **style)
        x += wide * len(piece)


def _table(shown: Panel, choice: Choice) -> Iterator[Strip]:
    """Queries down, keys across, as a heat map with the tokens beside it."""
    queries, keys = len(shown.queries), len(shown.keys)
    named = max(queries, keys) <= MOST_LABELS
    side = 0.9 if named else 0.0
    room = WIDTH - 2 * MARGIN - side
    cell = min(0.22, room / keys, 7.0 / queries)
    weights = block(shown, choice)

    def draw(figure: Any, box: Box) -> None:
        inner = Box(box.left + side, box.top + side + 0.05, cell * keys, cell * queries, box.sheet)
        axes = inner.axes(figure)
        axes.imshow(coloured(weights), aspect="auto")
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

    yield Strip(cell * queries + side + 0.2, draw)


def _frame(corner: tuple[float, float], width: int, height: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, fill=False, edgecolor=INK, lw=0.8)


def _short(label: str, most: int = 12) -> str:
    label = label.strip() or "␣"
    return label if len(label) <= most else label[: most - 1] + "…"


def _multiples(shown: Panel, choice: Choice) -> Iterator[Strip]:
    """Every layer and head as a small picture of its own, each on its own scale."""
    layers, heads = len(shown.layers), shown.heads
    if layers * heads == 1:
        return
    if max(layers, heads) > MOST_TILES:
        yield from _paragraph(
            f"{layers} layers of {heads} heads are too many to stand side by side; "
            "a page (.html) shows all of them.",
            SOFT,
        )
        return
    tiles = multiples(shown, choice)
    what = "where this query looks" if grids(shown.attention.keys) else "queries down, keys across"
    yield from _paragraph(
        f"every layer (down) and head (across): {what}, each on its own scale", SOFT
    )
    room = WIDTH - 2 * MARGIN - 0.3
    tall, wide = tiles.shape[2:4]
    tile = min(0.95, room / heads, room / heads * wide / tall)
    across, down = tile * min(1.0, wide / tall), tile * min(1.0, tall / wide)

    def draw(figure: Any, box: Box) -> None:
        for layer in range(layers):
            y = 0.2 + (down + 0.04) * layer
            box.text(figure, 0.2, y + down / 2, str(layer), size=7, color=SOFT, ha="right")
        for head in range(heads):
            x = 0.3 + across * (head + 0.5)
            box.text(figure, x, 0.08, str(head), size=7, color=SOFT, ha="center")
        inner = Box(
            box.left + 0.3, box.top + 0.2, across * heads, (down + 0.04) * layers, box.sheet
        )
        inner.axes(figure).imshow(
            sheet(tiles), aspect="auto", interpolation="nearest", interpolation_stage="rgba"
        )

    yield Strip((down + 0.04) * layers + 0.3, draw)


def multiples(shown: Panel, choice: Choice) -> UInt8[np.ndarray, "l h r c 3"]:
    """A small picture for each layer and head.

    Over a picture it is the grid of the chosen query's weights; over text, all queries and keys.
    """
    first = grids(shown.attention.keys)[:1]
    made = []
    for layer in range(len(shown.layers)):
        of_layer = []
        for head in range(shown.heads):
            one = Choice(layer, head, choice.query)
            weights = cells(first[0], row(shown, one)) if first else block(shown, one)
            of_layer.append(coloured(_shrunk(weights)))
        made.append(of_layer)
    return np.array(made)


def _shrunk(weights: Float[np.ndarray, "r c"], most: int = 64) -> Float[np.ndarray, "R C"]:
    """A large map as the largest weights of its blocks: a single strong cell must not vanish."""
    down, across = (max(1, math.ceil(size / most)) for size in weights.shape)
    padded = np.pad(weights, [(0, -weights.shape[0] % down), (0, -weights.shape[1] % across)])
    rows, columns = padded.shape[0] // down, padded.shape[1] // across
    return padded.reshape(rows, down, columns, across).max(axis=(1, 3))


def sheet(tiles: UInt8[np.ndarray, "l h r c 3"]) -> UInt8[np.ndarray, "Y X 3"]:
    """The small pictures side by side with white gaps, each pixel several times as large."""
    tall, wide = tiles.shape[2:4]
    times = max(1, round(72 / max(tall, wide)))
    large = tiles.repeat(times, axis=2).repeat(times, axis=3)
    framed = np.pad(large, [(0, 0), (0, 0), (3, 3), (3, 3), (0, 0)], constant_values=255)
    return framed.transpose(0, 2, 1, 3, 4).reshape(
        tiles.shape[0] * framed.shape[2], tiles.shape[1] * framed.shape[3], 3
    )


def coloured(weights: Float[np.ndarray, "r c"]) -> UInt8[np.ndarray, "r c 3"]:
    """Weights as colours on white: none is white, the largest the last colour of the scale.

    As on a photo, a map that prefers nothing stays pale. What is NaN is drawn as none.
    """
    weights = np.where(np.isnan(weights), 0.0, weights)
    top = highest(weights)
    levels = np.rint(255 * (np.maximum(weights, 0) / top if top else 0 * weights)).astype(np.uint8)
    return white_scale()[levels]


def white_scale() -> UInt8[np.ndarray, "256 3"]:
    """The 256 colours of the scale as they look on white, from no weight to the largest."""
    alpha = opacities(PLAIN)[:, None]
    colours = colour_table(PLAIN.colours)[::-1]  # on white, dark is strong
    return np.rint(255 * (1 - alpha) + colours * alpha).astype(np.uint8)
