"""The mean of all that was seen, weighted by how sure the model was: what the best one replaces.

The paper takes the single best map and says that it does better than a weighted sum, without
numbers (section 3.1). These are the other side of that comparison, with the interface of `search`.
`best` is the highest score met, `masks` are the mean masks, weighted alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form
from overt.supervise.surrogate.look import Answer, Look
from overt.supervise.surrogate.masks import Candidates, Masks
from overt.supervise.surrogate.search import CHUNK, Found, found_at, rounds


def weighted_maps(look: Look, masks: Masks, chunk: int = CHUNK) -> Found:
    """The mean of the maps on all masked inputs, weighted by the probability of the truth."""
    candidates = masks(look)
    name = candidates.name

    def seen(mask: Tensor, answer: Answer) -> tuple[Tensor, ...]:
        return mask, look.maps(answer)[name].weights.detach().cpu()

    (mask, values), best = _means(look, candidates, chunk, seen)
    found = found_at(look, {name: mask}, best, candidates.counts)
    mean = replace(found.maps[name], values=values, form=Form.PLAIN)
    return replace(found, maps={**found.maps, name: mean})


def weighted_masks(look: Look, masks: Masks, chunk: int = CHUNK) -> Found:
    """The mean of the masks, weighted by the probability of the truth, as shares (RISE, eq. 6).

    It says how sure the model is on average when a cell is shown, and asks for no attention.
    """
    candidates = masks(look)
    name = candidates.name
    (mask,), best = _means(look, candidates, chunk, lambda mask, answer: (mask,))
    found = found_at(look, {name: mask}, best, candidates.counts)
    mean = AttentionMap.from_cells(mask, found.maps[name].keys, look.places[name].present)
    return replace(found, maps={**found.maps, name: mean.normalize()})


def _means(
    look: Look,
    candidates: Candidates,
    chunk: int,
    seen: Callable[[Tensor, Answer], tuple[Tensor, ...]],
) -> tuple[list[Tensor], Float[Tensor, " b"]]:
    """Weighted means of what is `seen` of every probe, summed along the way, and the best score."""
    total = torch.zeros(len(look), dtype=torch.float64)
    best, sums = look.base.clone(), list[Tensor]()
    for rows, mask, score, answer in _everything(look, candidates, chunk):
        weight = score.double().exp()
        parts = seen(mask, answer)
        if not sums:
            sums = [torch.zeros(len(look), *one.shape[1:], dtype=torch.float64) for one in parts]
        total.index_add_(0, rows, weight)
        for to, one in zip(sums, parts, strict=True):
            to.index_add_(0, rows, one.double() * weight.reshape(-1, *[1] * (one.ndim - 1)))
        best.scatter_reduce_(0, rows, score, "amax")
    return [(one / total.reshape(-1, *[1] * (one.ndim - 1))).float() for one in sums], best


def _everything(
    look: Look, candidates: Candidates, chunk: int
) -> Iterator[tuple[Int[Tensor, " n"], Float[Tensor, "n k"], Float[Tensor, " n"], Answer]]:
    """Every probe, that of the whole input first; what only fills a row scores -inf."""
    everyone = torch.arange(len(look))
    whole = candidates.take(everyone, torch.zeros_like(everyone))
    asked = look(everyone, {candidates.name: whole})
    yield everyone, whole, asked.score, asked.answer
    for rows, numbers in rounds(candidates.counts, chunk):
        there = (numbers < candidates.counts[rows]).flatten()
        row = rows.flatten()
        mask = candidates.take(row, torch.where(there, numbers.flatten(), 0))
        asked = look(row, {candidates.name: mask})
        yield row, mask, asked.score.masked_fill(~there, -torch.inf), asked.answer
