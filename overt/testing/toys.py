"""Toys whose answers are known by hand, to try measures, losses and decoders on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn

from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, TextGeometry
from overt.models.cnn import Cells
from overt.models.output import Output
from overt.models.text import Words


def toy_batch(samples: int = 4, seed: int = 0) -> Batch:
    """Random images of 32 x 32 and questions of unequal length; the last two share an image."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, samples - 1)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    longest = 6
    lengths = [longest - at % 3 for at in range(samples)]
    tokens = torch.randint(1, 10, (samples, longest), generator=generator)
    present = torch.arange(longest) < torch.tensor(lengths)[:, None]
    starts = 2 * torch.arange(longest)
    spans = torch.stack([starts, starts + 1], dim=-1).expand(samples, -1, -1)
    return Batch(
        ids=tuple(f"toy-{at}" for at in range(samples)),
        images=images,
        image_of=torch.arange(samples).clamp_max(count - 1),
        geometry=PixelGeometry.identity(count, (32, 32)),
        tokens=torch.where(present, tokens, 0),
        token_mask=present,
        text=TextGeometry(
            tuple(" ".join("abcdef"[:length]) for length in lengths),
            torch.where(present[..., None], spans, -1),
        ),
        labels=torch.randint(0, 2, (samples,), generator=generator),
    )


class PlantedCell(nn.Module):
    """Answers from one cell of the image and from nothing else.

    The value v of a cell is its mean brightness, from -1 to 1. The logits are (-gain v, gain v) of
    the planted cell, so removing it leaves two equal logits and any other cell changes nothing.
    All attention is on the cell `shows`: the planted one, unless the model is to lie.
    """

    def __init__(
        self,
        shape: tuple[int, int] = (4, 4),
        cell: int = 5,
        shows: int | None = None,
        gain: float = 4.0,
    ) -> None:
        super().__init__()
        self.shape, self.cell = shape, cell
        self.shows = cell if shows is None else shows
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> Cells:
        """The brightness of every cell."""
        if batch.images is None:
            raise ValueError("a planted cell needs a batch with images")
        pixels = batch.images.to(self.gain.dtype)
        if not batch.images.is_floating_point():
            pixels = pixels / 127.5 - 1
        means = nn.functional.adaptive_avg_pool2d(pixels.mean(dim=1, keepdim=True), self.shape)
        values = rearrange(means, "i 1 y x -> i (y x) 1")[batch.image_index]
        return Cells(values, grid(*self.shape, geometry=batch.sample_geometry))

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Whether the planted cell is bright."""
        value = self.gain * features.masked(mask)[:, self.cell, 0]
        return Output(torch.stack([-value, value], dim=-1), (self._looks(features, self.shows),))

    def forward(self, batch: Batch) -> Output:
        """Whether the planted cell of each image is bright."""
        return self.decide(self.encode(batch))

    def truth(self, batch: Batch) -> AttentionMap:
        """All attention on the cell that decides."""
        return self._looks(self.encode(batch), self.cell)

    def _looks(self, features: Cells, cell: int) -> AttentionMap:
        weights = torch.zeros_like(features.values[..., 0])
        weights[:, cell] = 1
        return AttentionMap.from_cells(weights, features.layout).normalize()


class PlantedWord(nn.Module):
    """Answers whether one word is in the text, and attends to the places where it stands.

    The logits are (0, gain n - gain / 2) for n places. Without any, attention is even over the
    words there are; a text without words has none.
    """

    def __init__(self, word: int = 3, gain: float = 4.0) -> None:
        super().__init__()
        self.word = word
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> Words:
        """Which words are the planted one."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("a planted word needs a batch with tokens")
        found = (batch.tokens == self.word) & batch.token_mask
        return Words(found.to(self.gain.dtype)[..., None], batch.token_mask, batch.text)

    def decide(self, features: Words, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Whether the word is there."""
        found = features.masked(mask, torch.zeros_like(self.gain)[None])[..., 0]
        score = self.gain * (found.sum(dim=-1) - 0.5)
        even = features.present.to(found.dtype)
        places = torch.where((found > 0).any(dim=-1, keepdim=True), found, even)
        keys = words(found.shape[1], geometry=features.geometry)
        attention = AttentionMap.from_cells(places, keys, features.present).normalize()
        return Output(torch.stack([torch.zeros_like(score), score], dim=-1), (attention,))

    def forward(self, batch: Batch) -> Output:
        """Whether the word is in each text."""
        return self.decide(self.encode(batch))


@dataclass(frozen=True, eq=False)
class Copied:
    """How far a `Copier` has come: the words, and the place of the next one."""

    features: Words
    place: Int[Tensor, " b"]

    def reorder(self, rows: Int[Tensor, " n"]) -> "Copied":
        """The samples named, in their order."""
        words = self.features
        text = None if words.geometry is None else words.geometry[rows]
        kept = replace(words, values=words.values[rows], present=words.present[rows], geometry=text)
        return Copied(kept, self.place[rows])


class Copier(nn.Module):
    """A decoder that writes its input again, word by word, looking at the one it writes.

    The logits of the next word are `gain` for the word that stands there and 0 for all others. A
    text that is at its end is written from its beginning again. The word handed in does not matter,
    but to be counted.
    """

    def __init__(self, vocabulary: int = 10, gain: float = 4.0) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> Words:
        """Every word as one of many."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("a copier needs a batch with tokens")
        values = nn.functional.one_hot(batch.tokens, self.vocabulary).to(self.gain.dtype)
        return Words(values, batch.token_mask, batch.text)

    def start(self, features: Words) -> Copied:
        """Before the first word."""
        return Copied(features, torch.zeros(len(features.present), dtype=torch.long))

    def step(self, state: Copied, tokens: Int[Tensor, " b"]) -> tuple[Output, Copied]:
        """The word that stands at this place, and the next place."""
        words_, present = state.features.values, state.features.present
        at = nn.functional.one_hot(state.place % present.sum(-1), words_.shape[1])
        keys = words(words_.shape[1], geometry=state.features.geometry)
        looks = AttentionMap.from_cells(at.to(words_.dtype), keys, present).normalize()
        logits = self.gain * torch.einsum("bk,bkv->bv", at.to(words_.dtype), words_)
        return Output(logits, (looks,)), Copied(state.features, state.place + 1)
