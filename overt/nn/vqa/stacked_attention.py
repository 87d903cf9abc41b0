"""Stacked attention: each hop refines the question with what it attended to.

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
from overt.nn.attention_pool import attention_pool
from overt.nn.network import Network
from overt.nn.output import Output
from overt.nn.vqa.image_encoders import ImageEncoder, image_encoder_from_config
from overt.nn.vqa.lstm_reader import AttentiveQuestionEncoder
from overt.nn.vqa.model import VQAFeatures


@dataclass(frozen=True)
class StackedAttentionSizes:
    """Layer sizes of `StackedAttention`.

    Args:
        vocabulary: number of tokens.
        answers: number of answers.
        word: features of a word.
        question: features of the question encoder.
        joint: features in which cells and question are added: 1024 in the paper and in that of hard
            attention (ECCV 2018), whose SAN this also is.
        hidden: hidden features of the attention scores.
        hops: attention hops over the cells.
        word_hops: attention maps over the words; 0 for none.
        dropout: dropout of words, scores and classifier.

    Example:
        >>> sizes = StackedAttentionSizes(vocabulary=10_000, answers=3000)
        >>> sizes.hops, sizes.joint
        (2, 1024)
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


class AttentionHop(nn.Module):
    """`h = tanh(W v + (Q u + b))`, `p = softmax(w h + b)`, `u' = u + sum p v` (eq. 15-18)."""

    def __init__(self, joint: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.of_cell = nn.Linear(joint, hidden, bias=False)
        self.of_question = nn.Linear(joint, hidden)
        self.drop = nn.Dropout(dropout)
        self.score = nn.Linear(hidden, 1)

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b d"], layout: Layout
    ) -> tuple[Float[Tensor, "b d"], AttentionMap]:
        """Return the refined question and the attention map."""
        joint = torch.tanh(self.of_cell(cells) + self.of_question(question)[:, None])
        attended, attention = attention_pool(self.score(self.drop(joint)), cells, layout)
        # one score per cell, so the axis of heads has size one
        return question + attended[:, 0], attention


class StackedAttention(Network[VQAFeatures]):
    """Stacked attention network (SAN): several hops over cells in a joint space.

    `v = tanh(W x)`, `u = tanh(W q)`, then hops with their own weights, then one linear layer. Hops
    are on the layer axis: `attention_to("image").layer(-1)` is the last, from which answers are
    predicted. The question encoder is `AttentiveQuestionEncoder`. The paper takes the LSTM's last
    state as u without another layer; here there is one, because sizes may differ. A mask is applied
    to the encoder's output, before W: a removed cell is `tanh(b)`, the same for all. SAN with
    positions uses `CoordinateEncoder`.

    Args:
        sizes: layer sizes.
        image_encoder: encodes the image as cells.

    Raises:
        ValueError: `sizes.hops` is below 1.

    Example:
        >>> from overt.nn import CNNEncoder
        >>> from overt.testing import toy_batch
        >>> sizes = StackedAttentionSizes(10, answers=3, word=8, question=8, joint=8, hidden=8)
        >>> model = StackedAttention(sizes, CNNEncoder([8, 8], strides=[4, 2])).eval()
        >>> output = model(toy_batch(2))  # images of 32 x 32 pixels
        >>> output.attention_to("image").weights.shape  # two hops on the layer axis
        torch.Size([2, 2, 1, 1, 16])
    """

    def __init__(self, sizes: StackedAttentionSizes, image_encoder: ImageEncoder) -> None:
        super().__init__()
        if sizes.hops < 1:
            raise ValueError(f"sizes.hops must be 1 or more, got {sizes.hops}")
        self.sizes, self.eye = sizes, image_encoder  # "eye" is a name of saved weights
        self.reader = AttentiveQuestionEncoder(
            sizes.vocabulary, sizes.word, sizes.question, sizes.word_hops, sizes.dropout
        )
        self.of_cell = nn.Linear(image_encoder.width, sizes.joint)
        self.of_question = nn.Linear(sizes.question, sizes.joint)
        self.drop = nn.Dropout(sizes.dropout)
        self.hops = nn.ModuleList(
            AttentionHop(sizes.joint, sizes.hidden, sizes.dropout) for _ in range(sizes.hops)
        )
        self.decision = nn.Sequential(
            nn.Dropout(sizes.dropout), nn.Linear(sizes.joint, sizes.answers)
        )

    def encode(self, batch: Batch) -> VQAFeatures:
        """Encode the image as cells, and embed the words."""
        return VQAFeatures(self.eye(batch), self.reader.words(batch))

    def decide(self, features: VQAFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Predict answers; return the map over cells, one layer per hop, and that over words."""
        question, over_words = self.reader(features.words, mask)
        cells = self.drop(torch.tanh(self.of_cell(features.cells.masked(mask))))
        query = self.drop(torch.tanh(self.of_question(question)))
        maps = []
        for hop in self.hops:
            query, attention = hop(cells, query, features.cells.layout)
            maps.append(attention)
        return Output(self.decision(query), (_stack_layers(maps), *over_words))

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {"sizes": asdict(self.sizes), "eye": self.eye.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "StackedAttention":
        """Build the network that `config` describes, with fresh weights."""
        return cls(
            StackedAttentionSizes(**config["sizes"]), image_encoder_from_config(config["eye"])
        )


def _stack_layers(maps: Sequence[AttentionMap]) -> AttentionMap:
    """Stack maps over the same keys on the layer axis."""
    return replace(maps[0], values=torch.cat([one.values for one in maps], dim=1))
