"""Grounded supervision: words should look at the regions they speak of, and regions back at them.

Samaran, Garcia, Otani, Chu and Nakashima, "Attending Self-Attention: A Case Study of Visually
Grounded Supervision in Vision-and-Language Transformers", 2021, section 2.2.3. Three ways: *direct*
on the weights of every layer and head, *semi-direct* on attention rollout, *indirect* by a
classifier on the final states.

The truth is one map from words to regions, as data sets give it in `batch.target`: each grounded
token has a row of its own, even over all regions of its phrase; tokens without a region, and those
of a caption that does not describe the image, have none and do not count. The paper's code takes
the first region alone: `only_first(target)` does so.

Attention comes as a `Block`, a function that gives some rows of the weights from one span to
another, renormalised over its own keys (eq. 6): `seen.log_block` of any watched model, or
`within(attention)` of a map. Such weights are those before dropout. The paper's code reads them
after it, where a dropped target costs 13.8 whatever the model does.

How many rows are grounded is the size of what is computed, and a card has to be waited for to tell
it. `aims(target)` finds the rows once, where the target was made; a step with `aims(...)` in place
of the target waits for nothing, and `torch.compile` takes it as one graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt import attention as maps
from overt.attention import AttentionMap, Form, Kind, rollout
from overt.capture.derived import rolling
from overt.capture.seen import Seen
from overt.capture.unread import Unread
from overt.supervise.loss import Loss
from overt.supervise.losses import check_fit, cross_entropy, precise, steady, summed

# (query span, key span, rows within the query span, -1 where there is none) -> the rows, normalised
Block = Callable[[str, str, Int[Tensor, "b s"]], AttentionMap]
Compare = Callable[[AttentionMap, AttentionMap], Loss]
Match = Callable[[Float[Tensor, "p d"], Float[Tensor, "p m d"]], Float[Tensor, "p m"]]
LEAST = 1e-6  # what the paper's code adds to a weight before the logarithm


@dataclass(frozen=True, eq=False)
class Aim:
    """The rows that have a target, and the targets of those rows alone."""

    rows: Int[Tensor, "b s"]
    target: AttentionMap

    def to(self, device: torch.device | str) -> "Aim":
        """The same on another device."""
        return Aim(self.rows.to(device), self.target.to(device))


@dataclass(frozen=True, eq=False)
class Aims:
    """A truth made ready for both directions of `direct`."""

    onto_regions: Aim
    onto_text: Aim

    def to(self, device: torch.device | str) -> "Aims":
        """The same on another device."""
        return Aims(self.onto_regions.to(device), self.onto_text.to(device))


def aims(target: AttentionMap) -> Aims:
    """The truth with its rows found, for both directions: before it goes to a card, and once."""
    return Aims(aim(target), aim(turned(target)))


def aim(target: AttentionMap, most: int | None = None) -> Aim:
    """The rows that have a target, and their targets; `most` as in `grounded`."""
    rows = grounded(target, most)
    return Aim(rows, picked(target, rows))


# --- direct


def direct(
    block: Block,
    target: AttentionMap | Aims,
    onto_regions: Compare = cross_entropy,
    onto_text: Compare = cross_entropy,
    words: Bool[Tensor, "b n"] | None = None,
) -> dict[str, Loss]:
    """Both directions on every layer and head that the block has (eq. 8).

    Two losses, because they count different rows: grounded tokens, and regions that are spoken of.
    Each is the mean over layers and heads, summed over rows. `words` says which tokens of the text
    are in W; without it class and separator tokens are too, as in the paper's code.
    `onto_text=bce_log` is what that code does in place of eq. 7.
    """
    ready = target if isinstance(target, Aims) else aims(target)
    return {
        "to_regions": to_regions(block, ready.onto_regions, onto_regions),
        "to_text": to_text(block, ready.onto_text, onto_text, among=words),
    }


def to_regions(
    block: Block,
    target: AttentionMap | Aim,
    compare: Compare = cross_entropy,
    text: str = "text",
    regions: str = "regions",
    among: Bool[Tensor, "b k"] | None = None,
) -> Loss:
    """How far grounded words are from looking at their regions (eq. 7), one row a token.

    `among` says which of the keys are in R; None takes all that the block may see. The whole-image
    box is no region here. The paper's code has it in R: `with_image(target)` over a span of it and
    the regions.
    """
    ready = target if isinstance(target, Aim) else aim(target)
    return _compared(block, ready, compare, (text, regions), among)


def to_text(
    block: Block,
    target: AttentionMap | Aim,
    compare: Compare = cross_entropy,
    text: str = "text",
    regions: str = "regions",
    among: Bool[Tensor, "b k"] | None = None,
) -> Loss:
    """How far regions are from looking at the words that speak of them, one row a region.

    A region should look evenly at all tokens of its phrases, in both captions. `among` says which
    tokens are in W: give the words alone where the span has class and separator tokens too. An
    `Aim` is taken as it is: that of the truth `turned`.
    """
    ready = target if isinstance(target, Aim) else aim(turned(target))
    return _compared(block, ready, compare, (regions, text), among)


def _compared(
    block: Block,
    ready: Aim,
    compare: Compare,
    spans: tuple[str, str],
    among: Bool[Tensor, "b k"] | None,
) -> Loss:
    attention = block(*spans, ready.rows)
    if among is not None:
        attention = narrowed(attention, among)
    if len(attention.keys) != len(ready.target.keys):
        raise ValueError(
            f"the target has {len(ready.target.keys)} keys, and {spans[1]!r} of the model "
            f"{len(attention.keys)}: is it the target of another batch, or of another span?"
        )
    return compare(attention, ready.target)


def bce_log(attention: AttentionMap, target: AttentionMap, least: float = LEAST) -> Loss:
    """Binary cross-entropy with log weights for logits, the mean over the keys of a row.

    This is what the paper's code does from regions to text, over the 0/1 support of the target. Its
    probabilities are a / (1 + a), so that a perfect row of one token still costs log 2 / n.
    """
    check_fit(attention, target)
    visible = attention.visible[:, None, None]
    if attention.form is Form.LOG:  # the slope of log(a + least) by log a is at most one
        logs = precise(attention.values)
        logits = torch.logaddexp(logs, logs.new_full((), math.log(least)))
    else:
        logits = (precise(steady(attention).weights) + least).log()
    costs = nn.functional.softplus(logits) - (target.weights > 0) * logits
    mean = (costs * visible).sum(dim=-1) / visible.sum(dim=-1).clamp_min(1)
    return summed(mean, attention, target)


# --- semi-direct


def within(attention: AttentionMap) -> Block:
    """The blocks of a map that is there in full."""

    def block(query: str, key: str, rows: Int[Tensor, "b s"]) -> AttentionMap:
        return picked(attention.between(query, key), rows)

    return block


def rolled(attention: AttentionMap) -> Block:
    """The blocks of attention rollout up to every layer: semi-direct supervision.

    Heads are averaged first, as in Abnar and Zuidema and in the paper's code, so there is one head
    and not the n_h of the paper's eq. 7. All layers are supervised. Give it `seen.map()`.
    """
    return within(rollout(attention))


def rolled_rows(seen: Seen) -> Block:
    """The blocks of the rollout through all layers alone, made for the rows asked for only.

    A departure from the paper, which supervises the rollout up to each layer: this keeps memory
    that grows with the length of the sequence, not with its square.
    """

    def block(query: str, key: str, rows: Int[Tensor, "b s"]) -> AttentionMap:
        queries, _ = seen.layouts(seen.calls)
        found = rolling.rollout(seen, _standing(queries.find(query).index, rows))
        return found.between(found.queries.spans[0].name, key)

    return block


def _standing(index: slice | Tensor, rows: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Where rows of a span stand on the whole axis."""
    if isinstance(index, slice):
        found = (index.start or 0) + rows * (index.step or 1)
    else:
        found = index.to(rows.device).gather(1, rows.clamp_min(0))
    return torch.where(rows < 0, -1, found)


# --- indirect


class Matcher(nn.Module):
    """`d([e, x])`: do a phrase and a region belong together? One linear layer, as in the paper."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.judge = nn.Linear(2 * width, 1)
        nn.init.xavier_uniform_(self.judge.weight)
        nn.init.zeros_(self.judge.bias)

    def forward(
        self, phrases: Float[Tensor, "p d"], regions: Float[Tensor, "p m d"]
    ) -> Float[Tensor, "p m"]:
        """A logit for each phrase with each region of its image."""
        of_phrase, of_region = self.judge.weight.split(self.width, dim=1)
        return phrases @ of_phrase.mT + (regions @ of_region.mT)[..., 0] + self.judge.bias


def indirect(
    match: Match,
    phrases: Float[Tensor, "p d"],
    regions: Float[Tensor, "p m d"],
    wanted: Bool[Tensor, "p m"],
    present: Bool[Tensor, "p m"],
) -> Loss:
    """Whether a classifier tells the regions of each phrase by their final states (eq. 5).

    The mean over the regions that are present, summed over phrases. The paper's code takes one mean
    over all pairs of a batch, in which a photo with many boxes counts more. The whole-image box is
    no candidate. Which states make a phrase is the caller's: those of its words, or, as the
    published code has it by a slip, of the words after it.
    """
    return matching(match(phrases, regions), wanted, present)


# --- which region is meant


def matching(
    logits: Float[Tensor, "b m"], wanted: Bool[Tensor, "b m"], present: Bool[Tensor, "b m"]
) -> Loss:
    """Whether each region is told right by itself: binary cross-entropy, the mean over a row.

    VL-BERT's loss for referring expressions, where it is one mean over all regions of a batch.
    """
    logits = precise(logits)
    costs = nn.functional.softplus(logits) - wanted * logits
    mean = torch.where(present, costs, 0).sum(dim=-1) / present.sum(dim=-1).clamp_min(1)
    rows = present.any(dim=-1)
    return Loss(torch.where(rows, mean, 0).sum(), rows.sum())


def choice(
    logits: Float[Tensor, "b m"], wanted: Bool[Tensor, "b m"], present: Bool[Tensor, "b m"]
) -> Loss:
    """Cross-entropy of the choice among the regions that are present, evenly over those wanted.

    One region is chosen in the end, so regions compete: learns sooner than `matching` where most
    are wrong. A sample of which no wanted region is present counts nothing.
    """
    wanted = wanted & present
    rows = wanted.any(dim=-1)
    hidden = rows[:, None] & ~present  # the gradient of a softmax over nothing is NaN
    logs = precise(logits).masked_fill(hidden, -torch.inf).log_softmax(dim=-1)
    shares = wanted / wanted.sum(dim=-1, keepdim=True).clamp_min(1)
    return Loss(-(torch.where(wanted, logs, 0) * shares).sum(), rows.sum())


# --- targets and rows


def grounded(target: AttentionMap, most: int | None = None) -> Int[Tensor, "b s"]:
    """The rows that have a target, in their order, -1 after them; at least one column.

    `most` is how many rows a sample may have, where that is known; a sample with more is an error.
    Without it the target is counted, and a card waited for.
    """
    wanted = target.rows & (target.weights > 0).any(dim=-1).any(dim=2).any(dim=1)
    counts = wanted.sum(dim=1)
    if most is None:
        most = max(1, int(counts.amax())) if len(wanted) else 1
    elif wanted.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((counts > most).any()):
            raise ValueError(f"a sample has {int(counts.amax())} grounded rows, more than {most}")
    else:
        torch._assert_async((counts <= most).all(), f"a sample has more than {most} grounded rows")
    order = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return torch.where(wanted.gather(1, order), order, -1)


def turned(target: AttentionMap) -> AttentionMap:
    """The truth the other way: each region evenly at all tokens that speak of it."""
    spoken = ((target.weights > 0) & target.visible[:, None, None]).to(target.values.dtype)
    return AttentionMap(
        spoken.transpose(-1, -2), target.queries, target.keys, None, Kind.AMOUNT
    ).normalize()


def only_first(target: AttentionMap) -> AttentionMap:
    """The truth with the first region of each token alone, as the paper's code has it."""
    wanted = (target.weights > 0) & target.visible[:, None, None]
    first = wanted & (wanted.cumsum(dim=-1) == 1)
    return replace(
        target, values=first.to(target.values.dtype), kind=Kind.PROBABILITY, form=Form.PLAIN
    )


def with_image(target: AttentionMap) -> AttentionMap:
    """The truth over one key more, before the others: the whole image, which nothing speaks of."""
    nothing = -torch.inf if target.form is Form.LOG else 0.0
    values = nn.functional.pad(target.values, (1, 0), value=nothing)
    mask = None
    if target.mask is not None:
        mask = torch.cat([target.mask.any(dim=-1, keepdim=True), target.mask], dim=-1)
    return replace(target, values=values, keys=maps.regions(values.shape[-1], "boxes"), mask=mask)


def narrowed(attention: AttentionMap, among: Bool[Tensor, "b k"]) -> AttentionMap:
    """The map renormalised over some of its keys; exact, because a division cancels."""
    if isinstance(attention, Unread):
        return attention.narrowed(among)
    return replace(attention, mask=attention.visible & among[:, None]).normalize()


def picked(attention: AttentionMap, rows: Int[Tensor, "b s"]) -> AttentionMap:
    """Some rows of a map, one list of them a sample; -1 is a row that sees nothing."""
    b, l, h, _, k = attention.values.shape
    there, at = rows >= 0, rows.clamp_min(0)
    nothing = -torch.inf if attention.form is Form.LOG else 0.0
    values = attention.values.gather(3, at[:, None, None, :, None].expand(b, l, h, -1, k))
    mask = attention.visible.gather(1, at[..., None].expand(-1, -1, k)) & there[..., None]
    return replace(
        attention,
        values=torch.where(there[:, None, None, :, None], values, nothing),
        queries=maps.words(rows.shape[1], "rows"),
        mask=mask,
    )
