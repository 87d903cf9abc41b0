"""A network that answers by one cell of sixteen, and its images."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from overt import PixelGeometry, grid
from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.inspect.measure import without_attention

CELL = 5


class Corner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 1, 2, 2, bias=False)
        nn.init.constant_(self.cells.weight, 0.002)

    def forward(self, images: Tensor) -> Tensor:
        cells = self.cells(images.float()).flatten(1)
        return torch.stack([cells[:, CELL], 0.5 * torch.ones(len(images))], dim=1)


def model() -> nn.Module:
    return without_attention(Corner(), lambda net, batch: net(batch.with_own_images().images))


class Squares:
    name, split = "squares", "test"

    def __len__(self) -> int:
        return 8

    def batch(self, indices: Sequence[int]) -> Batch:
        geometry = PixelGeometry.identity(len(indices), (8, 8))
        images = [np.random.default_rng(at).integers(100, 255, (3, 8, 8)) for at in indices]
        cells = torch.zeros(len(indices), 16)
        cells[:, CELL] = 1
        return Batch(
            tuple(f"square-{at}" for at in indices),
            images=torch.from_numpy(np.stack(images)).to(torch.uint8),
            geometry=geometry,
            target=AttentionMap.from_cells(cells, grid(4, 4, geometry=geometry)).normalize(),
        )

    def digest(self) -> str:
        return "squares 1"


def data() -> Squares:
    return Squares()


def nothing() -> None:
    return None
