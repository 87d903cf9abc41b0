"""Phrases of a text: finding them, pooling their states, comparing two of them (eq. 2 and 3).

Samaran et al. 2021. A phrase is a run of tokens that are tied to the same things.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap


@dataclass(frozen=True, eq=False)
class Phrases:
    """p phrases of a batch: the sample of each, and its tokens from the first to before `to`."""

    sample: Int[Tensor, " p"]
    span: Int[Tensor, "p 2"]

    def __len__(self) -> int:
        return len(self.sample)


def runs(tags: Int[Tensor, "b n"]) -> Phrases:
    """The runs of equal tags, sample by sample; tag 0 belongs to no phrase.

    Phrases that touch stay apart when their tags differ.

    >>> runs(torch.tensor([[0, 2, 2, 0, 0, 5, 0]])).span.tolist()
    [[1, 3], [5, 6]]
    """
    before = torch.nn.functional.pad(tags, (1, 0))[:, :-1]
    after = torch.nn.functional.pad(tags, (0, 1))[:, 1:]
    starts = ((tags != before) & (tags != 0)).nonzero()
    ends = ((tags != after) & (tags != 0)).nonzero()
    return Phrases(starts[:, 0], torch.stack([starts[:, 1], ends[:, 1] + 1], dim=-1))


def grounded_phrases(target: AttentionMap) -> tuple[Phrases, Bool[Tensor, "p m"]]:
    """The runs of tokens with one and the same target, and the regions each is tied to.

    Two phrases that touch and mean the same regions cannot be told apart, and are one.
    """
    wanted = ((target.weights > 0) & target.visible[:, None, None]).any(dim=2).any(dim=1)
    grounded = wanted.any(dim=-1)
    same = (wanted[:, 1:] == wanted[:, :-1]).all(dim=-1)
    fresh = torch.nn.functional.pad(~same, (1, 0), value=True)
    found = runs(torch.where(grounded, fresh.cumsum(dim=1), 0))
    return found, wanted[found.sample, found.span[:, 0]]


def words_after(phrases: Phrases, length: int) -> Phrases:
    """As many tokens right after each phrase: the slip of the code published with the paper.

    It keeps the end of a phrase in the place of its start, so that indirect supervision is given
    the wrong words. Here to show what that does. What would lie beyond the `length` of the text is
    cut; at least its last token is left.
    """
    start, end = phrases.span.unbind(dim=-1)
    first = end.clamp_max(length - 1)
    last = torch.maximum((2 * end - start).clamp_max(length), first + 1)
    return Phrases(phrases.sample, torch.stack([first, last], dim=-1))


def pool(states: Float[Tensor, "b n d"], phrases: Phrases) -> Float[Tensor, "p d"]:
    """The largest of each feature over the tokens of a phrase (eq. 2)."""
    places = torch.arange(states.shape[1], device=states.device)
    start, end = phrases.span.to(states.device).unbind(dim=-1)
    inside = (places >= start[:, None]) & (places < end[:, None])
    chosen = states[phrases.sample.to(states.device)]
    return chosen.masked_fill(~inside[..., None], -torch.inf).amax(dim=1)


def compare(first: Float[Tensor, "p d"], second: Float[Tensor, "p d"]) -> Float[Tensor, "p e"]:
    """`[e1, e2, e1 * e2, |e1 - e2|]` (eq. 3)."""
    return torch.cat([first, second, first * second, (first - second).abs()], dim=-1)
