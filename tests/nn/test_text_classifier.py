"""Text classifiers: equations by hand, padding, LSTM variants, contract."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, words
from overt.nn.text_classifier import (
    StructuredClassifier,
    TextClassifier,
    WordAttention,
    WordFeatures,
    redundancy_penalty,
    run_lstm,
    run_lstm_unpacked,
)
from overt.testing import check_model, toy_batch


def small(hops: int = 3) -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(vocabulary=10, classes=3, width=0.05, hops=hops)


def slow_attention(attend, states, present):
    """Compute equations 4 to 6 without torch: A = softmax(W2 tanh(W1 H^T)), M = A H."""
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
    """Compute equation 8, the squared Frobenius norm of A A^T - I."""
    total = 0.0
    for i, one in enumerate(weights):
        for j, two in enumerate(weights):
            same = sum(a * b for a, b in zip(one, two, strict=True))
            total += (same - (i == j)) ** 2
    return total


def test_text_classifier_passes_check_model():
    check_model(small, toy_batch())
    check_model(lambda: small(hops=1), toy_batch())


def test_attention_follows_equations_4_to_6_and_8(generator):
    attend = WordAttention(width=5, hidden=4, hops=3).double()
    states = torch.randn(4, 6, 5, dtype=torch.float64, generator=generator)
    batch = toy_batch()
    text = WordFeatures(states, batch.token_mask, batch.text)
    summary, attention = attend(states, text)
    assert summary.dtype == attention.weights.dtype == torch.float64
    penalties = redundancy_penalty(attention).detach()
    for b in range(4):
        weights, expected = slow_attention(attend, states[b], batch.token_mask[b])
        length = len(weights[0])
        found = attention.weights[b, 0, :, 0]
        torch.testing.assert_close(found[:, :length].tolist(), weights, rtol=1e-9, atol=1e-12)
        assert not found[:, length:].any()
        torch.testing.assert_close(summary[b].tolist(), expected, rtol=1e-9, atol=1e-12)
        assert float(penalties[b]) == pytest.approx(slow_redundancy(weights), rel=1e-9)


def test_redundancy_penalty_by_hand():
    """Different single words cost 0, the same word costs 2, uniform hops are computed by hand."""
    hops = torch.tensor([[[1.0, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 1, 0]], [[1 / 3] * 3] * 2])
    attention = AttentionMap(hops[:, None, :, None], words(3))
    even = 2 * (1 / 3 - 1) ** 2 + 2 * (1 / 3) ** 2
    torch.testing.assert_close(redundancy_penalty(attention), torch.tensor([0.0, 2.0, even]))


def test_redundancy_penalty_separates_hops():
    scores = torch.tensor([[2.0, 0, 0], [1.5, 0, 0]], requires_grad=True)
    for _ in range(200):
        attention = AttentionMap.from_scores(scores[None, None, :, None], words(3))
        (gradient,) = torch.autograd.grad(redundancy_penalty(attention).sum(), scores)
        scores = (scores - gradient).detach().requires_grad_()
    first, second = attention.weights[0, 0, :, 0]
    assert float((first @ second).detach()) < 0.05


def test_masked_words_are_blank_and_padding_is_unchanged():
    values = torch.arange(8.0).view(1, 4, 2)
    text = WordFeatures(values, torch.tensor([[True, True, True, False]]), None)
    blank = torch.tensor([-1.0, -2.0])
    masked = text.masked({"text": torch.tensor([[1.0, 0.0, 0.5, 0.0]])}, blank)
    assert masked.tolist() == [[[0, 1], [-1, -2], [1.5, 1.5], [6, 7]]]
    assert text.masked(None, blank) is values and text.masked({"image": blank}, blank) is values


def test_prediction_does_not_depend_on_padding():
    """The LSTM reads padding in neither direction."""
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
            found.attention_to("text").weights[0],
            whole.attention_to("text").weights[at, ..., :length],
            rtol=1e-5,
            atol=1e-6,
        )


def test_classifier_agrees_with_lstm_cells_by_hand():
    """Run one LSTM cell per direction over one text, then the slow attention above."""
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


def test_text_without_words_has_zero_attention_and_a_finite_prediction():
    batch = toy_batch()
    present = batch.token_mask.clone()
    present[1] = False
    silent = replace(batch, token_mask=present)
    net = small().eval()
    output = net(silent)
    assert not output.attention_to("text").weights[1].any()
    assert output.prediction.isfinite().all()
    other = net(replace(silent, tokens=batch.tokens.roll(1, 0) * ~present + batch.tokens * present))
    assert torch.equal(other.prediction[1], output.prediction[1])
    output.prediction.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_bfloat16_model_has_float32_attention():
    net = small().to(torch.bfloat16).eval()
    output = net(toy_batch())
    assert output.prediction.dtype == torch.bfloat16
    assert output.attention_to("text").weights.dtype == torch.float32


def test_batch_without_tokens_raises():
    with pytest.raises(ValueError, match="tokens"):
        small()(replace(toy_batch(), tokens=None, token_mask=None, text=None))


# --- the published classifier


def structured(**more) -> StructuredClassifier:
    torch.manual_seed(0)
    sizes = {"word": 5, "state": 4, "hidden": 6, "hops": 3, "joint": 7, **more}
    return StructuredClassifier(vocabulary=10, classes=3, **sizes)


def test_structured_classifier_passes_check_model_and_is_saved(tmp_path):
    check_model(structured, toy_batch())
    net = structured(dropout=0.2).eval()
    net.save_pretrained(tmp_path / "net")
    back = StructuredClassifier.from_pretrained(tmp_path / "net")
    assert torch.equal(back(toy_batch()).prediction, net(toy_batch()).prediction)
    assert back.config() == net.config() and net.config()["dropout"] == 0.2


def test_the_structured_classifier_has_the_published_sizes():
    with torch.device("meta"):
        net = StructuredClassifier(vocabulary=100, classes=6)
    shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
    assert shapes["embed.weight"] == (100, 300) and shapes["read.weight_hh_l0"] == (4 * 256, 256)
    assert shapes["attend.inner.weight"] == (350, 512) and shapes["attend.outer.weight"] == (
        30,
        350,
    )
    assert shapes["decision.0.weight"] == (2000, 30 * 512)
    assert shapes["decision.1.weight"] == (6, 2000)
    assert [type(one) for one in net.decision] == [nn.Linear, nn.Linear]


def test_structured_classifier_follows_its_equations():
    """Compute states word by word in both directions, equations 4 to 6, two linear layers."""
    net, batch = structured().double().eval(), toy_batch()
    embedded = net.encode(batch).values
    cells = [nn.LSTMCell(5, 4).double() for _ in range(2)]
    for cell, end in zip(cells, ("l0", "l0_reverse"), strict=True):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(cell, name, getattr(net.read, f"{name}_{end}"))
    found = net(batch)
    for b in range(len(batch)):
        n = int(batch.token_mask[b].sum())
        runs = []
        for cell, order in zip(cells, (range(n), reversed(range(n))), strict=True):
            state, run = None, {}
            for at in order:
                state = cell(embedded[b, at][None], state)
                run[at] = state[0][0]
            runs.append(run)
        states = torch.stack([torch.cat([runs[0][at], runs[1][at]]) for at in range(n)])
        weights, summary = slow_attention(net.attend, states, torch.ones(n, dtype=torch.bool))
        torch.testing.assert_close(found.attention[0].weights[b, 0, :, 0, :n].tolist(), weights)
        first, second = net.decision
        joint = first.weight @ torch.tensor(summary).double().flatten() + first.bias
        torch.testing.assert_close(found.prediction[b], second.weight @ joint + second.bias)


def test_finding_13_masks_do_not_change_padding():
    """The published code also overwrites the padding."""
    net, batch = structured().eval(), toy_batch()
    features = net.encode(batch)
    masked = features.masked({"text": torch.zeros_like(batch.token_mask).float()}, net.blank + 7)
    there = batch.token_mask
    assert torch.equal(masked[~there], features.values[~there])
    assert (masked[there] == 7).all()
    mask = there.float()  # keeps every word; its values at padding must not matter
    for beyond in (0.0, 1.0):
        mask = torch.where(there, 1.0, beyond)
        found = net.decide(features, {"text": mask})
        assert torch.equal(found.prediction, net.decide(features).prediction)


def test_last_cell_states_equal_those_without_padding():
    lstm = nn.LSTM(3, 4, batch_first=True)
    values = torch.randn(3, 5, 3)
    present = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    states, cells = run_lstm(lstm, values, present)
    for b, n in enumerate([5, 2]):
        alone, (_, cell) = lstm(values[b : b + 1, :n])
        torch.testing.assert_close(states[b, :n], alone[0])
        torch.testing.assert_close(cells[b], cell[0, 0])
    assert not cells[2].any()


@pytest.mark.parametrize("ways", [1, 2])
def test_unpacked_lstm_equals_packed_lstm(ways):
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=ways == 2).double()
    values = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    present = torch.arange(6) < torch.tensor([[6], [2], [1]])
    found = []
    for read in (run_lstm, run_lstm_unpacked):
        states, cells = read(lstm, values, present)
        total = states.square().sum() + cells.sin().sum()
        slopes = torch.autograd.grad(total, [values, *lstm.parameters()])
        found.append([states, cells, *slopes])
    for packed, stepped in zip(*found, strict=True):
        torch.testing.assert_close(packed, stepped)


def test_unpacked_lstm_gives_zeros_for_empty_texts():
    lstm = nn.LSTM(5, 4, batch_first=True)
    states, cells = run_lstm_unpacked(
        lstm, torch.ones(2, 3, 5), torch.zeros(2, 3, dtype=torch.bool)
    )
    assert not states.any() and not cells.any()


def test_unpacked_lstm_of_several_layers_raises():
    lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True)
    with pytest.raises(ValueError, match="2 layers"):
        run_lstm_unpacked(lstm, torch.ones(1, 2, 5), torch.ones(1, 2, dtype=torch.bool))


def test_pooled_features_are_the_mean_of_words_without_padding():
    values = torch.tensor([[[1.0, 2], [3, 4], [100, 100]], [[5, 6], [0, 0], [0, 0]]])
    present = torch.tensor([[True, True, False], [False, False, False]])
    assert WordFeatures(values, present, None).pooled().tolist() == [[2, 3], [0, 0]]
