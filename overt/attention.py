"""Attention as one value: weights, and what their rows and columns are.

Axis letters, the same in every file:  b batch  l layer  h head  q query  k key  d feature
"""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from html import escape
from io import BytesIO
from math import prod

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from overt.geometry import Geometry, PixelGeometry, RegionGeometry, TextGeometry


@dataclass(frozen=True, eq=False)
class Span:
    """Positions of one kind along an axis: words, cells of a grid, regions.

    `index` says where they stand: a slice when it is the same for every sample, else one row of
    positions a sample, -1 where a sample has none. They need not be contiguous.
    """

    name: str
    shape: tuple[int, ...]
    index: slice | Int[Tensor, "b n"]
    geometry: Geometry | None = None

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"span {self.name!r} of shape {self.shape} has fewer than no cells")
        if isinstance(self.index, slice):
            if self.index.stop is None:
                raise ValueError(f"the slice of span {self.name!r} does not say where it stops")
            found = len(range(self.index.stop)[self.index])
        else:
            found = self.index.shape[1]
        if found != len(self):
            raise ValueError(
                f"span {self.name!r} of shape {self.shape} needs {len(self)} positions, got {found}"
            )

    def __len__(self) -> int:
        return prod(self.shape)

    def __repr__(self) -> str:
        """Name, shape and place in one line; positions that differ by sample are not printed."""
        at = self.index
        where = f"{at.start or 0}:{at.stop}" if isinstance(at, slice) else "its own place a sample"
        known = "" if self.geometry is None else f", {type(self.geometry).__name__}"
        return f"Span({_named(self)} at {where}{known})"


@dataclass(frozen=True, eq=False)
class Layout:
    """What the `length` positions along one axis are, by span name; some may belong to no span."""

    spans: tuple[Span, ...]
    length: int

    def __post_init__(self) -> None:
        names = [span.name for span in self.spans]
        if len(set(names)) != len(names):
            raise ValueError(f"two spans of one axis have the same name: {names}")
        for span in self.spans:
            if isinstance(span.index, slice) and span.index.stop > self.length:
                raise ValueError(
                    f"span {span.name!r} stops at {span.index.stop}, beyond the {self.length} "
                    "positions of its axis"
                )

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        """How many positions there are, and the spans among them."""
        return f"Layout({self.length}: {_told(self)})"

    def __add__(self, other: "Layout") -> "Layout":
        """The positions of `other` after our own."""
        return Layout(
            self.spans + tuple(_shifted(span, self.length) for span in other.spans),
            self.length + other.length,
        )

    def find(self, name: str) -> Span:
        """The span called `name`; an unknown name is answered with the names there are."""
        for span in self.spans:
            if span.name == name:
                return span
        raise ValueError(f"no span {name!r}; this axis has {[span.name for span in self.spans]}")

    def alone(self, name: str) -> "Layout":
        """The layout of a block that holds nothing but the span called `name`."""
        span = self.find(name)
        return Layout((replace(span, index=slice(0, len(span))),), len(span))

    def select(self, rows: Int[Tensor, " n"]) -> "Layout":
        """The layout of the samples named, in their order."""
        return Layout(
            tuple(
                replace(
                    span,
                    index=span.index
                    if isinstance(span.index, slice)
                    else span.index[rows.to(span.index.device)],
                    geometry=None if span.geometry is None else span.geometry[rows],
                )
                for span in self.spans
            ),
            self.length,
        )

    def to(self, device: torch.device | str) -> "Layout":
        """The same layout with its tensors on another device."""
        return Layout(
            tuple(
                replace(
                    span,
                    index=span.index if isinstance(span.index, slice) else span.index.to(device),
                    geometry=None if span.geometry is None else span.geometry.to(device),
                )
                for span in self.spans
            ),
            self.length,
        )


def _shifted(span: Span, by: int) -> Span:
    if isinstance(span.index, slice):
        step = span.index.step or 1
        return replace(span, index=slice((span.index.start or 0) + by, span.index.stop + by, step))
    return replace(span, index=torch.where(span.index < 0, span.index, span.index + by))


def grid(
    height: int, width: int, name: str = "image", geometry: PixelGeometry | None = None
) -> Layout:
    """An axis of the cells of one image, row by row."""
    count = height * width
    return Layout((Span(name, (height, width), slice(0, count), geometry),), count)


def words(count: int, name: str = "text", geometry: TextGeometry | None = None) -> Layout:
    """An axis of the tokens of one text."""
    return Layout((Span(name, (count,), slice(0, count), geometry),), count)


def regions(count: int, name: str = "regions", geometry: RegionGeometry | None = None) -> Layout:
    """An axis of regions of one image."""
    return Layout((Span(name, (count,), slice(0, count), geometry),), count)


POINT = Layout((Span("global", (1,), slice(0, 1)),), 1)


class Kind(Enum):
    """What a row of weights is."""

    PROBABILITY = "probability"  # non-negative, sums to one over the keys a row may see
    SUBPROBABILITY = "subprobability"  # non-negative, at most one: a learned sink took the rest
    AMOUNT = "amount"  # non-negative, any sum: 0/1 masks, heat maps, fixation counts
    SIGNED = "signed"  # mixed after the softmax, or a gradient: any sign


class Form(Enum):
    """How the weights are kept."""

    PLAIN = "plain"
    LOG = "log"  # losses stay in log space, and half precision stays finite


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """`weights[b, l, h, q, k]`: how much query q takes from key k.

    Always five axes, never squeezed: a target with one layer and one head broadcasts over every
    layer and head of a model. Nothing renormalises unasked. A query that may see no key (padding)
    has a row of zeros, never NaN. The tensor keeps its gradient.
    """

    values: Float[Tensor, "b l h q k"]
    keys: Layout
    queries: Layout = field(default_factory=lambda: POINT)  # which PyTorch 2.11 can compile
    mask: Bool[Tensor, "b #q k"] | None = None
    kind: Kind = Kind.PROBABILITY
    form: Form = Form.PLAIN

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            found = getattr(self.values, "dtype", type(self.values).__name__)
            raise ValueError(f"values are a tensor of floating point, not {found}; say .float()")
        expected = (len(self.queries), len(self.keys))
        if self.values.ndim != 5 or tuple(self.values.shape[-2:]) != expected:
            raise ValueError(
                f"values of shape {tuple(self.values.shape)} are not (b, l, h, q, k) "
                f"with (q, k) = {expected}"
            )
        b, _, _, q, k = self.values.shape
        if self.mask is not None and tuple(self.mask.shape) not in ((b, 1, k), (b, q, k)):
            raise ValueError(
                f"a mask of shape {tuple(self.mask.shape)} is neither {(b, 1, k)} nor {(b, q, k)}"
            )
        if not isinstance(self.kind, Kind) or not isinstance(self.form, Form):
            raise ValueError(f"a map is of a Kind and in a Form, not {self.kind!r}, {self.form!r}")
        if self.form is Form.LOG and self.kind is Kind.SIGNED:
            raise ValueError("signed weights have no logarithm; keep them in the plain form")

    # --- making one

    @staticmethod
    def from_scores(
        scores: Float[Tensor, "b l h q k"],
        keys: Layout,
        queries: Layout = POINT,
        mask: Bool[Tensor, "b #q k"] | None = None,
    ) -> "AttentionMap":
        """The softmax of the scores over the keys each query may see, kept as logarithms."""
        return AttentionMap(scores, keys, queries, mask, Kind.AMOUNT, Form.LOG).normalize()

    @staticmethod
    def from_cells(
        cells: Num[Tensor, "b k"] | Bool[Tensor, "b k"],
        keys: Layout,
        mask: Bool[Tensor, "b k"] | None = None,
    ) -> "AttentionMap":
        """Amounts on the keys of one global query: a mask, a heat map, a target not normalised.

        Counts and yes or no become numbers of single precision.
        """
        cells = torch.as_tensor(cells)  # a list or an array is as good
        if cells.ndim != 2:
            raise ValueError(
                f"cells are (b, k), a row a sample, and these are {tuple(cells.shape)}; flatten(1) "
                "makes a row of each grid"
            )
        if not cells.is_floating_point():
            cells = cells.float()
        return AttentionMap(
            rearrange(cells, "b k -> b 1 1 1 k"),
            keys,
            POINT,
            None if mask is None else rearrange(mask, "b k -> b 1 k"),
            Kind.AMOUNT,
        )

    # --- reading it

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples, layers, heads, queries, keys."""
        return tuple(self.values.shape)

    @property
    def weights(self) -> Float[Tensor, "b l h q k"]:
        """The plain weights."""
        return self.values.exp() if self.form is Form.LOG else self.values

    @property
    def log_weights(self) -> Float[Tensor, "b l h q k"]:
        """The logarithms; -inf where a weight is zero, with gradient zero there."""
        if self.form is Form.LOG:
            return self.values
        if self.kind is Kind.SIGNED:
            raise ValueError("signed weights have no logarithm")
        positive = self.values > 0
        return torch.where(positive, torch.where(positive, self.values, 1).log(), -torch.inf)

    @property
    def visible(self) -> Bool[Tensor, "b q k"]:
        """Which keys each query may see."""
        b, _, _, q, k = self.values.shape
        if self.mask is None:
            return torch.ones(b, q, k, dtype=torch.bool, device=self.values.device)
        return self.mask.expand(b, q, k)

    @property
    def rows(self) -> Bool[Tensor, "b q"]:
        """Which queries see any key: the rows that count in a loss or a measure."""
        return self.visible.any(dim=-1)

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        """What the axes are, in one line; to print the numbers, print `weights`.

        >>> AttentionMap.from_cells(torch.rand(2, 49), grid(7, 7))
        AttentionMap(b=2 l=1 h=1 q=1 k=49, amount, queries: global 1, keys: image 7×7)
        """
        axes = " ".join(f"{axis}={size}" for axis, size in zip("blhqk", self.shape, strict=True))
        masked = "" if self.mask is None else ", masked"
        return (
            f"AttentionMap({axes}, {self.kind.value}, queries: {_told(self.queries)}, "
            f"keys: {_told(self.keys)}{masked})"
        )

    # --- changing it

    def normalize(self) -> "AttentionMap":
        """Each row over the keys it may see sums to one; a row without weight stays zero.

        Doing it twice is doing it once. Sums are taken in float32 at least: sixteen bits can hold
        neither 300 cells of 255 nor the logarithm of a sum beside scores of 10,000.
        """
        if self.kind is Kind.SIGNED:
            raise ValueError("signed weights do not normalise; take their positive part first")
        hidden = None if self.mask is None else ~rearrange(self.visible, "b q k -> b 1 1 q k")
        if self.form is Form.LOG:
            values = self.values if hidden is None else self.values.masked_fill(hidden, -torch.inf)
            empty = values.isneginf().all(dim=-1, keepdim=True)
            # the gradient of a softmax over nothing is NaN even where it is thrown away
            values = torch.where(empty, 0, values).log_softmax(dim=-1)
            values = values.masked_fill(empty, -torch.inf)
        else:
            values = self.values if hidden is None else self.values.masked_fill(hidden, 0)
            precise = torch.promote_types(values.dtype, torch.float32)
            total = values.sum(dim=-1, keepdim=True, dtype=precise)
            values = (values / torch.where(total > 0, total, 1)).to(values.dtype)
        return replace(self, values=values, kind=Kind.PROBABILITY)

    def block(self, query: str, key: str) -> "AttentionMap":
        """The weights from span `query` to span `key` as they are, each sample's at its own place.

        A query or key that a sample does not have is hidden and has no weight.
        """
        rows, columns = self.queries.find(query).index, self.keys.find(key).index
        nothing = -torch.inf if self.form is Form.LOG else 0.0
        values = _take(_take(self.values, rows, -2, nothing), columns, -1, nothing)
        mask = None
        if self.mask is not None or not (isinstance(rows, slice) and isinstance(columns, slice)):
            visible = rearrange(self.visible, "b q k -> b 1 1 q k")
            mask = _take(_take(visible, rows, -2, False), columns, -1, False)[:, 0, 0]
        kind = self.kind if self.kind is not Kind.PROBABILITY else Kind.SUBPROBABILITY
        return AttentionMap(
            values, self.keys.alone(key), self.queries.alone(query), mask, kind, self.form
        )

    def between(self, query: str, key: str) -> "AttentionMap":
        """The block from span `query` to span `key`, renormalised over the keys of the block."""
        return self.block(query, key).normalize()

    def over_heads(self, fuse: Callable[..., Tensor] = torch.mean) -> "AttentionMap":
        """Heads fused into one by `fuse(weights, dim=, keepdim=True)`, such as `torch.amax`.

        The mean of probabilities is a probability; any other fusion gives amounts.
        """
        return self._fused(fuse, dim=2)

    def over_layers(self, fuse: Callable[..., Tensor] = torch.mean) -> "AttentionMap":
        """Layers fused into one, as `over_heads` fuses heads."""
        return self._fused(fuse, dim=1)

    def _fused(self, fuse: Callable[..., Tensor], dim: int) -> "AttentionMap":
        kept = fuse is torch.mean or self.kind is Kind.SIGNED
        return replace(
            self,
            values=fuse(self.weights, dim=dim, keepdim=True),
            kind=self.kind if kept else Kind.AMOUNT,
            form=Form.PLAIN,
        )

    def layer(self, index: int) -> "AttentionMap":
        """One layer, the axis kept."""
        _check_place("layers", index, self.values.shape[1])
        return replace(self, values=self.values[:, [index]])

    def head(self, index: int) -> "AttentionMap":
        """One head, the axis kept."""
        _check_place("heads", index, self.values.shape[2])
        return replace(self, values=self.values[:, :, [index]])

    def each_row(self) -> "AttentionMap":
        """Every row as a sample of its own, in the order (b l h q), with one global query.

        What asks for one map a sample then answers for each layer, head and query.
        """
        b, l, h, q, _ = self.values.shape
        samples = torch.arange(b, device=self.values.device).repeat_interleave(l * h * q)
        mask = self.mask
        if mask is not None:
            spread = self.visible[:, None, None].expand(b, l, h, q, -1)
            mask = rearrange(spread, "b l h q k -> (b l h q) 1 k")
        return AttentionMap(
            rearrange(self.values, "b l h q k -> (b l h q) 1 1 1 k"),
            self.keys.select(samples),
            POINT,
            mask,
            self.kind,
            self.form,
        )

    def select(self, rows: Int[Tensor, " n"]) -> "AttentionMap":
        """The samples named, in their order."""
        return replace(
            self,
            values=self.values[rows],
            keys=self.keys.select(rows),
            queries=self.queries.select(rows),
            mask=None if self.mask is None else self.mask[rows],
        )

    def detach(self) -> "AttentionMap":
        """The same weights without their history."""
        return replace(self, values=self.values.detach())

    def to(self, device: torch.device | str) -> "AttentionMap":
        """The same map on another device."""
        return replace(
            self,
            values=self.values.to(device),
            keys=self.keys.to(device),
            queries=self.queries.to(device),
            mask=None if self.mask is None else self.mask.to(device),
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: what the axes are, and the first sample as a heat map.

        The heat map is the last layer, its heads fused: cells of a grid for one query, else queries
        down and keys across. `overt.show.notebook.view` draws it over its photo and its words.
        """
        b, l, h, q, k = self.values.shape
        axes = f"{b} samples, {l} layers, {h} heads, {q} queries, {k} keys; {self.kind.value}"
        said = f"queries: {_told(self.queries)}; keys: {_told(self.keys)}"
        head = f"<p><b>AttentionMap</b> of {axes}<br>{escape(said)}</p>"
        if not self.values.numel():
            return head
        weights = self.weights[0, -1].detach().float().mean(dim=0).clamp_min(0).cpu()
        grids = [span for span in self.keys.spans if len(span.shape) == 2]
        if q == 1 and len(grids) == 1 and len(grids[0]) == k:
            weights = weights.reshape(grids[0].shape)
        return f'{head}<img alt="heat map" style="{_ENLARGED}" src="{_picture(weights)}">'

    def check(self, tolerance: float | None = None) -> "AttentionMap":
        """The map itself, or a ValueError that says where it breaks its kind's promise.

        `tolerance` is how far from one a row may sum; None allows what the number format rounds.
        """
        weights = self.weights.detach()
        if tolerance is None:
            tolerance = max(1e-4, 10 * torch.finfo(weights.dtype).eps)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if not weights.isfinite().all():
            raise ValueError(f"{int((~weights.isfinite()).sum())} weights are not finite")
        shown = rearrange(self.visible, "b q k -> b 1 1 q k")
        hidden = weights.masked_fill(shown, 0)
        if hidden.any():
            raise ValueError(
                f"{int(hidden.count_nonzero())} weights on keys that their query may not see, "
                f"up to {float(hidden.abs().max()):g}"
            )
        if self.kind is Kind.SIGNED:
            return self
        if (weights < 0).any():
            raise ValueError(f"{self.kind.value} weights below zero: {float(weights.min()):g}")
        sums = weights.sum(dim=-1)
        if self.kind is Kind.PROBABILITY:
            wrong = ((sums - 1).abs() > tolerance) & (sums > 0)
        elif self.kind is Kind.SUBPROBABILITY:
            wrong = sums > 1 + tolerance
        else:
            return self
        if wrong.any():
            raise ValueError(
                f"{int(wrong.sum())} {self.kind.value} rows sum to {sums[wrong][:3].tolist()} ..."
            )
        return self


def _check_place(what: str, index: int, count: int) -> None:
    if not -count <= index < count:
        raise IndexError(f"there are {what} 0 to {count - 1}, not {index}")


def _named(span: Span) -> str:
    return f"{span.name} {'×'.join(map(str, span.shape))}"


def _told(layout: Layout) -> str:
    return ", ".join(map(_named, layout.spans))


_ENLARGED = "image-rendering:pixelated;height:240px;max-width:100%;border:1px solid #ccc"


def _picture(weights: Float[Tensor, "r c"]) -> str:
    """A heat map as an address that needs no network: white is none, the largest is dark."""
    from PIL import Image

    levels = 255 - (255 * weights / weights.max().clamp_min(1e-12)).round().to(torch.uint8)
    stream = BytesIO()
    Image.fromarray(levels.numpy()).save(stream, format="PNG")
    return f"data:image/png;base64,{b64encode(stream.getvalue()).decode()}"


def _take(values: Tensor, index: slice | Tensor, dim: int, fill: float | bool) -> Tensor:
    """The positions `index` along an axis of (b, l, h, q, k), `fill` where a sample has none."""
    if isinstance(index, slice):
        return values[..., index, :] if dim == -2 else values[..., index]
    shape = [len(index), 1, 1, 1, 1]
    shape[dim] = index.shape[1]
    at = index.to(values.device).reshape(shape)
    sizes = list(values.shape)
    sizes[dim] = index.shape[1]
    taken = values.gather(dim, at.clamp_min(0).expand(sizes))
    return torch.where(at >= 0, taken, fill)


def rollout(
    attention: AttentionMap, fuse: Callable[..., Tensor] = torch.mean, *, residual: bool = True
) -> AttentionMap:
    """How much of each input reaches each position after every layer (Abnar and Zuidema 2020).

    Heads are fused first, so the result has one head; its layer l is the rollout up to layer l.
    With `residual` each layer is mixed with the identity and its rows renormalised. A query that
    sees nothing keeps a row of zeros, and its mask says so; a key is hidden when no path leads
    to it through what each query may see.
    """
    if len(attention.queries) != len(attention.keys):
        raise ValueError(
            f"rollout needs self-attention: {len(attention.queries)} queries, "
            f"{len(attention.keys)} keys"
        )
    if attention.kind is Kind.SIGNED:
        raise ValueError("rollout follows shares of attention, and signed weights are none")
    layers = attention.over_heads(fuse).weights[:, :, 0]
    visible = attention.visible
    if residual:
        itself = torch.eye(len(attention.keys), device=layers.device, dtype=layers.dtype)
        layers = layers + itself
        layers = layers / layers.sum(dim=-1, keepdim=True)
        layers = layers * rearrange(attention.rows, "b q -> b 1 q 1")
        visible = (visible | itself.bool()) & rearrange(attention.rows, "b q -> b q 1")
    reached = [layers[:, 0]]
    for layer in layers.unbind(dim=1)[1:]:
        reached.append(layer @ reached[-1])
    return replace(
        attention,
        values=rearrange(torch.stack(reached, dim=1), "b l q k -> b l 1 q k"),
        mask=None if attention.mask is None else _paths(visible, len(reached)),
        kind=Kind.PROBABILITY if residual else Kind.AMOUNT,
        form=Form.PLAIN,
    )


def _paths(visible: Bool[Tensor, "b q q"], steps: int) -> Bool[Tensor, "b q q"]:
    """Which positions lead to which in at most `steps` steps."""
    step = visible.float()
    reached = found = visible
    for _ in range(steps - 1):
        reached = step @ reached.float() > 0
        found = found | reached
    return found
