"""Every layer and head at once: a small map each, or a number each.

Maps are made one layer and head at a time and drawn small, so that a model with a long input can be
looked at: of a watched model (`Seen`) nothing but the block that is asked for is ever computed, and
no more than `ROWS` of its rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from overt.attention import AttentionMap, Layout
from overt.capture.seen import Seen
from overt.show.figure import PAGE, SIZE, blank, place, say, scale, shaded, show
from overt.show.look import SOFT, white_scale
from overt.show.overlay import colour_table
from overt.show.panel import labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 256  # of a block that exist at a time
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
    query: str | None = None,
    key: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    row: int = 0,
    tops: Tops = one_scale,
) -> "Figure":
    """A small map for each layer (down) and head (across) of one sample: queries down, keys across.

    `query` and `key` name spans; None is the whole axis. Weights are as the model used them: no
    block is normalised. Where one query looks at the cells of a picture, a map is that picture.
    """
    chosen, across = _chosen(source, layers, heads)
    grid = _grid(source, query, key)
    tiles = [[_tile(source, query, key, l, h, row, grid) for h in across] for l in chosen]
    largest = np.array([[float(tile.max(initial=0.0)) for tile in line] for line in tiles])
    limits = tops(largest)
    pictures = [
        [shaded(tile, float(top)) for tile, top in zip(line, of_line, strict=True)]
        for line, of_line in zip(tiles, limits, strict=True)
    ]
    same = bool((limits == limits.flat[0]).all())
    ends = ("0", f"{limits.flat[0]:.2g}" if same else "the largest of each head")
    about = _about(source, query, key, grid, row)
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
    source: AttentionMap | Seen, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    if isinstance(source, Seen):
        source.check_alike()
        have = (len(source.calls), source.calls[0].shape[1])
    else:
        have = (source.values.shape[1], source.values.shape[2])
    found = []
    for what, asked, count in zip(("layers", "heads"), (layers, heads), have, strict=True):
        wanted = list(range(count)) if asked is None else list(asked)
        wrong = [one for one in wanted if not -count <= one < count]
        if wrong or not wanted:
            raise ValueError(f"there are {what} 0 to {count - 1}, not {wrong or 'none'}")
        found.append([one % count for one in wanted])
    return found[0], found[1]


def _layouts(source: AttentionMap | Seen) -> tuple[Layout, Layout]:
    if isinstance(source, Seen):
        return source.layouts(source.calls)
    return source.queries, source.keys


def _grid(
    source: AttentionMap | Seen, query: str | None, key: str | None
) -> tuple[int, int] | None:
    """The picture that one query looks at, if there is one query and a picture."""
    queries, keys = _layouts(source)
    asked = len(queries) if query is None else len(queries.find(query))
    span = keys.find(key) if key is not None else (keys.spans[0] if keys.spans else None)
    if asked != 1 or span is None or len(span.shape) != 2:
        return None
    if key is None and len(span) != len(keys):
        return None
    return span.shape[0], span.shape[1]


def _tile(
    source: AttentionMap | Seen,
    query: str | None,
    key: str | None,
    layer: int,
    head: int,
    row: int,
    grid: tuple[int, int] | None,
) -> Float[np.ndarray, "r c"]:
    """One small map, of which never more than `ROWS` rows exist in full."""
    queries, _ = _layouts(source)
    count = len(queries) if query is None else len(queries.find(query))
    parts = []
    step = max(1, -(-count // FINEST))
    portion = max(step, ROWS // step * step)
    for start in range(0, count, portion):
        rows = range(start, min(start + portion, count))
        if isinstance(source, Seen):
            block = _rows_of(source, query, key, layer, head, rows)[row]
        else:
            one = source.select(torch.tensor([row], device=source.values.device))
            one = one.layer(layer).head(head).detach()
            if query is not None or key is not None:
                one = one.block(query or _whole(one.queries), key or _whole(one.keys))
            block = one.weights[0, 0, 0, list(rows)]
        parts.append(_shrunk(block.float().cpu().numpy(), step))
    found = np.concatenate(parts)
    return found.reshape(grid) if grid is not None else _shrunk(found, 1, FINEST)


def _rows_of(
    seen: Seen, query: str | None, key: str | None, layer: int, head: int, rows: range
) -> Float[torch.Tensor, "b s k"]:
    one = Seen([seen.calls[layer].heads([head])], seen.layout)
    b, _, q, k = one.calls[0].shape
    device = (one.calls[0].value if one.calls[0].value is not None else torch.empty(0)).device
    every = [torch.arange(n, device=device).expand(b, n) for n in (q, k)]
    at = torch.tensor(list(rows), device=device).expand(b, -1)
    with torch.no_grad():
        found = one.block(
            every[0] if query is None else query, every[1] if key is None else key, at
        )
    return found.weights[:, 0, 0]


def _whole(layout: Layout) -> str:
    """The name of a span that is all of an axis."""
    for span in layout.spans:
        if len(span) == len(layout):
            return span.name
    names = [span.name for span in layout.spans]
    raise ValueError(f"name both spans of the block: no one of {names} is the whole axis")


def _shrunk(
    weights: Float[np.ndarray, "r c"], rows: int, most: int | None = None
) -> Float[np.ndarray, "R C"]:
    """The largest weight of each block of cells: a single strong one must not vanish."""
    across = 1 if most is None else max(1, -(-weights.shape[1] // most))
    padded = np.pad(weights, [(0, -weights.shape[0] % rows), (0, -weights.shape[1] % across)])
    cut = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // across, across)
    return cut.max(axis=(1, 3))


def _about(
    source: AttentionMap | Seen,
    query: str | None,
    key: str | None,
    grid: tuple[int, int] | None,
    row: int,
) -> str:
    said = []
    for what, layout, name in zip(("down", "across"), _layouts(source), (query, key), strict=True):
        if grid is not None and what == "across":
            said.append(f"a picture of {grid[0]} x {grid[1]} cells")
            continue
        shown = layout.alone(name) if name is not None else layout
        names = [one.strip() for one in labels(shown, row)]
        listed = " ".join(names) if len(names) <= NAMED else f"{len(names)} positions"
        said.append(f"{what}: {listed}" if grid is None else f"of {listed}")
    return "; ".join(said)
