"""Samples with the highest and the lowest score of a metric."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from overt.viz.figure import (
    FONT_SIZE,
    PAGE_WIDTH,
    SOFT,
    add_axes,
    add_colour_bar,
    add_text,
    new_figure,
    show_image,
)
from overt.viz.gallery_sample import GallerySample
from overt.viz.photo_overlay import DEFAULT_STYLE, DrawFunction, colour_bar, enlarge_photo, overlay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP, EDGE = 0.12, 0.08  # inches


def select_best_worst(
    samples: Sequence[GallerySample], scores: Sequence[float], count: int = 4
) -> tuple[list[tuple[GallerySample, float]], list[tuple[GallerySample, float]]]:
    """Select the samples with the highest and with the lowest scores.

    Samples with a score that is not finite are left out. No sample is in both lists.

    Args:
        samples: gallery samples.
        scores: one score per sample.
        count: samples per list; at most half of those with a finite score.

    Returns:
        Two lists of (sample, score): from the highest score down, and from the lowest score up.

    Raises:
        ValueError: if the lengths differ, or fewer than two scores are finite.

    Example:
        >>> samples = [GallerySample(id=name) for name in "abc"]
        >>> best, worst = select_best_worst(samples, [0.2, 0.9, 0.4], count=1)
        >>> best[0][0].id, worst[0][0].id
        ('b', 'a')
    """
    if len(samples) != len(scores):
        raise ValueError(
            f"got {len(scores)} scores for {len(samples)} samples: one per sample is needed"
        )
    known = [
        (sample, float(score))
        for sample, score in zip(samples, scores, strict=True)
        if math.isfinite(score)
    ]
    if len(known) < 2:
        raise ValueError(f"{len(known)} samples have a finite score: at least 2 are needed")
    order = sorted(known, key=lambda pair: -pair[1])
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]


def plot_best_worst(
    samples: Sequence[GallerySample],
    scores: Sequence[float],
    name: str = "faithfulness",
    count: int = 4,
    draw: DrawFunction = overlay,
) -> "Figure":
    """Draw the samples with the highest scores in one row and those with the lowest in another.

    Each map has its own colour scale. Evidence is outlined.

    Args:
        samples: gallery samples with photos.
        scores: one score per sample, for example `[sample.scores["mass inside"] for sample in
            samples]`.
        name: name of the metric, for the titles.
        count: samples per row.
        draw: function that draws a map on its photo, such as `overlay` or `contours`.

    Returns:
        A matplotlib figure.

    Example:
        >>> photo = np.zeros((32, 32, 3), np.uint8)
        >>> samples = [GallerySample(id=name, image=photo, cells=np.eye(4)) for name in "abcd"]
        >>> figure = plot_best_worst(samples, [0.2, 0.9, 0.4, 0.1], name="mass inside", count=1)
        >>> [text.get_text() for text in figure.texts][:3]
        ['highest mass inside', '0.90', 'b']
    """
    lists = select_best_worst(samples, scores, count)
    count = max(map(len, lists))
    wide = (PAGE_WIDTH - 2 * EDGE - (count - 1) * GAP) / count
    tall = max(wide * _aspect(sample) for one in lists for sample, _ in one)
    down = tall + 0.92
    figure = new_figure(PAGE_WIDTH, 2 * down + 0.42)
    for number, (title, found) in enumerate(zip(("highest", "lowest"), lists, strict=True)):
        top = number * down
        add_text(figure, EDGE, top + 0.14, f"{title} {name}", weight="bold", size=FONT_SIZE + 1)
        for column, (sample, score) in enumerate(found):
            left = EDGE + column * (wide + GAP)
            add_text(figure, left, top + 0.35, f"{score:.2f}", color=SOFT)
            height = wide * _aspect(sample)
            show_image(
                add_axes(figure, left, top + 0.46, wide, height), _sample_image(sample, draw)
            )
            _caption(figure, sample, left, top + 0.46 + height, wide)
    heat = colour_bar(256, 1, DEFAULT_STYLE, under=138)[0]
    box = (EDGE, 2 * down + 0.16, 2.4, 0.09)
    add_colour_bar(figure, box, heat, ("0", "the largest of each map"), "attention")
    return figure


def _aspect(sample: GallerySample) -> float:
    return 1.0 if sample.image is None else sample.image.shape[0] / sample.image.shape[1]


def _sample_image(sample: GallerySample, draw: DrawFunction) -> UInt8[np.ndarray, "y x 3"]:
    if sample.image is None:
        raise ValueError(f"sample {sample.id!r} has no photo to draw on")
    if sample.cells is None:
        return enlarge_photo(sample.image, DEFAULT_STYLE.side)
    return draw(sample.image, sample.cells, sample.geometry, DEFAULT_STYLE, sample.truth_cells)


def _caption(figure: "Figure", sample: GallerySample, left: float, top: float, wide: float) -> None:
    """Add the text in at most two lines, and the prediction marked right or wrong."""
    import textwrap

    room = int(wide * 72 / ((FONT_SIZE - 1) * 0.56))
    lines = textwrap.wrap(sample.text or sample.id, room)
    if len(lines) > 2:
        lines = [lines[0], lines[1][: room - 1] + "…"]
    for number, line in enumerate(lines):
        add_text(figure, left, top + 0.1 + 0.125 * number, line, size=FONT_SIZE - 1)
    sign = {True: "✓ ", False: "✗ ", None: ""}[sample.right]
    colour = {True: "#14713f", False: "#b0372e", None: SOFT}[sample.right]
    if sample.prediction:
        y = top + 0.1 + 0.125 * len(lines)
        add_text(figure, left, y, f"{sign}{sample.prediction}", size=FONT_SIZE - 1, color=colour)
