"""What is made of the kept cells: their sum, their mean, or all pairs of them.

Malinowski et al. 2018, https://arxiv.org/abs/1808.00300, section 3.2; relation networks are those
of Santoro et al. 2017, https://arxiv.org/abs/1706.01427.

Work on pairs grows with the square of the cells, so this is where hard attention pays. Where
samples keep unequal numbers of cells, layers run on the kept cells or pairs alone, one after
another without gaps ("packed"), as soon as filling every sample up to the fullest would add more
than `SPARE` to the work; below that, the filled-up tensor is quicker.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.errors import BadInput
from overt.models.selection import Kept

SPARE = 0.1


@runtime_checkable
class Aggregate(Protocol):
    """A way to make one vector of `width` features out of the kept cells of each sample."""

    width: int

    def __call__(self, kept: Kept, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]: ...

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """The floating-point operations of matrix products for that many cells, a sample."""
        ...

    def config(self) -> dict[str, Any]:
        """Plain values from which `aggregate_from` builds the same module."""
        ...


class Sum(nn.Module):
    """The sum of the kept cells."""

    def __init__(self, cell: int) -> None:
        super().__init__()
        self.width = cell

    def forward(self, kept: Kept, question: Float[Tensor, "b e"]) -> Float[Tensor, "b d"]:
        """Cells added up; their scale grows with their number, as in the paper."""
        if kept.amounts is None:
            return kept.values.sum(dim=1)
        return (kept.values * kept.amounts[..., None]).sum(dim=1)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """None that are counted: there is no matrix product."""
        return torch.zeros_like(counts)

    def config(self) -> dict[str, Any]:
        """The name and the width."""
        return {"kind": "sum", "cell": self.width}


class Mean(nn.Module):
    """The mean of the kept cells: a scale that does not depend on how many they are."""

    def __init__(self, cell: int) -> None:
        super().__init__()
        self.width = cell

    def forward(self, kept: Kept, question: Float[Tensor, "b e"]) -> Float[Tensor, "b d"]:
        """Cells averaged; zero where a sample has none."""
        if kept.amounts is None:
            return kept.values.mean(dim=1)
        total = kept.amounts.sum(dim=1, keepdim=True)
        return (kept.values * kept.amounts[..., None]).sum(dim=1) / total.clamp_min(1e-9)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """None that are counted: there is no matrix product."""
        return torch.zeros_like(counts)

    def config(self) -> dict[str, Any]:
        """The name and the width."""
        return {"kind": "mean", "cell": self.width}


class Pairwise(nn.Module):
    """The non-local operator: every kept cell looks at every other, and all they saw is summed.

    Equation 7 with `heads` heads of `size / heads` features. Scores are divided by the root of that
    number, as Vaswani et al. do; `scale=1.0` is the equation as it is printed. There are no biases
    and no residual, as in the equation.

    Only the sum over the looking cells is wanted, so the shares a cell gets are added up first and
    values are taken once, of one mix of cells a head: the same result as eq. 7 with no product of
    weights and values a cell, and no value projection a cell.
    """

    def __init__(
        self, cell: int, size: int = 512, heads: int = 2, scale: float | None = None
    ) -> None:
        super().__init__()
        if size % heads:
            raise ValueError(f"{size} features do not part into {heads} heads")
        self.cell, self.width, self.heads = cell, size, heads
        self.given = scale
        self.scale = (size // heads) ** -0.5 if scale is None else scale
        self.query_and_key = nn.Linear(cell, 2 * size, bias=False)
        self.value = nn.Linear(cell, size, bias=False)

    def forward(self, kept: Kept, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """What all cells saw in all cells, summed over the cells that look."""
        both = self._projected(kept)
        query, key = rearrange(both, "b m (t h d) -> t b h m d", t=2, h=self.heads)
        scores = self.scale * (query @ key.mT)
        shares = _shares(scores.to(torch.promote_types(scores.dtype, torch.float32)), kept.amounts)
        seen = shares.to(kept.values.dtype) @ kept.values
        value = rearrange(self.value.weight, "(h d) c -> h c d", h=self.heads)
        return rearrange(rearrange(seen, "b h c -> h b c") @ value, "h b d -> b (h d)")

    def _projected(self, kept: Kept) -> Float[Tensor, "b m t"]:
        if not _worth_packing(kept, 1):
            return self.query_and_key(kept.values)
        rows = packed_rows(kept)
        packed = self.query_and_key(kept.values.flatten(0, 1).index_select(0, rows))
        b, m, _ = kept.values.shape
        empty = packed.new_zeros(b * m, packed.shape[-1])
        return empty.index_copy(0, rows, packed).unflatten(0, (b, m))

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Queries and keys, their products, the mix of cells, and one value a head."""
        d, s = self.cell, self.width
        return 4 * counts * d * s + 2 * counts**2 * s + 2 * self.heads * counts * d + 2 * d * s

    def config(self) -> dict[str, Any]:
        """The sizes, and the scale where it is not the usual one."""
        return {
            "kind": "pairwise",
            "cell": self.cell,
            "size": self.width,
            "heads": self.heads,
            "scale": self.given,
        }


def _shares(
    scores: Float[Tensor, "b h m m"], amounts: Float[Tensor, "b m"] | None
) -> Float[Tensor, "b h m"]:
    """How much each key gets of all queries together; a place of amount 0 gives and gets nothing.

    The amounts multiply inside the softmax, in the place of -inf on hidden keys: so a
    straight-through weight of 0 still has its gradient.
    """
    if amounts is None:
        return scores.softmax(dim=-1).sum(dim=2)
    of_key = rearrange(amounts, "b m -> b 1 1 m")
    top = scores.detach().masked_fill(of_key == 0, -torch.inf).amax(dim=-1, keepdim=True)
    raised = (scores - top.clamp_min(torch.finfo(top.dtype).min)).clamp_max(30).exp() * of_key
    shares = raised / raised.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(raised.dtype).tiny)
    return (shares * rearrange(amounts, "b m -> b 1 m 1")).sum(dim=2)


class Relation(nn.Module):
    """A relation network: a small network on every ordered pair of cells, with itself too, summed.

    The first layer on [a; b; question] is W_a a + W_b b + W_q question, each part taken once a cell
    or sample and then added: the same function, with the weights of one `nn.Linear` on the three
    side by side, at a cost that grows with cells and not with pairs.
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

    def forward(self, kept: Kept, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """The network's answers to all pairs, added up; a pair counts as much as both its cells."""
        counts = kept.counts if _worth_packing(kept, 2) else None
        cells = kept.values
        if counts is not None:
            cells = cells.flatten(0, 1).index_select(0, packed_rows(kept))
        cell = self.sizes["cell"]
        of_left, of_right, of_question = self.first.weight.split(
            [cell, cell, self.sizes["question"]], dim=1
        )
        left = nn.functional.linear(cells, of_left)
        right = nn.functional.linear(cells, of_right)
        asked = nn.functional.linear(question, of_question, self.first.bias)
        if counts is not None:
            return self._over_packed(left, right, asked, counts)
        pairs = self.rest((left[:, :, None] + (right + asked[:, None])[:, None]).relu_())
        if kept.amounts is None:
            return pairs.sum(dim=(1, 2))
        amounts = einsum(kept.amounts, kept.amounts, "b i, b j -> b i j").to(pairs.dtype)
        return einsum(pairs, amounts, "b i j s, b i j -> b s")

    def _over_packed(
        self,
        left: Float[Tensor, "n s"],
        right: Float[Tensor, "n s"],
        asked: Float[Tensor, "b s"],
        counts: Sequence[int],
    ) -> Float[Tensor, "b s"]:
        """The same over kept cells that stand one after another, sample after sample."""
        first, second, sample = (at.to(left.device) for at in pairs_of(counts))
        right = right + asked.index_select(0, sample_of(counts).to(left.device))
        pairs = (left.index_select(0, first) + right.index_select(0, second)).relu_()
        return torch.zeros_like(asked, dtype=left.dtype).index_add(0, sample, self.rest(pairs))

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """The first layer a cell, the others a pair."""
        cell, question, hidden, layers = self.sizes.values()
        first = 4 * counts * cell * hidden + 2 * question * hidden
        return first + 2 * counts**2 * hidden * hidden * (layers - 1)

    def config(self) -> dict[str, Any]:
        """The sizes of the layers."""
        return {"kind": "relation", **self.sizes}


def packed_rows(kept: Kept) -> Int[Tensor, " n"]:
    """Where the kept cells stand among all places of all samples.

    Worked out from the counts, which are known here: asking the device would be to wait for it.
    """
    assert kept.counts is not None
    most = kept.values.shape[1]
    places = torch.arange(most) < torch.tensor(kept.counts)[:, None]
    return places.flatten().nonzero()[:, 0].to(kept.values.device, non_blocking=True)


def sample_of(counts: Sequence[int]) -> Int[Tensor, " n"]:
    """The sample of each packed cell."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def pairs_of(
    counts: Sequence[int],
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"], Int[Tensor, " p"]]:
    """All ordered pairs of packed cells within each sample: first cell, second cell, sample."""
    many = torch.tensor(counts)
    squares = many.square()
    sample = torch.arange(len(counts)).repeat_interleave(squares)
    within = torch.arange(len(sample)) - (squares.cumsum(0) - squares)[sample]
    start, count = (many.cumsum(0) - many)[sample], many[sample]
    return start + within // count, start + within % count, sample


def _worth_packing(kept: Kept, power: int) -> bool:
    """Whether filling up would add more than `SPARE` to work that grows by that power of cells."""
    if kept.counts is None or kept.weights is not None:
        return False
    needed = sum(count**power for count in kept.counts)
    filled_up = len(kept.counts) * max(kept.counts) ** power
    return needed > 0 and filled_up > (1 + SPARE) * needed


def aggregate_from(config: Mapping[str, Any]) -> Aggregate:
    """The aggregation that a saved model was made with."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "sum":
            return Sum(**sizes)
        case "mean":
            return Mean(**sizes)
        case "pairwise":
            return Pairwise(**sizes)
        case "relation":
            return Relation(**sizes)
        case other:
            raise BadInput(
                f"aggregation of kind {other!r} is not one of sum, mean, pairwise, relation"
            )
