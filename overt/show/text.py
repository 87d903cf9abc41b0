"""Words as strong as the attention on them, as HTML and as a picture of lines.

The text itself stays as it was written, with every space and sign, and reads well aloud.
"""

from collections.abc import Iterator
from html import escape

import numpy as np
from jaxtyping import Float, Int
from markupsafe import Markup

FAINTEST = 0.45  # the opacity of a word without weight: weak, but still readable


def words_html(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    weights: Float[np.ndarray, " n"],
) -> Markup:
    """The text as HTML: a `<span class="word">` a word, opaque and marked by its weight.

    The largest weight is fully opaque. The weight itself is in the `title`, for a pointer, and the
    three largest follow in words for those who listen, in an element of class `aside`.
    """
    parts = []
    for piece, weight, level in pieces(text, spans, weights):
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
        "".join(parts) + f'<span class="aside"> ({escape(spoken(text, spans, weights))})</span>'
    )


def words_svg(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    weights: Float[np.ndarray, " n"],
    columns: int = 60,
) -> str:
    """The text as a standalone SVG, in lines of at most `columns` characters where words allow."""
    size, line = 16, 26
    wide = size * 0.602  # a character of any monospaced face
    lines = in_lines(list(pieces(text, spans, weights)), columns)
    width = wide * max((sum(len(piece) for piece, _, _ in row) for row in lines), default=0) + size
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" '
        f'height="{line * len(lines) + size / 2:.0f}" font-family="monospace" '
        f'font-size="{size}" fill="currentColor">'
        f"<title>{escape(text)}</title><desc>{escape(spoken(text, spans, weights))}</desc>"
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


def spoken(
    text: str, spans: Int[np.ndarray, "n 2"], weights: Float[np.ndarray, " n"], count: int = 3
) -> str:
    """The words with the largest weights in one phrase, for those who cannot see them.

    >>> spoken("a red ring", np.array([[0, 1], [2, 5], [6, 10]]), np.array([0.1, 0.6, 0.3]), 2)
    'most weight on: red 0.60, ring 0.30'
    """
    found = [(piece, weight) for piece, weight, _ in pieces(text, spans, weights) if weight]
    found.sort(key=lambda pair: -pair[1])
    if not found:
        return "no weight on any word"
    return "most weight on: " + ", ".join(
        f"{piece} {weight:.2f}" for piece, weight in found[:count]
    )


def pieces(
    text: str, spans: Int[np.ndarray, "n 2"], weights: Float[np.ndarray, " n"]
) -> Iterator[tuple[str, float | None, float]]:
    """The text cut at the spans: each piece, its weight and its level from 0 to 1.

    What lies between the spans has no weight. A span that is absent (-1), empty, or overlaps one
    before it adds only what is left of it. Weights below zero, and those that are not numbers,
    count as none.
    """
    amounts = np.nan_to_num(np.maximum(weights, 0).astype(np.float64), posinf=0.0)
    top = float(amounts.max(initial=0))
    at = 0
    for i in np.argsort(spans[:, 0], kind="stable").tolist():
        start, end = max(at, int(spans[i, 0])), min(len(text), int(spans[i, 1]))
        if int(spans[i, 0]) < 0 or end <= start:
            continue
        if start > at:
            yield text[at:start], None, 0.0
        yield text[start:end], float(amounts[i]), float(amounts[i]) / top if top else 0.0
        at = end
    if at < len(text):
        yield text[at:], None, 0.0


def _opacity(level: float) -> float:
    return FAINTEST + (1 - FAINTEST) * level


Piece = tuple[str, float | None, float]


def in_lines(parts: list[Piece], columns: int) -> list[list[Piece]]:
    """Pieces in rows, broken where a piece would pass the last column; a break eats its space."""
    rows: list[list[Piece]] = [[]]
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
