"""What can be removed from a sample: the positions of one span, and which of them are there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.capture.positions.tokens import words_of
from overt.geometry import TextGeometry


@dataclass(frozen=True, eq=False)
class Places:
    """The k positions of a span in b samples: (rows, columns) of a grid, or (words,)."""

    shape: tuple[int, ...]
    present: Bool[Tensor, "b k"]
    text: TextGeometry | None = None

    @staticmethod
    def under(attention: AttentionMap, name: str) -> "Places":
        """The places of the span called `name`: those that some query of the map may see."""
        span = attention.keys.find(name)
        visible = attention.visible.any(dim=1)
        if isinstance(span.index, slice):
            present = visible[:, span.index]
        else:
            at = span.index.to(visible.device)
            present = visible.gather(1, at.clamp_min(0)) & (at >= 0)
        geometry = span.geometry if isinstance(span.geometry, TextGeometry) else None
        return Places(span.shape, present.cpu(), geometry)

    def __len__(self) -> int:
        return len(self.present)


Units = Callable[[Places], Int[Tensor, "b k"]]


def each_place(places: Places) -> Int[Tensor, "b k"]:
    """Every position that is there by itself: the number of each, -1 for padding."""
    number = places.present.cumsum(dim=1) - 1
    return torch.where(places.present, number, -1)


def whole_words(places: Places) -> Int[Tensor, "b k"]:
    """Pieces between the same two blanks together: a word comes and goes as a whole."""
    if places.text is None:
        raise ValueError(
            "nothing says which characters these positions cover, so words cannot be told; remove "
            "them one by one (each_place), or give the model a layout with a text geometry"
        )
    words = torch.where(places.present, words_of(places.text).cpu(), -1)
    found = torch.full_like(words, -1)
    for row, one in enumerate(words):  # a word that was cut off leaves no gap in the numbers
        there = one >= 0
        found[row, there] = one[there].unique(return_inverse=True)[1]
    return found
