"""Text and characters of token ids that came without a text, such as generated ones."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.geometry import TextGeometry


def decode_geometry(
    tokenizer: Any, ids: Int[Tensor, "b n"], there: Bool[Tensor, "b n"] | None = None
) -> TextGeometry:
    """Return the decoded text of each row, with the characters of each token.

    Special tokens are part of the text. Tokens that together are one character share it.

    Args:
        tokenizer: A Hugging Face tokenizer, or a processor that has one.
        ids: The token ids.
        there: Tokens that are not padding; all by default.

    Returns:
        The texts and characters; (-1, -1) for padding.

    Example:
        >>> class Letters:
        ...     def decode(self, ids, **_): return "".join(" abc"[n] for n in ids)
        >>> decode_geometry(Letters(), torch.tensor([[1, 2, 0, 3]])).tokens(0)
        ['a', 'b', ' ', 'c']
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    spans = torch.full((*ids.shape, 2), -1)
    texts = []
    for row, numbers in enumerate(ids.tolist()):
        at = [n for n in range(len(numbers)) if there is None or bool(there[row, n])]
        text, found = _decode_row(tokenizer, [numbers[n] for n in at])
        texts.append(text)
        if at:
            spans[row, torch.tensor(at)] = torch.tensor(found)
    return TextGeometry(tuple(texts), spans)


def _decode_row(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of one row and the characters of each token."""
    text = ""
    spans: list[tuple[int, int]] = []
    first = 0  # decoded together with its successors, which may depend on it (a leading space)
    while len(spans) < len(ids):
        done = len(spans)
        before = _decode(tokenizer, ids[first:done])
        # a token may be a part of a character: decode more until it is complete
        for end in range(done + 1, len(ids) + 1):
            both = _decode(tokenizer, ids[first:end])
            if not both.endswith("\N{REPLACEMENT CHARACTER}"):
                break
        piece = both[len(before) :]
        inner = piece.strip() or piece
        start = len(text) + piece.index(inner)
        spans += [(start, start + len(inner))] * (end - done)
        text += piece
        first = done
    return text, spans


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    # if spaces were cleaned up, "do n" would lose a letter with the next token, "'t"
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""
