"""Small convolutional networks that turn images into cells, and classifiers on top of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout, grid
from overt.data.batch import Batch
from overt.models.network import Network
from overt.models.output import Output
from overt.models.weighing import weigh


@dataclass(frozen=True, eq=False)
class Cells:
    """An image as the features of its cells."""

    values: Float[Tensor, "b k d"]
    layout: Layout

    def masked(self, mask: Mapping[str, Tensor] | None) -> Float[Tensor, "b k d"]:
        """The features, each cell multiplied by its entry of the mask called "image"."""
        if mask is None or "image" not in mask:
            return self.values
        return self.values * mask["image"][..., None].to(self.values.dtype)

    def pooled(self) -> Float[Tensor, "b d"]:
        """The mean of the cells: what the image is, whatever is attended to."""
        return self.values.mean(dim=1)


class Backbone(nn.Module):
    """Blocks of 3 x 3 convolution, batch norm and ReLU; a stride of 2 halves the grid."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for before, after, stride in zip([3, *channels[:-1]], channels, strides, strict=True):
            convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
            blocks += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.blocks = nn.Sequential(*blocks)
        self.channels = channels[-1]

    def forward(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i d gy gx"]:
        """Features of whole images; bytes are brought to about [-1.6, 2.1] first."""
        pixels = images.to(next(self.parameters()).dtype)
        if not images.is_floating_point():
            pixels = (pixels - 110) / 70
        return self.blocks(pixels)


def see_cells(backbone: nn.Module, batch: Batch) -> Cells:
    """The cells of each sample's image; an image that samples share is seen once.

    Cells stand on the axis before the last, row by row, with all of their channels: a view of
    another shape would take numbers of several cells for one.
    """
    if batch.images is None:
        raise ValueError("an image classifier needs a batch with images")
    features = backbone(batch.images)[batch.image_index]
    height, width = features.shape[-2:]
    layout = grid(height, width, geometry=batch.sample_geometry)
    return Cells(rearrange(features, "b d y x -> b (y x) d"), layout)


class SmallCNN(Network[Cells]):
    """A classifier that averages the cells: the baseline of a network that does not attend.

    The grid is a quarter of the image's side, 8 x 8 for 32 x 32 images, as in the CIFAR-10 model
    of "Self Supervision for Attention Networks" (32 x 8 x 8 features), whose widths are unstated.
    """

    def __init__(self, classes: int, width: float = 1.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.classes, self.width, self.dropout = classes, width, dropout
        wide = max(4, round(64 * width))
        self.backbone = Backbone([wide, wide, 2 * wide, 2 * wide], [1, 2, 2, 1])
        self.decision = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(self.backbone.channels, classes)
        )

    def encode(self, batch: Batch) -> Cells:
        """The features of every cell of every sample's image."""
        return see_cells(self.backbone, batch)

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes from the mean of the cells."""
        return Output(self.decision(features.masked(mask).mean(dim=1)))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"classes": self.classes, "width": self.width, "dropout": self.dropout}


class AttentiveCNN(Network[Cells]):
    """A small CNN to 32 x 8 x 8 features and self-attention over the 64 cells.

    The CIFAR-10 model of "Self Supervision for Attention Networks", which states the size of the
    features and nothing else. Attention is that of Lin et al. with one hop, `softmax(w tanh(W x))`:
    attention of every cell to every cell would give no single map to supervise. Widths before the
    last layer, the hidden size and the decision from the attended sum alone are our own choice.
    """

    def __init__(
        self,
        classes: int,
        channels: Sequence[int] = (64, 64, 64, 32),
        hidden: int = 32,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.made_with: dict[str, Any] = {
            "classes": classes,
            "channels": list(channels),
            "hidden": hidden,
            "dropout": dropout,
        }
        halved = [2 if at in (1, 2) else 1 for at in range(len(channels))]
        self.backbone = Backbone(channels, halved)
        self.inner = nn.Linear(self.backbone.channels, hidden, bias=False)
        self.outer = nn.Linear(hidden, 1, bias=False)
        self.decision = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(self.backbone.channels, classes)
        )

    def encode(self, batch: Batch) -> Cells:
        """The features of every cell of every sample's image."""
        return see_cells(self.backbone, batch)

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes from the cells that are attended to."""
        cells = features.masked(mask)
        scores = self.outer(torch.tanh(self.inner(cells)))
        summary, attention = weigh(scores, cells, features.layout)
        return Output(self.decision(summary[:, 0]), (attention,))

    def decide_many(self, features: Cells, mask: Mapping[str, Float[Tensor, "m b k"]]) -> Output:
        """What `decide` says with m masks of each sample, one after the other.

        Cells are read and not copied; `W` has no bias, so that one number a cell may come after it.
        """
        given = mask.get("image")
        if given is None:
            raise ValueError(f'this network has cells to mask, "image", not {sorted(mask)}')
        keep = given.to(features.values.dtype)
        scores = self.outer(torch.tanh(self.inner(features.values) * keep[..., None]))
        everyone = torch.arange(len(features.values)).repeat(len(keep))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        attention = AttentionMap.from_scores(
            rearrange(scores, "m b k 1 -> (m b) 1 1 1 k"), features.layout.select(everyone)
        )
        weights = attention.weights.reshape(keep.shape).to(keep.dtype) * keep
        summary = einsum(weights, features.values, "m b k, b k d -> m b d")
        return Output(self.decision(summary).flatten(0, 1), (attention,))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {**self.made_with, "channels": [*self.made_with["channels"]]}


def coordinates(layout: Layout, like: Float[Tensor, "b k d"]) -> Float[Tensor, "b k 2"]:
    """Where each cell stands, (y, x) from -1 to 1."""
    height, width = layout.find("image").shape
    y = torch.linspace(-1, 1, height, device=like.device, dtype=like.dtype)
    x = torch.linspace(-1, 1, width, device=like.device, dtype=like.dtype)
    places = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)
    return places.expand(len(like), -1, -1)
