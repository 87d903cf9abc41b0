"""Small CNNs that encode images as grid cells, and classifiers on top of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout, grid
from overt.data.batch import Batch
from overt.nn.attention_pool import attention_pool
from overt.nn.network import Network, SavableModule
from overt.nn.output import Output


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Features of the cells or regions of each image, with their layout.

    Args:
        values: features of each cell or region.
        layout: what the cells are.

    Example:
        >>> features = ImageFeatures(torch.ones(1, 4, 2), grid(2, 2))
        >>> features.masked({"image": torch.tensor([[1.0, 0.0, 0.0, 1.0]])}).sum(dim=-1)
        tensor([[2., 0., 0., 2.]])
    """

    values: Float[Tensor, "b k d"]
    layout: Layout

    def masked(self, mask: Mapping[str, Tensor] | None) -> Float[Tensor, "b k d"]:
        """Return the features, each cell multiplied by its entry in the "image" mask."""
        if mask is None or "image" not in mask:
            return self.values
        # a product, so that a soft mask scales a cell and gets a gradient
        return self.values * mask["image"][..., None].to(self.values.dtype)

    def pooled(self) -> Float[Tensor, "b d"]:
        """Return the mean over the cells, independent of attention."""
        return self.values.mean(dim=1)


class ConvBackbone(SavableModule):
    """Blocks of 3 x 3 convolution, batch norm and ReLU; a stride of 2 halves the grid.

    Args:
        channels: channels of each block.
        strides: stride of each block.

    Example:
        >>> ConvBackbone([8, 16], strides=[2, 2])(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 16, 8, 8])
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for before, after, stride in zip([3, *channels[:-1]], channels, strides, strict=True):
            # no bias: batch norm subtracts it
            convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
            blocks += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.blocks = nn.Sequential(*blocks)
        self.channels = channels[-1]
        self._sizes = {"channels": list(channels), "strides": list(strides)}

    def forward(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i d gy gx"]:
        """Compute feature maps; uint8 images are first scaled to about [-1.6, 2.1]."""
        pixels = images.to(next(self.parameters()).dtype)
        if not images.is_floating_point():
            pixels = (pixels - 110) / 70  # about the mean and deviation of photos
        return self.blocks(pixels)

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return dict(self._sizes)


def encode_images(backbone: nn.Module, batch: Batch) -> ImageFeatures:
    """Encode each sample's image as grid cells; an image shared by samples is encoded once.

    Cells are flattened row by row with the channels last. A plain view of (d, y, x) would mix the
    channels of several cells.
    """
    if batch.images is None:
        raise ValueError("batch.images is None: an image encoder needs a batch with images")
    features = backbone(batch.images)[batch.image_index]
    height, width = features.shape[-2:]
    layout = grid(height, width, geometry=batch.sample_geometry)
    return ImageFeatures(rearrange(features, "b d y x -> b (y x) d"), layout)


class SmallCNN(Network[ImageFeatures]):
    """Classifier on the mean of the cells: the baseline without attention.

    The grid side is a quarter of the image side, 8 x 8 for 32 x 32 images, as in the CIFAR-10 model
    of "Self Supervision for Attention Networks" (32 x 8 x 8 features), whose widths are unstated.

    Args:
        classes: number of classes.
        width: factor on the number of channels; 1.0 is 64 to 128 channels.
        dropout: dropout before the classifier.

    Example:
        >>> from overt.testing import toy_batch
        >>> model = SmallCNN(classes=10, width=0.1).eval()
        >>> model.encode(toy_batch(2)).layout.find("image").shape  # of images of 32 x 32 pixels
        (8, 8)
        >>> model(toy_batch(2)).prediction.shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int, width: float = 1.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.classes, self.width, self.dropout = classes, width, dropout
        wide = max(4, round(64 * width))
        self.backbone = ConvBackbone([wide, wide, 2 * wide, 2 * wide], [1, 2, 2, 1])
        self.decision = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(self.backbone.channels, classes)
        )

    def encode(self, batch: Batch) -> ImageFeatures:
        """Encode the image of each sample as grid cells."""
        return encode_images(self.backbone, batch)

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classify the mean of the cells."""
        return Output(self.decision(features.masked(mask).mean(dim=1)))

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {"classes": self.classes, "width": self.width, "dropout": self.dropout}


class AttentiveCNN(Network[ImageFeatures]):
    """Small CNN with 32 x 8 x 8 features and attention pooling over the 64 cells.

    The CIFAR-10 model of "Self Supervision for Attention Networks", which states the size of the
    features and nothing else. Attention is that of Lin et al. with one hop, `softmax(w tanh(W x))`:
    self-attention between all cells would give no single map to supervise. Our own choices: widths
    before the last layer, the hidden size, and classifying from the attended sum alone.

    Args:
        classes: number of classes.
        channels: channels of each block; the second and third block halve the grid.
        hidden: hidden size of the attention scores.
        dropout: dropout before the classifier.

    Example:
        >>> from overt.testing import toy_batch
        >>> model = AttentiveCNN(classes=10, channels=(8, 8, 8, 4)).eval()
        >>> model(toy_batch(2)).attention_to("image").weights.shape
        torch.Size([2, 1, 1, 1, 64])
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
        # two strides of 2: 32 x 32 pixels become 8 x 8 cells
        halved = [2 if at in (1, 2) else 1 for at in range(len(channels))]
        self.backbone = ConvBackbone(channels, halved)
        self.inner = nn.Linear(self.backbone.channels, hidden, bias=False)
        self.outer = nn.Linear(hidden, 1, bias=False)
        self.decision = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(self.backbone.channels, classes)
        )

    def encode(self, batch: Batch) -> ImageFeatures:
        """Encode the image of each sample as grid cells."""
        return encode_images(self.backbone, batch)

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classify the attention-pooled cells."""
        cells = features.masked(mask)
        scores = self.outer(torch.tanh(self.inner(cells)))
        summary, attention = attention_pool(scores, cells, features.layout)
        return Output(self.decision(summary[:, 0]), (attention,))

    def decide_many(
        self, features: ImageFeatures, mask: Mapping[str, Float[Tensor, "m b k"]]
    ) -> Output:
        """Run `decide` for m masks of each sample at once; rows are ordered mask by mask.

        Cells are not copied per mask: `W` has no bias, so the mask can be applied after it.
        """
        given = mask.get("image")
        if given is None:
            raise ValueError(f'expected a mask over "image", got masks over {sorted(mask)}')
        keep = given.to(features.values.dtype)
        # W (m x) = m (W x) for a scalar m: the large product is computed once for all masks
        scores = self.outer(torch.tanh(self.inner(features.values) * keep[..., None]))
        rows = torch.arange(len(features.values)).repeat(len(keep))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        attention = AttentionMap.from_scores(
            rearrange(scores, "m b k 1 -> (m b) 1 1 1 k"), features.layout.select(rows)
        )
        # sum_k a_k (m_k x_k) = sum_k (a_k m_k) x_k: the mask moves from cells to weights
        weights = attention.weights.reshape(keep.shape).to(keep.dtype) * keep
        summary = einsum(weights, features.values, "m b k, b k d -> m b d")
        return Output(self.decision(summary).flatten(0, 1), (attention,))

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {**self.made_with, "channels": [*self.made_with["channels"]]}


def cell_coordinates(layout: Layout, like: Float[Tensor, "b k d"]) -> Float[Tensor, "b k 2"]:
    """Return the (y, x) position of each cell, from -1 to 1."""
    height, width = layout.find("image").shape
    y = torch.linspace(-1, 1, height, device=like.device, dtype=like.dtype)
    x = torch.linspace(-1, 1, width, device=like.device, dtype=like.dtype)
    places = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)
    return places.expand(len(like), -1, -1)
