"""An experiment of your own in one file: dataset, model, loss, metric, recipe and table.

    overt run examples/dots.py:experiment --out runs/dots
    overt table examples/dots.py:table --out runs/dots-table --jobs 2
    overt measure runs/dots --recipe examples/dots.py:experiment

A grey image has one bright dot; the class is the quadrant of the dot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from overt import AttentionMap, PixelGeometry, grid
from overt.data import Batch
from overt.experiments.builders import classification_experiment
from overt.experiments.evaluate import Evaluator
from overt.experiments.experiment import Experiment
from overt.experiments.recipe import CustomRecipe, RunContext, TrainConfig
from overt.experiments.table import RowSpec, TableSpec
from overt.losses import Loss, cross_entropy
from overt.metrics.metric import declare_metric, paired_rows
from overt.nn import ConvBackbone, ImageFeatures, Output

SIDE, CELLS = 32, (4, 4)
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")


class Dots:
    """Images with one bright dot; the cells of the dot are the target."""

    name = "dots"

    def __init__(self, split: str, count: int) -> None:
        self.split, self.count = split, count

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        return f"dots 1 {self.split} {self.count}"

    def batch(self, indices: Sequence[int]) -> Batch:
        corners = [self._corner(i) for i in indices]
        images = torch.full((len(corners), 3, SIDE, SIDE), 60, dtype=torch.uint8)
        for image, (y, x) in zip(images, corners, strict=True):
            image[:, y : y + 4, x : x + 4] = 250
        geometry = PixelGeometry.identity(len(corners), (SIDE, SIDE))
        boxes = torch.tensor([[[x, y, x + 4, y + 4]] for y, x in corners], dtype=torch.float32)
        cells = geometry.cover_boxes(boxes, CELLS)[:, 0]
        return Batch(
            ids=tuple(f"dots-{self.split}-{i}" for i in indices),
            images=images,
            geometry=geometry,
            labels=torch.tensor([2 * (y >= 16) + (x >= 16) for y, x in corners]),
            target=AttentionMap.from_cells(cells, grid(*CELLS, geometry=geometry)).normalize(),
        )

    def _corner(self, index: int) -> tuple[int, int]:
        seed = [("train", "val", "test").index(self.split), index]
        y, x = np.random.default_rng(seed).integers(0, 8, 2) * 4
        return int(y), int(x)


class Spotter(nn.Module):
    """Attend to the cells of a small CNN and classify their weighted sum."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.backbone = ConvBackbone([width, width, width], [2, 2, 2])
        self.score = nn.Linear(width, 1)
        self.place = nn.Parameter(torch.randn(CELLS[0] * CELLS[1], width) * 0.1)
        self.decision = nn.Linear(width, classes)

    def encode(self, batch: Batch) -> ImageFeatures:
        features = self.backbone(batch.images)[batch.image_index]
        layout = grid(*features.shape[-2:], geometry=batch.sample_geometry)
        return ImageFeatures(rearrange(features, "b d y x -> b (y x) d"), layout)

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        cells = features.masked(mask)
        scores = rearrange(self.score(cells), "b k 1 -> b 1 1 1 k")
        attention = AttentionMap.from_scores(scores, features.layout)
        pooled = attention.weights[:, 0, 0, 0, :, None] * (cells + self.place)
        return Output(self.decision(pooled.sum(dim=1)), (attention,))

    def forward(self, batch: Batch) -> Output:
        return self.decide(self.encode(batch))


def attention_loss(output: Output, batch: Batch, weight: float) -> dict[str, Loss]:
    """Return the loss that supervises attention; the task loss is added to it."""
    if weight == 0 or batch.target is None:
        return {}
    return {"attention": weight * cross_entropy(output.attention[0], batch.target)}


@declare_metric("distance", "cells", higher_is_better=False, low=0.0)
def distance(output: Output, batch: Batch) -> Tensor:
    """Compute the distance between the centers of attention and target."""
    assert batch.target is not None
    ours, theirs, _ = paired_rows(output.attention[0], batch.target)
    places = torch.cartesian_prod(torch.arange(CELLS[0]), torch.arange(CELLS[1])).to(ours)
    return (ours @ places - theirs @ places).norm(dim=-1)


@dataclass(frozen=True)
class DotsData:
    """Settings of the data: `limit` is the maximum number of images per split."""

    limit: int | None = None


@dataclass(frozen=True)
class DotsModel:
    """Settings of the model: `width` is a factor on its features; `supervise` weighs the loss."""

    width: float = 1.0
    supervise: float = 1.0


def make_experiment(recipe: CustomRecipe, context: RunContext) -> Experiment:
    """Turn the settings into data, model, losses and metrics."""

    def part(split: str, count: int) -> Dots:
        return Dots(split, min(count, recipe.data.limit or count))

    validation, test = (
        Evaluator(part(split, 32), QUADRANTS, metrics={"distance": distance})
        for split in ("val", "test")
    )
    return classification_experiment(
        Spotter(len(QUADRANTS), width=round(8 * recipe.model.width)),
        part("train", 64),
        validation,
        test,
        recipe.train,
        context,
        lambda output, batch: attention_loss(output, batch, recipe.model.supervise),
    )


def experiment() -> CustomRecipe:
    """Find the quadrant of a dot, with supervised attention."""
    return CustomRecipe(
        "dots",
        "find the quadrant of a dot",
        make_experiment,
        data=DotsData(),
        model=DotsModel(),
        train=TrainConfig(epochs=20, batch=16, rate=2e-2),
    )


table = TableSpec(
    "dots",
    "Does supervising attention help?",
    (
        RowSpec("plain", experiment, ("model.supervise=0",)),
        RowSpec("supervised", experiment),
    ),
    ("accuracy", "distance", "mass_inside"),
)
