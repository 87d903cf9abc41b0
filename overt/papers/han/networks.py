"""Hard attention networks (HAN) for visual question answering.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300: for photos (sections 4.2 to 4.5), for
photos end to end (4.7), and for CLEVR with a relation network (4.8).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.experiments.recipe import scale_width
from overt.nn.hard_attention.aggregate import Aggregation, RelationAggregation
from overt.nn.hard_attention.attention import (
    CellScore,
    HardAttention,
    content_presence,
    hard_attention_from_config,
    joint_presence,
    linear_flops,
)
from overt.nn.hard_attention.selection import Rule, Selection, keep_above_uniform
from overt.nn.network import Network
from overt.nn.output import Output
from overt.nn.vqa.image_encoders import (
    CachedImageEncoder,
    CNNEncoder,
    CoordinateEncoder,
    ImageEncoder,
    NormalizedEncoder,
    StridedCNNEncoder,
    image_encoder_from_config,
)
from overt.nn.vqa.model import VQAFeatures
from overt.nn.vqa.question_encoders import (
    LSTMQuestionEncoder,
    QuestionEncoder,
    ReversedLSTMQuestionEncoder,
    question_encoder_from_config,
)


@dataclass(frozen=True)
class AnswerHead:
    """The last layers: their widths, a ReLU after each, and the dropout before the answers."""

    hidden: tuple[int, ...]
    answers: int
    dropout: float = 0.0

    def layers(self, before: int) -> nn.Sequential:
        """Build the layers on a summary of `before` features."""
        layers: list[nn.Module] = []
        for width in self.hidden:
            layers += [nn.Linear(before, width), nn.ReLU()]
            before = width
        return nn.Sequential(*layers, nn.Dropout(self.dropout), nn.Linear(before, self.answers))


@dataclass(frozen=True, eq=False)
class EvidenceFeatures(VQAFeatures):
    """Features with the evidence of each cell: its share that shows deciding objects."""

    evidence: Float[Tensor, "b k"]


class HAN(Network[VQAFeatures]):
    """An image encoder, a question encoder, hard attention over both, and an answer head.

    `vqa_cp`, `simple_han` and `relation_net` build those of the paper. A mask acts on cells
    that were joined with the question; removed cells cannot be selected. The extras are
    `cells_kept` and `flops` per sample: the floating-point operations of matrix products from
    the encoded question to the answers. The encoders cost the same for any selection rule.

    With `oracle`, cells that hold the evidence in `batch.target` are selected first: an upper
    bound for every rule that keeps as many cells. Such a network needs the target at inference.
    """

    def __init__(
        self,
        eye: ImageEncoder,
        reader: QuestionEncoder,
        attend: HardAttention,
        decision: AnswerHead,
        oracle: bool = False,
    ) -> None:
        super().__init__()
        if attend.sizes["cell"] != eye.width or attend.sizes["question"] != reader.width:
            raise ValueError(
                f"attention expects cells of {attend.sizes['cell']} and questions of "
                f"{attend.sizes['question']} features, got an image encoder of {eye.width} and a "
                f"question encoder of {reader.width}"
            )
        self.eye, self.reader, self.attend, self.made_with = eye, reader, attend, decision
        self.decision = decision.layers(attend.width)
        self.oracle = oracle

    def encode(self, batch: Batch) -> VQAFeatures:
        """Encode cells, through the layers that do not depend on the question, and words."""
        cells = self.eye(batch)
        aligned = replace(cells, values=self.attend.of_cell(cells.values))
        words = self.reader.encode(batch)
        if not self.oracle:
            return VQAFeatures(aligned, words)
        return EvidenceFeatures(aligned, words, batch_evidence(batch, cells.values.shape[1]))

    def decide(self, features: VQAFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return answers, the binary map of the selected cells, and the cost."""
        cells = features.cells
        question = self.reader(features.words, mask).to(cells.values.dtype)
        cell_mask = None if mask is None else mask.get("image")
        evidence = features.evidence if isinstance(features, EvidenceFeatures) else None
        selected = self.attend.attend(cells.values, question, cells.layout, cell_mask, evidence)
        extras = dict(selected.extras)
        extras["flops"] = extras["flops"] + linear_flops(self.decision)
        return Output(self.decision(selected.summary), (selected.attention,), extras)

    def config(self) -> dict[str, Any]:
        """Return the values that `from_config` takes."""
        # Networks that were saved before there was an oracle have no such entry.
        oracle = {"oracle": True} if self.oracle else {}
        return {
            **oracle,
            "eye": self.eye.config(),
            "reader": self.reader.config(),
            "attend": self.attend.config(),
            "hidden": list(self.made_with.hidden),
            "answers": self.made_with.answers,
            "dropout": self.made_with.dropout,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "HAN":
        """Build the network of a config, with fresh weights."""
        return cls(
            image_encoder_from_config(config["eye"]),
            question_encoder_from_config(config["reader"]),
            hard_attention_from_config(config["attend"]),
            AnswerHead(tuple(config["hidden"]), config["answers"], config["dropout"]),
            config.get("oracle", False),
        )


def batch_evidence(batch: Batch, cells: int) -> Float[Tensor, "b k"]:
    """Return the share of each cell that shows deciding objects, from the target of a batch.

    Args:
        batch: samples whose target is on the grid of the network.
        cells: number of cells of the network.

    Returns:
        One number per cell, up to a factor per sample; zero without any deciding object.

    Raises:
        ValueError: there is no target, or it is on another grid.

    Example:
        >>> from overt.data import SortOfClevr
        >>> batch_evidence(SortOfClevr("test", count=1).batch([0, 1]), cells=25).shape
        torch.Size([2, 25])
    """
    if batch.target is None:
        raise ValueError("batch.target is None: an oracle selection needs the deciding objects")
    evidence = batch.target.weights[:, 0, 0, 0]
    if evidence.shape[1] != cells:
        raise ValueError(
            f"batch.target has {evidence.shape[1]} cells, the network has {cells}: an oracle "
            "selection needs a dataset with the grid of the network"
        )
    return evidence


def vqa_cp(
    vocabulary: int,
    answers: int = 1000,
    selection: Selection | Rule = keep_above_uniform,
    aggregate: Aggregation | None = None,
    eye: ImageEncoder | None = None,
    depth: int = 2,
    joint: int = 2048,
    state: int = 512,
    hidden: Sequence[int] = (1024, 2048),
    score: CellScore = joint_presence,
) -> HAN:
    """Build the model for photos: cached cells, an LSTM of 512, two embedding layers each, an MLP.

    Not stated in the paper: word embeddings of 300 features, learned; no dropout. `aggregate`
    is the sum of the cells, or `Pairwise(joint)`; with depth 0 cells keep the width of the
    image encoder.
    """
    encoder = NormalizedEncoder(CachedImageEncoder(2048, (10, 10))) if eye is None else eye
    reader = LSTMQuestionEncoder(vocabulary, state=state)
    attend = HardAttention(encoder.width, state, joint, depth, selection, aggregate, score)
    return HAN(encoder, reader, attend, AnswerHead(tuple(hidden), answers))


def simple_han(
    vocabulary: int,
    answers: int = 1000,
    selection: Selection | Rule = keep_above_uniform,
    aggregate: Aggregation | None = None,
    width: float = 1.0,
    depth: int = 2,
) -> HAN:
    """Build the end-to-end model: a small CNN from scratch instead of cached cells (section 4.7).

    Cells are embedded at the CNN's own width; `width` scales every layer except the answers.
    """
    eye = StridedCNNEncoder(width)
    state, hidden = scale_width(512, width), (scale_width(1024, width), scale_width(2048, width))
    return vqa_cp(vocabulary, answers, selection, aggregate, eye, depth, eye.width, state, hidden)


def relation_net(
    vocabulary: int,
    answers: int = 28,
    selection: Selection | Rule = keep_above_uniform,
    joint: int | None = 128,
    aggregate: Aggregation | None = None,
    reader: QuestionEncoder | None = None,
    maps: int = 24,
    hidden: int = 256,
    score: CellScore | None = None,
) -> HAN:
    """Build the model for CLEVR: a CNN of 24 maps, cells with positions, and a relation network.

    With `joint`, cells and question are embedded by two layers each and added, and the relation
    network sees pairs of those. The paper leaves open what its pairs are made of, and only this
    way does the selection get a gradient from the answers. With None, pairs are of CNN cells,
    selected by their own norm, which with `keep_all` is the network of Santoro et al. 2017.
    Questions are read backwards by an LSTM of 128, or by a bag of words. CLEVR has 28 answers;
    the 29 found in places is a slip. `aggregate=Sum(joint)` is HAN+sum.
    """
    eye = CoordinateEncoder(CNNEncoder([maps] * 4, [2] * 4))
    reads: QuestionEncoder = (
        ReversedLSTMQuestionEncoder(vocabulary, word=32, state=128) if reader is None else reader
    )
    depth = None if joint is None else 2
    pairs = (
        RelationAggregation(joint or eye.width, reads.width, hidden)
        if aggregate is None
        else aggregate
    )
    scores = score or (content_presence if joint is None else joint_presence)
    attend = HardAttention(eye.width, reads.width, joint, depth, selection, pairs, scores)
    return HAN(eye, reads, attend, AnswerHead((hidden, hidden), answers, dropout=0.5))


def init_fan_in(net: nn.Module) -> nn.Module:
    """Initialize the linear layers and convolutions of a network with a variance of 1 / fan-in.

    Weights are normal, truncated at two deviations, and biases 0: the default of Sonnet, the
    library of the paper's authors. PyTorch starts with a third of that variance in every layer.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # `weight[0]` has the inputs of one output: for a convolution its channels times the
            # kernel.
            deviation = layer.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(layer.weight, 0.0, deviation, -2 * deviation, 2 * deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net
