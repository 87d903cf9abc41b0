import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, words
from overt.models.text import TextClassifier, WordAttention, Words, redundancy
from overt.testing import check_model, toy_batch


def small(hops: int = 3) -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(vocabulary=10, classes=3, width=0.05, hops=hops)


def slow_attention(attend, states, present):
    """Equations 4 to 6 of one text, without torch: A = softmax(W2 tanh(W1 H^T)), M = A H."""
    inner, outer = attend.inner.weight.tolist(), attend.outer.weight.tolist()
    states = [
        state for state, there in zip(states.tolist(), present.tolist(), strict=True) if there
    ]
    hidden = [
        [math.tanh(sum(w * x for w, x in zip(row, state, strict=True))) for row in inner]
        for state in states
    ]
    weights, summary = [], []
    for row in outer:
        scores = [sum(w * x for w, x in zip(row, one, strict=True)) for one in hidden]
        total = sum(math.exp(score) for score in scores)
        weights.append([math.exp(score) / total for score in scores])
        summary.append([sum(w * s[d] for w, s in zip(weights[-1], states, strict=True))
                        for d in range(len(states[0]))])  # fmt: skip
    return weights, summary


def slow_redundancy(weights):
    """Equation 8: the squared Frobenius norm of A A^T - I."""
    total = 0.0
    for i, one in enumerate(weights):
        for j, two in enumerate(weights):
            same = sum(a * b for a, b in zip(one, two, strict=True))
            total += (same - (i == j)) ** 2
    return total


def test_it_keeps_the_contract():
    check_model(small, toy_batch())
    check_model(lambda: small(hops=1), toy_batch())


def test_attention_agrees_with_equations_4_to_6_and_8(generator):
    attend = WordAttention(width=5, hidden=4, hops=3).double()
    states = torch.randn(4, 6, 5, dtype=torch.float64, generator=generator)
    batch = toy_batch()
    text = Words(states, batch.token_mask, batch.text)
    summary, attention = attend(states, text)
    assert summary.dtype == attention.weights.dtype == torch.float64
    penalties = redundancy(attention).detach()
    for b in range(4):
        weights, expected = slow_attention(attend, states[b], batch.token_mask[b])
        length = len(weights[0])
        found = attention.weights[b, 0, :, 0]
        torch.testing.assert_close(found[:, :length].tolist(), weights, rtol=1e-9, atol=1e-12)
        assert not found[:, length:].any()
        torch.testing.assert_close(summary[b].tolist(), expected, rtol=1e-9, atol=1e-12)
        assert float(penalties[b]) == pytest.approx(slow_redundancy(weights), rel=1e-9)


def test_the_penalty_by_hand():
    """Hops that look at different single words cost nothing; the same one, 2; all even, by hand."""
    hops = torch.tensor([[[1.0, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 1, 0]], [[1 / 3] * 3] * 2])
    attention = AttentionMap(hops[:, None, :, None], words(3))
    even = 2 * (1 / 3 - 1) ** 2 + 2 * (1 / 3) ** 2
    torch.testing.assert_close(redundancy(attention), torch.tensor([0.0, 2.0, even]))


def test_the_penalty_pushes_hops_apart():
    scores = torch.tensor([[2.0, 0, 0], [1.5, 0, 0]], requires_grad=True)
    for _ in range(200):
        attention = AttentionMap.from_scores(scores[None, None, :, None], words(3))
        (gradient,) = torch.autograd.grad(redundancy(attention).sum(), scores)
        scores = (scores - gradient).detach().requires_grad_()
    first, second = attention.weights[0, 0, :, 0]
    assert float((first @ second).detach()) < 0.05


def test_masked_words_are_blank_and_padding_is_left_alone():
    values = torch.arange(8.0).view(1, 4, 2)
    text = Words(values, torch.tensor([[True, True, True, False]]), None)
    blank = torch.tensor([-1.0, -2.0])
    masked = text.masked({"text": torch.tensor([[1.0, 0.0, 0.5, 0.0]])}, blank)
    assert masked.tolist() == [[[0, 1], [-1, -2], [1.5, 1.5], [6, 7]]]
    assert text.masked(None, blank) is values and text.masked({"image": blank}, blank) is values


def test_a_text_is_read_the_same_in_any_batch():
    """Padding never enters the LSTM, from either side."""
    net, batch = small().eval(), toy_batch(6)
    whole = net(batch)
    for at in range(6):
        length = int(batch.token_mask[at].sum())
        alone = replace(
            batch.select(torch.tensor([at])),
            tokens=batch.tokens[at : at + 1, :length],
            token_mask=batch.token_mask[at : at + 1, :length],
            text=None,
        )
        found = net(alone)
        torch.testing.assert_close(found.prediction[0], whole.prediction[at], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found.looking_at("text").weights[0],
            whole.looking_at("text").weights[at, ..., :length],
            rtol=1e-5,
            atol=1e-6,
        )


def test_the_classifier_agrees_with_a_reading_word_by_word():
    """An LSTM cell each way, run by hand over one text, and the slow attention above."""
    net, batch = small().double().eval(), toy_batch(1)
    embedded = net.embed(batch.tokens)[0, : int(batch.token_mask.sum())]
    size, ways = net.read.hidden_size, []
    for suffix, inputs in (("", embedded), ("_reverse", embedded.flip(0))):
        cell = nn.LSTMCell(net.read.input_size, size).double()
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(cell, name, getattr(net.read, f"{name}_l0{suffix}"))
        state = (torch.zeros(1, size).double(), torch.zeros(1, size).double())
        out = []
        for one in inputs:
            state = cell(one[None], state)
            out.append(state[0][0])
        ways.append(torch.stack(out))
    states = torch.cat([ways[0], ways[1].flip(0)], dim=1)
    _, summary = slow_attention(net.attend, states, torch.ones(len(states), dtype=torch.bool))
    expected = net.decision(torch.tensor(summary).double().flatten())
    torch.testing.assert_close(net(batch).prediction[0], expected)


def test_a_text_without_words_has_no_attention_and_an_answer():
    batch = toy_batch()
    present = batch.token_mask.clone()
    present[1] = False
    silent = replace(batch, token_mask=present)
    net = small().eval()
    output = net(silent)
    assert not output.looking_at("text").weights[1].any()
    assert output.prediction.isfinite().all()
    other = net(replace(silent, tokens=batch.tokens.roll(1, 0) * ~present + batch.tokens * present))
    assert torch.equal(other.prediction[1], output.prediction[1])
    output.prediction.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_half_precision_is_attended_in_full():
    net = small().to(torch.bfloat16).eval()
    output = net(toy_batch())
    assert output.prediction.dtype == torch.bfloat16
    assert output.looking_at("text").weights.dtype == torch.float32


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(ValueError, match="needs a batch with tokens"):
        small()(replace(toy_batch(), tokens=None, token_mask=None, text=None))
