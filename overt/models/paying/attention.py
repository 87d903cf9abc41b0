"""Attention of a classifier to its own cells: at each level, those that fit the whole image.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391.
A compatibility scores the cells of a level against the descriptor g of the whole image, a softmax
makes weights of the scores (eq. 1), and the weighted sums alone decide on the class.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Layout
from overt.models.cnn import Cells
from overt.models.output import Output

SMALL = 0.01  # deviation of u at the start: sqrt(2), as in the paper's code, is one cell at once


@dataclass(frozen=True, eq=False)
class Levels:
    """An image as the cells of several layers, the lowest first, and the query g of the whole.

    `query` is None for a network that asks nothing, and while one trains to which it makes no
    difference. Put another image's query in its place with `dataclasses.replace` to see what the
    query does (appendix A.5).
    """

    cells: tuple[Cells, ...]
    query: Float[Tensor, "b e"] | None = None


# --- compatibility: how well a cell fits the query


@runtime_checkable
class Compatibility(Protocol):
    """A score for each cell, from its features and the query; in 32 bits at least.

    `asks` says whether a query is wanted at all, `heeds` whether it can change the softmax of the
    scores. One that asks and does not heed also answers without a query.
    """

    asks: bool
    heeds: bool

    def __call__(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]: ...


class Uniform(nn.Module):
    """Every cell fits alike: average pooling, the control that tells attention from resolution."""

    asks = False
    heeds = False

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """Zeros."""
        return cells.new_zeros(cells.shape[:2], dtype=_precise(cells.dtype))


class Dot(nn.Module):
    """`scale <l, g>` (eq. 3; the paper has no scale)."""

    asks = True
    heeds = True

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """The dot product of each cell with the query."""
        assert query is not None
        with torch.autocast(cells.device.type, enabled=False):
            kind = _precise(cells.dtype)
            return self.scale * einsum(cells.to(kind), query.to(kind), "b k d, b d -> b k")


class Parametrised(nn.Module):
    """`<u, l + g>` with a learned u (eq. 2), and a bias as in the paper's code.

    `<u, g>` and the bias are the same for every cell, so a softmax takes them out: the map does not
    depend on g, and g learns nothing through it. The paper reports this as an observation (A.5);
    it is an identity. It holds to rounding because `<u, l>` and `<u, g>` are computed apart, in 32
    bits; the sum l + g in 16 bits would break it. A sigmoid in the place of the softmax keeps g.
    Without a query the scores are those of a query of zeros.
    """

    asks = True
    heeds = False

    def __init__(self, width: int, deviation: float = SMALL) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * deviation)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """How much of what u looks for is in each cell, and in the query."""
        with torch.autocast(cells.device.type, enabled=False):
            kind = _precise(cells.dtype)
            weight = self.weight.to(kind)
            scores = cells.to(kind) @ weight + self.bias
            return scores if query is None else scores + (query.to(kind) @ weight)[:, None]


class Additive(nn.Module):
    """`<u, phi(l + g)>`: with phi between the sum and u, the query does decide (Bahdanau 2014).

    Not in the paper; it is what eq. 2 was taken from.
    """

    asks = True
    heeds = True

    def __init__(
        self,
        width: int,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        deviation: float = SMALL,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.randn(width) * deviation)

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """How much of what u looks for is in each cell joined with the query."""
        assert query is not None
        with torch.autocast(cells.device.type, enabled=False):
            kind = _precise(cells.dtype)
            joint = self.activation(cells.to(kind) + query.to(kind)[:, None])
            return joint @ self.weight.to(kind)


Score = Callable[[int], nn.Module]


def uniform(width: int) -> nn.Module:
    """Average pooling."""
    return Uniform()


def dot(width: int) -> nn.Module:
    """The paper's dot product, `dp`."""
    return Dot()


def scaled_dot(width: int) -> nn.Module:
    """The dot product over `sqrt(width)`, so that its size does not grow with the features."""
    return Dot(width**-0.5)


def parametrised(width: int) -> nn.Module:
    """The paper's parametrised compatibility, `pc`."""
    return Parametrised(width)


def additive(width: int) -> nn.Module:
    """The additive form in which the query decides."""
    return Additive(width)


SCORES: dict[str, Score] = {
    "uniform": uniform,
    "dot": dot,
    "scaled-dot": scaled_dot,
    "parametrised": parametrised,
    "additive": additive,
}


# --- attention at one level


def attend(
    cells: Float[Tensor, "b k d"],
    query: Float[Tensor, "b d"] | None,
    layout: Layout,
    compatibility: Compatibility,
) -> tuple[Float[Tensor, "b d"], AttentionMap]:
    """The mean of the cells weighted by the softmax of their scores (eq. 1), and the weights.

    There may be any number of cells, another one than in training too. A learned u that no query
    is added to has a gradient of its own (`weighed`): the same numbers in fewer passes over the
    cells, which are most of what attention costs.
    """
    if query is None and isinstance(compatibility, Parametrised):
        summary, logs = weighed(cells, compatibility.weight, compatibility.bias)
    else:
        logs = compatibility(cells, query).log_softmax(dim=-1)
        summary = einsum(logs.exp().to(cells.dtype), cells, "b k, b k d -> b d")
    return summary, AttentionMap(rearrange(logs, "b k -> b 1 1 1 k"), layout, form=Form.LOG)


def weighed(
    cells: Float[Tensor, "b k d"], weight: Float[Tensor, " d"], bias: Float[Tensor, ""]
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b k"]]:
    """The mean of the cells weighted by the softmax of `<u, l>`, and the logarithms of the weights.

    The same as `Parametrised` without a query and what `attend` makes of its scores.
    """
    summary, logs = _Weighed.apply(cells, weight, bias)
    return summary, logs


class _Weighed(torch.autograd.Function):
    """Both ways by which a cell counts, its score and its part in the mean, in one gradient."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        kind = _precise(cells.dtype)
        with torch.autocast(cells.device.type, enabled=False):
            precise = cells.to(kind)
            logs = (precise @ weight.to(kind) + bias).log_softmax(dim=-1)
            summary = torch.bmm(logs.exp().to(cells.dtype)[:, None], cells)[:, 0]
        ctx.set_materialize_grads(False)  # most maps have no loss of their own
        ctx.save_for_backward(cells, precise, weight, bias, logs)
        return summary, logs

    @staticmethod
    def backward(
        ctx: Any, of_summary: Tensor | None, of_logs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        cells, precise, weight, bias, logs = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: by way of the cells themselves
            precise = cells.to(logs.dtype)
        shares = logs.exp()
        with torch.autocast(cells.device.type, enabled=False):
            if of_summary is None:
                of_summary = cells.new_zeros(len(cells), cells.shape[2])
            else:
                fits = torch.bmm(cells, of_summary[:, :, None])[:, :, 0] * shares
                of_logs = fits if of_logs is None else fits + of_logs
            if of_logs is None:
                return None, None, None
            of_scores = of_logs - shares * of_logs.sum(dim=-1, keepdim=True)
            of_weight = precise.flatten(0, 1).mT @ of_scores.flatten()
            if cells.dtype == torch.bfloat16:
                of_cells = in_halves(of_scores, weight, shares, of_summary)
            else:
                of_cells = shares.to(cells.dtype)[..., None] * of_summary[:, None]
                of_cells = of_cells.addcmul_(of_scores[..., None], weight.to(logs.dtype))
        return of_cells, of_weight.to(weight.dtype), of_scores.sum().to(bias.dtype)


def in_halves(
    of_scores: Float[Tensor, "b k"],
    weight: Float[Tensor, " d"],
    shares: Float[Tensor, "b k"],
    of_summary: Float[Tensor, "b d"],
) -> Float[Tensor, "b k d"]:
    """`of_scores u + shares of_summary` for every cell, in bfloat16, in one pass over the cells.

    A number of 32 bits is the sum of two halves of sixteen but for 2^-17 of it, so the product of
    halves rounds the sum once, where plain operations round both parts and then their sum.
    Bfloat16 has the range of 32 bits; float16 has not, and its halves could overflow.
    """
    cells, features = shares.shape[1], len(weight)
    whole = torch.cat([of_scores, shares, weight.expand(len(shares), -1)], dim=1)
    large = whole.bfloat16()
    small = (whole - large).bfloat16()
    (score, share, u), (score_rest, share_rest, u_rest) = (
        half.split([cells, cells, features], dim=1) for half in (large, small)
    )
    # cells and features lie side by side, not the five: a card wants rows of sixteen bytes
    left = torch.stack([score, score_rest, score, share, share_rest], dim=1)
    right = torch.stack([u, u, u_rest, of_summary, of_summary], dim=1)
    return torch.bmm(left.mT, right)


def carry(
    keep: Float[Tensor, "b k"], shapes: Sequence[tuple[int, int]]
) -> list[Float[Tensor, "b _"]]:
    """A mask over the cells of one of these grids, as a mask over the cells of each.

    A coarser cell is kept by the share of it that is kept, a finer one as the cell it lies in.
    Grids are told apart by their number of cells.
    """
    own = [shape for shape in shapes if shape[0] * shape[1] == keep.shape[1]]
    if not own:
        sizes = ", ".join(f"{height} x {width}" for height, width in shapes)
        raise ValueError(f"a mask of {keep.shape[1]} cells fits none of the grids {sizes}")
    height, width = own[0]
    square = rearrange(keep, "b (y x) -> b 1 y x", y=height, x=width)
    return [nn.functional.adaptive_avg_pool2d(square, shape).flatten(1) for shape in shapes]


def masked(
    cells: Sequence[Cells], mask: Mapping[str, Tensor] | None
) -> list[Float[Tensor, "b k d"]]:
    """The features of every level under a mask called "image" over the grid of any of them."""
    if mask is None or "image" not in mask:
        return [level.values for level in cells]
    shapes = [shape_of(level.layout) for level in cells]
    keep = carry(mask["image"].to(_precise(cells[0].values.dtype)), shapes)
    return [level.masked({"image": one}) for level, one in zip(cells, keep, strict=True)]


# --- from the levels to a class


def mean_of_probabilities(levels: Sequence[Float[Tensor, "b c"]]) -> Float[Tensor, "b c"]:
    """The logarithm of the mean over the levels of their probabilities: the paper's `indep`."""
    each = torch.stack(_log_probabilities(levels))
    return each.logsumexp(dim=0) - math.log(len(each))


def product_of_probabilities(levels: Sequence[Float[Tensor, "b c"]]) -> Float[Tensor, "b c"]:
    """The sum over the levels of their log-probabilities, as the paper's code has it.

    That code takes the entry of the right class for its loss, without making the sum a
    distribution. A cross-entropy of these logits does make it one: a product of experts.
    """
    return torch.stack(_log_probabilities(levels)).sum(dim=0)


def _log_probabilities(levels: Sequence[Tensor]) -> list[Tensor]:
    return [one.log_softmax(dim=-1, dtype=_precise(one.dtype)) for one in levels]


class Concatenated(nn.Module):
    """One linear layer on all levels side by side: the paper's `concat`."""

    def __init__(self, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(sum(widths), classes)

    def forward(self, levels: Sequence[Float[Tensor, "b _"]]) -> Float[Tensor, "b c"]:
        """Logits."""
        return self.linear(torch.cat(list(levels), dim=1))


class Independent(nn.Module):
    """One linear layer a level, and their probabilities merged: the paper's `indep`."""

    def __init__(
        self,
        classes: int,
        widths: Sequence[int],
        merge: Callable[[Sequence[Tensor]], Tensor] = mean_of_probabilities,
    ) -> None:
        super().__init__()
        self.merge = merge
        self.linear = nn.ModuleList(nn.Linear(width, classes) for width in widths)

    def forward(self, levels: Sequence[Float[Tensor, "b _"]]) -> Float[Tensor, "b c"]:
        """Logarithms of the merged probabilities, which serve as logits."""
        each = [linear(one) for linear, one in zip(self.linear, levels, strict=True)]
        return self.merge(each)


Decision = Callable[[int, Sequence[int]], nn.Module]


def concat(classes: int, widths: Sequence[int]) -> nn.Module:
    """One classifier of all levels together."""
    return Concatenated(classes, widths)


def indep(classes: int, widths: Sequence[int]) -> nn.Module:
    """A classifier a level; the mean of their probabilities."""
    return Independent(classes, widths)


def product(classes: int, widths: Sequence[int]) -> nn.Module:
    """A classifier a level; the product of their probabilities."""
    return Independent(classes, widths, product_of_probabilities)


DECISIONS: dict[str, Decision] = {"concat": concat, "indep": indep, "product": product}


def prepared(width: int, dropout: float) -> list[nn.Module]:
    """What a vector passes before a linear layer: batch norm, ReLU, dropout."""
    return [nn.BatchNorm1d(width, eps=1e-3), nn.ReLU(), nn.Dropout(dropout)]


class AttentionClassifier(nn.Module):
    """Attention at each level, and a class from nothing but what was attended to.

    `widths` are the features of a cell at each level. Where they are not those of the query, the
    query is brought to them by one projection a width, which levels of that width share (section
    4). Each weighted sum passes batch norm, ReLU and dropout, as in the paper's code.

    A query that cannot change the maps (`parametrised`) is left out while training: maps, classes
    and what is learned are the same without it. Its parameters stay as they began, since a gradient
    of zero would only let them decay. In evaluation it is there, to be looked at and swapped.
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int],
        query: int,
        score: Score = parametrised,
        decision: Decision = concat,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.scores = nn.ModuleList(score(width) for width in widths)
        self.asks = any(one.asks for one in self.scores)
        self.heeds = any(one.heeds for one in self.scores)
        others = sorted({width for width in widths if width != query}) if self.asks else []
        self.project = nn.ModuleDict(
            {
                str(width): nn.Sequential(*prepared(query, dropout), nn.Linear(query, width))
                for width in others
            }
        )
        self.prepare = nn.ModuleList(nn.Sequential(*prepared(w, dropout)) for w in widths)
        self.decision = decision(classes, widths)

    @property
    def wants_query(self) -> bool:
        """Whether a query is to be computed: always if it can change a map, else to be shown."""
        return self.heeds or (self.asks and not self.training)

    def forward(self, features: Levels, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes, and one map a level."""
        summaries, maps = self.look(features, mask)
        return Output(self.decision(summaries), maps)

    def look(
        self, features: Levels, mask: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Float[Tensor, "b _"]], tuple[AttentionMap, ...]]:
        """What each level hands to the classifier, and the map behind it."""
        queries: dict[int, Tensor] = {}
        summaries, maps = [], []
        for number, cells in enumerate(masked(features.cells, mask)):
            width = cells.shape[-1]
            query = features.query if self.wants_query else None
            if query is not None and str(width) in self.project:
                if width not in queries:
                    queries[width] = self.project[str(width)](query)
                query = queries[width]
            layout = features.cells[number].layout
            score = cast(Compatibility, self.scores[number])
            summary, attention = attend(cells, query, layout, score)
            summaries.append(self.prepare[number](summary))
            maps.append(attention)
        return summaries, tuple(maps)


def shape_of(layout: Layout) -> tuple[int, int]:
    """Rows and columns of a grid of the image."""
    height, width = layout.find("image").shape
    return height, width


def _precise(kind: torch.dtype) -> torch.dtype:
    """The number format of scores: sixteen bits would round the differences away."""
    return torch.promote_types(kind, torch.float32)
