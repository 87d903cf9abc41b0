"""Show, Ask, Attend, and Answer: two glimpses at an image, led by a question.

Kazemi and Elqursh, 2017, https://arxiv.org/abs/1704.03162. With attention over the words it is the
baseline of "Self Supervision for Attention Networks".
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.models.answering.eyes import Eye, eye_from
from overt.models.answering.reading import Reader
from overt.models.answering.vqa import Asked
from overt.models.network import Network
from overt.models.output import Output
from overt.models.weighing import weigh


@dataclass(frozen=True)
class AskSizes:
    """The widths of the network, by default the published ones.

    `hops` of attention over the words; 0 is the network without them.
    """

    vocabulary: int
    answers: int
    word: int = 300
    question: int = 1024
    hidden: int = 512
    glimpses: int = 2
    joint: int = 1024
    hops: int = 1
    dropout: float = 0.5


class ShowAskAttend(Network[Asked]):
    """`softmax(w relu(V v + Q q))` over cells of length one, a glimpse at a time.

    As a reproduction that reaches the paper's numbers has it: V has no bias, dropout stands before
    every linear layer, weights start from Glorot's uniform distribution (each gate of the LSTM by
    itself) and biases from zero. Training there: Adam at 1e-3, halved every 50,000 steps, batches
    of 128, the mean over ten annotators of -log p. Glimpses stand on the head axis.

    Each cell is divided by its length, so a mask in front of that would cancel wherever it is above
    zero: masks act after it.
    """

    def __init__(self, sizes: AskSizes, eye: Eye) -> None:
        super().__init__()
        self.sizes, self.eye = sizes, eye
        self.reader = Reader(
            sizes.vocabulary, sizes.word, sizes.question, sizes.hops, sizes.dropout
        )
        self.of_cell = nn.Linear(eye.width, sizes.hidden, bias=False)
        self.of_question = nn.Linear(sizes.question, sizes.hidden)
        self.score = nn.Linear(sizes.hidden, sizes.glimpses)
        self.drop = nn.Dropout(sizes.dropout)
        self.decision = nn.Sequential(
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.glimpses * eye.width + sizes.question, sizes.joint),
            nn.ReLU(),
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.joint, sizes.answers),
        )
        glorot(self.reader)
        for one in (self.of_cell, self.of_question, self.score, self.decision):
            glorot(one)

    def encode(self, batch: Batch) -> Asked:
        """Cells of length one, and words."""
        words, cells = self.reader.words(batch), self.eye(batch)
        return Asked(replace(cells, values=unit(cells.values)), words)

    def decide(self, features: Asked, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Answers, and the maps over cells and, with hops, over words."""
        question, over_words = self.reader(features.words, mask)
        cells = features.cells.masked(mask)
        asked = self.of_question(self.drop(question))
        joint = torch.relu(self.of_cell(self.drop(cells)) + asked[:, None])
        seen, over_cells = weigh(self.score(self.drop(joint)), cells, features.cells.layout)
        prediction = self.decision(torch.cat([seen.flatten(1), question], dim=1))
        return Output(prediction, (over_cells, *over_words))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes), "eye": self.eye.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ShowAskAttend":
        """The network that `config` describes, with fresh weights."""
        return cls(AskSizes(**config["sizes"]), eye_from(config["eye"]))


def unit(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k d"]:
    """Each cell divided by its length; an empty one stays empty."""
    return cells / (cells.norm(dim=-1, keepdim=True) + 1e-8)


@torch.no_grad()
def glorot(module: nn.Module) -> None:
    """Uniform weights after Glorot, for each gate of an LSTM by itself, and biases of zero."""
    for one in module.modules():
        match one:
            case nn.Embedding():
                nn.init.xavier_uniform_(one.weight)
                if one.padding_idx is not None:
                    one.weight[one.padding_idx] = 0
            case nn.Linear():
                nn.init.xavier_uniform_(one.weight)
                if one.bias is not None:
                    nn.init.zeros_(one.bias)
            case nn.LSTM():
                for name, value in one.named_parameters():
                    if name.startswith("bias"):
                        nn.init.zeros_(value)
                    else:
                        for gate in value.chunk(4):
                            nn.init.xavier_uniform_(gate)
            case _:
                pass
