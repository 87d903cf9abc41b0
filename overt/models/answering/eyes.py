"""Where the cells of a question-answering network come from: cached features, or its own CNN."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from overt.attention import grid
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.cnn import Backbone, Cells, coordinates, see_cells


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
        case "strided" | "normed":
            from overt.models.answering import sight  # which is built on this file

            if config["kind"] == "strided":
                return sight.StridedEye(**sizes)
            return sight.NormedEye(eye_from(config["eye"]), sight.NORMS[config["norm"]])
        case other:
            known = "cached, trained, placed, strided, normed"
            raise BadInput(f"an eye of kind {other!r} is not one of {known}")
