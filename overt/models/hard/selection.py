"""Hard selection: which cells to keep, and the kept cells side by side.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300, section 3.1.

A rule is a function of scores, with `functools.partial` for its numbers:
`partial(keep_top, count=16)` is HAN, `keep_above_uniform` is AdaHAN. No rule has parameters to
learn. Cells that are not there score -inf and are never kept.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.errors import BadInput
from overt.models.hard import card

Rule = Callable[[Float[Tensor, "b k"]], Bool[Tensor, "b k"]]
Schedule = Callable[[float], float]
Weigh = Callable[[Float[Tensor, "b k"], Bool[Tensor, "b k"], float], Float[Tensor, "b k"]]


def presence(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """How relevant each cell is: the L2 norm of its features (eq. 5), in float32 at least."""
    precise = torch.promote_types(cells.dtype, torch.float32)
    return torch.linalg.vector_norm(cells, dim=-1, dtype=precise)


# --- rules


def kept_by(rule: Rule, scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """What a rule keeps; one of the user's may give places or shares, and these are refused."""
    kept = rule(scores)
    if kept.dtype is not torch.bool or kept.shape != scores.shape:
        raise BadInput(
            f"a rule says True or False of each of {tuple(scores.shape)} scores, and this one gave "
            f"{str(kept.dtype).removeprefix('torch.')} of {tuple(kept.shape)}; of places make "
            "zeros_like(scores, dtype=bool).scatter(1, places, True)"
        )
    return kept


def keep_all(scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """Every cell that is there: no attention."""
    return scores.isfinite()


def keep_top(scores: Float[Tensor, "b k"], count: int) -> Bool[Tensor, "b k"]:
    """The `count` largest cells of every sample, the first of equals (HAN)."""
    if count < 1:
        raise ValueError(f"at least one cell must be kept, not {count}")
    return _best(scores, torch.full_like(scores[:, :1], count, dtype=torch.long))


def keep_share(scores: Float[Tensor, "b k"], share: float) -> Bool[Tensor, "b k"]:
    """The largest `share` of the cells each sample has, to the nearest whole number, at least one.

    The paper's k as a fraction: its tables disagree on what k is in percent, so that a count says
    more.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of cells to keep is above 0 and at most 1, not {share}")
    present = scores.isfinite().sum(dim=-1, keepdim=True)
    return _best(scores, (share * present + 0.5).floor().long().clamp_min(1))


def keep_above_uniform(
    scores: Float[Tensor, "b k"], temperature: float = 1.0
) -> Bool[Tensor, "b k"]:
    """The cells whose softmax beats 1/k over k cells, and at least one (AdaHAN, eq. 6).

    Written as score > log-mean-exp, in float32 at least: a softmax in sixteen bits picks other
    cells. Where all cells tie, the paper keeps none; we keep the first, so that there is something
    to answer from. The paper has no `temperature`; large norms leave one cell when it is 1.
    """
    if temperature <= 0:
        raise ValueError(f"a temperature is above 0, not {temperature}")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if card.can_choose(scores):
        return card.above_uniform(scores)
    there = scores.isfinite()
    many = there.sum(dim=-1, keepdim=True).to(scores.dtype).log()
    total = scores.masked_fill(~there, -torch.inf).logsumexp(dim=-1, keepdim=True)
    # equal cells are not above their own mean, whichever way it was rounded
    level = total - many + 4 * torch.finfo(scores.dtype).eps * (total.abs() + many)
    return there & ((scores > level) | _largest(scores.masked_fill(~there, -torch.inf)))


def keep_random(
    scores: Float[Tensor, "b k"], count: int, seed: int | None = None
) -> Bool[Tensor, "b k"]:
    """`count` cells whatever their scores: the control of every choice.

    Without a `seed` they are drawn anew for each sample from torch's own stream, for training;
    with one they are the same cells for every sample, so that an evaluation can be repeated.
    """
    if seed is None:
        drawn = torch.rand_like(scores, dtype=torch.float32)  # sixteen bits would often tie
    else:
        stream = torch.Generator().manual_seed(seed)
        drawn = torch.rand(scores.shape[1], generator=stream).to(scores.device).expand_as(scores)
    return keep_top(drawn.masked_fill(~scores.isfinite(), -torch.inf), count)


def keep_gumbel(
    scores: Float[Tensor, "b k"], count: int, temperature: float = 1.0
) -> Bool[Tensor, "b k"]:
    """`count` cells drawn one after another by the softmax of the scores, without putting back.

    The largest of scores plus Gumbel noise are such a draw (Kool, van Hoof and Welling 2019,
    https://arxiv.org/abs/1903.06059). Drawn from torch's own stream: a rule for training.
    """
    if temperature <= 0:
        raise ValueError(f"a temperature is above 0, not {temperature}")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    noise = -torch.empty_like(scores).exponential_().log()
    return keep_top(scores / temperature + noise, count)


def _best(scores: Float[Tensor, "b k"], count: Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    """The `count` largest of every sample; topk would break ties anyhow, a stable sort does not."""
    if card.can_choose(scores):
        return card.best(scores, count)
    there = scores.isfinite()
    order = scores.masked_fill(~there, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device)
    ranks = torch.empty_like(order).scatter_(-1, order, places.expand_as(order))
    return (ranks < count) & there


def _largest(scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """The largest of every sample, the first of equals: what needs no sort."""
    found = torch.zeros_like(scores, dtype=torch.bool)
    return found.scatter_(1, scores.argmax(dim=1, keepdim=True), True) if found.numel() else found


# --- how cells count while a model is trained


def straight_through(
    scores: Float[Tensor, "b k"], kept: Bool[Tensor, "b k"], progress: float
) -> Float[Tensor, "b k"]:
    """1 and 0 in the forward pass, the softmax of the scores in the backward pass.

    Bengio, Leonard and Courville 2013, https://arxiv.org/abs/1308.3432. Every cell stays in the
    graph, so that nothing is saved; the paper found it unstable.
    """
    soft = scores.softmax(dim=-1)
    return kept.to(soft.dtype) + (soft - soft.detach())


def climb(progress: float, start: float = 0.0, end: float = 0.5) -> float:
    """A hardness that is 0 up to the share `start` of training, climbs evenly, and is 1 from `end`.

    `partial(climb, start=0.3, end=0.3)` switches at once.
    """
    if not 0 <= start <= end:
        raise ValueError(f"a climb from {start} to {end} does not go forward")
    if progress >= end:
        return 1.0
    return 0.0 if progress <= start else (progress - start) / (end - start)


def softened(
    scores: Float[Tensor, "b k"],
    kept: Bool[Tensor, "b k"],
    progress: float,
    hardness: Schedule = climb,
) -> Float[Tensor, "b k"]:
    """From soft to hard: `h * kept + (1 - h) * n * softmax`, with h the hardness at `progress`.

    n is the number of cells kept, so that the weights add up to n at any hardness. Beyond the
    paper, which is hard from the first step.
    """
    hard = kept.to(scores.dtype)
    h = hardness(progress)
    return h * hard + (1 - h) * hard.sum(dim=-1, keepdim=True) * scores.softmax(dim=-1)


def ebb(progress: float, start: float = 0.5, end: float = 0.75) -> float:
    """A share that is 1 up to the share `start` of training, falls evenly, and is 0 from `end`."""
    return 1 - climb(progress, start, end)


def widened(
    scores: Float[Tensor, "b k"], kept: Bool[Tensor, "b k"], share: float
) -> Bool[Tensor, "b k"]:
    """The kept cells, and this share of those that were left out, the largest of them first."""
    missing = (scores.isfinite() & ~kept).sum(dim=-1, keepdim=True)
    more = (share * missing.double() + 0.5).floor().long()  # as the host counts them
    return kept | _best(scores.masked_fill(kept, -torch.inf), more)


@dataclass(frozen=True)
class Selection:
    """How cells are chosen: by `rule`, and in training perhaps otherwise.

    `training` is the rule of the training steps, where it is another: a draw. `weigh` says how much
    every cell counts in training; without it kept cells count one, and the rest is cut away before
    anything is done with it. `widen` is the share of what the rule leaves out that training keeps
    all the same, from the share of training that is done: with `ebb` a network first learns to
    answer from all cells, then to do with those of the rule. Beyond the paper, whose choice is
    narrow from the first step; what has not been kept cannot teach it.
    """

    rule: Rule = keep_above_uniform
    training: Rule | None = None
    weigh: Weigh | None = None
    widen: Schedule | None = None

    def config(self) -> dict[str, Any]:
        """Plain values from which `selection_from` makes the same selection."""
        training = None if self.training is None else rule_config(self.training)
        weigh = None if self.weigh is None else _named(self.weigh, WEIGHS, "weigh")
        widen = None if self.widen is None else _named(self.widen, SCHEDULES, "schedule")
        rule = rule_config(self.rule)
        return {"rule": rule, "training": training, "weigh": weigh, "widen": widen}


def randomly(count: int, seed: int = 0) -> Selection:
    """The selection that does not look: new cells at each step, the cells of `seed` afterwards."""
    fixed = partial(keep_random, count=count, seed=seed)
    return Selection(fixed, training=partial(keep_random, count=count))


def drawn(count: int, temperature: float = 1.0, weigh: Weigh | None = None) -> Selection:
    """Gumbel top-k: cells are drawn by their scores in training, and the best kept afterwards."""
    noisy = partial(keep_gumbel, count=count, temperature=temperature)
    return Selection(partial(keep_top, count=count), training=noisy, weigh=weigh)


# --- the kept cells


@dataclass(frozen=True, eq=False)
class Kept:
    """The kept cells of samples that keep equally many, side by side.

    `weights` is how much each place counts where that is not simply one. Its gradient is wanted
    also where it is 0, so that all cells may be here, and none is left out for a weight of 0.
    """

    values: Float[Tensor, "b m d"]
    weights: Float[Tensor, "b m"] | None = None


@dataclass(frozen=True, eq=False)
class Standing:
    """The kept cells of samples on a card, where they stand among the others.

    Nothing has been moved: whoever aggregates them knows how it wants them. `count` is how many
    every sample keeps, where that is known.
    """

    cells: Float[Tensor, "b k d"]
    kept: Bool[Tensor, "b k"]
    count: int | None = None

    def side_by_side(self) -> Kept:
        """The kept cells, each sample filled up to the fullest where they may be unequally many."""
        if self.count is None:
            return filled_up(self.cells, self.kept)
        return Kept(_first(self.cells, self.kept, self.count))


@dataclass(frozen=True, eq=False)
class Ragged:
    """The kept cells of samples that keep unequally many, one after another without gaps.

    `counts` is how many each sample has: known to the host, so that nothing has to wait for it.
    """

    packed: Float[Tensor, "n d"]
    counts: tuple[int, ...]

    @property
    def _many(self) -> Int[Tensor, " b"]:
        return torch.tensor(self.counts, dtype=torch.long)  # of no sample too

    @property
    def owners(self) -> Int[Tensor, " n"]:
        """The sample of each packed cell."""
        found = torch.arange(len(self.counts)).repeat_interleave(self._many)
        return found.to(self.packed.device)

    @property
    def present(self) -> Bool[Tensor, "b m"]:
        """Which places hold a cell, when every sample is filled up to the fullest."""
        places = torch.arange(max(self.counts, default=0))
        return (places < self._many[:, None]).to(self.packed.device)

    def filled(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "b m e"]:
        """One row a packed cell, side by side, every sample filled up with zeros."""
        b, m = len(self.counts), max(self.counts, default=0)
        starts = m * torch.arange(b) - torch.tensor((0, *self.counts)).cumsum(0)[:-1]
        places = torch.arange(len(rows)) + starts.repeat_interleave(self._many)
        empty = rows.new_zeros(b * m, rows.shape[-1])
        return empty.index_copy(0, places.to(rows.device), rows).unflatten(0, (b, m))


Chosen = Kept | Ragged | Standing  # what is aggregated


def gather(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], count: int | None = None
) -> Chosen:
    """The kept cells of each sample in the order in which they stand, and nothing of the others.

    `count` is the number kept in every sample, where that is known: then nothing is asked of the
    device. Else samples may keep unequally many. On a card cells stay where they are, and whoever
    aggregates them takes them from there.
    """
    if count is not None and count == cells.shape[1]:
        return Kept(cells)
    if not cells.is_cpu:
        return Standing(cells, kept, count)
    if count is None:
        counts = tuple(kept.sum(dim=-1).tolist())
        if len(set(counts)) != 1 or not counts[0]:
            rows = kept.flatten().nonzero()[:, 0]
            return Ragged(cells.flatten(0, 1).index_select(0, rows), counts)
        count = counts[0]
    return Kept(cells if count == cells.shape[1] else _first(cells, kept, count))


def filled_up(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], most: int | None = None
) -> Kept:
    """The kept cells side by side, each sample filled up to the fullest with cells that count 0.

    The device is asked one number, how many cells the fullest sample has. `most` is that number,
    or one above it, where it is known: then nothing is asked, and a step can be recorded.
    """
    many = kept.sum(dim=-1, keepdim=True)
    if most is None:
        most = max(1, int(many.max())) if len(kept) else 1
    most = min(most, kept.shape[1])
    there = torch.arange(most, device=kept.device) < many
    return Kept(_first(cells, kept, most), there.to(cells.dtype))


def _first(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], count: int
) -> Float[Tensor, "b m d"]:
    """So many cells of each sample: the kept ones in their order, then others."""
    b, k = kept.shape
    if card.can_list(kept):
        rows = card.first_rows(kept, count)
    else:
        rows = kept_first(kept)[:, :count] + k * torch.arange(b, device=kept.device)[:, None]
    # by rows of one table: several times quicker than torch.gather, which goes number by number
    return cells.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, count))


def kept_first(kept: Bool[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    """The numbers of the kept cells in their order, then those of the others in theirs.

    A stable sort of two values, written as counting: where each cell goes is how many of its kind
    come before it.
    """
    places = torch.arange(kept.shape[1], device=kept.device)
    upto = kept.cumsum(dim=1)
    goes = torch.where(kept, upto - 1, upto[:, -1:] + places - upto)
    return torch.empty_like(goes).scatter_(1, goes, places.expand_as(goes))


def masked(
    cells: Float[Tensor, "b k d"], kept: Bool[Tensor, "b k"], count: int | None = None
) -> Kept:
    """All cells, of which the kept ones count one and the others nothing.

    The same answers and gradients as `gather`, and all of the work, but the same operations for any
    number of kept cells: the way of a step that is recorded on a card.
    """
    return Kept(cells, kept.to(cells.dtype))


def hardness_of(weigh: Weigh | None, progress: float) -> Hashable:
    """The number by which weights at this point of training differ from those at another.

    None where they do not. Of a function that is not ours nothing is known: it is the progress.
    """
    if weigh is None or weigh is straight_through:
        return None
    if weigh is softened:
        return climb(progress)
    if isinstance(weigh, partial) and weigh.func is softened:
        return weigh.keywords.get("hardness", climb)(progress)
    return progress


def number_kept(rule: Rule, cells: int) -> int | None:
    """How many of `cells` cells, all there, the rule keeps in any sample; None if it depends."""
    match rule:
        case partial(func=f, keywords={"count": count}) if f in (
            keep_top,
            keep_random,
            keep_gumbel,
        ):
            return min(int(count), cells)
        case partial(func=f, keywords={"share": share}) if f is keep_share:
            return max(1, math.floor(share * cells + 0.5))
        case _:
            return cells if rule is keep_all else None


Collect = Callable[
    [Float[Tensor, "b k d"], Bool[Tensor, "b k"], int | None], Chosen
]  # `gather` or `masked`

# --- selections on disk

RULES: dict[str, Callable[..., Any]] = {
    "all": keep_all,
    "top": keep_top,
    "share": keep_share,
    "above_uniform": keep_above_uniform,
    "random": keep_random,
    "gumbel": keep_gumbel,
}
WEIGHS: dict[str, Callable[..., Any]] = {
    "straight_through": straight_through,
    "softened": softened,
}
SCHEDULES: dict[str, Callable[..., Any]] = {"climb": climb, "ebb": ebb}


def rule_config(rule: Rule) -> dict[str, Any]:
    """Plain values from which `rule_from` makes the same rule."""
    return _named(rule, RULES, "keep")


def rule_from(config: Mapping[str, Any]) -> Rule:
    """The rule that a saved model was made with."""
    return _called(config, RULES, "keep")


def selection_from(config: Mapping[str, Any]) -> Selection:
    """The selection that a saved model was made with."""
    training, weigh, widen = (config.get(name) for name in ("training", "weigh", "widen"))
    return Selection(
        rule_from(config["rule"]),
        None if training is None else rule_from(training),
        None if weigh is None else _called(weigh, WEIGHS, "weigh"),
        None if widen is None else _called(widen, SCHEDULES, "schedule"),
    )


def _named(made: Callable[..., Any], names: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A function with its numbers as plain values."""
    function = made.func if isinstance(made, partial) else made
    given = dict(made.keywords) if isinstance(made, partial) else {}
    if "hardness" in given:
        given["hardness"] = _named(given["hardness"], SCHEDULES, "schedule")
    for name, known in names.items():
        if known is function and not getattr(made, "args", ()):
            return {what: name, **given}
    raise BadInput(
        f"a model that selects by {made!r} cannot be saved: {what} is one of {', '.join(names)}, "
        "with its numbers by name"
    )


def _called(config: Mapping[str, Any], names: Mapping[str, Any], what: str) -> Any:
    """The function that `_named` wrote down."""
    given = {name: value for name, value in config.items() if name != what}
    if config.get(what) not in names:
        raise BadInput(f"{what} {config.get(what)!r} is not one of {', '.join(names)}")
    if "hardness" in given:
        given["hardness"] = _called(given["hardness"], SCHEDULES, "schedule")
    return partial(names[config[what]], **given) if given else names[config[what]]
