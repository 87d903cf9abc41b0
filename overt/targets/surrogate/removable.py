"""Positions of a span that masks can remove from a sample."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.capture.layouts.text_tokens import word_numbers
from overt.geometry import TextGeometry


@dataclass(frozen=True, eq=False)
class RemovablePositions:
    """The k positions of a span in b samples.

    Args:
        shape: (rows, columns) of a grid, or (words,).
        present: Which positions are not padding.
        text: The characters of the positions, if known.
    """

    shape: tuple[int, ...]
    present: Bool[Tensor, "b k"]
    text: TextGeometry | None = None

    @staticmethod
    def of_span(attention: AttentionMap, name: str) -> "RemovablePositions":
        """Return the positions of the span called `name` that a query of the map may attend to."""
        span = attention.keys.find(name)
        visible = attention.visible.any(dim=1)
        if isinstance(span.index, slice):
            present = visible[:, span.index]
        else:
            at = span.index.to(visible.device)
            present = visible.gather(1, at.clamp_min(0)) & (at >= 0)
        geometry = span.geometry if isinstance(span.geometry, TextGeometry) else None
        return RemovablePositions(span.shape, present.cpu(), geometry)

    def __len__(self) -> int:
        return len(self.present)


Units = Callable[[RemovablePositions], Int[Tensor, "b k"]]


def each_position(positions: RemovablePositions) -> Int[Tensor, "b k"]:
    """Number the positions that are present one by one; -1 for padding.

    Args:
        positions: The positions of a span that can be removed.

    Returns:
        The number of the unit of each position; -1 for padding.

    Example:
        >>> present = torch.tensor([[True, True, False]])
        >>> each_position(RemovablePositions((3,), present))
        tensor([[ 0,  1, -1]])
    """
    number = positions.present.cumsum(dim=1) - 1
    return torch.where(positions.present, number, -1)


def whole_words(positions: RemovablePositions) -> Int[Tensor, "b k"]:
    """Number the words; pieces between the same two blanks have the same number, -1 is padding.

    Args:
        positions: The positions of a span that can be removed, with their characters.

    Returns:
        The number of the word of each position; -1 for padding.

    Raises:
        ValueError: The characters of the positions are unknown.

    Example:
        >>> text = TextGeometry(("red ball",), torch.tensor([[[0, 2], [2, 3], [4, 8]]]))
        >>> present = torch.tensor([[True, True, True]])
        >>> whole_words(RemovablePositions((3,), present, text))
        tensor([[0, 0, 1]])
    """
    if positions.text is None:
        raise ValueError(
            "whole words need the characters of the positions; use each_position, or a model whose "
            "layout has a text geometry"
        )
    words = torch.where(positions.present, word_numbers(positions.text).cpu(), -1)
    found = torch.full_like(words, -1)
    for row, one in enumerate(words):  # numbers are consecutive, also if a word was truncated
        there = one >= 0
        found[row, there] = one[there].unique(return_inverse=True)[1]
    return found
