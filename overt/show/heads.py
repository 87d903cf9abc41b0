"""Every layer and head at once: a small map each, or a number each.

Maps are made one layer and head at a time and drawn small, so that a model with a long input can be
looked at: of a watched model (`Seen`) nothing but the block that is asked for is ever computed, and
no more than 256 of its rows at a time. `show.head_view` is the same to look around in.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8

from overt.attention import AttentionMap
from overt.capture.seen import Seen
from overt.show.blocks import Blocks, Part
from overt.show.figure import PAGE, SIZE, blank, place, say, scale, shaded, show
from overt.show.look import SOFT, white_scale
from overt.show.overlay import colour_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FINEST = 48  # pixels along a small map: larger ones are shown by their largest weights
NAMED = 12  # positions that are still listed by name
EDGE, GAP = 0.32, 0.05  # inches

Tops = Callable[[Float[np.ndarray, "l h"]], Float[np.ndarray, "l h"]]


def one_scale(largest: Float[np.ndarray, "l h"]) -> Float[np.ndarray, "l h"]:
    """One colour means one weight everywhere."""
    return np.full_like(largest, largest.max(initial=0.0))


def own_scale(largest: Float[np.ndarray, "l h"]) -> Float[np.ndarray, "l h"]:
    """Each head is as dark as it gets: where it looks can be seen, how much cannot."""
    return largest


def head_maps(
    source: AttentionMap | Seen,
    query: Part = None,
    key: Part = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    row: int = 0,
    tops: Tops = one_scale,
) -> "Figure":
    """A small map for each layer (down) and head (across) of one sample: queries down, keys across.

    `query` and `key` name spans, or are ranges of positions; None is the whole axis. Weights are as
    the model used them: no block is normalised. Where one query looks at the cells of a picture, a
    map is that picture.
    """
    blocks = Blocks(source, query, key, row)
    chosen, across = _chosen(blocks, layers, heads)
    grid = _grid(blocks)
    tiles = [[_tile(blocks, l, h, grid) for h in across] for l in chosen]
    largest = np.array([[float(tile.max(initial=0.0)) for tile in line] for line in tiles])
    limits = tops(largest)
    pictures = [
        [shaded(tile, float(top)) for tile, top in zip(line, of_line, strict=True)]
        for line, of_line in zip(tiles, limits, strict=True)
    ]
    same = bool((limits == limits.flat[0]).all())
    ends = ("0", f"{limits.flat[0]:.2g}" if same else "the largest of each head")
    about = _about(blocks, grid)
    return _sheet(pictures, chosen, across, white_scale(), ends, "weight", about)


def head_numbers(
    values: Float[np.ndarray, "l h"],
    title: str,
    low: float = 0.0,
    high: float = 1.0,
    colours: str = "viridis",
) -> "Figure":
    """A number for each layer and head, written on its colour: grounding, entropy, agreement.

    What is not a number is left white.
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
            axes.text(0, 0, text, color=colour, ha="center", va="center", size=SIZE - 1)
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
    room = PAGE - EDGE - 0.08
    wide = min(widest, room / len(heads) - GAP)
    tall = wide * min(2.0, max(0.4, rows / columns))
    top = 0.5
    figure = blank(PAGE, top + len(layers) * (tall + GAP) + (0.72 if about else 0.5))
    say(figure, EDGE, 0.14, "head", color=SOFT)
    say(figure, 0.1, top, "layer", color=SOFT, rotation=90, va="top", ha="center")
    for number, head in enumerate(heads):
        x = EDGE + number * (wide + GAP) + wide / 2
        say(figure, x, 0.36, str(head), ha="center", color=SOFT)
    for line, layer in enumerate(layers):
        y = top + line * (tall + GAP)
        say(figure, EDGE - 0.06, y + tall / 2, str(layer), ha="right", color=SOFT)
        for number in range(len(heads)):
            axes = place(figure, EDGE + number * (wide + GAP), y, wide, tall)
            show(axes, pictures[line][number])
            axes.add_patch(_frame(*pictures[line][number].shape[:2]))
    bottom = top + len(layers) * (tall + GAP)
    scale(figure, (EDGE, bottom + 0.2, min(2.0, room), 0.09), colours, ends, title)
    if about:
        say(figure, EDGE, bottom + 0.58, about, color=SOFT, size=SIZE - 1)
    return figure


def _frame(rows: int, columns: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (-0.5, -0.5), columns, rows, fill=False, edgecolor="#b8b8bd", lw=0.4, clip_on=False
    )


# --- blocks


def _chosen(
    blocks: Blocks, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    found = []
    have = (blocks.layers, blocks.heads)
    for what, asked, count in zip(("layers", "heads"), (layers, heads), have, strict=True):
        wanted = list(range(count)) if asked is None else list(asked)
        wrong = [one for one in wanted if not -count <= one < count]
        if wrong or not wanted:
            raise ValueError(f"there are {what} 0 to {count - 1}, not {wrong or 'none'}")
        found.append([one % count for one in wanted])
    return found[0], found[1]


def _grid(blocks: Blocks) -> tuple[int, int] | None:
    """The picture that one query looks at, if there is one query and a picture."""
    _, keys = blocks.layouts
    if blocks.shape[0] != 1 or isinstance(blocks.key, range):
        return None
    span = keys.find(blocks.key) if blocks.key else (keys.spans[0] if keys.spans else None)
    if span is None or len(span.shape) != 2 or len(span) != blocks.shape[1]:
        return None
    return span.shape[0], span.shape[1]


def _tile(
    blocks: Blocks, layer: int, head: int, grid: tuple[int, int] | None
) -> Float[np.ndarray, "r c"]:
    """One small map, of which never more than a few rows exist in full."""
    count, keys = blocks.shape
    if grid is not None:
        return blocks.whole(layer, head).reshape(grid)
    return blocks.whole(layer, head, max(1, -(-count // FINEST)), max(1, -(-keys // FINEST)))


def _about(blocks: Blocks, grid: tuple[int, int] | None) -> str:
    said = []
    for what, named in zip(("down", "across"), blocks.names(), strict=True):
        if grid is not None and what == "across":
            said.append(f"a picture of {grid[0]} x {grid[1]} cells")
            continue
        names = [one.strip() for one in named]
        listed = " ".join(names) if len(names) <= NAMED else f"{len(names)} positions"
        said.append(f"{what}: {listed}" if grid is None else f"of {listed}")
    return "; ".join(said)
