"""The samples whose attention is best and worst by some score: what a mean hides."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from overt.show.figure import PAGE, SIZE, blank, place, say, scale, show
from overt.show.look import SOFT
from overt.show.overlay import PLAIN, enlarge, overlay, scale_bar
from overt.show.picture import Draw
from overt.show.sample import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP, EDGE = 0.12, 0.08  # inches


def most_and_least(
    samples: Sequence[Sample], scores: Sequence[float], count: int = 4
) -> tuple[list[tuple[Sample, float]], list[tuple[Sample, float]]]:
    """The `count` samples with the largest scores and those with the smallest, from the ends.

    Samples whose score is no number are left out, and none is in both lists.
    """
    if len(samples) != len(scores):
        raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
    known = [
        (sample, float(score))
        for sample, score in zip(samples, scores, strict=True)
        if math.isfinite(score)
    ]
    if len(known) < 2:
        raise ValueError(f"{len(known)} samples have a score; at least 2 are needed to compare")
    order = sorted(known, key=lambda pair: -pair[1])
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]


def ranked(
    samples: Sequence[Sample],
    scores: Sequence[float],
    name: str = "faithfulness",
    count: int = 4,
    draw: Draw = overlay,
) -> "Figure":
    """Two rows of photos with their attention: the highest scores above, the lowest below.

    Give `[sample.scores["mass inside"] for sample in samples]`, or a measure of faithfulness that
    was taken of the same samples. Each map has its own scale; evidence is outlined.
    """
    lists = most_and_least(samples, scores, count)
    count = max(map(len, lists))
    wide = (PAGE - 2 * EDGE - (count - 1) * GAP) / count
    tall = max(wide * _aspect(sample) for one in lists for sample, _ in one)
    down = tall + 0.92
    figure = blank(PAGE, 2 * down + 0.42)
    for number, (title, found) in enumerate(zip(("highest", "lowest"), lists, strict=True)):
        top = number * down
        say(figure, EDGE, top + 0.14, f"{title} {name}", weight="bold", size=SIZE + 1)
        for column, (sample, score) in enumerate(found):
            left = EDGE + column * (wide + GAP)
            say(figure, left, top + 0.35, f"{score:.2f}", color=SOFT)
            height = wide * _aspect(sample)
            show(place(figure, left, top + 0.46, wide, height), _drawn(sample, draw))
            _caption(figure, sample, left, top + 0.46 + height, wide)
    heat = scale_bar(256, 1, PLAIN, under=138)[0]
    box = (EDGE, 2 * down + 0.16, 2.4, 0.09)
    scale(figure, box, heat, ("0", "the largest of each map"), "attention")
    return figure


def _aspect(sample: Sample) -> float:
    return 1.0 if sample.image is None else sample.image.shape[0] / sample.image.shape[1]


def _drawn(sample: Sample, draw: Draw) -> UInt8[np.ndarray, "y x 3"]:
    if sample.image is None:
        raise ValueError(f"sample {sample.id!r} has no photo to draw on")
    if sample.cells is None:
        return enlarge(sample.image, PLAIN.side)
    return draw(sample.image, sample.cells, sample.geometry, PLAIN, sample.truth_cells)


def _caption(figure: "Figure", sample: Sample, left: float, top: float, wide: float) -> None:
    """The text in at most two lines, and the answer with a sign for right or wrong."""
    import textwrap

    room = int(wide * 72 / ((SIZE - 1) * 0.56))
    lines = textwrap.wrap(sample.text or sample.id, room)
    if len(lines) > 2:
        lines = [lines[0], lines[1][: room - 1] + "…"]
    for number, line in enumerate(lines):
        say(figure, left, top + 0.1 + 0.125 * number, line, size=SIZE - 1)
    sign = {True: "✓ ", False: "✗ ", None: ""}[sample.right]
    colour = {True: "#14713f", False: "#b0372e", None: SOFT}[sample.right]
    if sample.prediction:
        y = top + 0.1 + 0.125 * len(lines)
        say(figure, left, y, f"{sign}{sample.prediction}", size=SIZE - 1, color=colour)
