"""Find phrases, pool their states, and combine the features of two of them (eq. 2 and 3).

Samaran et al. 2021. A phrase is a run of tokens linked to the same regions.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap


@dataclass(frozen=True, eq=False)
class PhraseSpans:
    """Phrases of a batch: the sample of each, and its token span [start, end)."""

    sample: Int[Tensor, " p"]
    span: Int[Tensor, "p 2"]

    def __len__(self) -> int:
        return len(self.sample)


def tag_runs(tags: Int[Tensor, "b n"]) -> PhraseSpans:
    """Return the runs of equal tags, sample by sample; tag 0 belongs to no phrase.

    Adjacent phrases are separate if their tags differ.

    >>> tag_runs(torch.tensor([[0, 2, 2, 0, 0, 5, 0]])).span.tolist()
    [[1, 3], [5, 6]]
    """
    before = torch.nn.functional.pad(tags, (1, 0))[:, :-1]
    after = torch.nn.functional.pad(tags, (0, 1))[:, 1:]
    starts = ((tags != before) & (tags != 0)).nonzero()
    # every run has one start and one end, and nonzero returns both in the same order
    ends = ((tags != after) & (tags != 0)).nonzero()
    return PhraseSpans(starts[:, 0], torch.stack([starts[:, 1], ends[:, 1] + 1], dim=-1))


def grounded_phrases(target: AttentionMap) -> tuple[PhraseSpans, Bool[Tensor, "p m"]]:
    """Return the runs of tokens with the same target, and the regions of each.

    Adjacent phrases with the same regions are merged into one.

    Args:
        target: attention target from words to regions.
    """
    wanted = ((target.weights > 0) & target.visible[:, None, None]).any(dim=2).any(dim=1)
    grounded = wanted.any(dim=-1)
    same = (wanted[:, 1:] == wanted[:, :-1]).all(dim=-1)
    # number the changes of the target: equal neighbours share a tag
    fresh = torch.nn.functional.pad(~same, (1, 0), value=True)
    found = tag_runs(torch.where(grounded, fresh.cumsum(dim=1), 0))
    # all tokens of a run have the same regions: read those of the first
    return found, wanted[found.sample, found.span[:, 0]]


def following_tokens(phrases: PhraseSpans, length: int) -> PhraseSpans:
    """Return the tokens right after each phrase: a bug of the code published with the paper.

    It stores the end of a phrase as its start, so indirect supervision gets the wrong words.
    Included to measure the effect. Spans are cut at the `length` of the text, leaving at least its
    last token.
    """
    start, end = phrases.span.unbind(dim=-1)
    first = end.clamp_max(length - 1)
    last = torch.maximum((2 * end - start).clamp_max(length), first + 1)
    return PhraseSpans(phrases.sample, torch.stack([first, last], dim=-1))


def pool_phrases(states: Float[Tensor, "b n d"], phrases: PhraseSpans) -> Float[Tensor, "p d"]:
    """Max-pool the states of the tokens of each phrase (eq. 2)."""
    places = torch.arange(states.shape[1], device=states.device)
    start, end = phrases.span.to(states.device).unbind(dim=-1)
    inside = (places >= start[:, None]) & (places < end[:, None])
    chosen = states[phrases.sample.to(states.device)]
    # -inf, not 0: states may all be negative
    return chosen.masked_fill(~inside[..., None], -torch.inf).amax(dim=1)


def pair_features(
    first: Float[Tensor, "p d"], second: Float[Tensor, "p d"]
) -> Float[Tensor, "p e"]:
    """Compute `[e1, e2, e1 * e2, |e1 - e2|]` (eq. 3)."""
    return torch.cat([first, second, first * second, (first - second).abs()], dim=-1)
