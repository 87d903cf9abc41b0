"""Toy models with a known best mask, and toy data, for surrogate searches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.nn.output import Output
from overt.targets.surrogate.removable import RemovablePositions


@dataclass(frozen=True)
class MaskRequest:
    """Ids and removable positions of a batch, without a model."""

    ids: tuple[str, ...]
    positions: Mapping[str, RemovablePositions]


def image_request(count: int, shape: tuple[int, int] = (8, 8)) -> MaskRequest:
    names = tuple(f"sample-{number}" for number in range(count))
    present = torch.ones(count, shape[0] * shape[1], dtype=torch.bool)
    return MaskRequest(names, {"image": RemovablePositions(shape, present)})


def text_request(*lengths: int) -> MaskRequest:
    names = tuple(f"text-{number}" for number in range(len(lengths)))
    present = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return MaskRequest(names, {"text": RemovablePositions((max(lengths),), present)})


@dataclass(frozen=True, eq=False)
class PlantedFeatures:
    cells: Tensor
    words: Tensor
    present: Tensor


class Planted(nn.Module):
    """Model that predicts class 1 from cell `good` and against it from cell `bad`.

    Attention is the softmax of the masked cells' brightness. Each word adds its value to the score.
    """

    def __init__(self, shape: tuple[int, int] = (4, 4), good: int = 5, bad: int = 10) -> None:
        super().__init__()
        self.shape, self.good, self.bad = shape, good, bad
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.drop = nn.Dropout(0.5)
        self.encoded = 0
        self.batch_sizes: list[int] = []

    def encode(self, batch: Batch) -> PlantedFeatures:
        self.encoded += 1
        cells = batch.features[..., 0]
        tokens = torch.zeros(len(batch), 1) if batch.tokens is None else batch.tokens.float()
        there = torch.ones_like(tokens, dtype=torch.bool)
        return PlantedFeatures(
            cells, tokens, there if batch.token_mask is None else batch.token_mask
        )

    def decide(self, features: PlantedFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        mask = mask or {}
        self.batch_sizes.append(len(features.cells))
        cells = features.cells * mask.get("image", 1)
        tokens = features.words * mask.get("text", 1) * features.present
        score = self.weight * (cells[:, self.good] - cells[:, self.bad]) + tokens.sum(dim=1)
        prediction = self.drop(torch.stack([torch.zeros_like(score), score], dim=1))
        over_cells = AttentionMap.from_scores(
            torch.stack([cells, 2 * cells], dim=1)[:, None, :, None], grid(*self.shape)
        )
        over_words = AttentionMap.from_scores(
            tokens[:, None, None, None], words(tokens.shape[1]), mask=features.present[:, None]
        )
        return Output(prediction, (over_cells, over_words))

    def forward(self, batch: Batch) -> Output:
        return self.decide(self.encode(batch))


class PlantedMany(Planted):
    """The same model with `decide_many`, for many masks per sample at once."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[int] = []

    def decide_many(self, features: PlantedFeatures, mask: Mapping[str, Tensor]) -> Output:
        m = len(next(iter(mask.values())))
        self.samples.append(len(features.cells))
        several = PlantedFeatures(
            *(one.repeat(m, 1) for one in (features.cells, features.words, features.present))
        )
        return self.decide(several, {name: one.flatten(0, 1) for name, one in mask.items()})


class Toys:
    """Items of one or two samples with cells, words and labels derived from their ids."""

    name = "toys"

    def __init__(self, items: int = 10, split: str = "train", shape: tuple[int, int] = (4, 4)):
        self.items, self.split, self.cells = items, split, shape[0] * shape[1]

    def __len__(self) -> int:
        return self.items

    def batch(self, indices: Sequence[int]) -> Batch:
        names = [(item, part) for item in indices for part in range(item % 2 + 1)]
        rows = [self._sample(10 * item + part) for item, part in names]
        width = max(len(tokens) for _, tokens in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        there = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, (_, own) in enumerate(rows):
            tokens[row, : len(own)], there[row, : len(own)] = own, True
        return Batch(
            tuple(f"{item}.{part}" for item, part in names),
            features=torch.stack([cells for cells, _ in rows])[..., None],
            tokens=tokens,
            token_mask=there,
            labels=torch.ones(len(rows), dtype=torch.long),
        )

    def digest(self) -> str:
        return f"toys {self.items}"

    def _sample(self, seed: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, 6, (), generator=drawn))
        tokens = torch.randint(-2, 3, (length,), generator=drawn)
        return torch.rand(self.cells, generator=drawn), tokens
