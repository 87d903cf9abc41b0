"""Search for the mask with the highest score of the truth.

A search takes a masked batch and a mask generator: `exhaustive_search` evaluates all masks,
`greedy_refine` a few that each improve the best so far. Both keep the unmasked input unless a mask
is strictly better, and the first of equal masks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.targets.surrogate.masked_inference import MaskedBatch
from overt.targets.surrogate.masks import BinaryMaskCandidates, MaskCandidates, MaskGenerator

CHUNK = 128  # masked samples per forward pass


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The result of a search for every sample of a batch.

    Args:
        maps: The attention of the model on the best masked input, by span name. These, and not the
            masks, are the surrogates.
        masks: The best masks, by span name.
        base: The log-probability of the truth without a mask.
        best: The log-probability of the truth with the best mask.
        probes: The number of evaluations before the final one.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     found = exhaustive_search(masked, GridMasks(grid=(2, 2)))
        >>> found.maps["image"].weights.shape, found.probes
        (torch.Size([1, 1, 1, 1, 4]), tensor([16]))
    """

    maps: Mapping[str, AttentionMap]
    masks: Mapping[str, Float[Tensor, "b _"]]
    base: Float[Tensor, " b"]
    best: Float[Tensor, " b"]
    probes: Int[Tensor, " b"]


Search = Callable[[MaskedBatch, MaskGenerator], SearchResult]


def exhaustive_search(
    masked: MaskedBatch, masks: MaskGenerator, chunk: int = CHUNK
) -> SearchResult:
    """Evaluate all masks and keep the best; memory does not grow with their number.

    Number 0 is the unmasked input; another mask is chosen only if it is strictly better, and the
    first of equal masks is kept.

    Args:
        masked: The encoded batch.
        masks: The masks.
        chunk: How many masked samples are evaluated at a time.

    Returns:
        The result for every sample.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(2), ["image"]) as masked:
        ...     found = exhaustive_search(masked, GridMasks(grid=(2, 2)))
        >>> bool((found.best >= found.base).all())
        True
    """
    candidates = masks(masked)
    best, chosen = best_masks(masked, candidates, candidates.counts, masked.base, chunk)
    mask = candidates.take(torch.arange(len(masked)), chosen)
    return result_at(masked, {candidates.name: mask}, best, candidates.counts)


def search_without_whole(
    masked: MaskedBatch, masks: MaskGenerator, chunk: int = CHUNK
) -> SearchResult:
    """Return the best mask that removes something, even if the whole input scores higher.

    For studies of parts, such as the two words that score best alone (section 4.5); `best` may be
    below `base`. A sample without removable positions keeps its whole input.

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
        ...     found = search_without_whole(masked, GridMasks(grid=(2, 2)))
        >>> bool((found.masks["image"] < 1).any())
        True
    """
    candidates = masks(masked)
    nothing = torch.where(candidates.counts > 1, -torch.inf, masked.base)
    best, chosen = best_masks(masked, candidates, candidates.counts, nothing, chunk)
    mask = candidates.take(torch.arange(len(masked)), chosen)
    return result_at(masked, {candidates.name: mask}, best, candidates.counts)


def best_masks(
    masked: MaskedBatch,
    candidates: MaskCandidates,
    counts: Int[Tensor, " b"],
    beat: Float[Tensor, " b"],
    chunk: int,
) -> tuple[Float[Tensor, " b"], Int[Tensor, " b"]]:
    """Return the best score of the first `counts` masks of every sample, and its number.

    Number 0 is kept unless another mask is strictly better than `beat`.
    """
    device = masked.device
    best = beat.to(device, copy=True)
    chosen = torch.zeros(len(masked), dtype=torch.long, device=device)
    take = _mask_getter(candidates, device)
    for rows, numbers in (few_sample_rounds if masked.supports_many_masks else mask_rounds)(
        counts, chunk
    ):
        there = numbers < counts[rows]
        taken = take(rows.flatten(), torch.where(there, numbers, 0).flatten())
        score = masked.score_masks(rows[0], {candidates.name: taken.unflatten(0, rows.shape)})
        at, number, beyond = (
            one.to(device, non_blocking=True) for one in (rows[0], numbers, ~there)
        )
        score = score.masked_fill(beyond, -torch.inf)
        top = score.argmax(dim=0, keepdim=True)  # the first of equals
        highest, before = score.gather(0, top)[0], best[at]
        better = highest > before
        best[at] = torch.where(better, highest, before)
        chosen[at] = torch.where(better, number.gather(0, top)[0], chosen[at])
    return best.cpu(), chosen.cpu()


def _mask_getter(
    candidates: MaskCandidates, device: torch.device
) -> Callable[[Int[Tensor, " n"], Int[Tensor, " n"]], Float[Tensor, "n k"]]:
    """Return a function from numbers to masks; on a GPU masks are drawn from copied bits."""
    if device.type == "cpu" or not isinstance(candidates, BinaryMaskCandidates):
        return candidates.take

    def taken(rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return candidates.draw(rows, candidates.bits(rows, numbers).to(device, non_blocking=True))

    return taken


def mask_rounds(
    counts: Int[Tensor, " b"], chunk: int
) -> Iterator[tuple[Int[Tensor, "m n"], Int[Tensor, "m n"]]]:
    """Yield the rows and mask numbers of each evaluation: n samples, m masks, m n at most `chunk`.

    The same rows are repeated, so that their features are selected once. Samples with similar
    numbers of masks are grouped. Numbers beyond those of a sample are padding.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    for part in counts.argsort(stable=True).split(chunk):
        start = 1
        while len(active := part[counts[part] > start]):
            many = min(max(1, chunk // len(active)), int(counts[active].max()) - start)
            numbers = torch.arange(start, start + many)[:, None].expand(-1, len(active))
            yield active.expand(many, -1), numbers
            start += many


def few_sample_rounds(
    counts: Int[Tensor, " b"], chunk: int
) -> Iterator[tuple[Int[Tensor, "m n"], Int[Tensor, "m n"]]]:
    """Like `mask_rounds`, with at most so many samples that all of their masks fit one chunk.

    For models that do not copy features: those of few samples stay in the cache.
    """
    most = max(1, int(counts.max()) - 1) if len(counts) else 1
    for part in counts.argsort(stable=True).split(max(1, chunk // most)):
        for rows, numbers in mask_rounds(counts[part], chunk):
            yield part[rows], numbers


def result_at(
    masked: MaskedBatch,
    masks: Mapping[str, Float[Tensor, "b _"]],
    best: Float[Tensor, " b"],
    probes: Int[Tensor, " b"],
) -> SearchResult:
    """Evaluate the chosen masks once more and return the result.

    A removed key is still a key: the target is zero there, even if the masked model could not see
    it.
    """
    answer = masked(torch.arange(len(masked)), masks).answer
    maps = {
        name: replace(one, mask=masked.key_masks[name]).detach().to("cpu")
        for name, one in masked.maps(answer).items()
    }
    return SearchResult(maps, dict(masks), masked.base, best, probes.clone())


# --- several spans

JointSearch = Callable[[MaskedBatch, Sequence[MaskGenerator], Search], dict[str, SearchResult]]


def search_independently(
    masked: MaskedBatch, masks: Sequence[MaskGenerator], search: Search
) -> dict[str, SearchResult]:
    """Search each span with the others whole, as in the paper.

    Each map thus comes from a different input.

    Args:
        masked: The encoded batch.
        masks: The masks, one generator per span.
        search: The search of one span.

    Returns:
        The results by span name.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     found = search_independently(masked, [GridMasks(grid=(2, 2))], exhaustive_search)
        >>> list(found)
        ['image']
    """
    return {one.name: search(masked, one) for one in masks}


def search_sequentially(
    masked: MaskedBatch, masks: Sequence[MaskGenerator], search: Search
) -> dict[str, SearchResult]:
    """Search one span after the other, each with the best masks of the previous ones applied.

    All maps come from one input, and its score is never below that of the first search. Searching
    all pairs of masks would cost the product of their numbers; this costs the sum.

    Args:
        masked: The encoded batch.
        masks: The masks, one generator per span.
        search: The search of one span.

    Returns:
        The results by span name.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     found = search_sequentially(masked, [GridMasks(grid=(2, 2))], exhaustive_search)
        >>> found["image"].probes
        tensor([16])
    """
    fixed: dict[str, Tensor] = {}
    steps: dict[str, SearchResult] = {}
    for one in masks:
        steps[one.name] = search(masked.with_masks(fixed), one)
        fixed |= steps[one.name].masks
    last = steps[masks[-1].name]
    probes = torch.stack([one.probes for one in steps.values()]).sum(dim=0)
    return {
        name: SearchResult(last.maps, one.masks, masked.base, last.best, probes)
        for name, one in steps.items()
    }
