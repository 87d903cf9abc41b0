"""Which tokens stay: scores to choose by, and what becomes of the rest.

The rule of Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by
Bootstrapping Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300, section 3.1, put
between the layers of a Transformer: the L2 norm of a token says how much it matters. Beside it are
its controls: chance, an even grid, and the attention of the class token with the rest fused, as in
Liang, Ge, Tong, Song, Wang and Xie, "Not All Patches Are What You Need" (EViT), ICLR 2022,
https://arxiv.org/abs/2202.07800. EViT cuts between the attention and the MLP of a layer; here it is
done after the layer, whose inside belongs to the model.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Layout
from overt.capture.call import Call
from overt.models.hard.selection import Rule, kept_by, presence
from overt.models.thinning.tokens import Plan, Step, Tokens, extended, gathered

Score = Callable[[Tokens], Float[Tensor, "b k"]]
Rest = Callable[[Tokens, Bool[Tensor, "b k"], Float[Tensor, "b k"]], Float[Tensor, "b d"]]


def choosing(keep: Rule, score: Score, rest: Rest | None = None) -> Plan:
    """A step that keeps what `keep` says of the scores; `rest` makes one token of all others.

    A rule sees the free tokens alone: all others score -inf and are kept as they are. Scores
    choose and have no gradient themselves; `rest` is given them with theirs.
    """
    if not callable(keep):
        raise TypeError(
            f"keep is a rule of scores, such as functools.partial(models.keep_top, count=49), and "
            f"not {keep!r}"
        )

    def plan(tokens: Tokens) -> Step:
        scores = score(tokens)
        free = scores.detach().masked_fill(~tokens.free, -torch.inf)
        chosen = kept_by(keep, free) & tokens.free
        step = replace(gathered(tokens, chosen | (tokens.there & ~tokens.free)), scores=free)
        gone = tokens.free & ~chosen
        some = gone.any(dim=1)
        if rest is None or not bool(some.any()):
            return step
        return extended(step, rest(tokens, gone, scores), some)

    return plan


# --- scores


def by_presence(tokens: Tokens) -> Float[Tensor, "b k"]:
    """The L2 norm of each token's hidden state (HAN, eq. 5)."""
    return presence(tokens.states)


def by_class_attention(tokens: Tokens) -> Float[Tensor, "b k"]:
    """How much the class token looks at each token in the layer before, mean over heads (EViT).

    In a model without a class token, the mean over all tokens that are there.
    """
    call = _attention(tokens, "by_class_attention")
    rows = _class_rows(tokens)
    if rows is not None:
        return call.weights(rows).mean(dim=1)[:, 0]
    weights = call.weights().mean(dim=1)
    share = tokens.there / tokens.there.sum(dim=1, keepdim=True)
    return (weights * share[..., None].to(weights.dtype)).sum(dim=1)


def by_chance(generator: torch.Generator) -> Score:
    """Scores drawn anew for each sample and step: the control that knows nothing."""

    def score(tokens: Tokens) -> Float[Tensor, "b k"]:
        drawn = torch.rand(tokens.there.shape, generator=generator, device=generator.device)
        return drawn.to(tokens.states.device)

    return score


def by_grid(tokens: Tokens) -> Float[Tensor, "b k"]:
    """Cells in an order that covers the picture evenly: the control that does not look.

    It is that of ordered dithering (Bayer's matrix): the first k cells are spread over the picture
    for every k. Needs a layout with one grid.
    """
    grids = [span for span in tokens.layout.spans if len(span.shape) == 2]
    if len(grids) != 1:
        names = [span.name for span in tokens.layout.spans]
        raise ValueError(f"by_grid needs one grid of cells, and the layout has {names}")
    span = grids[0]
    ranks = torch.tensor(_spread(*span.shape), dtype=torch.float32, device=tokens.places.device)
    index = _index(tokens.layout, span.name, tokens.places)
    b, n = len(index), len(tokens.layout)
    at_place = torch.full((b, n + 1), -torch.inf, device=ranks.device)  # the last: nowhere
    at_place.scatter_(1, torch.where(index >= 0, index, n), -ranks.expand(b, -1))
    at_place[:, n] = -torch.inf
    return at_place.gather(1, torch.where(tokens.places >= 0, tokens.places, n))


# --- what becomes of the rest


def fused(
    tokens: Tokens, gone: Bool[Tensor, "b k"], scores: Float[Tensor, "b k"]
) -> Float[Tensor, "b d"]:
    """The sum of the tokens that go, each times its score (EViT), as one token.

    The weights are not normalised, as in the paper: they are attention weights, and keep their
    gradient.
    """
    weights = torch.where(gone, scores, 0).to(tokens.states.dtype)
    return torch.einsum("b k, b k d -> b d", weights, tokens.states)


# --- helpers


def _attention(tokens: Tokens, who: str) -> Call:
    if tokens.call is None:
        raise ValueError(
            f"{who} reads the attention of the layer before, and there is none before the first "
            "layer; begin with after=1"
        )
    return tokens.call


def _class_rows(tokens: Tokens) -> Int[Tensor, "b 1"] | None:
    """Where the class token of each sample stands now."""
    if not any(span.name == "class" for span in tokens.layout.spans):
        return None
    here = tokens.places == _index(tokens.layout, "class", tokens.places)[:, :1]
    return here.int().argmax(dim=1, keepdim=True)


def _index(layout: Layout, name: str, like: Int[Tensor, "b k"]) -> Int[Tensor, "b n"]:
    """The positions of a span, a row a sample."""
    index = layout.find(name).index
    if isinstance(index, slice):
        return torch.arange(len(layout), device=like.device)[index].expand(len(like), -1)
    return index.to(like.device)


@lru_cache(maxsize=16)
def _spread(rows: int, columns: int) -> tuple[int, ...]:
    """The rank of each cell in Bayer's matrix, cut to the size of the grid."""
    order = torch.zeros(1, 1)
    while len(order) < max(rows, columns):
        top = torch.cat([4 * order, 4 * order + 2], dim=1)
        order = torch.cat([top, torch.cat([4 * order + 3, 4 * order + 1], dim=1)])
    ranks: list[int] = order[:rows, :columns].flatten().argsort().argsort().tolist()
    return tuple(ranks)
