"""Toy datasets of images and texts in which the deciding cell or word is known."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.testing import toy_batch

CELL, WORD = 5, 3


class Pictures:
    """Images of 4 x 4 cells of two pixels a side; the ground truth is the deciding cell.

    With `double`, two neighbouring samples share their image. `side` is that of the truth grid.
    """

    name, split = "pictures", "test"

    def __init__(self, count: int = 24, double: bool = False, side: int = 4) -> None:
        self.count, self.double, self.side = count, double, side
        generator = torch.Generator().manual_seed(1)
        cells = torch.randn(count, 3, 4, 4, generator=generator)
        self.images = cells.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = list(indices)
        shown = [row - row % 2 if self.double else row for row in rows]
        where = PixelGeometry.identity(len(rows), (8, 8))
        deciding = torch.zeros(len(rows), self.side, self.side)
        step = self.side // 4
        deciding[:, step : 2 * step, step : 2 * step] = 1  # cell 5 of a grid of 4 x 4
        target = AttentionMap.from_cells(
            deciding.flatten(1), grid(self.side, self.side, geometry=where)
        )
        return Batch(
            ids=tuple(f"picture-{row:05d}" for row in rows),
            images=self.images[shown],
            geometry=where,
            labels=torch.tensor([row % 2 for row in rows]),
            target=target.normalize(),
        )

    def digest(self) -> str:
        about = f"{self.count} {self.double} {self.side}"
        return hashlib.sha256(about.encode()).hexdigest()


class Texts:
    """Texts of four to six words with one deciding word; padded to the longest in the batch."""

    name, split = "texts", "test"

    def __init__(self, count: int = 24) -> None:
        whole = toy_batch(count)
        tokens = torch.where(whole.token_mask & (whole.tokens == WORD), WORD + 1, whole.tokens)
        lengths = whole.token_mask.sum(dim=-1)
        generator = torch.Generator().manual_seed(4)
        place = (torch.rand(count, generator=generator) * lengths).long()
        self.whole = replace(
            whole,
            tokens=tokens.scatter(1, place[:, None], WORD),
            images=None,
            image_of=None,
            geometry=None,
        )
        self.place = place

    def __len__(self) -> int:
        return len(self.whole)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor(list(indices))
        found = self.whole.select(rows)
        assert found.tokens is not None and found.token_mask is not None and found.text is not None
        width = int(found.token_mask.sum(dim=-1).max())
        text = replace(found.text, spans=found.text.spans[:, :width])
        marked = torch.nn.functional.one_hot(self.place[rows], found.tokens.shape[1]).float()
        return replace(
            found,
            tokens=found.tokens[:, :width],
            token_mask=found.token_mask[:, :width],
            text=text,
            target=AttentionMap.from_cells(
                marked[:, :width], words(width, geometry=text), found.token_mask[:, :width]
            ).normalize(),
        )

    def digest(self) -> str:
        return f"texts {len(self)}"


def partly_true_map(share: float, source: Pictures):
    """Return a map function: the deciding cell for `share` of the samples, noise for the rest."""

    def look(batch: Batch) -> AttentionMap:
        assert batch.target is not None
        numbers = [int(name.split("-")[1]) for name in batch.ids]
        rows = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            noise = 0.05 * torch.rand(16, generator=generator)
            noise[CELL] += float(number % 10 < 10 * share)
            rows.append(noise)
        layout = grid(4, 4, geometry=batch.geometry)
        return AttentionMap.from_cells(torch.stack(rows), layout).normalize()

    return look


def small_bert() -> Any:
    """Return a wrapped BERT of `transformers` with fixed random weights."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from overt.nn import wrap

    config = transformers.BertConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    return wrap(transformers.BertForSequenceClassification(config).eval())
