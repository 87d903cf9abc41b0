"""Answering questions about images: one reader, one eye, and a choice of how to look.

Soft attention follows Kazemi and Elqursh, "Show, Ask, Attend, and Answer", 2017,
https://arxiv.org/abs/1704.03162; the words are weighed by structured self-attention, as in
"Self Supervision for Attention Networks".
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout, grid
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.cnn import Backbone, Cells, coordinates
from overt.models.hard.attention import HardAttention, hard_from
from overt.models.network import Network
from overt.models.output import Output
from overt.models.text import WordAttention, Words
from overt.models.weighing import weigh


@runtime_checkable
class Attend(Protocol):
    """A way to look: cells and a question in, a summary a glimpse and a map out."""

    glimpses: int
    looks: bool

    def __call__(
        self,
        cells: Float[Tensor, "b k d"],
        question: Float[Tensor, "b e"],
        layout: Layout,
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]: ...

    def config(self) -> dict[str, Any]:
        """Plain values from which `attend_from` builds the same module."""
        ...


class Blind(nn.Module):
    """Look at nothing: what can be said from the question alone. No image is even encoded."""

    glimpses = 1
    looks = False

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """Zeros in the place of a summary."""
        return torch.zeros_like(cells[:, 0]), None

    def config(self) -> dict[str, Any]:
        """The name alone."""
        return {"kind": "blind"}


class MeanPool(nn.Module):
    """Look at everything alike: no attention."""

    glimpses = 1
    looks = True

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """The mean of the cells."""
        return cells.mean(dim=1), None

    def config(self) -> dict[str, Any]:
        """The name alone."""
        return {"kind": "mean"}


class SoftAttention(nn.Module):
    """`softmax(w relu(V x * Q q))` over the cells; glimpses stand on the head axis.

    The paper joins the two by `torch.add`. A product is the default here: it matches a cell with
    the words in one step.
    """

    def __init__(
        self,
        cell: int,
        question: int,
        hidden: int,
        glimpses: int = 2,
        join: Callable[[Tensor, Tensor], Tensor] = torch.mul,
    ) -> None:
        super().__init__()
        self.looks = True
        self.sizes = {"cell": cell, "question": question, "hidden": hidden, "glimpses": glimpses}
        self.glimpses, self.join = glimpses, join
        self.of_cell = nn.Linear(cell, hidden)
        self.of_question = nn.Linear(question, hidden)
        self.score = nn.Linear(hidden, glimpses)

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """The weighted sum of every glimpse, side by side, and the map behind them."""
        joint = torch.relu(self.join(self.of_cell(cells), self.of_question(question)[:, None]))
        summary, attention = weigh(self.score(joint), cells, layout)
        return summary.flatten(1), attention

    def config(self) -> dict[str, Any]:
        """The sizes of the layers and how the two sides are joined."""
        for name, join in JOINS.items():
            if join is self.join:
                return {"kind": "soft", "join": name, **self.sizes}
        raise BadInput("only attention that joins by torch.mul or torch.add can be saved")


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"product": torch.mul, "sum": torch.add}


def attend_from(config: Mapping[str, Any]) -> Attend:
    """The way to look that a saved model was made with."""
    sizes = {name: value for name, value in config.items() if name not in ("kind", "join")}
    match config.get("kind"):
        case "blind":
            return Blind()
        case "mean":
            return MeanPool()
        case "soft":
            return SoftAttention(**sizes, join=JOINS[config["join"]])
        case "hard":
            return hard_from(config)
        case other:
            raise BadInput(f"attention of kind {other!r} is not one of blind, mean, soft, hard")


@dataclass(frozen=True, eq=False)
class Asked:
    """An image and a question about it, as features."""

    cells: Cells
    words: Words

    def pooled(self) -> Float[Tensor, "b d"]:
        """The mean of the cells beside the mean of the words."""
        return torch.cat([self.cells.pooled(), self.words.pooled()], dim=-1)


@dataclass(frozen=True)
class Sizes:
    """The widths of a question-answering network."""

    vocabulary: int
    answers: int
    cell: int = 64
    word: int = 48
    question: int = 96
    hidden: int = 160
    dropout: float = 0.0

    @property
    def seen(self) -> int:
        """Features a cell has with its two coordinates."""
        return self.cell + 2


class VQA(Network[Asked]):
    """A CNN, a GRU with attention over its words, and `attend` to join the two.

    Departures from the paper, made for small worlds: a CNN trained with the rest in place of a
    frozen ResNet, layer norm in place of the L2 norm of each cell, coordinates beside its
    features, and a question that is the GRU's last state and the weighted sum of all its states,
    added. A mask on the cells acts after their normalisation, where it can be felt.
    """

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = Backbone(
            [max(4, sizes.cell // 2), sizes.cell, sizes.cell, sizes.cell], [2, 2, 2, 1]
        )
        self.embed = nn.Embedding(sizes.vocabulary, sizes.word, padding_idx=0)
        self.blank = nn.Parameter(torch.zeros(sizes.word))
        self.normalize = nn.LayerNorm(sizes.cell)
        self.read = nn.GRU(sizes.word, sizes.question, batch_first=True)
        self.weigh = WordAttention(sizes.question, sizes.question)
        self.attend = attend
        summary = attend.glimpses * sizes.seen + sizes.question
        self.decision = nn.Sequential(
            nn.Dropout(sizes.dropout),
            nn.Linear(summary, sizes.hidden),
            nn.ReLU(),
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.hidden, sizes.answers),
        )

    def encode(self, batch: Batch) -> Asked:
        """Each image once, however many questions are asked about it."""
        if batch.images is None or batch.tokens is None or batch.token_mask is None:
            raise ValueError("a question-answering model needs a batch with images and tokens")
        text = Words(self.embed(batch.tokens), batch.token_mask, batch.text)
        if not self.attend.looks:
            nothing = text.values.new_zeros(len(batch), 1, self.sizes.seen)
            return Asked(Cells(nothing, grid(1, 1, geometry=batch.sample_geometry)), text)
        features = self.backbone(batch.images)
        height, width = features.shape[-2:]
        layout = grid(height, width, geometry=batch.sample_geometry)
        cells = self.normalize(rearrange(features, "i d y x -> i (y x) d"))
        cells = torch.cat([cells, coordinates(layout, cells)], dim=-1)
        return Asked(Cells(cells[batch.image_index], layout), text)

    def decide(self, features: Asked, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Answers, and the maps over cells and words."""
        states, _ = self.read(features.words.masked(mask, self.blank))
        summary, over_words = self.weigh(states, features.words)
        length = features.words.present.sum(dim=1)
        last = states[torch.arange(len(length), device=length.device), (length - 1).clamp_min(0)]
        question = summary[:, 0] + torch.where(length[:, None] > 0, last, 0)
        seen, over_cells = self.attend(features.cells.masked(mask), question, features.cells.layout)
        prediction = self.decision(torch.cat([seen, question], dim=1))
        maps = (over_words,) if over_cells is None else (over_cells, over_words)
        if isinstance(self.attend, HardAttention) and over_cells is not None:
            return Output(prediction, maps, self.attend.costs(over_cells))
        return Output(prediction, maps)

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes), "attend": self.attend.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VQA":
        """The network that `config` describes, with fresh weights."""
        return cls(Sizes(**config["sizes"]), attend_from(config["attend"]))
