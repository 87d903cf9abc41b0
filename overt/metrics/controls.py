"""Control maps that ignore the sample's content: uniform, random, shuffled, center and others."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind
from overt.metrics.argument_checks import check_positive
from overt.metrics.rng import sample_exponential, sample_uniform


def uniform_map(like: AttentionMap) -> AttentionMap:
    """Make a map with equal weight on every visible key.

    Args:
        like: The map whose keys and mask are used.

    Returns:
        The control map.

    Example:
        >>> from overt import words
        >>> seen = torch.tensor([[True, True, False]])
        >>> like = AttentionMap.from_cells(torch.tensor([[0.9, 0.1, 0.0]]), words(3), seen)
        >>> uniform_map(like).weights.flatten()
        tensor([0.5000, 0.5000, 0.0000])
    """
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").to(like.values.dtype)
    even = replace(like, values=seen.expand_as(like.values), kind=Kind.AMOUNT, form=Form.PLAIN)
    return even.normalize()


def random_map(like: AttentionMap, generator: torch.Generator) -> AttentionMap:
    """Draw a random distribution over the visible keys, uniform on the simplex.

    Args:
        like: The map whose keys and mask are used.
        generator: The source of random numbers.

    Returns:
        The control map.

    Example:
        >>> from overt import words
        >>> like = AttentionMap.from_cells(torch.tensor([[0.9, 0.1, 0.0]]), words(3))
        >>> drawn = random_map(like, torch.Generator().manual_seed(0)).weights
        >>> round(float(drawn.sum()), 4), bool((drawn > 0).all())
        (1.0, True)
    """
    # normalised exponentials are uniform on the simplex (Dirichlet with all parameters 1)
    return _from_weights(like, sample_exponential(like.values.shape, generator))


def center_map(like: AttentionMap, spread: float = 0.25) -> AttentionMap:
    """Make a Gaussian at the center of the picture: the center bias of human fixations.

    For words, the center is that of the visible words, whatever the padding.

    Args:
        like: The map whose keys and mask are used.
        spread: Standard deviation as a share of each side.

    Returns:
        The control map.

    Raises:
        ValueError: `spread` is not positive, or the keys are of several spans.

    Example:
        >>> from overt import grid
        >>> like = AttentionMap.from_cells(torch.tensor([[1, 0, 0]]), grid(1, 3))
        >>> center_map(like).weights.flatten()  # exp(-8/9) beside 1, normalized
        tensor([0.2256, 0.5488, 0.2256])
    """
    spread = check_positive("spread", spread)
    spans = like.keys.spans
    if len(spans) != 1 or len(spans[0]) != len(like.keys):
        raise ValueError(
            f"expected the cells of one picture or the words of one text, got keys of "
            f"{[span.name for span in spans]}: take .between(query, key) first"
        )
    if len(spans[0].shape) == 1:
        return _from_weights(like, _centered_words(like, spread))
    return _from_weights(like, _gaussian(spans[0].shape, spread).expand(like.values.shape))


def mean_of_other_maps(maps: AttentionMap) -> AttentionMap:
    """Average for each sample the maps of all other samples.

    Made of human fixation densities, it is the center bias of a dataset without the sample itself.

    Args:
        maps: The maps of all samples.

    Returns:
        The control map.

    Raises:
        ValueError: There are fewer than two samples.
    """
    if len(maps) < 2:
        raise ValueError(f"a mean of other samples needs at least 2 samples, got {len(maps)}")
    weights = maps.normalize().weights.double()
    # the sum without oneself, not a mean: normalising removes the factor
    rest = (weights.sum(dim=0, keepdim=True) - weights).clamp_min(0)
    return _from_weights(maps, rest)


def _centered_words(like: AttentionMap, spread: float) -> Float[Tensor, "b l h q k"]:
    """Compute a Gaussian over the visible words of each row."""
    seen = like.visible
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1)
    # integers before the division, so that mirrored places tie exactly
    place = (2 * seen.cumsum(dim=-1) - 1 - count) / (2 * count)
    bell = (-(place.square()) / (2 * spread**2)).exp()
    return rearrange(bell, "b q k -> b 1 1 q k").expand_as(like.values)


def _gaussian(sides: Sequence[int], spread: float) -> Float[Tensor, " n"]:
    """Compute a Gaussian over the cells of a grid, with deviation `spread` of each side.

    Distances are exact integers, so that cells at the same distance tie, also across axes.
    """
    whole = math.prod(sides)
    squared = torch.zeros(1, dtype=torch.long)
    for side in sides:
        # twice the distance from the centre, in units in which all sides have the same length
        place = (2 * torch.arange(side) + 1 - side) * (whole // side)
        squared = (rearrange(squared, "n -> n 1") + place.square()).flatten()
    return (-(squared / (2 * whole) ** 2) / (2 * spread**2)).exp()


def _from_weights(like: AttentionMap, weights: Float[Tensor, "b l h q k"]) -> AttentionMap:
    values = weights.to(like.weights)
    return replace(like, values=values, kind=Kind.AMOUNT, form=Form.PLAIN).normalize()


def shuffled_map(like: AttentionMap, generator: torch.Generator) -> AttentionMap:
    """Shuffle the weights of each row among its visible keys.

    The weights, and so the entropy, stay the same. For the map of another sample see
    `other_sample_map`.

    Args:
        like: The map to shuffle.
        generator: The source of random numbers.

    Returns:
        The control map.

    Example:
        >>> from overt import words
        >>> like = AttentionMap.from_cells(torch.tensor([[0.6, 0.3, 0.1]]), words(3))
        >>> shuffled_map(like, torch.Generator().manual_seed(0)).weights.flatten().sort().values
        tensor([0.1000, 0.3000, 0.6000])
    """
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").expand_as(like.values)
    noise = sample_uniform(like.values.shape, generator).to(like.values.device)
    # visible keys come first in both orders: weight i of one goes to place i of the other
    places = noise.masked_fill(~seen, 2.0).argsort(dim=-1)
    sources = (~seen).to(noise.dtype).argsort(dim=-1, stable=True)
    moved = like.values.gather(-1, sources)
    return replace(like, values=torch.empty_like(moved).scatter(-1, places, moved))


def other_sample_map(maps: AttentionMap, generator: torch.Generator) -> AttentionMap:
    """Give each sample the map of another random sample of the batch.

    The score that is left is what maps of this model get on any sample, for example by a bias
    towards the center. Samples are put in one random circle, and each gets the map of the next.

    Args:
        maps: The maps of the batch.
        generator: The source of random numbers.

    Returns:
        The control map.

    Raises:
        ValueError: There are fewer than two samples.

    Example:
        >>> from overt import words
        >>> maps = AttentionMap.from_cells(torch.tensor([[1, 0], [0, 1]]), words(2))
        >>> drawn = torch.Generator().manual_seed(0)
        >>> other_sample_map(maps, drawn).weights[:, 0, 0, 0]  # two samples swap
        tensor([[0., 1.],
                [1., 0.]])
    """
    if len(maps) < 2:
        raise ValueError(f"the map of another sample needs at least 2 samples, got {len(maps)}")
    circle = sample_uniform((len(maps), 1), generator)[:, 0].argsort()
    # one cycle through all samples: nobody keeps the own map, as a plain permutation would allow
    source = torch.empty_like(circle).scatter(0, circle, circle.roll(-1))
    return transfer_to_keys(maps.select(source.to(maps.values.device)), maps)


def transfer_to_keys(maps: AttentionMap, like: AttentionMap) -> AttentionMap:
    """Put maps on the keys of other samples and normalize them there.

    Cells of a grid stay at their place. In a text, the first visible word gets the weight of the
    first visible word, and so on; words beyond the end of the other text get none.

    Args:
        maps: One map per sample.
        like: The samples whose keys are used.

    Returns:
        The maps on the keys of `like`.

    Raises:
        ValueError: The numbers of samples or the grids differ.
    """
    if len(maps) != len(like):
        raise ValueError(f"maps and like must have the same batch, got {len(maps)} and {len(like)}")
    ours, theirs = maps.keys.spans[0].shape, like.keys.spans[0].shape
    if len(ours) == 1 and len(theirs) == 1:
        return _from_weights(like, _weights_by_order(maps, like))
    if ours != theirs:
        raise ValueError(
            f"maps and like must have the same grid, got {ours} and {theirs} cells: use "
            "resample_to_grid(maps, shape) first"
        )
    return _from_weights(like, maps.weights)


def _weights_by_order(maps: AttentionMap, like: AttentionMap) -> Float[Tensor, "b l h q k"]:
    """Take the weights of `maps` at the same ordinal among visible keys."""
    source = rearrange(maps.visible, "b q k -> b 1 1 q k").expand_as(maps.values)
    weights = maps.weights.masked_fill(~source, 0)
    # visible keys first, in their order; one more column for words that the other text lacks
    first = (~source).to(torch.uint8).argsort(dim=-1, stable=True)
    ordered = torch.nn.functional.pad(weights.gather(-1, first), (0, 1))
    seen = rearrange(like.visible, "b q k -> b 1 1 q k").expand(*weights.shape[:-1], -1)
    place = (seen.cumsum(dim=-1) - 1).clamp(0, weights.shape[-1])
    return ordered.gather(-1, place).masked_fill(~seen, 0)
