"""Arc diagrams: lines from query tokens to key tokens, darker and wider for larger weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from overt.attention import AttentionMap
from overt.viz.figure import (
    FONT_SIZE,
    MONOSPACE_WIDTH,
    PAGE_WIDTH,
    SOFT,
    add_axes,
    add_colour_bar,
    add_text,
    new_figure,
)
from overt.viz.panel import parse_integer, position_labels
from overt.viz.photo_overlay import check_finite, white_colour_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ARCS = 60  # more cannot be distinguished
MAX_LINE_WIDTH = 3.5  # points
MAX_ARC_HEIGHT = 1.6  # inches


def arc_diagram(
    attention: AttentionMap,
    layer: int = -1,
    head: int | None = None,
    query: str | None = None,
    min_weight: float = 0.05,
    row: int = 0,
    tokens: Sequence[str] | None = None,
) -> "Figure":
    """Draw the weights of one layer and head as lines between tokens.

    For self-attention, arcs above the row of tokens lead to earlier tokens, arcs below it to later
    tokens, and a dot marks the weight of a token on itself. For cross-attention, queries are the
    upper row and keys the lower row. At most 60 arcs are drawn; the figure states how much weight
    is not drawn.

    Args:
        attention: attention map of any number of samples.
        layer: index of the layer.
        head: index of the head; None averages over heads.
        query: draw the arcs of this token only, given as its text or its index.
        min_weight: smallest weight that is drawn.
        row: index of the sample.
        tokens: names of the tokens, for self-attention.

    Returns:
        A matplotlib figure; `save_figure` writes it.

    Raises:
        ValueError: if the number of tokens does not match the map, or they do not fit into one
            line.

    Example:
        >>> from overt.attention import words
        >>> weights = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.4, 0.0], [0.1, 0.7, 0.2]])
        >>> attention = AttentionMap(weights[None, None, None], words(3), words(3))
        >>> figure = arc_diagram(attention, tokens=["a", "red", "ring"], min_weight=0.3)
        >>> next(text.get_text() for text in figure.texts if "strongest" in text.get_text())
        '4 strongest of 9; 10 % of the weight is not drawn'
    """
    one = attention.select(torch.tensor([row], device=attention.values.device)).layer(layer)
    one = (one.over_heads() if head is None else one.head(head)).detach()
    weights = one.weights[0, 0, 0].double().cpu().numpy()
    check_finite(weights)
    names = tuple(
        tuple(_printable(name) for name in tokens or position_labels(side))
        for side in (one.queries, one.keys)
    )
    if (len(names[0]), len(names[1])) != weights.shape:
        raise ValueError(
            f"got {len(names[0])} tokens for a map of {weights.shape}: both need the same length"
        )
    kept = strongest_weights(_select_query(weights, names[0], query), min_weight)
    same = names[0] == names[1]
    figure = (
        _draw_one_row(names[0], weights, kept) if same else _draw_two_rows(names, weights, kept)
    )
    selected = weights if query is None else weights[_query_index(names[0], query)]
    total = float(selected.clip(0).sum())
    shown = sum(float(weights[at]) for at in kept)
    left = 100 * (1 - shown / total) if total > 0 else 0.0
    down = float(figure.get_size_inches()[1])
    top = max((float(weights[at]) for at in kept), default=0.0)
    box = (0.15, down - 0.26, 1.8, 0.09)
    add_colour_bar(figure, box, _line_colours(), ("0", f"{top:.2g}"), "weight")
    note = f"{len(kept)} strongest of {selected.size}; {left:.0f} % of the weight is not drawn"
    add_text(figure, 2.3, down - 0.28, note, color=SOFT, size=FONT_SIZE - 1)
    if same:
        legend = "above: to earlier tokens; below: to later tokens; dot: to itself"
        add_text(figure, 2.3, down - 0.14, legend, color=SOFT, size=FONT_SIZE - 1)
    return figure


def strongest_weights(
    weights: Float[np.ndarray, "q k"], min_weight: float, max_count: int = MAX_ARCS
) -> list[tuple[int, int]]:
    """Return the (query, key) indices of the largest weights, weakest first.

    Drawn in this order, the strongest arcs lie on top.
    """
    order = np.argsort(-weights.ravel(), kind="stable")[:max_count]
    columns = weights.shape[1]
    found = [
        (int(at) // columns, int(at) % columns) for at in order if weights.ravel()[at] >= min_weight
    ]
    return [at for at in reversed(found) if weights[at] > 0]


def _select_query(
    weights: Float[np.ndarray, "q k"], names: tuple[str, ...], query: str | None
) -> Float[np.ndarray, "q k"]:
    """Set the weights of all other queries to zero; None keeps all."""
    if query is None:
        return weights
    found = np.zeros_like(weights)
    at = _query_index(names, query)
    found[at] = weights[at]
    return found


def _query_index(names: tuple[str, ...], query: str) -> int:
    if query in names:
        return names.index(query)
    number = parse_integer(query)
    if number is not None and 0 <= number < len(names):
        return number
    raise ValueError(f"unknown token {query!r}; choose one of {', '.join(names[:24])}")


def _draw_one_row(
    names: tuple[str, ...], weights: Float[np.ndarray, "q k"], kept: list[tuple[int, int]]
) -> "Figure":
    middles, size = _word_positions(names)
    reach = [
        max([abs(middles[q] - middles[k]) for q, k in kept if (k < q) == above and k != q] or [0.0])
        for above in (True, False)
    ]
    unit = min(0.55, MAX_ARC_HEIGHT / max(*reach, 1e-6))
    above, below = (0.12 + unit * one for one in reach)
    figure = new_figure(PAGE_WIDTH, above + below + 1.0)
    line = above + 0.16
    axes = _figure_axes(figure)
    for q, k in kept:
        colour, wide = _line_style(float(weights[q, k]), weights, kept)
        if q == k:
            axes.plot(middles[q], line + 0.13, "o", ms=1 + wide * 1.4, color=colour, mew=0)
            continue
        side = -1 if k < q else 1
        start = line + side * 0.09
        tall = unit * abs(middles[q] - middles[k]) * 4 / 3  # of a cubic curve, for its middle
        _draw_arc(axes, (middles[q], start), (middles[k], start), side * tall, colour, wide)
    for name, x in zip(names, middles, strict=True):
        add_text(figure, x, line, name, ha="center", family="monospace", size=size)
    return figure


def _draw_two_rows(
    names: tuple[tuple[str, ...], ...],
    weights: Float[np.ndarray, "q k"],
    kept: list[tuple[int, int]],
) -> "Figure":
    figure = new_figure(PAGE_WIDTH, 2.4)
    spread = [_word_positions(one) for one in names]
    axes = _figure_axes(figure)
    for q, k in kept:
        colour, wide = _line_style(float(weights[q, k]), weights, kept)
        ends = (spread[0][0][q], 0.32), (spread[1][0][k], 1.5)
        axes.plot(*zip(*ends, strict=True), color=colour, lw=wide, solid_capstyle="round")
    for (middles, size), words, y in zip(spread, names, (0.2, 1.62), strict=True):
        for name, x in zip(words, middles, strict=True):
            add_text(figure, x, y, name, ha="center", family="monospace", size=size)
    return figure


def _word_positions(names: tuple[str, ...]) -> tuple[list[float], float]:
    """Return the centres of words side by side, and the font size at which they fit."""
    letters = sum(len(name) + 1 for name in names)
    size = min(FONT_SIZE + 2, (PAGE_WIDTH - 0.3) * 72 / (MONOSPACE_WIDTH * max(1, letters)))
    if size < 4:
        raise ValueError(
            f"{len(names)} tokens do not fit into one line: select a shorter block, for example "
            "attention.block('text', 'text')"
        )
    wide = size * MONOSPACE_WIDTH / 72
    room = (PAGE_WIDTH - 0.3 - wide * letters) / max(1, len(names))
    middles, x = [], 0.15
    for name in names:
        own = wide * (len(name) + 1) + room
        middles.append(x + own / 2)
        x += own
    return middles, size


def _figure_axes(figure: "Figure") -> "Axes":
    """Return axes in inches over the whole figure, with the origin in the upper left corner."""
    across, down = figure.get_size_inches()
    axes = add_axes(figure, 0.0, 0.0, float(across), float(down))
    axes.set_xlim(0, across)
    axes.set_ylim(down, 0)
    return axes


def _line_style(
    weight: float, weights: Float[np.ndarray, "q k"], kept: list[tuple[int, int]]
) -> tuple[Any, float]:
    top = max(float(weights[at]) for at in kept)
    share = weight / top
    red, green, blue = (
        int(value) / 255 for value in _line_colours()[round((len(_line_colours()) - 1) * share)]
    )
    return (red, green, blue), 0.5 + (MAX_LINE_WIDTH - 0.5) * share


def _line_colours() -> UInt8[np.ndarray, "n 3"]:
    """Return the heat colours without the palest ones, which a thin line would lose."""
    return white_colour_table()[48:]


def _draw_arc(
    axes: "Axes",
    start: tuple[float, float],
    end: tuple[float, float],
    tall: float,
    colour: Any,
    wide: float,
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points = [start, (start[0], start[1] + tall), (end[0], end[1] + tall), end]
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    axes.add_patch(PathPatch(Path(points, codes), fill=False, edgecolor=colour, lw=wide))


def _printable(name: str) -> str:
    """Return a token as one non-empty line."""
    return name.strip().replace("\n", "⏎") or "␣"
