"""The remaining tokens of one forward pass: where they came from and how later layers see them."""

from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Layout, Span
from overt.capture.call import Call
from overt.nn.token_pruning.tokens import PruningStep, TokenSequence


class TokenTracker:
    """Track the remaining tokens during one forward pass."""

    def __init__(
        self, layout: Layout, states: Float[Tensor, "b n d"], always: Collection[str]
    ) -> None:
        b, n, _ = states.shape
        device = states.device
        self.layout = layout
        self.length = n
        self.places = torch.arange(n, device=device).expand(b, n)
        self.slots = self.places
        self.there = torch.ones(b, n, dtype=torch.bool, device=device)
        self.sizes = torch.ones(b, n, device=device)
        self.bias: Float[Tensor, "b k"] | None = None
        self.present: Bool[Tensor, "b n"] | None = None
        self.changed = self.ragged = self.placeless = False
        # column n collects positions of absent tokens, and is cut off
        stays = torch.zeros(b, n + 1, dtype=torch.bool, device=device)
        for span in layout.spans:
            if span.name in always:
                stays.scatter_(1, span_positions(span, n, self.places), True)
        self.stays = stays[:, :n]

    def hide(self, seen: Bool[Tensor, "b k"] | None) -> None:
        """Mark tokens that no query may see as absent: padding and masked tokens."""
        if seen is None:
            return
        self.there = self.there & seen
        # "present" is about input tokens: later masks are over the shortened sequence
        if not self.changed:
            self.present = self.there

    def tokens(self, states: Float[Tensor, "b k d"], call: Call | None) -> TokenSequence:
        """Return the tokens as a `TokenReducer` gets them."""
        seen = None if call is None else call.visible()
        self.hide(None if seen is None else seen.any(dim=1))
        stays = self.stays.gather(1, self.places.clamp_min(0)) & (self.places >= 0)
        free = self.there & ~stays
        return TokenSequence(states, self.there, free, self.sizes, self.places, self.layout, call)

    def take(self, step: PruningStep) -> None:
        """Apply the result of a step."""
        # compose the two maps: input token -> position before the step -> position after it
        held = step.holder.gather(1, self.slots.clamp_min(0))
        self.slots = torch.where(self.slots >= 0, held, -1)
        self.places, self.there, self.sizes = step.places, step.there, step.sizes
        self.length = step.states.shape[1]
        # if nothing moved, masks of later layers still fit and are not indexed
        same = step.places.shape == self.slots.shape
        identical = step.places == torch.arange(self.length, device=step.places.device)
        flags = [
            (~step.there).any(),
            (step.sizes != 1).any(),
            (step.there & (step.places < 0)).any(),
            (~identical).any(),
        ]
        # one transfer to the host for all four flags
        self.ragged, weighted, self.placeless, moved = torch.stack(flags).tolist()
        self.changed = moved or not same
        self.bias = None
        if self.ragged or weighted:
            # log-size: softmax then counts a merged token as often as it has members
            self.bias = torch.where(step.there, step.sizes.log(), -torch.inf)

    def scores_at_input(self, scores: Float[Tensor, "b k"] | None) -> Float[Tensor, "b n"] | None:
        """Return the scores of the tokens at their positions in the input."""
        if scores is None:
            return None
        b, n = self.slots.shape
        # padding and fused tokens have place -1: they are written to the spare column n
        found = torch.full((b, n + 1), -torch.inf, dtype=scores.dtype, device=scores.device)
        at = torch.where(self.places >= 0, self.places, n)
        return found.scatter(1, at, scores)[:, :n]


def span_positions(span: Span, length: int, like: Int[Tensor, "b n"]) -> Int[Tensor, "b m"]:
    """Return the positions of a span for each sample; `length` where absent."""
    if isinstance(span.index, slice):
        return torch.arange(length, device=like.device)[span.index].expand(len(like), -1)
    index = span.index.to(like.device)
    return torch.where(index >= 0, index, length)
