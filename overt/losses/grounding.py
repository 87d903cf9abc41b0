"""Grounded supervision: words attend to the regions they describe, and regions to their words.

Samaran, Garcia, Otani, Chu and Nakashima, "Attending Self-Attention: A Case Study of Visually
Grounded Supervision in Vision-and-Language Transformers", 2021, section 2.2.3. Supervision is
*direct* on the weights of every layer and head, *semi-direct* on attention rollout, or *indirect*
by a classifier on the final states.

The ground truth is one map from words to regions, the `batch.target` of datasets: each grounded
token has a row that is uniform over all regions of its phrase. Tokens without a region, and those
of a caption that does not describe the image, have no target and do not count. The paper's code
uses the first region only, as `keep_first_region(target)` does.

Attention is passed as a `Block`, a function that returns some rows of the weights from one span to
another, renormalised over its keys (eq. 6): `trace.log_block` of any watched model, or
`map_blocks(attention)` of a map. These weights are before dropout. The paper's code reads them
after dropout, where a dropped target costs 13.8 for any model: `drop_blocks` does the same.

The number of grounded rows is a tensor size, so finding them synchronizes the GPU.
`grounding_targets(target)` finds the rows once, when the target is made. A step that uses it
instead of the target does not synchronize, and `torch.compile` captures it as one graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt import attention as maps
from overt.attention import AttentionMap, Form, Kind
from overt.attribution import rollout
from overt.capture.trace import AttentionTrace
from overt.losses.attention_losses import (
    at_least_float32,
    check_shapes,
    cross_entropy,
    detach_subnormal,
    sum_rows,
)
from overt.losses.loss import Loss

# (query span, key span, rows within the query span or -1) -> the normalised rows
Block = Callable[[str, str, Int[Tensor, "b s"]], AttentionMap]
MapLoss = Callable[[AttentionMap, AttentionMap], Loss]
Match = Callable[[Float[Tensor, "p d"], Float[Tensor, "p m d"]], Float[Tensor, "p m"]]
EPS = 1e-6  # the paper's code adds it to a weight before the logarithm


@dataclass(frozen=True, eq=False)
class GroundedRows:
    """The rows that have a target, and the targets of these rows.

    Args:
        rows: The indices of the rows, -1 for none.
        target: The targets of the rows.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[0, 0], [0, 1.0]]]), axes="b q k")
        >>> grounded_rows(target).rows
        tensor([[1]])
    """

    rows: Int[Tensor, "b s"]
    target: AttentionMap

    def to(self, device: torch.device | str) -> "GroundedRows":
        """Return a copy on another device."""
        return GroundedRows(self.rows.to(device), self.target.to(device))


@dataclass(frozen=True, eq=False)
class GroundingTargets:
    """Prepared targets for both directions of `direct_supervision`.

    Args:
        onto_regions: The targets of words.
        onto_text: The targets of regions.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[0, 0], [0, 1.0]]]), axes="b q k")
        >>> found = grounding_targets(target)
        >>> found.onto_regions.rows, found.onto_text.rows
        (tensor([[1]]), tensor([[1]]))
    """

    onto_regions: GroundedRows
    onto_text: GroundedRows

    def to(self, device: torch.device | str) -> "GroundingTargets":
        """Return a copy on another device."""
        return GroundingTargets(self.onto_regions.to(device), self.onto_text.to(device))


def grounding_targets(target: AttentionMap) -> GroundingTargets:
    """Prepare the targets of both directions; call it once, before moving the target to a GPU.

    Args:
        target: The ground truth, from words to regions.

    Returns:
        The prepared targets.

    Example:
        >>> target = AttentionMap.from_weights(torch.eye(2)[None], axes="b q k")
        >>> grounding_targets(target).onto_text.rows
        tensor([[0, 1]])
    """
    return GroundingTargets(grounded_rows(target), grounded_rows(transpose_target(target)))


def grounded_rows(target: AttentionMap, most: int | None = None) -> GroundedRows:
    """Find the rows that have a target, and their targets.

    Args:
        target: The ground truth.
        most: See `find_grounded_rows`.

    Returns:
        The rows and their targets.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[0, 0], [0.5, 0.5]]]), axes="b q k")
        >>> grounded_rows(target).target.weights.flatten()
        tensor([0.5000, 0.5000])
    """
    rows = find_grounded_rows(target, most)
    return GroundedRows(rows, gather_rows(target, rows))


# --- direct


def direct_supervision(
    block: Block,
    target: AttentionMap | GroundingTargets,
    onto_regions: MapLoss = cross_entropy,
    onto_text: MapLoss = cross_entropy,
    words: Bool[Tensor, "b n"] | None = None,
) -> dict[str, Loss]:
    """Compute the losses of both directions on every layer and head of the block (eq. 8).

    Two losses, because they count different rows: grounded tokens, and described regions. Each is
    the mean over layers and heads, summed over rows. `onto_text=bce_on_log_weights` is what the
    paper's code does instead of eq. 7.

    Args:
        block: Returns rows of the attention.
        target: The ground truth, or its prepared form.
        onto_regions: The loss from words to regions.
        onto_text: The loss from regions to words.
        words: Which tokens are in W; by default all, including class and separator tokens, as in
            the paper's code.

    Returns:
        The losses "to_regions" and "to_text".

    Example:
        >>> layout = maps.words(2) + maps.regions(3)
        >>> attention = AttentionMap(torch.full((1, 1, 1, 5, 5), 0.2), layout, layout)
        >>> target = AttentionMap.from_weights(torch.eye(2, 3)[None], axes="b q k")
        >>> found = direct_supervision(map_blocks(attention), target)
        >>> {name: round(loss.mean().item(), 4) for name, loss in found.items()}  # log 3, log 2
        {'to_regions': 1.0986, 'to_text': 0.6931}
    """
    ready = target if isinstance(target, GroundingTargets) else grounding_targets(target)
    return {
        "to_regions": text_to_regions(block, ready.onto_regions, onto_regions),
        "to_text": regions_to_text(block, ready.onto_text, onto_text, among=words),
    }


def text_to_regions(
    block: Block,
    target: AttentionMap | GroundedRows,
    compare: MapLoss = cross_entropy,
    text: str = "text",
    regions: str = "regions",
    among: Bool[Tensor, "b k"] | None = None,
) -> Loss:
    """Compute the loss of grounded words on their regions (eq. 7), one row per token.

    The whole-image box is not a region here. The paper's code includes it in R: use
    `add_image_region(target)` over a span of it and the regions.

    Args:
        block: Returns rows of the attention.
        target: The ground truth, or its prepared rows.
        compare: The loss of two maps.
        text: The name of the span of words.
        regions: The name of the span of regions.
        among: Which keys are in R; None uses all visible keys of the block.

    Returns:
        The loss.

    Raises:
        ValueError: The target has another number of keys.

    Example:
        >>> layout = maps.words(2) + maps.regions(3)
        >>> attention = AttentionMap(torch.full((1, 1, 1, 5, 5), 0.2), layout, layout)
        >>> target = AttentionMap.from_weights(torch.eye(2, 3)[None], axes="b q k")
        >>> text_to_regions(map_blocks(attention), target).mean()  # log 3
        tensor(1.0986)
    """
    ready = target if isinstance(target, GroundedRows) else grounded_rows(target)
    return _block_loss(block, ready, compare, (text, regions), among)


def regions_to_text(
    block: Block,
    target: AttentionMap | GroundedRows,
    compare: MapLoss = cross_entropy,
    text: str = "text",
    regions: str = "regions",
    among: Bool[Tensor, "b k"] | None = None,
) -> Loss:
    """Compute the loss of regions on the words that describe them, one row per region.

    The target of a region is uniform over all tokens of its phrases, in both captions.

    Args:
        block: Returns rows of the attention.
        target: The ground truth, from words to regions; prepared rows are used unchanged, and
            must be those of the transposed target.
        compare: The loss of two maps.
        text: The name of the span of words.
        regions: The name of the span of regions.
        among: Which tokens are in W; pass the words if the span has class and separator tokens.

    Returns:
        The loss.

    Raises:
        ValueError: The target has another number of keys.

    Example:
        >>> layout = maps.words(2) + maps.regions(3)
        >>> attention = AttentionMap(torch.full((1, 1, 1, 5, 5), 0.2), layout, layout)
        >>> target = AttentionMap.from_weights(torch.eye(2, 3)[None], axes="b q k")
        >>> regions_to_text(map_blocks(attention), target).mean()  # log 2
        tensor(0.6931)
    """
    ready = target if isinstance(target, GroundedRows) else grounded_rows(transpose_target(target))
    return _block_loss(block, ready, compare, (regions, text), among)


def _block_loss(
    block: Block,
    ready: GroundedRows,
    compare: MapLoss,
    spans: tuple[str, str],
    among: Bool[Tensor, "b k"] | None,
) -> Loss:
    attention = block(*spans, ready.rows)
    if among is not None:
        attention = attention.restrict_keys(among)
    if len(attention.keys) != len(ready.target.keys):
        raise ValueError(
            f"the target has {len(ready.target.keys)} keys, span {spans[1]!r} of the model has "
            f"{len(attention.keys)}: use the target of the same batch and span"
        )
    return compare(attention, ready.target)


def bce_on_log_weights(attention: AttentionMap, target: AttentionMap, least: float = EPS) -> Loss:
    """Compute binary cross-entropy with log weights as logits, averaged over the keys of a row.

    The paper's code does this from regions to text, over the 0/1 support of the target. Its
    probabilities are a / (1 + a), so a perfect row of one token still costs log 2 / n.

    Args:
        attention: The attention of the model.
        target: The target map.
        least: Added to a weight before the logarithm.

    Returns:
        The loss, one row per supervised query.

    Example:
        >>> perfect = AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> bce_on_log_weights(perfect, perfect).mean()  # log 2 / 2
        tensor(0.3466)
    """
    check_shapes(attention, target)
    visible = attention.visible[:, None, None]
    if attention.form is Form.LOG:  # the derivative of log(a + least) by log a is at most one
        logs = at_least_float32(attention.values)
        logits = torch.logaddexp(logs, logs.new_full((), math.log(least)))
    else:
        logits = (at_least_float32(detach_subnormal(attention).weights) + least).log()
    costs = nn.functional.softplus(logits) - (target.weights > 0) * logits
    mean = (costs * visible).sum(dim=-1) / visible.sum(dim=-1).clamp_min(1)
    return sum_rows(mean, attention, target)


def drop_weights(attention: AttentionMap, probability: float) -> AttentionMap:
    """Return the map after dropout of its weights, normalised again; a row may become empty.

    The paper's code supervises weights after dropout: a dropped target then costs 13.8 for any
    model and has no gradient. Here the dropped weights are drawn for the loss alone, independently
    of those that the model drops itself.

    Args:
        attention: The map.
        probability: The probability that a weight is dropped.

    Returns:
        A map of plain weights.

    Raises:
        ValueError: The probability is not between 0 and 1.

    Example:
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), maps.words(2))
        >>> drop_weights(attention, 0.0).weights.flatten()
        tensor([0.2500, 0.7500])
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be from 0 to below 1, got {probability}")
    kept = nn.functional.dropout(attention.weights, probability)
    return replace(attention, values=kept, kind=Kind.AMOUNT, form=Form.PLAIN).normalize()


def drop_blocks(block: Block, probability: float) -> Block:
    """Return blocks after dropout of their weights, as supervised by the paper's code.

    Args:
        block: Returns rows of the attention.
        probability: The probability that a weight is dropped.

    Returns:
        A block function.

    Example:
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), maps.words(2))
        >>> block = drop_blocks(lambda query, key, rows: attention, 0.0)
        >>> block("text", "regions", torch.zeros(1, 1, dtype=torch.long)).weights.flatten()
        tensor([0.2500, 0.7500])
    """
    return lambda query, key, rows: drop_weights(block(query, key, rows), probability)


def floored_cross_entropy(
    attention: AttentionMap, target: AttentionMap, least: float = EPS
) -> Loss:
    """Compute the cross-entropy of `weight + least`, as in the paper's code.

    A weight of zero costs 13.8 and not 20.7 as in `cross_entropy`.

    Args:
        attention: The attention of the model.
        target: The target map.
        least: Added to a weight before the logarithm.

    Returns:
        The loss, one row per supervised query.

    Raises:
        ValueError: The shapes do not match.

    Example:
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.0, 1.0]]), maps.words(2))
        >>> target = AttentionMap.from_cells(torch.tensor([[1.0, 0.0]]), maps.words(2))
        >>> round(float(floored_cross_entropy(attention, target).total), 1)
        13.8
    """
    check_shapes(attention, target)
    logs = (at_least_float32(detach_subnormal(attention).weights) + least).log()
    return sum_rows(-(at_least_float32(target.weights) * logs).sum(dim=-1), attention, target)


# --- semi-direct


def map_blocks(attention: AttentionMap) -> Block:
    """Return the blocks of a stored map.

    Args:
        attention: The map.

    Returns:
        A block function.

    Example:
        >>> layout = maps.words(2) + maps.regions(3)
        >>> attention = AttentionMap(torch.full((1, 1, 1, 5, 5), 0.2), layout, layout)
        >>> map_blocks(attention)("text", "regions", torch.tensor([[0]])).weights.shape
        torch.Size([1, 1, 1, 1, 3])
    """

    def block(query: str, key: str, rows: Int[Tensor, "b s"]) -> AttentionMap:
        return gather_rows(attention.between(query, key), rows)

    return block


def rollout_blocks(attention: AttentionMap) -> Block:
    """Return the blocks of attention rollout up to every layer: semi-direct supervision.

    Heads are averaged first, as in Abnar and Zuidema and in the paper's code, so there is one head
    and not the n_h of the paper's eq. 7. All layers are supervised.

    Args:
        attention: The complete map, such as `trace.map()`.

    Returns:
        A block function.

    Example:
        >>> layout = maps.words(2) + maps.regions(3)
        >>> attention = AttentionMap(torch.full((1, 4, 2, 5, 5), 0.2), layout, layout)
        >>> rollout_blocks(attention)("text", "regions", torch.tensor([[0]])).weights.shape
        torch.Size([1, 4, 1, 1, 3])
    """
    return map_blocks(rollout(attention))


def rollout_row_blocks(trace: AttentionTrace) -> Block:
    """Return the blocks of the rollout through all layers, computed for the requested rows only.

    A departure from the paper, which supervises the rollout up to each layer: memory grows linearly
    with the sequence length, not quadratically.

    Args:
        trace: A trace of `overt.watch`.

    Returns:
        A block function.

    Example:
        >>> import overt
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> layout = maps.words(2) + maps.regions(3)
        >>> with overt.watch(layer, layout=layout) as trace:
        ...     _ = layer(torch.rand(1, 5, 8))
        >>> rollout_row_blocks(trace)("text", "regions", torch.tensor([[0]])).weights.shape
        torch.Size([1, 1, 1, 1, 3])
    """

    def block(query: str, key: str, rows: Int[Tensor, "b s"]) -> AttentionMap:
        queries, _ = trace.layouts(trace.calls)
        found = rollout(trace, _axis_positions(queries.find(query).index, rows))
        return found.between(found.queries.spans[0].name, key)

    return block


def _axis_positions(index: slice | Tensor, rows: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Return the axis positions of rows of a span."""
    if isinstance(index, slice):
        found = (index.start or 0) + rows * (index.step or 1)
    else:
        found = index.to(rows.device).gather(1, rows.clamp_min(0))
    return torch.where(rows < 0, -1, found)


# --- indirect


class PhraseRegionMatcher(nn.Module):
    """Classify pairs of phrase and region, `d([e, x])`: one linear layer, as in the paper.

    The phrase adds the same number to the logits of all regions, so regions are ranked the same
    for every phrase of an image, whatever the weights. This can teach which regions are mentioned,
    and not which phrase means which region: `BilinearMatcher` and `MLPMatcher` can teach both.

    Args:
        width: The size of the states.

    Example:
        >>> match = PhraseRegionMatcher(4)
        >>> order = match(torch.rand(2, 4), torch.rand(1, 5, 4).expand(2, 5, 4)).argsort(dim=1)
        >>> bool((order[0] == order[1]).all())
        True
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.judge = nn.Linear(2 * width, 1)
        nn.init.xavier_uniform_(self.judge.weight)
        nn.init.zeros_(self.judge.bias)

    def forward(
        self, phrases: Float[Tensor, "p d"], regions: Float[Tensor, "p m d"]
    ) -> Float[Tensor, "p m"]:
        """Return a logit for each phrase and each region of its image."""
        of_phrase, of_region = self.judge.weight.split(self.width, dim=1)
        return phrases @ of_phrase.mT + (regions @ of_region.mT)[..., 0] + self.judge.bias


class BilinearMatcher(nn.Module):
    """Classify pairs of phrase and region by `e^T W x + b`.

    A departure from the paper: unlike in eq. 5, the ranking of regions depends on the phrase, so
    this can teach which region a phrase means.

    Args:
        width: The size of the states.

    Example:
        >>> match = BilinearMatcher(2)
        >>> _ = match.judge.weight.data.copy_(torch.eye(2)[None])
        >>> regions = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).expand(2, 2, 2)
        >>> match(torch.eye(2), regions).tolist()  # each phrase prefers its own region
        [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.judge = nn.Bilinear(width, width, 1)
        # The product of two states of size 1 per feature then has a deviation of 1.
        nn.init.normal_(self.judge.weight, std=1 / width)
        nn.init.zeros_(self.judge.bias)

    def forward(
        self, phrases: Float[Tensor, "p d"], regions: Float[Tensor, "p m d"]
    ) -> Float[Tensor, "p m"]:
        """Return a logit for each phrase and each region of its image."""
        # The phrase is multiplied once, not once per region as in nn.Bilinear.
        wanted = phrases @ self.judge.weight[0]
        return (regions @ wanted[..., None])[..., 0] + self.judge.bias


class MLPMatcher(nn.Module):
    """Classify pairs of phrase and region by two layers on `[e, x]`.

    A departure from the paper: one hidden layer of `width` units with GELU makes the ranking of
    regions depend on the phrase, which the single linear layer of eq. 5 cannot.

    Args:
        width: The size of the states.

    Example:
        >>> MLPMatcher(4)(torch.rand(3, 4), torch.rand(3, 5, 4)).shape
        torch.Size([3, 5])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Linear(2 * width, width)
        self.judge = nn.Linear(width, 1)
        for layer in (self.inner, self.judge):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, phrases: Float[Tensor, "p d"], regions: Float[Tensor, "p m d"]
    ) -> Float[Tensor, "p m"]:
        """Return a logit for each phrase and each region of its image."""
        of_phrase, of_region = self.inner.weight.split(self.width, dim=1)
        inner = (phrases @ of_phrase.mT)[:, None] + regions @ of_region.mT + self.inner.bias
        return self.judge(nn.functional.gelu(inner))[..., 0]


def indirect_supervision(
    match: Match,
    phrases: Float[Tensor, "p d"],
    regions: Float[Tensor, "p m d"],
    wanted: Bool[Tensor, "p m"],
    present: Bool[Tensor, "p m"],
) -> Loss:
    """Compute the loss of a classifier of phrase-region pairs on the final states (eq. 5).

    The mean over present regions, summed over phrases. The paper's code takes one mean over all
    pairs of a batch, in which images with many boxes count more. The whole-image box is not a
    candidate. The caller chooses the states of a phrase: those of its words, or, as in a mistake of
    the published code, those of the words after it.

    Args:
        match: The classifier.
        phrases: The state of each phrase.
        regions: The states of the regions of its image.
        wanted: Which regions belong to the phrase.
        present: Which regions are not padding.

    Returns:
        The loss, one row per phrase.

    Example:
        >>> def match(phrases, regions):
        ...     return (phrases[:, None] * regions).sum(dim=-1)
        >>> wanted, present = torch.tensor([[True, False]]), torch.tensor([[True, True]])
        >>> phrases, regions = torch.zeros(1, 4), torch.rand(1, 2, 4)
        >>> indirect_supervision(match, phrases, regions, wanted, present).mean()
        tensor(0.6931)
    """
    return region_matching(match(phrases, regions), wanted, present)


# --- selection of regions


def region_matching(
    logits: Float[Tensor, "b m"], wanted: Bool[Tensor, "b m"], present: Bool[Tensor, "b m"]
) -> Loss:
    """Compute the binary cross-entropy of each region, averaged over the regions of a sample.

    VL-BERT's loss for referring expressions, which there is one mean over all regions of a batch.

    Args:
        logits: One logit per region.
        wanted: Which regions are right.
        present: Which regions are not padding.

    Returns:
        The loss, one row per sample.

    Example:
        >>> wanted, present = torch.tensor([[True, False]]), torch.tensor([[True, True]])
        >>> region_matching(torch.zeros(1, 2), wanted, present).mean()  # log 2
        tensor(0.6931)
    """
    logits = at_least_float32(logits)
    costs = nn.functional.softplus(logits) - wanted * logits
    mean = torch.where(present, costs, 0).sum(dim=-1) / present.sum(dim=-1).clamp_min(1)
    rows = present.any(dim=-1)
    return Loss(torch.where(rows, mean, 0).sum(), rows.sum())


def region_choice(
    logits: Float[Tensor, "b m"], wanted: Bool[Tensor, "b m"], present: Bool[Tensor, "b m"]
) -> Loss:
    """Compute the cross-entropy over the present regions, uniform over the right ones.

    One region is selected at inference, so regions compete: this learns faster than
    `region_matching` if most regions are wrong. Samples without a present right region do not
    count.

    Args:
        logits: One logit per region.
        wanted: Which regions are right.
        present: Which regions are not padding.

    Returns:
        The loss, one row per sample.

    Example:
        >>> wanted = torch.tensor([[True, False, False]])
        >>> region_choice(torch.zeros(1, 3), wanted, torch.ones_like(wanted)).mean()  # log 3
        tensor(1.0986)
    """
    wanted = wanted & present
    rows = wanted.any(dim=-1)
    hidden = rows[:, None] & ~present  # the gradient of a softmax over no keys is NaN
    logs = at_least_float32(logits).masked_fill(hidden, -torch.inf).log_softmax(dim=-1)
    shares = wanted / wanted.sum(dim=-1, keepdim=True).clamp_min(1)
    return Loss(-(torch.where(wanted, logs, 0) * shares).sum(), rows.sum())


# --- targets and rows


def find_grounded_rows(target: AttentionMap, most: int | None = None) -> Int[Tensor, "b s"]:
    """Return the rows that have a target, in order, followed by -1; at least one column.

    Args:
        target: The ground truth.
        most: The largest number of rows per sample, if known. Without it the rows are counted,
            which synchronizes the GPU.

    Returns:
        The indices of the rows.

    Raises:
        ValueError: A sample has more than `most` rows.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[0, 0], [0, 1.0]]]), axes="b q k")
        >>> find_grounded_rows(target, most=2)
        tensor([[ 1, -1]])
    """
    wanted = target.rows & (target.weights > 0).any(dim=-1).any(dim=2).any(dim=1)
    counts = wanted.sum(dim=1)
    if most is None:
        most = max(1, int(counts.amax())) if len(wanted) else 1
    elif wanted.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((counts > most).any()):
            raise ValueError(f"a sample has {int(counts.amax())} grounded rows, most is {most}")
    else:
        torch._assert_async((counts <= most).all(), f"a sample has more than {most} grounded rows")
    order = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return torch.where(wanted.gather(1, order), order, -1)


def transpose_target(target: AttentionMap) -> AttentionMap:
    """Return the target from regions to words, uniform over the tokens that describe a region.

    Args:
        target: The ground truth, from words to regions.

    Returns:
        The transposed target.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[1.0, 0], [1.0, 0]]]), axes="b q k")
        >>> transpose_target(target).weights[0, 0, 0]
        tensor([[0.5000, 0.5000],
                [0.0000, 0.0000]])
    """
    described = ((target.weights > 0) & target.visible[:, None, None]).to(target.values.dtype)
    return AttentionMap(
        described.transpose(-1, -2), target.queries, target.keys, None, Kind.AMOUNT
    ).normalize()


def keep_first_region(target: AttentionMap) -> AttentionMap:
    """Return the target with the first region of each token only, as in the paper's code.

    Args:
        target: The ground truth.

    Returns:
        The target with one region per token.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[0, 0.5, 0.5]]]), axes="b q k")
        >>> keep_first_region(target).weights.flatten()
        tensor([0., 1., 0.])
    """
    wanted = (target.weights > 0) & target.visible[:, None, None]
    first = wanted & (wanted.cumsum(dim=-1) == 1)
    return replace(
        target, values=first.to(target.values.dtype), kind=Kind.PROBABILITY, form=Form.PLAIN
    )


def add_image_region(target: AttentionMap) -> AttentionMap:
    """Return the target with an additional first key without weight, the whole image.

    Args:
        target: The ground truth.

    Returns:
        The target with one key more.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[[0, 1.0]]]), axes="b q k")
        >>> add_image_region(target).weights.flatten()
        tensor([0., 0., 1.])
    """
    fill = -torch.inf if target.form is Form.LOG else 0.0
    values = nn.functional.pad(target.values, (1, 0), value=fill)
    mask = None
    if target.mask is not None:
        mask = torch.cat([target.mask.any(dim=-1, keepdim=True), target.mask], dim=-1)
    keys = maps.regions(values.shape[-1], "boxes")
    return replace(target, values=values, keys=keys, mask=mask, coverage=None)


def gather_rows(attention: AttentionMap, rows: Int[Tensor, "b s"]) -> AttentionMap:
    """Return some rows of a map per sample.

    Args:
        attention: The map.
        rows: The indices of the rows; -1 gives a masked row.

    Returns:
        The map of these rows.

    Example:
        >>> attention = AttentionMap.from_weights(torch.eye(2)[None], axes="b q k")
        >>> gather_rows(attention, torch.tensor([[1, -1]])).weights[0, 0, 0]
        tensor([[0., 1.],
                [0., 0.]])
    """
    b, l, h, _, k = attention.values.shape
    there, at = rows >= 0, rows.clamp_min(0)
    fill = -torch.inf if attention.form is Form.LOG else 0.0
    values = attention.values.gather(3, at[:, None, None, :, None].expand(b, l, h, -1, k))
    mask = attention.visible.gather(1, at[..., None].expand(-1, -1, k)) & there[..., None]
    return replace(
        attention,
        values=torch.where(there[:, None, None, :, None], values, fill),
        queries=maps.words(rows.shape[1], "rows"),
        mask=mask,
    )
