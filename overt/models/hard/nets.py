"""Networks that answer from a few cells: the models of the hard-attention paper.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300: for photos (sections 4.2 to 4.5), for
photos end to end (4.7), and for CLEVR with a relation network (4.8).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from overt.data.batch import Batch
from overt.models.answering.eyes import (
    CachedEye,
    Eye,
    NormedEye,
    PlacedEye,
    StridedEye,
    TrainedEye,
    eye_from,
)
from overt.models.answering.questions import (
    Backwards,
    QuestionReader,
    Recurrent,
    question_reader_from,
)
from overt.models.answering.vqa import Asked
from overt.models.hard.aggregate import Aggregate, Relation
from overt.models.hard.attention import (
    HardAttention,
    Score,
    asked,
    hard_from,
    linear_flops,
    unplaced,
)
from overt.models.hard.selection import Rule, Selection, keep_above_uniform
from overt.models.network import Network
from overt.models.output import Output


@dataclass(frozen=True)
class Decision:
    """The last layers: their widths, a ReLU after each, and the dropout before the answers."""

    hidden: tuple[int, ...]
    answers: int
    dropout: float = 0.0

    def layers(self, before: int) -> nn.Sequential:
        """The layers on a summary of `before` features."""
        layers: list[nn.Module] = []
        for width in self.hidden:
            layers += [nn.Linear(before, width), nn.ReLU()]
            before = width
        return nn.Sequential(*layers, nn.Dropout(self.dropout), nn.Linear(before, self.answers))


class HAN(Network[Asked]):
    """An eye, a reader, hard attention over what they say together, and a decision.

    `vqa_cp`, `simple_han` and `relation_net` build those of the paper. A mask acts on cells that
    were joined with the question; those it removes cannot be chosen. The extras are `cells_kept`
    and `flops`, one number a sample: the floating-point operations of matrix products from a
    question that has been read to its answers. Eye and reader cost the same for any rule.
    """

    def __init__(
        self, eye: Eye, reader: QuestionReader, attend: HardAttention, decision: Decision
    ) -> None:
        super().__init__()
        if attend.sizes["cell"] != eye.width or attend.sizes["question"] != reader.width:
            raise ValueError(
                f"attention over cells of {attend.sizes['cell']} and questions of "
                f"{attend.sizes['question']} features does not fit an eye of {eye.width} and a "
                f"reader of {reader.width}"
            )
        self.eye, self.reader, self.attend, self.made_with = eye, reader, attend, decision
        self.decision = decision.layers(attend.width)

    def encode(self, batch: Batch) -> Asked:
        """Cells, through the layers that do not depend on the question, and words."""
        cells = self.eye(batch)
        aligned = replace(cells, values=self.attend.of_cell(cells.values))
        return Asked(aligned, self.reader.encode(batch))

    def decide(self, features: Asked, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Answers, the 0/1 map of the cells they come from, and what these cost."""
        cells = features.cells
        question = self.reader(features.words, mask).to(cells.values.dtype)
        kept = None if mask is None else mask.get("image")
        looked = self.attend.look(cells.values, question, cells.layout, kept)
        extras = dict(looked.extras)
        extras["flops"] = extras["flops"] + linear_flops(self.decision)
        return Output(self.decision(looked.summary), (looked.attention,), extras)

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {
            "eye": self.eye.config(),
            "reader": self.reader.config(),
            "attend": self.attend.config(),
            "hidden": list(self.made_with.hidden),
            "answers": self.made_with.answers,
            "dropout": self.made_with.dropout,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "HAN":
        """The network that `config` describes, with fresh weights."""
        return cls(
            eye_from(config["eye"]),
            question_reader_from(config["reader"]),
            hard_from(config["attend"]),
            Decision(tuple(config["hidden"]), config["answers"], config["dropout"]),
        )


def vqa_cp(
    vocabulary: int,
    answers: int = 1000,
    selection: Selection | Rule = keep_above_uniform,
    aggregate: Aggregate | None = None,
    eye: Eye | None = None,
    depth: int = 2,
    joint: int = 2048,
    state: int = 512,
    hidden: Sequence[int] = (1024, 2048),
    score: Score = asked,
) -> HAN:
    """The model for photos: cached cells, an LSTM of 512, two aligning layers a side, an MLP.

    Unstated in the paper, and chosen: words of 300 features, learned with the rest; no dropout.
    `aggregate` is the sum of the cells, or `Pairwise(joint)`; with depth 0 cells keep the width of
    the eye.
    """
    sees = NormedEye(CachedEye(2048, (10, 10))) if eye is None else eye
    reader = Recurrent(vocabulary, state=state)
    attend = HardAttention(sees.width, state, joint, depth, selection, aggregate, score)
    return HAN(sees, reader, attend, Decision(tuple(hidden), answers))


def simple_han(
    vocabulary: int,
    answers: int = 1000,
    selection: Selection | Rule = keep_above_uniform,
    aggregate: Aggregate | None = None,
    width: float = 1.0,
    depth: int = 2,
) -> HAN:
    """The model end to end: a small CNN from scratch in the place of cached cells (section 4.7).

    Cells are aligned at the CNN's own width; `width` multiplies every layer but the answers.
    """
    eye = StridedEye(width)
    state, hidden = _times(width, 512), (_times(width, 1024), _times(width, 2048))
    return vqa_cp(vocabulary, answers, selection, aggregate, eye, depth, eye.width, state, hidden)


def relation_net(
    vocabulary: int,
    answers: int = 28,
    selection: Selection | Rule = keep_above_uniform,
    joint: int | None = 128,
    aggregate: Aggregate | None = None,
    reader: QuestionReader | None = None,
    maps: int = 24,
    hidden: int = 256,
    score: Score | None = None,
) -> HAN:
    """The model for CLEVR: a CNN of 24 maps, cells with their places, and a relation network.

    With `joint` cells and question are aligned by two layers each and added, and the relation
    network is asked about pairs of those: the paper leaves open what its pairs are made of, and
    only so does the choice learn from the answers. With None pairs are of cells as the CNN made
    them, chosen by their own norm, which with `keep_all` is the network of Santoro et al. 2017.
    Questions are read backwards by an LSTM of 128, or by `Bag`. CLEVR has 28 answers; 29, as
    written at times, is a slip. `aggregate=Sum(joint)` is HAN+sum.
    """
    eye = PlacedEye(TrainedEye([maps] * 4, [2] * 4))
    reads: QuestionReader = Backwards(vocabulary, word=32, state=128) if reader is None else reader
    depth = None if joint is None else 2
    pairs = Relation(joint or eye.width, reads.width, hidden) if aggregate is None else aggregate
    scores = score or (unplaced if joint is None else asked)
    attend = HardAttention(eye.width, reads.width, joint, depth, selection, pairs, scores)
    return HAN(eye, reads, attend, Decision((hidden, hidden), answers, dropout=0.5))


def fan_in(net: nn.Module) -> nn.Module:
    """The same network; its linear layers and convolutions begin with a variance of 1 / inputs.

    Numbers are normal and cut at two deviations, biases 0: what Sonnet, the library of the paper's
    authors, does unasked. PyTorch begins with a third of that variance, layer upon layer.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            deviation = layer.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(layer.weight, 0.0, deviation, -2 * deviation, 2 * deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net


def _times(width: float, features: int) -> int:
    return max(4, round(width * features))
