"""Question encoders: LSTM gates by hand, bag of words, removed words, configs."""

from dataclasses import replace

import pytest
import torch

from overt.errors import UserError
from overt.nn.vqa.question_encoders import (
    BagOfWordsEncoder,
    LSTMQuestionEncoder,
    QuestionEncoder,
    ReversedLSTMQuestionEncoder,
    question_encoder_from_config,
)
from overt.testing import toy_batch

ENCODERS = {
    "forwards": lambda: LSTMQuestionEncoder(10, word=4, state=5),
    "backwards": lambda: ReversedLSTMQuestionEncoder(10, word=4, state=5),
    "bag": lambda: BagOfWordsEncoder(10),
}


def make_encoder(name):
    torch.manual_seed(0)
    return ENCODERS[name]()


def slow_lstm(reader, words):
    """Compute an LSTM gate by gate over the embeddings of one question."""
    layer = reader.read
    h = c = torch.zeros(layer.hidden_size)
    for word in words:
        gates = layer.weight_ih_l0 @ word + layer.bias_ih_l0 + layer.weight_hh_l0 @ h
        i, f, g, o = (gates + layer.bias_hh_l0).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@pytest.mark.parametrize("name", ["forwards", "backwards"])
def test_lstm_question_encoder_agrees_with_lstm_gates_by_hand(name):
    reader, batch = make_encoder(name), toy_batch()
    found = reader(reader.encode(batch))
    for row, (tokens, there) in enumerate(zip(batch.tokens, batch.token_mask, strict=True)):
        words = reader.embed(tokens[there])
        words = words.flip(0) if name == "backwards" else words
        torch.testing.assert_close(found[row], slow_lstm(reader, words))


def test_bag_of_words_marks_the_words_of_the_question():
    batch = toy_batch()
    reader = make_encoder("bag")
    found = reader(reader.encode(batch))
    for row, (tokens, there) in enumerate(zip(batch.tokens, batch.token_mask, strict=True)):
        words = set(tokens[there].tolist())
        assert found[row].tolist() == [float(at in words) for at in range(10)]
    assert not list(reader.parameters())


@pytest.mark.parametrize("name", ENCODERS)
def test_removed_words_are_ignored_and_empty_questions_are_zeros(name):
    reader, batch = make_encoder(name), toy_batch()
    words = reader.encode(batch)
    mask = torch.ones(batch.tokens.shape)
    mask[:, 1] = 0
    found = reader(words, {"text": mask})
    blank = torch.where(torch.arange(6) == 1, 0, batch.tokens)
    if name != "bag":  # the embedding of padding is the blank; a bag of words has none
        other = reader(reader.encode(replace(batch, tokens=blank)))
        torch.testing.assert_close(found, other)
    else:
        assert found.sum() < reader(words).sum()
    assert (found != reader(words)).any()
    silent = replace(batch, token_mask=torch.zeros_like(batch.token_mask))
    assert (reader(reader.encode(silent)) == 0).all()


@pytest.mark.parametrize("name", ENCODERS)
def test_question_encoder_is_rebuilt_from_its_config(name):
    reader = make_encoder(name)
    assert isinstance(reader, QuestionEncoder)
    again = question_encoder_from_config(reader.config())
    assert type(again) is type(reader)
    assert again.config() == reader.config()


def test_unknown_kind_and_missing_tokens_raise():
    with pytest.raises(UserError, match=r"'sideways'.*forwards.*bag"):
        question_encoder_from_config({"kind": "sideways"})
    with pytest.raises(ValueError, match="tokens"):
        make_encoder("bag").encode(replace(toy_batch(), tokens=None))
