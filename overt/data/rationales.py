"""Human rationales of texts: from character ranges to one row of tokens per person."""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind, words
from overt.geometry import TextGeometry

Range = tuple[int, int]  # first character, end
RationaleSpans = Sequence[Sequence[Sequence[Range]]]  # by text and person


def rationale_maps(
    marked: RationaleSpans, text: TextGeometry, mask: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b p n"], Bool[Tensor, "b p"]]:
    """Return 1 for each token of which a person marked at least half; and which people exist."""
    maps, there = [], []
    for number in range(max([1, *map(len, marked)])):
        ranges = [people[number] if number < len(people) else () for people in marked]
        maps.append((text.cover(ranges) >= 0.5) & mask)
        there.append(torch.tensor([number < len(people) for people in marked], dtype=torch.bool))
    return torch.stack(maps, dim=1).float(), torch.stack(there, dim=1)


def rationale_attention(
    maps: Float[Tensor, "b p n"],
    there: Bool[Tensor, "b p"],
    text: TextGeometry,
    mask: Bool[Tensor, "b n"],
) -> AttentionMap:
    """Return the rationale of each person, one query per person; absent people see no token."""
    return AttentionMap(
        rearrange(maps, "b p n -> b 1 1 p n"),
        words(maps.shape[2], geometry=text),
        words(maps.shape[1], name="people"),
        mask[:, None] & there[..., None],
        Kind.AMOUNT,
    )
