"""Stacked attention: what was seen makes the next question.

Yang, He, Gao, Deng and Smola, "Stacked Attention Networks for Image Question Answering", CVPR 2016,
https://arxiv.org/abs/1511.02274, eq. 15-22.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout
from overt.data.batch import Batch
from overt.models.answering.eyes import Eye, eye_from
from overt.models.answering.reading import Reader
from overt.models.answering.vqa import Asked
from overt.models.network import Network
from overt.models.output import Output
from overt.models.weighing import weigh


@dataclass(frozen=True)
class StackSizes:
    """The widths of the network; `hops` over cells, `word_hops` over words, 0 for none.

    `joint` is the size in which cells and question are added up: 1024 in the paper and in that of
    hard attention (ECCV 2018), whose SAN this also is.
    """

    vocabulary: int
    answers: int
    word: int = 500
    question: int = 1024
    joint: int = 1024
    hidden: int = 512
    hops: int = 2
    word_hops: int = 1
    dropout: float = 0.5


class Hop(nn.Module):
    """`h = tanh(W v + (Q u + b))`, `p = softmax(w h + b)`, `u' = u + sum p v` (eq. 15-18)."""

    def __init__(self, joint: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.of_cell = nn.Linear(joint, hidden, bias=False)
        self.of_question = nn.Linear(joint, hidden)
        self.drop = nn.Dropout(dropout)
        self.score = nn.Linear(hidden, 1)

    def forward(
        self, cells: Float[Tensor, "b k d"], asked: Float[Tensor, "b d"], layout: Layout
    ) -> tuple[Float[Tensor, "b d"], AttentionMap]:
        """The question with what was seen, and where."""
        joint = torch.tanh(self.of_cell(cells) + self.of_question(asked)[:, None])
        seen, attention = weigh(self.score(self.drop(joint)), cells, layout)
        return asked + seen[:, 0], attention


class StackedAttention(Network[Asked]):
    """Cells and question in one space, one hop of attention after another, answers from their sum.

    `v = tanh(W x)`, `u = tanh(W q)`, then hops with weights of their own, then one linear layer.
    Hops stand on the layer axis: `looking_at("image").layer(-1)` is the last, which decides. The
    question is read as in `Reader`. The paper takes the LSTM's last state as u without a layer of
    its own; ours has one, because sizes may differ. A mask acts on what the eye sees, before W: a
    cell that is removed is `tanh(b)`, the same for all. SAN with positions is this with the eye
    `PlacedEye`.
    """

    def __init__(self, sizes: StackSizes, eye: Eye) -> None:
        super().__init__()
        if sizes.hops < 1:
            raise ValueError(f"stacked attention has one hop or more, not {sizes.hops}")
        self.sizes, self.eye = sizes, eye
        self.reader = Reader(
            sizes.vocabulary, sizes.word, sizes.question, sizes.word_hops, sizes.dropout
        )
        self.of_cell = nn.Linear(eye.width, sizes.joint)
        self.of_question = nn.Linear(sizes.question, sizes.joint)
        self.drop = nn.Dropout(sizes.dropout)
        self.hops = nn.ModuleList(
            Hop(sizes.joint, sizes.hidden, sizes.dropout) for _ in range(sizes.hops)
        )
        self.decision = nn.Sequential(
            nn.Dropout(sizes.dropout), nn.Linear(sizes.joint, sizes.answers)
        )

    def encode(self, batch: Batch) -> Asked:
        """Cells and words."""
        return Asked(self.eye(batch), self.reader.words(batch))

    def decide(self, features: Asked, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Answers, the map over cells with a layer a hop, and that over words."""
        question, over_words = self.reader(features.words, mask)
        cells = self.drop(torch.tanh(self.of_cell(features.cells.masked(mask))))
        asked = self.drop(torch.tanh(self.of_question(question)))
        maps = []
        for hop in self.hops:
            asked, attention = hop(cells, asked, features.cells.layout)
            maps.append(attention)
        return Output(self.decision(asked), (_layered(maps), *over_words))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes), "eye": self.eye.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "StackedAttention":
        """The network that `config` describes, with fresh weights."""
        return cls(StackSizes(**config["sizes"]), eye_from(config["eye"]))


def _layered(maps: Sequence[AttentionMap]) -> AttentionMap:
    """Maps over the same keys as the layers of one."""
    return replace(maps[0], values=torch.cat([one.values for one in maps], dim=1))
