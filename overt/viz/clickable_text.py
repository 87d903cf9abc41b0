"""HTML text with a button per word that shows its weight and, if it has one, its map."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Float, Int
from markupsafe import Markup

from overt.viz.text_heatmap import MIN_OPACITY, describe_weights, split_at_spans


@dataclass(frozen=True)
class WordMap:
    """The map of one word: its packed weights and a text description."""

    cells: str
    alt: str


def clickable_words(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    weights: Float[np.ndarray, " n"] | None,
    maps: Mapping[int, WordMap] | None = None,
) -> Markup:
    """Return the text as HTML with a button per word, shaded by weight.

    The `data-` attributes hold what the script of the page shows on a click; without scripts the
    text stays readable. The three largest weights follow in words for screen readers.
    """
    maps = maps or {}
    amounts = None
    if weights is not None:
        amounts = np.nan_to_num(np.maximum(weights, 0).astype(np.float64), posinf=0.0)
    top = float(amounts.max(initial=0)) if amounts is not None else 0.0
    parts = []
    for piece, at in split_at_spans(text, spans):
        if at is None or not (piece.strip() and (amounts is not None or at in maps)):
            parts.append(escape(piece))
            continue
        title, style, data = escape(piece), "", ""
        if amounts is not None:
            level = float(amounts[at]) / top if top else 0.0
            title += f": {amounts[at]:.3f}"
            style = (
                f' style="opacity:{MIN_OPACITY + (1 - MIN_OPACITY) * level:.3f};background-color:'
                f'color-mix(in srgb,var(--mark,#f5a623) {100 * level:.0f}%,transparent)"'
            )
            data += f' data-weight="{amounts[at]:.4g}" data-even="{1 / max(1, len(amounts)):.4g}"'
        if at in maps:
            one = maps[at]
            data += f' data-cells="{one.cells}" data-alt="{escape(one.alt)}"'
        parts.append(
            f'<button type="button" class="word" aria-pressed="false" title="{title}"'
            f"{style}{data}>{escape(piece)}</button>"
        )
    if weights is not None:
        parts.append(
            f'<span class="aside"> ({escape(describe_weights(text, spans, weights))})</span>'
        )
    return Markup("".join(parts))


def changed_words(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
) -> Markup:
    """Return the text as HTML with each word marked by its change in weight.

    Orange words gained weight, blue words lost it.
    """
    change = np.nan_to_num(after.astype(np.float64)) - np.nan_to_num(before.astype(np.float64))
    most = float(np.abs(change).max(initial=0))
    parts = []
    for piece, at in split_at_spans(text, spans):
        if at is None or not piece.strip():
            parts.append(escape(piece))
            continue
        level = abs(float(change[at])) / most if most > 0 else 0.0
        colour = "var(--more)" if change[at] > 0 else "var(--less)"
        amount = f"{change[at]:+.3f}".replace("-", "−")
        parts.append(
            f'<span class="word" title="{escape(piece)}: {amount}" style="background-color:'
            f'color-mix(in srgb,{colour} {60 * level:.0f}%,transparent)">{escape(piece)}</span>'
        )
    return Markup("".join(parts))


def word_spans(text: str) -> Int[np.ndarray, "n 2"]:
    """Return the character spans of the words that white space separates.

    >>> word_spans("a red  ring").tolist()
    [[0, 1], [2, 5], [7, 11]]
    """
    found, at = [], 0
    for word in text.split():
        start = text.index(word, at)
        at = start + len(word)
        found.append((start, at))
    return np.array(found, dtype=np.int64).reshape(-1, 2)
