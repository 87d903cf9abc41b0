"""Greedy search of masks: flip one bit at a time, starting from the whole input."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.targets.surrogate.counter_rng import random_bits, stream_keys
from overt.targets.surrogate.masked_inference import MaskedBatch
from overt.targets.surrogate.masks import BinaryMaskCandidates, MaskGenerator
from overt.targets.surrogate.search import CHUNK, SearchResult, best_masks, result_at

PATIENCE = 8  # jumps of one length before a longer one


def greedy_refine(
    masked: MaskedBatch, masks: MaskGenerator, probes: int = 50, seed: int = 0, chunk: int = CHUNK
) -> SearchResult:
    """Improve the best mask by flipping single cells or words, with at most `probes` evaluations.

    It starts with the whole input and flips bits in a random order; improvements are kept at once.
    Later the flip with the best effect in its last trial comes first. If no single flip helps,
    several random ones are tried together. All scores are evaluations of the model, and the masks
    are of the same kind as those of `exhaustive_search`: grids of the same size, but any number of
    words. All masks of a sample are evaluated if there are at most `probes`.

    The result depends on the sample only, not on its batch. The samples of a batch are evaluated
    together, with one mask each at a time: use large batches.

    Args:
        masked: The encoded batch.
        masks: The masks; they must be made of bits.
        probes: The number of evaluations.
        seed: The random seed.
        chunk: How many samples are evaluated at a time.

    Returns:
        The result for every sample.

    Raises:
        ValueError: `probes` is below 1, or the masks are not made of bits.

    Example:
        >>> from overt.targets.surrogate import GridMasks, masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(2), ["image"]) as masked:
        ...     found = greedy_refine(masked, GridMasks(grid=(2, 2)), probes=8)
        >>> bool((found.best >= found.base).all())
        True
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    candidates = masks(masked)
    if not isinstance(candidates, BinaryMaskCandidates):
        raise ValueError(
            f"the masks of {type(masks).__name__} are not made of bits; use exhaustive_search, or "
            "GridMasks"
        )
    few = candidates.counts <= probes
    counts = torch.where(few, candidates.counts, 1)
    best, chosen = best_masks(masked, candidates, counts, masked.base, chunk)
    bits = candidates.bits(torch.arange(len(masked)), chosen)
    keys = stream_keys(masked.ids, seed, f"refine {candidates.name}")
    many = (~few).nonzero()[:, 0]
    for rows in (
        many.split(chunk) if len(many) else ()
    ):  # split of an empty tensor yields one empty part
        walk = _LocalSearch(candidates, rows, keys[rows.numpy()], bits[rows], best[rows])
        for step in range(1, probes):
            tried = walk.next(step)
            mask = candidates.draw(rows, tried.to(masked.device))
            output = masked(rows, {candidates.name: mask})
            walk.learn(tried, output.score)
        bits[rows], best[rows] = walk.bits, walk.best
    mask = candidates.draw(torch.arange(len(masked)), bits)
    evaluations = torch.where(few, candidates.counts, probes)
    return result_at(masked, {candidates.name: mask}, best, evaluations)


class _LocalSearch:
    """The state of n samples: their best bits, and the effects of every flip."""

    def __init__(
        self,
        candidates: BinaryMaskCandidates,
        rows: Int[Tensor, " n"],
        keys: np.ndarray,
        bits: Bool[Tensor, "n c"],
        best: Float[Tensor, " n"],
    ) -> None:
        self.bits, self.best, self.keys = bits.clone(), best.clone(), keys
        self.exists = torch.arange(bits.shape[1]) < candidates.sizes[rows, None]
        self.sizes = candidates.sizes[rows]
        self.order = self._noise(0)
        # the effect of removing each bit in its last trial; infinite before
        self.removing = torch.full(bits.shape, torch.inf)
        self.tried = ~self.exists
        self.jumps = torch.zeros(len(bits), dtype=torch.long)

    def next(self, step: int) -> Bool[Tensor, "n c"]:
        """Return the bits to evaluate: one flip of the best, or a jump if all flips were tried."""
        hope = torch.where(self.bits | self.removing.isinf(), self.removing, -self.removing)
        hope = hope.masked_fill(self.tried, -torch.inf)
        most = hope.amax(dim=1, keepdim=True)
        first = torch.where(hope == most, self.order, torch.inf).argmin(dim=1, keepdim=True)
        flip = torch.zeros_like(self.bits).scatter(1, first, True)
        self.stuck = self.tried.all(dim=1)
        if self.stuck.any():
            length = (2 + self.jumps // PATIENCE).minimum(self.sizes.clamp_min(1))
            rank = self._noise(step).argsort(dim=1).argsort(dim=1)
            flip = torch.where(self.stuck[:, None], rank < length[:, None], flip)
        self.flip = flip & self.exists
        return self.bits ^ self.flip

    def learn(self, tried: Bool[Tensor, "n c"], score: Float[Tensor, " n"]) -> None:
        """Keep strict improvements, and store the effect of the flip."""
        change = score - self.best
        signed = torch.where(self.bits, change[:, None], -change[:, None])
        single = self.flip & ~self.stuck[:, None]
        self.removing = torch.where(single, signed, self.removing)
        better = change > 0
        self.tried = torch.where(better[:, None], ~self.exists, self.tried) | single
        self.jumps = torch.where(better, 0, self.jumps + self.stuck.long())
        self.bits = torch.where(better[:, None], tried, self.bits)
        self.best = torch.where(better, score, self.best)

    def _noise(self, step: int) -> Float[Tensor, "n c"]:
        """Return random numbers of every sample, infinite for missing bits."""
        width = self.bits.shape[1]
        drawn = random_bits(self.keys, width, step * 2**20) >> np.uint64(40)
        noise = torch.from_numpy(drawn.astype(np.float32))
        return torch.where(self.exists, noise, torch.inf)
