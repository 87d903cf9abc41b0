"""The characters behind tokens, for the ways in which a row of ids comes to be."""

import pytest
import torch

from overt.capture.layouts.text_tokens import (
    locate_tokens,
    special_token_mask,
    text_geometry,
    word_numbers,
)

transformers = pytest.importorskip("transformers", reason="tokenizers come from transformers")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are built with tokenizers")

TEXTS = ["the red ring turns", "a dog"]
PIECES = "[PAD] [UNK] [CLS] [SEP] the red ring turn ##s a dog ##gy <image> ?".split()


def wordpiece(**options):
    """A tokenizer of BERT's kind."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        additional_special_tokens=["<image>"],
        **options,
    )


def bytelevel():
    """A tokenizer of GPT-2's kind, whose tokens hold the blank before a word."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(TEXTS * 10, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|end|>", eos_token="<|end|>"
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_and_special_tokens_have_no_characters(side):
    tokenizer = wordpiece(padding_side=side)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    geometry = text_geometry(tokenizer, TEXTS, inputs["input_ids"], inputs["attention_mask"])
    assert [t for t in geometry.tokens(0) if t] == ["the", "red", "ring", "turn", "s"]
    assert [t for t in geometry.tokens(1) if t] == ["a", "dog"]
    padded = inputs["attention_mask"] == 0
    assert (geometry.spans[padded] == -1).all()
    at = 4 if side == "left" else 1
    assert geometry.tokens(1)[at : at + 2] == ["a", "dog"]


def test_both_texts_of_a_pair_are_told_apart():
    tokenizer = wordpiece()
    pairs = [("the dog", "red ?"), ("a", "a dog")]
    inputs = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    found = locate_tokens(tokenizer, pairs, inputs["input_ids"], inputs["attention_mask"])
    assert found.sequence.tolist() == [[-1, 0, 0, -1, 1, 1, -1], [-1, 0, -1, 1, 1, -1, -1]]
    assert found.geometry(1).tokens(0)[4:6] == ["red", "?"]
    assert found.geometry(0).tokens(0) == ["", "the", "dog", "", "", "", ""]
    assert text_geometry(tokenizer, pairs, inputs["input_ids"]).texts == ("the dog", "a")


def test_an_unknown_word_keeps_its_characters():
    tokenizer = wordpiece()
    inputs = tokenizer(["the Zebra"], return_tensors="pt")
    assert text_geometry(tokenizer, ["the Zebra"], inputs["input_ids"]).tokens(0)[2] == "Zebra"
    assert special_token_mask(tokenizer, inputs["input_ids"]).tolist() == [
        [True, False, False, True]
    ]


def test_blanks_that_a_token_holds_are_not_its_characters():
    tokenizer = bytelevel()
    inputs = tokenizer(["the red  ring"], return_tensors="pt")
    geometry = text_geometry(tokenizer, ["the red  ring"], inputs["input_ids"])
    tokens = [t for t in geometry.tokens(0) if t.strip()]
    assert "".join(tokens) == "theredring"
    assert all(t == t.strip() for t in tokens)
    marked = geometry.cover([[(4, 7)]])[0]
    assert set(marked.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_was_cut_short(side):
    tokenizer = bytelevel()
    tokenizer.truncation_side = side
    inputs = tokenizer(TEXTS[:1], truncation=True, max_length=3, return_tensors="pt")
    tokens = text_geometry(tokenizer, TEXTS[:1], inputs["input_ids"]).tokens(0)
    assert ("turns" in "".join(tokens)) == (side == "left")


def test_a_text_cut_short_inside_its_special_tokens():
    tokenizer = wordpiece()
    inputs = tokenizer(TEXTS[:1], truncation=True, max_length=5, return_tensors="pt")
    geometry = text_geometry(tokenizer, TEXTS[:1], inputs["input_ids"])
    assert geometry.tokens(0) == ["", "the", "red", "ring", ""]


def test_image_tokens_that_a_processor_multiplied_are_passed_over():
    tokenizer = wordpiece(padding_side="left")
    texts = ["<image> the dog ?", "<image> red"]
    long = [t.replace("<image>", "<image>" * 6) for t in texts]
    inputs = tokenizer(long, padding=True, return_tensors="pt")
    geometry = text_geometry(tokenizer, texts, inputs["input_ids"], inputs["attention_mask"])
    assert [t for t in geometry.tokens(0) if t] == ["the", "dog", "?"]
    assert [t for t in geometry.tokens(1) if t] == ["red"]


def test_another_text_than_the_one_tokenised_is_refused():
    tokenizer = wordpiece()
    ids = tokenizer(["the dog"], return_tensors="pt")["input_ids"]
    with pytest.raises(ValueError, match="'a ring'"):
        text_geometry(tokenizer, ["a ring"], ids)
    with pytest.raises(ValueError, match=r"2 texts .*1 rows"):
        text_geometry(tokenizer, ["a", "b"], ids)


class Slow:
    """A tokenizer without offsets."""

    is_fast = False
    all_special_ids = (0, 1)
    unk_token_id = 9

    def __init__(self, pieces):
        self.pieces = pieces

    def __call__(self, *texts, add_special_tokens=True):
        ids = [2 + number for number in range(len(self.pieces))]
        return {"input_ids": [0, *ids, 1] if add_special_tokens else ids}

    def convert_ids_to_tokens(self, number):
        return self.pieces[number - 2]

    def get_added_vocab(self):
        return {}


def test_a_tokenizer_without_offsets_is_spelled_out_where_that_is_exact():
    geometry = text_geometry(
        Slow(["the", "▁dog", "##gy"]), ["The doggy"], torch.tensor([[0, 2, 3, 4, 1]])
    )
    assert geometry.tokens(0) == ["", "The", "dog", "gy", ""]


def test_a_tokenizer_without_offsets_that_spells_otherwise_is_refused():
    with pytest.raises(ValueError, match="fast tokenizer"):
        text_geometry(Slow(["the", "hund"]), ["the dog"], torch.tensor([[0, 2, 3, 1]]))


def test_tokens_know_their_word():
    tokenizer = wordpiece()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    geometry = text_geometry(tokenizer, TEXTS, inputs["input_ids"], inputs["attention_mask"])
    assert word_numbers(geometry).tolist() == [[-1, 0, 1, 2, 3, 3, -1], [-1, 0, 1, -1, -1, -1, -1]]
