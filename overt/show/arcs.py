"""Which token looks at which: arcs from queries to keys, the stronger the darker and wider."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from overt.attention import AttentionMap
from overt.show.figure import PAGE, SIZE, WIDE, blank, finite, place, say, scale
from overt.show.look import SOFT, white_scale
from overt.show.panel import labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 60  # arcs: more cannot be told apart
WIDEST = 3.5  # of a line, in points
TALLEST = 1.6  # of an arc, in inches


def arcs(
    attention: AttentionMap,
    layer: int = -1,
    head: int | None = None,
    query: str | None = None,
    least: float = 0.05,
    row: int = 0,
    tokens: Sequence[str] | None = None,
) -> "Figure":
    """The weights of one layer and head (None: the mean of its heads) as lines between tokens.

    Where queries and keys are the same tokens, arcs above a line of them lead back to earlier
    tokens, arcs below it on to later ones, and a dot is what a token keeps for itself. Else they
    are two lines of tokens, queries above. `query` leaves the arcs of one token alone, `tokens`
    name those of self-attention. The strongest are drawn, at most 60, and none below `least`; the
    figure says how much is left out.
    """
    one = attention.select(torch.tensor([row], device=attention.values.device)).layer(layer)
    one = (one.over_heads() if head is None else one.head(head)).detach()
    weights = one.weights[0, 0, 0].double().cpu().numpy()
    finite(weights)
    names = tuple(
        tuple(_plain(name) for name in tokens or labels(side)) for side in (one.queries, one.keys)
    )
    if (len(names[0]), len(names[1])) != weights.shape:
        raise ValueError(f"{len(names[0])} tokens for a map of {weights.shape}")
    kept = strongest(_of_one(weights, names[0], query), least)
    same = names[0] == names[1]
    figure = _in_a_line(names[0], weights, kept) if same else _in_two(names, weights, kept)
    asked = weights if query is None else weights[_place(names[0], query)]
    total = float(asked.clip(0).sum())
    shown = sum(float(weights[at]) for at in kept)
    left = 100 * (1 - shown / total) if total > 0 else 0.0
    down = float(figure.get_size_inches()[1])
    top = max((float(weights[at]) for at in kept), default=0.0)
    box = (0.15, down - 0.26, 1.8, 0.09)
    scale(figure, box, _ink(), ("0", f"{top:.2g}"), "weight")
    told = f"{len(kept)} strongest of {asked.size}; {left:.0f} % of the weight is not drawn"
    say(figure, 2.3, down - 0.28, told, color=SOFT, size=SIZE - 1)
    if same:
        how = "above: back to earlier tokens; below: on to later ones; a dot: to itself"
        say(figure, 2.3, down - 0.14, how, color=SOFT, size=SIZE - 1)
    return figure


def strongest(
    weights: Float[np.ndarray, "q k"], least: float, most: int = MOST
) -> list[tuple[int, int]]:
    """The largest weights as (query, key), the weakest first so that the strongest lie on top."""
    order = np.argsort(-weights.ravel(), kind="stable")[:most]
    columns = weights.shape[1]
    found = [
        (int(at) // columns, int(at) % columns) for at in order if weights.ravel()[at] >= least
    ]
    return [at for at in reversed(found) if weights[at] > 0]


def _of_one(
    weights: Float[np.ndarray, "q k"], names: tuple[str, ...], query: str | None
) -> Float[np.ndarray, "q k"]:
    """The weights of one query alone, by its word or its number; all of them for None."""
    if query is None:
        return weights
    found = np.zeros_like(weights)
    at = _place(names, query)
    found[at] = weights[at]
    return found


def _place(names: tuple[str, ...], query: str) -> int:
    if query in names:
        return names.index(query)
    if query.isdigit() and int(query) < len(names):
        return int(query)
    raise ValueError(f"no token {query!r}; there are {', '.join(names[:24])}")


def _in_a_line(
    names: tuple[str, ...], weights: Float[np.ndarray, "q k"], kept: list[tuple[int, int]]
) -> "Figure":
    middles, size = _spread(names)
    reach = [
        max([abs(middles[q] - middles[k]) for q, k in kept if (k < q) == above and k != q] or [0.0])
        for above in (True, False)
    ]
    unit = min(0.55, TALLEST / max(*reach, 1e-6))
    above, below = (0.12 + unit * one for one in reach)
    figure = blank(PAGE, above + below + 1.0)
    line = above + 0.16
    axes = _page(figure)
    for q, k in kept:
        colour, wide = _pen(float(weights[q, k]), weights, kept)
        if q == k:
            axes.plot(middles[q], line + 0.13, "o", ms=1 + wide * 1.4, color=colour, mew=0)
            continue
        side = -1 if k < q else 1
        start = line + side * 0.09
        tall = unit * abs(middles[q] - middles[k]) * 4 / 3  # of a cubic curve, for its middle
        _curve(axes, (middles[q], start), (middles[k], start), side * tall, colour, wide)
    for name, x in zip(names, middles, strict=True):
        say(figure, x, line, name, ha="center", family="monospace", size=size)
    return figure


def _in_two(
    names: tuple[tuple[str, ...], ...],
    weights: Float[np.ndarray, "q k"],
    kept: list[tuple[int, int]],
) -> "Figure":
    figure = blank(PAGE, 2.4)
    spread = [_spread(one) for one in names]
    axes = _page(figure)
    for q, k in kept:
        colour, wide = _pen(float(weights[q, k]), weights, kept)
        ends = (spread[0][0][q], 0.32), (spread[1][0][k], 1.5)
        axes.plot(*zip(*ends, strict=True), color=colour, lw=wide, solid_capstyle="round")
    for (middles, size), words, y in zip(spread, names, (0.2, 1.62), strict=True):
        for name, x in zip(words, middles, strict=True):
            say(figure, x, y, name, ha="center", family="monospace", size=size)
    return figure


def _spread(names: tuple[str, ...]) -> tuple[list[float], float]:
    """The middles of words side by side, and a size of letters at which they fit."""
    letters = sum(len(name) + 1 for name in names)
    size = min(SIZE + 2, (PAGE - 0.3) * 72 / (WIDE * max(1, letters)))
    if size < 4:
        raise ValueError(
            f"{len(names)} tokens do not fit into a line; choose a block of them, such as "
            "map.block('text', 'text') of a shorter span"
        )
    wide = size * WIDE / 72
    room = (PAGE - 0.3 - wide * letters) / max(1, len(names))
    middles, x = [], 0.15
    for name in names:
        own = wide * (len(name) + 1) + room
        middles.append(x + own / 2)
        x += own
    return middles, size


def _page(figure: "Figure") -> "Axes":
    """Axes in inches over the whole figure, from its upper left corner."""
    across, down = figure.get_size_inches()
    axes = place(figure, 0.0, 0.0, float(across), float(down))
    axes.set_xlim(0, across)
    axes.set_ylim(down, 0)
    return axes


def _pen(
    weight: float, weights: Float[np.ndarray, "q k"], kept: list[tuple[int, int]]
) -> tuple[Any, float]:
    top = max(float(weights[at]) for at in kept)
    share = weight / top
    red, green, blue = (int(value) / 255 for value in _ink()[round((len(_ink()) - 1) * share)])
    return (red, green, blue), 0.5 + (WIDEST - 0.5) * share


def _ink() -> UInt8[np.ndarray, "n 3"]:
    """The colours of lines: those of maps, without the palest, which a thin line would lose."""
    return white_scale()[48:]


def _curve(
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


def _plain(name: str) -> str:
    """A token in one line, never empty."""
    return name.strip().replace("\n", "⏎") or "␣"
