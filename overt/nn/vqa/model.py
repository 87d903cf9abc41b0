"""Visual question answering with a choice of attention.

Soft attention follows Kazemi and Elqursh, "Show, Ask, Attend, and Answer", 2017,
https://arxiv.org/abs/1704.03162; words are weighted by structured self-attention, as in
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
from overt.errors import UserError
from overt.nn.attention_pool import attention_pool
from overt.nn.cell_checks import check_cells
from overt.nn.cnn import ConvBackbone, ImageFeatures, cell_coordinates
from overt.nn.hard_attention.attention import HardAttention, hard_attention_from_config
from overt.nn.network import Network
from overt.nn.output import Output
from overt.nn.text_classifier import WordAttention, WordFeatures


@runtime_checkable
class VQAAttention(Protocol):
    """Protocol of attention to image cells, given a question.

    Returns a summary with the features of a cell per glimpse, or with `width` features if it has
    that attribute, as `HardAttention`; and a map.

    Attributes:
        glimpses: number of summaries per image.
        uses_image: whether the image is encoded at all.
    """

    glimpses: int
    uses_image: bool

    def __call__(
        self,
        cells: Float[Tensor, "b k d"],
        question: Float[Tensor, "b e"],
        layout: Layout,
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]: ...

    def config(self) -> dict[str, Any]:
        """Return plain values from which `attention_from_config` builds the same module."""
        ...


class QuestionOnly(nn.Module):
    """No image: the question-only baseline. The image is not even encoded.

    Example:
        >>> cells = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> QuestionOnly()(cells, torch.rand(1, 6), grid(1, 2))
        (tensor([[0., 0.]]), None)
    """

    glimpses = 1
    uses_image = False

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """Return zeros as the summary."""
        check_cells(cells, question, layout)
        return torch.zeros_like(cells[:, 0]), None

    def config(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "blind"}


class MeanPooling(nn.Module):
    """Mean over all cells: the baseline without attention.

    Example:
        >>> cells = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> MeanPooling()(cells, torch.rand(1, 6), grid(1, 2))
        (tensor([[2., 3.]]), None)
    """

    glimpses = 1
    uses_image = True

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """Return the mean of the cells."""
        check_cells(cells, question, layout)
        return cells.mean(dim=1), None

    def config(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "mean"}


class SoftAttention(nn.Module):
    """`softmax(w relu(V x * Q q))` over the cells; glimpses are on the head axis.

    Args:
        cell: features of a cell.
        question: features of the question.
        hidden: hidden features of the scores.
        glimpses: number of attention maps.
        join: joins cells and question. The paper uses `torch.add`; the default is a product, which
            matches a cell with the words in one step.

    Example:
        >>> attend = SoftAttention(cell=8, question=6, hidden=16, glimpses=2)
        >>> summary, attention = attend(torch.rand(3, 4, 8), torch.rand(3, 6), grid(2, 2))
        >>> summary.shape, attention.weights.shape
        (torch.Size([3, 16]), torch.Size([3, 1, 2, 1, 4]))
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
        self.uses_image = True
        self.sizes = {"cell": cell, "question": question, "hidden": hidden, "glimpses": glimpses}
        self.glimpses, self.join = glimpses, join
        self.of_cell = nn.Linear(cell, hidden)
        self.of_question = nn.Linear(question, hidden)
        self.score = nn.Linear(hidden, glimpses)

    def forward(
        self, cells: Float[Tensor, "b k d"], question: Float[Tensor, "b e"], layout: Layout
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """Return the concatenated weighted sums of all glimpses, and the map."""
        check_cells(cells, question, layout, self.sizes["cell"], self.sizes["question"])
        joint = torch.relu(self.join(self.of_cell(cells), self.of_question(question)[:, None]))
        summary, attention = attention_pool(self.score(joint), cells, layout)
        return summary.flatten(1), attention

    def config(self) -> dict[str, Any]:
        """Return the sizes of the layers and the join."""
        for name, join in JOINS.items():
            if join is self.join:
                return {"kind": "soft", "join": name, **self.sizes}
        raise UserError("cannot save a custom join: expected torch.mul or torch.add")


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"product": torch.mul, "sum": torch.add}


def attention_from_config(config: Mapping[str, Any]) -> VQAAttention:
    """Build the attention of a saved model."""
    sizes = {name: value for name, value in config.items() if name not in ("kind", "join")}
    match config.get("kind"):
        case "blind":
            return QuestionOnly()
        case "mean":
            return MeanPooling()
        case "soft":
            return SoftAttention(**sizes, join=JOINS[config["join"]])
        case "hard":
            return hard_attention_from_config(config)
        case other:
            raise UserError(f"unknown attention {other!r}: expected blind, mean, soft or hard")


@dataclass(frozen=True, eq=False)
class VQAFeatures:
    """Features of an image and a question."""

    cells: ImageFeatures
    words: WordFeatures

    def pooled(self) -> Float[Tensor, "b d"]:
        """Return the means of cells and words, concatenated."""
        return torch.cat([self.cells.pooled(), self.words.pooled()], dim=-1)


@dataclass(frozen=True)
class VQASizes:
    """Layer sizes of a `VQA` network.

    Args:
        vocabulary: number of tokens.
        answers: number of answers.
        cell: features of a cell.
        word: features of a word.
        question: features of the question.
        hidden: units before the answers.
        dropout: dropout of the classifier.

    Example:
        >>> VQASizes(vocabulary=20, answers=5).seen  # 64 features and two coordinates
        66
    """

    vocabulary: int
    answers: int
    cell: int = 64
    word: int = 48
    question: int = 96
    hidden: int = 160
    dropout: float = 0.0

    @property
    def seen(self) -> int:
        """Features of a cell with its two coordinates."""
        return self.cell + 2


class VQA(Network[VQAFeatures]):
    """VQA network: a CNN, a GRU with attention over its words, and attention over cells.

    Departures from the paper, made for small datasets: a CNN trained end to end instead of a frozen
    ResNet, layer norm instead of the L2 norm of each cell, coordinates as extra features, and a
    question that is the sum of the GRU's last state and the weighted sum of its states. A mask on
    the cells is applied after their normalisation, where it has an effect.

    Args:
        sizes: layer sizes.
        attend: attention over the cells.

    Example:
        >>> sizes = VQASizes(vocabulary=20, answers=5)
        >>> net = VQA(sizes, SoftAttention(sizes.seen, sizes.question, hidden=32))
    """

    def __init__(self, sizes: VQASizes, attend: VQAAttention) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = ConvBackbone(
            [max(4, sizes.cell // 2), sizes.cell, sizes.cell, sizes.cell], [2, 2, 2, 1]
        )
        self.embed = nn.Embedding(sizes.vocabulary, sizes.word, padding_idx=0)
        # learned embedding of a masked word: a fixed zero would be the embedding of padding
        self.blank = nn.Parameter(torch.zeros(sizes.word))
        self.normalize = nn.LayerNorm(sizes.cell)
        self.read = nn.GRU(sizes.word, sizes.question, batch_first=True)
        self.weigh = WordAttention(sizes.question, sizes.question)
        self.attend = attend
        # pooling of weighted cells keeps their width; hard attention may project
        width = getattr(attend, "width", None) or attend.glimpses * sizes.seen
        summary = width + sizes.question
        self.decision = nn.Sequential(
            nn.Dropout(sizes.dropout),
            nn.Linear(summary, sizes.hidden),
            nn.ReLU(),
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.hidden, sizes.answers),
        )

    def encode(self, batch: Batch) -> VQAFeatures:
        """Encode images and questions; an image shared by questions is encoded once."""
        if batch.images is None or batch.tokens is None or batch.token_mask is None:
            raise ValueError("a VQA model needs a batch with images and tokens")
        text = WordFeatures(self.embed(batch.tokens), batch.token_mask, batch.text)
        if not self.attend.uses_image:
            # the question-only baseline does not run the CNN, so it costs nothing
            nothing = text.values.new_zeros(len(batch), 1, self.sizes.seen)
            return VQAFeatures(
                ImageFeatures(nothing, grid(1, 1, geometry=batch.sample_geometry)), text
            )
        features = self.backbone(batch.images)
        height, width = features.shape[-2:]
        layout = grid(height, width, geometry=batch.sample_geometry)
        # coordinates are appended after the norm, which would mix them with the features
        cells = self.normalize(rearrange(features, "i d y x -> i (y x) d"))
        cells = torch.cat([cells, cell_coordinates(layout, cells)], dim=-1)
        return VQAFeatures(ImageFeatures(cells[batch.image_index], layout), text)

    def decide(self, features: VQAFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Predict answers; return the maps over cells and words."""
        states, _ = self.read(features.words.masked(mask, self.blank))
        summary, over_words = self.weigh(states, features.words)
        length = features.words.present.sum(dim=1)
        # padding follows the last word and the GRU runs forward, so no packing is needed
        last = states[torch.arange(len(length), device=length.device), (length - 1).clamp_min(0)]
        question = summary[:, 0] + torch.where(length[:, None] > 0, last, 0)
        attended, over_cells = self._attend(features.cells, question, mask)
        prediction = self.decision(torch.cat([attended, question], dim=1))
        maps = (over_words,) if over_cells is None else (over_cells, over_words)
        if isinstance(self.attend, HardAttention) and over_cells is not None:
            return Output(prediction, maps, self.attend.costs(over_cells))
        return Output(prediction, maps)

    def _attend(
        self,
        cells: ImageFeatures,
        question: Float[Tensor, "b e"],
        mask: Mapping[str, Tensor] | None,
    ) -> tuple[Float[Tensor, "b s"], AttentionMap | None]:
        """Attend to masked cells; hard attention also gets the mask itself."""
        shown = cells.masked(mask)
        if isinstance(self.attend, HardAttention) and mask is not None and "image" in mask:
            # hard attention must not select a removed cell; its features are already scaled
            there = (mask["image"] != 0).to(shown.dtype)
            return self.attend(shown, question, cells.layout, there)
        return self.attend(shown, question, cells.layout)

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {"sizes": asdict(self.sizes), "attend": self.attend.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VQA":
        """Build the network that `config` describes, with fresh weights."""
        return cls(VQASizes(**config["sizes"]), attention_from_config(config["attend"]))
