""" "Show, Ask, Attend, and Answer": attention over image cells with two glimpses.

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
from overt.nn.attention_pool import attention_pool
from overt.nn.network import Network
from overt.nn.output import Output
from overt.nn.vqa.image_encoders import ImageEncoder, image_encoder_from_config
from overt.nn.vqa.lstm_reader import AttentiveQuestionEncoder
from overt.nn.vqa.model import VQAFeatures


@dataclass(frozen=True)
class ShowAskAttendSizes:
    """Layer sizes of `ShowAskAttend`, by default the published ones.

    Args:
        vocabulary: number of tokens.
        answers: number of answers.
        word: features of a word.
        question: features of the question.
        hidden: hidden features of the attention scores.
        glimpses: number of attention maps over the cells.
        joint: units before the answers.
        hops: attention maps over the words; 0 for none.
        dropout: dropout before every linear layer.

    Example:
        >>> sizes = ShowAskAttendSizes(vocabulary=10_000, answers=3000)
        >>> sizes.glimpses, sizes.joint
        (2, 1024)
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


class ShowAskAttend(Network[VQAFeatures]):
    """`softmax(w relu(V v + Q q))` over L2-normalised cells, with several glimpses.

    Details follow a reproduction that reaches the paper's numbers: V has no bias, dropout precedes
    every linear layer, weights start from Glorot's uniform distribution (each LSTM gate separately)
    and biases from zero. Its training: Adam at 1e-3, halved every 50,000 steps, batches of 128, the
    mean over ten annotators of -log p. Glimpses are on the head axis.

    Cells are divided by their norm, which would cancel any mask value above zero applied before:
    masks are applied after it.

    Args:
        sizes: layer sizes.
        image_encoder: encodes the image as cells.

    Example:
        >>> from overt.nn import CNNEncoder
        >>> from overt.testing import toy_batch
        >>> sizes = ShowAskAttendSizes(10, answers=3, word=8, question=8, hidden=8, joint=8)
        >>> model = ShowAskAttend(sizes, CNNEncoder([8, 8], strides=[4, 2])).eval()
        >>> output = model(toy_batch(2))  # images of 32 x 32 pixels
        >>> output.prediction.shape, output.attention_to("image").weights.shape
        (torch.Size([2, 3]), torch.Size([2, 1, 2, 1, 16]))
    """

    def __init__(self, sizes: ShowAskAttendSizes, image_encoder: ImageEncoder) -> None:
        super().__init__()
        self.sizes, self.eye = sizes, image_encoder  # "eye" is a name of saved weights
        self.reader = AttentiveQuestionEncoder(
            sizes.vocabulary, sizes.word, sizes.question, sizes.hops, sizes.dropout
        )
        self.of_cell = nn.Linear(image_encoder.width, sizes.hidden, bias=False)
        self.of_question = nn.Linear(sizes.question, sizes.hidden)
        self.score = nn.Linear(sizes.hidden, sizes.glimpses)
        self.drop = nn.Dropout(sizes.dropout)
        self.decision = nn.Sequential(
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.glimpses * image_encoder.width + sizes.question, sizes.joint),
            nn.ReLU(),
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.joint, sizes.answers),
        )
        init_glorot(self.reader)
        for one in (self.of_cell, self.of_question, self.score, self.decision):
            init_glorot(one)

    def encode(self, batch: Batch) -> VQAFeatures:
        """Encode the image as L2-normalised cells, and embed the words."""
        words, cells = self.reader.words(batch), self.eye(batch)
        return VQAFeatures(replace(cells, values=unit_norm(cells.values)), words)

    def decide(self, features: VQAFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Predict answers; return the maps over cells and, with hops, over words."""
        question, over_words = self.reader(features.words, mask)
        cells = features.cells.masked(mask)
        projected = self.of_question(self.drop(question))
        joint = torch.relu(self.of_cell(self.drop(cells)) + projected[:, None])
        attended, over_cells = attention_pool(
            self.score(self.drop(joint)), cells, features.cells.layout
        )
        prediction = self.decision(torch.cat([attended.flatten(1), question], dim=1))
        return Output(prediction, (over_cells, *over_words))

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {"sizes": asdict(self.sizes), "eye": self.eye.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ShowAskAttend":
        """Build the network that `config` describes, with fresh weights."""
        return cls(ShowAskAttendSizes(**config["sizes"]), image_encoder_from_config(config["eye"]))


def unit_norm(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k d"]:
    """Divide each cell by its L2 norm; a zero cell stays zero."""
    # the epsilon is added as in the reference code; nn.functional.normalize would clamp instead
    return cells / (cells.norm(dim=-1, keepdim=True) + 1e-8)


@torch.no_grad()
def init_glorot(module: nn.Module) -> None:
    """Initialise weights with Glorot's uniform distribution (per LSTM gate), biases with zero."""
    for one in module.modules():
        match one:
            case nn.Embedding():
                nn.init.xavier_uniform_(one.weight)
                if one.padding_idx is not None:
                    # the initialisation has overwritten the zeros of padding
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
                        # Glorot's range depends on the shape: the four gates in one matrix would
                        # get a smaller one
                        for gate in value.chunk(4):
                            nn.init.xavier_uniform_(gate)
            case _:
                pass
