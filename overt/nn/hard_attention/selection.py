"""Hard selection of cells, and collection of the kept ones.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300, section 3.1.

A rule is a function of scores, with `functools.partial` for its parameters:
`partial(keep_top, count=16)` is HAN, `keep_above_uniform` is AdaHAN. Rules have no learned
parameters. Absent cells score -inf and are never kept.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.errors import UserError
from overt.nn.hard_attention import triton_launch

Rule = Callable[[Float[Tensor, "b k"]], Bool[Tensor, "b k"]]
Schedule = Callable[[float], float]
CellWeighting = Callable[[Float[Tensor, "b k"], Bool[Tensor, "b k"], float], Float[Tensor, "b k"]]


def presence(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """Compute the relevance of each cell: the L2 norm of its features (eq. 5).

    Computed in float32 or better.

    Args:
        cells: features of the cells.

    Returns:
        One score per cell.

    Example:
        >>> presence(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
        tensor([[5., 1.]])
    """
    precise = torch.promote_types(cells.dtype, torch.float32)
    # dtype= accumulates in float32 without a float32 copy of the cells
    return torch.linalg.vector_norm(cells, dim=-1, dtype=precise)


# --- rules


def apply_rule(
    rule: Rule, scores: Float[Tensor, "b k"], ragged: bool = False
) -> Bool[Tensor, "b k"]:
    """Apply a rule and check that it returns a boolean mask.

    Samples of a `ragged` batch may have fewer cells than the rule keeps, all of them even: the
    number of columns is then that of the longest sample, which depends on the batch.
    """
    k = scores.shape[1]
    count = _count_of(rule) if ragged else None
    if count is not None and count > k:
        kept = rule(torch.nn.functional.pad(scores, (0, count - k), value=-torch.inf))[:, :k]
    else:
        kept = rule(scores)
    if kept.dtype is not torch.bool or kept.shape != scores.shape:
        raise UserError(
            f"a rule must return a bool mask of shape {tuple(scores.shape)}, got "
            f"{str(kept.dtype).removeprefix('torch.')} of shape {tuple(kept.shape)}; convert "
            "indices with zeros_like(scores, dtype=bool).scatter(1, indices, True)"
        )
    return kept


def keep_all(scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """Keep every present cell: no attention.

    Args:
        scores: score of each cell, -inf for absent cells.

    Returns:
        Mask of the kept cells.

    Example:
        >>> keep_all(torch.tensor([[2.0, 0.0, -torch.inf]]))
        tensor([[ True,  True, False]])
    """
    return scores.isfinite()


def keep_top(scores: Float[Tensor, "b k"], count: int) -> Bool[Tensor, "b k"]:
    """Keep the `count` largest cells of each sample; ties go to the first (HAN).

    Args:
        scores: score of each cell, -inf for absent cells.
        count: number of cells to keep. A sample with fewer present cells keeps all of them.

    Returns:
        Mask of the kept cells.

    Raises:
        ValueError: `count` is below 1, or above the number of cells, present or absent.

    Example:
        >>> keep_top(torch.tensor([[3.0, 1.0, 2.0]]), count=2)
        tensor([[ True, False,  True]])
    """
    if count < 1:
        raise ValueError(f"count must be 1 or more, got {count}")
    if count > scores.shape[1]:
        raise UserError(
            f"count must be at most the number of cells, got {count} of {scores.shape[1]} cells: "
            "use a smaller count, or keep_all to keep every cell"
        )
    # a tensor of counts, one per sample, as `keep_share` needs
    return _top(scores, torch.full_like(scores[:, :1], count, dtype=torch.long))


def keep_share(scores: Float[Tensor, "b k"], share: float) -> Bool[Tensor, "b k"]:
    """Keep the largest `share` of each sample's cells, rounded to the nearest number, at least one.

    The paper's k as a fraction: its tables disagree on what k is in percent, so a count is less
    ambiguous.

    Args:
        scores: score of each cell, -inf for absent cells.
        share: fraction of cells to keep, above 0 and at most 1.

    Returns:
        Mask of the kept cells.

    Raises:
        ValueError: `share` is out of range.

    Example:
        >>> keep_share(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), share=0.5)
        tensor([[ True, False,  True, False]])
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    present = scores.isfinite().sum(dim=-1, keepdim=True)
    # half up: torch.round rounds half to even, 2.5 down and 3.5 up
    return _top(scores, (share * present + 0.5).floor().long().clamp_min(1))


def keep_above_uniform(
    scores: Float[Tensor, "b k"], temperature: float = 1.0
) -> Bool[Tensor, "b k"]:
    """Keep the cells whose softmax exceeds 1/k over k cells, and at least one (AdaHAN, eq. 6).

    Computed as score > log-mean-exp, in float32 or better: a softmax in 16 bits selects other
    cells. Where all cells tie, the paper keeps none; we keep the first, so that every sample has a
    cell.

    Args:
        scores: score of each cell, -inf for absent cells.
        temperature: divides the scores; not in the paper. With 1, large norms leave a single cell.

    Returns:
        Mask of the kept cells.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> keep_above_uniform(torch.tensor([[5.0, 4.5, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]]))
        tensor([[ True,  True, False, False],
                [ True, False, False, False]])
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if triton_launch.supports_scores(scores):
        return triton_launch.above_uniform(scores)
    there = scores.isfinite()
    # softmax_i > 1/k is equivalent to score_i > logsumexp - log k, which cannot underflow
    many = there.sum(dim=-1, keepdim=True).to(scores.dtype).log()
    total = scores.masked_fill(~there, -torch.inf).logsumexp(dim=-1, keepdim=True)
    # the margin keeps equal cells below their own mean despite rounding
    level = total - many + 4 * torch.finfo(scores.dtype).eps * (total.abs() + many)
    # the largest cell is kept even if it does not exceed the level, as where all cells tie
    return there & ((scores > level) | _first_largest(scores.masked_fill(~there, -torch.inf)))


def keep_random(
    scores: Float[Tensor, "b k"], count: int, seed: int | None = None
) -> Bool[Tensor, "b k"]:
    """Keep `count` random cells, whatever their scores: the random control.

    Args:
        scores: score of each cell, -inf for absent cells.
        count: number of cells to keep.
        seed: without a seed, cells are sampled for each sample from torch's global stream, for
            training; with one, the same cells are kept in every sample, for a repeatable
            evaluation.

    Returns:
        Mask of the kept cells.
    """
    if seed is None:
        drawn = torch.rand_like(scores, dtype=torch.float32)  # 16 bits would often tie
    else:
        stream = torch.Generator().manual_seed(seed)
        # drawn on the CPU: the same cells on every device, and for every sample
        drawn = torch.rand(scores.shape[1], generator=stream).to(scores.device).expand_as(scores)
    return keep_top(drawn.masked_fill(~scores.isfinite(), -torch.inf), count)


def keep_gumbel(
    scores: Float[Tensor, "b k"], count: int, temperature: float = 1.0
) -> Bool[Tensor, "b k"]:
    """Sample `count` cells without replacement from the softmax of the scores.

    The largest scores plus Gumbel noise are such a sample (Kool, van Hoof and Welling 2019,
    https://arxiv.org/abs/1903.06059). Uses torch's global random stream: a rule for training.

    Args:
        scores: score of each cell, -inf for absent cells.
        count: number of cells to keep.
        temperature: divides the scores.

    Returns:
        Mask of the kept cells.

    Raises:
        ValueError: `temperature` is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    noise = -torch.empty_like(scores).exponential_().log()  # minus log of Exp(1) is Gumbel(0, 1)
    return keep_top(scores / temperature + noise, count)


def _top(scores: Float[Tensor, "b k"], count: Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    """Keep the `count` largest of each sample; the stable sort breaks ties by position."""
    if triton_launch.supports_scores(scores):
        return triton_launch.top_cells(scores, count)
    there = scores.isfinite()
    # argsort instead of topk: topk does not say which of equal scores it returns
    order = scores.masked_fill(~there, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device)
    # the inverse permutation: position in the order of each cell, so that counts may differ per row
    ranks = torch.empty_like(order).scatter_(-1, order, places.expand_as(order))
    return (ranks < count) & there


def _first_largest(scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """Keep the first largest cell of each sample; needs no sort."""
    found = torch.zeros_like(scores, dtype=torch.bool)
    return found.scatter_(1, scores.argmax(dim=1, keepdim=True), True) if found.numel() else found


# --- weights of the cells in training


def straight_through(
    scores: Float[Tensor, "b k"], kept: Bool[Tensor, "b k"], progress: float
) -> Float[Tensor, "b k"]:
    """Weight cells by 0 or 1 in the forward pass, and by the softmax in the backward pass.

    Bengio, Leonard and Courville 2013, https://arxiv.org/abs/1308.3432. Every cell stays in the
    graph, so no computation is saved; the paper found it unstable.

    Args:
        scores: score of each cell.
        kept: mask of the kept cells.
        progress: completed share of training; not used.

    Returns:
        Weight of each cell.

    Example:
        >>> scores = torch.zeros(1, 2, requires_grad=True)
        >>> weights = straight_through(scores, torch.tensor([[True, False]]), progress=0.5)
        >>> weights.tolist()
        [[1.0, 0.0]]
        >>> weights[0, 0].backward()
        >>> scores.grad  # of the softmax, 1/2 (1 - 1/2)
        tensor([[ 0.2500, -0.2500]])
    """
    # soft - soft.detach() is zero in the forward pass and has the gradient of soft
    soft = scores.softmax(dim=-1)
    return kept.to(soft.dtype) + (soft - soft.detach())


def linear_ramp(progress: float, start: float = 0.0, end: float = 0.5) -> float:
    """Ramp from 0 to 1 between the shares `start` and `end` of training.

    `partial(linear_ramp, start=0.3, end=0.3)` is a step.

    Args:
        progress: completed share of training.
        start: share at which the ramp starts.
        end: share at which it reaches 1.

    Raises:
        ValueError: `start` is after `end`.
    """
    if not 0 <= start <= end:
        raise ValueError(f"expected 0 <= start <= end, got start={start} and end={end}")
    if progress >= end:
        return 1.0
    return 0.0 if progress <= start else (progress - start) / (end - start)


def soft_to_hard(
    scores: Float[Tensor, "b k"],
    kept: Bool[Tensor, "b k"],
    progress: float,
    hardness: Schedule = linear_ramp,
) -> Float[Tensor, "b k"]:
    """Interpolate from soft to hard weights: `h * kept + (1 - h) * n * softmax`.

    h is the hardness at `progress`. n is the number of kept cells, so the weights sum to n at any
    hardness. Not in the paper, which is hard from the first step.

    Args:
        scores: score of each cell.
        kept: mask of the kept cells.
        progress: completed share of training.
        hardness: schedule of h.

    Returns:
        Weight of each cell.

    Example:
        >>> scores, kept = torch.zeros(1, 4), torch.tensor([[True, True, False, False]])
        >>> [soft_to_hard(scores, kept, progress).tolist()[0] for progress in (0.0, 0.25, 0.5)]
        [[0.5, 0.5, 0.5, 0.5], [0.75, 0.75, 0.25, 0.25], [1.0, 1.0, 0.0, 0.0]]
    """
    hard = kept.to(scores.dtype)
    h = hardness(progress)
    # sum aggregation adds n cells of weight 1, so a softmax alone would shrink its output n times
    return h * hard + (1 - h) * hard.sum(dim=-1, keepdim=True) * scores.softmax(dim=-1)


def linear_decay(progress: float, start: float = 0.5, end: float = 0.75) -> float:
    """Decay from 1 to 0 between the shares `start` and `end` of training.

    Args:
        progress: completed share of training.
        start: share at which the decay starts.
        end: share at which it reaches 0.

    Returns:
        A value from 1 to 0.

    Raises:
        ValueError: `start` is after `end`.

    Example:
        >>> [linear_decay(progress) for progress in (0.4, 0.625, 0.8)]
        [1.0, 0.5, 0.0]
    """
    return 1 - linear_ramp(progress, start, end)


def widen_selection(
    scores: Float[Tensor, "b k"], kept: Bool[Tensor, "b k"], share: float
) -> Bool[Tensor, "b k"]:
    """Add this share of the dropped cells to the kept ones, largest scores first."""
    missing = (scores.isfinite() & ~kept).sum(dim=-1, keepdim=True)
    # float64, as Python computes it there: in float32 halves may round to the other side
    more = (share * missing.double() + 0.5).floor().long()  # the rounding of `HardAttention._count`
    return kept | _top(scores.masked_fill(kept, -torch.inf), more)


@dataclass(frozen=True)
class Selection:
    """How cells are selected, in evaluation and in training.

    Args:
        rule: selects the kept cells.
        training: another rule for training steps, such as a random sample; `rule` by default.
        weigh: weight of every cell in training. By default kept cells have weight 1, and the others
            are removed before any computation.
        widen: schedule of the share of dropped cells that training still keeps. With `linear_decay`
            a network first learns from all cells, then from those of the rule. Not in the paper,
            whose selection is narrow from the first step: dropped cells get no gradient.

    Example:
        >>> selection = Selection(partial(keep_top, count=2), widen=linear_decay)
        >>> selection.rule(torch.tensor([[3.0, 1.0, 2.0]]))
        tensor([[ True, False,  True]])
        >>> selection.config()["rule"]
        {'keep': 'top', 'count': 2}
    """

    rule: Rule = keep_above_uniform
    training: Rule | None = None
    weigh: CellWeighting | None = None
    widen: Schedule | None = None

    def config(self) -> dict[str, Any]:
        """Return plain values from which `selection_from_config` builds the same selection."""
        training = None if self.training is None else rule_config(self.training)
        weigh = None if self.weigh is None else _function_config(self.weigh, WEIGHTINGS, "weigh")
        widen = None if self.widen is None else _function_config(self.widen, SCHEDULES, "schedule")
        rule = rule_config(self.rule)
        return {"rule": rule, "training": training, "weigh": weigh, "widen": widen}


def random_selection(count: int, seed: int = 0) -> Selection:
    """Select random cells: new ones in each training step, the fixed cells of `seed` afterwards.

    Args:
        count: number of cells to keep.
        seed: seed of the cells in evaluation.

    Returns:
        The selection.

    Example:
        >>> selection = random_selection(count=2)
        >>> kept = selection.rule(torch.rand(2, 5))
        >>> kept.sum(dim=1), torch.equal(kept[0], kept[1])
        (tensor([2, 2]), True)
    """
    # evaluation must give the same answer twice, hence fixed cells
    fixed = partial(keep_random, count=count, seed=seed)
    return Selection(fixed, training=partial(keep_random, count=count))


def gumbel_selection(
    count: int, temperature: float = 1.0, weigh: CellWeighting | None = None
) -> Selection:
    """Gumbel top-k: sample cells by their scores in training, keep the top ones afterwards.

    Args:
        count: number of cells to keep.
        temperature: divides the scores in training.
        weigh: weight of every cell in training.

    Returns:
        The selection.

    Example:
        >>> selection, scores = gumbel_selection(count=2), torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> selection.rule(scores)
        tensor([[ True, False,  True, False]])
        >>> selection.training(scores).sum()  # any two cells, likely the largest
        tensor(2)
    """
    noisy = partial(keep_gumbel, count=count, temperature=temperature)
    return Selection(partial(keep_top, count=count), training=noisy, weigh=weigh)


# --- kept cells


@dataclass(frozen=True, eq=False)
class PaddedCells:
    """Kept cells of each sample as one dense tensor.

    Args:
        values: the cells.
        weights: weight of each cell; 1 by default. Cells with weight 0 are not removed, because the
            gradient of the weight may be needed.
    """

    values: Float[Tensor, "b m d"]
    weights: Float[Tensor, "b m"] | None = None


@dataclass(frozen=True, eq=False)
class CellsInPlace:
    """All cells on a GPU with a mask of the kept ones; nothing is copied.

    The aggregation decides how to read them. `count` is the number of kept cells per sample, if it
    is the same for all and known.
    """

    cells: Float[Tensor, "b k d"]
    kept: Bool[Tensor, "b k"]
    count: int | None = None

    def padded(self) -> PaddedCells:
        """Gather the kept cells, padded to the largest number if it may vary."""
        if self.count is None:
            return pad_cells(self.cells, self.kept)
        return PaddedCells(_gather_first(self.cells, self.kept, self.count))


@dataclass(frozen=True, eq=False)
class PackedCells:
    """Kept cells of all samples, concatenated without padding.

    `counts` is the number of cells per sample, on the host, so no synchronization is needed.
    """

    packed: Float[Tensor, "n d"]
    counts: tuple[int, ...]

    @property
    def _many(self) -> Int[Tensor, " b"]:
        return torch.tensor(self.counts, dtype=torch.long)  # dtype for an empty batch

    @property
    def sample_index(self) -> Int[Tensor, " n"]:
        """The sample of each packed cell."""
        found = torch.arange(len(self.counts)).repeat_interleave(self._many)
        return found.to(self.packed.device)

    @property
    def present(self) -> Bool[Tensor, "b m"]:
        """Mask of the real cells after padding every sample to the largest."""
        places = torch.arange(max(self.counts, default=0))
        return (places < self._many[:, None]).to(self.packed.device)

    def pad(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "b m e"]:
        """Pad rows, one per packed cell, with zeros to the largest sample."""
        b, m = len(self.counts), max(self.counts, default=0)
        # add to the number of a packed row to get its row in the padded (b m) axis
        starts = m * torch.arange(b) - torch.tensor((0, *self.counts)).cumsum(0)[:-1]
        places = torch.arange(len(rows)) + starts.repeat_interleave(self._many)
        empty = rows.new_zeros(b * m, rows.shape[-1])
        return empty.index_copy(0, places.to(rows.device), rows).unflatten(0, (b, m))


SelectedCells = PaddedCells | PackedCells | CellsInPlace


def gather_cells(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], count: int | None = None
) -> SelectedCells:
    """Gather the kept cells of each sample in their order; the others are removed.

    On a GPU cells stay in place, and the aggregation reads them from there.

    Args:
        cells: features of the cells.
        kept: mask of the kept cells.
        count: number of kept cells in every sample, if known: then nothing is synchronized.
            Otherwise samples may keep different numbers.

    Returns:
        The kept cells.

    Example:
        >>> cells = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])
        >>> kept = gather_cells(cells, torch.tensor([[True, False, True], [False, True, False]]))
        >>> kept.counts, kept.packed.flatten()
        ((2, 1), tensor([1., 3., 5.]))
    """
    # every cell is kept, so there is nothing to select
    if count is not None and count == cells.shape[1]:
        return PaddedCells(cells)
    # reading the counts would synchronize the GPU
    if not cells.is_cpu:
        return CellsInPlace(cells, kept, count)
    if count is None:
        counts = tuple(kept.sum(dim=-1).tolist())
        # equal counts need no packing: a dense tensor without padding
        if len(set(counts)) != 1 or not counts[0]:
            rows = kept.flatten().nonzero()[:, 0]
            return PackedCells(cells.flatten(0, 1).index_select(0, rows), counts)
        count = counts[0]
    return PaddedCells(cells if count == cells.shape[1] else _gather_first(cells, kept, count))


def pad_cells(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], most: int | None = None
) -> PaddedCells:
    """Gather the kept cells, padded to the largest sample with cells of weight 0.

    This synchronizes the GPU to read the largest number of cells. If `most`, that number or an
    upper bound, is given, it does not, and can be captured in a CUDA graph.
    """
    many = kept.sum(dim=-1, keepdim=True)
    if most is None:
        # at least one column, so that later layers get no empty axis
        most = max(1, int(many.max())) if len(kept) else 1
    most = min(most, kept.shape[1])
    there = torch.arange(most, device=kept.device) < many
    return PaddedCells(_gather_first(cells, kept, most), there.to(cells.dtype))


def _gather_first(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], count: int
) -> Float[Tensor, "b m d"]:
    """Gather `count` cells of each sample: the kept ones in their order, then others."""
    b, k = kept.shape
    if triton_launch.supports_mask(kept):
        rows = triton_launch.kept_first_rows(kept, count)
    else:
        rows = kept_first_order(kept)[:, :count] + k * torch.arange(b, device=kept.device)[:, None]
    # index_select copies whole rows: several times faster than torch.gather
    return cells.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, count))


def kept_first_order(kept: Bool[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    """Return the indices of the kept cells in their order, then those of the others.

    A stable sort of two values by counting: a cell's new position is the number of cells of its
    kind before it.
    """
    # dropped cells go after the last kept one: places - upto counts the dropped cells before each
    places = torch.arange(kept.shape[1], device=kept.device)
    upto = kept.cumsum(dim=1)
    goes = torch.where(kept, upto - 1, upto[:, -1:] + places - upto)
    return torch.empty_like(goes).scatter_(1, goes, places.expand_as(goes))


def mask_cells(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], count: int | None = None
) -> PaddedCells:
    """Return all cells, with weight 1 for kept cells and 0 for the others.

    Same results and gradients as `gather_cells`. It saves no computation, but its operations do not
    depend on the number of kept cells, as a CUDA graph needs.

    Args:
        cells: features of the cells.
        kept: mask of the kept cells.
        count: not used; for the signature of `gather_cells`.

    Returns:
        All cells with their weights.

    Example:
        >>> cells = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> mask_cells(cells, torch.tensor([[True, False, True]])).weights
        tensor([[1., 0., 1.]])
    """
    return PaddedCells(cells, kept.to(cells.dtype))


def hardness_at(weigh: CellWeighting | None, progress: float) -> Hashable:
    """Return the value that determines the weights at this progress; None if they do not change.

    For a custom function this is the progress itself.
    """
    if weigh is None or weigh is straight_through:
        return None
    if weigh is soft_to_hard:
        return linear_ramp(progress)
    if isinstance(weigh, partial) and weigh.func is soft_to_hard:
        return weigh.keywords.get("hardness", linear_ramp)(progress)
    return progress


def count_kept(rule: Rule, cells: int) -> int | None:
    """Return how many of `cells` present cells the rule always keeps; None if it varies."""
    count = _count_of(rule)
    if count is not None:
        return min(count, cells)
    match rule:
        case partial(func=f, keywords={"share": share}) if f is keep_share:
            return max(1, math.floor(share * cells + 0.5))
        case _:
            return cells if rule is keep_all else None


def _count_of(rule: Rule) -> int | None:
    """Return the `count` of a rule; None for a rule without one."""
    match rule:
        # works on `functools.partial` only: a lambda hides its count
        case partial(func=f, keywords={"count": count}) if f in (
            keep_top,
            keep_random,
            keep_gumbel,
        ):
            return int(count)
        case _:
            return None


CollectCells = Callable[
    [Float[Tensor, "b k d"], Bool[Tensor, "b k"], int | None], SelectedCells
]  # `gather_cells` or `mask_cells`

# --- saving and loading

# the keys are saved with models: they stay when a function is renamed
RULES: dict[str, Callable[..., Any]] = {
    "all": keep_all,
    "top": keep_top,
    "share": keep_share,
    "above_uniform": keep_above_uniform,
    "random": keep_random,
    "gumbel": keep_gumbel,
}
WEIGHTINGS: dict[str, Callable[..., Any]] = {
    "straight_through": straight_through,
    "softened": soft_to_hard,
}
SCHEDULES: dict[str, Callable[..., Any]] = {"climb": linear_ramp, "ebb": linear_decay}


def rule_config(rule: Rule) -> dict[str, Any]:
    """Return plain values from which `rule_from_config` builds the same rule."""
    return _function_config(rule, RULES, "keep")


def rule_from_config(config: Mapping[str, Any]) -> Rule:
    """Build the rule of a saved model."""
    return _function_from_config(config, RULES, "keep")


def selection_from_config(config: Mapping[str, Any]) -> Selection:
    """Build the selection of a saved model."""
    training, weigh, widen = (config.get(name) for name in ("training", "weigh", "widen"))
    return Selection(
        rule_from_config(config["rule"]),
        None if training is None else rule_from_config(training),
        None if weigh is None else _function_from_config(weigh, WEIGHTINGS, "weigh"),
        None if widen is None else _function_from_config(widen, SCHEDULES, "schedule"),
    )


def _function_config(
    made: Callable[..., Any], names: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return the saved name and keyword arguments of a function."""
    function = made.func if isinstance(made, partial) else made
    # positional arguments of a partial have no names to save: they raise below
    given = dict(made.keywords) if isinstance(made, partial) else {}
    if "hardness" in given:
        given["hardness"] = _function_config(given["hardness"], SCHEDULES, "schedule")
    for name, known in names.items():
        if known is function and not getattr(made, "args", ()):
            return {what: name, **given}
    raise UserError(
        f"cannot save {made!r}: {what} must be one of {', '.join(names)}, with keyword arguments "
        "only"
    )


def _function_from_config(config: Mapping[str, Any], names: Mapping[str, Any], what: str) -> Any:
    """Build the function that `_function_config` described."""
    given = {name: value for name, value in config.items() if name != what}
    if config.get(what) not in names:
        raise UserError(f"{what} {config.get(what)!r} is not one of {', '.join(names)}")
    if "hardness" in given:
        given["hardness"] = _function_from_config(given["hardness"], SCHEDULES, "schedule")
    return partial(names[config[what]], **given) if given else names[config[what]]
