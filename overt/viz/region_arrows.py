"""Arrows from words to the image regions they attend to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8

from overt.attention import AttentionMap, Span
from overt.geometry import RegionGeometry, TextGeometry
from overt.viz.figure import (
    CATEGORICAL_COLOURS,
    FONT_SIZE,
    MONOSPACE_WIDTH,
    PAGE_WIDTH,
    SOFT,
    add_axes,
    add_text,
    new_figure,
)
from overt.viz.panel import region_spans, span_positions, text_spans
from overt.viz.photo_overlay import check_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_HEIGHT = 0.22  # inches
MAX_PHOTO_HEIGHT = 4.2  # inches
MIN_OPACITY = 0.35


def word_regions(
    photo: UInt8[np.ndarray, "y x 3"],
    attention: AttentionMap,
    words: Sequence[str | int] | None = None,
    layer: int = -1,
    head: int | None = None,
    truth: AttentionMap | None = None,
    top_k: int = 1,
    row: int = 0,
) -> "Figure":
    """Draw arrows from words to the regions with the largest weights, labelled with the weight.

    Boxes are more opaque for larger weights. Regions that the truth assigns to a word are dashed in
    the word's colour.

    Args:
        photo: photo of the regions.
        attention: map from text to regions, as of `trace.block("text", "regions")`.
        words: words or token indices to draw; default: the last word of each grounded phrase of the
            truth, else the words with the largest weights, one per colour.
        layer: index of the layer.
        head: index of the head; None averages over heads.
        truth: grounded regions of each token.
        top_k: regions per word.
        row: index of the sample.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: if queries are not text, keys are not regions, or a word does not exist.

    Example:
        >>> from overt.attention import regions, words
        >>> text = TextGeometry(("a ring",), torch.tensor([[[0, 1], [2, 6]]]))
        >>> boxes = RegionGeometry(torch.tensor([[[0.0, 0.0, 16.0, 16.0], [8.0, 8.0, 32.0, 32.0]]]))
        >>> weights = torch.tensor([[0.5, 0.5], [0.1, 0.9]])[None, None, None]
        >>> attention = AttentionMap(weights, regions(2, geometry=boxes), words(2, geometry=text))
        >>> figure = word_regions(np.zeros((32, 32, 3), np.uint8), attention, words=["ring"])
        >>> [text.get_text() for text in figure.axes[0].texts]  # the weight beside the second box
        ['0.90']
    """
    one = attention.select(torch.tensor([row], device=attention.values.device)).layer(layer)
    one = (one.over_heads() if head is None else one.head(head)).detach().to("cpu")
    text = _first_span(text_spans(one.queries), "queries", "text", TextGeometry)
    boxes = _first_span(region_spans(one.keys), "keys", "regions", RegionGeometry)
    weights = (
        one.weights[0, 0, 0].double().numpy()[np.ix_(span_positions(text), span_positions(boxes))]
    )
    check_finite(weights)
    assert isinstance(text.geometry, TextGeometry) and isinstance(boxes.geometry, RegionGeometry)
    wanted = _truth_mask(truth, row, weights.shape)
    chosen = _select_tokens(text.geometry, weights, words, wanted)
    if not chosen:
        raise ValueError("no word has a positive weight on a region")
    scale = min(PAGE_WIDTH / photo.shape[1], MAX_PHOTO_HEIGHT / photo.shape[0])
    left = (PAGE_WIDTH - photo.shape[1] * scale) / 2
    lines, places = _layout_text(text.geometry)
    head_room = 0.12 + LINE_HEIGHT * len(lines) + 0.22
    figure = new_figure(PAGE_WIDTH, head_room + photo.shape[0] * scale + 0.3)
    axes = _photo_axes(figure, photo, (left, head_room), scale)
    corners = boxes.geometry.boxes[0].double().numpy() * scale
    colours = {
        token: CATEGORICAL_COLOURS[n % len(CATEGORICAL_COLOURS)] for n, token in enumerate(chosen)
    }
    _draw_text(figure, lines, places, text.geometry, colours)
    corners += np.array([left, head_room, left, head_room])
    drawn: dict[int, int] = {}  # words per box so far
    for token, colour in colours.items():
        start = places[token][0], 0.12 + LINE_HEIGHT * (places[token][1] + 0.5) + 0.1
        for region in _top_regions(weights[token], top_k):
            turn = drawn[region] = drawn.get(region, -1) + 1
            _draw_arrow(axes, start, corners[region], turn, colour, float(weights[token, region]))
        if wanted is not None:
            for region in np.flatnonzero(wanted[token]).tolist():
                _draw_dashed_box(axes, corners[region], colour)
    legend = "solid: attended region with weight"
    if wanted is not None:
        legend += "; dashed: ground truth"
    below = head_room + photo.shape[0] * scale
    add_text(figure, 0.08, below + 0.16, legend, color=SOFT, size=FONT_SIZE - 1)
    return figure


def _first_span(spans: Sequence[Span], side: str, kind: str, geometry: type) -> Span:
    if spans:
        return spans[0]
    raise ValueError(
        f"the {side} of this map are not {kind}: their layout has no {geometry.__name__}"
    )


def _truth_mask(
    truth: AttentionMap | None, row: int, shape: tuple[int, ...]
) -> Bool[np.ndarray, "n m"] | None:
    if truth is None:
        return None
    found = (truth.weights[row, 0, 0] > 0) & truth.visible[row]
    if tuple(found.shape) != shape:
        raise ValueError(
            f"truth has shape {tuple(found.shape)}, attention has {shape}: both must match"
        )
    return found.cpu().numpy()


def _select_tokens(
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
        return sorted(found[: len(CATEGORICAL_COLOURS)])
    found = []
    for word in words:
        if isinstance(word, int) and word in there:
            found.append(word)
        elif isinstance(word, str) and any(tokens[at].lower() == word.lower() for at in there):
            found.append(next(at for at in there if tokens[at].lower() == word.lower()))
        else:
            listed = ", ".join(tokens[at] for at in there)
            raise ValueError(f"unknown word {word!r}; choose one of {listed}")
    return found


def _last_of_phrases(there: list[int], wanted: Bool[np.ndarray, "n m"]) -> list[int]:
    """Of adjacent words with the same boxes, return the last, which is the noun in English."""
    after = dict(zip(there, [*there[1:], None], strict=True))
    return [
        at
        for at, following in after.items()
        if wanted[at].any() and (following is None or (wanted[at] != wanted[following]).any())
    ]


def _top_regions(weights: Float[np.ndarray, " m"], top_k: int) -> list[int]:
    order = np.argsort(-weights, kind="stable")[:top_k]
    return [int(at) for at in order if weights[at] > 0]


# --- drawing


def _layout_text(text: TextGeometry) -> tuple[list[tuple[int, int]], dict[int, tuple[float, int]]]:
    """Return the lines of the text as character ranges, and the centre and line of each token."""
    letters = int((PAGE_WIDTH - 0.2) / (wide := (FONT_SIZE + 2) * MONOSPACE_WIDTH / 72))
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


def _draw_text(
    figure: "Figure",
    lines: list[tuple[int, int]],
    places: dict[int, tuple[float, int]],
    text: TextGeometry,
    colours: dict[int, str],
) -> None:
    wide = (FONT_SIZE + 2) * MONOSPACE_WIDTH / 72
    style = {"family": "monospace", "size": FONT_SIZE + 2}
    for number, (low, high) in enumerate(lines):
        y = 0.12 + LINE_HEIGHT * (number + 0.5)
        at = low
        inside = sorted(token for token in colours if places[token][1] == number)
        for token in inside:
            first, end = text.spans[0, token].tolist()
            add_text(
                figure, 0.1 + wide * (at - low), y, text.texts[0][at:first], **style, color=SOFT
            )
            look = {**style, "color": colours[token], "weight": "bold"}
            add_text(figure, 0.1 + wide * (first - low), y, text.texts[0][first:end], **look)
            at = end
        add_text(figure, 0.1 + wide * (at - low), y, text.texts[0][at:high], **style, color=SOFT)


def _photo_axes(
    figure: "Figure", photo: UInt8[np.ndarray, "y x 3"], at: tuple[float, float], scale: float
) -> "Axes":
    """Return axes in inches over the whole figure, with the photo below the words."""
    across, down = (float(side) for side in figure.get_size_inches())
    axes = add_axes(figure, 0.0, 0.0, across, down)
    left, top = at
    tall, wide = photo.shape[0] * scale, photo.shape[1] * scale
    axes.imshow(photo, extent=(left, left + wide, top + tall, top), aspect="auto")
    axes.set_xlim(0, across)
    axes.set_ylim(down, 0)
    return axes


def _draw_arrow(
    axes: "Axes",
    start: tuple[float, float],
    box: Float[np.ndarray, " 4"],
    turn: int,
    colour: str,
    weight: float,
) -> None:
    """Draw a box, the arrow to it and its weight; later boxes are nested inside the first."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    x0, y0, x1, y1 = (box + 0.035 * turn * np.array([1, 1, -1, -1])).tolist()
    alpha = MIN_OPACITY + (1 - MIN_OPACITY) * min(1.0, weight)
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
        size=FONT_SIZE - 0.5, va="top",
        bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
    )  # fmt: skip


def _draw_dashed_box(axes: "Axes", box: Float[np.ndarray, " 4"], colour: str) -> None:
    from matplotlib.patches import Rectangle

    x0, y0, x1, y1 = box.tolist()
    for edge, style in (("white", "-"), (colour, (0, (3, 2)))):
        patch = Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=edge, lw=1.0, ls=style)
        axes.add_patch(patch)
