"""Tokens between two layers of a Transformer, and the result of a pruning step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Layout
from overt.capture.call import Call


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Tokens passed from one layer to the next: `states[b, k, d]` and what each token is.

    Args:
        states: hidden states.
        there: tokens that are not padding.
        free: tokens that may be removed: real tokens, without class tokens and registers.
        sizes: number of input tokens that each token stands for.
        places: position of each token in the input; -1 for padding and for merged or fused tokens.
        layout: what the input positions are.
        call: attention of the previous layer; None before the first layer.
    """

    states: Float[Tensor, "b k d"]
    there: Bool[Tensor, "b k"]
    free: Bool[Tensor, "b k"]
    sizes: Float[Tensor, "b k"]
    places: Int[Tensor, "b k"]
    layout: Layout
    call: Call | None = None


@dataclass(frozen=True, eq=False)
class PruningStep:
    """Tokens that remain after a step, in their original order, with padding last.

    Args:
        states: hidden states of the remaining tokens.
        there: tokens that are not padding.
        sizes: number of input tokens that each token stands for.
        places: position of each token in the input; -1 for padding and for merged or fused tokens.
        holder: for each token before the step, the token that contains it now; -1 if dropped.
        scores: scores of the selection, if any.
    """

    states: Float[Tensor, "b m d"]
    there: Bool[Tensor, "b m"]
    sizes: Float[Tensor, "b m"]
    places: Int[Tensor, "b m"]
    holder: Int[Tensor, "b k"]
    scores: Float[Tensor, "b k"] | None = None


TokenReducer = Callable[[TokenSequence], PruningStep]


def gather_tokens(tokens: TokenSequence, kept: Bool[Tensor, "b k"]) -> PruningStep:
    """Gather the kept tokens of each sample; shorter samples are padded at the end.

    Only kept tokens get a gradient. Padding is a copy of a masked token, so it stays finite in
    every layer.
    """
    counts = kept.sum(dim=1)
    # one synchronization for both numbers
    least, most = torch.stack(counts.aminmax()).tolist()
    if not least:
        sample = int(counts.argmin())
        raise ValueError(
            f"the rule keeps 0 tokens of sample {sample}, and the model has no class token; keep "
            "at least one, as the rules of overt.nn do"
        )
    # a stable sort: kept tokens first, in their order
    order = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
    real = torch.arange(most, device=kept.device) < counts[:, None]
    b, k = kept.shape
    # numbers of rows in the flattened (b k) axis
    rows = (order + k * torch.arange(b, device=kept.device)[:, None]).flatten()
    holder = torch.where(kept, kept.cumsum(dim=1) - 1, -1)
    return PruningStep(
        # index_select copies whole rows; torch.gather would copy element by element
        tokens.states.flatten(0, 1).index_select(0, rows).unflatten(0, (b, most)),
        real & tokens.there.gather(1, order),
        tokens.sizes.gather(1, order),
        torch.where(real, tokens.places.gather(1, order), -1),
        holder,
    )


def append_token(
    step: PruningStep, states: Float[Tensor, "b d"], there: Bool[Tensor, " b"]
) -> PruningStep:
    """Append one token without a position; it counts as padding where `there` is false."""
    ones = torch.ones_like(step.sizes[:, :1])
    return PruningStep(
        torch.cat([step.states, rearrange(states, "b d -> b 1 d").to(step.states.dtype)], dim=1),
        torch.cat([step.there, there[:, None]], dim=1),
        torch.cat([step.sizes, ones], dim=1),
        torch.cat([step.places, torch.full_like(step.places[:, :1], -1)], dim=1),
        step.holder,
        step.scores,
    )
