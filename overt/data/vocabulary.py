"""Words and their numbers, with the characters each word covers.

One reader of text for the whole library: it turns a text into ids and, for every id, the range of
characters it stands for, so that attention over words can be drawn on the text itself. `Vocabulary`
is our own, of words; `SubWords` has pieces of words, made by Hugging Face's tokenizers; and
`HubTokenizer` puts the tokenizer of a pretrained model behind the same face.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.errors import BadInput, Damaged
from overt.files import read_json, read_sealed, verify, write_sealed

PAD, UNKNOWN, MASK, BEGIN, END = range(5)
SPECIAL = ("<pad>", "<unknown>", "<mask>", "<begin>", "<end>")

FORMAT = "overt vocabulary 1"
PIECES = "overt sub-words 1"
FILE = "vocabulary.json"  # its name in a folder
BYTES = 256  # the least pieces there are: every text can be spelled
ABSENT = (-1, -1)  # the span of a token that covers no character
WORD = re.compile(r"'(?:s|t|d|m|re|ve|ll)\b|\w[\w\u0300-\u036f]*|[^\w\s]", re.IGNORECASE)

Span = tuple[int, int]


@runtime_checkable
class Reader(Protocol):
    """Anything that turns a text into ids and the characters each id covers."""

    @property
    def size(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def mask(self) -> int | None: ...
    def read(self, text: str) -> tuple[list[int], list[Span]]: ...
    def encode(self, words: Sequence[str]) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> list[str]: ...


def tokenize(text: str) -> list[tuple[str, int, int]]:
    """Lower-case words and single punctuation marks, each with its range of characters in `text`.

    The range is that of the original text: `text[start:end].lower() == word`. An English ending
    (`'s`, `'t`, `'re` ...) is a word of its own, as in "what 's".

    >>> tokenize("What's red?")
    [('what', 0, 4), ("'s", 4, 6), ('red', 7, 10), ('?', 10, 11)]
    """
    return [(found.group().lower(), found.start(), found.end()) for found in WORD.finditer(text)]


def pad(
    ids: Sequence[Sequence[int]],
    spans: Sequence[Sequence[Span]] | None = None,
    padding: int = PAD,
    length: int | None = None,
) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"], Int[Tensor, "b n 2"]]:
    """Ragged lists as `(ids, mask, spans)`: one row a text, padded at the end.

    Rows are as long as the longest text and never shorter than one place; with `length` they have
    exactly that length and longer texts lose their end. Where no token stands the mask is False and
    the span is (-1, -1), as it is everywhere when no spans are given.
    """
    if spans is not None and [len(row) for row in spans] != [len(row) for row in ids]:
        raise BadInput("Every id needs one span: the two lists have different lengths.")
    longest = max([1, *map(len, ids)]) if length is None else length
    rows = torch.full((len(ids), longest), padding, dtype=torch.long)
    mask = torch.zeros(len(ids), longest, dtype=torch.bool)
    ranges = torch.full((len(ids), longest, 2), -1, dtype=torch.long)
    for row, words in enumerate(ids):
        count = min(len(words), longest)
        if not count:
            continue
        rows[row, :count] = torch.tensor(list(words[:count]))
        mask[row, :count] = True
        if spans is not None:
            ranges[row, :count] = torch.tensor(list(spans[row][:count]))
    return rows, mask, ranges


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows. Ids 0 to 4 are pad, unknown, mask, begin and end; words follow.

    The names of the five special ids are no words: a text that contains "<mask>" cannot reach id 2.
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {word: len(SPECIAL) + place for place, word in enumerate(self.words)}
        if len(numbers) != len(self.words):
            raise BadInput("A vocabulary needs every word once; some word is given twice.")
        if "" in numbers or any(name in numbers for name in SPECIAL):
            raise BadInput(f"The empty word and {', '.join(SPECIAL)} cannot be words.")
        object.__setattr__(self, "_ids", numbers)

    @classmethod
    def build(
        cls,
        token_lists: Iterable[Iterable[str]],
        minimum: int = 1,
        limit: int | None = None,
    ) -> "Vocabulary":
        """The words seen at least `minimum` times, the frequent first and equals by alphabet.

        `limit` keeps that many words beside the five special ids.
        """
        counts = Counter(word for tokens in token_lists for word in tokens)
        for name in ("", *SPECIAL):
            counts.pop(name, None)
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls(tuple(word for word, count in ordered if count >= minimum)[:limit])

    @property
    def size(self) -> int:
        """How many ids there are, the five special ones included."""
        return len(SPECIAL) + len(self.words)

    @property
    def padding(self) -> int:
        """The id that fills up short rows."""
        return PAD

    @property
    def mask(self) -> int:
        """The id that stands for a hidden word."""
        return MASK

    def encode(self, words: Sequence[str]) -> list[int]:
        """The id of every word; a word that is not known is 1."""
        return [self._ids.get(word, UNKNOWN) for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The word of every id; special ids by their names in angle brackets."""
        names = (*SPECIAL, *self.words)
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < len(names):
                raise BadInput(f"Id {number} is not in a vocabulary of {len(names)} ids.")
        return [names[number] for number in numbers]

    def read(self, text: str) -> tuple[list[int], list[Span]]:
        """The ids of a text and the characters each covers."""
        found = tokenize(text)
        return self.encode([word for word, _, _ in found]), [(a, b) for _, a, b in found]

    def text(self, ids: Iterable[int]) -> str:
        """The words of ids with spaces between; special ids say nothing."""
        return " ".join(self.decode(one for one in ids if int(one) >= len(SPECIAL)))

    def save(self, path: Path | str) -> None:
        """Write one JSON file with its SHA-256 in it, whole or not at all."""
        write_sealed(Path(path), {"format": FORMAT, "words": list(self.words)})

    @classmethod
    def load(cls, path: Path | str) -> "Vocabulary":
        """Read what `save` wrote; anything else is `Damaged`."""
        path = Path(path)
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise Damaged(f"{path} is not a vocabulary file ({FORMAT!r}); build it again.")
        words = read_sealed(path).get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise Damaged(f"{path}: `words` is not a list of words; build the file again.")
        try:
            return cls(tuple(words))
        except BadInput as problem:
            raise Damaged(f"{path}: {problem} Build the file again.") from problem


class SubWords:
    """Pieces of words, by byte-pair encoding: no word is unknown, and frequent ones are one piece.

    Sennrich, Haddow and Birch 2016, on bytes as in GPT-2, by the library tokenizers. Ids 0 to 4 are
    those of `Vocabulary`, so a model writes with either; the names of special ids are no pieces. A
    piece that begins a word begins with a space. Texts are lower-cased.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def build(
        cls, token_lists: Iterable[Iterable[str]], limit: int = 4_000, minimum: int = 2
    ) -> "SubWords":
        """Up to `limit` pieces beside the special ids, joined while a pair is there often enough.

        The first 256 are bytes. `minimum` is how often a pair must stand together to be joined.
        """
        if limit < BYTES:
            raise BadInput(f"Sub-words need {BYTES} pieces at least, one a byte, not {limit}.")
        library = _tokenizers()
        made = library.Tokenizer(library.models.BPE())
        made.normalizer = library.normalizers.Sequence(
            [library.normalizers.NFC(), library.normalizers.Lowercase()]
        )
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=limit,
            min_frequency=minimum,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator((" ".join(tokens) for tokens in token_lists), trainer)
        return cls(made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubWords) and self.tokenizer.to_str() == other.tokenizer.to_str()

    __hash__ = None  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """How many ids there are, the five special ones included."""
        return len(SPECIAL) + int(self.tokenizer.get_vocab_size())

    @property
    def padding(self) -> int:
        """The id that fills up short rows."""
        return PAD

    @property
    def mask(self) -> int:
        """The id that stands for a hidden piece."""
        return MASK

    def encode(self, words: Sequence[str]) -> list[int]:
        """The ids of words already split; a word may become several."""
        return self.read(" ".join(words))[0]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The piece of every id; special ids by their names in angle brackets."""
        found = []
        for number in (int(one) for one in ids):
            if not 0 <= number < self.size:
                raise BadInput(f"Id {number} is not in a vocabulary of {self.size} ids.")
            special = number < len(SPECIAL)
            inner = number - len(SPECIAL)
            found.append(SPECIAL[number] if special else str(self.tokenizer.decode([inner])))
        return found

    def text(self, ids: Iterable[int]) -> str:
        """The text that pieces spell; special ids say nothing."""
        pieces = [int(one) - len(SPECIAL) for one in ids if int(one) >= len(SPECIAL)]
        return str(self.tokenizer.decode(pieces)).strip()

    def read(self, text: str) -> tuple[list[int], list[Span]]:
        """The ids of a text and the characters each covers, without the spaces around a word."""
        found = self.tokenizer.encode(text)
        return [len(SPECIAL) + one for one in found.ids], [
            _trim(text, *span) for span in found.offsets
        ]

    def save(self, path: Path | str) -> None:
        """Write one JSON file with its SHA-256 in it, whole or not at all."""
        write_sealed(
            Path(path), {"format": PIECES, "tokenizer": json.loads(self.tokenizer.to_str())}
        )

    @classmethod
    def load(cls, path: Path | str) -> "SubWords":
        """Read what `save` wrote; anything else is `Damaged`."""
        path = Path(path)
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != PIECES:
            raise Damaged(f"{path} is not a file of sub-words ({PIECES!r}); build it again.")
        value = read_sealed(path)
        library = _tokenizers()
        try:
            return cls(library.Tokenizer.from_str(json.dumps(value.get("tokenizer"))))
        except Exception as problem:  # what the library raises has no class of its own
            raise Damaged(f"{path} holds no tokenizer ({problem}); build it again.") from problem


def load_words(path: Path | str) -> Vocabulary | SubWords:
    """Words or sub-words, whichever a file holds, or a folder that a command has written."""
    path = Path(path)
    if path.is_dir():
        verify(path)
        path = path / FILE
    value = read_json(path)
    pieces = isinstance(value, dict) and value.get("format") == PIECES
    return SubWords.load(path) if pieces else Vocabulary.load(path)


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as problem:
        raise BadInput(
            "Sub-words need the library tokenizers: pip install tokenizers, or take words."
        ) from problem
    return tokenizers


class HubTokenizer:
    """A Hugging Face tokenizer behind the face of `Vocabulary`, special tokens included.

    Special tokens cover no character: their span is (-1, -1). Only fast tokenizers know the
    characters of a token, so slow ones are refused.
    """

    def __init__(self, tokenizer: Any, length: int | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise BadInput(
                f"{type(tokenizer).__name__} does not say which characters a token covers; "
                "use the fast version of this tokenizer."
            )
        self.tokenizer = tokenizer
        self.length = length

    @classmethod
    def load(cls, name: str | Path, length: int | None = None) -> "HubTokenizer":
        """The tokenizer of a model folder or a hub name; code from the hub is never run."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(name)), length)
        except (OSError, ValueError) as problem:
            reason = str(problem).strip().splitlines()[0]
            raise BadInput(f"No tokenizer can be loaded from {name}: {reason}") from problem

    @property
    def size(self) -> int:
        """How many ids there are, added tokens included."""
        return len(self.tokenizer)

    @property
    def padding(self) -> int:
        """The id that fills up short rows; 0 for a tokenizer without one, since it is masked."""
        found = self.tokenizer.pad_token_id
        return 0 if found is None else int(found)

    @property
    def mask(self) -> int | None:
        """The id that stands for a hidden word, if the tokenizer has one."""
        found = self.tokenizer.mask_token_id
        return None if found is None else int(found)

    def read(self, text: str) -> tuple[list[int], list[Span]]:
        """The ids of a text and the characters each covers, without the spaces around a word."""
        cut = {} if self.length is None else {"truncation": True, "max_length": self.length}
        found = self.tokenizer(
            text, return_offsets_mapping=True, return_special_tokens_mask=True, **cut
        )
        ranges = zip(found["offset_mapping"], found["special_tokens_mask"], strict=True)
        spans = [ABSENT if special else _trim(text, *span) for span, special in ranges]
        return [int(number) for number in found["input_ids"]], spans

    def encode(self, words: Sequence[str]) -> list[int]:
        """The ids of words already split, without special tokens; a word may become several."""
        if not words:
            return []
        joined = self.tokenizer(" ".join(words), add_special_tokens=False)
        return [int(number) for number in joined["input_ids"]]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The piece of text of every id."""
        return list(self.tokenizer.convert_ids_to_tokens([int(number) for number in ids]))


def _trim(text: str, start: int, end: int) -> Span:
    """The range without the spaces at its ends; a range of spaces alone covers nothing."""
    piece = text[start:end]
    inside = piece.strip()
    if not inside:
        return ABSENT
    start += len(piece) - len(piece.lstrip())
    return start, start + len(inside)
