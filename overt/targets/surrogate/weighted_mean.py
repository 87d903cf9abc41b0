"""Score-weighted means over all masks, the alternative to the single best mask.

The paper uses the single best map and states without numbers that it is better than a weighted sum
(section 3.1). These functions are the other side of that comparison, with the interface of a
search. `best` is the highest score, `masks` are the weighted mean masks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form
from overt.targets.surrogate.masked_inference import MaskableOutput, MaskedBatch
from overt.targets.surrogate.masks import MaskCandidates, MaskGenerator
from overt.targets.surrogate.search import CHUNK, SearchResult, mask_rounds, result_at


def weighted_maps(masked: MaskedBatch, masks: MaskGenerator, chunk: int = CHUNK) -> SearchResult:
    """Return the mean of the maps on all masked inputs, weighted by the probability of the truth.

    Args:
        masked: The encoded batch.
        masks: The masks.
        chunk: How many masked samples are evaluated at a time.

    Returns:
        The result for every sample.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     found = weighted_maps(masked, GridMasks(grid=(2, 2)))
        >>> found.maps["image"].weights.shape
        torch.Size([1, 1, 1, 1, 4])
    """
    candidates = masks(masked)
    name = candidates.name

    def parts_of(mask: Tensor, answer: MaskableOutput) -> tuple[Tensor, ...]:
        return mask, masked.maps(answer)[name].weights.detach().cpu()

    (mask, values), best = _weighted_means(masked, candidates, chunk, parts_of)
    found = result_at(masked, {name: mask}, best, candidates.counts)
    mean = replace(found.maps[name], values=values, form=Form.PLAIN)
    return replace(found, maps={**found.maps, name: mean})


def weighted_masks(masked: MaskedBatch, masks: MaskGenerator, chunk: int = CHUNK) -> SearchResult:
    """Return the normalised mean mask, weighted by the probability of the truth (RISE, eq. 6).

    This is the mean probability if a cell is visible; attention is not used.

    Args:
        masked: The encoded batch.
        masks: The masks.
        chunk: How many masked samples are evaluated at a time.

    Returns:
        The result for every sample.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     found = weighted_masks(masked, GridMasks(grid=(2, 2)))
        >>> found.maps["image"].weights.sum().round(decimals=3)
        tensor(1.)
    """
    candidates = masks(masked)
    name = candidates.name
    (mask,), best = _weighted_means(masked, candidates, chunk, lambda mask, answer: (mask,))
    found = result_at(masked, {name: mask}, best, candidates.counts)
    mean = AttentionMap.from_cells(mask, found.maps[name].keys, masked.positions[name].present)
    return replace(found, maps={**found.maps, name: mean.normalize()})


def _weighted_means(
    masked: MaskedBatch,
    candidates: MaskCandidates,
    chunk: int,
    parts_of: Callable[[Tensor, MaskableOutput], tuple[Tensor, ...]],
) -> tuple[list[Tensor], Float[Tensor, " b"]]:
    """Return running weighted means of the parts of every probe, and the best score."""
    total = torch.zeros(len(masked), dtype=torch.float64)
    best, sums = masked.base.clone(), list[Tensor]()
    for rows, mask, score, answer in _all_probes(masked, candidates, chunk):
        weight = score.double().exp()
        parts = parts_of(mask, answer)
        if not sums:
            sums = [torch.zeros(len(masked), *one.shape[1:], dtype=torch.float64) for one in parts]
        total.index_add_(0, rows, weight)
        for to, one in zip(sums, parts, strict=True):
            to.index_add_(0, rows, one.double() * weight.reshape(-1, *[1] * (one.ndim - 1)))
        best.scatter_reduce_(0, rows, score, "amax")
    return [(one / total.reshape(-1, *[1] * (one.ndim - 1))).float() for one in sums], best


def _all_probes(
    masked: MaskedBatch, candidates: MaskCandidates, chunk: int
) -> Iterator[tuple[Int[Tensor, " n"], Float[Tensor, "n k"], Float[Tensor, " n"], MaskableOutput]]:
    """Yield every probe, the whole input first; padding scores -inf."""
    all_rows = torch.arange(len(masked))
    whole = candidates.take(all_rows, torch.zeros_like(all_rows))
    output = masked(all_rows, {candidates.name: whole})
    yield all_rows, whole, output.score, output.answer
    for rows, numbers in mask_rounds(candidates.counts, chunk):
        there = (numbers < candidates.counts[rows]).flatten()
        row = rows.flatten()
        mask = candidates.take(row, torch.where(there, numbers.flatten(), 0))
        output = masked(row, {candidates.name: mask})
        yield row, mask, output.score.masked_fill(~there, -torch.inf), output.answer
