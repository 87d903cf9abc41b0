"""Text with words shaded by attention, as HTML and SVG.

The text keeps its white space and punctuation and stays readable by screen readers.
"""

from collections.abc import Iterator
from html import escape

import numpy as np
from jaxtyping import Float, Int
from markupsafe import Markup

MIN_OPACITY = 0.45  # of a word without weight: weak but readable


def text_heatmap_html(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    weights: Float[np.ndarray, " n"],
) -> Markup:
    """Return the text as HTML with a `<span class="word">` per word, shaded by weight.

    The largest weight is fully opaque. The `title` of a word has its weight. An element of class
    `aside` lists the three largest weights for screen readers.

    Args:
        text: text.
        spans: character spans of the words; -1 if absent.
        weights: one weight per span; negative ones and NaN count as zero.

    Returns:
        Escaped HTML.

    Example:
        >>> spans, weights = np.array([[0, 1], [2, 6]]), np.array([0.25, 0.75])
        >>> "ring: 0.750" in text_heatmap_html("a ring", spans, weights)
        True
    """
    parts = []
    for piece, weight, level in weighted_pieces(text, spans, weights):
        if weight is None:
            parts.append(escape(piece))
        else:
            parts.append(
                f'<span class="word" title="{escape(piece)}: {weight:.3f}" '
                f'style="opacity:{_opacity(level):.3f};'
                f"background-color:color-mix(in srgb,var(--mark,#f5a623) {100 * level:.0f}%,"
                f'transparent)">{escape(piece)}</span>'
            )
    return Markup(
        "".join(parts)
        + f'<span class="aside"> ({escape(describe_weights(text, spans, weights))})</span>'
    )


def text_heatmap_svg(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    weights: Float[np.ndarray, " n"],
    columns: int = 60,
) -> str:
    """Return the text as a standalone SVG, shaded by weight.

    Args:
        text: text.
        spans: character spans of the words; -1 if absent.
        weights: one weight per span; negative ones and NaN count as zero.
        columns: characters per line, where words allow.

    Returns:
        SVG text.

    Example:
        >>> spans, weights = np.array([[0, 1], [2, 6]]), np.array([0.25, 0.75])
        >>> "<title>ring: 0.750</title>" in text_heatmap_svg("a ring", spans, weights)
        True
    """
    size, line = 16, 26
    wide = size * 0.602  # of a monospaced character
    lines = wrap_pieces(list(weighted_pieces(text, spans, weights)), columns)
    width = wide * max((sum(len(piece) for piece, _, _ in row) for row in lines), default=0) + size
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" '
        f'height="{line * len(lines) + size / 2:.0f}" font-family="monospace" '
        f'font-size="{size}" fill="currentColor">'
        f"<title>{escape(text)}</title>"
        f"<desc>{escape(describe_weights(text, spans, weights))}</desc>"
    )
    out = [start]
    for row, inside in enumerate(lines):
        x, y = size / 2, line * row + line - 6
        for piece, weight, level in inside:
            long = wide * len(piece)
            title = "" if weight is None else f"<title>{escape(piece)}: {weight:.3f}</title>"
            if weight is not None:
                out.append(
                    f'<rect x="{x:.1f}" y="{y - size:.1f}" width="{long:.1f}" height="{line - 4}" '
                    f'rx="3" fill="#f5a623" fill-opacity="{level:.3f}">{title}</rect>'
                )
            if piece.strip():
                faint = 1.0 if weight is None else _opacity(level)
                out.append(
                    f'<text x="{x:.1f}" y="{y:.1f}" textLength="{long:.1f}" '
                    f'fill-opacity="{faint:.3f}" xml:space="preserve">{title}{escape(piece)}</text>'
                )
            x += long
    return "".join(out) + "</svg>"


def describe_weights(
    text: str, spans: Int[np.ndarray, "n 2"], weights: Float[np.ndarray, " n"], count: int = 3
) -> str:
    """Return the words with the largest weights as a phrase, for screen readers.

    >>> spans, weights = np.array([[0, 1], [2, 5], [6, 10]]), np.array([0.1, 0.6, 0.3])
    >>> describe_weights("a red ring", spans, weights, 2)
    'most weight on: red 0.60, ring 0.30'
    """
    found = [
        (piece, weight) for piece, weight, _ in weighted_pieces(text, spans, weights) if weight
    ]
    found.sort(key=lambda pair: -pair[1])
    if not found:
        return "no weight on any word"
    return "most weight on: " + ", ".join(
        f"{piece} {weight:.2f}" for piece, weight in found[:count]
    )


def weighted_pieces(
    text: str, spans: Int[np.ndarray, "n 2"], weights: Float[np.ndarray, " n"]
) -> Iterator[tuple[str, float | None, float]]:
    """Split the text at the spans and yield each piece, its weight and its level from 0 to 1.

    Text between spans has no weight. A span that is absent (-1) or empty is skipped; one that
    overlaps an earlier span adds only the rest. Negative weights and NaN count as zero.
    """
    amounts = np.nan_to_num(np.maximum(weights, 0).astype(np.float64), posinf=0.0)
    top = float(amounts.max(initial=0))
    for piece, i in split_at_spans(text, spans):
        if i is None:
            yield piece, None, 0.0
        else:
            yield piece, float(amounts[i]), float(amounts[i]) / top if top else 0.0


def split_at_spans(text: str, spans: Int[np.ndarray, "n 2"]) -> Iterator[tuple[str, int | None]]:
    """Split the text at its spans and yield each piece with the index of its span or None.

    A span that is absent (-1) or empty is skipped; one that overlaps an earlier span adds only the
    rest.

    >>> list(split_at_spans("a red ring", np.array([[2, 5], [0, 1]])))
    [('a', 1), (' ', None), ('red', 0), (' ring', None)]
    """
    at = 0
    for i in np.argsort(spans[:, 0], kind="stable").tolist():
        start, end = max(at, int(spans[i, 0])), min(len(text), int(spans[i, 1]))
        if int(spans[i, 0]) < 0 or end <= start:
            continue
        if start > at:
            yield text[at:start], None
        yield text[start:end], i
        at = end
    if at < len(text):
        yield text[at:], None


def _opacity(level: float) -> float:
    return MIN_OPACITY + (1 - MIN_OPACITY) * level


WeightedPiece = tuple[str, float | None, float]


def wrap_pieces(parts: list[WeightedPiece], columns: int) -> list[list[WeightedPiece]]:
    """Wrap pieces into rows of at most `columns` characters, dropping white space at breaks."""
    rows: list[list[WeightedPiece]] = [[]]
    used = 0
    for piece, weight, level in parts:
        if used and used + len(piece.rstrip()) > columns:
            rows.append([])
            used = 0
        if not used:
            piece = piece.lstrip()
        if piece:
            rows[-1].append((piece, weight, level))
            used += len(piece)
    return rows
