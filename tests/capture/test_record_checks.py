"""Records still hold what the model computed with, or the block ends with an error."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture import UncapturedAttentionError, watch
from overt.capture.call import MaterializedCall, QKCall
from overt.capture.record_checks import (
    check_last_row,
    failed_checks,
    modified_tensors,
    required_for_weights,
    tensor_versions,
)
from tests.capture.toys import FusedAttention, Stack


class Toy(FusedAttention):
    """Attention whose arithmetic a test writes: `attend(query, key, value)`."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x, mask=None):
        parts = [
            part(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        return self.attend(*parts).transpose(1, 2).flatten(2)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def run(attend, mode=torch.no_grad):
    torch.manual_seed(0)
    model = Stack(Toy(attend)).eval()
    with mode(), watch(model) as trace:
        model(torch.randn(2, 6, 16))
    return trace


def agrees(trace) -> None:
    """`block`, `map` and `log_weights` show the same weights, which give the output."""
    call = trace.calls[0]
    every = torch.arange(6).expand(2, 6)
    torch.testing.assert_close(trace.block(every, every).weights, trace.map().weights)
    if call.kind is not Kind.SIGNED:
        torch.testing.assert_close(call.log_weights().exp(), call.weights())
    torch.testing.assert_close(call.weights() @ call.value, call.output)


def mask_filled_afterwards(q, k, v):
    mask = torch.ones(6, 6, dtype=torch.bool)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    mask.tril_()
    return out


def bias_filled_afterwards(q, k, v):
    bias = torch.zeros(1, 1, 6, 6)
    out = F.scaled_dot_product_attention(q, k, v, bias.expand(2, 4, 6, 6))
    bias[..., 0] = -1e9
    return out


def weights_zeroed_afterwards(q, k, v):
    weights = scores(q, k).softmax(-1)
    out = weights @ v
    weights[..., 3:, :] = 0
    return out


def logits_zeroed_afterwards(q, k, v):
    logits = scores(q, k)
    out = logits.softmax(-1) @ v
    logits.zero_()
    return out


@pytest.mark.parametrize(
    ("attend", "what"),
    [
        (mask_filled_afterwards, "masks"),
        (bias_filled_afterwards, "masks"),
        (weights_zeroed_afterwards, "weights"),
        (logits_zeroed_afterwards, "logits"),
    ],
)
def test_what_shaped_the_weights_and_was_changed_afterwards_is_refused(attend, what):
    with pytest.raises(UncapturedAttentionError, match=rf"{what} of 'layers.0' .*in place.*each="):
        run(attend)


@pytest.mark.parametrize(
    "attend",
    [
        mask_filled_afterwards,
        bias_filled_afterwards,
        weights_zeroed_afterwards,
        logits_zeroed_afterwards,
    ],
)
def test_inference_mode_counts_no_changes_so_tensors_are_copied(attend):
    agrees(run(attend, torch.inference_mode))


def test_outputs_that_are_scaled_afterwards_are_not_shown():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).mul_(3)

    trace = run(attend)
    assert trace.calls[0].output is None and trace.calls[0].value is not None
    assert "outputs not available (modified in place later): 1 call of 'layers.*'" in repr(trace)


def test_values_that_are_changed_afterwards_are_not_shown():
    def attend(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        v.zero_()
        return out

    assert run(attend).calls[0].value is None


CHANGES = {
    "setitem": lambda weights: weights.__setitem__((..., 0), 0),
    "masked_fill_": lambda weights: weights.masked_fill_(weights < 0.1, 0),
    "imul": lambda weights: weights.__imul__(0.5),
    "of a view": lambda weights: weights[..., 2:].zero_(),
    "out": lambda weights: torch.mul(weights, 2, out=weights),
    "inplace": lambda weights: F.threshold(weights, 0.2, 0, inplace=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_changed_before_the_product_are_shown_as_they_met_the_values(change, mode):
    def attend(q, k, v):
        weights = scores(q, k).softmax(-1)
        change(weights)
        return weights @ v

    trace = run(attend, mode)
    assert trace.calls[0].kind is Kind.SIGNED
    agrees(trace)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_logits_changed_before_the_product_are_not_used(mode):
    def attend(q, k, v):
        logits = scores(q, k)
        weights = logits.softmax(-1)
        logits.zero_()
        return weights @ v

    agrees(run(attend, mode))


_ORDER = torch.tensor([3, 1, 0, 2, 5, 4])


@pytest.mark.parametrize(
    ("keys", "values"),
    [(_ORDER, slice(None)), (slice(None, None, 2), slice(None, None, 2))],
    ids=["index", "step"],
)
def test_columns_in_another_order_are_shown_as_they_met_the_values(keys, values):
    def attend(q, k, v):
        return scores(q, k).softmax(-1)[..., keys] @ v[..., values, :]

    call = run(attend).calls[0]
    assert call.kind is Kind.SIGNED
    torch.testing.assert_close(call.weights() @ call.value, call.output)


@pytest.mark.parametrize(
    "move",
    [lambda one, at: one.index_select(at, _ORDER), lambda one, at: one.flip(at)],
    ids=["index", "flip"],
)
def test_values_in_another_order_are_refused_because_columns_are_not_positions(move):
    def attend(q, k, v):
        return move(scores(q, k).softmax(-1), -1) @ move(v, -2)

    with pytest.raises(NotImplementedError, match="values by index"):
        run(attend)


def test_queries_changed_after_written_attention_are_not_shown():
    def attend(q, k, v):
        out = scores(q, k).softmax(-1) @ v
        q.zero_()
        return out

    trace = run(attend)
    assert trace.calls[0].source.query is None and trace.calls[0].source.logits is not None
    agrees(trace)


def test_softmax_into_a_tensor_that_every_layer_reuses():
    buffer = torch.empty(2, 4, 6, 6)

    def attend(q, k, v):
        return torch.softmax(scores(q, k), -1, out=buffer) @ v

    torch.manual_seed(0)
    model, x = Stack(Toy(attend), Toy(attend)).eval(), torch.randn(2, 6, 16)
    with torch.no_grad(), watch(model) as trace:
        model(x)
    for call in trace:
        torch.testing.assert_close(call.log_weights().exp(), call.weights())
        torch.testing.assert_close(call.weights() @ call.value, call.output)


def test_softmax_over_its_own_logits():
    def attend(q, k, v):
        logits = scores(q, k)
        return torch.softmax(logits, -1, out=logits) @ v

    agrees(run(attend))


def test_learned_sinks_are_those_of_the_call_after_an_optimizer_step():
    class Sunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            from overt.capture.hf_interface import overt_attention

            q = x.unflatten(-1, (4, -1)).transpose(1, 2)
            return overt_attention(self, q, q, q, None, is_causal=False, s_aux=self.sinks)[0]

    model, x = Sunk(), torch.randn(1, 3, 16)
    with torch.no_grad(), watch(model) as trace:
        model(x)
        model.sinks += 5
    with torch.no_grad(), watch(model) as later:
        model(x)
    assert trace.map().weights.sum() > 2 * later.map().weights.sum()


def source() -> MaterializedCall:
    logits = torch.randn(2, 3, 4, 5)
    return MaterializedCall(logits.softmax(-1), Kind.PROBABILITY, logits)


def test_versions_name_what_was_changed():
    one, value = source(), torch.randn(2, 3, 5, 7)
    before = tensor_versions(one, value, None)
    assert modified_tensors(one, value, None, before) == frozenset()
    value.zero_()
    assert modified_tensors(one, value, None, before) == {"values"}
    assert required_for_weights(modified_tensors(one, value, None, before)) == []
    one.used.zero_()
    assert required_for_weights(modified_tensors(one, value, None, before)) == ["weights"]


def test_receipts_of_written_weights():
    one, value = source(), torch.randn(2, 3, 5, 7)
    output = one.used @ value
    assert failed_checks(check_last_row(one, value, output, exact=True)) == []
    assert failed_checks(check_last_row(one, value, output.roll(1, 0), exact=True)) == [1]
    one.used[..., 0] += 0.1
    assert 0 in failed_checks(check_last_row(one, value, output, exact=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_receipts_of_queries_and_keys(dtype):
    q, k = (torch.randn(2, heads, 5, 8, dtype=dtype) for heads in (4, 2))
    v = torch.randn(2, 2, 5, 8, dtype=dtype)
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    one = QKCall(q, k, 8**-0.5)
    assert failed_checks(check_last_row(one, v, out, exact=True)) == []
    assert failed_checks(check_last_row(one, v, out * 1.5, exact=True)) == [0]
    assert check_last_row(one, v, out, exact=False)[0].why.startswith("dropout")
    assert check_last_row(one, None, out, exact=True)[0].off is None
    assert (
        check_last_row(one, v.flatten(1), out, exact=True)[0].why
        == "unsupported shape of values or outputs"
    )
