"""`AttentionMap`: attention weights with a description of their queries and keys.

Axis letters, the same in every file:  b batch  l layer  h head  q query  k key  d feature
"""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from html import escape
from importlib import import_module
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from overt.geometry import Geometry, PixelGeometry, RegionGeometry, TextGeometry


@dataclass(frozen=True, eq=False)
class Span:
    """A named group of positions along an axis, such as words, grid cells or regions.

    The positions need not be contiguous.

    Args:
        name: The name by which layouts and maps refer to the span.
        shape: The shape of the positions: `(words,)`, or `(rows, columns)` of a grid.
        index: Where the positions are on the axis: a slice if they are the same for every sample,
            else one row of positions per sample, with -1 where a sample has none.
        geometry: The pixels, characters or boxes of the positions, if known.

    Raises:
        ValueError: The shape does not match the number of positions.

    Example:
        >>> Span("image", (7, 7), slice(1, 50))
        Span(image 7×7 at 1:50)
    """

    name: str
    shape: tuple[int, ...]
    index: slice | Int[Tensor, "b n"]
    geometry: Geometry | None = None

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"span {self.name!r} has a negative size: {self.shape}")
        if isinstance(self.index, slice):
            if self.index.stop is None:
                raise ValueError(f"the slice of span {self.name!r} needs a stop")
            # range resolves start, step and negative values of a slice without a tensor
            count = len(range(self.index.stop)[self.index])
        else:
            count = self.index.shape[1]
        if count != len(self):
            raise ValueError(
                f"span {self.name!r} of shape {self.shape} needs {len(self)} positions, got {count}"
            )

    def __len__(self) -> int:
        return prod(self.shape)

    def __repr__(self) -> str:
        """Return name, shape and position in one line, without per-sample positions."""
        at = self.index
        where = f"{at.start or 0}:{at.stop}" if isinstance(at, slice) else "per-sample positions"
        known = "" if self.geometry is None else f", {type(self.geometry).__name__}"
        return f"Span({_describe_span(self)} at {where}{known})"


@dataclass(frozen=True, eq=False)
class Layout:
    """The spans along one axis of `length` positions; positions may belong to no span.

    Args:
        spans: The spans, with different names.
        length: The number of positions of the axis.

    Raises:
        ValueError: Two spans have the same name, or a span ends beyond the axis.

    Example:
        >>> words(1, "class") + grid(7, 7)
        Layout(50: class 1, image 7×7)
    """

    spans: tuple[Span, ...]
    length: int

    def __post_init__(self) -> None:
        names = [span.name for span in self.spans]
        if len(set(names)) != len(names):
            raise ValueError(f"span names must be unique, got {names}")
        for span in self.spans:
            if isinstance(span.index, slice) and span.index.stop > self.length:
                raise ValueError(
                    f"span {span.name!r} ends at {span.index.stop}, but its axis has {self.length} "
                    "positions"
                )

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        """Return the number of positions and the spans."""
        return f"Layout({self.length}: {_describe(self)})"

    def __add__(self, other: "Layout") -> "Layout":
        """Return the layout with the positions of `other` appended."""
        return Layout(
            self.spans + tuple(_shift(span, self.length) for span in other.spans),
            self.length + other.length,
        )

    def find(self, name: str) -> Span:
        """Return the span called `name`.

        Args:
            name: The name of the span. "CLS" and "[CLS]" stand for the span "class".

        Returns:
            The span.

        Raises:
            ValueError: The span does not exist; the message lists the names.

        Example:
            >>> (words(1, "class") + words(3)).find("[CLS]")
            Span(class 1 at 0:1)
        """
        for wanted in (name, _ALIASES.get(name.lower(), name)):
            for span in self.spans:
                if span.name == wanted:
                    return span
        names = [span.name for span in self.spans]
        if names == ["positions"]:
            raise ValueError(
                f"no span {name!r}: the positions of this axis have no names; name them with "
                "watch(model, layout=overt.layout_of(model, inputs)) or "
                "from_weights(..., keys=layout)"
            )
        raise ValueError(f"no span {name!r}; this axis has {names}")

    def only(self, name: str) -> "Layout":
        """Return the layout of a block that contains only the span called `name`.

        Args:
            name: The name of the span.

        Returns:
            A layout with that span at the positions 0 to `len(span)`.
        """
        span = self.find(name)
        return Layout((replace(span, index=slice(0, len(span))),), len(span))

    def select(self, rows: Int[Tensor, " n"]) -> "Layout":
        """Return the layout of some samples.

        Args:
            rows: The indices of the samples, in the order of the result.

        Returns:
            The layout of these samples.
        """
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
        """Return the layout with its tensors on another device."""
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


# as tokenizers write it
_ALIASES = dict.fromkeys(("cls", "[cls]", "<cls>", "class"), "class")  # names of the class token


def _shift(span: Span, by: int) -> Span:
    if isinstance(span.index, slice):
        step = span.index.step or 1
        return replace(span, index=slice((span.index.start or 0) + by, span.index.stop + by, step))
    # -1 marks an absent position and must stay -1
    return replace(span, index=torch.where(span.index < 0, span.index, span.index + by))


def grid(
    height: int, width: int, name: str = "image", geometry: PixelGeometry | None = None
) -> Layout:
    """Return the layout of the cells of one image, row by row.

    Args:
        height: Rows of cells.
        width: Columns of cells.
        name: The name of the span.
        geometry: How the image was resized and cropped, if known.

    Returns:
        A layout with one span of shape `(height, width)`.

    Example:
        >>> grid(7, 7)
        Layout(49: image 7×7)
    """
    count = height * width
    return Layout((Span(name, (height, width), slice(0, count), geometry),), count)


def words(count: int, name: str = "text", geometry: TextGeometry | None = None) -> Layout:
    """Return the layout of the tokens of one text.

    Args:
        count: The number of tokens.
        name: The name of the span.
        geometry: The characters of each token, if known.

    Returns:
        A layout with one span of shape `(count,)`.

    Example:
        >>> words(3).spans[0].name, len(words(3))
        ('text', 3)
    """
    return Layout((Span(name, (count,), slice(0, count), geometry),), count)


def regions(count: int, name: str = "regions", geometry: RegionGeometry | None = None) -> Layout:
    """Return the layout of regions of one image.

    Args:
        count: The number of regions.
        name: The name of the span.
        geometry: The box of each region, if known.

    Returns:
        A layout with one span of shape `(count,)`.

    Example:
        >>> regions(36).spans[0].name, len(regions(36))
        ('regions', 36)
    """
    return Layout((Span(name, (count,), slice(0, count), geometry),), count)


# the single query of attention pooling, where no input position asks
GLOBAL_QUERY = Layout((Span("global", (1,), slice(0, 1)),), 1)


class Kind(StrEnum):
    """The meaning of a row of weights. Each member equals its string: `Kind.SIGNED == "signed"`.

    Attributes:
        PROBABILITY: Non-negative, sums to one over the visible keys.
        SUBPROBABILITY: Non-negative, sums to at most one: a learned sink has the rest.
        AMOUNT: Non-negative, any sum: 0/1 masks, heat maps, fixation counts.
        SIGNED: Any sign: gradients, or weights mixed after the softmax.

    Example:
        >>> Kind("signed") is Kind.SIGNED, Kind.SIGNED == "signed"
        (True, True)
    """

    PROBABILITY = "probability"  # non-negative, sums to one over the visible keys
    SUBPROBABILITY = (
        "subprobability"  # non-negative, sums to at most one: a learned sink has the rest
    )
    AMOUNT = "amount"  # non-negative, any sum: 0/1 masks, heat maps, fixation counts
    SIGNED = "signed"  # any sign: gradients, or weights mixed after the softmax


class Form(StrEnum):
    """How weights are stored. Each member equals its string: `Form.LOG == "log"`.

    Attributes:
        PLAIN: The weights themselves.
        LOG: Their logarithms, for losses in log space, which stay finite in half precision.

    Example:
        >>> Form("log") is Form.LOG, Form.LOG == "log"
        (True, True)
    """

    PLAIN = "plain"
    LOG = "log"  # for losses in log space, which stay finite in half precision


_E = TypeVar("_E", Kind, Form)


def _member(enum: type[_E], given: _E | str) -> _E:
    """Return a member of an enum, also for its string."""
    if given not in list(enum):
        names = [str(member) for member in enum]
        raise ValueError(f"{enum.__name__.lower()} must be one of {names}, got {given!r}")
    return enum(given)


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights `weights[b, l, h, q, k]`: how much query q attends to key k.

    There are always five axes. A target with one layer and one head broadcasts over all layers and
    heads of a model. Weights are never renormalised implicitly. A query without a visible key
    (padding) has a row of zeros, not NaN. Gradients are kept.

    Args:
        values: The weights, or their logarithms if `form` is `Form.LOG`.
        keys: The layout of the key axis.
        queries: The layout of the query axis; one global query by default.
        mask: Which keys each query may attend to; None if all are visible.
        kind: The meaning of a row of weights, as a `Kind` or its string, such as "signed".
        form: Whether `values` are weights or logarithms, as a `Form` or its string.
        coverage: For ground truth that marks a region, such as a box or a mask: the share of each
            key inside the region, from 0 to 1. `normalize` keeps it, so that a target is a
            distribution for a loss and still has the covered share of each cell for a metric.

    Raises:
        ValueError: The shapes do not match, `values` is not floating point, or signed weights are
            given as logarithms.

    Example:
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), grid(2, 2))
        >>> attention
        AttentionMap(b=2 l=1 h=1 q=1 k=4, probability, queries: global 1, keys: image 2×2)
        >>> attention.weights[0, 0, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    values: Float[Tensor, "b l h q k"]
    keys: Layout
    queries: Layout = field(
        default_factory=lambda: GLOBAL_QUERY
    )  # a factory, which PyTorch 2.11 can compile
    mask: Bool[Tensor, "b #q k"] | None = None
    kind: Kind = Kind.PROBABILITY
    form: Form = Form.PLAIN
    coverage: Float[Tensor, "b #q k"] | None = None

    def __post_init__(self) -> None:
        # a frozen dataclass blocks plain assignment
        object.__setattr__(self, "kind", _member(Kind, self.kind))
        object.__setattr__(self, "form", _member(Form, self.form))
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            dtype = getattr(self.values, "dtype", type(self.values).__name__)
            raise ValueError(f"values must be a floating-point tensor, got {dtype}; use .float()")
        expected = (len(self.queries), len(self.keys))
        if self.values.ndim != 5 or tuple(self.values.shape[-2:]) != expected:
            raise ValueError(
                f"values must have the shape (b, l, h, q, k) with (q, k) = {expected}, got "
                f"{tuple(self.values.shape)}"
            )
        b, _, _, q, k = self.values.shape
        if self.mask is not None and tuple(self.mask.shape) not in ((b, 1, k), (b, q, k)):
            raise ValueError(
                f"mask must have the shape (b, 1, k) or (b, q, k), without layers and heads, with "
                f"(b, q, k) = {(b, q, k)}, got {tuple(self.mask.shape)}"
            )
        covered = self.coverage
        if covered is not None and tuple(covered.shape) not in ((b, 1, k), (b, q, k)):
            raise ValueError(
                f"coverage must have the shape {(b, 1, k)} or {(b, q, k)}, got "
                f"{tuple(covered.shape)}; replace(..., coverage=None) drops it"
            )
        if self.form is Form.LOG and self.kind is Kind.SIGNED:
            raise ValueError("signed weights have no logarithm; use Form.PLAIN")

    # --- constructors

    @staticmethod
    def from_scores(
        scores: Float[Tensor, "b l h q k"],
        keys: Layout,
        queries: Layout = GLOBAL_QUERY,
        mask: Bool[Tensor, "b #q k"] | None = None,
    ) -> "AttentionMap":
        """Compute the softmax of scores over the visible keys of each query, stored as logarithms.

        Args:
            scores: The attention scores before the softmax.
            keys: The layout of the key axis.
            queries: The layout of the query axis.
            mask: Which keys each query may attend to; None if all are visible.

        Returns:
            A map of probabilities.

        Example:
            >>> AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 2), words(2)).weights.flatten()
            tensor([0.5000, 0.5000])
        """
        # scores are unnormalised logarithms, so normalising them is the softmax
        return AttentionMap(scores, keys, queries, mask, Kind.AMOUNT, Form.LOG).normalize()

    @staticmethod
    def from_weights(
        weights: Tensor,
        axes: str,
        keys: Layout | None = None,
        queries: Layout | None = None,
        mask: Bool[Tensor, "b #q k"] | None = None,
        kind: Kind | str = Kind.PROBABILITY,
    ) -> "AttentionMap":
        """Return the map of a plain tensor whose axes are named, such as the output of a model.

        Args:
            weights: The weights, with any of the five axes in any order.
            axes: The letters of the axes of `weights`, separated by spaces: b batch, l layer,
                h head, q query, k key. An axis that is not named has the size one.
            keys: The layout of the key axis; by default, one span "positions".
            queries: The layout of the query axis; by default that of the keys if both axes have
                the same length, a global query for one query, and else one span "positions".
            mask: Which keys each query may attend to; None if all are visible.
            kind: The meaning of a row of weights. The weights are checked.

        Returns:
            A map of five axes that shares the memory of `weights` where possible.

        Raises:
            ValueError: The axes do not fit the tensor, or the weights are not of this kind.

        Example:
            >>> weights = torch.full((2, 4, 9, 9), 1 / 9)  # one layer of a Hugging Face model
            >>> AttentionMap.from_weights(weights, "b h q k")
            AttentionMap(b=2 l=1 h=4 q=9 k=9, probability, queries: positions 9, keys: positions 9)
        """
        names = axes.split()
        if len(set(names)) != len(names) or not set(names) <= set("blhqk") or "k" not in names:
            raise ValueError(
                f"axes must be different letters of 'b l h q k' with spaces, and k, got {axes!r}"
            )
        if weights.ndim != len(names):
            raise ValueError(
                f"axes {axes!r} name {len(names)} axes, weights have {weights.ndim}: "
                f"{tuple(weights.shape)}"
            )
        values = rearrange(
            weights, f"{axes} -> {' '.join(n if n in names else '1' for n in 'blhqk')}"
        )
        q, k = values.shape[-2:]
        if keys is None:
            keys = words(k, "positions")
        # square weights are taken as self-attention: queries and keys are the same positions
        if queries is None:
            queries = GLOBAL_QUERY if q == 1 else keys if q == k else words(q, "positions")
        if not values.is_floating_point():
            values = values.float()
        return AttentionMap(values, keys, queries, mask, _member(Kind, kind)).check()

    @staticmethod
    def from_cells(
        cells: Num[Tensor, "b k"] | Bool[Tensor, "b k"],
        keys: Layout,
        mask: Bool[Tensor, "b k"] | None = None,
    ) -> "AttentionMap":
        """Return a map of amounts from one global query, such as a mask or a heat map.

        Args:
            cells: One row of values per sample. Integers and booleans are converted to float32.
            keys: The layout of the key axis.
            mask: Which keys are present; None if all are.

        Returns:
            A map of amounts.

        Raises:
            ValueError: `cells` does not have two axes.

        Example:
            >>> AttentionMap.from_cells(torch.tensor([[1, 3]]), words(2)).weights.flatten()
            tensor([1., 3.])
        """
        cells = torch.as_tensor(cells)  # lists and arrays are accepted
        if cells.ndim != 2:
            raise ValueError(
                f"cells must have the shape (b, k), one row per sample, got {tuple(cells.shape)}; "
                "use flatten(1) for grids"
            )
        if not cells.is_floating_point():
            cells = cells.float()
        return AttentionMap(
            rearrange(cells, "b k -> b 1 1 1 k"),
            keys,
            GLOBAL_QUERY,
            None if mask is None else rearrange(mask, "b k -> b 1 k"),
            Kind.AMOUNT,
        )

    @staticmethod
    def from_coverage(
        shares: Float[Tensor, "b k"], keys: Layout, mask: Bool[Tensor, "b k"] | None = None
    ) -> "AttentionMap":
        """Return a normalised target from the share of each key inside a region.

        Location metrics read the shares from `coverage`; losses read the normalised weights.

        Args:
            shares: The share of each key inside the region, from 0 to 1.
            keys: The layout of the key axis.
            mask: Which keys are present; None if all are.

        Returns:
            A map of probabilities with `coverage`.

        Example:
            >>> target = AttentionMap.from_coverage(torch.tensor([[1.0, 1.0, 0.0]]), words(3))
            >>> target.weights.flatten(), target.coverage.flatten()
            (tensor([0.5000, 0.5000, 0.0000]), tensor([1., 1., 0.]))
        """
        made = AttentionMap.from_cells(shares, keys, mask)
        # the shares before normalisation: afterwards a small region and a large one both sum to one
        return replace(made, coverage=made.weights[:, 0, 0]).normalize()

    # --- properties

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of samples, layers, heads, queries and keys."""
        return tuple(self.values.shape)

    @property
    def weights(self) -> Float[Tensor, "b l h q k"]:
        """The weights, also if they are stored as logarithms."""
        return self.values.exp() if self.form is Form.LOG else self.values

    @property
    def log_weights(self) -> Float[Tensor, "b l h q k"]:
        """The logarithms of the weights; -inf, with a gradient of zero, where a weight is zero.

        NaN stays NaN, so that a loss on diverged attention is NaN too.

        Raises:
            ValueError: The weights are signed.
        """
        if self.form is Form.LOG:
            return self.values
        if self.kind is Kind.SIGNED:
            raise ValueError("signed weights have no logarithm")
        # the inner `where` keeps log(0) out of the graph: its gradient is infinite, and inf * 0 is
        # NaN
        positive = ~(self.values <= 0)
        return torch.where(positive, torch.where(positive, self.values, 1).log(), -torch.inf)

    @property
    def visible(self) -> Bool[Tensor, "b q k"]:
        """Which keys each query may attend to."""
        b, _, _, q, k = self.values.shape
        if self.mask is None:
            return torch.ones(b, q, k, dtype=torch.bool, device=self.values.device)
        return self.mask.expand(b, q, k)

    @property
    def rows(self) -> Bool[Tensor, "b q"]:
        """Which queries have a visible key: the rows that count in a loss or a metric."""
        return self.visible.any(dim=-1)

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        """Return the axes in one line, without the values.

        >>> AttentionMap.from_cells(torch.rand(2, 49), grid(7, 7))
        AttentionMap(b=2 l=1 h=1 q=1 k=49, amount, queries: global 1, keys: image 7×7)
        """
        axes = " ".join(f"{axis}={size}" for axis, size in zip("blhqk", self.shape, strict=True))
        masked = "" if self.mask is None else ", masked"
        return (
            f"AttentionMap({axes}, {self.kind.value}, queries: {_describe(self.queries)}, "
            f"keys: {_describe(self.keys)}{masked})"
        )

    # --- transformations

    def normalize(self) -> "AttentionMap":
        """Return the map with rows that sum to one over their visible keys.

        Rows of zeros stay zero. Sums are taken in float32 at least: 16-bit formats can represent
        neither 300 cells of 255 nor a log-sum next to scores of 10,000.

        Returns:
            A map of probabilities.

        Raises:
            ValueError: The weights are signed.

        Example:
            >>> counts = AttentionMap.from_cells(torch.tensor([[2.0, 6.0]]), words(2))
            >>> counts.normalize().weights.flatten()
            tensor([0.2500, 0.7500])
        """
        if self.kind is Kind.SIGNED:
            raise ValueError("signed weights cannot be normalised: take their part with positive()")
        hidden = None if self.mask is None else ~rearrange(self.visible, "b q k -> b 1 1 q k")
        if self.form is Form.LOG:
            values = self.values if hidden is None else self.values.masked_fill(hidden, -torch.inf)
            empty = values.isneginf().all(dim=-1, keepdim=True)
            # the gradient of a softmax over no keys is NaN, even if its result is discarded
            # an empty row is replaced before the softmax and hidden again after it
            values = torch.where(empty, 0, values).log_softmax(dim=-1)
            values = values.masked_fill(empty, -torch.inf)
        else:
            values = self.values if hidden is None else self.values.masked_fill(hidden, 0)
            precise = torch.promote_types(values.dtype, torch.float32)
            total = values.sum(dim=-1, keepdim=True, dtype=precise)
            # where instead of an epsilon: small rows sum to one exactly and empty rows stay zero
            values = (values / torch.where(total > 0, total, 1)).to(values.dtype)
        return replace(self, values=values, kind=Kind.PROBABILITY)

    def block(self, query: str, key: str) -> "AttentionMap":
        """Return the weights from span `query` to span `key`, without renormalisation.

        Per-sample positions are gathered. A query or key that a sample does not have is masked and
        has no weight.

        Args:
            query: The name of a span of the query axis.
            key: The name of a span of the key axis.

        Returns:
            The block; probabilities become subprobabilities.

        Raises:
            ValueError: The span does not exist.

        Example:
            >>> axis = words(1, "class") + words(3, "text")
            >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 4, 4), axis, axis)
            >>> attention.block("class", "text").weights.flatten()
            tensor([0.2500, 0.2500, 0.2500])
        """
        rows, columns = self.queries.find(query).index, self.keys.find(key).index
        fill = -torch.inf if self.form is Form.LOG else 0.0
        values = _take(_take(self.values, rows, -2, fill), columns, -1, fill)
        mask = None
        if self.mask is not None or not (isinstance(rows, slice) and isinstance(columns, slice)):
            visible = rearrange(self.visible, "b q k -> b 1 1 q k")
            mask = _take(_take(visible, rows, -2, False), columns, -1, False)[:, 0, 0]
        # a part of a probability row sums to at most one
        kind = self.kind if self.kind is not Kind.PROBABILITY else Kind.SUBPROBABILITY
        return AttentionMap(
            values, self.keys.only(key), self.queries.only(query), mask, kind, self.form
        )

    def between(self, query: str, key: str) -> "AttentionMap":
        """Return the block from span `query` to span `key`, renormalised over its keys.

        Args:
            query: The name of a span of the query axis.
            key: The name of a span of the key axis.

        Returns:
            A map of probabilities.

        Raises:
            ValueError: The span does not exist, or the weights are signed.

        Example:
            >>> axis = words(1, "class") + words(2, "text")
            >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 3, 3), axis, axis)
            >>> attention.between("class", "text").weights.flatten()
            tensor([0.5000, 0.5000])
        """
        return self.block(query, key).normalize()

    def over_heads(self, fuse: Callable[..., Tensor] = torch.mean) -> "AttentionMap":
        """Fuse the heads into one.

        Args:
            fuse: Called as `fuse(weights, dim=, keepdim=True)`, such as `torch.mean` or
                `torch.amax`.

        Returns:
            A map with one head. The mean of probabilities is a probability; any other fusion of
            non-negative weights gives amounts.

        Example:
            >>> AttentionMap.from_scores(torch.zeros(1, 2, 8, 1, 4), grid(2, 2)).over_heads().shape
            (1, 2, 1, 1, 4)
        """
        return self._fuse(fuse, dim=2)

    def over_layers(self, fuse: Callable[..., Tensor] = torch.mean) -> "AttentionMap":
        """Fuse the layers into one.

        Args:
            fuse: Called as `fuse(weights, dim=, keepdim=True)`, such as `torch.mean` or
                `torch.amax`.

        Returns:
            A map with one layer.
        """
        return self._fuse(fuse, dim=1)

    def _fuse(self, fuse: Callable[..., Tensor], dim: int) -> "AttentionMap":
        # the mean of distributions is a distribution; a maximum or a product is not
        kept = fuse is torch.mean or self.kind is Kind.SIGNED
        return replace(
            self,
            # weights, not logarithms: the mean of logarithms would be a geometric mean
            values=fuse(self.weights, dim=dim, keepdim=True),
            kind=self.kind if kept else Kind.AMOUNT,
            form=Form.PLAIN,
        )

    def layer(self, index: int) -> "AttentionMap":
        """Return one layer; the axis is kept.

        Args:
            index: The index of the layer; negative indices count from the end.

        Returns:
            A map with one layer.

        Raises:
            IndexError: The layer does not exist.
        """
        _check_index("layer", index, self.values.shape[1])
        # a list keeps the axis, an int would drop it
        return replace(self, values=self.values[:, [index]])

    def head(self, index: int) -> "AttentionMap":
        """Return one head; the axis is kept.

        Args:
            index: The index of the head; negative indices count from the end.

        Returns:
            A map with one head.

        Raises:
            IndexError: The head does not exist.
        """
        _check_index("head", index, self.values.shape[2])
        return replace(self, values=self.values[:, :, [index]])

    def rows_as_samples(self) -> "AttentionMap":
        """Return every row as a sample with one global query, in the order (b l h q).

        Functions of one map per sample then compute a result for each layer, head and query.

        Returns:
            A map with b·l·h·q samples.

        Example:
            >>> attention = AttentionMap.from_scores(torch.zeros(2, 3, 4, 1, 5), words(5))
            >>> attention.rows_as_samples().shape
            (24, 1, 1, 1, 5)
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
            GLOBAL_QUERY,
            mask,
            self.kind,
            self.form,
        )

    def positive(self) -> "AttentionMap":
        """Return the map with zero in place of negative weights, as amounts.

        Returns:
            A map of amounts; `normalize()` makes it a map of probabilities.

        Example:
            >>> weights = torch.tensor([[[[[-1.0, 2.0]]]]])
            >>> signed = AttentionMap(weights, words(2), kind=Kind.SIGNED)
            >>> signed.positive().weights.flatten()
            tensor([0., 2.])
        """
        return replace(self, values=self.weights.clamp_min(0), kind=Kind.AMOUNT, form=Form.PLAIN)

    def sample(self, index: int) -> "AttentionMap":
        """Return one sample; the axis is kept.

        Args:
            index: The index of the sample; negative indices count from the end.

        Returns:
            A map with one sample.

        Raises:
            IndexError: The sample does not exist.

        Example:
            >>> AttentionMap.from_cells(torch.eye(3), words(3)).sample(-1).weights.flatten()
            tensor([0., 0., 1.])
        """
        _check_index("sample", index, len(self))
        # modulo turns a negative index into its position
        return self.select(torch.tensor([index % len(self)], device=self.values.device))

    def select(self, rows: Int[Tensor, " n"]) -> "AttentionMap":
        """Return some samples.

        Args:
            rows: The indices of the samples, in the order of the result.

        Returns:
            The map of these samples.

        Example:
            >>> AttentionMap.from_cells(torch.eye(3), words(3)).select(torch.tensor([2, 0])).shape
            (2, 1, 1, 1, 3)
        """
        return replace(
            self,
            values=self.values[rows],
            keys=self.keys.select(rows),
            queries=self.queries.select(rows),
            mask=None if self.mask is None else self.mask[rows],
            coverage=None if self.coverage is None else self.coverage[rows],
        )

    def restrict_keys(self, among: Bool[Tensor, "b k"]) -> "AttentionMap":
        """Return the map renormalised over some of its keys.

        Args:
            among: Which keys to keep, for each sample.

        Returns:
            A map of probabilities in which the other keys are masked.

        Example:
            >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 3), words(3))
            >>> attention.restrict_keys(torch.tensor([[True, True, False]])).weights.flatten()
            tensor([0.5000, 0.5000, 0.0000])
        """
        return replace(self, mask=self.visible & among[:, None]).normalize()

    def fused_cross_entropy(
        self, target: Float[Tensor, "b #l #h q k"], log_eps: float
    ) -> Float[Tensor, "b l h q"] | None:
        """Compute `-sum_k t log a` of each row without materialising the weights, if possible.

        Args:
            target: The target weights t.
            log_eps: The logarithm to use for weights of zero.

        Returns:
            The cross-entropy of each row, or None if it has to be computed from `log_weights`, as
            for every map whose weights are stored.
        """
        return None

    def detach(self) -> "AttentionMap":
        """Return the map without its gradient history."""
        return replace(self, values=self.values.detach())

    def to(self, device: torch.device | str) -> "AttentionMap":
        """Return the map on another device."""
        return replace(
            self,
            values=self.values.to(device),
            keys=self.keys.to(device),
            queries=self.queries.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            coverage=None if self.coverage is None else self.coverage.to(device),
        )

    def save(self, path: Path | str, photo: Any = None, **choice: Any) -> Path:
        """Draw one sample and write it: `.png` over a photo, `.svg` over a text, `.html` as a page.

        A `.png` or `.svg` of other maps is a figure of the whole map, with all layers and heads.

        Args:
            path: The file; its suffix chooses the format. The page has every layer and head.
            photo: The photo of the sample, as an array (height, width, 3) of 8-bit colours or a PIL
                image. A map of text has none.
            **choice: Which layer, head and query to draw, as for `overt.viz.overlay`.

        Returns:
            The path of the file.

        Raises:
            ValueError: The format is not supported, or the map has several samples, no place on
                the photo, or signed weights.

        Example:
            >>> import numpy as np
            >>> from tempfile import TemporaryDirectory
            >>> heat = AttentionMap.from_cells(torch.eye(4)[:1], grid(2, 2))
            >>> with TemporaryDirectory() as folder:
            ...     heat.save(f"{folder}/heat.png", np.zeros((64, 64, 3), np.uint8)).name
            'heat.png'
        """
        return _viz().save_picture(path, self, photo, **choice)

    def show(self, photo: Any = None, **choice: Any) -> Any:
        """Return an interactive view of one sample, which a notebook displays.

        Args:
            photo: The photo of the sample, as for `save`.
            **choice: `tokens`, `row`, `layer`, `head`, `query` or `title` of `overt.viz.view`.

        Returns:
            The view; its method `save` writes a page.

        Example:
            >>> heat = AttentionMap.from_cells(torch.eye(4)[:1], grid(2, 2))
            >>> "<iframe" in heat.show()._repr_html_()
            True
        """
        return _viz().view(self, photo, **choice)

    def _repr_html_(self) -> str:
        """Return the axes and a heat map of the first sample, for notebooks.

        The heat map is the last layer with its heads fused: the cells of a grid for one query, else
        queries by keys. `overt.viz.notebook.view` draws the map over its image and its words.
        """
        b, l, h, q, k = self.values.shape
        axes = f"{b} samples, {l} layers, {h} heads, {q} queries, {k} keys; {self.kind.value}"
        layouts = f"queries: {_describe(self.queries)}; keys: {_describe(self.keys)}"
        head = f"<p><b>AttentionMap</b> of {axes}<br>{escape(layouts)}</p>"
        if not self.values.numel():
            return head
        # one sample only: the map may be large, and notebooks show every value of a cell
        weights = self.weights[0, -1].detach().float().mean(dim=0).clamp_min(0).cpu()
        grids = [span for span in self.keys.spans if len(span.shape) == 2]
        if q == 1 and len(grids) == 1 and len(grids[0]) == k:
            weights = weights.reshape(grids[0].shape)
        return f'{head}<img alt="heat map" style="{_IMAGE_STYLE}" src="{_png_data_url(weights)}">'

    def check(self, tolerance: float | None = None) -> "AttentionMap":
        """Raise if the weights violate the map's kind.

        Args:
            tolerance: How far from one a row may sum; None allows for the rounding of the dtype.

        Returns:
            The map itself.

        Raises:
            ValueError: A weight is not finite, is on a masked key or has the wrong sign, or a row
                has the wrong sum.

        Example:
            >>> AttentionMap.from_cells(torch.tensor([[0.5, 0.5]]), words(2)).check().kind.value
            'amount'
        """
        weights = self.weights.detach()
        if tolerance is None:
            # rows of 16-bit weights sum to one only up to their rounding
            tolerance = max(1e-4, 10 * torch.finfo(weights.dtype).eps)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if not weights.isfinite().all():
            raise ValueError(f"{int((~weights.isfinite()).sum())} weights are not finite")
        shown = rearrange(self.visible, "b q k -> b 1 1 q k")
        hidden = weights.masked_fill(shown, 0)
        if hidden.any():
            raise ValueError(
                f"{int(hidden.count_nonzero())} weights are on masked keys, up to "
                f"{float(hidden.abs().max()):g}"
            )
        if self.kind is Kind.SIGNED:
            return self
        if (weights < 0).any():
            raise ValueError(
                f"{self.kind.value} weights must not be negative, got {float(weights.min()):g}"
            )
        sums = weights.sum(dim=-1)
        if self.kind is Kind.PROBABILITY:
            # a row of zeros is a query without a visible key
            wrong = ((sums - 1).abs() > tolerance) & (sums > 0)
        elif self.kind is Kind.SUBPROBABILITY:
            wrong = sums > 1 + tolerance
        else:
            return self
        if wrong.any():
            found = ", ".join(f"{one:.4g}" for one in sums[wrong][:3].tolist())
            most = "1" if self.kind is Kind.PROBABILITY else "at most 1"
            raise ValueError(
                f"{int(wrong.sum())} {self.kind.value} rows sum to {found}, ...: expected {most} "
                "over the keys (the last axis) of each query; for scores before the softmax use "
                'AttentionMap.from_scores, for a heat map kind="amount"'
            )
        return self


def _viz() -> Any:
    """Return `overt.viz`, which imports this module and so cannot be imported at its top."""
    return import_module("overt.viz")


def _check_index(axis: str, index: int, count: int) -> None:
    if not -count <= index < count:
        raise IndexError(f"{axis} index {index} is out of range for {count} {axis}s")


def _describe_span(span: Span) -> str:
    return f"{span.name} {'×'.join(map(str, span.shape))}"


def _describe(layout: Layout) -> str:
    return ", ".join(map(_describe_span, layout.spans))


_IMAGE_STYLE = "image-rendering:pixelated;height:240px;max-width:100%;border:1px solid #ccc"


def _png_data_url(weights: Float[Tensor, "r c"]) -> str:
    """Return a heat map as a data URL: zero is white and the largest weight is black."""
    from PIL import Image

    levels = 255 - (255 * weights / weights.max().clamp_min(1e-12)).round().to(torch.uint8)
    stream = BytesIO()
    Image.fromarray(levels.numpy()).save(stream, format="PNG")
    return f"data:image/png;base64,{b64encode(stream.getvalue()).decode()}"


def _take(values: Tensor, index: slice | Tensor, dim: int, fill: float | bool) -> Tensor:
    """Gather the positions `index` along an axis of (b, l, h, q, k), `fill` where index is -1."""
    if isinstance(index, slice):
        return values[..., index, :] if dim == -2 else values[..., index]
    shape = [len(index), 1, 1, 1, 1]
    shape[dim] = index.shape[1]
    # index (b, n) becomes (b, 1, 1, n, 1) for queries or (b, 1, 1, 1, n) for keys
    at = index.to(values.device).reshape(shape)
    sizes = list(values.shape)
    sizes[dim] = index.shape[1]
    taken = values.gather(dim, at.clamp_min(0).expand(sizes))
    return torch.where(at >= 0, taken, fill)
