"""Hard attention: join cells with a question, keep the strongest, and drop the rest unseen.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300, section 3.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout
from overt.errors import BadInput
from overt.models.hard.aggregate import Aggregate, Sum, aggregate_from
from overt.models.hard.selection import (
    Chosen,
    Collect,
    Kept,
    Rule,
    Selection,
    gather,
    hardness_of,
    kept_by,
    masked,
    number_kept,
    presence,
    selection_from,
    widened,
)

Score = Callable[[Float[Tensor, "b k d"], Float[Tensor, "b k d"]], Float[Tensor, "b k"]]


def asked(joint: Float[Tensor, "b k d"], image: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """The presence of cells that were joined with the question (eq. 5)."""
    return presence(joint)


def unasked(joint: Float[Tensor, "b k d"], image: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """The presence of the image's cells alone: a choice that is blind to the question.

    The control of `asked`: it tells how much of a choice comes from the question at all.
    """
    return presence(image)


def unplaced(joint: Float[Tensor, "b k d"], image: Float[Tensor, "b k d"]) -> Float[Tensor, "b k"]:
    """The presence of cells without their last two features, where these are a cell's place.

    A place has the largest norm in the corners, which says nothing of what stands there.
    """
    return presence(image[..., :-2])


SCORES: dict[str, Score] = {"asked": asked, "unasked": unasked, "unplaced": unplaced}


@dataclass(frozen=True, eq=False)
class Looked:
    """What hard attention made of the cells, the 0/1 map of those it kept, and what that cost.

    `extras` has one number a sample: `cells_kept`, and `flops`, the floating-point operations of
    matrix products, two for a product and a sum, that went into question and cells. Work on fill-up
    is not in it. While cells are weighed in training the map holds the weights, and all cells cost.
    """

    summary: Float[Tensor, "b s"]
    attention: AttentionMap
    extras: Mapping[str, Tensor]


class HardAttention(nn.Module):
    """Cells and question are aligned, added, scored by their norm, selected and aggregated.

    `depth` layers on either side bring both to `joint` features, a ReLU after each, before they are
    added (eq. 2-4). With depth 0 the cells stay as they are and one linear layer fits the question
    to them. With depth None nothing is added: cells are judged by their own norm and handed on as
    they are, as a relation network takes them, which gets the question beside them.

    The scores only choose: gradient reaches the layers through kept cells alone, and the choice
    itself has no parameters. In training `progress`, the share of it that is done, is what
    schedules from soft to hard go by; whoever trains sets it by `advance`. After training all is
    hard. `collect` is how training takes the kept cells: `gather`, which does nothing with the
    others, or `masked`, whose operations do not depend on their number.
    """

    def __init__(
        self,
        cell: int,
        question: int,
        joint: int | None = None,
        depth: int | None = 2,
        selection: Selection | Rule | None = None,
        aggregate: Aggregate | None = None,
        score: Score = asked,
    ) -> None:
        super().__init__()
        self.looks = True
        width = joint if joint is not None and depth else cell
        self.sizes = {"cell": cell, "question": question, "joint": width, "depth": depth}
        if selection is None or isinstance(selection, Selection):
            self.selection = selection or Selection()
        else:
            self.selection = Selection(selection)
        self.score = score
        self.progress = 1.0
        self.collect: Collect = gather
        self._cells: int | None = None  # how many there were when it last looked
        self.of_cell = _layers(cell, width, depth or 0)
        self.of_question: nn.Module | None = None
        if depth is not None:
            self.of_question = (
                _layers(question, width, depth) if depth else nn.Linear(question, width)
            )
        self.aggregate: Aggregate = Sum(width) if aggregate is None else aggregate
        self.width = self.aggregate.width
        self.glimpses = self.width // cell  # as `VQA` counts features

    def look(
        self,
        image: Float[Tensor, "b k d"],
        question: Float[Tensor, "b e"],
        layout: Layout,
        mask: Float[Tensor, "b k"] | None = None,
    ) -> Looked:
        """A summary of the cells that matter, where `image` has been through `of_cell`.

        A mask weakens joined cells; those it removes, with 0, cannot be chosen.
        """
        joint = image
        if self.of_question is not None:
            joint = image + self.of_question(question)[:, None]
        if mask is not None:
            joint, image = (one * mask[..., None].to(one.dtype) for one in (joint, image))
        scores = self.score(joint, image)
        self._cells = scores.shape[1]
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        kept = kept_by(self._rule, scores.detach())
        if self._extra is not None:
            kept = widened(scores.detach(), kept, self._extra)
        chosen = self._chosen(joint, scores, kept, known=mask is None)
        amounts = kept.to(scores.dtype)
        if self._weighs and isinstance(chosen, Kept) and chosen.weights is not None:
            amounts = chosen.weights.to(scores)  # of all cells; else places may be filled up
        attention = AttentionMap.from_cells(amounts, layout)
        return Looked(self.aggregate(chosen, question), attention, self.costs(attention))

    def advance(self, progress: float) -> Hashable:
        """Say which share of training is done; what is returned tells steps of other work apart.

        It is the number of cells that are kept now, where a schedule changes it, and the hardness
        of their weights: while it is the same, so are the operations of a training step.
        """
        self.progress = progress
        hardness = hardness_of(self.selection.weigh, progress)
        if self.selection.widen is None:
            return None, hardness
        share = self.selection.widen(progress)
        kept = None if self._cells is None else self._count(self._cells, share)
        return share if kept is None else kept, hardness

    def recordable(self) -> bool:
        """Whether the operations of a training step do not depend on its samples."""
        rule = self.selection.training or self.selection.rule
        packed = self.selection.weigh is None and number_kept(rule, 1) is None
        return not packed or self.collect is masked

    def costs(self, attention: AttentionMap) -> dict[str, Tensor]:
        """The cells that a map of ours has kept, and the operations that went into the summary."""
        weights = attention.weights.detach()[:, 0, 0, 0]
        kept = (weights > 0).sum(dim=-1).to(weights.dtype)
        handled = torch.full_like(kept, weights.shape[1]) if self._weighs else kept
        flops = self.aggregate.flops(handled)
        if self.of_question is not None:
            flops = flops + linear_flops(self.of_question)
        return {"cells_kept": kept, "flops": flops}

    @property
    def _weighs(self) -> bool:
        """Whether all cells count now, each by its weight."""
        return self.training and self.selection.weigh is not None

    @property
    def _rule(self) -> Rule:
        drawn = self.selection.training if self.training else None
        return self.selection.rule if drawn is None else drawn

    @property
    def _extra(self) -> float | None:
        """The share of the cells that are left out and still kept now; None after training."""
        widen = self.selection.widen
        return None if widen is None or not self.training else widen(self.progress)

    def _chosen(
        self,
        joint: Float[Tensor, "b k d"],
        scores: Float[Tensor, "b k"],
        kept: Bool[Tensor, "b k"],
        known: bool,
    ) -> Chosen:
        weigh = self.selection.weigh if self.training else None
        if weigh is not None:
            there = scores.isfinite().any(dim=-1, keepdim=True)
            weights = weigh(torch.where(there, scores, 0), kept, self.progress)
            return Kept(joint, weights=torch.where(there, weights, 0).to(joint.dtype))
        count = self._count(joint.shape[1], self._extra) if known else None
        return self.collect(joint, kept, count) if self.training else gather(joint, kept, count)

    def _count(self, cells: int, extra: float | None) -> int | None:
        """How many of so many cells are kept in any sample; None if it depends on the sample."""
        count = number_kept(self._rule, cells)
        if count is None or extra is None:
            return count
        return count + math.floor(extra * (cells - count) + 0.5)

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """The summary and the map, as other ways to look give them.

        A cell whose features are all zero counts as removed: that is how it is told here.
        """
        if self.width % cells.shape[-1]:
            raise ValueError(
                f"a summary of {self.width} features is no whole number of cells of "
                f"{cells.shape[-1]}: choose an aggregation that ends in a multiple of that"
            )
        there = (cells != 0).any(dim=-1).to(cells.dtype)
        looked = self.look(self.of_cell(cells), question, layout, there)
        return looked.summary, looked.attention

    def config(self) -> dict[str, Any]:
        """The sizes, the selection, the score and the aggregation."""
        for name, score in SCORES.items():
            if score is self.score:
                return {
                    "kind": "hard",
                    **self.sizes,
                    "score": name,
                    "selection": self.selection.config(),
                    "aggregate": self.aggregate.config(),
                }
        raise BadInput(f"only attention that scores by {' or '.join(SCORES)} can be saved")


def hard_from(config: Mapping[str, Any]) -> HardAttention:
    """The hard attention that a saved model was made with."""
    if config.get("score") not in SCORES:
        raise BadInput(f"score {config.get('score')!r} is not one of {', '.join(SCORES)}")
    return HardAttention(
        config["cell"],
        config["question"],
        config["joint"],
        config["depth"],
        selection_from(config["selection"]),
        aggregate_from(config["aggregate"]),
        SCORES[config["score"]],
    )


def linear_flops(module: nn.Module) -> int:
    """The operations of all linear layers of a module on one row."""
    linear = [one for one in module.modules() if isinstance(one, nn.Linear)]
    return sum(2 * one.in_features * one.out_features for one in linear)


def _layers(before: int, after: int, depth: int) -> nn.Module:
    """`depth` linear layers, a ReLU after each; on cells these are convolutions of 1 x 1."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers)
