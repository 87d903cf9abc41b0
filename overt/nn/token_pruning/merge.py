"""Token merging: pairs of similar tokens are replaced by their mean, and none is dropped.

Bolya, Fu, Dai, Zhang, Feichtenhofer and Hoffman, "Token Merging: Your ViT But Faster" (ToMe), ICLR
2023, https://arxiv.org/abs/2210.09461, written from the rule in its section 3.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture.call import QKCall
from overt.nn.token_pruning.tokens import PruningStep, TokenReducer, TokenSequence, gather_tokens

TokenMetric = Callable[[TokenSequence], Float[Tensor, "b k e"]]


def make_merger(count: int, metric: TokenMetric) -> TokenReducer:
    """Return a step that merges `count` tokens of each sample into others."""

    def plan(tokens: TokenSequence) -> PruningStep:
        source, target = bipartite_matching(metric(tokens), tokens.free, count)
        return merge_pairs(tokens, source, target)

    return plan


def by_keys(tokens: TokenSequence) -> Float[Tensor, "b k e"]:
    """Compare tokens by their keys in the previous layer, averaged over heads (the paper's choice).

    Args:
        tokens: tokens between two layers.

    Returns:
        Features to compare.

    Raises:
        ValueError: there is no previous layer, or its keys cannot be captured.
    """
    if tokens.call is None:
        raise ValueError(
            "by_keys needs the keys of the previous layer; start with after=1 or later, or use "
            "metric=by_states"
        )
    source = tokens.call.source
    if not isinstance(source, QKCall):
        raise ValueError(
            f"{tokens.call.name} computes attention eagerly, so its keys are not captured; switch "
            "to fused attention (in Hugging Face `set_attn_implementation('sdpa')`), or use "
            "metric=by_states"
        )
    # eager attention hands over finished weights only, hence the QKCall above
    return source.key.mean(dim=1)


def by_states(tokens: TokenSequence) -> Float[Tensor, "b k e"]:
    """Compare tokens by their hidden states.

    Args:
        tokens: tokens between two layers.

    Returns:
        Features to compare.
    """
    return tokens.states


def bipartite_matching(
    metric: Float[Tensor, "b k e"], free: Bool[Tensor, "b k"], count: int
) -> tuple[Int[Tensor, "b r"], Int[Tensor, "b r"]]:
    """Match tokens by bipartite soft matching; return the positions of sources and targets.

    Every other token is a source. Each source finds its most similar target (cosine), and the
    `count` most similar pairs are taken; several sources may share a target. At most half of the
    free tokens are merged.
    """
    alike = F.normalize(metric.float(), dim=-1)
    # sources are at even positions, targets at odd ones: a token is never both, so no chains form
    scores = alike[:, 0::2] @ alike[:, 1::2].transpose(1, 2)
    scores = scores.masked_fill(~free[:, 0::2, None] | ~free[:, None, 1::2], -torch.inf)
    if not scores.numel():
        none = torch.zeros(len(metric), 0, dtype=torch.long, device=metric.device)
        return none, none
    # a row without a free target has maximum -inf and is not able to merge
    best, to = scores.max(dim=-1)
    able = torch.minimum(best.isfinite().sum(dim=1), free.sum(dim=1) // 2)
    # every sample merges as many as the poorest can, so no padding is needed; this synchronizes
    source = best.argsort(dim=1, descending=True, stable=True)[:, : min(count, int(able.min()))]
    # back from the indices of each half to positions in the sequence
    return 2 * source, 2 * to.gather(1, source) + 1


def merge_pairs(
    tokens: TokenSequence, source: Int[Tensor, "b r"], target: Int[Tensor, "b r"]
) -> PruningStep:
    """Merge each source into its target: a mean weighted by sizes, which add up.

    Departure: the remaining tokens keep their order, while the published code puts the targets
    last. The sets and means of one step are the same; the sources of the next step differ.
    """
    own = torch.arange(tokens.states.shape[1], device=source.device)
    return merge_into(tokens, own.expand(len(source), -1).scatter(1, source, target))


def merge_into(tokens: TokenSequence, into: Int[Tensor, "b k"]) -> PruningStep:
    """Merge each token into the one at position `into`; its own position means that it stays.

    A merged token is the mean of its members, weighted by their sizes, which add up. A token that
    others are merged into must stay.
    """
    _, k, d = tokens.states.shape
    stays = into == torch.arange(k, device=into.device)
    if bool(stays.all()):
        return gather_tokens(tokens, torch.ones_like(tokens.there))
    # sums instead of means, so that several sources of one target add up in a single scatter
    weighted = tokens.states * tokens.sizes[..., None].to(tokens.states.dtype)
    moved = weighted.masked_fill(stays[..., None], 0)
    summed = weighted.scatter_add(1, into[..., None].expand(-1, -1, d), moved)
    sizes = tokens.sizes.scatter_add(1, into, tokens.sizes.masked_fill(stays, 0))
    states = (summed / sizes[..., None].to(summed.dtype)).to(tokens.states.dtype)
    step = gather_tokens(replace(tokens, states=states, sizes=sizes), stays)
    # a merged source lives on in its target, so that maps over the input still show it
    holder = torch.where(stays, step.holder, step.holder.gather(1, into))
    return replace(step, holder=holder)
