"""Attention of an image classifier to its own grid cells, at several levels.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391.
A compatibility scores the cells of a level against the descriptor g of the whole image, a softmax
turns the scores into weights (eq. 1), and the class is predicted from the weighted sums alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Layout
from overt.data.batch import Batch
from overt.errors import UserError
from overt.geometry import resize_by_area
from overt.nn.cnn import ImageFeatures
from overt.nn.output import Output

INIT_STD = 0.01  # of u. The paper's code has sqrt(2), which attends to a single cell at the start


@dataclass(frozen=True, eq=False)
class MultiLevelFeatures:
    """Grid cells of several layers, lowest first, and the query g of the whole image.

    `query` is None for a network without a query, and during training if the query cannot change
    the maps. To see its effect, swap in another image's query with `dataclasses.replace` (appendix
    A.5).
    """

    cells: tuple[ImageFeatures, ...]
    query: Float[Tensor, "b e"] | None = None


# --- compatibility of cells with the query


@runtime_checkable
class Compatibility(Protocol):
    """Protocol of a score for each cell from its features and the query, in float32 or better.

    Attributes:
        takes_query: whether the score takes a query.
        uses_query: whether the query can change the result: the softmax of the scores, or what
            `MeanWithQuery` adds. If it takes a query but does not use it, the query may be None.
    """

    takes_query: bool
    uses_query: bool

    def __call__(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]: ...


class UniformCompatibility(nn.Module):
    """The same score for every cell: average pooling, the control without attention."""

    takes_query = False
    uses_query = False

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """Return zeros."""
        # the softmax of zeros is 1/k
        return cells.new_zeros(cells.shape[:2], dtype=_score_dtype(cells.dtype))


class MeanWithQuery(UniformCompatibility):
    """Average pooling, to which `AttentionClassifier` adds `u * g`: no attention.

    The control with as many parameters as `AdditiveCompatibility`: the layers of the query are
    trained and used, and every cell has the same weight. Not in the paper.
    """

    takes_query = True
    uses_query = True

    def __init__(self, width: int, deviation: float = INIT_STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * deviation)

    def shift(self, query: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Return what is added to the mean of the cells."""
        return query * self.weight.to(query.dtype)


class DotCompatibility(nn.Module):
    """`scale <l, g>` (eq. 3; the paper has no scale)."""

    takes_query = True
    uses_query = True

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """Compute the dot product of each cell with the query."""
        assert query is not None
        # autocast would compute the product in 16 bits even if its inputs are cast to float32
        with torch.autocast(cells.device.type, enabled=False):
            kind = _score_dtype(cells.dtype)
            return self.scale * einsum(cells.to(kind), query.to(kind), "b k d, b d -> b k")


class ParametrisedCompatibility(nn.Module):
    """`<u, l + g>` with a learned u (eq. 2), and a bias as in the paper's code.

    `<u, g>` and the bias are the same for every cell, so the softmax removes them: the map does not
    depend on g, and g gets no gradient through it. The paper reports this as an observation (A.5);
    it is an identity. It holds up to rounding because `<u, l>` and `<u, g>` are computed separately
    in float32; the sum l + g in 16 bits would break it. With a sigmoid instead of the softmax, g
    would matter. Without a query the scores are those of a zero query.
    """

    takes_query = True
    uses_query = False

    def __init__(self, width: int, deviation: float = INIT_STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * deviation)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """Compute `<u, l>` of each cell, plus `<u, g>` if there is a query."""
        with torch.autocast(cells.device.type, enabled=False):
            kind = _score_dtype(cells.dtype)
            weight = self.weight.to(kind)
            scores = cells.to(kind) @ weight + self.bias
            return scores if query is None else scores + (query.to(kind) @ weight)[:, None]


class AdditiveCompatibility(nn.Module):
    """`<u, phi(l + g)>`: with phi between the sum and u, the query matters (Bahdanau 2014).

    Not in the paper; eq. 2 is derived from it.
    """

    takes_query = True
    uses_query = True

    def __init__(
        self,
        width: int,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        deviation: float = INIT_STD,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.randn(width) * deviation)

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """Compute the score of each cell added to the query."""
        assert query is not None
        with torch.autocast(cells.device.type, enabled=False):
            kind = _score_dtype(cells.dtype)
            joint = self.activation(cells.to(kind) + query.to(kind)[:, None])
            # phi does not distribute over l + g, so the sum has to be formed for every cell
            return joint @ self.weight.to(kind)


class BoundedCompatibility(nn.Module):
    """`<u, tanh(l)>`: the additive score without a query.

    Between `<u, l>`, whose scores have no bound, and `<u, tanh(l + g)>`: the difference to the
    first is the bound, and to the second the query. It takes a query and ignores it, so that a
    network has the same layers with all three. Not in the paper.
    """

    takes_query = True
    uses_query = False

    def __init__(self, width: int, deviation: float = INIT_STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * deviation)

    def forward(
        self, cells: Float[Tensor, "b k d"], query: Float[Tensor, "b d"] | None
    ) -> Float[Tensor, "b k"]:
        """Compute the score of each cell."""
        with torch.autocast(cells.device.type, enabled=False):
            kind = _score_dtype(cells.dtype)
            return torch.tanh(cells.to(kind)) @ self.weight.to(kind)


MakeCompatibility = Callable[[int], nn.Module]


def uniform_score(width: int) -> nn.Module:
    """Make the uniform score: average pooling.

    Args:
        width: features of a cell.

    Returns:
        A compatibility that is zero for every cell.

    Example:
        >>> uniform_score(8)(torch.rand(1, 4, 8), None).softmax(dim=-1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return UniformCompatibility()


def dot_score(width: int) -> nn.Module:
    """Make the paper's dot product, `dp`.

    Args:
        width: features of a cell.

    Returns:
        A compatibility without parameters (eq. 3).

    Example:
        >>> dot_score(2)(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[3.0, 4.0]]))
        tensor([[3., 8.]])
    """
    return DotCompatibility()


def scaled_dot_score(width: int) -> nn.Module:
    """Make the dot product divided by `sqrt(width)`.

    Args:
        width: features of a cell.

    Returns:
        A compatibility without parameters.

    Example:
        >>> cells = torch.eye(4)[None]
        >>> scaled_dot_score(4)(cells, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        tensor([[0.5000, 1.0000, 1.5000, 2.0000]])
    """
    return DotCompatibility(width**-0.5)


def parametrised_score(width: int) -> nn.Module:
    """Make the paper's parametrised compatibility, `pc`.

    Args:
        width: features of a cell.

    Returns:
        A compatibility with a learned vector and bias (eq. 2).

    Example:
        >>> score, cells = parametrised_score(8), torch.rand(1, 4, 8)
        >>> maps = [score(cells, query).softmax(dim=-1) for query in torch.rand(2, 1, 8)]
        >>> torch.allclose(*maps)  # the query cannot change the map
        True
    """
    return ParametrisedCompatibility(width)


def additive_score(width: int) -> nn.Module:
    """Make the additive compatibility, in which the query matters.

    Args:
        width: features of a cell.

    Returns:
        A compatibility with a learned vector.

    Example:
        >>> score, cells = additive_score(8), torch.rand(1, 4, 8)
        >>> maps = [score(cells, query).softmax(dim=-1) for query in torch.rand(2, 1, 8)]
        >>> torch.equal(*maps)  # the query changes the map
        False
    """
    return AdditiveCompatibility(width)


def bounded_score(width: int) -> nn.Module:
    """Make the additive compatibility without a query.

    Args:
        width: features of a cell.

    Returns:
        A compatibility with a learned vector.

    Example:
        >>> score = bounded_score(8)
        >>> bool((score(100 * torch.ones(1, 1, 8), None) - score.weight.sum()).abs() < 1e-6)
        True
    """
    return BoundedCompatibility(width)


def additive_relu_score(width: int) -> nn.Module:
    """Make the additive compatibility with a ReLU: the query matters, and scores have no bound.

    Args:
        width: features of a cell.

    Returns:
        A compatibility with a learned vector.

    Example:
        >>> score, cells = additive_relu_score(8), torch.rand(1, 4, 8)
        >>> maps = [score(cells, -query).softmax(dim=-1) for query in torch.rand(2, 1, 8)]
        >>> torch.equal(*maps)  # the query changes the map
        False
    """
    return AdditiveCompatibility(width, torch.relu)


def mean_with_query(width: int) -> nn.Module:
    """Make average pooling that adds the query: the control with as many parameters as `additive`.

    Args:
        width: features of a cell.

    Returns:
        A compatibility that is zero for every cell, with a learned vector.

    Example:
        >>> mean_with_query(8)(torch.rand(1, 4, 8), torch.rand(1, 8)).softmax(dim=-1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return MeanWithQuery(width)


SCORES: dict[str, MakeCompatibility] = {
    "uniform": uniform_score,
    "dot": dot_score,
    "scaled-dot": scaled_dot_score,
    "parametrised": parametrised_score,
    "additive": additive_score,
    "bounded": bounded_score,
    "additive-relu": additive_relu_score,
    "uniform-query": mean_with_query,
}


# --- attention at one level


def attend(
    cells: Float[Tensor, "b k d"],
    query: Float[Tensor, "b d"] | None,
    layout: Layout,
    compatibility: Compatibility,
) -> tuple[Float[Tensor, "b d"], AttentionMap]:
    """Return the mean of the cells weighted by the softmax of their scores (eq. 1), and the map.

    The number of cells may differ from training. A parametrised score without a query uses
    `attend_parametrised`: the same numbers in fewer passes over the cells, which dominate the cost.
    """
    if query is None and isinstance(compatibility, ParametrisedCompatibility):
        summary, logs = attend_parametrised(cells, compatibility.weight, compatibility.bias)
    else:
        # log-weights go into the map, so that losses on attention stay in log space
        logs = compatibility(cells, query).log_softmax(dim=-1)
        summary = einsum(logs.exp().to(cells.dtype), cells, "b k, b k d -> b d")
    return summary, AttentionMap(rearrange(logs, "b k -> b 1 1 1 k"), layout, form=Form.LOG)


def attend_parametrised(
    cells: Float[Tensor, "b k d"], weight: Float[Tensor, " d"], bias: Float[Tensor, ""]
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b k"]]:
    """Compute `attend` for `<u, l>` with a fused gradient; returns the mean and log-weights.

    The same as `ParametrisedCompatibility` without a query, followed by the softmax and the mean.
    """
    summary, logs = _AttendParametrised.apply(cells, weight, bias)
    return summary, logs


class _AttendParametrised(torch.autograd.Function):
    """Fused gradient of both paths of a cell: through its score and through the mean."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        kind = _score_dtype(cells.dtype)
        with torch.autocast(cells.device.type, enabled=False):
            precise = cells.to(kind)
            logs = (precise @ weight.to(kind) + bias).log_softmax(dim=-1)
            summary = torch.bmm(logs.exp().to(cells.dtype)[:, None], cells)[:, 0]
        ctx.set_materialize_grads(False)  # most maps have no loss
        ctx.save_for_backward(cells, precise, weight, bias, logs)
        return summary, logs

    @staticmethod
    def backward(
        ctx: Any, of_summary: Tensor | None, of_logs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        cells, precise, weight, bias, logs = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward: differentiate through the cells
            precise = cells.to(logs.dtype)
        shares = logs.exp()
        with torch.autocast(cells.device.type, enabled=False):
            if of_summary is None:
                of_summary = cells.new_zeros(len(cells), cells.shape[2])
            else:
                fits = torch.bmm(cells, of_summary[:, :, None])[:, :, 0] * shares
                # both paths meet at the log-weights: d/d log w of sum w <l, g> is w <l, g>
                of_logs = fits if of_logs is None else fits + of_logs
            if of_logs is None:
                return None, None, None
            # gradient of log_softmax
            of_scores = of_logs - shares * of_logs.sum(dim=-1, keepdim=True)
            of_weight = precise.flatten(0, 1).mT @ of_scores.flatten()
            # a cell gets `of_scores u` through its score and `shares of_summary` through the mean
            if cells.dtype == torch.bfloat16:
                of_cells = bf16_cell_gradient(of_scores, weight, shares, of_summary)
            else:
                of_cells = shares.to(cells.dtype)[..., None] * of_summary[:, None]
                of_cells = of_cells.addcmul_(of_scores[..., None], weight.to(logs.dtype))
        return of_cells, of_weight.to(weight.dtype), of_scores.sum().to(bias.dtype)


def bf16_cell_gradient(
    of_scores: Float[Tensor, "b k"],
    weight: Float[Tensor, " d"],
    shares: Float[Tensor, "b k"],
    of_summary: Float[Tensor, "b d"],
) -> Float[Tensor, "b k d"]:
    """Compute `of_scores u + shares of_summary` for every cell in bfloat16, in one pass.

    A float32 number is the sum of two bfloat16 halves up to 2^-17 of it, so the product of halves
    rounds the sum once; plain operations would round both terms and then their sum. Bfloat16 has
    the range of float32; halves in float16 could overflow.
    """
    cells, features = shares.shape[1], len(weight)
    whole = torch.cat([of_scores, shares, weight.expand(len(shares), -1)], dim=1)
    large = whole.bfloat16()
    small = (whole - large).bfloat16()
    (score, share, u), (score_rest, share_rest, u_rest) = (
        half.split([cells, cells, features], dim=1) for half in (large, small)
    )
    # the axis of five comes first: a GPU needs rows aligned to 16 bytes
    # (a + a')(b + b') without the product of the two rests, which is below the rounding of
    # bfloat16; of_summary is bfloat16 already and has no rest
    left = torch.stack([score, score_rest, score, share, share_rest], dim=1)
    right = torch.stack([u, u, u_rest, of_summary, of_summary], dim=1)
    return torch.bmm(left.mT, right)


def resize_mask(
    keep: Float[Tensor, "b k"], shapes: Sequence[tuple[int, int]]
) -> list[Float[Tensor, "b _"]]:
    """Resize a mask over one of these grids to all of them.

    A cell is kept by the kept share of its area: a finer one like the cell it lies in. The grid of
    the mask is identified by its number of cells.
    """
    own = [shape for shape in shapes if shape[0] * shape[1] == keep.shape[1]]
    if not own:
        sizes = ", ".join(f"{height} x {width}" for height, width in shapes)
        raise ValueError(f"the mask has {keep.shape[1]} cells, expected one of the grids {sizes}")
    height, width = own[0]
    square = rearrange(keep, "b (y x) -> b 1 y x", y=height, x=width)
    return [resize_by_area(square, shape).flatten(1) for shape in shapes]


def mask_levels(
    cells: Sequence[ImageFeatures], mask: Mapping[str, Tensor] | None
) -> list[Float[Tensor, "b k d"]]:
    """Return the features of all levels under an "image" mask over the grid of any level."""
    if mask is None or "image" not in mask:
        return [level.values for level in cells]
    shapes = [grid_shape(level.layout) for level in cells]
    keep = resize_mask(mask["image"].to(_score_dtype(cells[0].values.dtype)), shapes)
    return [level.masked({"image": one}) for level, one in zip(cells, keep, strict=True)]


# --- classifiers over the levels


def mean_of_probabilities(levels: Sequence[Float[Tensor, "b c"]]) -> Float[Tensor, "b c"]:
    """Compute the log of the mean probability over the levels: the paper's `indep`."""
    each = torch.stack(_log_probabilities(levels))
    # log of the mean of exp(log p), without leaving log space
    return each.logsumexp(dim=0) - math.log(len(each))


def product_of_probabilities(levels: Sequence[Float[Tensor, "b c"]]) -> Float[Tensor, "b c"]:
    """Compute the sum of the log-probabilities of the levels, as in the paper's code.

    That code uses the entry of the correct class as the loss without normalising the sum. A
    cross-entropy on these logits does normalise it: a product of experts.
    """
    return torch.stack(_log_probabilities(levels)).sum(dim=0)


def _log_probabilities(levels: Sequence[Tensor]) -> list[Tensor]:
    return [one.log_softmax(dim=-1, dtype=_score_dtype(one.dtype)) for one in levels]


class ConcatClassifier(nn.Module):
    """One linear layer on the concatenated levels: the paper's `concat`."""

    def __init__(self, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(sum(widths), classes)

    def forward(self, levels: Sequence[Float[Tensor, "b _"]]) -> Float[Tensor, "b c"]:
        """Return logits."""
        return self.linear(torch.cat(list(levels), dim=1))


class IndependentClassifiers(nn.Module):
    """One linear layer per level, with merged probabilities: the paper's `indep`."""

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
        """Return the log of the merged probabilities, to be used as logits."""
        each = [linear(one) for linear, one in zip(self.linear, levels, strict=True)]
        return self.merge(each)


MakeClassifier = Callable[[int, Sequence[int]], nn.Module]


def concat_levels(classes: int, widths: Sequence[int]) -> nn.Module:
    """Make one classifier on all levels, concatenated.

    Args:
        classes: number of classes.
        widths: features of each level.

    Returns:
        A module from the features of all levels to logits.

    Example:
        >>> concat_levels(5, widths=[8, 4])([torch.rand(2, 8), torch.rand(2, 4)]).shape
        torch.Size([2, 5])
    """
    return ConcatClassifier(classes, widths)


def average_levels(classes: int, widths: Sequence[int]) -> nn.Module:
    """Make one classifier per level; their probabilities are averaged.

    Args:
        classes: number of classes.
        widths: features of each level.

    Returns:
        A module from the features of all levels to log-probabilities.

    Example:
        >>> model = average_levels(2, widths=[8, 4])
        >>> for weight in model.parameters():
        ...     _ = nn.init.zeros_(weight)
        >>> model([torch.rand(1, 8), torch.rand(1, 4)]).exp().detach()  # the mean of 1/2 and 1/2
        tensor([[0.5000, 0.5000]])
    """
    return IndependentClassifiers(classes, widths)


def multiply_levels(classes: int, widths: Sequence[int]) -> nn.Module:
    """Make one classifier per level; their probabilities are multiplied.

    Args:
        classes: number of classes.
        widths: features of each level.

    Returns:
        A module from the features of all levels to logits.

    Example:
        >>> model = multiply_levels(2, widths=[8, 4])
        >>> for weight in model.parameters():
        ...     _ = nn.init.zeros_(weight)
        >>> model([torch.rand(1, 8), torch.rand(1, 4)]).exp().detach()  # 1/2 times 1/2
        tensor([[0.2500, 0.2500]])
    """
    return IndependentClassifiers(classes, widths, product_of_probabilities)


CLASSIFIERS: dict[str, MakeClassifier] = {
    "concat": concat_levels,
    "indep": average_levels,
    "product": multiply_levels,
}


def norm_relu_dropout(width: int, dropout: float) -> list[nn.Module]:
    """Return batch norm, ReLU and dropout, applied before a linear layer."""
    # eps as in the paper's Torch7 code
    return [nn.BatchNorm1d(width, eps=1e-3), nn.ReLU(), nn.Dropout(dropout)]


def scale_gradient(x: Float[Tensor, "*n"], factor: float) -> Float[Tensor, "*n"]:
    """Return the same values, with a gradient multiplied by a factor.

    With 1/n before n branches, the gradient is the mean over the branches instead of their sum, as
    in the paper's code.

    Args:
        x: values that branches use.
        factor: factor on their gradient.

    Returns:
        The values.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> scale_gradient(x, 0.5).sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000])
    """
    return x if factor == 1 else cast(Tensor, _ScaleGradient.apply(x, factor))


class _ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class AttentionClassifier(nn.Module):
    """Attention at each level, and a class predicted from the attended features alone.

    A query with another width than a level is projected; levels of the same width share the
    projection (section 4). Each weighted sum passes batch norm, ReLU and dropout, as in the paper's
    code.

    A query that cannot change the maps (`parametrised_score`) is skipped in training: maps, classes
    and gradients are the same without it. Its parameters stay at their initial values, since a zero
    gradient would only let weight decay act on them. In evaluation it is computed, so that it can
    be inspected and swapped.

    Args:
        classes: number of classes.
        widths: features of a cell at each level.
        query: features of the query.
        score: makes the compatibility of a level.
        decision: makes the classifier over the levels.
        dropout: dropout before each linear layer.

    Example:
        >>> from overt.attention import grid
        >>> cells = tuple(ImageFeatures(torch.rand(2, k * k, 8), grid(k, k)) for k in (4, 2))
        >>> model = AttentionClassifier(classes=5, widths=[8, 8], query=8).eval()
        >>> output = model(MultiLevelFeatures(cells, query=torch.rand(2, 8)))
        >>> output.prediction.shape, [len(one.keys) for one in output.attention]
        (torch.Size([2, 5]), [16, 4])
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int],
        query: int,
        score: MakeCompatibility = parametrised_score,
        decision: MakeClassifier = concat_levels,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.scores = nn.ModuleList(score(width) for width in widths)
        self.takes_query = any(one.takes_query for one in self.scores)
        self.uses_query = any(one.uses_query for one in self.scores)
        # sorted: the order of modules, and so of random initial weights, must not depend on a set
        others = sorted({width for width in widths if width != query}) if self.takes_query else []
        self.project = nn.ModuleDict(
            {
                str(width): nn.Sequential(
                    *norm_relu_dropout(query, dropout), nn.Linear(query, width)
                )
                for width in others
            }
        )
        self.prepare = nn.ModuleList(nn.Sequential(*norm_relu_dropout(w, dropout)) for w in widths)
        self.decision = decision(classes, widths)

    @property
    def wants_query(self) -> bool:
        """Whether to compute a query: if it can change a map, and always in eval mode."""
        return self.uses_query or (self.takes_query and not self.training)

    def forward(
        self, features: MultiLevelFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Output:
        """Return the classes and one map per level."""
        summaries, maps = self.attend_levels(features, mask)
        return Output(self.decision(summaries), maps)

    def attend_levels(
        self, features: MultiLevelFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Float[Tensor, "b _"]], tuple[AttentionMap, ...]]:
        """Return the attended features of each level, as the classifier gets them, and the maps."""
        queries: dict[int, Tensor] = {}
        summaries, maps = [], []
        for number, cells in enumerate(mask_levels(features.cells, mask)):
            width = cells.shape[-1]
            query = features.query if self.wants_query else None
            if query is not None and str(width) in self.project:
                # one projection per width and pass: a second call would draw another dropout mask
                if width not in queries:
                    queries[width] = self.project[str(width)](query)
                query = queries[width]
            layout = features.cells[number].layout
            score = cast(Compatibility, self.scores[number])
            summary, attention = attend(cells, query, layout, score)
            if isinstance(score, MeanWithQuery):
                assert query is not None
                summary = summary + score.shift(query)
            summaries.append(self.prepare[number](summary))
            maps.append(attention)
        return summaries, tuple(maps)


def grid_shape(layout: Layout) -> tuple[int, int]:
    """Return the rows and columns of the image grid of a layout."""
    height, width = layout.find("image").shape
    return height, width


def _score_dtype(kind: torch.dtype) -> torch.dtype:
    """Return the dtype of scores: 16 bits would round their differences away."""
    return torch.promote_types(kind, torch.float32)


def require_images(batch: Batch) -> Shaped[Tensor, "i 3 y x"]:
    """Return the images of a batch; raise if there are none."""
    if batch.images is None:
        raise ValueError("batch.images is None: an image classifier needs a batch with images")
    return batch.images


NamedT = TypeVar("NamedT")


def registered_name(known: Mapping[str, NamedT], function: NamedT, what: str) -> str:
    """Return the name under which a function is saved."""
    for name, one in known.items():
        if one is function:
            return name
    raise UserError(f"cannot save a custom {what}: expected one of {', '.join(known)}")
