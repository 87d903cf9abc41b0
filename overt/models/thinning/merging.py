"""Token merging, the control that drops nothing: pairs of alike tokens become their mean.

Bolya, Fu, Dai, Zhang, Feichtenhofer and Hoffman, "Token Merging: Your ViT But Faster" (ToMe), ICLR
2023, https://arxiv.org/abs/2210.09461, written from the rule in its section 3.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture.call import Projected
from overt.models.thinning.tokens import Plan, Step, Tokens, gathered

Metric = Callable[[Tokens], Float[Tensor, "b k e"]]


def merging(count: int, metric: Metric) -> Plan:
    """A step that merges `count` tokens of each sample into others."""

    def plan(tokens: Tokens) -> Step:
        source, target = matched(metric(tokens), tokens.free, count)
        return merged(tokens, source, target)

    return plan


def by_keys(tokens: Tokens) -> Float[Tensor, "b k e"]:
    """The keys of the layer before, mean over heads: what the paper compares."""
    if tokens.call is None:
        raise ValueError(
            "by_keys compares the keys of the layer before, and there are none before the first "
            "layer; begin with after=1, or merge with metric=by_states"
        )
    source = tokens.call.source
    if not isinstance(source, Projected):
        raise ValueError(
            f"{tokens.call.name} writes its attention out, which shows no keys; switch to fused "
            "attention (in Hugging Face `set_attn_implementation('sdpa')`), or merge with "
            "metric=by_states"
        )
    return source.key.mean(dim=1)


def by_states(tokens: Tokens) -> Float[Tensor, "b k e"]:
    """The hidden states themselves."""
    return tokens.states


def matched(
    metric: Float[Tensor, "b k e"], free: Bool[Tensor, "b k"], count: int
) -> tuple[Int[Tensor, "b r"], Int[Tensor, "b r"]]:
    """Who merges into whom, by bipartite soft matching: positions of sources and of their targets.

    Every other token is a source, each finds the target most like it (cosine), and the `count`
    pairs most alike are taken; several may share a target. At most half of the free tokens go.
    """
    alike = F.normalize(metric.float(), dim=-1)
    scores = alike[:, 0::2] @ alike[:, 1::2].transpose(1, 2)
    scores = scores.masked_fill(~free[:, 0::2, None] | ~free[:, None, 1::2], -torch.inf)
    if not scores.numel():
        none = torch.zeros(len(metric), 0, dtype=torch.long, device=metric.device)
        return none, none
    best, to = scores.max(dim=-1)
    able = torch.minimum(best.isfinite().sum(dim=1), free.sum(dim=1) // 2)
    source = best.argsort(dim=1, descending=True, stable=True)[:, : min(count, int(able.min()))]
    return 2 * source, 2 * to.gather(1, source) + 1


def merged(tokens: Tokens, source: Int[Tensor, "b r"], target: Int[Tensor, "b r"]) -> Step:
    """The tokens with each source in its target: a mean weighted by sizes, which add up.

    Departure: what is left keeps its order, while the published code puts the targets last. Sets
    and means of one step are the same; who is a source in the next one is not.
    """
    b, k, d = tokens.states.shape
    if not source.shape[1]:
        return gathered(tokens, torch.ones_like(tokens.there))
    weighted = tokens.states * tokens.sizes[..., None].to(tokens.states.dtype)
    own = source[..., None].expand(-1, -1, d)
    into = target[..., None].expand(-1, -1, d)
    summed = weighted.scatter_add(1, into, weighted.gather(1, own))
    sizes = tokens.sizes.scatter_add(1, target, tokens.sizes.gather(1, source))
    states = (summed / sizes[..., None].to(summed.dtype)).to(tokens.states.dtype)
    kept = torch.ones(b, k, dtype=torch.bool, device=source.device).scatter(1, source, False)
    step = gathered(replace(tokens, states=states, sizes=sizes), kept)
    holder = step.holder.scatter(1, source, step.holder.gather(1, target))
    return replace(step, holder=holder)
