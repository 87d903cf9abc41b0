from dataclasses import replace

import pytest
import torch

from overt.errors import BadInput
from overt.models.answering.questions import (
    Backwards,
    Bag,
    QuestionReader,
    Recurrent,
    question_reader_from,
)
from overt.testing import toy_batch

MAKE = {
    "forwards": lambda: Recurrent(10, word=4, state=5),
    "backwards": lambda: Backwards(10, word=4, state=5),
    "bag": lambda: Bag(10),
}


def made(name):
    torch.manual_seed(0)
    return MAKE[name]()


def slow_lstm(reader, words):
    """The gates of an LSTM, step by step, over the embeddings of one question."""
    layer = reader.read
    h = c = torch.zeros(layer.hidden_size)
    for word in words:
        gates = layer.weight_ih_l0 @ word + layer.bias_ih_l0 + layer.weight_hh_l0 @ h
        i, f, g, o = (gates + layer.bias_hh_l0).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@pytest.mark.parametrize("name", ["forwards", "backwards"])
def test_a_recurrent_reader_agrees_with_the_gates_of_an_lstm(name):
    reader, batch = made(name), toy_batch()
    found = reader(reader.encode(batch))
    for row, (tokens, there) in enumerate(zip(batch.tokens, batch.token_mask, strict=True)):
        words = reader.embed(tokens[there])
        words = words.flip(0) if name == "backwards" else words
        torch.testing.assert_close(found[row], slow_lstm(reader, words))


def test_a_bag_is_which_words_there_are():
    batch = toy_batch()
    reader = made("bag")
    found = reader(reader.encode(batch))
    for row, (tokens, there) in enumerate(zip(batch.tokens, batch.token_mask, strict=True)):
        words = set(tokens[there].tolist())
        assert found[row].tolist() == [float(at in words) for at in range(10)]
    assert not list(reader.parameters())


@pytest.mark.parametrize("name", MAKE)
def test_a_removed_word_is_not_read_and_no_words_are_zeros(name):
    reader, batch = made(name), toy_batch()
    words = reader.encode(batch)
    mask = torch.ones(batch.tokens.shape)
    mask[:, 1] = 0
    found = reader(words, {"text": mask})
    blank = torch.where(torch.arange(6) == 1, 0, batch.tokens)
    if name != "bag":  # the embedding of padding is the blank; a bag has no place for one
        other = reader(reader.encode(replace(batch, tokens=blank)))
        torch.testing.assert_close(found, other)
    else:
        assert found.sum() < reader(words).sum()
    assert (found != reader(words)).any()
    silent = replace(batch, token_mask=torch.zeros_like(batch.token_mask))
    assert (reader(reader.encode(silent)) == 0).all()


@pytest.mark.parametrize("name", MAKE)
def test_a_reader_comes_back_from_its_values(name):
    reader = made(name)
    assert isinstance(reader, QuestionReader)
    again = question_reader_from(reader.config())
    assert type(again) is type(reader)
    assert again.config() == reader.config()


def test_what_cannot_be_read_is_refused():
    with pytest.raises(BadInput, match="kind 'sideways' is not one of forwards, backwards, bag"):
        question_reader_from({"kind": "sideways"})
    with pytest.raises(ValueError, match="needs a batch with tokens"):
        made("bag").encode(replace(toy_batch(), tokens=None))
