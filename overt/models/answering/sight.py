"""More eyes: the small network of simple-HAN and simple-SAN, and cells divided by their norm.

Malinowski et al. 2018, https://arxiv.org/abs/1808.00300, sections 4.5 and 4.7.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.answering.eyes import Eye
from overt.models.cnn import Cells, see_cells

Norm = Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b k d"]]


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
