"""One call gives any part of its weights without the rest."""

import dataclasses
import inspect
import math
from enum import Enum

import pytest
import torch

from overt.attention import AttentionMap, Kind
from overt.capture.block_scores import ALL, take_positions
from overt.capture.call import Call, MaterializedCall, QKCall, Route, default_scale
from overt.capture.trace import AttentionTrace


def projected(b=2, h=4, g=2, q=5, k=7, d=6, **more):
    torch.manual_seed(0)
    query = torch.randn(b, h, q, d, dtype=torch.float64, requires_grad=True)
    key = torch.randn(b, g, k, d, dtype=torch.float64, requires_grad=True)
    return QKCall(query, key, 1 / math.sqrt(d), **more)


def slow(source, sample, head, i, j):
    """One score, without matrices."""
    group = head // (source.query.shape[1] // source.key.shape[1])
    return (source.query[sample, head, i] @ source.key[sample, group, j]).item() * source.scale


def test_scores_are_the_scaled_products_of_the_right_heads():
    source = projected()
    scores = source.scores()
    for sample, head, i, j in [(0, 0, 0, 0), (1, 1, 4, 6), (0, 2, 3, 1), (1, 3, 2, 5)]:
        assert scores[sample, head, i, j].item() == pytest.approx(slow(source, sample, head, i, j))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_block_is_a_part_of_the_whole(causal, sinks, softcap):
    extra = {"sinks": torch.randn(4, dtype=torch.float64)} if sinks else {}
    source = projected(causal=causal, softcap=softcap, **extra)
    rows = torch.tensor([[0, 3], [4, 1]])
    whole = source.weights()
    part = source.weights(rows, slice(2, 6))
    for sample in range(2):
        expected = whole[sample][:, rows[sample]][:, :, 2:6]
        torch.testing.assert_close(part[sample], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(source.log_weights(rows, slice(2, 6)).exp(), part)


def test_sinks_take_their_share_and_give_nothing():
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    source = projected(sinks=sinks)
    scores = source.scores()
    with_sink = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 5, 1)], dim=-1)
    torch.testing.assert_close(source.weights(), with_sink.softmax(-1)[..., :-1])
    assert source.kind is Kind.SUBPROBABILITY


def test_a_row_that_sees_nothing_is_zero_with_a_finite_gradient():
    allowed = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    allowed[1, :, 2] = False
    source = projected(allowed=allowed)
    weights = source.weights()
    assert not weights[1, :, 2].any()
    weights.square().sum().backward()
    assert source.query.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7)])
def test_biases_of_any_shape_are_cut_with_the_block(shape):
    bias = torch.randn(shape, dtype=torch.float64)
    source = projected(bias=bias)
    rows, keys = torch.tensor([[1, 2], [0, 4]]), torch.tensor([[6, 0, 3], [1, 1, 5]])
    expected = projected().scores() + bias
    found = source.scores(rows, keys)
    for sample in range(2):
        part = expected[sample][:, rows[sample]][:, :, keys[sample]]
        torch.testing.assert_close(found[sample], part)


def test_causal_counts_from_the_first_key_as_sdpa_does():
    source = projected(causal=True)
    value = torch.randn(2, 2, 7, 3, dtype=torch.float64)
    fused = torch.nn.functional.scaled_dot_product_attention(
        source.query, source.key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(source.weights() @ value.repeat_interleave(2, dim=1), fused)


def test_heads_are_chosen_with_their_keys_and_biases():
    source = projected(bias=torch.randn(4, 5, 7, dtype=torch.float64))
    torch.testing.assert_close(source.heads([3, 0]).weights(), source.weights()[:, [3, 0]])


def test_score_functions_see_the_true_positions():
    source = projected(
        score_mod=lambda score, b, h, q, k: score + b + 10 * h + 100 * q - k,
        mask_mod=lambda b, h, q, k: k >= q,
    )
    rows = torch.tensor([[4], [2]])
    scores = source.scores(rows, slice(3, 6)).detach()
    assert float(scores[0, 1, 0, 2]) == pytest.approx(slow(source, 0, 1, 4, 5) + 10 + 400 - 5)
    assert float(scores[0, 1, 0, 0]) == -math.inf
    assert float(scores[1, 3, 0, 0]) == pytest.approx(slow(source, 1, 3, 2, 3) + 31 + 200 - 3)
    with pytest.raises(ValueError, match="score_mod"):
        source.heads([0])


def test_arithmetic_is_at_least_float32_also_under_autocast():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    exact = QKCall(query.double(), key.double(), 0.5).weights()
    with torch.autocast("cpu", torch.bfloat16):
        found = QKCall(query, key, 0.5).weights()
        half = QKCall(query.bfloat16(), key.bfloat16(), 0.5).weights()
    assert found.dtype == half.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)


def test_written_weights_with_a_sink_cut_off():
    logits = torch.randn(2, 3, 4, 6)
    used = logits.softmax(-1)[..., :-1]
    source = MaterializedCall(used, Kind.SUBPROBABILITY, logits, dropped=1)
    torch.testing.assert_close(source.log_weights().exp(), used)
    torch.testing.assert_close(source.scores(), logits[..., :-1])
    assert source.heads([2]).shape == (2, 1, 4, 5)


def test_mixed_weights_have_no_logarithm_and_amounts_have():
    used = torch.randn(1, 1, 2, 3)
    with pytest.raises(ValueError, match="after the softmax"):
        MaterializedCall(used, Kind.SIGNED).scores()
    amounts = MaterializedCall(torch.tensor([[[[0.0, 2.0]]]]), Kind.AMOUNT)
    assert amounts.scores()[0, 0, 0].tolist() == [-math.inf, pytest.approx(math.log(2))]


def call(source, **more):
    return Call("m", torch.nn.Identity(), source, Route.SDPA, cross=False, **more)


def test_visible_reads_masks_of_every_form():
    hidden = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    low = torch.zeros(2, 1, 1, 7).masked_fill(hidden, torch.finfo(torch.float32).min)
    inf = torch.zeros(2, 1, 1, 7).masked_fill(hidden, -torch.inf)
    expected = ~hidden[:, 0]
    for source in (projected(allowed=~hidden), projected(bias=low), projected(bias=inf)):
        assert call(source).visible().tolist() == expected.tolist()
    logits = (torch.randn(2, 3, 5, 7) + low).float()
    written = call(MaterializedCall(logits.softmax(-1), Kind.PROBABILITY, logits))
    assert written.visible().tolist() == expected.expand(2, 5, 7).tolist()
    assert call(projected()).visible() is None


def test_a_row_of_low_scores_is_spread_evenly_and_all_of_it_is_seen():
    low = torch.full((2, 1, 5, 7), torch.finfo(torch.float32).min)
    assert call(projected(bias=low)).visible().all()


@pytest.mark.parametrize("low", [-math.inf, -1e9])
def test_keys_hidden_by_a_score_function_are_hidden(low):
    """FlexAttention without a mask function, as people write sliding windows."""

    def window(score, b, h, q, k):
        return torch.where((q - k).abs() <= 1, score, low)

    call = Call("x", torch.nn.Identity(), projected(q=7, score_mod=window), Route.FLEX, False)
    wanted = torch.ones(7, 7, dtype=torch.bool).triu(-1).tril(1)
    assert torch.equal(call.visible(), wanted.expand(2, 7, 7))
    rows, keys = torch.tensor([[0, 3], [6, 1]]), slice(2, 5)
    part = call.visible(rows, keys)
    for sample in range(2):
        assert torch.equal(part[sample], wanted[rows[sample]][:, keys])


def test_a_score_function_that_hides_nothing_is_no_mask():
    source = projected(score_mod=lambda score, b, h, q, k: score - 0.5 * (q - k).abs())
    assert Call("x", torch.nn.Identity(), source, Route.FLEX, False).visible() is None


def test_a_score_function_can_make_a_call_causal():
    source = projected(q=7, score_mod=lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf))
    assert Call("x", torch.nn.Identity(), source, Route.FLEX, False).causal
    window = projected(q=7, score_mod=lambda s, b, h, q, k: torch.where(q >= k - 1, s, -torch.inf))
    assert not Call("x", torch.nn.Identity(), window, Route.FLEX, False).causal


def test_a_key_hidden_by_a_low_score_is_hidden_in_a_block_without_the_others():
    """All keys of the block are hidden, and the row has others: it is not spread evenly."""
    bias = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    bias[..., 4:] = -1e9
    call = Call("x", torch.nn.Identity(), projected(bias=bias), Route.SDPA, False)
    assert not call.visible(ALL, slice(4, 7)).any()
    assert call.visible(ALL, slice(0, 4)).all()


def test_causal_is_found_in_a_mask_too():
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    assert call(projected(k=5, allowed=lower)).causal
    assert not call(projected(k=5)).causal
    assert call(projected(causal=True)).causal


def test_a_head_that_is_not_there_is_said():
    with pytest.raises(ValueError, match=r"0 to 3.*\[4\]"):
        call(projected()).heads([4])
    torch.testing.assert_close(
        call(projected()).heads([-1]).weights(), projected().weights()[:, 3:]
    )


def test_take_reads_the_first_where_a_position_is_absent():
    values = torch.arange(6.0).reshape(1, 1, 3, 2)
    assert take_positions(values, torch.tensor([[2, -1]]), 2).tolist() == [[[[4, 5], [0, 1]]]]
    assert take_positions(values, ALL, 2) is values
    assert default_scale(torch.zeros(1, 16)) == 0.25


def test_gradients_of_a_block_are_those_of_the_whole_map():
    source = projected(causal=True)
    rows = torch.tensor([[1, 3], [2, 4]])
    loss = source.weights(rows, slice(0, 3)).square().sum()
    found = torch.autograd.grad(loss, (source.query, source.key))
    whole = source.weights()
    loss = torch.stack([whole[s][:, rows[s]][:, :, :3].square().sum() for s in range(2)]).sum()
    for mine, theirs in zip(
        found, torch.autograd.grad(loss, (source.query, source.key)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_row_hidden_by_a_bias_gives_a_block_no_bad_gradient():
    bias = torch.zeros(2, 1, 5, 7, dtype=torch.float64)
    bias[1, :, 0] = -torch.inf
    source = projected(bias=bias)
    source.weights(ALL, slice(1, 4)).sum().backward()
    assert source.query.grad.isfinite().all() and source.key.grad.isfinite().all()
    assert source.query.grad.any() and not source.query.grad[1, :, 0].any()


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_a_key_is_hidden_by_whatever_low_score_a_model_writes(low):
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    bias = torch.zeros(5, 5).masked_fill(later, low)
    fused = projected(q=5, k=5, bias=bias)
    logits = torch.randn(2, 4, 5, 5) + bias
    written = MaterializedCall(logits.softmax(-1), Kind.PROBABILITY, logits)
    for source in (fused, written):
        call = Call("one", torch.nn.Identity(), source, Route.SDPA, False)
        assert torch.equal(call.visible(), ~later.expand(2, 5, 5)) and call.causal


def test_chosen_heads_have_their_own_values_and_outputs():
    source = projected()
    value, output = torch.randn(2, 2, 7, 3), torch.randn(2, 4, 5, 3)
    call = Call("one", torch.nn.Identity(), source, Route.SDPA, False, 0, value, output)
    assert call.head_indices is None
    some = call.heads([3, 0])
    assert some.head_indices == (3, 0) and some.heads([1]).head_indices == (0,)
    assert torch.equal(some.value, value[:, [1, 0]])
    assert torch.equal(some.output, output[:, [3, 0]])
    assert torch.equal(some.weights(), call.weights()[:, [3, 0]])


def test_padding_that_is_spread_evenly_does_not_hide_that_a_call_is_causal():
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    hidden = later.expand(2, 1, 5, 5).clone()
    hidden[0, :, :, :2] = True  # padding on the left: its own rows see nothing
    low = torch.finfo(torch.float32).min
    bias = torch.zeros(2, 1, 5, 5).masked_fill(hidden, low)
    logits = torch.randn(2, 4, 5, 5) + bias
    written = MaterializedCall(logits.softmax(-1), Kind.PROBABILITY, logits)
    for source in (projected(q=5, k=5, bias=bias), written):
        call = Call("one", torch.nn.Identity(), source, Route.SDPA, False)
        assert call.visible()[0, 0].all() and call.causal
    bias[1, :, 3, 4] = 0
    call = Call("one", torch.nn.Identity(), projected(q=5, k=5, bias=bias), Route.SDPA, False)
    assert not call.causal


def test_defaults_are_such_as_the_oldest_pytorch_compiles() -> None:
    """It breaks a graph at any other default of a method of what was made in that graph."""
    simple = type(None), bool, int, float, str, Enum, dataclasses._HAS_DEFAULT_FACTORY_CLASS
    for kind in (Call, QKCall, MaterializedCall, AttentionTrace, AttentionMap):
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if isinstance(inspect.getattr_static(kind, name), staticmethod):
                continue  # found by the name of its class
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            wrong = [one for one in defaults if not isinstance(one, simple)]
            assert not wrong, f"{kind.__name__}.{name} has {wrong}"
