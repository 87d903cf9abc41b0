"""Grids of all layers and heads: a small map or a number each.

Maps are computed one layer and head at a time and reduced, so that long inputs fit into memory: for
an `AttentionTrace` only the requested block is computed, at most 256 rows at a time.
`viz.head_view` is the interactive version.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8

from overt.attention import AttentionMap
from overt.capture.trace import AttentionTrace
from overt.viz.block_grid import AxisPart, HeadBlocks
from overt.viz.figure import (
    FONT_SIZE,
    PAGE_WIDTH,
    SOFT,
    add_axes,
    add_colour_bar,
    add_text,
    colour_weights,
    new_figure,
    show_image,
)
from overt.viz.photo_overlay import colour_table, white_colour_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TILE = 48  # pixels of a small map; larger ones are max-pooled
MAX_NAMED = 12  # more positions are not listed by name
EDGE, GAP = 0.32, 0.05  # inches

ScaleLimits = Callable[[Float[np.ndarray, "l h"]], Float[np.ndarray, "l h"]]


def shared_scale(largest: Float[np.ndarray, "l h"]) -> Float[np.ndarray, "l h"]:
    """Use one colour scale for all heads."""
    return np.full_like(largest, largest.max(initial=0.0))


def per_head_scale(largest: Float[np.ndarray, "l h"]) -> Float[np.ndarray, "l h"]:
    """Use a colour scale per head: locations are comparable, amounts are not."""
    return largest


def head_maps(
    source: AttentionMap | AttentionTrace,
    query: AxisPart = None,
    key: AxisPart = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    row: int = 0,
    limits: ScaleLimits = shared_scale,
) -> "Figure":
    """Draw a small map for each layer (down) and head (across) of one sample.

    Each map has queries down and keys across. If one query attends to an image grid, the map is
    that grid. Weights are not renormalized.

    Args:
        source: attention map or trace.
        query: rows of the block: the name of a span, a range of positions, or None for all.
        key: columns of the block, in the same way.
        layers: indices of layers; default: all.
        heads: indices of heads; default: all.
        row: index of the sample.
        limits: largest weight of each colour scale, `shared_scale` or `per_head_scale`.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: if a layer, head or position does not exist.

    Example:
        >>> import torch
        >>> from overt.attention import words
        >>> attention = AttentionMap(torch.full((1, 2, 4, 3, 3), 1 / 3), words(3), words(3))
        >>> len(head_maps(attention).axes)  # 2 layers of 4 heads, and the colour bar
        9
    """
    blocks = HeadBlocks(source, query, key, row)
    chosen, across = _select_layers_heads(blocks, layers, heads)
    grid = _image_grid(blocks)
    tiles = [[_tile(blocks, l, h, grid) for h in across] for l in chosen]
    largest = np.array([[float(tile.max(initial=0.0)) for tile in line] for line in tiles])
    tops = limits(largest)
    pictures = [
        [colour_weights(tile, float(top)) for tile, top in zip(line, of_line, strict=True)]
        for line, of_line in zip(tiles, tops, strict=True)
    ]
    same = bool((tops == tops.flat[0]).all())
    ends = ("0", f"{tops.flat[0]:.2g}" if same else "largest of each head")
    about = _about(blocks, grid)
    return _sheet(pictures, chosen, across, white_colour_table(), ends, "weight", about)


def head_scores(
    values: Float[np.ndarray, "l h"],
    title: str,
    low: float = 0.0,
    high: float = 1.0,
    colours: str = "viridis",
) -> "Figure":
    """Draw a number for each layer and head on its colour, such as entropy or grounding accuracy.

    Numbers that are not finite are left white.

    Args:
        values: one number per layer and head.
        title: name of the metric, for the colour bar.
        low: number of the first colour.
        high: number of the last colour.
        colours: name of a perceptually uniform colour map.

    Returns:
        A matplotlib figure.

    Example:
        >>> figure = head_scores(np.array([[0.25, 0.5], [0.75, 1.0]]), "entropy")
        >>> [axes.texts[0].get_text() for axes in figure.axes[:4]]
        ['.25', '.50', '.75', '1.00']
    """
    layers, heads = values.shape
    share = ((values - low) / (high - low)).clip(0, 1)
    known = np.isfinite(values)
    table = np.rint(colour_table(colours)).astype(np.uint8)
    picked = table[np.rint(255 * np.where(known, share, 0)).astype(int)]
    pictures = [[picked[l, h][None, None] for h in range(heads)] for l in range(layers)]
    for l, h in np.argwhere(~known).tolist():
        pictures[l][h] = np.full((1, 1, 3), 255, np.uint8)
    ends = (f"{low:g}", f"{high:g}")
    figure = _sheet(pictures, range(layers), range(heads), table, ends, title, "", widest=0.6)
    if heads <= 16:
        for axes, value, picture in zip(
            figure.axes, values.ravel(), (one for line in pictures for one in line), strict=False
        ):
            light = float(picture[0, 0] @ np.array([0.2126, 0.7152, 0.0722])) > 140
            text = f"{value:.2f}".lstrip("0") if np.isfinite(value) else "–"
            colour = "black" if light else "white"
            axes.text(0, 0, text, color=colour, ha="center", va="center", size=FONT_SIZE - 1)
    return figure


def _sheet(
    pictures: Sequence[Sequence[UInt8[np.ndarray, "_ _ 3"]]],
    layers: Sequence[int],
    heads: Sequence[int],
    colours: UInt8[np.ndarray, "n 3"],
    ends: tuple[str, str],
    title: str,
    about: str,
    widest: float = 1.3,
) -> "Figure":
    rows, columns = pictures[0][0].shape[:2]
    room = PAGE_WIDTH - EDGE - 0.08
    wide = min(widest, room / len(heads) - GAP)
    tall = wide * min(2.0, max(0.4, rows / columns))
    top = 0.5
    figure = new_figure(PAGE_WIDTH, top + len(layers) * (tall + GAP) + (0.72 if about else 0.5))
    add_text(figure, EDGE, 0.14, "head", color=SOFT)
    add_text(figure, 0.1, top, "layer", color=SOFT, rotation=90, va="top", ha="center")
    for number, head in enumerate(heads):
        x = EDGE + number * (wide + GAP) + wide / 2
        add_text(figure, x, 0.36, str(head), ha="center", color=SOFT)
    for line, layer in enumerate(layers):
        y = top + line * (tall + GAP)
        add_text(figure, EDGE - 0.06, y + tall / 2, str(layer), ha="right", color=SOFT)
        for number in range(len(heads)):
            axes = add_axes(figure, EDGE + number * (wide + GAP), y, wide, tall)
            show_image(axes, pictures[line][number])
            axes.add_patch(_frame(*pictures[line][number].shape[:2]))
    bottom = top + len(layers) * (tall + GAP)
    add_colour_bar(figure, (EDGE, bottom + 0.2, min(2.0, room), 0.09), colours, ends, title)
    if about:
        add_text(figure, EDGE, bottom + 0.58, about, color=SOFT, size=FONT_SIZE - 1)
    return figure


def _frame(rows: int, columns: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (-0.5, -0.5), columns, rows, fill=False, edgecolor="#b8b8bd", lw=0.4, clip_on=False
    )


# --- selection


def _select_layers_heads(
    blocks: HeadBlocks, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    found = []
    have = (blocks.layers, blocks.heads)
    for what, chosen, count in zip(("layers", "heads"), (layers, heads), have, strict=True):
        wanted = list(range(count)) if chosen is None else list(chosen)
        wrong = [one for one in wanted if not -count <= one < count]
        if wrong or not wanted:
            raise ValueError(
                f"{what} {wrong or 'none'} are out of range: {what} are 0 to {count - 1}"
            )
        found.append([one % count for one in wanted])
    return found[0], found[1]


def _image_grid(blocks: HeadBlocks) -> tuple[int, int] | None:
    """Return the image grid that a single query attends to, if there is one."""
    _, keys = blocks.layouts
    if blocks.shape[0] != 1 or isinstance(blocks.key, range):
        return None
    span = keys.find(blocks.key) if blocks.key else (keys.spans[0] if keys.spans else None)
    if span is None or len(span.shape) != 2 or len(span) != blocks.shape[1]:
        return None
    return span.shape[0], span.shape[1]


def _tile(
    blocks: HeadBlocks, layer: int, head: int, grid: tuple[int, int] | None
) -> Float[np.ndarray, "r c"]:
    """Compute one small map; only a few rows exist at full size."""
    count, keys = blocks.shape
    if grid is not None:
        return blocks.matrix(layer, head).reshape(grid)
    return blocks.matrix(layer, head, max(1, -(-count // MAX_TILE)), max(1, -(-keys // MAX_TILE)))


def _about(blocks: HeadBlocks, grid: tuple[int, int] | None) -> str:
    parts = []
    for what, named in zip(("down", "across"), blocks.names(), strict=True):
        if grid is not None and what == "across":
            parts.append(f"an image of {grid[0]} x {grid[1]} cells")
            continue
        names = [one.strip() for one in named]
        listed = " ".join(names) if len(names) <= MAX_NAMED else f"{len(names)} positions"
        parts.append(f"{what}: {listed}" if grid is None else f"of {listed}")
    return "; ".join(parts)
