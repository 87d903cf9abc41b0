"""A captioner asked for one word at a time, so that it can have a scorecard as classifiers have.

A caption has no one answer and no one map. A word of it has both, given the words before it: which
word comes is a class, and the row of attention it is written from is a map. So a sample is one word
of a caption that people wrote, in its place, of a picture of the test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt.attention import POINT, AttentionMap, words
from overt.data.batch import Batch
from overt.data.scenes.captions import CaptionScenes
from overt.measure.drawing import seed_of
from overt.models.captioning.captioner import Memory
from overt.models.output import Output
from overt.recipes.a2.data import Pictures
from overt.recipes.a2.networks import AlignedCaptioner, Net, plain_of


@dataclass(frozen=True, eq=False)
class NextWords:
    """Pictures, of each one word of one of its captions, to be told from the words before it.

    Where it is known which regions words speak of, the word is one that speaks of some: `target`
    says of which. Which word it is, is drawn by the name of the picture. `labels` are words.
    """

    pictures: Pictures
    truth: CaptionScenes | None = None

    @property
    def name(self) -> str:
        """That of the pictures."""
        return self.pictures.name

    @property
    def split(self) -> str:
        """That of the pictures."""
        return self.pictures.split

    def __len__(self) -> int:
        return len(self.pictures)

    def digest(self) -> str:
        """The hash of the data set behind it."""
        return self.pictures.digest()

    def batch(self, indices: Sequence[int]) -> Batch:
        """One sample a picture: the words before, and the word to come as its label."""
        whole = self.pictures.batch(indices)
        known = None if self.truth is None else self.truth.batch(indices).target
        assert whole.tokens is not None and whole.token_mask is not None
        rows, places = self._drawn(whole, known, indices)
        device = whole.tokens.device
        at, place = torch.tensor(rows, device=device), torch.tensor(places, device=device)
        seen = torch.arange(whole.tokens.shape[1], device=device) < place[:, None]
        target = None if known is None else _row(known, at.cpu(), place.cpu()).to(device)
        chosen = replace(whole.select(at), references=None, target=target)
        return replace(
            chosen,
            tokens=whole.tokens[at].where(seen, 0),
            token_mask=seen,
            labels=whole.tokens[at, place],
        )

    def _drawn(
        self, whole: Batch, known: AttentionMap | None, indices: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The row of a caption and the place of a word in it, for every picture."""
        assert whole.token_mask is not None
        lengths = whole.token_mask.sum(dim=1).tolist()
        speaks = None if known is None else known.rows.tolist()
        of = whole.image_index.tolist()
        rows, places = [], []
        for number, index in enumerate(indices):
            found = [
                (row, place)
                for row, picture in enumerate(of)
                if picture == number
                for place in range(1, lengths[row] - 1)
                if speaks is None or speaks[row][place]
            ]
            found = found or [(of.index(number), 1)]
            row, place = found[seed_of("word", self.pictures.ids[int(index)]) % len(found)]
            rows.append(row)
            places.append(place)
        return rows, places


def _row(target: AttentionMap, rows: Int[Tensor, " n"], places: Int[Tensor, " n"]) -> AttentionMap:
    """The truth of one word of each of these captions."""
    chosen = target.select(rows)
    each = torch.arange(len(rows))
    values = chosen.values[each, :, :, places][:, :, :, None]
    return replace(chosen, values=values, queries=POINT, mask=chosen.visible[each, places][:, None])


@dataclass(frozen=True, eq=False)
class Begun:
    """Pictures as a decoder sees them, and the words of a caption of each as far as it goes."""

    memory: Memory
    tokens: Int[Tensor, "b n"]
    last: Int[Tensor, " b"]


class NextWord(nn.Module):
    """A captioner as a classifier: which word comes, with the map of the row it is written from.

    Parts are removed by hiding regions from all words, as `Captioner.start` does.
    """

    def __init__(self, captioner: Net) -> None:
        super().__init__()
        self.captioner = captioner

    def encode(self, batch: Batch) -> Begun:
        """The pictures, and what is said so far."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("a word is told from the words before it: the batch has no tokens")
        last = batch.token_mask.sum(dim=1) - 1
        return Begun(plain_of(self.captioner).encode(batch), batch.tokens, last)

    def decide(self, features: Begun, mask: Mapping[str, Tensor] | None = None) -> Output:
        """The next word of every sample, and where it was looked for."""
        model, begun = self.captioner, features
        memory = begun.memory.without(mask)
        if isinstance(model, AlignedCaptioner):
            with model.aligned() as seen:
                told = plain_of(self.captioner).write(memory, begun.tokens)
            looked = seen.after((words(begun.tokens.shape[1]), memory.layout))
        else:
            told = plain_of(self.captioner).write(memory, begun.tokens)
            looked = told.attention
        each = torch.arange(len(begun.tokens), device=begun.tokens.device)
        values = looked.values[each, :, :, begun.last][:, :, :, None]
        hidden = looked.visible[each, begun.last][:, None]
        one = replace(looked, values=values, queries=POINT, mask=hidden)
        return Output(told.logits[each, begun.last], (one,))

    def forward(self, batch: Batch) -> Output:
        """What comes next."""
        return self.decide(self.encode(batch))
