"""Words that look at regions of a photo: an arrow from each word to the boxes it looks at."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8

from overt.attention import AttentionMap, Layout, Span
from overt.geometry import RegionGeometry, TextGeometry
from overt.show.figure import APART, PAGE, SIZE, WIDE, blank, finite, place, say
from overt.show.look import SOFT
from overt.show.panel import positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 0.22  # of words, in inches
TALLEST = 4.2  # of a photo, in inches
FAINTEST = 0.35


def word_regions(
    photo: UInt8[np.ndarray, "y x 3"],
    attention: AttentionMap,
    words: Sequence[str | int] | None = None,
    layer: int = -1,
    head: int | None = None,
    truth: AttentionMap | None = None,
    most: int = 1,
    row: int = 0,
) -> "Figure":
    """Arrows from words to the `most` regions each gives most to, and the weight beside each box.

    The map goes from a text to regions: `seen.block("text", "regions")` of one layer and head, or
    the mean of heads for None. `words` are some of the text's words or the numbers of tokens; by
    default the last of each phrase that the truth grounds, else the words that look hardest at one
    region, as many as there are colours. A box is the more opaque the larger its weight; what the
    truth says that a word means is dashed in the word's colour.
    """
    one = attention.select(torch.tensor([row], device=attention.values.device)).layer(layer)
    one = (one.over_heads() if head is None else one.head(head)).detach().to("cpu")
    text, boxes = _text(one.queries), _boxes(one.keys)
    weights = one.weights[0, 0, 0].double().numpy()[np.ix_(positions(text), positions(boxes))]
    finite(weights)
    assert isinstance(text.geometry, TextGeometry) and isinstance(boxes.geometry, RegionGeometry)
    wanted = _wanted(truth, row, weights.shape)
    chosen = _chosen(text.geometry, weights, words, wanted)
    if not chosen:
        raise ValueError("no word of this text looks at any region")
    scale = min(PAGE / photo.shape[1], TALLEST / photo.shape[0])
    left = (PAGE - photo.shape[1] * scale) / 2
    lines, places = _written(text.geometry)
    head_room = 0.12 + LINE * len(lines) + 0.22
    figure = blank(PAGE, head_room + photo.shape[0] * scale + 0.3)
    axes = _photo(figure, photo, (left, head_room), scale)
    corners = boxes.geometry.boxes[0].double().numpy() * scale
    colours = {token: APART[n % len(APART)] for n, token in enumerate(chosen)}
    _write(figure, lines, places, text.geometry, colours)
    corners += np.array([left, head_room, left, head_room])
    drawn: dict[int, int] = {}  # how many words have come to a box
    for token, colour in colours.items():
        start = places[token][0], 0.12 + LINE * (places[token][1] + 0.5) + 0.1
        for region in _top(weights[token], most):
            turn = drawn[region] = drawn.get(region, -1) + 1
            _point(axes, start, corners[region], turn, colour, float(weights[token, region]))
        if wanted is not None:
            for region in np.flatnonzero(wanted[token]).tolist():
                _dash(axes, corners[region], colour)
    told = "solid: where a word looks, with its weight"
    if wanted is not None:
        told += "; dashed: what it means"
    say(figure, 0.08, head_room + photo.shape[0] * scale + 0.16, told, color=SOFT, size=SIZE - 1)
    return figure


def _text(layout: Layout) -> Span:
    for span in layout.spans:
        if isinstance(span.geometry, TextGeometry):
            return span
    raise ValueError("the queries of this map are no text: their layout has no characters")


def _boxes(layout: Layout) -> Span:
    for span in layout.spans:
        if isinstance(span.geometry, RegionGeometry):
            return span
    raise ValueError("the keys of this map are no regions: their layout has no boxes")


def _wanted(
    truth: AttentionMap | None, row: int, shape: tuple[int, ...]
) -> Bool[np.ndarray, "n m"] | None:
    if truth is None:
        return None
    found = (truth.weights[row, 0, 0] > 0) & truth.visible[row]
    if tuple(found.shape) != shape:
        raise ValueError(f"a truth of {tuple(found.shape)} words and regions for a map of {shape}")
    return found.cpu().numpy()


def _chosen(
    text: TextGeometry,
    weights: Float[np.ndarray, "n m"],
    words: Sequence[str | int] | None,
    wanted: Bool[np.ndarray, "n m"] | None,
) -> list[int]:
    tokens = text.tokens(0)
    there = [at for at, token in enumerate(tokens) if token.strip()]
    if words is None:
        grounded = [] if wanted is None else _last_of_phrases(there, wanted)
        best = sorted(there, key=lambda at: -weights[at].max(initial=0.0))
        found = grounded or [at for at in best if weights[at].max(initial=0.0) > 0]
        return sorted(found[: len(APART)])
    found = []
    for word in words:
        if isinstance(word, int) and word in there:
            found.append(word)
        elif isinstance(word, str) and any(tokens[at].lower() == word.lower() for at in there):
            found.append(next(at for at in there if tokens[at].lower() == word.lower()))
        else:
            said = ", ".join(tokens[at] for at in there)
            raise ValueError(f"no word {word!r} in this text; there are {said}")
    return found


def _last_of_phrases(there: list[int], wanted: Bool[np.ndarray, "n m"]) -> list[int]:
    """Of neighbouring words that mean the same boxes, the last, which is the noun in English."""
    after = dict(zip(there, [*there[1:], None], strict=True))
    return [
        at
        for at, following in after.items()
        if wanted[at].any() and (following is None or (wanted[at] != wanted[following]).any())
    ]


def _top(weights: Float[np.ndarray, " m"], most: int) -> list[int]:
    order = np.argsort(-weights, kind="stable")[:most]
    return [int(at) for at in order if weights[at] > 0]


# --- drawing


def _written(text: TextGeometry) -> tuple[list[tuple[int, int]], dict[int, tuple[float, int]]]:
    """The lines of the text as ranges of characters, and the middle and line of each token."""
    letters = int((PAGE - 0.2) / (wide := (SIZE + 2) * WIDE / 72))
    words, lines, start, last = text.texts[0], [], 0, 0
    for at, sign in enumerate(words + " "):
        if not sign.isspace():
            continue
        if at - start > letters and last > start:
            lines.append((start, last))
            start = last + 1
        last = at
    lines.append((start, len(words)))
    places = {}
    for token, (first, end) in enumerate(text.spans[0].tolist()):
        for number, (low, high) in enumerate(lines):
            if low <= first < high:
                places[token] = (0.1 + wide * ((first + end) / 2 - low), number)
    return lines, places


def _write(
    figure: "Figure",
    lines: list[tuple[int, int]],
    places: dict[int, tuple[float, int]],
    text: TextGeometry,
    colours: dict[int, str],
) -> None:
    wide = (SIZE + 2) * WIDE / 72
    style = {"family": "monospace", "size": SIZE + 2}
    for number, (low, high) in enumerate(lines):
        y = 0.12 + LINE * (number + 0.5)
        at = low
        inside = sorted(token for token in colours if places[token][1] == number)
        for token in inside:
            first, end = text.spans[0, token].tolist()
            say(figure, 0.1 + wide * (at - low), y, text.texts[0][at:first], **style, color=SOFT)
            look = {**style, "color": colours[token], "weight": "bold"}
            say(figure, 0.1 + wide * (first - low), y, text.texts[0][first:end], **look)
            at = end
        say(figure, 0.1 + wide * (at - low), y, text.texts[0][at:high], **style, color=SOFT)


def _photo(
    figure: "Figure", photo: UInt8[np.ndarray, "y x 3"], at: tuple[float, float], scale: float
) -> "Axes":
    """Axes in inches over the whole figure, with the photo below the words."""
    across, down = (float(side) for side in figure.get_size_inches())
    axes = place(figure, 0.0, 0.0, across, down)
    left, top = at
    tall, wide = photo.shape[0] * scale, photo.shape[1] * scale
    axes.imshow(photo, extent=(left, left + wide, top + tall, top), aspect="auto")
    axes.set_xlim(0, across)
    axes.set_ylim(down, 0)
    return axes


def _point(
    axes: "Axes",
    start: tuple[float, float],
    box: Float[np.ndarray, " 4"],
    turn: int,
    colour: str,
    weight: float,
) -> None:
    """A box, the arrow to it and its weight; the box of a later turn lies inside the first."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    x0, y0, x1, y1 = (box + 0.035 * turn * np.array([1, 1, -1, -1])).tolist()
    alpha = FAINTEST + (1 - FAINTEST) * min(1.0, weight)
    for edge, wide in (("white", 3.2), (colour, 1.8)):
        around = Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=edge, lw=wide, alpha=alpha)
        axes.add_patch(around)
    margin = 0.1 * (x1 - x0)
    end = (min(max(start[0], x0 + margin), x1 - margin), y0)
    for edge, wide in (("white", 3.0), (colour, 1.4)):
        arrow = FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=edge, lw=wide, alpha=alpha,
            connectionstyle="arc3,rad=0.08", shrinkA=0, shrinkB=0,
        )  # fmt: skip
        axes.add_patch(arrow)
    axes.text(
        box[0] + 0.05 + 0.32 * turn, box[1] + 0.05, f"{weight:.2f}", color="white",
        size=SIZE - 0.5, va="top",
        bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
    )  # fmt: skip


def _dash(axes: "Axes", box: Float[np.ndarray, " 4"], colour: str) -> None:
    from matplotlib.patches import Rectangle

    x0, y0, x1, y1 = box.tolist()
    for edge, style in (("white", "-"), (colour, (0, (3, 2)))):
        patch = Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=edge, lw=1.0, ls=style)
        axes.add_patch(patch)
