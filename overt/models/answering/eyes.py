"""Where the cells of a question-answering network come from: cached features, or its own CNN.

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
from overt.errors import BadInput
from overt.models.cnn import Backbone, Cells, coordinates, see_cells

Norm = Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b k d"]]


@runtime_checkable
class Eye(Protocol):
    """A batch in, the cells of each sample's image out, `width` numbers a cell."""

    width: int

    def __call__(self, batch: Batch) -> Cells: ...

    def config(self) -> dict[str, Any]:
        """Plain values from which `eye_from` builds the same module."""
        ...


class CachedEye(nn.Module):
    """Features computed before, as `overt.data.features` keeps them: 14 x 14 cells of 2048.

    A cell is a row of `batch.features`, and cells run row by row over a grid of `shape`.
    """

    def __init__(self, width: int = 2048, shape: Sequence[int] = (14, 14)) -> None:
        super().__init__()
        self.width, self.shape = width, (int(shape[0]), int(shape[1]))

    def forward(self, batch: Batch) -> Cells:
        """The features as they are."""
        if batch.features is None:
            raise ValueError("this model looks at cached features, and the batch has none")
        rows, columns = self.shape
        found = tuple(batch.features.shape[1:])
        if found != (rows * columns, self.width):
            raise ValueError(
                f"features of {found[0]} cells with {found[1]} numbers each, for a model of "
                f"{rows} x {columns} cells with {self.width}"
            )
        return Cells(batch.features, grid(rows, columns, geometry=batch.sample_geometry))

    def config(self) -> dict[str, Any]:
        """The size of the features."""
        return {"kind": "cached", "width": self.width, "shape": [*self.shape]}


class TrainedEye(nn.Module):
    """A small CNN that learns with the rest of the network."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.made_with = {"channels": [*channels], "strides": [*strides]}
        self.backbone = Backbone(channels, strides)
        self.width = self.backbone.channels

    def forward(self, batch: Batch) -> Cells:
        """Each image once, however many questions are asked about it."""
        return see_cells(self.backbone, batch)

    def config(self) -> dict[str, Any]:
        """The channels and strides of the blocks."""
        return {"kind": "trained", **{name: [*many] for name, many in self.made_with.items()}}


class PlacedEye(nn.Module):
    """Another eye, whose cells also say where they stand: (y, x) from -1 to 1 (SAN with positions).

    A mask removes the place of a cell with the rest of it.
    """

    def __init__(self, eye: Eye) -> None:
        super().__init__()
        self.eye = eye
        self.width = eye.width + 2

    def forward(self, batch: Batch) -> Cells:
        """The cells of the other eye, with two numbers more."""
        cells = self.eye(batch)
        places = coordinates(cells.layout, cells.values)
        return Cells(torch.cat([cells.values, places], dim=-1), cells.layout)

    def config(self) -> dict[str, Any]:
        """The values of the other eye."""
        return {"kind": "placed", "eye": self.eye.config()}


class StridedCNN(nn.Module):
    """Five layers of stride 2, so that a cell is 32 x 32 pixels (section 4.7).

    64 filters of 7 x 7, then 256, 256, 512 and 512 of 3 x 3, all times `wide`. The paper names no
    batch norm; one follows each layer here, for a start from scratch.
    """

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
        """Features of whole images; bytes are brought to about [-1.6, 2.1] first."""
        pixels = images.to(next(self.parameters()).dtype)
        return self.blocks(pixels if images.is_floating_point() else (pixels - 110) / 70)


class StridedEye(nn.Module):
    """The eye of simple-HAN, and of simple-SAN: `StackedAttention(sizes, StridedEye())`."""

    def __init__(self, wide: float = 1.0) -> None:
        super().__init__()
        self.wide = wide
        self.backbone = StridedCNN(wide)
        self.width = self.backbone.channels

    def forward(self, batch: Batch) -> Cells:
        """Each image once, however many questions are asked about it."""
        return see_cells(self.backbone, batch)

    def config(self) -> dict[str, Any]:
        """How wide it is, as a factor on every layer."""
        return {"kind": "strided", "wide": self.wide}


def norm_a_cell(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k d"]:
    """Each cell divided by its own L2 norm."""
    return nn.functional.normalize(cells, dim=-1)


def norm_an_image(cells: Float[Tensor, "b k d"]) -> Float[Tensor, "b k d"]:
    """All cells of an image divided by the L2 norm of the whole."""
    return nn.functional.normalize(cells.flatten(1), dim=-1).view_as(cells)


NORMS: dict[str, Norm] = {"cell": norm_a_cell, "image": norm_an_image}


class NormedEye(nn.Module):
    """Another eye, whose cells are divided by a norm.

    The paper divides "images by their norm". We take the norm of each cell, as Kazemi and Elqursh
    do; `norm_an_image` is the other reading, under which cells keep their sizes beside each other.
    """

    def __init__(self, eye: Eye, norm: Norm = norm_a_cell) -> None:
        super().__init__()
        self.eye, self.norm, self.width = eye, norm, eye.width

    def forward(self, batch: Batch) -> Cells:
        """The cells of the other eye, divided."""
        cells = self.eye(batch)
        return replace(cells, values=self.norm(cells.values))

    def config(self) -> dict[str, Any]:
        """The values of the other eye, and the norm."""
        for name, norm in NORMS.items():
            if norm is self.norm:
                return {"kind": "normed", "norm": name, "eye": self.eye.config()}
        raise BadInput(f"an eye that divides by {self.norm!r} cannot be saved: use overt's norms")


def eye_from(config: Mapping[str, Any]) -> Eye:
    """The eye that a saved model was made with."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "cached":
            return CachedEye(**sizes)
        case "trained":
            return TrainedEye(**sizes)
        case "placed":
            return PlacedEye(eye_from(config["eye"]))
        case "strided":
            return StridedEye(**sizes)
        case "normed":
            return NormedEye(eye_from(config["eye"]), NORMS[config["norm"]])
        case other:
            known = "cached, trained, placed, strided, normed"
            raise BadInput(f"an eye of kind {other!r} is not one of {known}")
