"""What is made of the kept cells: their sum, their mean, or all pairs of them.

Malinowski et al. 2018, https://arxiv.org/abs/1808.00300, section 3.2; relation networks are those
of Santoro et al. 2017, https://arxiv.org/abs/1706.01427.

Work on pairs grows with the square of the cells, so this is where hard attention pays. Where
samples keep unequal numbers of cells, layers run on the kept cells or pairs alone, one after
another without gaps ("packed"), as soon as filling every sample up to the fullest would add more
than `SPARE` to the work; below that it is not worth the copying. On a CPU the non-local operator
fills up nothing at all, where samples keep `FEW` cells or more on average. On a card it reads kept
cells where they stand, by kernels of our own (`card`), unless all samples keep the same number and
that is above `STANDING`; what kernels cannot take is filled up there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.errors import BadInput
from overt.models.hard import card
from overt.models.hard.ragged import seen_by_all
from overt.models.hard.selection import Chosen, Kept, Ragged, Standing

SPARE = 0.1
FEW = 5  # cells a sample below which a call a sample takes longer than filling samples up
STANDING = 48  # cells of every sample above which gathered ones are quicker on a card


@runtime_checkable
class Aggregate(Protocol):
    """A way to make one vector of `width` features out of the kept cells of each sample."""

    width: int

    def __call__(self, kept: Chosen, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]: ...

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

    def forward(self, kept: Chosen, question: Float[Tensor, "b e"]) -> Float[Tensor, "b d"]:
        """Cells added up; their scale grows with their number, as in the paper."""
        return _added(kept)

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

    def forward(self, kept: Chosen, question: Float[Tensor, "b e"]) -> Float[Tensor, "b d"]:
        """Cells averaged; zero where a sample has none."""
        total = _added(kept)
        if isinstance(kept, Ragged):
            return total / torch.tensor(kept.counts).clamp_min(1).to(total)[:, None]
        if isinstance(kept, Standing):
            return total / kept.kept.sum(dim=1, keepdim=True).clamp_min(1)
        if kept.weights is None:
            return total / kept.values.shape[1]
        return total / kept.weights.sum(dim=1, keepdim=True).clamp_min(1e-9)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """None that are counted: there is no matrix product."""
        return torch.zeros_like(counts)

    def config(self) -> dict[str, Any]:
        """The name and the width."""
        return {"kind": "mean", "cell": self.width}


def _added(kept: Chosen) -> Float[Tensor, "b d"]:
    if isinstance(kept, Ragged):
        return _summed(kept.packed, kept.owners, len(kept.counts))
    if isinstance(kept, Standing):
        return torch.where(kept.kept[..., None], kept.cells, 0).sum(dim=1)
    if kept.weights is None:
        return kept.values.sum(dim=1)
    return (kept.values * kept.weights[..., None]).sum(dim=1)


def _summed(
    rows: Float[Tensor, "n d"], owners: Int[Tensor, " n"], samples: int
) -> Float[Tensor, "b d"]:
    """The sum of each sample's rows; in float32 at least, since they are added one by one."""
    precise = torch.promote_types(rows.dtype, torch.float32)
    empty = rows.new_zeros(samples, rows.shape[-1], dtype=precise)
    return empty.index_add(0, owners, rows.to(precise)).to(rows.dtype)


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

    def forward(self, kept: Chosen, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """What all cells saw in all cells, summed over the cells that look."""
        if isinstance(kept, Standing):
            layer = self.query_and_key.weight
            few = kept.count is None or kept.count <= STANDING
            if few and card.can_look(kept.cells, layer, self.heads):
                seen = card.seen_by_all(kept.cells, kept.kept, layer, self.heads, self.scale)
                return self._valued(seen)
            kept = kept.side_by_side()
        if isinstance(kept, Kept):
            both = self.query_and_key(kept.values)
            return self._looked(kept.values, both, kept.weights)
        if kept.packed.is_cpu and sum(kept.counts) >= FEW * len(kept.counts):
            both = self.query_and_key(kept.packed)
            if both.dtype == kept.packed.dtype:  # not while torch chooses formats of its own
                seen = seen_by_all(kept.packed, both, kept.counts, self.heads, self.scale)
                return self._valued(seen)
        return self.filled_up(kept)

    def filled_up(self, kept: Ragged) -> Float[Tensor, "b s"]:
        """The same for unequal samples, each filled up to the fullest."""
        if not any(kept.counts):
            return kept.packed.new_zeros(len(kept.counts), self.width) + 0 * kept.packed.sum()
        values = kept.filled(kept.packed)
        if _worth_packing(kept.counts, 1):
            both = kept.filled(self.query_and_key(kept.packed))
        else:
            both = self.query_and_key(values)
        return self._looked(values, both, kept.present.to(kept.packed.dtype))

    def _looked(
        self,
        values: Float[Tensor, "b m d"],
        both: Float[Tensor, "b m t"],
        amounts: Float[Tensor, "b m"] | None,
    ) -> Float[Tensor, "b s"]:
        """What cells side by side saw, where places count by their amounts."""
        query, key = rearrange(both, "b m (t h d) -> t b h m d", t=2, h=self.heads)
        scores = self.scale * (query @ key.mT)
        shares = _shares(scores.to(torch.promote_types(scores.dtype, torch.float32)), amounts)
        return self._valued(shares.to(values.dtype) @ values)

    def _valued(self, seen: Float[Tensor, "b h c"]) -> Float[Tensor, "b s"]:
        """The values of one mix of cells a head, side by side."""
        values = self.value.weight.unflatten(0, (self.heads, -1))
        return torch.bmm(seen.transpose(0, 1), values.mT).transpose(0, 1).flatten(1)

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

    def forward(self, kept: Chosen, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """The network's answers to all pairs, added up; a pair counts as much as both its cells."""
        if isinstance(kept, Standing):
            kept = kept.side_by_side()
        if isinstance(kept, Ragged) and _worth_packing(kept.counts, 2):
            return self._over_packed(kept, question)
        if isinstance(kept, Ragged):
            kept = Kept(kept.filled(kept.packed), kept.present.to(kept.packed.dtype))
        left, right = self._first(kept.values)
        right = right + self._asked(question)[:, None]
        pairs = (left[:, :, None] + right[:, None]).relu_()
        # one long list of pairs: a layer's answer is then no view, and a ReLU in its place needs
        # no copies of it in the backward pass, which would take as long as all the rest
        made = self.rest(pairs.flatten(0, 2)).unflatten(0, (len(pairs), left.shape[1] ** 2))
        if kept.weights is None:
            return made.sum(dim=1)
        amounts = einsum(kept.weights, kept.weights, "b i, b j -> b i j").to(made.dtype)
        return (amounts.flatten(1)[:, None] @ made)[:, 0]

    def _over_packed(self, kept: Ragged, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """The same over kept cells that stand one after another, sample after sample."""
        left, right = self._first(kept.packed)
        asked = self._asked(question)
        right = right + asked.index_select(0, kept.owners)
        first, second, sample = (at.to(left.device) for at in pairs_of(kept.counts))
        pairs = (left.index_select(0, first) + right.index_select(0, second)).relu_()
        return _summed(self.rest(pairs), sample, len(kept.counts))

    def _first(
        self, cells: Float[Tensor, "*n d"]
    ) -> tuple[Float[Tensor, "*n s"], Float[Tensor, "*n s"]]:
        """What the first layer makes of a cell as the first and as the second of a pair."""
        width = self.sizes["cell"]
        of_first, of_second = self.first.weight[:, : 2 * width].chunk(2, dim=1)
        return nn.functional.linear(cells, of_first), nn.functional.linear(cells, of_second)

    def _asked(self, question: Float[Tensor, "b e"]) -> Float[Tensor, "b s"]:
        """What the first layer makes of the question, with its bias."""
        of_question = self.first.weight[:, 2 * self.sizes["cell"] :]
        return nn.functional.linear(question, of_question, self.first.bias)

    def flops(self, counts: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """The first layer a cell, the others a pair."""
        cell, question, hidden, layers = self.sizes.values()
        first = 4 * counts * cell * hidden + 2 * question * hidden
        return first + 2 * counts**2 * hidden * hidden * (layers - 1)

    def config(self) -> dict[str, Any]:
        """The sizes of the layers."""
        return {"kind": "relation", **self.sizes}


def pairs_of(
    counts: Sequence[int],
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"], Int[Tensor, " p"]]:
    """All ordered pairs of packed cells within each sample: first cell, second cell, sample."""
    many = torch.tensor(counts, dtype=torch.long)
    squares = many.square()
    sample = torch.arange(len(counts)).repeat_interleave(squares)
    within = torch.arange(len(sample)) - (squares.cumsum(0) - squares)[sample]
    start, count = (many.cumsum(0) - many)[sample], many[sample]
    return start + within // count, start + within % count, sample


def _worth_packing(counts: Sequence[int], power: int) -> bool:
    """Whether filling up would add more than `SPARE` to work that grows by that power of cells."""
    needed = sum(count**power for count in counts)
    return len(counts) * max(counts) ** power > (1 + SPARE) * needed


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
