"""Token pruning: scores to select tokens by, and fusion of the dropped ones.

The rule of Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by
Bootstrapping Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300, section 3.1, applied
between Transformer layers: the L2 norm of a token is its relevance. Controls: random scores, an
even grid, and the attention of the class token with fusion of the rest, as in Liang, Ge, Tong,
Song, Wang and Xie, "Not All Patches Are What You Need" (EViT), ICLR 2022,
https://arxiv.org/abs/2202.07800. EViT prunes between the attention and the MLP of a layer; here
tokens are pruned after the layer, because hooks cannot reach inside it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Layout
from overt.capture.call import Call
from overt.nn.hard_attention.selection import Rule, apply_rule, presence
from overt.nn.token_pruning.tokens import (
    PruningStep,
    TokenReducer,
    TokenSequence,
    append_token,
    gather_tokens,
)

TokenScore = Callable[[TokenSequence], Float[Tensor, "b k"]]
FuseRest = Callable[
    [TokenSequence, Bool[Tensor, "b k"], Float[Tensor, "b k"]], Float[Tensor, "b d"]
]


def make_pruner(keep: Rule, score: TokenScore, rest: FuseRest | None = None) -> TokenReducer:
    """Return a step that keeps the tokens selected by `keep`; `rest` fuses the others into one.

    The rule gets scores of free tokens; all other tokens score -inf and are always kept. Scores
    used for selection have no gradient; those passed to `rest` do.
    """
    if not callable(keep):
        raise TypeError(
            f"expected keep to be a function of scores, such as "
            f"functools.partial(nn.keep_top, count=49), got {keep!r}"
        )

    def plan(tokens: TokenSequence) -> PruningStep:
        scores = score(tokens)
        # rules ignore -inf, so class tokens, registers and padding do not use up the count
        free = scores.detach().masked_fill(~tokens.free, -torch.inf)
        chosen = apply_rule(keep, free, ragged=True) & tokens.free
        # protected tokens are kept beside the chosen ones
        step = replace(gather_tokens(tokens, chosen | (tokens.there & ~tokens.free)), scores=free)
        gone = tokens.free & ~chosen
        # a sample that drops nothing has nothing to fuse: its extra token is padding
        some = gone.any(dim=1)
        if rest is None or not bool(some.any()):
            return step
        return append_token(step, rest(tokens, gone, scores), some)

    return plan


# --- scores


def by_presence(tokens: TokenSequence) -> Float[Tensor, "b k"]:
    """Score tokens by the L2 norm of their hidden states (HAN, eq. 5).

    Args:
        tokens: tokens between two layers.

    Returns:
        One score per token.

    Example:
        >>> from overt.attention import grid
        >>> there = torch.ones(1, 4, dtype=torch.bool)
        >>> states = torch.diag(torch.tensor([3.0, 1.0, 2.0, 0.0]))[None]
        >>> sizes, places = torch.ones(1, 4), torch.arange(4)[None]
        >>> by_presence(TokenSequence(states, there, there, sizes, places, grid(2, 2)))
        tensor([[3., 1., 2., 0.]])
    """
    return presence(tokens.states)


def by_class_attention(tokens: TokenSequence) -> Float[Tensor, "b k"]:
    """Score tokens by the attention from the class token in the previous layer (EViT).

    The mean over heads. Without a class token, the mean over all real queries.

    Args:
        tokens: tokens between two layers.

    Returns:
        One score per token.

    Raises:
        ValueError: there is no previous layer.

    Example:
        >>> from functools import partial
        >>> from overt.nn import keep_top, prune_tokens
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> keep = partial(keep_top, count=4)
        >>> with prune_tokens(model, after=(2,), keep=keep, score=by_class_attention) as pruned:
        ...     _ = model(torch.rand(2, 10, 8))
        >>> pruned.lengths
        [10, 10, 5]
    """
    call = _require_call(tokens, "by_class_attention")
    rows = _class_positions(tokens)
    if rows is not None:
        return call.weights(rows).mean(dim=1)[:, 0]
    weights = call.weights().mean(dim=1)
    # average over real queries: rows of padding are finite but mean nothing
    share = tokens.there / tokens.there.sum(dim=1, keepdim=True)
    return (weights * share[..., None].to(weights.dtype)).sum(dim=1)


def by_random(generator: torch.Generator) -> TokenScore:
    """Return a score that is resampled for each sample and step: the random control.

    Args:
        generator: source of the random numbers.

    Returns:
        The score, for `prune_tokens(score=...)`.

    Example:
        >>> from overt.attention import grid
        >>> there = torch.ones(2, 4, dtype=torch.bool)
        >>> sizes, places = torch.ones(2, 4), torch.arange(4).expand(2, 4)
        >>> tokens = TokenSequence(torch.rand(2, 4, 8), there, there, sizes, places, grid(2, 2))
        >>> by_random(torch.Generator().manual_seed(0))(tokens).shape
        torch.Size([2, 4])
    """

    def score(tokens: TokenSequence) -> Float[Tensor, "b k"]:
        # drawn on the generator's device: the same tokens whatever GPU the model is on
        drawn = torch.rand(tokens.there.shape, generator=generator, device=generator.device)
        return drawn.to(tokens.states.device)

    return score


def by_grid(tokens: TokenSequence) -> Float[Tensor, "b k"]:
    """Score cells in an order that covers the image evenly: the content-independent control.

    The order is that of ordered dithering (Bayer's matrix): the first k cells are spread over the
    image for every k.

    Args:
        tokens: tokens between two layers; the layout needs exactly one grid.

    Returns:
        One score per token.

    Raises:
        ValueError: the layout has no grid, or several.

    Example:
        >>> from overt.attention import grid
        >>> there = torch.ones(1, 16, dtype=torch.bool)
        >>> sizes, places = torch.ones(1, 16), torch.arange(16)[None]
        >>> tokens = TokenSequence(torch.rand(1, 16, 8), there, there, sizes, places, grid(4, 4))
        >>> by_grid(tokens).view(4, 4) > -4  # the first four cells
        tensor([[ True, False,  True, False],
                [False, False, False, False],
                [ True, False,  True, False],
                [False, False, False, False]])
    """
    grids = [span for span in tokens.layout.spans if len(span.shape) == 2]
    if len(grids) != 1:
        names = [span.name for span in tokens.layout.spans]
        raise ValueError(f"by_grid needs a layout with exactly one grid, got spans {names}")
    span = grids[0]
    ranks = torch.tensor(
        _dithering_ranks(*span.shape), dtype=torch.float32, device=tokens.places.device
    )
    index = _span_positions(tokens.layout, span.name, tokens.places)
    b, n = len(index), len(tokens.layout)
    at_place = torch.full((b, n + 1), -torch.inf, device=ranks.device)  # last column: no position
    # low ranks come first in the dithering order, so they get the high scores
    at_place.scatter_(1, torch.where(index >= 0, index, n), -ranks.expand(b, -1))
    # cells that are absent were scattered into the spare column too
    at_place[:, n] = -torch.inf
    return at_place.gather(1, torch.where(tokens.places >= 0, tokens.places, n))


# --- fusion of dropped tokens


def fuse_tokens(
    tokens: TokenSequence, gone: Bool[Tensor, "b k"], scores: Float[Tensor, "b k"]
) -> Float[Tensor, "b d"]:
    """Fuse the dropped tokens into one: their sum, weighted by scores (EViT).

    The weights are not normalised, as in the paper: they are attention weights with their gradient.

    Args:
        tokens: tokens between two layers.
        gone: tokens that are dropped.
        scores: weight of each token.

    Returns:
        The fused token of each sample.

    Example:
        >>> from overt.attention import grid
        >>> there, states = torch.ones(1, 4, dtype=torch.bool), torch.eye(4)[None]
        >>> sizes, places = torch.ones(1, 4), torch.arange(4)[None]
        >>> tokens = TokenSequence(states, there, there, sizes, places, grid(2, 2))
        >>> gone = torch.tensor([[False, False, True, True]])
        >>> fuse_tokens(tokens, gone, scores=torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
        tensor([[0.0000, 0.0000, 0.2000, 0.1000]])
    """
    weights = torch.where(gone, scores, 0).to(tokens.states.dtype)
    return torch.einsum("b k, b k d -> b d", weights, tokens.states)


# --- helpers


def _require_call(tokens: TokenSequence, who: str) -> Call:
    if tokens.call is None:
        raise ValueError(
            f"{who} needs the attention of the previous layer; start with after=1 or later"
        )
    return tokens.call


def _class_positions(tokens: TokenSequence) -> Int[Tensor, "b 1"] | None:
    """Return the current position of the class token of each sample."""
    if not any(span.name == "class" for span in tokens.layout.spans):
        return None
    # the class token is never dropped, but tokens before it may be: search for its input position
    here = tokens.places == _span_positions(tokens.layout, "class", tokens.places)[:, :1]
    return here.int().argmax(dim=1, keepdim=True)


def _span_positions(layout: Layout, name: str, like: Int[Tensor, "b k"]) -> Int[Tensor, "b n"]:
    """Return the positions of a span for each sample."""
    index = layout.find(name).index
    if isinstance(index, slice):
        return torch.arange(len(layout), device=like.device)[index].expand(len(like), -1)
    return index.to(like.device)


@lru_cache(maxsize=16)
def _dithering_ranks(rows: int, columns: int) -> tuple[int, ...]:
    """Return the rank of each cell in Bayer's matrix, cropped to the grid."""
    order = torch.zeros(1, 1)
    while len(order) < max(rows, columns):
        # Bayer's recursion: four copies of the matrix, interleaved in the order 0 2 / 3 1
        top = torch.cat([4 * order, 4 * order + 2], dim=1)
        order = torch.cat([top, torch.cat([4 * order + 3, 4 * order + 1], dim=1)])
    # a cropped matrix has gaps in its numbers: argsort twice gives consecutive ranks
    ranks: list[int] = order[:rows, :columns].flatten().argsort().argsort().tolist()
    return tuple(ranks)
