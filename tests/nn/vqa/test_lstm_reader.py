"""LSTM question encoder with attention: states by hand, removed words."""

import torch
from torch import nn

from overt.nn.vqa.lstm_reader import AttentiveQuestionEncoder
from overt.testing import toy_batch


def reader(hops: int) -> AttentiveQuestionEncoder:
    torch.manual_seed(0)
    return AttentiveQuestionEncoder(vocabulary=10, word=4, size=5, hops=hops).double().eval()


def slow_read(
    net: AttentiveQuestionEncoder, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute states word by word, and the cell state after the last."""
    cell = nn.LSTMCell(4, 5).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(net.read, f"{name}_l0"))
    state, states = None, []
    for word in words:
        state = cell(torch.tanh(word)[None], state)
        states.append(state[0][0])
    return torch.stack(states), state[1][0]


def test_question_without_hops_is_the_cell_state():
    net, batch = reader(0), toy_batch()
    words = net.words(batch)
    question, maps = net(words)
    assert maps == ()
    for b in range(4):
        _, cells = slow_read(net, words.values[b, : int(batch.token_mask[b].sum())])
        torch.testing.assert_close(question[b], cells)


def test_question_with_hops_adds_the_mean_of_their_summaries():
    net, batch = reader(3), toy_batch()
    words = net.words(batch)
    question, (attention,) = net(words)
    assert attention.weights.shape == (4, 1, 3, 1, 6)
    for b in range(4):
        n = int(batch.token_mask[b].sum())
        states, cells = slow_read(net, words.values[b, :n])
        weights = attention.weights[b, 0, :, 0, :n].mean(dim=0)
        torch.testing.assert_close(question[b], cells + weights @ states)


def test_removed_words_are_blank_and_padding_is_unchanged():
    net, batch = reader(1), toy_batch()
    words = net.words(batch)
    with torch.no_grad():
        net.blank.fill_(0.5)
    mask = torch.ones(4, 6)
    mask[0, 1] = 0
    question, _ = net(words, {"text": mask})
    by_hand = words.values.clone()
    by_hand[0, 1] = 0.5
    states, cells = slow_read(net, by_hand[0, : int(batch.token_mask[0].sum())])
    summary, _ = net.weigh(states[None], net.words(batch.select(torch.tensor([0]))))
    torch.testing.assert_close(question[0], cells + summary[0, 0])
    whole, _ = net(words)
    torch.testing.assert_close(question[1:], whole[1:])
