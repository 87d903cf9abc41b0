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
    HubTokenizer,
    Reader,
    SubWords,
    Vocabulary,
    load_words,
    pad,
    tokenize,
)
from overt.errors import BadInput, Damaged
from overt.files import write_json

TEXTS = st.text(max_size=60)


@given(TEXTS)
def test_every_word_is_the_lower_case_of_its_characters(text):
    for word, start, end in tokenize(text):
        assert text[start:end].lower() == word
        assert word.strip()


@given(TEXTS)
def test_words_come_in_order_and_leave_out_only_spaces(text):
    found = tokenize(text)
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(found))
    rest = list(text)
    for _, start, end in found:
        rest[start:end] = " " * (end - start)
    assert not "".join(rest).strip()


def test_words_by_hand():
    words = [word for word, _, _ in tokenize("Isn't THE dog's café, 'nice'? 3.5 e\u0301t\u0301")]
    assert words == [
        *["isn", "'t", "the", "dog", "'s", "café", ",", "'", "nice", "'", "?"],
        *["3", ".", "5", "e\u0301t\u0301"],
    ]


def test_a_letter_that_grows_when_lowered_keeps_its_place():
    assert tokenize("İx y") == [("i̇x", 0, 2), ("y", 3, 4)]


def test_special_ids_are_the_first_five():
    assert (PAD, UNKNOWN, MASK, BEGIN, END) == (0, 1, 2, 3, 4)
    found = Vocabulary.build([["a"]])
    assert found.decode(range(6)) == [*SPECIAL, "a"]
    assert (found.size, found.padding, found.mask) == (6, PAD, MASK)


def test_order_is_by_frequency_and_then_by_alphabet():
    found = Vocabulary.build([["b", "c", "a"], ["c", "d", "d", "d"]])
    assert found.words == ("d", "c", "a", "b")
    assert Vocabulary.build([["b", "c", "a"], ["c", "d", "d", "d"]], minimum=2).words == ("d", "c")
    assert Vocabulary.build([["b", "c", "a"], ["c", "d", "d", "d"]], limit=3).words == (
        *("d", "c", "a"),
    )


def test_order_does_not_depend_on_the_order_of_the_words():
    """So a set of words may be given, whatever the hash seed makes of it."""
    for words in itertools.permutations("wxyz"):
        assert Vocabulary.build([words, ["y"]]).words == ("y", "w", "x", "z")


@given(st.lists(st.lists(st.text(min_size=1, max_size=3), max_size=5), max_size=5))
def test_known_words_come_back(lists):
    found = Vocabulary.build(lists)
    words = [word for tokens in lists for word in tokens if word not in SPECIAL]
    assert found.decode(found.encode(words)) == words


def test_unknown_words_and_the_names_of_special_ids_are_unknown():
    found = Vocabulary.build([["a", *SPECIAL, ""]])
    assert found.words == ("a",)
    assert found.encode(["a", "z", *SPECIAL]) == [5, *[UNKNOWN] * 6]


def test_reading_a_text_gives_ids_and_characters():
    found = Vocabulary.build([["red", "ring"]])
    assert found.read("A Red ring") == ([1, 5, 6], [(0, 1), (2, 5), (6, 10)])
    assert found.read("") == ([], [])


@pytest.mark.parametrize("number", [-1, 6, 10**9])
def test_decoding_an_id_out_of_range_is_refused(number):
    with pytest.raises(BadInput, match=str(number)):
        Vocabulary.build([["a"]]).decode([number])


@pytest.mark.parametrize("words", [("a", "a"), ("",), ("<mask>",)])
def test_impossible_words_are_refused(words):
    with pytest.raises(BadInput):
        Vocabulary(words)


def test_saved_words_come_back(tmp_path):
    found = Vocabulary.build([["ä", "b", '"', "\u2028"]])
    found.save(tmp_path / "words.json")
    assert Vocabulary.load(tmp_path / "words.json") == found
    found.save(str(tmp_path / "text.json"))
    assert Vocabulary.load(str(tmp_path / "text.json")) == found
    assert load_words(str(tmp_path / "text.json")) == found


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
def test_a_file_of_another_kind_is_damaged(tmp_path, value):
    path = tmp_path / "words.json"
    path.write_text(json.dumps(value))
    with pytest.raises(Damaged, match=r"words\.json"):
        Vocabulary.load(path)


def test_a_file_cut_off_at_any_byte_is_damaged(tmp_path):
    path = tmp_path / "words.json"
    Vocabulary.build([["a", "b"]]).save(path)
    data = path.read_bytes()
    for length in range(len(data.rstrip())):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged):
            Vocabulary.load(path)


def test_padding_by_hand():
    ids, mask, spans = pad([[7, 8], [], [9]], [[(0, 1), (2, 4)], [], [(3, 5)]], padding=6)
    assert ids.tolist() == [[7, 8], [6, 6], [9, 6]]
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    assert spans.tolist() == [[[0, 1], [2, 4]], [[-1, -1]] * 2, [[3, 5], [-1, -1]]]


def test_rows_of_a_given_length_and_of_nothing():
    ids, mask, spans = pad([[1, 2, 3], [4]], length=2)
    assert ids.tolist() == [[1, 2], [4, PAD]] and mask.sum() == 3 and (spans == -1).all()
    ids, mask, spans = pad([[]])
    assert ids.shape == (1, 1) and not mask.any()
    ids, mask, spans = pad([])
    assert ids.shape == (0, 1) and ids.dtype == torch.long


def test_spans_must_fit_the_ids():
    with pytest.raises(BadInput, match="span"):
        pad([[1, 2]], [[(0, 1)]])


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A tiny tokenizer in the hub's format, of words, with special tokens at both ends."""
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


def test_a_hub_tokenizer_reads_like_a_vocabulary(hub):
    found = HubTokenizer.load(hub)
    ids, spans = found.read("a red rings")
    assert ids == [2, 8, 5, 6, 7, 3]
    assert spans == [ABSENT, (0, 1), (2, 5), (6, 10), (10, 11), ABSENT]
    assert (found.size, found.padding, found.mask) == (9, 0, 4)
    assert found.encode(["red", "rings"]) == [5, 6, 7] and found.encode([]) == []
    assert found.decode([5, 7]) == ["red", "##s"]
    assert HubTokenizer.load(hub, length=4).read("a red rings")[0] == [2, 8, 5, 3]


def test_spaces_are_not_part_of_a_hub_token():
    class Spacious:
        is_fast = True

        def __call__(self, text, **_):
            ranges = [(0, 2), (2, 5), (5, 7)]
            return {
                "input_ids": [1, 2, 3],
                "offset_mapping": ranges,
                "special_tokens_mask": [0] * 3,
            }

    assert HubTokenizer(Spacious()).read("ab cd  ")[1] == [(0, 2), (3, 5), ABSENT]


def test_a_slow_or_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(BadInput, match="fast"):
        HubTokenizer(object())
    with pytest.raises(BadInput, match="nothing-here"):
        HubTokenizer.load(tmp_path / "nothing-here")


# Sub-words

SAID = ["a dog runs on the grass", "two dogs run on the grass", "a dog's ball is on the grass"] * 3


@pytest.fixture(scope="module")
def pieces():
    pytest.importorskip("tokenizers", reason="no tokenizers")
    return SubWords.build((text.split() for text in SAID), limit=300)


def test_sub_words_have_the_special_ids_and_the_face_of_a_reader(pieces):
    assert isinstance(pieces, Reader) and 261 < pieces.size <= 305
    assert pieces.decode(range(5)) == list(SPECIAL)
    assert (pieces.padding, pieces.mask) == (PAD, MASK)
    with pytest.raises(BadInput, match="not in a vocabulary"):
        pieces.decode([pieces.size])


@given(TEXTS)
def test_any_text_can_be_spelled(text):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    pieces = _pieces()
    ids, spans = pieces.read(text)
    assert len(ids) == len(spans) and all(len(SPECIAL) <= one < pieces.size for one in ids)
    said = unicodedata.normalize("NFC", text).lower()
    assert pieces.text(ids) == said.strip() or "\u0130" in text or text.strip() != text
    for start, end in spans:
        assert (start, end) == (-1, -1) or 0 <= start < end <= len(text)


@functools.cache
def _pieces():
    return SubWords.build((text.split() for text in SAID), limit=300)


def test_frequent_words_are_one_piece_and_names_of_special_ids_are_none(pieces):
    assert pieces.decode(pieces.encode(["the", "grass"])) == [" the", " grass"]
    assert len(pieces.encode(["zebra"])) > 1
    assert pieces.text(pieces.encode(["a", "zebra's", "t-shirt"])) == "a zebra's t-shirt"
    assert MASK not in pieces.read("a <mask> <end>")[0]
    ids, spans = pieces.read("On the GRASS")
    assert [("On the GRASS")[a:b] for a, b in spans][-1] == "GRASS"
    assert pieces.text([BEGIN, *ids, END, PAD]) == "on the grass"


def test_sub_words_are_the_same_each_time_and_come_back(pieces, tmp_path):
    again = SubWords.build((text.split() for text in SAID), limit=300)
    assert again == pieces and pieces != Vocabulary(("a",))
    pieces.save(tmp_path / "pieces.json")
    assert SubWords.load(tmp_path / "pieces.json") == pieces == load_words(tmp_path / "pieces.json")
    with pytest.raises(BadInput, match="256 pieces"):
        SubWords.build([["a"]], limit=10)


@pytest.mark.parametrize("value", [{}, [], {"format": "overt sub-words 1"}])
def test_a_file_that_holds_no_sub_words_is_damaged(tmp_path, value):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    write_json(tmp_path / "bad.json", value)
    with pytest.raises(Damaged):
        SubWords.load(tmp_path / "bad.json")


def test_the_text_of_ids_leaves_special_ones_out():
    known = Vocabulary(("a", "dog"))
    assert known.text([BEGIN, *known.encode(["a", "dog"]), END]) == "a dog"
