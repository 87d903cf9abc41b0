"""What a view of attention is made of: one sample, its layers, and what each position is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, UInt8

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.errors import BadInput
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry

Photo = UInt8[np.ndarray, "_ _ 3"]


@dataclass(frozen=True, eq=False)
class Panel:
    """The attention of layers that look from and at the same things, for one sample.

    `queries` and `keys` say in a word what each position is. `photos` has the photo behind each
    span of cells, by the name of the span. `about` is what a reader should know of how it was made.
    """

    title: str
    attention: AttentionMap
    layers: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    photos: Mapping[str, Photo] = field(default_factory=dict)
    causal: bool = False
    about: str = ""

    @property
    def same(self) -> bool:
        """Whether queries and keys are the same things: self-attention."""
        return self.queries == self.keys

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.attention.values.shape[2]


@dataclass(frozen=True)
class Choice:
    """What of a panel is drawn large: a layer, a head and a query; None is the mean of all."""

    layer: int
    head: int | None = None
    query: int | None = None


def panel(
    attention: AttentionMap,
    title: str = "attention",
    layers: Sequence[str] | None = None,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    photos: Mapping[str, Photo] | None = None,
    causal: bool = False,
    about: str = "",
) -> Panel:
    """One sample's map ready to be looked at; what is not named is named by its layout.

    Weights that are NaN are drawn as none, and the panel says how many they are.
    """
    if len(attention) != 1:
        raise ValueError(
            f"a view shows one sample, and this map has {len(attention)}; choose one with "
            "map.select(torch.tensor([0]))"
        )
    count = attention.values.shape[1]
    names = tuple(layers) if layers is not None else tuple(f"layer {n}" for n in range(count))
    missing = int(attention.values.isnan().sum())
    if missing:
        told = (
            f"{missing:,} of its {attention.values.numel():,} weights are NaN, and drawn as none."
        )
        about = f"{about} {told}".strip()
    shown = Panel(
        title,
        attention.detach().to("cpu"),
        names,
        tuple(queries) if queries is not None else labels(attention.queries),
        tuple(keys) if keys is not None else labels(attention.keys),
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
            raise ValueError(f"{found} names for {wanted} {what}")
    return shown


def labels(layout: Layout, row: int = 0) -> tuple[str, ...]:
    """What each position of an axis is, in a word: a piece of text, a cell, or its span's name.

    >>> from overt.attention import grid
    >>> labels(grid(1, 2) + Layout((Span("class", (1,), slice(0, 1)),), 1))
    ('image 0,0', 'image 0,1', 'class')
    """
    found = [str(at) for at in range(len(layout))]
    for span in layout.spans:
        texts = span.geometry.tokens(row) if isinstance(span.geometry, TextGeometry) else None
        for place, at in enumerate(positions(span, row)):
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


def positions(span: Span, row: int = 0) -> list[int]:
    """Where each member of a span stands along the axis; -1 where a sample has none."""
    if isinstance(span.index, slice):
        return list(range(span.index.stop)[span.index])
    return [int(at) for at in span.index[row]]


def usual(shown: Panel) -> Choice:
    """What most people look at first: the last layer, the mean of its heads, and one query.

    The query is the class token where there is one, the last position of a causal model (which says
    what comes next), else the mean of all.
    """
    return Choice(len(shown.layers) - 1, None, usual_query(shown.attention.queries, shown.causal))


def usual_query(queries: Layout, causal: bool) -> int | None:
    """The query that speaks for all: the class token, or the last of a causal model, if any."""
    for span in queries.spans:
        if span.name in ("class", "global") and len(span) == 1:
            return positions(span)[0]
    return len(queries) - 1 if causal or len(queries) == 1 else None


def choose(
    shown: Panel, layer: int | None = None, head: int | None = None, query: str | None = None
) -> Choice:
    """The usual choice with some of it said; what does not exist is `BadInput`."""
    choice = usual(shown)
    if layer is not None:
        choice = replace(choice, layer=_within(layer, len(shown.layers), "layers", shown.title))
    if head is not None:
        choice = replace(choice, head=_within(head, shown.heads, "heads", shown.title))
    if query is not None:
        choice = replace(choice, query=_query(shown, query))
    return choice


def _query(shown: Panel, query: str) -> int | None:
    if query == "mean":
        return None
    return find(shown.attention.queries, shown.queries, query, shown.title)


def _within(number: int, count: int, what: str, title: str) -> int:
    if not -count <= number < count:
        raise BadInput(f"{title} has {what} 0 to {count - 1}, not {number}.")
    return number % count


def find(layout: Layout, names: Sequence[str], query: str, title: str) -> int:
    """The position that a word, a name or a number means; the first of several alike."""
    wanted = query.strip().lower()
    plain = [plainly(label) for label in names]
    if wanted in plain:
        return plain.index(wanted)
    for span in texts(layout):  # a word that is several tokens: its first
        assert isinstance(span.geometry, TextGeometry)
        start = span.geometry.texts[0].lower().find(wanted)
        for place, (first, last) in enumerate(span.geometry.spans[0].tolist()):
            if wanted and start >= 0 and first <= start < last:
                return positions(span)[place]
    if wanted.lstrip("-").isdigit():
        return _within(int(wanted), len(names), "queries", title)
    few = ", ".join(repr(label) for label in names[:12])
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    raise BadInput(f"{title} has no query '{query}'; there are {few}{more}.")


def plainly(label: str) -> str:
    """A token as a person writes it: without the signs that stand for joints and spaces.

    >>> plainly("##ing"), plainly("Ġcat"), plainly("[CLS]")
    ('ing', 'cat', '[cls]')
    """
    return label.removeprefix("##").lstrip("Ġ▁ ").removesuffix("</w>").lower()


def row(shown: Panel, choice: Choice) -> Float[np.ndarray, " k"]:
    """The weights on every key that the choice means, as they are: nothing is renormalised."""
    weights = block(shown, choice)
    if choice.query is not None:
        return weights[choice.query]
    seen = shown.attention.rows[0].numpy()
    return weights[seen].mean(axis=0) if seen.any() else weights.mean(axis=0)


def block(shown: Panel, choice: Choice) -> Float[np.ndarray, "q k"]:
    """All rows of the layer and head chosen."""
    values = shown.attention.values[0, choice.layer]
    one = replace(shown.attention, values=values[None, None]).weights[0, 0].double()
    return (one.mean(dim=0) if choice.head is None else one[choice.head]).numpy()


def caption(shown: Panel, choice: Choice) -> str:
    """What is drawn, in a phrase: layer, head and query by name."""
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


def grids(layout: Layout) -> list[Span]:
    """The spans that are cells of a picture."""
    return [span for span in layout.spans if len(span.shape) == 2]


def texts(layout: Layout) -> list[Span]:
    """The spans that are pieces of a text."""
    return [span for span in layout.spans if isinstance(span.geometry, TextGeometry)]


def boxed(layout: Layout) -> list[Span]:
    """The spans that are boxes of a picture."""
    return [span for span in layout.spans if isinstance(span.geometry, RegionGeometry)]


def is_hard(attention: AttentionMap) -> bool:
    """Whether a map keeps cells or drops them, and weighs none: hard attention."""
    if attention.kind is not Kind.AMOUNT or attention.form is not Form.PLAIN:
        return False
    values = attention.values
    return bool(((values == 0) | (values == 1)).all()) and bool((values == 0).any())


def others(layout: Layout) -> list[int]:
    """The positions that stand in no picture and no text: class tokens, separators, registers."""
    taken: set[int] = set()
    for span in (*grids(layout), *texts(layout), *boxed(layout)):
        spans = span.geometry.spans[0].tolist() if isinstance(span.geometry, TextGeometry) else None
        for place, at in enumerate(positions(span)):
            if spans is None or spans[place][1] > spans[place][0]:
                taken.add(at)
    return [at for at in range(len(layout)) if at not in taken]


def cells(span: Span, weights: Float[np.ndarray, " k"]) -> Float[np.ndarray, "r c"]:
    """The weights on the cells of a picture, as its grid."""
    at = np.array(positions(span))
    return np.where(at >= 0, weights[at], 0.0).reshape(span.shape)


def geometry(span: Span) -> PixelGeometry | None:
    """Where the cells of a span stand on their photo, if it is known."""
    return span.geometry if isinstance(span.geometry, PixelGeometry) else None
