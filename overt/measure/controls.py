"""Maps to compare with: what a number would be if the attention said nothing."""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind
from overt.measure.drawing import exponential_numbers, uniform_numbers


def uniform(like: AttentionMap) -> AttentionMap:
    """The map that looks at every key it may see alike."""
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").to(like.values.dtype)
    even = replace(like, values=seen.expand_as(like.values), kind=Kind.AMOUNT, form=Form.PLAIN)
    return even.normalize()


def random_map(like: AttentionMap, generator: torch.Generator) -> AttentionMap:
    """A distribution over the visible keys drawn at random, all distributions being as likely."""
    return _given(like, exponential_numbers(like.values.shape, generator))


def centre(like: AttentionMap, spread: float = 0.25) -> AttentionMap:
    """A Gaussian in the middle of the picture, wherever the picture is: people look there anyway.

    Its deviation is `spread` times each side of the picture. Words have a middle too, that of the
    words there are: padding moves nothing.
    """
    if spread <= 0:
        raise ValueError(f"a spread of {spread} has no width; take a share of the side above 0")
    spans = like.keys.spans
    if len(spans) != 1 or len(spans[0]) != len(like.keys):
        raise ValueError(
            f"only cells of one picture or words of one text have a middle, not keys of "
            f"{[span.name for span in spans]}; take .between(query, key) first"
        )
    if len(spans[0].shape) == 1:
        return _given(like, _middle_words(like, spread))
    heights = [_bell(side, spread) for side in spans[0].shape]
    bell = heights[0]
    for more in heights[1:]:
        bell = rearrange(bell, "n -> n 1") * more
        bell = bell.flatten()
    return _given(like, bell.expand(like.values.shape))


def mean_of_others(maps: AttentionMap) -> AttentionMap:
    """For each sample the mean of all other samples' maps: where one looks whatever is shown.

    Made of people's densities it is the centre bias of a data set, and never holds the sample that
    is judged by it.
    """
    if len(maps) < 2:
        raise ValueError("a mean of other samples needs two samples at least")
    weights = maps.normalize().weights.double()
    rest = (weights.sum(dim=0, keepdim=True) - weights).clamp_min(0)
    return _given(maps, rest)


def _middle_words(like: AttentionMap, spread: float) -> Float[Tensor, "b l h q k"]:
    """A bell over the words that each row may see."""
    seen = like.visible
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1)
    place = (seen.cumsum(dim=-1) - 0.5) / count - 0.5
    bell = (-(place.square()) / (2 * spread**2)).exp()
    return rearrange(bell, "b q k -> b 1 1 q k").expand_as(like.values)


def _bell(side: int, spread: float) -> Float[Tensor, " n"]:
    place = (torch.arange(side) + 0.5) / side - 0.5
    return (-(place.square()) / (2 * spread**2)).exp()


def _given(like: AttentionMap, weights: Float[Tensor, "b l h q k"]) -> AttentionMap:
    values = weights.to(like.weights)
    return replace(like, values=values, kind=Kind.AMOUNT, form=Form.PLAIN).normalize()


def shuffled(like: AttentionMap, generator: torch.Generator) -> AttentionMap:
    """The map with the weights of each row moved to random keys among those it may see.

    It has the same weights, and so the same entropy, at other places.
    """
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").expand_as(like.values)
    noise = uniform_numbers(like.values.shape, generator).to(like.values.device)
    # visible keys come first in both orders, so the i-th of one goes to the i-th of the other
    places = noise.masked_fill(~seen, 2.0).argsort(dim=-1)
    sources = (~seen).to(noise.dtype).argsort(dim=-1, stable=True)
    moved = like.values.gather(-1, sources)
    return replace(like, values=torch.empty_like(moved).scatter(-1, places, moved))
