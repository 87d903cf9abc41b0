"""Words of a page that can be pressed: each says its weight, and shows its own map if any."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Float, Int
from markupsafe import Markup

from overt.show.text import FAINTEST, spoken


@dataclass(frozen=True)
class Mapped:
    """The map of one word: its numbers, from which a page draws it, and it told in words."""

    cells: str
    alt: str


def words_to_press(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    weights: Float[np.ndarray, " n"] | None,
    maps: Mapping[int, Mapped] | None = None,
) -> Markup:
    """The text as HTML with a button a word, as opaque and marked as its weight, if there is one.

    What a press shows is in `data-` attributes, for the page's script; without scripts the text
    reads as it is. The three largest weights follow in words for those who listen.
    """
    maps = maps or {}
    amounts = None
    if weights is not None:
        amounts = np.nan_to_num(np.maximum(weights, 0).astype(np.float64), posinf=0.0)
    top = float(amounts.max(initial=0)) if amounts is not None else 0.0
    parts = []
    for piece, at in cut(text, spans):
        if at is None or not (piece.strip() and (amounts is not None or at in maps)):
            parts.append(escape(piece))
            continue
        title, style, data = escape(piece), "", ""
        if amounts is not None:
            level = float(amounts[at]) / top if top else 0.0
            title += f": {amounts[at]:.3f}"
            style = (
                f' style="opacity:{FAINTEST + (1 - FAINTEST) * level:.3f};background-color:'
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
        parts.append(f'<span class="aside"> ({escape(spoken(text, spans, weights))})</span>')
    return Markup("".join(parts))


def changed_words(
    text: str,
    spans: Int[np.ndarray, "n 2"],
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
) -> Markup:
    """The text with each word marked by what changed: orange got more weight, blue less."""
    change = np.nan_to_num(after.astype(np.float64)) - np.nan_to_num(before.astype(np.float64))
    most = float(np.abs(change).max(initial=0))
    parts = []
    for piece, at in cut(text, spans):
        if at is None or not piece.strip():
            parts.append(escape(piece))
            continue
        level = abs(float(change[at])) / most if most > 0 else 0.0
        colour = "var(--more)" if change[at] > 0 else "var(--less)"
        said = f"{change[at]:+.3f}".replace("-", "−")
        parts.append(
            f'<span class="word" title="{escape(piece)}: {said}" style="background-color:'
            f'color-mix(in srgb,{colour} {60 * level:.0f}%,transparent)">{escape(piece)}</span>'
        )
    return Markup("".join(parts))


def cut(text: str, spans: Int[np.ndarray, "n 2"]) -> Iterator[tuple[str, int | None]]:
    """The text cut at its spans: each piece, and the number of its span if it is of one.

    A span that is absent (-1), empty, or overlaps one before it adds only what is left of it.

    >>> list(cut("a red ring", np.array([[2, 5], [0, 1]])))
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


def spans_of(text: str) -> Int[np.ndarray, "n 2"]:
    """Where the words of a text are that spaces part.

    >>> spans_of("a red  ring").tolist()
    [[0, 1], [2, 5], [7, 11]]
    """
    found, at = [], 0
    for word in text.split():
        start = text.index(word, at)
        at = start + len(word)
        found.append((start, at))
    return np.array(found, dtype=np.int64).reshape(-1, 2)
