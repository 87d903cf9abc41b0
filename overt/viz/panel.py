"""Panels: one sample's attention with layer names, position names and photos."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int, UInt8

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.errors import UserError
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry

Photo = UInt8[np.ndarray, "_ _ 3"]


@dataclass(frozen=True)
class DeletionCheck:
    """Probability of each word of an answer after cells of the image were covered.

    `mapped` is the probability of each word after the `cells` cells with the largest weights of its
    own map were covered, `random` that after as many random cells were, one tuple of words per
    draw. `source` names the layer and head of the map.
    """

    source: str
    cells: int
    mapped: tuple[float, ...]
    random: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, eq=False)
class Panel:
    """Attention of layers with the same queries and keys, for one sample.

    `queries` and `keys` name each position. `photos` has the photo behind each image span, by span
    name. `about` is a note for the reader. `sinks` are the attention sinks of each layer, as key
    positions. `chances` are the probabilities of the words that are the queries, and `before` those
    before a part of the input was removed. `deletion` compares the maps of these words with random
    cells.
    """

    title: str
    attention: AttentionMap
    layers: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    photos: Mapping[str, Photo] = field(default_factory=dict)
    causal: bool = False
    about: str = ""
    sinks: tuple[tuple[int, ...], ...] = ()
    chances: tuple[float, ...] = ()
    before: tuple[float, ...] = ()
    deletion: DeletionCheck | None = None

    @property
    def same(self) -> bool:
        """Whether queries and keys are the same positions: self-attention."""
        return self.queries == self.keys

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.attention.values.shape[2]


@dataclass(frozen=True)
class Choice:
    """The layer, head and query shown in large; None is the mean."""

    layer: int
    head: int | None = None
    query: int | None = None


def make_panel(
    attention: AttentionMap,
    title: str = "attention",
    layers: Sequence[str] | None = None,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    photos: Mapping[str, Photo] | None = None,
    causal: bool = False,
    about: str = "",
) -> Panel:
    """Build the panel of one sample; missing names come from the layout.

    NaN weights are drawn as zero, and the panel states their number.
    """
    if len(attention) != 1:
        raise ValueError(
            f"expected a map of one sample, got {len(attention)}: select one with "
            "attention.sample(0)"
        )
    count = attention.values.shape[1]
    names = tuple(layers) if layers is not None else tuple(f"layer {n}" for n in range(count))
    missing = int(attention.values.isnan().sum())
    if missing:
        note = f"{missing:,} of {attention.values.numel():,} weights are NaN and drawn as zero."
        about = f"{about} {note}".strip()
    shown = Panel(
        title,
        attention.detach().to("cpu"),
        names,
        tuple(queries) if queries is not None else position_labels(attention.queries),
        tuple(keys) if keys is not None else position_labels(attention.keys),
        dict(photos or {}),
        causal,
        about,
    )
    for what, found, wanted in (
        ("layers", len(shown.layers), count),
        ("queries", len(shown.queries), len(attention.queries)),
        ("keys", len(shown.keys), len(attention.keys)),
    ):
        if found != wanted:
            raise ValueError(f"got {found} names for {wanted} {what}: one each is needed")
    return shown


def position_labels(layout: Layout, row: int = 0) -> tuple[str, ...]:
    """Return a name for each position of an axis: a token, a cell, or its span's name.

    >>> from overt.attention import grid
    >>> position_labels(grid(1, 2) + Layout((Span("class", (1,), slice(0, 1)),), 1))
    ('image 0,0', 'image 0,1', 'class')
    """
    found = [str(at) for at in range(len(layout))]
    for span in layout.spans:
        texts = span.geometry.tokens(row) if isinstance(span.geometry, TextGeometry) else None
        for place, at in enumerate(span_positions(span, row)):
            if at < 0:
                continue
            if texts is not None:
                found[at] = texts[place] or span.name
            elif len(span.shape) > 1:
                cell = np.unravel_index(place, span.shape)
                found[at] = f"{span.name} {','.join(str(n) for n in cell)}"
            else:
                found[at] = span.name if len(span) == 1 else f"{span.name} {place}"
    return tuple(found)


def span_positions(span: Span, row: int = 0) -> list[int]:
    """Return the positions of a span's members along the axis; -1 if absent from the sample."""
    if isinstance(span.index, slice):
        return list(range(span.index.stop)[span.index])
    return [int(at) for at in span.index[row]]


def default_choice(shown: Panel) -> Choice:
    """Return the default choice: last layer, mean of heads, and the default query.

    The default query is the class token, or the last position of a causal model, which predicts the
    next token, or the mean.
    """
    return Choice(len(shown.layers) - 1, None, default_query(shown.attention.queries, shown.causal))


def default_query(queries: Layout, causal: bool) -> int | None:
    """Return the class token, or the last position of a causal model, or None for the mean."""
    for span in queries.spans:
        if span.name in ("class", "global") and len(span) == 1:
            return span_positions(span)[0]
    return len(queries) - 1 if causal or len(queries) == 1 else None


def choose(
    shown: Panel,
    layer: int | None = None,
    head: int | None = None,
    query: str | int | None = None,
) -> Choice:
    """Return the default choice with some parts replaced.

    Raises:
        UserError: if a layer, head or query does not exist.
    """
    choice = default_choice(shown)
    if layer is not None:
        choice = replace(choice, layer=_within(layer, len(shown.layers), "layers", shown.title))
    if head is not None:
        choice = replace(choice, head=_within(head, shown.heads, "heads", shown.title))
    if query is not None:
        choice = replace(choice, query=_query(shown, query))
    return choice


def _query(shown: Panel, query: str | int) -> int | None:
    if query == "mean":
        return None
    if isinstance(query, int):
        return _within(query, len(shown.queries), "queries", shown.title)
    return find_position(shown.attention.queries, shown.queries, query, shown.title)


def _within(number: int, count: int, what: str, title: str) -> int:
    if not -count <= number < count:
        raise UserError(f"{title} has {what} 0 to {count - 1}, got {number}.")
    return number % count


def find_position(layout: Layout, names: Sequence[str], query: str, title: str) -> int:
    """Return the position of a token, name or number; the first if several match."""
    wanted = query.strip().lower()
    plain = [plain_token(label) for label in names]
    if wanted in plain:
        return plain.index(wanted)
    for span in text_spans(layout):  # the first token of a word
        assert isinstance(span.geometry, TextGeometry)
        start = span.geometry.texts[0].lower().find(wanted)
        for place, (first, last) in enumerate(span.geometry.spans[0].tolist()):
            if wanted and start >= 0 and first <= start < last:
                return span_positions(span)[place]
    number = parse_integer(wanted)
    if number is not None:
        return _within(number, len(names), "queries", title)
    few = ", ".join(repr(label) for label in names[:12])
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    raise UserError(f"{title} has no query '{query}'; choose one of {few}{more}.")


def parse_integer(text: str) -> int | None:
    """Return the integer that a text spells, or None: not every Unicode digit is one.

    >>> parse_integer("-3"), parse_integer("²"), parse_integer("--5"), parse_integer("")
    (-3, None, None, None)
    """
    try:
        return int(text) if text.removeprefix("-").isdecimal() else None
    except ValueError:  # too many digits
        return None


def plain_token(label: str) -> str:
    """Return a token without the tokenizer's continuation and space marks, in lower case.

    >>> plain_token("##ing"), plain_token("Ġcat"), plain_token("[CLS]")
    ('ing', 'cat', '[cls]')
    """
    return label.removeprefix("##").lstrip("Ġ▁ ").removesuffix("</w>").lower()


def weight_row(shown: Panel, choice: Choice) -> Float[np.ndarray, " k"]:
    """Return the weights of the chosen query on every key, not renormalized."""
    weights = weight_matrix(shown, choice)
    if choice.query is not None:
        return weights[choice.query]
    seen = shown.attention.rows[0].numpy()
    return weights[seen].mean(axis=0) if seen.any() else weights.mean(axis=0)


def weight_matrix(shown: Panel, choice: Choice) -> Float[np.ndarray, "q k"]:
    """Return all rows of the chosen layer and head."""
    values = shown.attention.values[0, choice.layer]
    one = replace(shown.attention, values=values[None, None]).weights[0, 0].double()
    return (one.mean(dim=0) if choice.head is None else one[choice.head]).numpy()


def describe_choice(shown: Panel, choice: Choice) -> str:
    """Return the chosen layer, head and query as a phrase."""
    heads = f"head {choice.head} of {shown.heads}"
    if shown.heads == 1:
        heads = ""
    elif choice.head is None:
        heads = f"mean of {shown.heads} heads"
    query = "mean of all queries"
    if choice.query is not None:
        query = f"from {shown.queries[choice.query].strip()!r}"
        if shown.queries.count(shown.queries[choice.query]) > 1:
            query += f" at position {choice.query}"
    return ", ".join(part for part in (shown.layers[choice.layer], heads, query) if part)


def grid_spans(layout: Layout) -> list[Span]:
    """Return the spans that are image grids."""
    return [span for span in layout.spans if len(span.shape) == 2]


def text_spans(layout: Layout) -> list[Span]:
    """Return the spans that are text."""
    return [span for span in layout.spans if isinstance(span.geometry, TextGeometry)]


def region_spans(layout: Layout) -> list[Span]:
    """Return the spans that are boxes of an image."""
    return [span for span in layout.spans if isinstance(span.geometry, RegionGeometry)]


def is_hard_attention(attention: AttentionMap) -> bool:
    """Return whether a map is hard attention: amounts of 0 and 1, some of them 0."""
    if attention.kind is not Kind.AMOUNT or attention.form is not Form.PLAIN:
        return False
    values = attention.values
    return bool(((values == 0) | (values == 1)).all()) and bool((values == 0).any())


def other_positions(layout: Layout) -> list[int]:
    """Return the positions outside images and texts: class tokens, separators, registers."""
    taken: set[int] = set()
    for span in (*grid_spans(layout), *text_spans(layout), *region_spans(layout)):
        spans = span.geometry.spans[0].tolist() if isinstance(span.geometry, TextGeometry) else None
        for place, at in enumerate(span_positions(span)):
            if spans is None or spans[place][1] > spans[place][0]:
                taken.add(at)
    return [at for at in range(len(layout)) if at not in taken]


def grid_weights(span: Span, weights: Float[np.ndarray, " k"]) -> Float[np.ndarray, "r c"]:
    """Return the weights on the cells of an image span, as its grid."""
    at = np.array(span_positions(span))
    return np.where(at >= 0, weights[at], 0.0).reshape(span.shape)


def pixel_geometry(span: Span) -> PixelGeometry | None:
    """Return the pixel geometry of a span, if it has one."""
    return span.geometry if isinstance(span.geometry, PixelGeometry) else None


def text_weights(
    span: Span, weights: Float[np.ndarray, " k"]
) -> tuple[str, Int[np.ndarray, "n 2"], Float[np.ndarray, " n"]]:
    """Return a text, the character spans of its tokens, and their weights.

    Tokens without characters get weight 0, so the strongest word gets the strongest mark however
    much a separator takes.
    """
    assert isinstance(span.geometry, TextGeometry)
    spans = span.geometry.spans[0].numpy()
    at = np.array(span_positions(span), dtype=np.int64)  # may be empty
    there = (at >= 0) & (spans[:, 1] > spans[:, 0])
    return span.geometry.texts[0], spans, np.where(there, weights[at], 0.0)
