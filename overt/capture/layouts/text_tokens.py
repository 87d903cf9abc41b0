"""Map tokens to the characters of their texts.

Texts are tokenized again and matched with the rows of ids, so that left or right padding,
truncation, special tokens and image tokens inserted by a processor are handled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.geometry import TextGeometry

Text = str | tuple[str, str]
MARKS = ("##", "▁", "Ġ", "Ċ", "</w>", "@@")  # word boundary marks of tokenizers


@dataclass(frozen=True, eq=False)
class TokenLocations:
    """The characters of each token.

    Attributes:
        texts: The text, or pair of texts, of each sample.
        spans: Start and stop character of each token, -1 for none.
        sequence: 0 for a text or the first of a pair, 1 for the second, -1 for others: special
            tokens, image tokens and padding.
    """

    texts: tuple[Text, ...]
    spans: Int[Tensor, "b n 2"]
    sequence: Int[Tensor, "b n"]

    def geometry(self, sequence: int = 0) -> TextGeometry:
        """Return the geometry of one text of each sample, over all tokens."""
        own = (self.sequence == sequence)[..., None]
        texts = tuple(t if isinstance(t, str) else t[sequence] for t in self.texts)
        return TextGeometry(texts, torch.where(own, self.spans, -1))


def text_geometry(
    tokenizer: Any,
    texts: Sequence[Text],
    input_ids: Int[Tensor, "b n"],
    attention_mask: Int[Tensor, "b n"] | None = None,
) -> TextGeometry:
    """Map each token to the characters of its text; (-1, -1) for special tokens and padding.

    Args:
        tokenizer: A Hugging Face tokenizer, or a processor that has one.
        texts: The tokenized texts; of pairs, the first one is used.
        input_ids: The token ids, padded on either side or truncated.
        attention_mask: 0 for padding; None if there is none.

    Returns:
        The geometry of the tokens.

    Raises:
        ValueError: If the ids of a row do not match its text.

    Example:
        >>> from transformers import BertTokenizer
        >>> names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "ring"]
        >>> tokenizer = BertTokenizer(vocab={name: at for at, name in enumerate(names)})
        >>> ids = torch.tensor(tokenizer(["a ring"])["input_ids"])
        >>> text_geometry(tokenizer, ["a ring"], ids).spans.tolist()  # [CLS] a ring [SEP]
        [[[-1, -1], [0, 1], [2, 6], [-1, -1]]]
    """
    return locate_tokens(tokenizer, texts, input_ids, attention_mask).geometry()


def locate_tokens(
    tokenizer: Any,
    texts: Sequence[Text],
    input_ids: Int[Tensor, "b n"],
    attention_mask: Int[Tensor, "b n"] | None = None,
) -> TokenLocations:
    """Locate the tokens of `input_ids` in their texts.

    A row may be padded on either side, truncated, and contain other tokens, such as image tokens;
    the remaining ids must be those of the text.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if isinstance(texts, str):
        raise TypeError(f"texts must be a list with one text per sample: [{texts[:40]!r}]")
    if len(texts) != len(input_ids):
        raise ValueError(f"got {len(texts)} texts and {len(input_ids)} rows of input_ids")
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    spans = torch.full((*input_ids.shape, 2), -1, dtype=torch.long)
    sequence = torch.full(input_ids.shape, -1, dtype=torch.long)
    for row, text in enumerate(texts):
        places = real[row].nonzero()[:, 0].tolist()
        found = [int(input_ids[row, at]) for at in places]
        for at, (start, stop, which) in _match(tokenizer, text, found):
            spans[row, places[at]] = torch.tensor(
                _strip_whitespace(_text_of_pair(text, which), start, stop)
            )
            sequence[row, places[at]] = which
    return TokenLocations(tuple(texts), spans, sequence)


def word_numbers(geometry: TextGeometry) -> Int[Tensor, "b n"]:
    """Return the index of each token's whitespace-separated word; -1 for none."""
    found = torch.full(geometry.spans.shape[:2], -1, dtype=torch.long)
    for row, text in enumerate(geometry.texts):
        word, number = [], -1
        for at, letter in enumerate(text):
            if not letter.isspace() and (at == 0 or text[at - 1].isspace()):
                number += 1
            word.append(-1 if letter.isspace() else number)
        for token, (start, stop) in enumerate(geometry.spans[row].tolist()):
            if 0 <= start < stop:
                found[row, token] = word[start]
    return found.to(geometry.spans.device)


def special_token_mask(tokenizer: Any, input_ids: Int[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Return which tokens are special tokens; the token of unknown words is not."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    known = torch.tensor(sorted(_special_ids(tokenizer)), dtype=torch.long)
    return torch.isin(input_ids.cpu(), known).to(input_ids.device)


_Place = tuple[int, int, int]  # start, stop, which text of a pair


def _match(tokenizer: Any, text: Text, found: list[int]) -> list[tuple[int, _Place]]:
    """Return pairs of an index in `found` and its characters."""
    # With special tokens, or without those that a chat template writes itself.
    for add in (True, False):
        ids, places = _tokenize(tokenizer, text, add)
        cut = _find_ids(ids, found, getattr(tokenizer, "truncation_side", "right"))
        if cut is not None:
            own = places[cut : cut + len(found)]
            return [(at, place) for at, place in enumerate(own) if place is not None]
    # without tokens inserted for images or by a template, the rest is the text, in order
    ignored = _special_ids(tokenizer) | set(tokenizer.get_added_vocab().values())
    ours = [(n, place) for n, place in zip(ids, places, strict=True) if n not in ignored]
    theirs = [(n, at) for at, n in enumerate(found) if n not in ignored]
    side = getattr(tokenizer, "truncation_side", "right")
    cut = _find_ids([n for n, _ in ours], [n for n, _ in theirs], side)
    if cut is None:
        raise ValueError(
            f"the token ids of a row do not match its text {str(text)[:60]!r}; pass the texts as "
            "tokenized, after any chat template"
        )
    both = zip(theirs, ours[cut : cut + len(theirs)], strict=True)
    return [(at, place) for (_, at), (_, place) in both if place is not None]


def _find_ids(ids: list[int], found: list[int], side: str) -> int | None:
    """Return the start of `found` in `ids`, which may be truncated on one side."""
    if ids == found:
        return 0
    if 0 < len(found) < len(ids):
        # Truncated: the ids of the row are the end or the beginning of the text.
        start = len(ids) - len(found) if side == "left" else 0
        if ids[start : start + len(found)] == found:
            return start
    return None


def _tokenize(tokenizer: Any, text: Text, add: bool) -> tuple[list[int], list[_Place | None]]:
    """Return the ids of a text and the characters of each, None for special tokens."""
    parts = (text,) if isinstance(text, str) else text
    if not getattr(tokenizer, "is_fast", False):
        return _tokenize_without_offsets(tokenizer, parts, add)
    given = tokenizer(*parts, return_offsets_mapping=True, add_special_tokens=add)
    which = given.sequence_ids(0)
    places = [
        None if w is None else (start, stop, w)
        for w, (start, stop) in zip(which, given["offset_mapping"], strict=True)
    ]
    return list(given["input_ids"]), places


def _tokenize_without_offsets(
    tokenizer: Any, parts: tuple[str, ...], add: bool
) -> tuple[list[int], list[_Place | None]]:
    """Return the same for a tokenizer without offsets, by matching the strings of the tokens."""
    given = tokenizer(*parts, add_special_tokens=add)
    ids, ignored = list(given["input_ids"]), _special_ids(tokenizer)
    places: list[_Place | None] = []
    which, at = 0, 0
    for token in ids:
        if token in ignored:
            places.append(None)
            continue
        piece = str(tokenizer.convert_ids_to_tokens(token))
        for mark in MARKS:
            piece = piece.replace(mark, "")
        start = _find_next(parts[which], at, piece)
        if start is None and which + 1 < len(parts):
            which, start = which + 1, _find_next(parts[which + 1], 0, piece)
        if start is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has no character offsets, and its token {piece!r} is "
                "not found in the text; use the fast tokenizer"
            )
        at = start + len(piece)
        places.append((start, at, which))
    return ids, places


def _find_next(text: str, at: int, piece: str) -> int | None:
    """Return the start of `piece`, if it comes next after whitespace."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at if text[at : at + len(piece)].lower() == piece.lower() else None


def _special_ids(tokenizer: Any) -> set[int]:
    return set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}


def _text_of_pair(text: Text, which: int) -> str:
    return text if isinstance(text, str) else text[which]


def _strip_whitespace(text: str, start: int, stop: int) -> list[int]:
    """The characters of a token without the surrounding whitespace that some tokenizers include."""
    # One character is left, even if the token is nothing but whitespace.
    while start < stop - 1 and text[start].isspace():
        start += 1
    while stop - 1 > start and text[stop - 1].isspace():
        stop -= 1
    return [start, stop]
