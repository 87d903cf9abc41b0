"""The tokens between two layers of a Transformer, and what a step leaves of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Layout
from overt.capture.call import Call


@dataclass(frozen=True, eq=False)
class Tokens:
    """What one layer hands to the next: `states[b, k, d]`, and who each of the k tokens is.

    `places` is where a token stood when the model began, -1 for padding and for a token made of
    many; `layout` says what stood there. Tokens that are `free` may go: they are `there`, and no
    class token or register. `sizes` is how many tokens of the input each stands for. `call` is the
    attention of the layer before, None before the first.
    """

    states: Float[Tensor, "b k d"]
    there: Bool[Tensor, "b k"]
    free: Bool[Tensor, "b k"]
    sizes: Float[Tensor, "b k"]
    places: Int[Tensor, "b k"]
    layout: Layout
    call: Call | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """What is left of the tokens, in the order in which they stood, padding last.

    `holder` says of each token before the step which token holds it afterwards, -1 if none does;
    `scores` are those it was chosen by, where there were any.
    """

    states: Float[Tensor, "b m d"]
    there: Bool[Tensor, "b m"]
    sizes: Float[Tensor, "b m"]
    places: Int[Tensor, "b m"]
    holder: Int[Tensor, "b k"]
    scores: Float[Tensor, "b k"] | None = None


Plan = Callable[[Tokens], Step]


def gathered(tokens: Tokens, kept: Bool[Tensor, "b k"]) -> Step:
    """The kept tokens of each sample, side by side; those with fewer are padded at the end.

    The gradient goes to kept tokens only. Padding is a copy of a token that nobody may look at: it
    stays finite through every layer.
    """
    counts = kept.sum(dim=1)
    least, most = torch.stack(counts.aminmax()).tolist()
    if not least:
        sample = int(counts.argmin())
        raise ValueError(
            f"the rule keeps no token of sample {sample}, and the model has no class token to "
            "answer from; keep at least one, as the rules of overt.models do"
        )
    order = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
    real = torch.arange(most, device=kept.device) < counts[:, None]
    b, k = kept.shape
    rows = (order + k * torch.arange(b, device=kept.device)[:, None]).flatten()
    holder = torch.where(kept, kept.cumsum(dim=1) - 1, -1)
    return Step(
        # rows of one table: torch.gather goes number by number
        tokens.states.flatten(0, 1).index_select(0, rows).unflatten(0, (b, most)),
        real & tokens.there.gather(1, order),
        tokens.sizes.gather(1, order),
        torch.where(real, tokens.places.gather(1, order), -1),
        holder,
    )


def extended(step: Step, states: Float[Tensor, "b d"], there: Bool[Tensor, " b"]) -> Step:
    """One more token at the end, which has no place of its own; absent where it is not `there`."""
    ones = torch.ones_like(step.sizes[:, :1])
    return Step(
        torch.cat([step.states, rearrange(states, "b d -> b 1 d").to(step.states.dtype)], dim=1),
        torch.cat([step.there, there[:, None]], dim=1),
        torch.cat([step.sizes, ones], dim=1),
        torch.cat([step.places, torch.full_like(step.places[:, :1], -1)], dim=1),
        step.holder,
        step.scores,
    )
