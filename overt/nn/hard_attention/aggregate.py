"""Aggregate the kept cells: sum, mean, non-local attention or a relation network.

Malinowski et al. 2018, https://arxiv.org/abs/1808.00300, section 3.2; relation networks are those
of Santoro et al. 2017, https://arxiv.org/abs/1706.01427.

Work on pairs grows with the square of the number of cells, so hard attention saves most here.
Where samples keep different numbers of cells, layers run on the kept cells or pairs alone, packed
without padding, as soon as padding every sample to the largest would add more than `MAX_PADDING`
to the work; below that, packing costs more than it saves. On a CPU the non-local operator never
pads if samples keep `MIN_MEAN_CELLS` cells or more on average. On a GPU it reads kept cells in
place with Triton kernels (`triton_launch`), unless all samples keep the same number, above
`MAX_CELLS_IN_PLACE`; unsupported inputs are padded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.errors import UserError
from overt.nn.hard_attention import triton_launch
from overt.nn.hard_attention.selection import CellsInPlace, PackedCells, PaddedCells, SelectedCells
from overt.nn.hard_attention.varlen import summed_attention

MAX_PADDING = 0.1
MIN_MEAN_CELLS = 5  # per sample; below, one call per sample is slower than padding
MAX_CELLS_IN_PLACE = 48  # per sample; above, gathering is faster on a GPU


@runtime_checkable
class Aggregation(Protocol):
    """Protocol of a module that aggregates the kept cells of each sample into `width` features."""

    width: int

    def __call__(
        self, kept: SelectedCells, question: Float[Tensor, "b e"]
    ) -> Float[Tensor, "b s"]: ...

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Count the FLOPs of matrix products per sample for this number of cells."""
        ...

    def config(self) -> dict[str, Any]:
        """Return plain values from which `aggregation_from_config` builds the same module."""
        ...


class SumAggregation(nn.Module):
    """Sum of the kept cells.

    Args:
        cell: features of a cell.

    Example:
        >>> kept = PaddedCells(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
        >>> SumAggregation(2)(kept, question=torch.zeros(1, 3))
        tensor([[4., 6.]])
    """

    def __init__(self, cell: int) -> None:
        super().__init__()
        self.width = cell

    def forward(self, kept: SelectedCells, question: Float[Tensor, "b e"]) -> Float[Tensor, "b d"]:
        """Add the cells; the scale grows with their number, as in the paper."""
        return _sum_cells(kept)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Return zeros: there is no matrix product."""
        return torch.zeros_like(counts)

    def config(self) -> dict[str, Any]:
        """Return the kind and the width."""
        return {"kind": "sum", "cell": self.width}


class MeanAggregation(nn.Module):
    """Mean of the kept cells: its scale does not depend on their number.

    Args:
        cell: features of a cell.

    Example:
        >>> kept = PaddedCells(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
        >>> MeanAggregation(2)(kept, question=torch.zeros(1, 3))
        tensor([[2., 3.]])
    """

    def __init__(self, cell: int) -> None:
        super().__init__()
        self.width = cell

    def forward(self, kept: SelectedCells, question: Float[Tensor, "b e"]) -> Float[Tensor, "b d"]:
        """Average the cells; zero for a sample without cells."""
        total = _sum_cells(kept)
        if isinstance(kept, PackedCells):
            return total / torch.tensor(kept.counts).clamp_min(1).to(total)[:, None]
        if isinstance(kept, CellsInPlace):
            return total / kept.kept.sum(dim=1, keepdim=True).clamp_min(1)
        if kept.weights is None:
            return total / kept.values.shape[1]
        # soft weights may sum to less than one, so a clamp at 1 would change the mean
        return total / kept.weights.sum(dim=1, keepdim=True).clamp_min(1e-9)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Return zeros: there is no matrix product."""
        return torch.zeros_like(counts)

    def config(self) -> dict[str, Any]:
        """Return the kind and the width."""
        return {"kind": "mean", "cell": self.width}


def _sum_cells(kept: SelectedCells) -> Float[Tensor, "b d"]:
    if isinstance(kept, PackedCells):
        return _sum_by_sample(kept.packed, kept.sample_index, len(kept.counts))
    if isinstance(kept, CellsInPlace):
        # where instead of a product with the mask: 0 * inf of a dropped cell would be NaN
        return torch.where(kept.kept[..., None], kept.cells, 0).sum(dim=1)
    if kept.weights is None:
        return kept.values.sum(dim=1)
    return (kept.values * kept.weights[..., None]).sum(dim=1)


def _sum_by_sample(
    rows: Float[Tensor, "n d"], owners: Int[Tensor, " n"], samples: int
) -> Float[Tensor, "b d"]:
    """Sum the rows of each sample; in float32 or better, since they are added one by one."""
    precise = torch.promote_types(rows.dtype, torch.float32)
    empty = rows.new_zeros(samples, rows.shape[-1], dtype=precise)
    return empty.index_add(0, owners, rows.to(precise)).to(rows.dtype)


class NonLocalAggregation(nn.Module):
    """Non-local operator: every kept cell attends to all kept cells, and the results are summed.

    Equation 7, without biases and residual, as in the equation. Only the sum over queries is
    needed. So the attention that each cell receives is summed first, and values are projected once
    per head from one mixture of cells: the same result without a product of weights and values per
    query, and without a value projection per cell.

    Args:
        cell: features of a cell.
        size: features of all heads together.
        heads: number of heads.
        scale: factor on the scores; by default `(size / heads) ** -0.5` as in Vaswani et al. 1.0 is
            the equation as printed.

    Raises:
        ValueError: `size` is not divisible by `heads`.

    Example:
        >>> aggregate = NonLocalAggregation(cell=4, size=8, heads=2)
        >>> aggregate(PaddedCells(torch.rand(2, 3, 4)), question=torch.zeros(2, 5)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self, cell: int, size: int = 512, heads: int = 2, scale: float | None = None
    ) -> None:
        super().__init__()
        if size % heads:
            raise ValueError(f"size={size} is not divisible by heads={heads}")
        self.cell, self.width, self.heads = cell, size, heads
        # the argument as given, for `config`: None stays the default
        self.given = scale
        self.scale = (size // heads) ** -0.5 if scale is None else scale
        # one matrix for both, so that cells are read once
        self.query_and_key = nn.Linear(cell, 2 * size, bias=False)
        self.value = nn.Linear(cell, size, bias=False)

    def forward(self, kept: SelectedCells, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """Return the sum of the attention outputs of all kept cells."""
        if isinstance(kept, CellsInPlace):
            layer = self.query_and_key.weight
            few = kept.count is None or kept.count <= MAX_CELLS_IN_PLACE
            if few and triton_launch.supports_attention(kept.cells, layer, self.heads):
                seen = triton_launch.summed_attention(
                    kept.cells, kept.kept, layer, self.heads, self.scale
                )
                return self._project_values(seen)
            kept = kept.padded()
        if isinstance(kept, PaddedCells):
            both = self.query_and_key(kept.values)
            return self._attend(kept.values, both, kept.weights)
        if kept.packed.is_cpu and sum(kept.counts) >= MIN_MEAN_CELLS * len(kept.counts):
            both = self.query_and_key(kept.packed)
            if both.dtype == kept.packed.dtype:  # not under autocast
                seen = summed_attention(kept.packed, both, kept.counts, self.heads, self.scale)
                return self._project_values(seen)
        return self.forward_padded(kept)

    def forward_padded(self, kept: PackedCells) -> Float[Tensor, "b s"]:
        """Compute `forward` for samples of different sizes by padding."""
        if not any(kept.counts):
            # the sum keeps the graph: backward still reaches the cells, with a zero gradient
            return kept.packed.new_zeros(len(kept.counts), self.width) + 0 * kept.packed.sum()
        values = kept.pad(kept.packed)
        if _worth_packing(kept.counts, 1):
            # project before padding: the work of the projection grows with the rows
            both = kept.pad(self.query_and_key(kept.packed))
        else:
            both = self.query_and_key(values)
        return self._attend(values, both, kept.present.to(kept.packed.dtype))

    def _attend(
        self,
        values: Float[Tensor, "b m d"],
        both: Float[Tensor, "b m t"],
        amounts: Float[Tensor, "b m"] | None,
    ) -> Float[Tensor, "b s"]:
        """Attend over padded cells with weights."""
        # the output features are (query or key, head, feature of the head)
        query, key = rearrange(both, "b m (t h d) -> t b h m d", t=2, h=self.heads)
        scores = self.scale * (query @ key.mT)
        shares = _attention_received(
            scores.to(torch.promote_types(scores.dtype, torch.float32)), amounts
        )
        return self._project_values(shares.to(values.dtype) @ values)

    def _project_values(self, seen: Float[Tensor, "b h c"]) -> Float[Tensor, "b s"]:
        """Project the mixture of each head to values and concatenate the heads."""
        # the order of sums is exchanged: W_v (sum_k share_k x_k) instead of sum_k share_k (W_v x_k)
        values = self.value.weight.unflatten(0, (self.heads, -1))
        return torch.bmm(seen.transpose(0, 1), values.mT).transpose(0, 1).flatten(1)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Count queries and keys, their products, the mixture of cells, and one value per head."""
        d, s = self.cell, self.width
        # a multiply-add counts as two FLOPs; s = heads * width of a head
        return 4 * counts * d * s + 2 * counts**2 * s + 2 * self.heads * counts * d + 2 * d * s

    def config(self) -> dict[str, Any]:
        """Return the sizes and the scale."""
        return {
            "kind": "pairwise",
            "cell": self.cell,
            "size": self.width,
            "heads": self.heads,
            "scale": self.given,
        }


def _attention_received(
    scores: Float[Tensor, "b h m m"], amounts: Float[Tensor, "b m"] | None
) -> Float[Tensor, "b h m"]:
    """Sum the attention that each key receives from all queries; cells of weight 0 are excluded.

    The weights multiply inside the softmax instead of -inf on hidden keys, so that a
    straight-through weight of 0 still has a gradient.
    """
    if amounts is None:
        return scores.softmax(dim=-1).sum(dim=2)
    of_key = rearrange(amounts, "b m -> b 1 1 m")
    top = scores.detach().masked_fill(of_key == 0, -torch.inf).amax(dim=-1, keepdim=True)
    # a row without keys has top -inf, and -inf - -inf is NaN; an excluded key may be far above
    # top, and inf * 0 is NaN: hence the two clamps
    raised = (scores - top.clamp_min(torch.finfo(top.dtype).min)).clamp_max(30).exp() * of_key
    shares = raised / raised.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(raised.dtype).tiny)
    return (shares * rearrange(amounts, "b m -> b 1 m 1")).sum(dim=2)


class RelationAggregation(nn.Module):
    """Relation network: a small network on every ordered pair of cells, summed.

    Pairs of a cell with itself are included. The first layer on [a; b; question] is computed as
    W_a a + W_b b + W_q question, each part once per cell or sample: the same function as one
    `nn.Linear` on the concatenation, with the same weights, at a cost that grows with cells and not
    with pairs.

    Args:
        cell: features of a cell.
        question: features of the question.
        hidden: units of every layer.
        layers: number of layers.

    Example:
        >>> aggregate = RelationAggregation(cell=4, question=5, hidden=8, layers=2)
        >>> aggregate(PaddedCells(torch.rand(2, 3, 4)), question=torch.rand(2, 5)).shape
        torch.Size([2, 8])
    """

    def __init__(self, cell: int, question: int, hidden: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.sizes = {"cell": cell, "question": question, "hidden": hidden, "layers": layers}
        self.width = hidden
        self.first = nn.Linear(2 * cell + question, hidden)
        rest: list[nn.Module] = []
        for _ in range(layers - 1):
            rest += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True)]
        self.rest = nn.Sequential(*rest)

    def forward(self, kept: SelectedCells, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """Sum the outputs of all pairs; a pair has the product of the weights of its cells."""
        if isinstance(kept, CellsInPlace):
            kept = kept.padded()
        if isinstance(kept, PackedCells) and _worth_packing(kept.counts, 2):
            return self._over_packed(kept, question)
        if isinstance(kept, PackedCells):
            kept = PaddedCells(kept.pad(kept.packed), kept.present.to(kept.packed.dtype))
        left, right = self._first(kept.values)
        # the question is added to one side only: a pair gets it once
        right = right + self._project_question(question)[:, None]
        # all ordered pairs by broadcasting: (b, i, 1, s) + (b, 1, j, s)
        pairs = (left[:, :, None] + right[:, None]).relu_()
        # flatten the pairs: the output of a layer is then not a view, and the in-place ReLU needs
        # no copy of it in the backward pass, which would take as long as all the rest
        made = self.rest(pairs.flatten(0, 2)).unflatten(0, (len(pairs), left.shape[1] ** 2))
        if kept.weights is None:
            return made.sum(dim=1)
        # padding has weight 0, so a pair with a padded cell adds nothing
        amounts = einsum(kept.weights, kept.weights, "b i, b j -> b i j").to(made.dtype)
        return (amounts.flatten(1)[:, None] @ made)[:, 0]

    def _over_packed(
        self, kept: PackedCells, question: Float[Tensor, "b e"]
    ) -> Float[Tensor, "b s"]:
        """Compute `forward` for packed cells."""
        left, right = self._first(kept.packed)
        projected = self._project_question(question)
        right = right + projected.index_select(0, kept.sample_index)
        first, second, sample = (at.to(left.device) for at in cell_pairs(kept.counts))
        pairs = (left.index_select(0, first) + right.index_select(0, second)).relu_()
        return _sum_by_sample(self.rest(pairs), sample, len(kept.counts))

    def _first(
        self, cells: Float[Tensor, "*n d"]
    ) -> tuple[Float[Tensor, "*n s"], Float[Tensor, "*n s"]]:
        """Apply the first layer to cells as the first and as the second of a pair."""
        width = self.sizes["cell"]
        # columns of the weight: first cell, second cell, question
        of_first, of_second = self.first.weight[:, : 2 * width].chunk(2, dim=1)
        return nn.functional.linear(cells, of_first), nn.functional.linear(cells, of_second)

    def _project_question(self, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """Apply the first layer to the question, with its bias."""
        of_question = self.first.weight[:, 2 * self.sizes["cell"] :]
        return nn.functional.linear(question, of_question, self.first.bias)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Count the first layer per cell and the others per pair."""
        cell, question, hidden, layers = self.sizes.values()
        first = 4 * counts * cell * hidden + 2 * question * hidden
        return first + 2 * counts**2 * hidden * hidden * (layers - 1)

    def config(self) -> dict[str, Any]:
        """Return the sizes of the layers."""
        return {"kind": "relation", **self.sizes}


def cell_pairs(
    counts: Sequence[int],
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return all ordered pairs of packed cells of each sample: first cell, second cell, sample."""
    many = torch.tensor(counts, dtype=torch.long)
    # a sample with n cells has n * n pairs; `within` is the number of a pair in its sample
    squares = many.square()
    sample = torch.arange(len(counts)).repeat_interleave(squares)
    within = torch.arange(len(sample)) - (squares.cumsum(0) - squares)[sample]
    start, count = (many.cumsum(0) - many)[sample], many[sample]
    return start + within // count, start + within % count, sample


def _worth_packing(counts: Sequence[int], power: int) -> bool:
    """Return whether padding adds more than `MAX_PADDING` to work of this power of the cells."""
    # power 1: work per cell; power 2: work per pair
    needed = sum(count**power for count in counts)
    return len(counts) * max(counts) ** power > (1 + MAX_PADDING) * needed


def aggregation_from_config(config: Mapping[str, Any]) -> Aggregation:
    """Build the aggregation of a saved model."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "sum":
            return SumAggregation(**sizes)
        case "mean":
            return MeanAggregation(**sizes)
        case "pairwise":
            return NonLocalAggregation(**sizes)
        case "relation":
            return RelationAggregation(**sizes)
        case other:
            raise UserError(
                f"unknown aggregation {other!r}: expected sum, mean, pairwise or relation"
            )
