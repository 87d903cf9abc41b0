"""Hard attention: join cells with a question, keep the most relevant, and drop the rest.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300, section 3.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout
from overt.errors import UserError
from overt.nn.cell_checks import check_cells
from overt.nn.hard_attention.aggregate import Aggregation, SumAggregation, aggregation_from_config
from overt.nn.hard_attention.selection import (
    CollectCells,
    PaddedCells,
    Rule,
    SelectedCells,
    Selection,
    apply_rule,
    count_kept,
    gather_cells,
    hardness_at,
    mask_cells,
    presence,
    selection_from_config,
    widen_selection,
)

CellScore = Callable[[Float[Tensor, "b k d"], Float[Tensor, "b k d"]], Float[Tensor, "b k"]]


def joint_presence(
    joint: Float[Tensor, "b k d"], image: Float[Tensor, "b k d"]
) -> Float[Tensor, "b k"]:
    """Score cells by the norm of their features joined with the question (eq. 5).

    Args:
        joint: cells joined with the question.
        image: cells of the image.

    Returns:
        One score per cell.

    Example:
        >>> image = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
        >>> joint_presence(image + torch.tensor([0.0, 4.0]), image)  # the question is (0, 4)
        tensor([[5., 5.]])
    """
    return presence(joint)


def image_presence(
    joint: Float[Tensor, "b k d"], image: Float[Tensor, "b k d"]
) -> Float[Tensor, "b k"]:
    """Score cells by the norm of the image features alone: a selection blind to the question.

    The control of `joint_presence`: it measures how much the question matters.

    Args:
        joint: cells joined with the question.
        image: cells of the image.

    Returns:
        One score per cell.

    Example:
        >>> image = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
        >>> image_presence(image + torch.tensor([0.0, 4.0]), image)  # the question is ignored
        tensor([[3., 1.]])
    """
    return presence(image)


def content_presence(
    joint: Float[Tensor, "b k d"], image: Float[Tensor, "b k d"]
) -> Float[Tensor, "b k"]:
    """Score cells by the norm without their last two features, where these are coordinates.

    Coordinates have the largest norm in the corners, whatever is there.

    Args:
        joint: cells joined with the question.
        image: cells of the image.
    """
    return presence(image[..., :-2])


def evidence_first(
    evidence: Float[Tensor, "b k"], scores: Float[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """Score cells with evidence above all others, by their evidence: the oracle's order.

    Args:
        evidence: share of each cell that decides the answer, 0 for cells without any.
        scores: scores from 0 up, such as norms; they order the cells without evidence.

    Returns:
        One score per cell: above 1 with evidence, below 1 without.

    Example:
        >>> evidence_first(torch.tensor([[0.0, 0.5, 0.0]]), torch.tensor([[3.0, 0.0, 1.0]]))
        tensor([[0.7500, 1.5000, 0.5000]])
    """
    return torch.where(evidence > 0, 1 + evidence, scores / (1 + scores))


# the keys are saved with models
SCORES: dict[str, CellScore] = {
    "asked": joint_presence,
    "unasked": image_presence,
    "unplaced": content_presence,
}


@dataclass(frozen=True, eq=False)
class HardAttentionOutput:
    """Summary of the kept cells, the 0/1 map, and the cost.

    Args:
        summary: aggregated features.
        attention: map of the kept cells; in training with weighted cells, their weights.
        extras: per sample `cells_kept`, and `flops`, the FLOPs of matrix products on question and
            cells (a multiply-add counts as two). Padding is not counted. Weighted cells all count.
    """

    summary: Float[Tensor, "b s"]
    attention: AttentionMap
    extras: Mapping[str, Tensor]


class HardAttention(nn.Module):
    """Hard attention: project and add cells and question, score, select and aggregate.

    The scores only select: gradients reach the layers through kept cells alone, and the selection
    has no parameters. In training, schedules follow `progress`, the completed share of training,
    which the training loop sets with `advance`. In evaluation the selection is hard.

    Args:
        cell: features of a cell.
        question: features of the question.
        joint: features of cells and question after the projections; those of a cell by default.
        depth: number of linear layers with ReLU on each side, before both are added (eq. 2-4). With
            0 the cells are not projected, and one linear layer fits the question to them. With None
            nothing is added: cells are scored by their own norm and passed on unchanged, for a
            relation network that takes the question itself.
        selection: how cells are selected; `keep_above_uniform` by default.
        aggregate: aggregates the kept cells; their sum by default.
        score: score of a cell.

    Attributes:
        collect: how training collects the kept cells: `gather_cells` computes nothing on the
            others; the operations of `mask_cells` do not depend on the number of kept cells.
        progress: completed share of training.

    Example:
        >>> from functools import partial
        >>> from overt.attention import grid
        >>> from overt.nn import keep_top
        >>> attend = HardAttention(4, question=3, selection=partial(keep_top, count=2)).eval()
        >>> summary, attention = attend(torch.rand(1, 9, 4), torch.rand(1, 3), grid(3, 3))
        >>> attention.weights.sum()  # two cells of weight 1
        tensor(2.)
    """

    def __init__(
        self,
        cell: int,
        question: int,
        joint: int | None = None,
        depth: int | None = 2,
        selection: Selection | Rule | None = None,
        aggregate: Aggregation | None = None,
        score: CellScore = joint_presence,
    ) -> None:
        super().__init__()
        self.uses_image = True
        # without layers on the cells, the question must be projected to the width of the cells
        width = joint if joint is not None and depth else cell
        self.sizes = {"cell": cell, "question": question, "joint": width, "depth": depth}
        _check_selection(selection)
        if selection is None or isinstance(selection, Selection):
            self.selection = selection or Selection()
        else:
            self.selection = Selection(selection)
        self.score = score
        self.progress = 1.0
        self.collect: CollectCells = gather_cells
        self._cells: int | None = None  # number of cells in the last call
        self.of_cell = _linear_relu(cell, width, depth or 0)
        self.of_question: nn.Module | None = None
        if depth is not None:
            self.of_question = (
                _linear_relu(question, width, depth) if depth else nn.Linear(question, width)
            )
        self.aggregate: Aggregation = SumAggregation(width) if aggregate is None else aggregate
        self.width = self.aggregate.width
        self.glimpses = 1

    def attend(
        self,
        image: Float[Tensor, "b k d"],
        question: Float[Tensor, "b e"],
        layout: Layout,
        mask: Float[Tensor, "b k"] | None = None,
        evidence: Float[Tensor, "b k"] | None = None,
    ) -> HardAttentionOutput:
        """Attend to cells that have already passed `of_cell`.

        A mask scales joined cells; cells with mask 0 cannot be selected. With `evidence`, cells
        that hold it are selected first, see `evidence_first`.
        """
        joint = image
        # m_ij = x_ij + q: the same question vector is added to every cell (section 3.1)
        if self.of_question is not None:
            joint = image + self.of_question(question)[:, None]
        # the mask acts twice: it scales features here, and hides cells of mask 0 from the rule
        # below
        if mask is not None:
            joint, image = (one * mask[..., None].to(one.dtype) for one in (joint, image))
        scores = self.score(joint, image)
        if evidence is not None:
            scores = evidence_first(evidence.to(scores.dtype), scores)
        self._cells = scores.shape[1]
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        # detach: the scores only select (section 3.1), gradients flow through the kept cells
        kept = apply_rule(self._rule, scores.detach(), ragged=mask is not None)
        if self._extra is not None:
            kept = widen_selection(scores.detach(), kept, self._extra)
        # under a mask fewer cells than `count_kept` may be present, so the count is not known in
        # advance
        chosen = self._chosen(joint, scores, kept, known=mask is None)
        amounts = kept.to(scores.dtype)
        if self._weighs and isinstance(chosen, PaddedCells) and chosen.weights is not None:
            amounts = chosen.weights.to(scores)  # one per cell; otherwise there may be padding
        attention = AttentionMap.from_cells(amounts, layout)
        return HardAttentionOutput(
            self.aggregate(chosen, question), attention, self.costs(attention)
        )

    def advance(self, progress: float) -> Hashable:
        """Set the completed share of training; return a key of the operations of a training step.

        The key is the number of cells kept now, where a schedule changes it, and the hardness of
        the weights. While it stays the same, a captured CUDA graph can be replayed.

        Raises:
            ValueError: The progress is not from 0 to 1.
        """
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must be from 0 to 1, such as step / steps, got {progress}")
        self.progress = progress
        hardness = hardness_at(self.selection.weigh, progress)
        if self.selection.widen is None:
            return None, hardness
        share = self.selection.widen(progress)
        kept = None if self._cells is None else self._count(self._cells, share)
        return share if kept is None else kept, hardness

    def cuda_graph_safe(self) -> bool:
        """Return whether the operations of a training step do not depend on its samples."""
        rule = self.selection.training or self.selection.rule
        # with a varying number of cells the shapes of a step depend on its samples, except in
        # `mask_cells`; 1 stands for any number of cells, only None matters
        packed = self.selection.weigh is None and count_kept(rule, 1) is None
        return not packed or self.collect is mask_cells

    def costs(self, attention: AttentionMap) -> dict[str, Tensor]:
        """Return the number of kept cells in a map, and the FLOPs of the summary."""
        weights = attention.weights.detach()[:, 0, 0, 0]
        kept = (weights > 0).sum(dim=-1).to(weights.dtype)
        # weighted cells stay in the graph, also those of weight 0: the aggregation pays for all of
        # them
        handled = torch.full_like(kept, weights.shape[1]) if self._weighs else kept
        flops = self.aggregate.flops(handled)
        if self.of_question is not None:
            flops = flops + linear_flops(self.of_question)
        return {"cells_kept": kept, "flops": flops}

    @property
    def _weighs(self) -> bool:
        """Whether all cells are weighted now."""
        return self.training and self.selection.weigh is not None

    @property
    def _rule(self) -> Rule:
        drawn = self.selection.training if self.training else None
        return self.selection.rule if drawn is None else drawn

    @property
    def _extra(self) -> float | None:
        """The share of dropped cells that are still kept now; None in evaluation."""
        widen = self.selection.widen
        return None if widen is None or not self.training else widen(self.progress)

    def _chosen(
        self,
        joint: Float[Tensor, "b k d"],
        scores: Float[Tensor, "b k"],
        kept: Bool[Tensor, "b k"],
        known: bool,
    ) -> SelectedCells:
        weigh = self.selection.weigh if self.training else None
        if weigh is not None:
            # a softmax over a row of -inf is NaN, and so is its gradient: such rows are replaced
            # before and zeroed after
            there = scores.isfinite().any(dim=-1, keepdim=True)
            weights = weigh(torch.where(there, scores, 0), kept, self.progress)
            return PaddedCells(joint, weights=torch.where(there, weights, 0).to(joint.dtype))
        count = self._count(joint.shape[1], self._extra) if known else None
        return (
            self.collect(joint, kept, count) if self.training else gather_cells(joint, kept, count)
        )

    def _count(self, cells: int, extra: float | None) -> int | None:
        """Return how many cells are kept in every sample; None if it varies."""
        count = count_kept(self._rule, cells)
        if count is None or extra is None:
            return count
        # the same number as in `widen_selection`, without reading the GPU
        return count + math.floor(extra * (cells - count) + 0.5)

    def forward(
        self,
        cells: Float[Tensor, "b k d"],
        question: Float[Tensor, "b e"],
        layout: Layout,
        mask: Float[Tensor, "b k"] | None = None,
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """Compute the summary, with `width` features, and the map.

        Every cell may be selected, also one with all-zero features, as after a ReLU.

        Args:
            cells: features of the cells. A feature map (b, d, y, x) has to be flattened:
                `features.flatten(2).transpose(1, 2)`, with the layout `grid(y, x)`.
            question: features of the question.
            layout: layout of the cells.
            mask: scales joined cells; 0 removes a cell.

        Returns:
            The summary, and the map of the kept cells.

        Raises:
            TypeError: `layout` is not a layout.
            ValueError: The cells are not (b, k, d) with `cell` features, or the other arguments do
                not fit them.

        Example:
            >>> attend = HardAttention(32, 8, joint=16).eval()
            >>> from overt.attention import grid
            >>> summary, attention = attend(torch.rand(2, 9, 32), torch.rand(2, 8), grid(3, 3))
            >>> tuple(summary.shape), attend.width
            ((2, 16), 16)
        """
        # without a projection the question may have any width
        width = self.sizes["question"] if self.of_question is not None else None
        check_cells(cells, question, layout, self.sizes["cell"], width)
        if mask is not None and mask.shape != cells.shape[:2]:
            raise ValueError(
                f"the mask must have shape {tuple(cells.shape[:2])}, one value per cell, got "
                f"{tuple(mask.shape)}"
            )
        output = self.attend(self.of_cell(cells), question, layout, mask)
        return output.summary, output.attention

    def config(self) -> dict[str, Any]:
        """Return the sizes, the selection, the score and the aggregation."""
        for name, score in SCORES.items():
            if score is self.score:
                return {
                    "kind": "hard",
                    **self.sizes,
                    "score": name,
                    "selection": self.selection.config(),
                    "aggregate": self.aggregate.config(),
                }
        raise UserError(f"cannot save a custom score: expected one of {', '.join(SCORES)}")


def _check_selection(selection: object) -> None:
    """Raise unless a rule can be called with scores alone."""
    if selection is None or isinstance(selection, Selection):
        return
    if not callable(selection):
        raise TypeError(
            f"selection must be a rule such as partial(keep_top, count=4), got {selection!r}"
        )
    try:
        inspect.signature(selection).bind(None)
    except TypeError as error:
        name = getattr(selection, "__name__", repr(selection))
        raise TypeError(
            f"a rule is called with the scores alone, and {name} needs more ({error}): give it "
            f"with functools.partial, such as partial({name}, count=4)"
        ) from None
    except ValueError:  # no signature, as for some functions in C
        pass


def hard_attention_from_config(config: Mapping[str, Any]) -> HardAttention:
    """Build the hard attention of a saved model."""
    if config.get("score") not in SCORES:
        raise UserError(f"score {config.get('score')!r} is not one of {', '.join(SCORES)}")
    return HardAttention(
        config["cell"],
        config["question"],
        config["joint"],
        config["depth"],
        selection_from_config(config["selection"]),
        aggregation_from_config(config["aggregate"]),
        SCORES[config["score"]],
    )


def linear_flops(module: nn.Module) -> int:
    """Count the FLOPs of all linear layers of a module on one row."""
    linear = [one for one in module.modules() if isinstance(one, nn.Linear)]
    return sum(2 * one.in_features * one.out_features for one in linear)


def _linear_relu(before: int, after: int, depth: int) -> nn.Module:
    """Return `depth` linear layers with ReLU; on cells these are 1 x 1 convolutions."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers)
