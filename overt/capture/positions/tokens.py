"""The characters behind each token, from a tokenizer, whatever was padded around or put between.

Rows of ids are matched with the texts they came from, not the other way round: left or right
padding, truncation, special tokens and image tokens that a processor has put in are all met by
asking which ids are the text's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.geometry import TextGeometry

Text = str | tuple[str, str]
MARKS = ("##", "▁", "Ġ", "Ċ", "</w>", "@@")  # how tokenizers mark the rim of a word


@dataclass(frozen=True, eq=False)
class Located:
    """The characters of each token, and the text of its sample they belong to.

    `sequence` is 0 for a text or the first of a pair, 1 for the second, -1 for a special token and
    for one that is not the text's own, such as an image token or padding.
    """

    texts: tuple[Text, ...]
    spans: Int[Tensor, "b n 2"]
    sequence: Int[Tensor, "b n"]

    def geometry(self, sequence: int = 0) -> TextGeometry:
        """The geometry of one text of each sample, on all the tokens there are."""
        own = (self.sequence == sequence)[..., None]
        texts = tuple(t if isinstance(t, str) else t[sequence] for t in self.texts)
        return TextGeometry(texts, torch.where(own, self.spans, -1))


def text_geometry(
    tokenizer: Any,
    texts: Sequence[Text],
    input_ids: Int[Tensor, "b n"],
    attention_mask: Int[Tensor, "b n"] | None = None,
) -> TextGeometry:
    """The characters behind each token of each text; (-1, -1) for special tokens and padding.

    Of pairs of texts it is the first; `locate` gives both.
    """
    return locate(tokenizer, texts, input_ids, attention_mask).geometry()


def locate(
    tokenizer: Any,
    texts: Sequence[Text],
    input_ids: Int[Tensor, "b n"],
    attention_mask: Int[Tensor, "b n"] | None = None,
) -> Located:
    """Where the tokens of `input_ids` stand in the texts that they were made from.

    `tokenizer` is a Hugging Face tokenizer. A row may be padded on either side, cut short, and
    hold tokens of its own, such as those of an image; what is left has to be the text's tokens.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if len(texts) != len(input_ids):
        raise ValueError(f"{len(texts)} texts for {len(input_ids)} rows of tokens")
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    spans = torch.full((*input_ids.shape, 2), -1, dtype=torch.long)
    sequence = torch.full(input_ids.shape, -1, dtype=torch.long)
    for row, text in enumerate(texts):
        places = real[row].nonzero()[:, 0].tolist()
        found = [int(input_ids[row, at]) for at in places]
        for at, (start, stop, which) in _match(tokenizer, text, found):
            spans[row, places[at]] = torch.tensor(_trimmed(_part(text, which), start, stop))
            sequence[row, places[at]] = which
    return Located(tuple(texts), spans, sequence)


def words_of(geometry: TextGeometry) -> Int[Tensor, "b n"]:
    """The number of the word each token belongs to, words being what blanks divide; -1 for none."""
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


def special(tokenizer: Any, input_ids: Int[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Which tokens the tokenizer counts as special; an unknown word is none."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    known = torch.tensor(sorted(_special(tokenizer)), dtype=torch.long)
    return torch.isin(input_ids.cpu(), known).to(input_ids.device)


_Place = tuple[int, int, int]  # start, stop, which text of a pair


def _match(tokenizer: Any, text: Text, found: list[int]) -> list[tuple[int, _Place]]:
    """Pairs of a place in `found` and what stands there."""
    for add in (True, False):
        ids, places = _encoded(tokenizer, text, add)
        cut = _cut(ids, found, getattr(tokenizer, "truncation_side", "right"))
        if cut is not None:
            own = places[cut : cut + len(found)]
            return [(at, place) for at, place in enumerate(own) if place is not None]
    # tokens put in for images, or by a template: the rest is the text, in order
    ignored = _special(tokenizer) | set(tokenizer.get_added_vocab().values())
    ours = [(n, place) for n, place in zip(ids, places, strict=True) if n not in ignored]
    theirs = [(n, at) for at, n in enumerate(found) if n not in ignored]
    side = getattr(tokenizer, "truncation_side", "right")
    cut = _cut([n for n, _ in ours], [n for n, _ in theirs], side)
    if cut is None:
        raise ValueError(
            f"the tokens of a row are not those of its text {str(text)[:60]!r}; give the texts "
            "that were tokenised, after any chat template"
        )
    both = zip(theirs, ours[cut : cut + len(theirs)], strict=True)
    return [(at, place) for (_, at), (_, place) in both if place is not None]


def _cut(ids: list[int], found: list[int], side: str) -> int | None:
    """Where `found` begins in `ids`: all of it, or cut short on one side."""
    if ids == found:
        return 0
    if 0 < len(found) < len(ids):
        start = len(ids) - len(found) if side == "left" else 0
        if ids[start : start + len(found)] == found:
            return start
    return None


def _encoded(tokenizer: Any, text: Text, add: bool) -> tuple[list[int], list[_Place | None]]:
    """The ids of a text and what each stands for, None for special tokens."""
    parts = (text,) if isinstance(text, str) else text
    if not getattr(tokenizer, "is_fast", False):
        return _spelled(tokenizer, parts, add)
    given = tokenizer(*parts, return_offsets_mapping=True, add_special_tokens=add)
    which = given.sequence_ids(0)
    places = [
        None if w is None else (start, stop, w)
        for w, (start, stop) in zip(which, given["offset_mapping"], strict=True)
    ]
    return list(given["input_ids"]), places


def _spelled(
    tokenizer: Any, parts: tuple[str, ...], add: bool
) -> tuple[list[int], list[_Place | None]]:
    """The places of the tokens of a tokenizer that does not tell, found by spelling them out."""
    given = tokenizer(*parts, add_special_tokens=add)
    ids, ignored = list(given["input_ids"]), _special(tokenizer)
    places: list[_Place | None] = []
    which, at = 0, 0
    for token in ids:
        if token in ignored:
            places.append(None)
            continue
        piece = str(tokenizer.convert_ids_to_tokens(token))
        for mark in MARKS:
            piece = piece.replace(mark, "")
        start = _next(parts[which], at, piece)
        if start is None and which + 1 < len(parts):
            which, start = which + 1, _next(parts[which + 1], 0, piece)
        if start is None:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which characters a token covers, and its "
                f"token {piece!r} is not spelled as in the text; use the fast tokenizer"
            )
        at = start + len(piece)
        places.append((start, at, which))
    return ids, places


def _next(text: str, at: int, piece: str) -> int | None:
    """Where `piece` begins, if it is what comes next after blanks."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at if text[at : at + len(piece)].lower() == piece.lower() else None


def _special(tokenizer: Any) -> set[int]:
    return set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}


def _part(text: Text, which: int) -> str:
    return text if isinstance(text, str) else text[which]


def _trimmed(text: str, start: int, stop: int) -> list[int]:
    """The characters of a token without the blanks that some tokenizers count in."""
    while start < stop - 1 and text[start].isspace():
        start += 1
    while stop - 1 > start and text[stop - 1].isspace():
        stop -= 1
    return [start, stop]
