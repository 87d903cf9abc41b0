import functools
import itertools
import json
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.data import vocabulary
from overt.data.vocabulary import (
    ABSENT,
    BEGIN,
    END,
    MASK,
    PAD,
    SPECIAL,
    UNKNOWN,
    BpeVocabulary,
    HubTokenizer,
    Tokenizer,
    Vocabulary,
    load_vocabulary,
    pad,
    tokenize,
)
from overt.errors import CorruptFileError, UserError
from overt.io import write_json

TEXTS = st.text(max_size=60)


@given(TEXTS)
def test_tokens_are_lowercase_substrings(text):
    for word, start, end in tokenize(text):
        assert text[start:end].lower() == word
        assert word.strip()


@given(TEXTS)
def test_tokens_are_ordered_and_skip_only_spaces(text):
    found = tokenize(text)
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(found))
    rest = list(text)
    for _, start, end in found:
        rest[start:end] = " " * (end - start)
    assert not "".join(rest).strip()


def test_tokenize_splits_contractions_and_punctuation():
    words = [word for word, _, _ in tokenize("Isn't THE dog's café, 'nice'? 3.5 e\u0301t\u0301")]
    assert words == [
        *["isn", "'t", "the", "dog", "'s", "café", ",", "'", "nice", "'", "?"],
        *["3", ".", "5", "e\u0301t\u0301"],
    ]


def test_letter_that_grows_in_lower_case_keeps_its_span():
    assert tokenize("İx y") == [("i̇x", 0, 2), ("y", 3, 4)]


def test_special_ids_are_the_first_five():
    assert (PAD, UNKNOWN, MASK, BEGIN, END) == (0, 1, 2, 3, 4)
    found = Vocabulary.build([["a"]])
    assert found.decode(range(6)) == [*SPECIAL, "a"]
    assert (found.size, found.padding, found.mask) == (6, PAD, MASK)


def test_words_are_sorted_by_frequency_then_alphabet():
    found = Vocabulary.build([["b", "c", "a"], ["c", "d", "d", "d"]])
    assert found.words == ("d", "c", "a", "b")
    assert Vocabulary.build([["b", "c", "a"], ["c", "d", "d", "d"]], minimum=2).words == ("d", "c")
    assert Vocabulary.build([["b", "c", "a"], ["c", "d", "d", "d"]], limit=3).words == (
        *("d", "c", "a"),
    )


def test_word_order_does_not_depend_on_the_input_order():
    """So the words may be a set, whose order depends on the hash seed."""
    for words in itertools.permutations("wxyz"):
        assert Vocabulary.build([words, ["y"]]).words == ("y", "w", "x", "z")


@given(st.lists(st.lists(st.text(min_size=1, max_size=3), max_size=5), max_size=5))
def test_decode_inverts_encode_for_known_words(lists):
    found = Vocabulary.build(lists)
    words = [word for tokens in lists for word in tokens if word not in SPECIAL]
    assert found.decode(found.encode(words)) == words


def test_unknown_words_and_names_of_special_ids_map_to_unknown():
    found = Vocabulary.build([["a", *SPECIAL, ""]])
    assert found.words == ("a",)
    assert found.encode(["a", "z", *SPECIAL]) == [5, *[UNKNOWN] * 6]


def test_read_gives_ids_and_character_spans():
    found = Vocabulary.build([["red", "ring"]])
    assert found.read("A Red ring") == ([1, 5, 6], [(0, 1), (2, 5), (6, 10)])
    assert found.read("") == ([], [])


@pytest.mark.parametrize("number", [-1, 6, 10**9])
def test_decoding_an_out_of_range_id_raises(number):
    with pytest.raises(UserError, match=str(number)):
        Vocabulary.build([["a"]]).decode([number])


@pytest.mark.parametrize("words", [("a", "a"), ("",), ("<mask>",)])
def test_invalid_words_raise(words):
    with pytest.raises(UserError):
        Vocabulary(words)


def test_saved_vocabulary_loads_unchanged(tmp_path):
    found = Vocabulary.build([["ä", "b", '"', "\u2028"]])
    found.save(tmp_path / "words.json")
    assert Vocabulary.load(tmp_path / "words.json") == found
    found.save(str(tmp_path / "text.json"))
    assert Vocabulary.load(str(tmp_path / "text.json")) == found
    assert load_vocabulary(str(tmp_path / "text.json")) == found


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"format": "other", "words": []},
        {"format": vocabulary.FORMAT},
        {"format": vocabulary.FORMAT, "words": "abc"},
        {"format": vocabulary.FORMAT, "words": ["a", 1]},
        {"format": vocabulary.FORMAT, "words": ["a", "a"]},
        {"format": vocabulary.FORMAT, "words": ["<pad>"]},
    ],
)
def test_file_of_another_format_raises(tmp_path, value):
    path = tmp_path / "words.json"
    path.write_text(json.dumps(value))
    with pytest.raises(CorruptFileError, match=r"words\.json"):
        Vocabulary.load(path)


def test_truncated_file_raises(tmp_path):
    path = tmp_path / "words.json"
    Vocabulary.build([["a", "b"]]).save(path)
    data = path.read_bytes()
    for length in range(len(data.rstrip())):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            Vocabulary.load(path)


def test_pad_matches_hand_computed_values():
    ids, mask, spans = pad([[7, 8], [], [9]], [[(0, 1), (2, 4)], [], [(3, 5)]], padding=6)
    assert ids.tolist() == [[7, 8], [6, 6], [9, 6]]
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    assert spans.tolist() == [[[0, 1], [2, 4]], [[-1, -1]] * 2, [[3, 5], [-1, -1]]]


def test_pad_to_a_length_and_of_empty_rows():
    ids, mask, spans = pad([[1, 2, 3], [4]], length=2)
    assert ids.tolist() == [[1, 2], [4, PAD]] and mask.sum() == 3 and (spans == -1).all()
    ids, mask, spans = pad([[]])
    assert ids.shape == (1, 1) and not mask.any()
    ids, mask, spans = pad([])
    assert ids.shape == (0, 1) and ids.dtype == torch.long


def test_spans_of_another_length_than_the_ids_raise():
    with pytest.raises(UserError, match="span"):
        pad([[1, 2]], [[(0, 1)]])


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A tiny WordPiece tokenizer in the hub's format, with special tokens at both ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "ring", "##s", "a"]
    inner = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    folder = tmp_path_factory.mktemp("hub")
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    return folder


def test_hub_tokenizer_gives_ids_and_spans(hub):
    found = HubTokenizer.load(hub)
    ids, spans = found.read("a red rings")
    assert ids == [2, 8, 5, 6, 7, 3]
    assert spans == [ABSENT, (0, 1), (2, 5), (6, 10), (10, 11), ABSENT]
    assert (found.size, found.padding, found.mask) == (9, 0, 4)
    assert found.encode(["red", "rings"]) == [5, 6, 7] and found.encode([]) == []
    assert found.decode([5, 7]) == ["red", "##s"]
    assert HubTokenizer.load(hub, length=4).read("a red rings")[0] == [2, 8, 5, 3]


def test_spaces_are_not_part_of_a_hub_token():
    class SpacedTokenizer:
        is_fast = True

        def __call__(self, text, **_):
            ranges = [(0, 2), (2, 5), (5, 7)]
            return {
                "input_ids": [1, 2, 3],
                "offset_mapping": ranges,
                "special_tokens_mask": [0] * 3,
            }

    assert HubTokenizer(SpacedTokenizer()).read("ab cd  ")[1] == [(0, 2), (3, 5), ABSENT]


def test_slow_or_missing_tokenizer_raises(tmp_path):
    with pytest.raises(UserError, match="fast"):
        HubTokenizer(object())
    with pytest.raises(UserError, match="nothing-here"):
        HubTokenizer.load(tmp_path / "nothing-here")


# Subwords

SENTENCES = [
    "a dog runs on the grass",
    "two dogs run on the grass",
    "a dog's ball is on the grass",
] * 3


@pytest.fixture(scope="module")
def pieces():
    pytest.importorskip("tokenizers", reason="no tokenizers")
    return BpeVocabulary.build((text.split() for text in SENTENCES), limit=300)


def test_bpe_vocabulary_is_a_tokenizer_with_special_ids(pieces):
    assert isinstance(pieces, Tokenizer) and 261 < pieces.size <= 305
    assert pieces.decode(range(5)) == list(SPECIAL)
    assert (pieces.padding, pieces.mask) == (PAD, MASK)
    with pytest.raises(UserError, match="out of range"):
        pieces.decode([pieces.size])


@given(TEXTS)
def test_bpe_round_trips_any_text(text):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    pieces = _build_pieces()
    ids, spans = pieces.read(text)
    assert len(ids) == len(spans) and all(len(SPECIAL) <= one < pieces.size for one in ids)
    normalized = unicodedata.normalize("NFC", text).lower()
    assert pieces.text(ids) == normalized.strip() or "\u0130" in text or text.strip() != text
    for start, end in spans:
        assert (start, end) == (-1, -1) or 0 <= start < end <= len(text)


@functools.cache
def _build_pieces():
    return BpeVocabulary.build((text.split() for text in SENTENCES), limit=300)


def test_frequent_words_are_one_piece_and_special_names_are_split(pieces):
    assert pieces.decode(pieces.encode(["the", "grass"])) == [" the", " grass"]
    assert len(pieces.encode(["zebra"])) > 1
    assert pieces.text(pieces.encode(["a", "zebra's", "t-shirt"])) == "a zebra's t-shirt"
    assert MASK not in pieces.read("a <mask> <end>")[0]
    ids, spans = pieces.read("On the GRASS")
    assert [("On the GRASS")[a:b] for a, b in spans][-1] == "GRASS"
    assert pieces.text([BEGIN, *ids, END, PAD]) == "on the grass"


def test_bpe_vocabulary_is_deterministic_and_loads_unchanged(pieces, tmp_path):
    again = BpeVocabulary.build((text.split() for text in SENTENCES), limit=300)
    assert again == pieces and pieces != Vocabulary(("a",))
    pieces.save(tmp_path / "pieces.json")
    assert (
        BpeVocabulary.load(tmp_path / "pieces.json")
        == pieces
        == load_vocabulary(tmp_path / "pieces.json")
    )
    with pytest.raises(UserError, match=r"256.* 10"):
        BpeVocabulary.build([["a"]], limit=10)


@pytest.mark.parametrize("value", [{}, [], {"format": "overt sub-words 1"}])
def test_file_without_subwords_raises(tmp_path, value):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    write_json(tmp_path / "bad.json", value)
    with pytest.raises(CorruptFileError):
        BpeVocabulary.load(tmp_path / "bad.json")


def test_text_of_ids_skips_special_ids():
    known = Vocabulary(("a", "dog"))
    assert known.text([BEGIN, *known.encode(["a", "dog"]), END]) == "a dog"


def test_a_string_is_not_a_list_of_words():
    """A string was once split into letters."""
    with pytest.raises(UserError, match=r"'a dog'.*tokenize"):
        Vocabulary.build(["a dog"])
    with pytest.raises(UserError, match=r"words.*'dog'"):
        Vocabulary(("dog",)).encode("dog")
    with pytest.raises(UserError, match=r"words.*'a dog'"):
        BpeVocabulary.build(["a dog"])
