"""Tokenizers: texts to ids, with the characters that each id covers.

`Tokenizer` is the common protocol. It returns ids and, for every id, its range of characters, so
that attention over tokens can be drawn on the text. `Vocabulary` has words, `BpeVocabulary` pieces
of words made by Hugging Face's tokenizers library, and `HubTokenizer` wraps the tokenizer of a
pretrained model.
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

from overt.errors import CorruptFileError, UserError, rust_panic_as_corrupt_file
from overt.geometry import TextGeometry
from overt.io import read_checksummed_json, read_json, verify, write_checksummed_json

PAD, UNKNOWN, MASK, BEGIN, END = range(5)
SPECIAL = ("<pad>", "<unknown>", "<mask>", "<begin>", "<end>")

FORMAT = "overt vocabulary 1"
PIECES = "overt sub-words 1"
FILE = "vocabulary.json"  # file name in a folder
BYTES = 256  # minimum number of pieces, one per byte: every text can be encoded
ABSENT = (-1, -1)  # span of a token that covers no characters
WORD = re.compile(r"'(?:s|t|d|m|re|ve|ll)\b|\w[\w\u0300-\u036f]*|[^\w\s]", re.IGNORECASE)

Span = tuple[int, int]
PaddedTexts = tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"], TextGeometry]


@runtime_checkable
class Tokenizer(Protocol):
    """Protocol: turns a text into ids and the characters that each id covers."""

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
    """Split a text into lower-case words and punctuation marks, each with its range of characters.

    The range is that of the original text: `text[start:end].lower() == word`. An English ending
    (`'s`, `'t`, `'re` ...) is a word of its own.

    >>> tokenize("What's red?")
    [('what', 0, 4), ("'s", 4, 6), ('red', 7, 10), ('?', 10, 11)]

    Args:
        text: The text.

    Returns:
        The words, each with its first character and the one after its last.
    """
    return [(found.group().lower(), found.start(), found.end()) for found in WORD.finditer(text)]


def pad(
    ids: Sequence[Sequence[int]],
    spans: Sequence[Sequence[Span]] | None = None,
    padding: int = PAD,
    length: int | None = None,
) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"], Int[Tensor, "b n 2"]]:
    """Pad lists of ids to tensors `(ids, mask, spans)`, one row per text, padded at the end.

    Rows are as long as the longest text, and at least 1; with `length` they have exactly that
    length and longer texts are truncated. Padding has mask False and span (-1, -1), as has every
    token if no spans are given.

    Args:
        ids: The ids of each text.
        spans: The characters of each id.
        padding: The id of padding.
        length: The length of the rows; by default that of the longest text.

    Returns:
        The ids, the mask of real tokens, and the characters.

    Raises:
        UserError: `ids` and `spans` differ in length.

    Example:
        >>> ids, mask, _ = pad([[5, 6, 7], [8]])
        >>> ids
        tensor([[5, 6, 7],
                [8, 0, 0]])
        >>> mask[1]
        tensor([ True, False, False])
    """
    if spans is not None and [len(row) for row in spans] != [len(row) for row in ids]:
        raise UserError("Every id needs one span, but the lists have different lengths.")
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


def pad_texts(
    texts: Sequence[str],
    encoded: Sequence[tuple[Sequence[int], Sequence[Span]]],
    padding: int = PAD,
) -> PaddedTexts:
    """Pad texts that a tokenizer has read: ids, mask, and the characters that each id covers."""
    ids, mask, spans = pad([ids for ids, _ in encoded], [spans for _, spans in encoded], padding)
    return ids, mask, TextGeometry(tuple(texts), spans)


def read_texts(reader: Tokenizer, texts: Sequence[str]) -> PaddedTexts:
    """Tokenize and pad texts: ids, mask, and the characters that each id covers."""
    return pad_texts(texts, [reader.read(text) for text in texts], reader.padding)


class SpecialIds:
    """Ids that every vocabulary of overt has, so that a model can use either."""

    @property
    def padding(self) -> int:
        """Id of padding."""
        return PAD

    @property
    def mask(self) -> int:
        """Id of a masked word or piece."""
        return MASK


@dataclass(frozen=True)
class Vocabulary(SpecialIds):
    """A vocabulary of words. Ids 0 to 4 are pad, unknown, mask, begin and end; words follow.

    The names of the special ids are not words: a text that contains "<mask>" cannot produce id 2.

    Args:
        words: The words, each once.

    Raises:
        UserError: A word is repeated, empty or the name of a special id.

    Example:
        >>> Vocabulary(("red", "ring")).read("Red?")
        ([5, 1], [(0, 3), (3, 4)])
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {word: len(SPECIAL) + place for place, word in enumerate(self.words)}
        if len(numbers) != len(self.words):
            raise UserError("Words of a vocabulary must be unique, but one is repeated.")
        if "" in numbers or any(name in numbers for name in SPECIAL):
            raise UserError(f"The empty word and {', '.join(SPECIAL)} cannot be words.")
        object.__setattr__(self, "_ids", numbers)

    @classmethod
    def build(
        cls,
        token_lists: Iterable[Iterable[str]],
        minimum: int = 1,
        limit: int | None = None,
    ) -> "Vocabulary":
        """Build a vocabulary, most frequent words first and ties sorted by alphabet.

        Args:
            token_lists: Words of each text.
            minimum: Count from which a word is kept.
            limit: Largest number of words beside the special ids.
        """
        counts = Counter(word for tokens in token_lists for word in _check_word_list(tokens))
        for name in ("", *SPECIAL):
            counts.pop(name, None)
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls(tuple(word for word, count in ordered if count >= minimum)[:limit])

    @property
    def size(self) -> int:
        """Number of ids, including the five special ones."""
        return len(SPECIAL) + len(self.words)

    def encode(self, words: Sequence[str]) -> list[int]:
        """Return the id of every word; an unknown word is 1."""
        return [self._ids.get(word, UNKNOWN) for word in _check_word_list(words)]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the word of every id; special ids by their names in angle brackets."""
        names = (*SPECIAL, *self.words)
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < len(names):
                raise UserError(
                    f"Id {number} is out of range for a vocabulary of {len(names)} ids."
                )
        return [names[number] for number in numbers]

    def read(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a text and the characters that each covers."""
        found = tokenize(text)
        return self.encode([word for word, _, _ in found]), [(a, b) for _, a, b in found]

    def text(self, ids: Iterable[int]) -> str:
        """Return the words of ids joined by spaces; special ids are skipped."""
        return " ".join(self.decode(one for one in ids if int(one) >= len(SPECIAL)))

    def save(self, path: Path | str) -> None:
        """Write one JSON file with its SHA-256, atomically."""
        write_checksummed_json(Path(path), {"format": FORMAT, "words": list(self.words)})

    @classmethod
    def load(cls, path: Path | str) -> "Vocabulary":
        """Read a file written by `save`; raise `CorruptFileError` for anything else."""
        path = Path(path)
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CorruptFileError(f"{path} is not a vocabulary file ({FORMAT!r}); build it again.")
        words = read_checksummed_json(path).get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise CorruptFileError(f"{path}: `words` is not a list of words; build the file again.")
        try:
            return cls(tuple(words))
        except UserError as problem:
            raise CorruptFileError(f"{path}: {problem} Build the file again.") from problem


class BpeVocabulary(SpecialIds):
    """A vocabulary of sub-words by byte-pair encoding: no word is unknown.

    Sennrich, Haddow and Birch 2016, on bytes as in GPT-2, with the tokenizers library. Ids 0 to 4
    are those of `Vocabulary`, so that a model can use either; the names of special ids are not
    pieces. A piece that begins a word begins with a space. Texts are lower-cased.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def build(
        cls, token_lists: Iterable[Iterable[str]], limit: int = 4_000, minimum: int = 2
    ) -> "BpeVocabulary":
        """Train up to `limit` pieces beside the special ids; the first 256 are bytes.

        `minimum` is the count from which a pair of pieces is merged.
        """
        if limit < BYTES:
            raise UserError(f"limit must be at least {BYTES}, one piece per byte, got {limit}.")
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
        made.train_from_iterator(
            (" ".join(_check_word_list(tokens)) for tokens in token_lists), trainer
        )
        return cls(made)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BpeVocabulary) and self.tokenizer.to_str() == other.tokenizer.to_str()
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Number of ids, including the five special ones."""
        return len(SPECIAL) + int(self.tokenizer.get_vocab_size())

    def encode(self, words: Sequence[str]) -> list[int]:
        """Return the ids of words; a word may become several pieces."""
        return self.read(" ".join(_check_word_list(words)))[0]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the piece of every id; special ids by their names in angle brackets."""
        found = []
        for number in (int(one) for one in ids):
            if not 0 <= number < self.size:
                raise UserError(f"Id {number} is out of range for a vocabulary of {self.size} ids.")
            special = number < len(SPECIAL)
            inner = number - len(SPECIAL)
            found.append(SPECIAL[number] if special else str(self.tokenizer.decode([inner])))
        return found

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of pieces; special ids are skipped."""
        pieces = [int(one) - len(SPECIAL) for one in ids if int(one) >= len(SPECIAL)]
        return str(self.tokenizer.decode(pieces)).strip()

    def read(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a text and the characters that each covers, without spaces around."""
        found = self.tokenizer.encode(text)
        return [len(SPECIAL) + one for one in found.ids], [
            _trim(text, *span) for span in found.offsets
        ]

    def save(self, path: Path | str) -> None:
        """Write one JSON file with its SHA-256, atomically."""
        write_checksummed_json(
            Path(path), {"format": PIECES, "tokenizer": json.loads(self.tokenizer.to_str())}
        )

    @classmethod
    def load(cls, path: Path | str) -> "BpeVocabulary":
        """Read a file written by `save`; raise `CorruptFileError` for anything else."""
        path = Path(path)
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != PIECES:
            raise CorruptFileError(
                f"{path} is not a file of sub-words ({PIECES!r}); build it again."
            )
        value = read_checksummed_json(path)
        library = _tokenizers()
        try:
            with rust_panic_as_corrupt_file("the library tokenizers failed on it"):
                return cls(library.Tokenizer.from_str(json.dumps(value.get("tokenizer"))))
        except Exception as problem:  # the library raises a plain Exception
            raise CorruptFileError(
                f"{path} does not have a tokenizer ({problem}); build it again."
            ) from problem


def load_vocabulary(path: Path | str) -> Vocabulary | BpeVocabulary:
    """Load words or sub-words from a file, or from a folder that a command has written."""
    path = Path(path)
    if path.is_dir():
        verify(path)
        path = path / FILE
    value = read_json(path)
    pieces = isinstance(value, dict) and value.get("format") == PIECES
    return BpeVocabulary.load(path) if pieces else Vocabulary.load(path)


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as problem:
        raise UserError(
            "Sub-words need the library tokenizers: pip install tokenizers, or use words."
        ) from problem
    return tokenizers


class HubTokenizer:
    """A Hugging Face tokenizer with the interface of `Tokenizer`, special tokens included.

    Special tokens cover no characters: their span is (-1, -1).

    Args:
        tokenizer: Fast tokenizer of transformers.
        length: Largest number of tokens; None does not truncate.

    Raises:
        UserError: The tokenizer is slow, and so does not give character offsets.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"?": 0, "red": 1, "cube": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> reader = HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
        >>> reader.read("red cube")  # or HubTokenizer.load("bert-base-uncased")
        ([1, 2], [(0, 3), (4, 8)])
    """

    def __init__(self, tokenizer: Any, length: int | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{type(tokenizer).__name__} does not give character offsets; "
                "use the fast version of this tokenizer."
            )
        self.tokenizer = tokenizer
        self.length = length

    @classmethod
    def load(cls, name: str | Path, length: int | None = None) -> "HubTokenizer":
        """Load the tokenizer of a model folder or a hub name; remote code is never run."""
        from transformers import AutoTokenizer

        try:
            with rust_panic_as_corrupt_file(f"No tokenizer can be loaded from {name}"):
                return cls(AutoTokenizer.from_pretrained(str(name)), length)
        except (OSError, ValueError) as problem:
            reason = str(problem).strip().splitlines()[0]
            raise UserError(f"No tokenizer can be loaded from {name}: {reason}") from problem

    @property
    def size(self) -> int:
        """Number of ids, including added tokens."""
        return len(self.tokenizer)

    @property
    def padding(self) -> int:
        """Id of padding; 0 for a tokenizer without one, since padding is masked."""
        found = self.tokenizer.pad_token_id
        return 0 if found is None else int(found)

    @property
    def mask(self) -> int | None:
        """Id of a masked token, or None."""
        found = self.tokenizer.mask_token_id
        return None if found is None else int(found)

    def read(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a text and the characters that each covers, without spaces around."""
        cut = {} if self.length is None else {"truncation": True, "max_length": self.length}
        found = self.tokenizer(
            text, return_offsets_mapping=True, return_special_tokens_mask=True, **cut
        )
        ranges = zip(found["offset_mapping"], found["special_tokens_mask"], strict=True)
        spans = [ABSENT if special else _trim(text, *span) for span, special in ranges]
        return [int(number) for number in found["input_ids"]], spans

    def encode(self, words: Sequence[str]) -> list[int]:
        """Return the ids of words without special tokens; a word may become several."""
        if not words:
            return []
        joined = self.tokenizer(" ".join(_check_word_list(words)), add_special_tokens=False)
        return [int(number) for number in joined["input_ids"]]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the token of every id."""
        return list(self.tokenizer.convert_ids_to_tokens([int(number) for number in ids]))


def _trim(text: str, start: int, end: int) -> Span:
    """Return the range without surrounding spaces; a range of only spaces covers nothing."""
    piece = text[start:end]
    inside = piece.strip()
    if not inside:
        return ABSENT
    start += len(piece) - len(piece.lstrip())
    return start, start + len(inside)


def _check_word_list(words: Iterable[str]) -> Iterable[str]:
    """Raise `UserError` for a string instead of a list of words: its items are letters."""
    if isinstance(words, str):
        raise UserError(
            f"Expected a list of words, got the string {words[:30]!r}: split it first, with "
            "tokenize(text) or caption_words(text)."
        )
    return words
