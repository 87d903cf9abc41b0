"""Image encoders of VQA networks: cached features or a trained CNN.

The small network of simple-HAN and simple-SAN, and cells divided by their norm, are those of
Malinowski et al. 2018, https://arxiv.org/abs/1808.00300, sections 4.5 and 4.7.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.attention import grid
from overt.data.batch import Batch
from overt.errors import UserError
from overt.nn.cnn import ConvBackbone, ImageFeatures, cell_coordinates, encode_images

NormalizeCells = Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b k d"]]


@runtime_checkable
class ImageEncoder(Protocol):
    """Protocol of an encoder from a batch to image cells with `width` features each."""

    width: int

    def __call__(self, batch: Batch) -> ImageFeatures: ...

    def config(self) -> dict[str, Any]:
        """Return plain values from which `image_encoder_from_config` builds the same module."""
        ...


class CachedImageEncoder(nn.Module):
    """Precomputed features of `overt.data.feature_cache`, such as 14 x 14 cells of 2048.

    Args:
        width: features of a cell.
        shape: rows and columns of the grid; cells in `batch.features` are ordered row by row.

    Example:
        >>> batch = Batch(ids=("a",), features=torch.rand(1, 6, 16))
        >>> CachedImageEncoder(width=16, shape=(2, 3))(batch).layout.find("image").shape
        (2, 3)
    """

    def __init__(self, width: int = 2048, shape: Sequence[int] = (14, 14)) -> None:
        super().__init__()
        self.width, self.shape = width, (int(shape[0]), int(shape[1]))

    def forward(self, batch: Batch) -> ImageFeatures:
        """Return the features of the batch."""
        if batch.features is None:
            raise ValueError("batch.features is None: this model needs cached features")
        rows, columns = self.shape
        found = tuple(batch.features.shape[1:])
        if found != (rows * columns, self.width):
            raise ValueError(
                f"batch.features has {found[0]} cells with {found[1]} features, expected "
                f"{rows} x {columns} cells with {self.width}"
            )
        return ImageFeatures(batch.features, grid(rows, columns, geometry=batch.sample_geometry))

    def config(self) -> dict[str, Any]:
        """Return the size of the features."""
        return {"kind": "cached", "width": self.width, "shape": [*self.shape]}


class CNNEncoder(nn.Module):
    """Small CNN trained with the rest of the network.

    Args:
        channels: channels of each block.
        strides: stride of each block.

    Example:
        >>> from overt.testing import toy_batch
        >>> cells = CNNEncoder([8, 16], strides=[4, 2])(toy_batch(2))  # images of 32 x 32 pixels
        >>> cells.values.shape, cells.layout.find("image").shape
        (torch.Size([2, 16, 16]), (4, 4))
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.made_with = {"channels": [*channels], "strides": [*strides]}
        self.backbone = ConvBackbone(channels, strides)
        self.width = self.backbone.channels

    def forward(self, batch: Batch) -> ImageFeatures:
        """Encode each image once, also if several questions share it."""
        return encode_images(self.backbone, batch)

    def config(self) -> dict[str, Any]:
        """Return the channels and strides of the blocks."""
        return {"kind": "trained", **{name: [*many] for name, many in self.made_with.items()}}


class CoordinateEncoder(nn.Module):
    """Another encoder with the (y, x) coordinates of each cell, from -1 to 1 (SAN with positions).

    A mask also removes the coordinates of a cell.

    Args:
        image_encoder: the encoder to extend.

    Example:
        >>> from overt.testing import toy_batch
        >>> encoder = CoordinateEncoder(CNNEncoder([8], strides=[16]))
        >>> encoder(toy_batch(1)).values[0, :, -2:].tolist()  # y and x of 2 x 2 cells
        [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """

    def __init__(self, image_encoder: ImageEncoder) -> None:
        super().__init__()
        self.eye = image_encoder  # name of saved weights
        self.width = image_encoder.width + 2

    def forward(self, batch: Batch) -> ImageFeatures:
        """Append the coordinates to the cells."""
        cells = self.eye(batch)
        places = cell_coordinates(cells.layout, cells.values)
        return ImageFeatures(torch.cat([cells.values, places], dim=-1), cells.layout)

    def config(self) -> dict[str, Any]:
        """Return the config of the inner encoder."""
        return {"kind": "placed", "eye": self.eye.config()}


class StridedCNN(nn.Module):
    """Five layers of stride 2, so that a cell is 32 x 32 pixels (section 4.7).

    64 filters of 7 x 7, then 256, 256, 512 and 512 of 3 x 3, all times `wide`. The paper mentions
    no batch norm; here one follows each layer, for training from scratch.
    """

    # 7 x 7 x 64, 3 x 3 x 256 twice, 3 x 3 x 512 twice, all with stride 2
    CHANNELS = (64, 256, 256, 512, 512)

    def __init__(self, wide: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for at, channels in enumerate(self.CHANNELS):
            after, side = max(4, round(wide * channels)), 3 if at else 7
            layer = nn.Conv2d(before, after, side, stride=2, padding=side // 2, bias=False)
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            layers += [layer, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            before = after
        self.blocks = nn.Sequential(*layers)
        self.channels = before

    def forward(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i d gy gx"]:
        """Compute feature maps; uint8 images are first scaled to about [-1.6, 2.1]."""
        pixels = images.to(next(self.parameters()).dtype)
        return self.blocks(pixels if images.is_floating_point() else (pixels - 110) / 70)


class StridedCNNEncoder(nn.Module):
    """Encoder of simple-HAN and simple-SAN: `StackedAttention(sizes, StridedCNNEncoder())`.

    Args:
        wide: factor on the number of channels.
    """

    def __init__(self, wide: float = 1.0) -> None:
        super().__init__()
        self.wide = wide
        self.backbone = StridedCNN(wide)
        self.width = self.backbone.channels

    def forward(self, batch: Batch) -> ImageFeatures:
        """Encode each image once, also if several questions share it."""
        return encode_images(self.backbone, batch)

    def config(self) -> dict[str, Any]:
        """Return the width factor."""
        return {"kind": "strided", "wide": self.wide}


def normalize_cells(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k d"]:
    """Divide each cell by its L2 norm.

    Args:
        cells: features of the cells.
    """
    # a zero cell stays zero: normalize clamps the norm from below
    return nn.functional.normalize(cells, dim=-1)


def normalize_image(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k d"]:
    """Divide all cells of an image by their common L2 norm.

    Args:
        cells: features of the cells.
    """
    return nn.functional.normalize(cells.flatten(1), dim=-1).view_as(cells)


NORMS: dict[str, NormalizeCells] = {"cell": normalize_cells, "image": normalize_image}


class NormalizedEncoder(nn.Module):
    """Another encoder with normalised cells.

    The paper divides "images by their norm". By default each cell is divided by its own norm, as in
    Kazemi and Elqursh; `normalize_image` is the other reading, which keeps the relative norms of
    cells.

    Args:
        image_encoder: the encoder to normalise.
        norm: normalisation of the cells.
    """

    def __init__(self, image_encoder: ImageEncoder, norm: NormalizeCells = normalize_cells) -> None:
        super().__init__()
        self.eye = image_encoder  # name of saved weights
        self.norm, self.width = norm, image_encoder.width

    def forward(self, batch: Batch) -> ImageFeatures:
        """Normalise the cells of the inner encoder."""
        cells = self.eye(batch)
        return replace(cells, values=self.norm(cells.values))

    def config(self) -> dict[str, Any]:
        """Return the config of the inner encoder, and the norm."""
        for name, norm in NORMS.items():
            if norm is self.norm:
                return {"kind": "normed", "norm": name, "eye": self.eye.config()}
        raise UserError(f"cannot save the custom norm {self.norm!r}: use a norm of overt.nn")


def image_encoder_from_config(config: Mapping[str, Any]) -> ImageEncoder:
    """Build the image encoder of a saved model."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "cached":
            return CachedImageEncoder(**sizes)
        case "trained":
            return CNNEncoder(**sizes)
        case "placed":
            return CoordinateEncoder(image_encoder_from_config(config["eye"]))
        case "strided":
            return StridedCNNEncoder(**sizes)
        case "normed":
            return NormalizedEncoder(
                image_encoder_from_config(config["eye"]), NORMS[config["norm"]]
            )
        case other:
            known = "cached, trained, placed, strided, normed"
            raise UserError(f"unknown image encoder {other!r}: expected one of {known}")
