"""Does each word of a caption look at what it is made of? Word by word and layer by layer.

Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022, sections 3 and 5.3 to 5.4:
weights, and masks that were learned, against what regions do to a word; weights before and after
alignment. Maps go from words to regions. `tell` gives the log-probability of every word:

    tell = hiding(model, lambda: word_scores(model(batch)))
    effect = region_effects(tell, attention)
    effect_agreement(attention, effect).nanmean(dim=0)  # one number a layer

Masks are trained to lower the very probability whose gradient is one of the two references, so
agreement of masks with gradients says little by itself: removal is the other reference, and a
random map the least that either must beat.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Kind, words
from overt.capture.call import Call, Projected
from overt.capture.edits import Bias
from overt.capture.watching import watch
from overt.measure.agreement import js, kendall
from overt.measure.cells import first, ranked
from overt.measure.measured import Measured, measured

Tell = Callable[[Bool[Tensor, "b #q k"]], Float[Tensor, "b q"]]  # of regions that words may see
Compare = Callable[[AttentionMap, AttentionMap], Measured]
Layered = Float[Tensor, "b l"]  # the mean over heads and words; NaN for a sample without any

TENTHS = tuple(tenth / 10 for tenth in range(10))


# --- rows


def spoken(attention: AttentionMap, rows: Bool[Tensor, "b q"]) -> AttentionMap:
    """The map without the rows that are no words: padding, and words that should not count."""
    seen = attention.visible & rearrange(rows.to(attention.values.device), "b q -> b q 1")
    gone = rearrange(~seen, "b q k -> b 1 1 q k")
    nothing = -torch.inf if attention.form is Form.LOG else 0
    return replace(attention, values=attention.values.masked_fill(gone, nothing), mask=seen)


def of_next(truth: AttentionMap) -> AttentionMap:
    """What the word after each row speaks of, from a truth with a row where each word stands.

    A decoder looks for a word from the row before it: row n of its attention wrote word n + 1.
    """
    count = truth.values.shape[3] - 1
    if count < 1:
        raise ValueError("a text of one place has no word after it")
    mask = truth.mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, 1:]
    return replace(truth, values=truth.values[:, :, :, 1:], mask=mask, queries=words(count))


def row_by_row(
    compare: Compare, attention: AttentionMap, truth: AttentionMap
) -> Float[Tensor, "b l h q"]:
    """A measure of two maps for every layer, head and word; a truth of one layer is held to all.

    NaN for rows that see nothing in either map.
    """
    shape = attention.values.shape
    try:
        spread = truth.values.expand(shape)
    except RuntimeError as problem:
        raise ValueError(
            f"a truth of shape {tuple(truth.values.shape)} (b, l, h, q, k) does not spread over "
            f"attention of {tuple(shape)}: take the same words and regions of both"
        ) from problem
    found = compare(attention.each_row(), replace(truth, values=spread).each_row())
    there = (attention.rows & truth.rows)[:, None, None].expand(shape[:4])
    return torch.where(there, found.reshape(shape[:4]), torch.nan)


def over_words(numbers: Float[Tensor, "b l h q"]) -> Layered:
    """The mean over heads and words that have a number."""
    return rearrange(numbers, "b l h q -> b l (h q)").double().nanmean(dim=-1).float()


# --- what regions do to a word


def hiding(
    model: nn.Module,
    forward: Callable[[], Float[Tensor, "b q"]],
    layers: Collection[int | str] | None = None,
) -> Tell:
    """A `Tell` of any model that can be watched: regions are hidden from words, not cut out.

    `forward()` runs the model and gives the log-probability of every word. The keys of all
    attention to another sequence are hidden, or of that of `layers`; other regions still know what
    a hidden one told them in the encoder. An aligner may be at work inside `forward`: what is
    hidden is hidden from it too.
    """

    def tell(keep: Bool[Tensor, "b #q k"]) -> Float[Tensor, "b q"]:
        with watch(model, layers=layers, edit=Bias(lambda call: _hidden(call, keep, layers))):
            return forward()

    return tell


def _hidden(
    call: Call, keep: Bool[Tensor, "b #q k"], layers: Collection[int | str] | None
) -> Float[Tensor, "b 1 #q k"] | None:
    if layers is None and not call.cross:
        return None
    b, _, q, k = call.shape
    if keep.shape[0] != b or keep.shape[1] not in (1, q) or keep.shape[2] != k:
        raise ValueError(
            f"{call.name or 'the model'} looks from {q} words at {k} regions in {b} samples, and "
            f"what is to be hidden was told for {tuple(keep.shape)}"
        )
    source = call.source
    gone = ~keep.to(source.query.device if isinstance(source, Projected) else source.used.device)
    return rearrange(torch.zeros(gone.shape, device=gone.device), "b q k -> b 1 q k").masked_fill(
        rearrange(gone, "b q k -> b 1 q k"), -torch.inf
    )


@torch.no_grad()
def region_effects(
    tell: Tell, attention: AttentionMap, size: Callable[[Tensor], Tensor] = torch.abs
) -> AttentionMap:
    """How far the log-probability of each word falls when each region alone is removed.

    One call of `tell` a region that any sample has. `size` is what counts of a fall: by default a
    rise counts as much; with `torch.relu` only a fall does. A region that is the only one of its
    sample stays and does nothing.
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
    return _amounts(found, attention)


def euclidean(gradient: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """The length of the gradient at each region."""
    return gradient.norm(dim=-1)


def absolute(gradient: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """The sum of the gradient's entries at each region, without their signs."""
    return gradient.abs().sum(dim=-1)


def region_gradients(
    tell: Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b q"]],
    states: Float[Tensor, "b k d"],
    attention: AttentionMap,
    size: Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b k"]] = euclidean,
) -> AttentionMap:
    """How steep the log-probability of each word is in the state of each region (section 3).

    The paper takes the gradient of the probability; of one word it ranks regions the same, and
    does not round to nothing. Its bars do not say which norm: it is Euclid's here. `tell` gives
    the log-probability of words from states that it is given; one backward pass a word.
    """
    with torch.inference_mode(False), torch.enable_grad():
        given = states.detach().clone().requires_grad_()
        told = tell(given)
        if not told.requires_grad:
            raise ValueError("what is told of the words does not depend on the states it is given")
        count = told.shape[1]
        found = [
            size(torch.autograd.grad(told[:, n].sum(), given, retain_graph=n + 1 < count)[0])
            for n in range(count)
        ]
    return _amounts(torch.stack(found, dim=1).double(), attention)


def _amounts(values: Float[Tensor, "b q k"], attention: AttentionMap) -> AttentionMap:
    """Numbers of words and regions as a map of one layer and head, where the attention may look."""
    seen = attention.visible.to(values.device)
    if values.shape != seen.shape:
        raise ValueError(
            f"numbers of {tuple(values.shape)} (samples, words, regions) for attention of "
            f"{tuple(seen.shape)}: tell must give a number for every row of the attention"
        )
    kind = Kind.SIGNED if bool((values < 0).any()) else Kind.AMOUNT
    return AttentionMap(
        rearrange(values.masked_fill(~seen, 0), "b q k -> b 1 1 q k"),
        attention.keys,
        attention.queries,
        seen,
        kind,
    )


# --- numbers, one a sample and layer


@measured("effect agreement", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def effect_agreement(
    attention: AttentionMap, effect: AttentionMap, compare: Compare = kendall
) -> Layered:
    """Whether weights rank regions as what regions do: tau-b of every word, its mean (figure 2, 5).

    Heads are averaged before, as in the paper. `effect` comes from `region_gradients` or
    `region_effects`; in the place of weights masks may stand, as `1 - m`. Words on which no region
    has an effect do not count.
    """
    return over_words(row_by_row(compare, attention.over_heads(), effect))


@measured("alignment divergence", "nats", higher_is_better=None, low=0.0, high=0.6931472)
def alignment_divergence(before: AttentionMap, after: AttentionMap) -> Layered:
    """Jensen and Shannon's divergence of weights before and after, its mean (eq. 13, figure 6).

    Of every head and word by itself. Weights that do not sum to one are read as shares of their
    sum: without that the number is no divergence.
    """
    return over_words(row_by_row(js, before, after))


# --- removing more and more


@dataclass(frozen=True, eq=False)
class Fall:
    """The log-probability of every word with each share of its regions hidden from it alone."""

    shares: tuple[float, ...]
    whole: Float[Tensor, "b q"]
    told: Float[Tensor, "s b q"]
    rows: Bool[Tensor, "b q"]

    @property
    def drop(self) -> Float[Tensor, "s b"]:
        """How far it is below that of the whole, a mean over words; NaN for a sample without."""
        fallen = torch.where(self.rows, self.whole - self.told, torch.nan)
        return fallen.nanmean(dim=-1)

    @property
    def area(self) -> Measured:
        """The mean drop between the first and the last share, by trapezoids."""
        if len(self.shares) < 2:
            raise ValueError("a curve of one point has no area; take two shares at least")
        at = torch.tensor(self.shares, dtype=torch.float64, device=self.told.device)
        return (torch.trapezoid(self.drop, at, dim=0) / (at[-1] - at[0])).float()


@torch.no_grad()
def fall(
    tell: Tell,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Fall:
    """Hide from each word the regions it looks at most, more and more of them.

    The map has one layer and one head: `.over_layers().over_heads()`, or a map of effects, of
    masks, of a truth, or `controls.random_map` to hold it against. Words before keep what they
    saw. Equals go in a random order; one region at least stays.
    """
    if not shares or list(shares) != sorted(set(shares)) or shares[0] < 0 or shares[-1] > 1:
        raise ValueError(f"shares must grow, from 0 to 1 at most, and these do not: {list(shares)}")
    if attention.values.shape[1:3] != (1, 1):
        raise ValueError("an order of regions is read off one layer and head: fuse the others")
    b, q, k = attention.visible.shape
    single = attention.each_row()
    order = ranked(single, generator)
    seen = single.visible[:, 0]
    everything = attention.visible.any(dim=1)[:, None].expand(b, q, k)
    counts = seen.sum(dim=-1, keepdim=True)
    told = []
    for share in shares:
        gone = _most(order, counts, share) & seen
        keep = rearrange(~gone, "(b q) k -> b q k", b=b) & everything
        told.append(tell(keep).double())
    whole = tell(everything).double()
    return Fall(tuple(shares), whole, torch.stack(told), attention.rows.to(whole.device))


def _most(
    order: Int[Tensor, "n k"], counts: Int[Tensor, "n 1"], share: float
) -> Bool[Tensor, "n k"]:
    """The first share of the regions there are, rounded, one at least of any; one always stays."""
    wanted = (share * counts).round().long()
    wanted = wanted.clamp_min(1) if share > 0 else wanted
    return first(order, torch.minimum(wanted, (counts - 1).clamp_min(0)))


# --- word by word


def looked_at(attention: AttentionMap) -> Int[Tensor, "b q"]:
    """The region each word looks at most, over all layers and heads (figures 1 and 7); -1: none."""
    weights = attention.over_layers().over_heads().weights[:, 0, 0]
    best = weights.masked_fill(~attention.visible, -torch.inf).argmax(dim=-1)
    return torch.where(attention.rows & (weights > 0).any(dim=-1), best, -1)
