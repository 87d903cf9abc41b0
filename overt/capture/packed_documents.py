"""Packed documents: several texts in one row, which do not attend to each other.

transformers separates them by a mask if the positions start again and there is no cache.
Flash-attention separates them in its kernel, also with a cache or by lengths that are given as
keywords. The attention that replaces it in a `watch` block has to do the same.
"""

import threading
import weakref
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Layout, Span

Mask = Bool[Tensor, "#b #h q k"] | Float[Tensor, "#b #h q k"]


def document_layout(position_ids: Tensor) -> Layout:
    """Return the layout of packed documents: a span "document 0", "document 1", ... for each.

    Args:
        position_ids: The positions of the tokens, (b, n). A document starts where they do not
            increase by one.

    Returns:
        The layout. If the rows are packed differently, spans have positions per sample, -1 where a
        sample has none.

    Raises:
        ValueError: If `position_ids` does not have two axes.

    Example:
        >>> layout = document_layout(torch.tensor([[0, 1, 2, 0, 1]]))
        >>> layout
        Layout(5: document 0 3, document 1 2)
        >>> layout.find("document 1").index
        slice(3, 5, None)
    """
    if position_ids.ndim != 2:
        raise ValueError(f"expected position_ids (b, n), got {tuple(position_ids.shape)}")
    rows = [_runs(row) for row in position_ids.tolist()]
    spans = []
    for at in range(max(map(len, rows), default=0)):
        runs = [row[at] if at < len(row) else (0, 0) for row in rows]
        size = max(stop - start for start, stop in runs)
        if len(set(runs)) == 1:
            index: slice | Tensor = slice(*runs[0])
        else:
            index = torch.full((len(runs), size), -1)
            for sample, (start, stop) in enumerate(runs):
                index[sample, : stop - start] = torch.arange(start, stop)
        spans.append(Span(f"document {at}", (size,), index))
    return Layout(tuple(spans), position_ids.shape[1])


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    """Return start and stop of each run in which positions increase by one."""
    n = len(positions)
    starts = [at for at in range(n) if at == 0 or positions[at] != positions[at - 1] + 1]
    return list(zip(starts, [*starts[1:], n], strict=True))


def mask_by_lengths(
    query_ends: Int[Tensor, " n"],
    key_ends: Int[Tensor, " n"],
    rows: tuple[int, int],
    mask: Mask | None,
    causal: bool,
) -> Mask:
    """Return a mask that separates documents of given cumulative lengths (`cu_seq_lens`).

    Args:
        query_ends: Zero and the end of each document, counted over all rows of the batch.
        key_ends: The same for the keys.
        rows: Number of rows, and of tokens in each.
        mask: The mask without documents, if any.
        causal: Whether queries see no later keys.
    """

    def make() -> Tensor:
        b, n = rows
        at = torch.arange(b * n, device=query_ends.device).view(b, n)
        found = [torch.bucketize(at, ends[1:], right=True) for ends in (query_ends, key_ends)]
        return found[0][:, None, :, None] == found[1][:, None, None]

    return _LAST.find_or_make(query_ends, mask, (*rows, causal), make)


def mask_by_positions(position_ids: Int[Tensor, "1 n"], mask: Mask | None, causal: bool) -> Mask:
    """Return a mask that separates documents as flash-attention does: each starts at position 0.

    Args:
        position_ids: The positions of the tokens of one row.
        mask: The mask without documents, if any.
        causal: Whether queries see no later keys.
    """

    def make() -> Tensor:
        document = (position_ids == 0).cumsum(dim=-1)
        return document[:, None, :, None] == document[:, None, None]

    return _LAST.find_or_make(position_ids, mask, (causal,), make)


def is_packed(position_ids: object, b: int, n: int) -> bool:
    """Return whether flash-attention takes one row of positions for packed documents.

    Inside a compiled graph the values are not known: True, the mask is right for one document too.
    """
    if not isinstance(position_ids, Tensor) or b != 1 or n < 2 or position_ids.shape != (1, n):
        return False
    if torch.compiler.is_compiling():
        return True
    return _LAST.knows(position_ids) or bool((position_ids.diff() != 1).any())


def _separate(same: Bool[Tensor, "b 1 q k"], mask: Mask | None, causal: bool) -> Mask:
    """Combine the documents with the mask of the model."""
    if mask is None:
        return same.tril() if causal else same
    boolean = mask.dtype == torch.bool
    own = mask.diagonal(dim1=-2, dim2=-1)
    # Flash-attention removes padding instead, if there is any, and separates nothing.
    padded = ~(own if boolean else own > torch.finfo(mask.dtype).min / 2).all()
    allowed = same.to(mask.device) | padded
    if boolean:
        return mask & allowed
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


class _LastMask(threading.local):
    """The last mask, which all layers of a forward pass share.

    Weak references, so that it lives as long as the records of the calls.
    """

    def __init__(self) -> None:
        self._given: tuple[object, ...] = ()
        self._made: weakref.ref[Tensor] | None = None

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the last mask was made from this tensor."""
        return self._made is not None and self._made() is not None and self._is_given(tensor)

    def _is_given(self, tensor: Tensor) -> bool:
        ref = self._given[0] if self._given else None
        return (
            isinstance(ref, weakref.ref)
            and ref() is tensor
            and not tensor.is_inference()
            and self._given[1] == tensor._version
        )

    def find_or_make(
        self,
        tensor: Tensor,
        mask: Tensor | None,
        others: tuple[object, ...],
        make: Callable[[], Tensor],
    ) -> Tensor:
        """Return the mask made from the same inputs, or make it from `make()` and `mask`."""
        causal = bool(others[-1])
        # Inference tensors have no version, so a change in place would not be seen.
        if torch.compiler.is_compiling() or tensor.is_inference():
            return _separate(make(), mask, causal)
        if self.knows(tensor) and self._made is not None and self._given[3:] == others:
            of = self._given[2]
            if mask is None if of is None else isinstance(of, weakref.ref) and of() is mask:
                made = self._made()
                if made is not None:
                    return made
        made = _separate(make(), mask, causal)
        of = None if mask is None else weakref.ref(mask)
        self._given = (weakref.ref(tensor), tensor._version, of, *others)
        self._made = weakref.ref(made)
        return made


_LAST = _LastMask()
