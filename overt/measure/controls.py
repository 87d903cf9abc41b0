"""Maps to compare with: what a number would be if the attention said nothing."""

from dataclasses import replace

import torch
from einops import rearrange

from overt.attention import AttentionMap, Form, Kind


def uniform(like: AttentionMap) -> AttentionMap:
    """The map that looks at every key it may see alike."""
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").to(like.values.dtype)
    even = replace(like, values=seen.expand_as(like.values), kind=Kind.AMOUNT, form=Form.PLAIN)
    return even.normalize()


def shuffled(like: AttentionMap, generator: torch.Generator) -> AttentionMap:
    """The map with the weights of each row moved to random keys among those it may see.

    It has the same weights, and so the same entropy, at other places.
    """
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").expand_as(like.values)
    noise = torch.rand(like.values.shape, generator=generator, device=generator.device)
    noise = noise.to(like.values.device)
    # visible keys come first in both orders, so the i-th of one goes to the i-th of the other
    places = noise.masked_fill(~seen, 2.0).argsort(dim=-1)
    sources = (~seen).to(noise.dtype).argsort(dim=-1, stable=True)
    moved = like.values.gather(-1, sources)
    return replace(like, values=torch.empty_like(moved).scatter(-1, places, moved))
