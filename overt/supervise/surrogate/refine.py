"""A search that asks less: from the whole input, one flip after the other."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.supervise.surrogate.draws import draws, keys_of
from overt.supervise.surrogate.look import Look
from overt.supervise.surrogate.masks import Bits, Masks
from overt.supervise.surrogate.search import CHUNK, Found, best_of, found_at

PATIENCE = 8  # jumps of one length before longer ones


def refine(look: Look, masks: Masks, probes: int = 50, seed: int = 0, chunk: int = CHUNK) -> Found:
    """The best mask found by flipping one cell or word of the best so far, in `probes` questions.

    It begins with the whole input and flips bits in a random order; what is better is kept at once.
    Later the flip that did most good, or least harm, when it was last tried comes first. When no
    single flip helps, several random ones are tried together. Every score is a true answer of the
    model, and the masks are of the same kind as those of `search`: grids of the same size, but any
    number of words. A sample that has no more than `probes` masks is asked about all of them.

    What is found depends on the sample alone, not on its batch. Samples of a batch go side by side,
    one mask each at a time: batches should be large.
    """
    if probes < 1:
        raise ValueError(f"a search asks at least once, not {probes} times")
    candidates = masks(look)
    if not isinstance(candidates, Bits):
        raise ValueError(
            f"the masks of {type(masks).__name__} are not made of bits that could be flipped; use "
            "search, or Grids"
        )
    few = candidates.counts <= probes
    counts = torch.where(few, candidates.counts, 1)
    best, chosen = best_of(look, candidates, counts, look.base, chunk)
    bits = candidates.bits(torch.arange(len(look)), chosen)
    keys = keys_of(look.ids, seed, f"refine {candidates.name}")
    many = (~few).nonzero()[:, 0]
    for rows in many.split(chunk) if len(many) else ():  # of none, split makes an empty part
        walk = _Walk(candidates, rows, keys[rows.numpy()], bits[rows], best[rows])
        for step in range(1, probes):
            tried = walk.next(step)
            mask = candidates.draw(rows, tried.to(look.device))
            asked = look(rows, {candidates.name: mask})
            walk.learn(tried, asked.score)
        bits[rows], best[rows] = walk.bits, walk.best
    mask = candidates.draw(torch.arange(len(look)), bits)
    asked_for = torch.where(few, candidates.counts, probes)
    return found_at(look, {candidates.name: mask}, best, asked_for)


class _Walk:
    """Where each of n samples stands: its best bits, and what is known about every flip."""

    def __init__(
        self,
        candidates: Bits,
        rows: Int[Tensor, " n"],
        keys: np.ndarray,
        bits: Bool[Tensor, "n c"],
        best: Float[Tensor, " n"],
    ) -> None:
        self.bits, self.best, self.keys = bits.clone(), best.clone(), keys
        self.exists = torch.arange(bits.shape[1]) < candidates.sizes[rows, None]
        self.sizes = candidates.sizes[rows]
        self.order = self._noise(0)
        # what removing each bit did when it was last tried; at first, hope
        self.removing = torch.full(bits.shape, torch.inf)
        self.tried = ~self.exists
        self.jumps = torch.zeros(len(bits), dtype=torch.long)

    def next(self, step: int) -> Bool[Tensor, "n c"]:
        """The bits to ask about: one flip from the best, or a jump where all flips were tried."""
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
        """Take what is strictly better, and remember what the flip did."""
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
        """Random numbers of every sample, infinite where it has no bit."""
        width = self.bits.shape[1]
        drawn = draws(self.keys, width, step * 2**20) >> np.uint64(40)
        noise = torch.from_numpy(drawn.astype(np.float32))
        return torch.where(self.exists, noise, torch.inf)
