"""What if the attention itself were another? Weights are changed in flight, and the answer watched.

`run` gives the logits of the same samples under an edit of their attention, or under none:

    run = editing(model, lambda: model(**inputs).logits)
    moved = output_change(run, permuted(generator))

Jain and Wallace, "Attention is not Explanation", NAACL 2019, https://arxiv.org/abs/1902.10186;
Serrano and Smith, "Is Attention Interpretable?", ACL 2019, https://arxiv.org/abs/1906.03731;
Wiegreffe and Pinter, "Attention is not not Explanation", EMNLP 2019,
https://arxiv.org/abs/1908.04626. An answer that stays the same under other weights says that these
weights did not have to be, not that they did nothing: see the third paper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.capture.call import Call
from overt.capture.edits import Bias, Edit
from overt.capture.watching import watch
from overt.measure.agreement import js
from overt.measure.drawing import normal_numbers, uniform_numbers
from overt.measure.measured import Measured, defined, measured, row, shares

Run = Callable[[Edit | Bias | None], Float[Tensor, "b c"]]
Respond = Callable[[Float[Tensor, "b k"]], Float[Tensor, "b c"]]
Compare = Callable[[AttentionMap, AttentionMap], Measured]


def editing(
    model: nn.Module,
    forward: Callable[[], Float[Tensor, "b c"]],
    layers: Sequence[int | str] | None = None,
) -> Run:
    """A `Run` of any model that can be watched; `layers` chooses whose attention is changed."""

    def run(edit: Edit | Bias | None) -> Float[Tensor, "b c"]:
        if edit is None:
            return forward()
        with watch(model, layers=layers, edit=edit):
            return forward()

    return run


# --- edits; keys that a query may not see stay without weight


def permuted(generator: torch.Generator) -> Edit:
    """Every row's weights go to other keys among those it may see (Jain and Wallace, 4.2.1)."""

    def edit(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        seen = _seen(call, weights)
        noise = uniform_numbers(weights.shape, generator)
        places = noise.to(weights.device).masked_fill(~seen, 2.0).argsort(dim=-1)
        # visible keys come first in both orders, so the i-th of one goes to the i-th of the other
        sources = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
        return torch.zeros_like(weights).scatter(-1, places, weights.gather(-1, sources))

    return edit


def evened(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Every key that a query may see gets as much, and all of them what they had together.

    Held during training too, this is the frozen uniform attention of Wiegreffe and Pinter (section
    3.1): `with watch(model, edit=evened): fit(...)`.
    """
    seen = _seen(call, weights).to(weights.dtype)
    total = weights.sum(dim=-1, keepdim=True)
    return seen * total / seen.sum(dim=-1, keepdim=True).clamp_min(1)


def without_top(share: float) -> Edit:
    """The largest weights of each row are zero and the others grow to the same sum.

    A `share` of the keys that a row may see is taken, one at least, and one at least is left
    (Serrano and Smith, section 3).
    """
    return _without(share, lambda weights: weights)


def without_random(share: float, generator: torch.Generator) -> Edit:
    """As many weights as `without_top` takes, at random: what it is to be held against."""

    def score(weights: Tensor) -> Tensor:
        noise = uniform_numbers(weights.shape, generator)
        return noise.to(weights.device)

    return _without(share, score)


def knocked_out(keys: Bool[Tensor, "b k"], queries: Bool[Tensor, "b q"] | None = None) -> Edit:
    """The weights from `queries` to `keys` are zero and nothing takes their place.

    What flows along these edges is lost, as in Geva, Bastings, Filippova and Globerson 2023, who
    let the other weights grow: for that, add -inf to the scores with `Bias`. None means all
    queries.
    """

    def edit(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        b, _, q, k = weights.shape
        if keys.shape != (b, k) or (queries is not None and queries.shape != (b, q)):
            raise ValueError(
                f"{call.name or 'the model'} attends from {q} queries to {k} keys in {b} samples, "
                f"and what is knocked out was told for {tuple(keys.shape)} keys"
            )
        cut = rearrange(keys, "b k -> b 1 1 k")
        if queries is not None:
            cut = cut & rearrange(queries, "b q -> b 1 q 1")
        return weights.masked_fill(cut.to(weights.device), 0)

    return edit


def _without(share: float, score: Callable[[Tensor], Tensor]) -> Edit:
    if not 0 < share <= 1:
        raise ValueError(f"a share of the weights is above 0 and at most 1, not {share}")

    def edit(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        seen = _seen(call, weights)
        count = seen.sum(dim=-1, keepdim=True)
        taken = torch.minimum((share * count).round().long().clamp_min(1), count - 1)
        order = score(weights).masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True)
        place = torch.arange(weights.shape[-1], device=weights.device).expand_as(order)
        cut = torch.zeros_like(seen).scatter(-1, order, place < taken)
        left = weights.masked_fill(cut, 0)
        before, after = (one.sum(dim=-1, keepdim=True) for one in (weights, left))
        # a row whose every weight was taken is spread over what it has not lost
        even = (seen & ~cut).to(weights.dtype)
        left, after = (
            torch.where(after > 0, one, other)
            for one, other in ((left, even), (after, even.sum(dim=-1, keepdim=True)))
        )
        return left * before / torch.where(after > 0, after, 1)

    return edit


def _seen(call: Call, weights: Float[Tensor, "b h q k"]) -> Bool[Tensor, "b h q k"]:
    visible = call.visible()
    if visible is None:
        return torch.ones_like(weights, dtype=torch.bool)
    return visible[:, None].expand_as(weights)


# --- what they do


@measured("output change", "share", higher_is_better=None, low=0.0, high=1.0)
def output_change(run: Run, edit: Edit | Bias) -> Measured:
    """How far the distribution of answers moves under an edit: half the sum of all changes.

    Jain and Wallace's TVD. 0 means that the model answers the same whatever the edit did.
    """
    before, after = (_distribution(run, one) for one in (None, edit))
    return _variation(before, after).float()


@measured("edit flips", "share", higher_is_better=None, low=0.0, high=1.0)
def edit_flips(run: Run, edit: Edit | Bias) -> Measured:
    """1 where the answer is another one under the edit, else 0; not defined for NaN logits."""
    before, after = (_distribution(run, one) for one in (None, edit))
    other = before.argmax(dim=-1) != after.argmax(dim=-1)
    return defined(other.double(), ~(before + after).isnan().any(dim=-1))


@measured("beyond random weights", "share", higher_is_better=True, low=-1.0, high=1.0)
def beyond_random(
    run: Run, generator: torch.Generator, share: float = 0.1, draws: int = 4
) -> Measured:
    """How much more the answer moves without the largest weights than without random ones.

    Serrano and Smith, section 4: above 0, weights rank keys by what they do. Each is renormalised.
    """
    if draws < 1:
        raise ValueError(f"{draws} draws leave no random weights to compare with; take 1 at least")
    top = output_change(run, without_top(share))
    others = [output_change(run, without_random(share, generator)) for _ in range(draws)]
    return top - torch.stack(others).mean(dim=0)


@measured("weights to flip", "share", higher_is_better=False, low=0.0, high=1.0)
def weights_to_flip(
    run: Run, shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
) -> Measured:
    """The least share of weights, from the largest on, without which the answer is another one.

    Serrano and Smith, section 5, at the `shares` asked for; 1 where none of them is enough. Not
    defined where the logits are NaN at any of them.
    """
    if not shares or list(shares) != sorted(set(shares)):
        raise ValueError(f"shares must grow, and these do not: {list(shares)}")
    flips = torch.stack([edit_flips(run, without_top(share)) for share in shares])
    at = torch.tensor(list(shares), device=flips.device)[:, None]
    return defined(torch.where(flips > 0, at, 1.0).amin(dim=0), ~flips.isnan().any(dim=0))


def _distribution(run: Run, edit: Edit | Bias | None) -> Float[Tensor, "b c"]:
    with torch.no_grad():
        return run(edit).double().softmax(dim=-1)


def _variation(one: Float[Tensor, "b c"], two: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    return ((one - two).abs().sum(dim=-1) / 2).clamp(0, 1)


# --- another map with the same answer


@dataclass(frozen=True, eq=False)
class Alternative:
    """The most different attention that was found, and how far the answer moves under it."""

    attention: AttentionMap
    distance: Measured
    change: Measured


def alternative(
    respond: Respond,
    attention: AttentionMap,
    generator: torch.Generator,
    within: float = 0.01,
    steps: int = 200,
    rate: float = 0.1,
    starts: int = 3,
) -> Alternative:
    """Attention as different as can be found under which the answer moves by `within` at most.

    Jain and Wallace, section 4.2.2: `respond` gives the logits when the weights of one row a sample
    are set to others, and must have a gradient. The Jensen-Shannon divergence is raised by Adam
    from several random starts near the map, with a penalty on what the answer moves beyond
    `within`; the best that keeps to it, of all steps, is kept, and the map itself where there is
    none. What is found is a lower bound: more steps and starts find more. Not defined where the map
    has no weight or one below 0, or the logits are NaN.
    """
    if within <= 0 or min(steps, starts) < 1:
        raise ValueError(f"within is above 0, not {within}; {steps} steps and {starts} starts")
    weights, seen = row(attention)
    own = shares(weights, attention.kind).detach()
    there = (weights > 0).any(dim=-1) & ~own.isnan().any(dim=-1)
    own = own.nan_to_num(0)
    best = own.clone()
    distance = torch.zeros(len(own), dtype=torch.float64, device=own.device)
    change = torch.zeros_like(distance)
    with torch.no_grad():
        before = respond(own.to(attention.weights.dtype)).double().softmax(dim=-1)
    for _ in range(starts):
        noise = normal_numbers(own.shape, generator).to(own)
        scores = (own.clamp_min(1e-6).log() + noise).requires_grad_()
        optimizer = torch.optim.Adam([scores], lr=rate)
        for _ in range(steps):
            with torch.inference_mode(False), torch.enable_grad():
                other = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
                other = torch.where(seen.any(dim=-1, keepdim=True), other, 0)
                after = respond(other.to(attention.weights.dtype)).double().softmax(dim=-1)
                moved, apart = _variation(before, after), _divergence(other, own)
                loss = (-apart + (moved - within).clamp_min(0) / within).sum()
                optimizer.zero_grad()
                loss.backward(inputs=[scores])
            better = ((moved <= within) & (apart > distance)).detach()
            best = torch.where(better[:, None], other.detach(), best)
            distance = torch.where(better, apart.detach(), distance)
            change = torch.where(better, moved.detach(), change)
            optimizer.step()
    there &= ~before.isnan().any(dim=-1)
    values = rearrange(best, "b k -> b 1 1 1 k").to(attention.weights.dtype)
    found = AttentionMap(values, attention.keys, attention.queries, attention.mask)
    return Alternative(found, defined(distance, there), defined(change, there))


@measured("adversarial distance", "nats", higher_is_better=False, low=0.0, high=0.6931472)
def adversarial_distance(
    respond: Respond,
    attention: AttentionMap,
    generator: torch.Generator,
    within: float = 0.01,
    steps: int = 200,
) -> Measured:
    """How far attention can go while the answer stays: the divergence of `alternative`.

    Near ln 2, all but disjoint attention gives the same answer, and the map cannot be the only
    reason for it.
    """
    return alternative(respond, attention, generator, within, steps).distance


def _divergence(one: Float[Tensor, "b k"], two: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Jensen and Shannon's, with a gradient that is finite also where a weight is zero."""
    middle = ((one + two) / 2).clamp_min(1e-30).log()
    sides = [(side * (side.clamp_min(1e-30).log() - middle)).sum(dim=-1) for side in (one, two)]
    return ((sides[0] + sides[1]) / 2).clamp_min(0)


# --- attention that is learned again


@measured("worth of attention", "share", higher_is_better=True, low=-1.0, high=1.0)
def worth_of_attention(train: Callable[[Edit | None], Measured]) -> Measured:
    """What learning where to look adds: each sample's score less that under frozen even attention.

    Wiegreffe and Pinter, section 3.1. `train` fits a model from the start, under an edit that it
    holds for all of training and judging, or under none, and gives one score a sample. About 0
    means that the task does not need attention, and no map of it explains much.
    """
    learned, even = train(None), train(evened)
    if learned.shape != even.shape:
        raise ValueError(f"{len(learned)} and {len(even)} scores are not of the same samples")
    return learned - even


@measured("seed divergence", "nats", higher_is_better=False, low=0.0)
def seed_divergence(maps: Sequence[AttentionMap], compare: Compare = js) -> Measured:
    """How far apart the maps of models are that differ by their seed: the mean over all pairs.

    Wiegreffe and Pinter, section 3.2: a distance between two maps is large or small beside this.
    `compare` is a measure of two maps, whose numbers these then are.
    """
    if len(maps) < 2:
        raise ValueError("a divergence between seeds needs the maps of two at least")
    numbers = torch.stack([compare(one, two) for one, two in combinations(maps, 2)]).double()
    return defined(numbers.nanmean(dim=0), ~numbers.isnan().all(dim=0))
