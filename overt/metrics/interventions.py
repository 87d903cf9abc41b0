"""Interventions on attention weights: edit them during the forward pass and watch the answer.

`run` returns the logits of the same samples under an edit of their attention, or without one:

    run = editable_forward(model, lambda: model(**inputs).logits)
    moved = output_change(run, permute_weights(generator))

Jain and Wallace, "Attention is not Explanation", NAACL 2019, https://arxiv.org/abs/1902.10186;
Serrano and Smith, "Is Attention Interpretable?", ACL 2019, https://arxiv.org/abs/1906.03731;
Wiegreffe and Pinter, "Attention is not not Explanation", EMNLP 2019,
https://arxiv.org/abs/1908.04626. If the answer stays the same under other weights, these weights
were not necessary; it does not follow that they did nothing (see the third paper).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.capture.call import Call
from overt.capture.edits import Bias, Edit
from overt.capture.session import watch
from overt.metrics.agreement import js
from overt.metrics.argument_checks import (
    check_count,
    check_generator,
    check_positive,
    check_share,
    check_shares,
)
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    single_row,
    to_distribution,
)
from overt.metrics.rng import sample_normal, sample_uniform

Run = Callable[[Edit | Bias | None], Float[Tensor, "b c"]]
Respond = Callable[[Float[Tensor, "b k"]], Float[Tensor, "b c"]]
Compare = Callable[[AttentionMap, AttentionMap], SampleScores]


def editable_forward(
    model: nn.Module,
    forward: Callable[[], Float[Tensor, "b c"]],
    layers: Sequence[int | str] | None = None,
) -> Run:
    """Make a forward function that takes an edit of the attention weights.

    Args:
        model: Any model that can be watched.
        forward: Runs the model and returns its logits.
        layers: The layers whose attention is edited; all by default.

    Returns:
        A function of an edit, or of None, that returns the logits.

    Example:
        >>> class Attend(nn.Module):  # returns its attention weights, the softmax of the scores
        ...     def forward(self, scores):
        ...         eye = torch.eye(3)[None, None]
        ...         return nn.functional.scaled_dot_product_attention(scores, eye, eye, scale=1.0)
        >>> model, scores = Attend(), torch.tensor([[[[0.6, 0.3, 0.1]]]]).log()
        >>> run = editable_forward(model, lambda: model(scores).flatten(1))
        >>> run(None)
        tensor([[0.6000, 0.3000, 0.1000]])
        >>> run(uniform_weights)
        tensor([[0.3333, 0.3333, 0.3333]])
    """

    def run(edit: Edit | Bias | None) -> Float[Tensor, "b c"]:
        # unedited: the model runs without any hook
        if edit is None:
            return forward()
        with watch(model, layers=layers, edit=edit):
            return forward()

    return run


# --- edits; hidden keys stay without weight


def permute_weights(generator: torch.Generator) -> Edit:
    """Permute the weights of every row among its visible keys (Jain and Wallace, section 4.2.1).

    Args:
        generator: The source of random numbers. Each call of the edit draws new permutations.

    Returns:
        The edit.

    Example:
        >>> class Attend(nn.Module):  # returns its attention weights, the softmax of the scores
        ...     def forward(self, scores):
        ...         eye = torch.eye(3)[None, None]
        ...         return nn.functional.scaled_dot_product_attention(scores, eye, eye, scale=1.0)
        >>> model, scores = Attend(), torch.tensor([[[[0.6, 0.3, 0.1]]]]).log()
        >>> run = editable_forward(model, lambda: model(scores).flatten(1))
        >>> run(permute_weights(torch.Generator().manual_seed(0)))
        tensor([[0.3000, 0.1000, 0.6000]])
    """
    check_generator(generator)

    def edit(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        seen = _visible_keys(call, weights)
        noise = sample_uniform(weights.shape, generator)
        places = noise.to(weights.device).masked_fill(~seen, 2.0).argsort(dim=-1)
        # visible keys come first in both orders: weight i of one goes to place i of the other
        sources = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
        return torch.zeros_like(weights).scatter(-1, places, weights.gather(-1, sources))

    return edit


def uniform_weights(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Spread the weight of every row uniformly over its visible keys.

    Also applied during training, this is the frozen uniform attention of Wiegreffe and Pinter
    (section 3.1): `with watch(model, edit=uniform_weights): fit(...)`.

    Args:
        call: The attention call, whose mask says which keys are visible.
        weights: The weights of the call.

    Returns:
        The uniform weights, with the sums of the original rows.

    Example:
        >>> class Attend(nn.Module):  # returns its attention weights, the softmax of the scores
        ...     def forward(self, scores):
        ...         eye = torch.eye(4)[None, None]
        ...         return nn.functional.scaled_dot_product_attention(scores, eye, eye, scale=1.0)
        >>> model, scores = Attend(), torch.tensor([[[[0.6, 0.2, 0.1, 0.1]]]]).log()
        >>> with watch(model, edit=uniform_weights):
        ...     model(scores).flatten()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    seen = _visible_keys(call, weights).to(weights.dtype)
    total = weights.sum(dim=-1, keepdim=True)
    return seen * total / seen.sum(dim=-1, keepdim=True).clamp_min(1)


def drop_top_weights(share: float) -> Edit:
    """Set the largest weights of each row to zero and renormalize the others to the same sum.

    Drops a `share` of the visible keys of each row; at least one is dropped and at least one stays
    (Serrano and Smith, section 3). Equal weights are dropped in a fixed random order.
    """
    return _drop_weights(share, lambda weights: weights, [])


def drop_random_weights(share: float, generator: torch.Generator) -> Edit:
    """Drop as many weights as `drop_top_weights` at random: its control."""
    check_generator(generator)

    def score(weights: Tensor) -> Tensor:
        noise = sample_uniform(weights.shape, generator)
        return noise.to(weights.device)

    return _drop_weights(share, score, [])


def knock_out_attention(
    keys: Bool[Tensor, "b k"], queries: Bool[Tensor, "b q"] | None = None
) -> Edit:
    """Set the weights from `queries` to `keys` to zero, without renormalizing.

    Attention knockout of Geva, Bastings, Filippova and Globerson 2023, who renormalize: for that,
    add -inf to the scores with `Bias`.

    Args:
        keys: The keys to cut off.
        queries: The queries that lose them; all by default.

    Returns:
        The edit.

    Example:
        >>> class Attend(nn.Module):  # returns its attention weights, the softmax of the scores
        ...     def forward(self, scores):
        ...         eye = torch.eye(3)[None, None]
        ...         return nn.functional.scaled_dot_product_attention(scores, eye, eye, scale=1.0)
        >>> model, scores = Attend(), torch.tensor([[[[0.6, 0.3, 0.1]]]]).log()
        >>> with watch(model, edit=knock_out_attention(torch.tensor([[True, False, False]]))):
        ...     model(scores).flatten()
        tensor([0.0000, 0.3000, 0.1000])
    """

    def edit(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        b, _, q, k = weights.shape
        if keys.shape != (b, k) or (queries is not None and queries.shape != (b, q)):
            raise ValueError(
                f"keys must have shape ({b}, {k}) and queries ({b}, {q}) for "
                f"{call.name or 'the model'}, got {tuple(keys.shape)} and "
                f"{None if queries is None else tuple(queries.shape)}"
            )
        cut = rearrange(keys, "b k -> b 1 1 k")
        if queries is not None:
            cut = cut & rearrange(queries, "b q -> b 1 q 1")
        return weights.masked_fill(cut.to(weights.device), 0)

    return edit


def _drop_weights(
    share: float, score: Callable[[Tensor], Tensor], tally: list[tuple[Tensor, Tensor]]
) -> Edit:
    """Make an edit that drops a share of each row, and tally dropped and visible weights."""
    share = check_share(share, zero=False)

    def edit(call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        seen = _visible_keys(call, weights)
        count = seen.sum(dim=-1, keepdim=True)
        # at least one weight is dropped and at least one stays; a row of one key loses none
        taken = torch.minimum((share * count).round().long().clamp_min(1), count - 1).clamp_min(0)
        tally.append((taken.flatten(1).sum(dim=-1), count.flatten(1).sum(dim=-1)))
        # ties in a fixed random order: in that of the keys, equal weights would lose the first keys
        mixed = _random_order(weights)
        scores = score(weights).masked_fill(~seen, -torch.inf).gather(-1, mixed)
        order = mixed.gather(-1, scores.argsort(dim=-1, descending=True, stable=True))
        place = torch.arange(weights.shape[-1], device=weights.device).expand_as(order)
        # ranks back to positions: the first `taken` keys of the order are cut
        cut = torch.zeros_like(seen).scatter(-1, order, place < taken)
        left = weights.masked_fill(cut, 0)
        before, after = (one.sum(dim=-1, keepdim=True) for one in (weights, left))
        # a row that lost all its weight is spread uniformly over its remaining keys
        even = (seen & ~cut).to(weights.dtype)
        left, after = (
            torch.where(after > 0, one, other)
            for one, other in ((left, even), (after, even.sum(dim=-1, keepdim=True)))
        )
        # the row keeps its sum: with a learned sink this is not one
        return left * before / torch.where(after > 0, after, 1)

    return edit


def _random_order(weights: Float[Tensor, "b h q k"]) -> Int[Tensor, "b h q k"]:
    """Return a random order of the keys of each row: the same in each sample and each time."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.rand(weights.shape[1:], generator=generator).argsort(dim=-1)
    return mixed.to(weights.device).expand_as(weights)


def _visible_keys(call: Call, weights: Float[Tensor, "b h q k"]) -> Bool[Tensor, "b h q k"]:
    visible = call.visible()
    if visible is None:
        return torch.ones_like(weights, dtype=torch.bool)
    return visible[:, None].expand_as(weights)


# --- effect of an edit


@declare_metric("output change", "share", higher_is_better=None, low=0.0, high=1.0)
def output_change(run: Run, edit: Edit | Bias) -> SampleScores:
    """Compute how far an edit moves the output distribution, as total variation distance.

    TVD of Jain and Wallace. 0 means that the edit does not change the answer at all.

    Args:
        run: The forward function, from `editable_forward`.
        edit: The edit of the weights.

    Returns:
        One distance per sample.

    Example:
        >>> class Attend(nn.Module):  # returns the logarithms of its attention weights
        ...     def forward(self, scores):
        ...         eye = torch.eye(2)[None, None]
        ...         found = nn.functional.scaled_dot_product_attention(scores, eye, eye, scale=1.0)
        ...         return found.flatten(1).log()
        >>> model, scores = Attend(), torch.tensor([[[[0.8, 0.2]]]]).log()
        >>> run = editable_forward(model, lambda: model(scores))
        >>> output_change(run, uniform_weights)  # from (0.8, 0.2) to (0.5, 0.5)
        tensor([0.3000])
    """
    before, after = (_distribution(run, one) for one in (None, edit))
    return _total_variation(before, after).float()


@declare_metric("edit flips", "share", higher_is_better=None, low=0.0, high=1.0)
def edit_flips(run: Run, edit: Edit | Bias) -> SampleScores:
    """Compute whether an edit changes the predicted class: 1 or 0 per sample.

    Args:
        run: The forward function, from `editable_forward`.
        edit: The edit of the weights.

    Returns:
        One score per sample; NaN for NaN logits.
    """
    before, after = (_distribution(run, one) for one in (None, edit))
    other = before.argmax(dim=-1) != after.argmax(dim=-1)
    return mask_undefined(other.double(), ~(before + after).isnan().any(dim=-1))


@declare_metric(
    "beyond random weights", "share", higher_is_better=True, low=-1.0, high=1.0, version=2
)
def beyond_random_weights(
    run: Run, generator: torch.Generator, share: float = 0.1, draws: int = 4
) -> SampleScores:
    """Compute how much more the answer moves without the largest weights than without random ones.

    Serrano and Smith, section 4: above 0, weights rank keys by their effect. Rows are renormalized.

    Args:
        run: The forward function, from `editable_forward`.
        generator: The source of random numbers.
        share: Share of the weights to drop.
        draws: Number of random drops to average.

    Returns:
        One difference of total variation distances per sample.
    """
    draws, generator = check_count("draws", draws), check_generator(generator)
    top = output_change(run, drop_top_weights(share))
    others = [output_change(run, drop_random_weights(share, generator)) for _ in range(draws)]
    return top - torch.stack(others).mean(dim=0)


@declare_metric("weights to flip", "share", higher_is_better=False, low=0.0, high=1.0, version=3)
def weights_to_flip(
    run: Run, shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
) -> SampleScores:
    """Compute the least share of weights, largest first, whose removal changes the predicted class.

    Serrano and Smith, section 5. The score is the share of weights that was really dropped: of a
    row of four keys it is at least a quarter.

    Args:
        run: The forward function, from `editable_forward`.
        shares: Shares to try, in increasing order.

    Returns:
        One share per sample; 1 where no share is enough, NaN where logits are NaN at any of them.

    Raises:
        ValueError: The shares do not increase.
    """
    shares = check_shares(shares, zero=False)
    flips, removed = [], []
    for share in shares:
        tally: list[tuple[Tensor, Tensor]] = []
        flips.append(edit_flips(run, _drop_weights(share, lambda weights: weights, tally)))
        removed.append(_dropped_share(tally, len(flips[-1]), share).to(flips[-1].device))
    found, at = torch.stack(flips), torch.stack(removed)
    return mask_undefined(torch.where(found > 0, at, 1.0).amin(dim=0), ~found.isnan().any(dim=0))


def _dropped_share(
    tally: list[tuple[Tensor, Tensor]], samples: int, share: float
) -> Float[Tensor, " b"]:
    """Compute the dropped share per sample; the requested one where calls are not by sample."""
    if not tally or any(len(taken) != samples for taken, _ in tally):
        # windows are folded into the batch axis of a call, so its rows are not the samples
        return torch.full((samples,), share, dtype=torch.float64)
    taken, seen = (torch.stack([one[side] for one in tally]).sum(dim=0) for side in (0, 1))
    return taken / seen.clamp_min(1).double()


def _distribution(run: Run, edit: Edit | Bias | None) -> Float[Tensor, "b c"]:
    with torch.no_grad():
        return run(edit).double().softmax(dim=-1)


def _total_variation(one: Float[Tensor, "b c"], two: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    return ((one - two).abs().sum(dim=-1) / 2).clamp(0, 1)


# --- adversarial attention: another map with the same answer


@dataclass(frozen=True, eq=False)
class AlternativeAttention:
    """The most different attention found, its distance, and how far it moves the answer."""

    attention: AttentionMap
    distance: SampleScores
    change: SampleScores


def find_alternative_attention(
    respond: Respond,
    attention: AttentionMap,
    generator: torch.Generator,
    within: float = 0.01,
    steps: int = 200,
    rate: float = 0.1,
    starts: int = 3,
) -> AlternativeAttention:
    """Search for attention as different as possible that moves the answer by at most `within`.

    Jain and Wallace, section 4.2.2. Adam maximizes the Jensen-Shannon divergence from several
    random starts near the map, with a penalty on the change of the answer beyond `within`. The best
    feasible map of all steps is kept, or the map itself if there is none. The result is a lower
    bound: more steps and starts find more.

    Args:
        respond: Returns the logits for given weights, one row per sample; must be differentiable.
        attention: A map with one row per sample.
        generator: The source of random numbers.
        within: The largest total variation distance of the output that is allowed.
        steps: Optimization steps per start.
        rate: Learning rate.
        starts: Number of random starts.

    Returns:
        The alternative; its scores are NaN where the map is empty or has a negative weight, or
        logits are NaN.

    Raises:
        ValueError: `within`, `steps`, `rate` or `starts` is not positive.
    """
    within, rate = check_positive("within", within), check_positive("rate", rate)
    steps, starts = check_count("steps", steps), check_count("starts", starts)
    weights, seen = single_row(attention)
    own = to_distribution(weights, attention.kind).detach()
    there = (weights > 0).any(dim=-1) & ~own.isnan().any(dim=-1)
    # --- the map itself is the first candidate: distance 0, change 0
    own = own.nan_to_num(0)
    best = own.clone()
    distance = torch.zeros(len(own), dtype=torch.float64, device=own.device)
    change = torch.zeros_like(distance)
    with torch.no_grad():
        before = respond(own.to(attention.weights.dtype)).double().softmax(dim=-1)
    for _ in range(starts):
        noise = sample_normal(own.shape, generator).to(own)
        # --- search on scores: their softmax is a distribution at every step
        scores = (own.clamp_min(1e-6).log() + noise).requires_grad_()
        optimizer = torch.optim.Adam([scores], lr=rate)
        for _ in range(steps):
            # the caller may be in no_grad or inference mode, where the search has no gradient
            with torch.inference_mode(False), torch.enable_grad():
                other = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
                other = torch.where(seen.any(dim=-1, keepdim=True), other, 0)
                after = respond(other.to(attention.weights.dtype)).double().softmax(dim=-1)
                moved, apart = _total_variation(before, after), _js_divergence(other, own)
                # in units of `within`, so that the penalty outweighs a divergence of at most ln 2
                loss = (-apart + (moved - within).clamp_min(0) / within).sum()
                optimizer.zero_grad()
                loss.backward(inputs=[scores])  # not into the parameters of the model
            # feasible and farther than before; each sample keeps its own best step
            better = ((moved <= within) & (apart > distance)).detach()
            best = torch.where(better[:, None], other.detach(), best)
            distance = torch.where(better, apart.detach(), distance)
            change = torch.where(better, moved.detach(), change)
            # after the comparison: `other` belongs to the scores before this step
            optimizer.step()
    there &= ~before.isnan().any(dim=-1)
    values = rearrange(best, "b k -> b 1 1 1 k").to(attention.weights.dtype)
    found = AttentionMap(values, attention.keys, attention.queries, attention.mask)
    return AlternativeAttention(
        found, mask_undefined(distance, there), mask_undefined(change, there)
    )


@declare_metric("adversarial distance", "nats", higher_is_better=False, low=0.0, high=0.6931472)
def adversarial_distance(
    respond: Respond,
    attention: AttentionMap,
    generator: torch.Generator,
    within: float = 0.01,
    steps: int = 200,
) -> SampleScores:
    """Compute how different attention can be without changing the answer (a lower bound).

    The divergence of `find_alternative_attention`. Near ln 2, almost disjoint attention gives the
    same answer, and the map cannot be the only explanation.

    Args:
        respond: Returns the logits for given weights, one row per sample; must be differentiable.
        attention: A map with one row per sample.
        generator: The source of random numbers.
        within: The largest total variation distance of the output that is allowed.
        steps: Optimization steps per start.

    Returns:
        One divergence per sample, in nats.
    """
    return find_alternative_attention(respond, attention, generator, within, steps).distance


def _js_divergence(one: Float[Tensor, "b k"], two: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Compute the Jensen-Shannon divergence with a finite gradient where a weight is zero."""
    # the clamp is far below any weight: the value is unchanged, and the gradient of log stays
    # finite
    middle = ((one + two) / 2).clamp_min(1e-30).log()
    sides = [(side * (side.clamp_min(1e-30).log() - middle)).sum(dim=-1) for side in (one, two)]
    return ((sides[0] + sides[1]) / 2).clamp_min(0)


# --- retrained models


@declare_metric("worth of attention", "share", higher_is_better=True, low=-1.0, high=1.0)
def gain_over_uniform_attention(train: Callable[[Edit | None], SampleScores]) -> SampleScores:
    """Compute the gain in score of learned attention over frozen uniform attention.

    Wiegreffe and Pinter, section 3.1. About 0 means that the task does not need attention, and its
    maps explain little.

    Args:
        train: Trains a model from scratch under an edit that stays on for training and evaluation,
            or under None, and returns one score per sample.

    Returns:
        One difference per sample.
    """
    learned, even = train(None), train(uniform_weights)
    if learned.shape != even.shape:
        raise ValueError(
            f"both trainings must score the same samples, got {len(learned)} and {len(even)}"
        )
    return learned - even


@declare_metric("seed divergence", "nats", higher_is_better=False, low=0.0)
def seed_divergence(maps: Sequence[AttentionMap], compare: Compare = js) -> SampleScores:
    """Compute the mean distance between maps of models that differ by their seed.

    Wiegreffe and Pinter, section 3.2: the baseline for any distance between two maps.

    Args:
        maps: The maps of each model on the same samples.
        compare: A metric of two maps, Jensen-Shannon divergence by default.

    Returns:
        One mean per sample over all pairs of models.

    Raises:
        ValueError: There are fewer than two models.
    """
    if len(maps) < 2:
        raise ValueError(f"seed divergence needs the maps of at least 2 models, got {len(maps)}")
    numbers = torch.stack([compare(one, two) for one, two in combinations(maps, 2)]).double()
    return mask_undefined(numbers.nanmean(dim=0), ~numbers.isnan().all(dim=0))
