"""CIDEr-D of captions that lie on a card: every n-gram beside every one of the references.

The same numbers as `Consensus`, to 1e-9, made of comparisons of whole tensors: no caption leaves
the card and nothing in it is waited for, so that a self-critical step can be recorded with its
reward. Where `Consensus` sorts and searches, this compares each token of a caption with each token
of its references; captions are short, and a card does that in some hundred small kernels.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from overt.measure.captions.cider import ORDER, SCALE, SIGMA, Consensus, Frequencies, Ids

ABSENT, NOTHING = -1, -2  # what stands after a reference and after a caption: alike to no token

Same = Bool[Tensor, "r m _ _"]  # of the n-grams of a caption and those of a text beside it


class Beside(nn.Module):
    """CIDEr-D against the references of all images, which are buffers: `.to(device)` moves them.

    `references` and `frequencies` are those of `Consensus`. Call it with tokens, a mask of those
    that are there, which stand first, and the number of the image of each caption.
    """

    references: Int[Tensor, "t j"]
    lengths: Int[Tensor, " t"]
    norms: Float[Tensor, "n t"]
    texts: Int[Tensor, "a m"]
    many: Float[Tensor, " a"]
    rare: Float[Tensor, " g"]

    def __init__(
        self, references: Sequence[Sequence[Ids]], frequencies: Frequencies | None = None
    ) -> None:
        super().__init__()
        known = Consensus(references, frequencies)
        texts = [np.asarray(text, np.int64) for text in chain.from_iterable(references)]
        rows = np.full((len(texts), max(map(len, texts))), ABSENT, np.int64)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        most = np.arange(known.per_image.max())
        place = known.first[:, None] + np.minimum(most, known.per_image[:, None] - 1)
        self._keep("references", rows)
        self._keep("lengths", known.lengths)
        self._keep("norms", np.stack(known.norms))
        self._keep("texts", np.where(most < known.per_image[:, None], place, ABSENT))
        self._keep("many", known.per_image.astype(np.float64))
        # the n-grams of all lengths in one table, each length numbered on from the one before; at
        # the end what nobody ever said
        offsets = np.cumsum([0, *(len(one.keys) for one in known.frequencies.tables)])
        self.offsets = [int(one) for one in offsets]
        for n, table in enumerate(known.frequencies.tables):
            self._keep(f"keys{n}", table.keys.astype(np.int64))
            self._keep(f"numbers{n}", table.numbers)
        rare = [one[:-1] for one in known.rare]
        self._keep("rare", np.concatenate([*rare, known.rare[0][-1:]]))

    def _keep(self, name: str, values: np.ndarray) -> None:
        self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values)))

    def __len__(self) -> int:
        return len(self.texts)

    @torch.no_grad()
    def forward(
        self, tokens: Int[Tensor, "r i"], mask: Bool[Tensor, "r i"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, " r"]:
        """The score of every caption, 0 to 10."""
        said = torch.where(mask, tokens, NOTHING)
        texts = self.texts[images]
        there = texts != ABSENT
        beside = self.references[texts]
        rare = self._rare(said, mask)
        own = said[:, None, :, None] == said[:, None, None, :]
        own = own & mask[:, None, None, :]
        cross = said[:, None, :, None] == beside[:, :, None, :]
        total = torch.zeros_like(texts, dtype=torch.float64)
        for n, (ours, theirs) in enumerate(zip(_longer(own), _longer(cross), strict=True)):
            weight = rare[n]
            count = ours[:, 0].sum(dim=-1, dtype=torch.float64)
            held = theirs.sum(dim=-1, dtype=torch.float64)
            length = (count * weight.square()).sum(dim=-1).sqrt()
            # an n-gram stands at as many places as it is counted: each has its share
            both = torch.minimum(count[:, None], held) * held / count.clamp_min(1)[:, None]
            dots = (both * weight.square()[:, None]).sum(dim=-1)
            norm = length[:, None] * self.norms[n][texts]
            total += torch.where(norm > 0, dots / norm, 0)
        # counted in bigrams, as published
        apart = (mask.sum(dim=-1) - 1).clamp_min(0)[:, None] - self.lengths[texts]
        total = torch.where(there, total * (-apart.double().square() / (2 * SIGMA**2)).exp(), 0)
        return SCALE / ORDER * total.sum(dim=-1) / self.many[images]

    def _rare(self, said: Int[Tensor, "r i"], mask: Bool[Tensor, "r i"]) -> list[Tensor]:
        """How rare the n-gram is that begins at each place, 0 where none does, for n = 1 to 4."""
        found, before, alone = [], said, said
        for n in range(ORDER):
            width = max(0, said.shape[1] - n)
            keys = said
            if n:
                keys = (before[:, :width] << 32) | alone[:, n:]
                keys = torch.where((before[:, :width] < 0) | (alone[:, n:] < 0), NOTHING, keys)
            numbers = self._numbers(n, keys)
            at = torch.where(numbers < 0, self.offsets[-1], numbers + self.offsets[n])
            found.append(torch.where(mask[:, n:], self.rare[at], 0))
            before = numbers
            alone = numbers if not n else alone
        return found

    def _numbers(self, n: int, keys: Int[Tensor, "r i"]) -> Int[Tensor, "r i"]:
        known = getattr(self, f"keys{n}")
        if not len(known):
            return torch.full_like(keys, NOTHING)
        at = torch.searchsorted(known, keys).clamp_max(len(known) - 1)
        return torch.where(known[at] == keys, getattr(self, f"numbers{n}")[at], NOTHING)


def _longer(same: Same) -> list[Same]:
    """Where n-grams are the same, for n = 1 to 4, from where tokens are."""
    found = [same]
    i, j = same.shape[-2:]
    for n in range(1, ORDER):
        before, last = found[-1], same[..., n:, n:]
        high, wide = max(0, i - n), max(0, j - n)
        found.append(before[..., :high, :wide] & last)
    return found


def in_one(lots: Sequence[Tensor]) -> Tensor:
    """Rows of several lots under each other, as wide as the widest; what is missing is zero."""
    width = max(one.shape[1] for one in lots)
    return torch.cat([pad(one, (0, width - one.shape[1])) for one in lots])
