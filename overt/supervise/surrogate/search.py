"""Finding the masked input on which the model is most sure of the truth.

A search takes a batch that can be asked about and the masks there are, and gives what it found:
`search` asks about all of them, `refine` about few that each build on the best so far. Both keep
the unmasked input unless something is strictly better, and the first of equals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.supervise.surrogate.look import Look
from overt.supervise.surrogate.masks import Bits, Candidates, Masks

CHUNK = 128  # samples, each with a mask, that the model is asked about at a time


@dataclass(frozen=True, eq=False)
class Found:
    """What a search came to, for every sample of a batch.

    `maps` are the model's own attention on the best masked input, by span name: they, and not the
    masks, are the surrogates. `base` and `best` are log-probabilities of the truth without a mask
    and with the chosen one, `probes` how often the model was asked before the last look at what
    was chosen.
    """

    maps: Mapping[str, AttentionMap]
    masks: Mapping[str, Float[Tensor, "b _"]]
    base: Float[Tensor, " b"]
    best: Float[Tensor, " b"]
    probes: Int[Tensor, " b"]


Search = Callable[[Look, Masks], Found]


def search(look: Look, masks: Masks, chunk: int = CHUNK) -> Found:
    """The best of all masks there are, kept along the way: memory does not grow with their number.

    Number 0 is the unmasked input, and another is chosen only where it is strictly better; the
    first of equals is kept.
    """
    candidates = masks(look)
    best, chosen = best_of(look, candidates, candidates.counts, look.base, chunk)
    mask = candidates.take(torch.arange(len(look)), chosen)
    return found_at(look, {candidates.name: mask}, best, candidates.counts)


def without_whole(look: Look, masks: Masks, chunk: int = CHUNK) -> Found:
    """The best of the masks that remove something, even where the whole input scores higher.

    For studies of what a part says by itself, such as the two words that do best alone (section
    4.5); `best` may lie below `base`. A sample of which nothing can be removed keeps its whole.
    """
    candidates = masks(look)
    nothing = torch.where(candidates.counts > 1, -torch.inf, look.base)
    best, chosen = best_of(look, candidates, candidates.counts, nothing, chunk)
    mask = candidates.take(torch.arange(len(look)), chosen)
    return found_at(look, {candidates.name: mask}, best, candidates.counts)


def best_of(
    look: Look,
    candidates: Candidates,
    counts: Int[Tensor, " b"],
    beat: Float[Tensor, " b"],
    chunk: int,
) -> tuple[Float[Tensor, " b"], Int[Tensor, " b"]]:
    """The best score of the first `counts` masks of every sample, and the number of that mask.

    Number 0 stays where no other is strictly better than `beat`.
    """
    device = look.device
    best = beat.to(device, copy=True)
    chosen = torch.zeros(len(look), dtype=torch.long, device=device)
    take = _taker(candidates, device)
    for rows, numbers in (few_samples if look.takes_many else rounds)(counts, chunk):
        there = numbers < counts[rows]
        taken = take(rows.flatten(), torch.where(there, numbers, 0).flatten())
        score = look.many(rows[0], {candidates.name: taken.unflatten(0, rows.shape)})
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


def _taker(
    candidates: Candidates, device: torch.device
) -> Callable[[Int[Tensor, " n"], Int[Tensor, " n"]], Float[Tensor, "n k"]]:
    """How masks are taken by number: of bits, the bits travel, and a card draws the masks."""
    if device.type == "cpu" or not isinstance(candidates, Bits):
        return candidates.take

    def taken(rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return candidates.draw(rows, candidates.bits(rows, numbers).to(device, non_blocking=True))

    return taken


def rounds(
    counts: Int[Tensor, " b"], chunk: int
) -> Iterator[tuple[Int[Tensor, "m n"], Int[Tensor, "m n"]]]:
    """Rows and numbers to ask about at a time: n samples, m masks of each, m n at most `chunk`.

    The same rows come again and again, so that their features are selected once. Samples with
    about as many masks go together. A number beyond those of its sample is there to fill the row.
    """
    if chunk < 1:
        raise ValueError(f"a chunk holds at least one sample, not {chunk}")
    for part in counts.argsort(stable=True).split(chunk):
        start = 1
        while len(active := part[counts[part] > start]):
            many = min(max(1, chunk // len(active)), int(counts[active].max()) - start)
            numbers = torch.arange(start, start + many)[:, None].expand(-1, len(active))
            yield active.expand(many, -1), numbers
            start += many


def few_samples(
    counts: Int[Tensor, " b"], chunk: int
) -> Iterator[tuple[Int[Tensor, "m n"], Int[Tensor, "m n"]]]:
    """As `rounds`, but no more samples at a time than have all of their masks in one chunk.

    For a model that copies no features: those of few samples stay in a cache.
    """
    most = max(1, int(counts.max()) - 1) if len(counts) else 1
    for part in counts.argsort(stable=True).split(max(1, chunk // most)):
        for rows, numbers in rounds(counts[part], chunk):
            yield part[rows], numbers


def found_at(
    look: Look,
    masks: Mapping[str, Float[Tensor, "b _"]],
    best: Float[Tensor, " b"],
    probes: Int[Tensor, " b"],
) -> Found:
    """What the model looks at with the chosen masks: one more look.

    A key that was removed is still a key: a target says that it should get nothing, also where the
    model that was asked could not see it any more.
    """
    answer = look(torch.arange(len(look)), masks).answer
    maps = {
        name: replace(one, mask=look.seen[name]).detach().to("cpu")
        for name, one in look.maps(answer).items()
    }
    return Found(maps, dict(masks), look.base, best, probes.clone())


# --- several kinds of input

Both = Callable[[Look, Sequence[Masks], Search], dict[str, Found]]


def apart(look: Look, masks: Sequence[Masks], search: Search) -> dict[str, Found]:
    """Each kind of input searched by itself with the others whole, as the paper does.

    So each map comes from an input of its own.
    """
    return {one.name: search(look, one) for one in masks}


def in_turn(look: Look, masks: Sequence[Masks], search: Search) -> dict[str, Found]:
    """One kind of input after the other, each with the best masks of those before it in place.

    All maps come from one input, and its score is never below that of the first search alone. To
    ask about all pairs of two kinds of mask would cost their product; this costs their sum.
    """
    held: dict[str, Tensor] = {}
    steps: dict[str, Found] = {}
    for one in masks:
        steps[one.name] = search(look.holding(held), one)
        held |= steps[one.name].masks
    last = steps[masks[-1].name]
    probes = torch.stack([one.probes for one in steps.values()]).sum(dim=0)
    return {
        name: Found(last.maps, one.masks, look.base, last.best, probes)
        for name, one in steps.items()
    }
