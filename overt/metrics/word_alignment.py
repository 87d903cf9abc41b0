"""Alignment of captioning attention with the effect of regions, word by word and layer by layer.

Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022, sections 3 and 5.3 to 5.4:
weights, and learned masks, against the effect of regions on a word; weights before and after
alignment. Maps go from words to regions. `tell` returns the log-probability of every word:

    tell = hide_regions(model, lambda: word_scores(model(batch)))
    effect = region_effects(tell, attention)
    effect_agreement(attention, effect).nanmean(dim=0)  # one number per layer

Masks are trained to lower the very probability whose gradient is one of the two references, so
agreement of masks with gradients is weak evidence. Removal is the other reference, and a random map
is the lower bound for both.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Kind, words
from overt.capture.call import Call, QKCall
from overt.capture.edits import Bias
from overt.capture.session import watch
from overt.metrics.agreement import js, kendall
from overt.metrics.metric import SampleScores, declare_metric
from overt.metrics.top_cells import first_cells, rank_keys

WordScorer = Callable[
    [Bool[Tensor, "b #q k"]], Float[Tensor, "b q"]
]  # mask of visible regions -> log-probabilities
Compare = Callable[[AttentionMap, AttentionMap], SampleScores]
LayerScores = Float[Tensor, "b l"]  # mean over heads and words; NaN for a sample without any

TENTHS = tuple(tenth / 10 for tenth in range(10))


# --- rows


def select_words(attention: AttentionMap, rows: Bool[Tensor, "b q"]) -> AttentionMap:
    """Hide the rows of a map that are not in `rows`: padding, and words that should not count.

    Args:
        attention: A map with one row per word.
        rows: Which rows to keep.

    Returns:
        The map; hidden rows are zero and not visible.

    Example:
        >>> maps = AttentionMap.from_weights(torch.full((1, 2, 4), 0.25), axes="b q k")
        >>> select_words(maps, torch.tensor([[True, False]])).rows
        tensor([[ True, False]])
    """
    seen = attention.visible & rearrange(rows.to(attention.values.device), "b q -> b q 1")
    gone = rearrange(~seen, "b q k -> b 1 1 q k")
    nothing = -torch.inf if attention.form is Form.LOG else 0
    return replace(attention, values=attention.values.masked_fill(gone, nothing), mask=seen)


def shift_to_next_word(truth: AttentionMap) -> AttentionMap:
    """Shift the truth so that each row has the regions of the word after it.

    A decoder attends from the row before a word: row n of its attention wrote word n + 1.

    Args:
        truth: The regions of each word.

    Returns:
        A map with one row less.

    Raises:
        ValueError: The text has fewer than 2 tokens.

    Example:
        >>> truth = AttentionMap.from_weights(torch.eye(3)[None], axes="b q k")
        >>> shift_to_next_word(truth).weights[0, 0, 0]
        tensor([[0., 1., 0.],
                [0., 0., 1.]])
    """
    count = truth.values.shape[3] - 1
    if count < 1:
        raise ValueError(f"a text needs at least 2 tokens, got {count + 1}")
    mask = truth.mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, 1:]
    return replace(truth, values=truth.values[:, :, :, 1:], mask=mask, queries=words(count))


def score_each_row(
    compare: Compare, attention: AttentionMap, truth: AttentionMap
) -> Float[Tensor, "b l h q"]:
    """Score every layer, head and word by a metric of two maps.

    Args:
        compare: A metric of two maps.
        attention: Maps from words to regions.
        truth: The maps to compare with; a single layer or head is compared with all.

    Returns:
        One score per sample, layer, head and word; NaN for rows that are hidden in either map.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    shape = attention.values.shape
    try:
        spread = truth.values.expand(shape)
    except RuntimeError as problem:
        raise ValueError(
            f"the truth must broadcast to the attention (b, l, h, q, k), got "
            f"{tuple(truth.values.shape)} and {tuple(shape)}: use the same words and regions"
        ) from problem
    found = compare(attention.rows_as_samples(), replace(truth, values=spread).rows_as_samples())
    there = (attention.rows & truth.rows)[:, None, None].expand(shape[:4])
    return torch.where(there, found.reshape(shape[:4]), torch.nan)


def mean_over_words(numbers: Float[Tensor, "b l h q"]) -> LayerScores:
    """Average over heads and words that have a score."""
    return rearrange(numbers, "b l h q -> b l (h q)").double().nanmean(dim=-1).float()


# --- effect of regions on a word


def hide_regions(
    model: nn.Module,
    forward: Callable[[], Float[Tensor, "b q"]],
    layers: Collection[int | str] | None = None,
) -> WordScorer:
    """Make a function that returns word log-probabilities with some regions hidden from attention.

    Regions are hidden from words, not removed from the input: other regions keep what they received
    from a hidden one in the encoder. An aligner inside `forward` does not see hidden regions
    either.

    Args:
        model: Any model that can be watched.
        forward: Runs the model and returns the log-probability of every word.
        layers: The layers in which regions are hidden; all cross-attention by default.

    Returns:
        A function of the mask of visible regions.

    Example:
        >>> layer = nn.MultiheadAttention(4, 1, batch_first=True)
        >>> words, regions = torch.rand(1, 2, 4), torch.rand(1, 3, 4)
        >>> tell = hide_regions(layer, lambda: layer(words, regions, regions)[0].mean(dim=-1))
        >>> tell(torch.tensor([[[True, False, True]]])).shape
        torch.Size([1, 2])
    """

    def tell(keep: Bool[Tensor, "b #q k"]) -> Float[Tensor, "b q"]:
        with watch(model, layers=layers, edit=Bias(lambda call: _hiding_bias(call, keep, layers))):
            return forward()

    return tell


def _hiding_bias(
    call: Call, keep: Bool[Tensor, "b #q k"], layers: Collection[int | str] | None
) -> Float[Tensor, "b 1 #q k"] | None:
    if layers is None and not call.cross:
        return None
    b, _, q, k = call.shape
    if keep.shape[0] != b or keep.shape[1] not in (1, q) or keep.shape[2] != k:
        raise ValueError(
            f"keep must have shape ({b}, 1 or {q}, {k}) for {call.name or 'the model'}, got "
            f"{tuple(keep.shape)}"
        )
    source = call.source
    gone = ~keep.to(source.query.device if isinstance(source, QKCall) else source.used.device)
    return rearrange(torch.zeros(gone.shape, device=gone.device), "b q k -> b 1 q k").masked_fill(
        rearrange(gone, "b q k -> b 1 q k"), -torch.inf
    )


@torch.no_grad()
def region_effects(
    tell: WordScorer, attention: AttentionMap, size: Callable[[Tensor], Tensor] = torch.abs
) -> AttentionMap:
    """Compute how far the log-probability of each word falls when each region alone is hidden.

    One call of `tell` per region that any sample has. A region that is the only one of its sample
    stays and has no effect.

    Args:
        tell: Returns word log-probabilities given the visible regions.
        attention: The map whose words and regions are used.
        size: What counts of a change: by default its absolute value; with `torch.relu` only a fall.

    Returns:
        A map of the effects, with one layer and head.

    Example:
        >>> maps = AttentionMap.from_weights(torch.full((1, 1, 2), 0.5), axes="b q k")
        >>> def tell(keep):  # only the first region matters
        ...     return keep[..., 0].float()
        >>> region_effects(tell, maps).weights.flatten().float()
        tensor([1., 0.])
    """
    seen = attention.visible.any(dim=1)
    whole = tell(seen[:, None]).double()
    found = torch.zeros(*whole.shape, seen.shape[1], dtype=torch.float64, device=whole.device)
    for key in seen.any(dim=0).nonzero().flatten().tolist():
        keep = seen.clone()
        keep[:, key] = False
        taken = keep.any(dim=-1)
        keep[~taken] = seen[~taken]
        fall = size(whole - tell(keep[:, None]).double())
        found[:, :, key] = torch.where(taken[:, None].to(fall.device), fall, 0)
    return _to_map(found, attention)


def l2_norm(gradient: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """Compute the Euclidean norm of the gradient at each region."""
    return gradient.norm(dim=-1)


def l1_norm(gradient: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """Compute the sum of absolute gradients at each region."""
    return gradient.abs().sum(dim=-1)


def region_gradients(
    tell: Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b q"]],
    states: Float[Tensor, "b k d"],
    attention: AttentionMap,
    size: Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b k"]] = l2_norm,
) -> AttentionMap:
    """Compute the norm of the gradient of each word's log-probability by each region (section 3).

    The paper uses the gradient of the probability; for one word it ranks regions the same, and the
    log does not vanish. The paper does not say which norm; here it is Euclidean. One backward pass
    per word.

    Args:
        tell: Returns the log-probability of words given the states of the regions.
        states: The states of the regions.
        attention: The map whose words and regions are used.
        size: The norm: `l2_norm` or `l1_norm`.

    Returns:
        A map of the norms, with one layer and head.

    Raises:
        ValueError: The log-probabilities do not depend on the states.
    """
    with torch.inference_mode(False), torch.enable_grad():
        given = states.detach().clone().requires_grad_()
        log_probability = tell(given)
        if not log_probability.requires_grad:
            raise ValueError(
                "the log-probabilities have no gradient by the states: tell must use them"
            )
        count = log_probability.shape[1]
        found = [
            size(
                torch.autograd.grad(log_probability[:, n].sum(), given, retain_graph=n + 1 < count)[
                    0
                ]
            )
            for n in range(count)
        ]
    return _to_map(torch.stack(found, dim=1).double(), attention)


def _to_map(values: Float[Tensor, "b q k"], attention: AttentionMap) -> AttentionMap:
    """Convert scores of words and regions to a map with one layer and head."""
    seen = attention.visible.to(values.device)
    if values.shape != seen.shape:
        raise ValueError(
            f"tell must return one log-probability per row of the attention, got "
            f"{tuple(values.shape)} and {tuple(seen.shape)} (samples, words, regions)"
        )
    kind = Kind.SIGNED if bool((values < 0).any()) else Kind.AMOUNT
    return AttentionMap(
        rearrange(values.masked_fill(~seen, 0), "b q k -> b 1 1 q k"),
        attention.keys,
        attention.queries,
        seen,
        kind,
    )


# --- scores per sample and layer


@declare_metric("effect agreement", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def effect_agreement(
    attention: AttentionMap, effect: AttentionMap, compare: Compare = kendall
) -> LayerScores:
    """Compute Kendall's tau-b of weights with the effect of regions, averaged over words.

    Figures 2 and 5. Heads are averaged before, as in the paper. Words on which no region has an
    effect do not count.

    Args:
        attention: Maps from words to regions; masks can be scored as `1 - m`.
        effect: From `region_gradients` or `region_effects`.
        compare: A metric of two maps.

    Returns:
        One mean per sample and layer.

    Example:
        >>> maps = AttentionMap.from_weights(torch.tensor([[[0.5, 0.3, 0.2]]]), axes="b q k")
        >>> effect_agreement(maps, maps)
        tensor([[1.]])
    """
    return mean_over_words(score_each_row(compare, attention.over_heads(), effect))


@declare_metric("alignment divergence", "nats", higher_is_better=None, low=0.0, high=0.6931472)
def alignment_divergence(before: AttentionMap, after: AttentionMap) -> LayerScores:
    """Compute the Jensen-Shannon divergence of weights before and after alignment, over words.

    Equation 13, figure 6; of every head and word by itself. Weights that do not sum to one are
    normalized first, without which the score is not a divergence.

    Args:
        before: Maps before alignment.
        after: Maps after alignment.

    Returns:
        One mean per sample and layer, in nats.
    """
    return mean_over_words(score_each_row(js, before, after))


# --- deletion curve


@dataclass(frozen=True, eq=False)
class RegionDeletionCurve:
    """Log-probability of every word with each share of its regions hidden from it alone.

    Args:
        shares: The requested shares of hidden regions.
        removed: The share of each word's regions that was hidden: regions are whole, and one always
            stays, so with few regions it differs from the requested share.
        whole: Log-probabilities with all regions.
        log_probability: Log-probabilities at each share.
        rows: Which words count.
    """

    shares: tuple[float, ...]
    removed: Float[Tensor, "s b q"]
    whole: Float[Tensor, "b q"]
    log_probability: Float[Tensor, "s b q"]
    rows: Bool[Tensor, "b q"]

    @property
    def drop(self) -> Float[Tensor, "s b"]:
        """Compute the fall below the whole, averaged over words; NaN for a sample without words."""
        fallen = torch.where(self.rows, self.whole - self.log_probability, torch.nan)
        return fallen.nanmean(dim=-1)

    @property
    def area(self) -> SampleScores:
        """Compute the mean fall over the hidden shares, by trapezoids, averaged over words.

        NaN for a sample without a word for which the first and the last share differ.
        """
        if len(self.shares) < 2:
            raise ValueError(f"an area needs at least 2 shares, got {len(self.shares)}")
        total = torch.trapezoid(self.whole - self.log_probability, self.removed, dim=0)
        width = self.removed[-1] - self.removed[0]
        each = torch.where(self.rows & (width > 0), total / width, torch.nan)
        return each.nanmean(dim=-1).float()


@torch.no_grad()
def region_deletion_curve(
    tell: WordScorer,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> RegionDeletionCurve:
    """Hide from each word the regions it attends to most, more and more of them.

    Earlier words keep their regions. Ties are broken at random; at least one region stays.

    Args:
        tell: Returns word log-probabilities given the visible regions.
        attention: A map with one layer and head: `.over_layers().over_heads()`, or a map of
            effects, of masks, of a truth, or `random_map` as a control.
        generator: Breaks ties.
        shares: Shares of regions to hide, in increasing order.

    Returns:
        The curve.

    Raises:
        ValueError: The shares do not increase, or the map has several layers or heads.
    """
    if not shares or list(shares) != sorted(set(shares)) or shares[0] < 0 or shares[-1] > 1:
        raise ValueError(f"shares must increase from 0 to at most 1, got {list(shares)}")
    if attention.values.shape[1:3] != (1, 1):
        raise ValueError("expected a map with one layer and head: use .over_layers().over_heads()")
    b, q, k = attention.visible.shape
    single = attention.rows_as_samples()
    order = rank_keys(single, generator)
    seen = single.visible[:, 0]
    everything = attention.visible.any(dim=1)[:, None].expand(b, q, k)
    counts = seen.sum(dim=-1, keepdim=True)
    log_probability, removed = [], []
    for share in shares:
        gone = _most_attended(order, counts, share) & seen
        keep = rearrange(~gone, "(b q) k -> b q k", b=b) & everything
        log_probability.append(tell(keep).double())
        hidden = gone.sum(dim=-1) / counts[:, 0].clamp_min(1).double()
        removed.append(rearrange(hidden, "(b q) -> b q", b=b))
    whole = tell(everything).double()
    return RegionDeletionCurve(
        tuple(shares),
        torch.stack(removed).to(whole.device),
        whole,
        torch.stack(log_probability),
        attention.rows.to(whole.device),
    )


def _most_attended(
    order: Int[Tensor, "n k"], counts: Int[Tensor, "n 1"], share: float
) -> Bool[Tensor, "n k"]:
    """Select the first share of the regions, rounded, at least one; one region always stays."""
    wanted = (share * counts).round().long()
    wanted = wanted.clamp_min(1) if share > 0 else wanted
    return first_cells(order, torch.minimum(wanted, (counts - 1).clamp_min(0)))


# --- single words


def most_attended_region(attention: AttentionMap) -> Int[Tensor, "b q"]:
    """Return the region each word attends to most, over all layers and heads; -1 for none.

    Figures 1 and 7.
    """
    weights = attention.over_layers().over_heads().weights[:, 0, 0]
    best = weights.masked_fill(~attention.visible, -torch.inf).argmax(dim=-1)
    return torch.where(attention.rows & (weights > 0).any(dim=-1), best, -1)
