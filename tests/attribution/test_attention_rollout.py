"""Attention rollout: parity with stacked maps, rows, masks, gradients, memory, dtypes."""

import inspect

import pytest
import torch
from torch import Tensor

from overt.attention import AttentionMap, Kind, words
from overt.attribution import attention_rollout as module
from overt.attribution.attention_rollout import rollout, rollout_maps
from overt.attribution.raw_attention import HeadFusion
from overt.capture.call import Call, QKCall, Route
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace
from tests.capture.encoder import Encoder, inputs, padding, seen_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MODELS = {
    "plain": Encoder,
    "causal": lambda: Encoder(causal=True),
    "grouped": lambda: Encoder(groups=2),
}
# chunk sizes: chosen by length, small without dividing the length, all at once
CHUNKS = [None, 3, 100]


def parameter_gradients(found: Tensor, model: Encoder) -> list[Tensor]:
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).double()
    return list(
        torch.autograd.grad(
            (found * pull).sum(),
            list(model.parameters()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    )


@pytest.mark.parametrize(
    ("name", "masked"),  # the kernel accepts either a mask or is_causal
    [("plain", False), ("plain", True), ("causal", False), ("grouped", False), ("grouped", True)],
)
@pytest.mark.parametrize("fuse", [torch.mean, torch.amax, torch.amin])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_rollout_equals_rollout_of_stacked_maps_with_gradients(
    name: str, masked: bool, fuse: HeadFusion, residual: bool, chunk_size: int | None
) -> None:
    model = MODELS[name]()
    trace, _ = seen_of(model, inputs(), padding() if masked else None)
    expected = rollout_maps(trace.map(), fuse, residual=residual).layer(-1)
    found = rollout(trace, None, fuse, residual=residual, chunk=chunk_size)
    torch.testing.assert_close(found.values, expected.values, **EXACT)
    assert found.kind is expected.kind
    assert (found.mask is None) == (expected.mask is None)
    if found.mask is not None and expected.mask is not None:
        assert torch.equal(found.visible, expected.visible)
    for mine, theirs in zip(
        parameter_gradients(found.values, model),
        parameter_gradients(expected.values, model),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("fuse", [torch.mean, torch.amax])
def test_selected_rows_equal_full_rollout_with_gradients(
    name: str, chunk_size: int | None, fuse: HeadFusion
) -> None:
    model = MODELS[name]()
    seen, _ = seen_of(model, inputs())
    rows = torch.tensor([[6, 2, 0], [1, -1, 5]])
    found = rollout(seen, rows, fuse, chunk=chunk_size).check()
    whole = rollout(seen, None, fuse, chunk=chunk_size)
    at = rows.clamp_min(0)[:, None, None, :, None].expand(-1, 1, 1, -1, 7)
    expected = whole.values.gather(3, at) * (rows >= 0)[:, None, None, :, None]
    torch.testing.assert_close(found.values, expected, **EXACT)
    assert found.rows[1].tolist() == [True, False, True]
    for mine, theirs in zip(
        parameter_gradients(found.values, model), parameter_gradients(expected, model), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("residual", [True, False])
def test_rollout_of_local_attention_widens_with_each_layer(residual: bool) -> None:
    at = torch.arange(9)
    allowed = ((at[:, None] - at) >= 0) & ((at[:, None] - at) <= 2)
    trace, _ = seen_of(Encoder(), inputs(n=9), allowed)
    expected = rollout_maps(trace.map(), residual=residual).layer(-1)
    rows = torch.tensor([[8, 4]] * 2)
    found = rollout(trace, rows, residual=residual)
    assert torch.equal(found.visible, expected.visible[:, [8, 4]])
    assert found.visible[0, 0].tolist() == [False] * 2 + [True] * 7
    torch.testing.assert_close(found.values, expected.values[..., [8, 4], :], **EXACT)


def test_no_grad_gives_equal_values() -> None:
    seen, _ = seen_of(Encoder(), inputs(), padding())
    for fuse in (torch.mean, torch.amax):
        expected = rollout(seen, None, fuse)
        with torch.no_grad():
            found = rollout(seen, None, fuse, chunk=2)
        torch.testing.assert_close(found.values, expected.values, **EXACT)
        assert not found.values.requires_grad


def test_rollout_of_eager_attention_equals_fused() -> None:
    model = Encoder()
    fused, _ = seen_of(model, inputs(), padding())
    written, _ = seen_of(model.written(), inputs(), padding())
    assert {call.route for call in written} == {Route.SOFTMAX}
    torch.testing.assert_close(rollout(written).values, rollout(fused).values, **EXACT)


def test_rows_may_be_given_by_span_name() -> None:
    seen, _ = seen_of(Encoder(), inputs())
    named = seen.with_layout(words(3, "first") + words(4, "rest"))
    found = rollout(named, "rest")
    torch.testing.assert_close(found.values, rollout(seen).values[..., 3:, :], **EXACT)
    assert found.block("rest", "first").values.shape == (2, 1, 1, 4, 3)


def slow_discard(weights: Tensor, discard: float) -> Tensor:
    """Set the lowest fraction of the visible keys of each row to zero."""
    kept = weights.clone()
    for row in kept.reshape(-1, kept.shape[-1]):
        there = [i for i in range(len(row)) if row[i] > 0]
        for i in sorted(there, key=lambda i: float(row[i]))[: int(len(there) * discard)]:
            row[i] = 0
    return kept


@pytest.mark.parametrize("discard", [0.3, 0.9])
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("causal", [False, True])
def test_discard_drops_the_lowest_weights_of_each_row(
    discard: float, chunk_size: int | None, causal: bool
) -> None:
    trace, _ = seen_of(Encoder(causal=causal), inputs())
    fused = trace.map().weights.mean(dim=2, keepdim=True).detach()
    stacked = AttentionMap(slow_discard(fused, discard), words(7), words(7), kind=Kind.AMOUNT)
    expected = rollout_maps(stacked).layer(-1)
    found = rollout(trace, discard=discard, chunk=chunk_size).check()
    torch.testing.assert_close(found.values, expected.values, **EXACT)


def test_row_without_keys_in_one_layer_keeps_its_residual() -> None:
    """The closed form agrees with the plain product when one layer masks a row completely."""
    shown = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    hidden = shown.clone()
    hidden[..., 1, :] = False
    calls = []
    for allowed in (shown, hidden, shown):
        q, k = torch.randn(2, 1, 2, 4, 3).double()
        source = QKCall(q, k, 0.5, allowed=allowed)
        calls.append(Call("", torch.nn.Identity(), source, Route.SDPA, False))
    trace = AttentionTrace(calls)
    expected = rollout_maps(trace.map()).layer(-1)
    for chunk_size in CHUNKS:
        found = rollout(trace, chunk=chunk_size)
        torch.testing.assert_close(found.values, expected.values, **EXACT)


def test_a_row_without_keys_in_any_layer_is_zero() -> None:
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    allowed[..., 1, :] = allowed[..., 1] = False
    leaves = torch.randn(6, 1, 2, 4, 3).double().requires_grad_()
    sources = [QKCall(leaves[i], leaves[i + 3], 0.5, allowed=allowed) for i in range(3)]
    trace = AttentionTrace(
        [Call("", torch.nn.Identity(), one, Route.SDPA, False) for one in sources]
    )
    expected = rollout_maps(trace.map()).layer(-1)
    (theirs,) = torch.autograd.grad(expected.values.square().sum(), leaves, retain_graph=True)
    for chunk_size in CHUNKS:
        for rows in (None, torch.arange(4)[None]):
            found = rollout(trace, rows, chunk=chunk_size).check()
            torch.testing.assert_close(found.values, expected.values, **EXACT)
            assert torch.equal(found.visible, expected.visible) and not found.rows[0, 1]
            (mine,) = torch.autograd.grad(found.values.square().sum(), leaves, retain_graph=True)
            torch.testing.assert_close(mine, theirs, **EXACT)


def test_autocast_does_not_change_rollout() -> None:
    model = Encoder().float()
    seen, _ = seen_of(model, inputs().float())
    expected = rollout(seen, chunk=4)
    with torch.autocast("cpu", torch.bfloat16):
        found = rollout(seen, chunk=4)
        found.values[..., 0].square().sum().backward(retain_graph=True)
    mine = model.blocks[0].attention.q.weight.grad.clone()
    model.zero_grad()
    expected.values[..., 0].square().sum().backward()
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(mine, model.blocks[0].attention.q.weight.grad, rtol=0.05, atol=1e-4)


def test_learned_biases_get_gradients() -> None:
    bias = torch.randn(1, 2, 5, 5).double().requires_grad_()
    calls = []
    for _ in range(3):
        q, k = torch.randn(2, 1, 2, 5, 3).double()
        calls.append(Call("", torch.nn.Identity(), QKCall(q, k, 0.5, bias=bias), Route.SDPA, False))
    trace = AttentionTrace(calls)
    for chunk_size in CHUNKS:
        (mine,) = torch.autograd.grad(rollout(trace, chunk=chunk_size).values[..., 0].sum(), bias)
        expected = rollout_maps(trace.map()).layer(-1).values[..., 0].sum()
        (theirs,) = torch.autograd.grad(expected, bias)
        torch.testing.assert_close(mine, theirs, **EXACT)


def saved_bytes(chunk_size: int | None, n: int) -> int:
    """Count bytes saved for backward beyond the queries and keys of the model."""
    q, k = torch.randn(2, 2, 1, 4, n, 8).unbind(0)
    leaves = [one.clone().requires_grad_() for one in (*q, *k)]
    sources = [QKCall(leaves[i], leaves[i + 2], 0.3) for i in range(2)]
    trace = AttentionTrace(
        [Call("", torch.nn.Identity(), one, Route.SDPA, False) for one in sources]
    )
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rolled = rollout(trace, torch.tensor([[0]]), chunk=chunk_size)
    assert rolled.values.requires_grad
    own = {one.untyped_storage().data_ptr() for one in leaves}
    return sum(size for at, size in found.items() if at not in own)


def test_saved_memory_grows_linearly_with_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long = saved_bytes(None, 128), saved_bytes(None, 512)
    assert long < 5 * short
    monkeypatch.setattr(module, "_has_closed_form", lambda *_: False)
    assert saved_bytes(None, 512) > 8 * long  # full weights are saved
    assert (
        saved_bytes(64, 512) < saved_bytes(None, 512) / 8
    )  # recomputed, with the gradient by autograd


def test_half_precision_rollout_accumulates_in_float32() -> None:
    q, k = torch.randn(2, 2, 1, 2, 40, 8).unbind(0)
    exact = AttentionTrace(
        [
            Call("", torch.nn.Identity(), QKCall(a, b, 0.3), Route.SDPA, False)
            for a, b in zip(q.bfloat16().double(), k.bfloat16().double(), strict=True)
        ]
    )
    leaves = [one.bfloat16().requires_grad_() for one in (*q, *k)]
    half = AttentionTrace(
        [
            Call("", torch.nn.Identity(), QKCall(leaves[i], leaves[i + 2], 0.3), Route.SDPA, False)
            for i in range(2)
        ]
    )
    slopes = []
    for chunk_size in CHUNKS:
        found = rollout(half, chunk=chunk_size)
        assert found.values.dtype == torch.float32
        torch.testing.assert_close(
            found.values.double(), rollout(exact).values, rtol=1e-5, atol=1e-6
        )
        slopes.append(torch.autograd.grad(found.values.square().sum(), leaves))
    for one, other, third in zip(*slopes, strict=True):
        assert one.dtype == other.dtype == third.dtype == torch.bfloat16
        torch.testing.assert_close(one, third, rtol=0.02, atol=1e-3)


def test_half_precision_eager_weights_are_multiplied_in_float32() -> None:
    model = Encoder().written()
    exact, _ = seen_of(model, inputs())
    half, _ = seen_of(model.bfloat16(), inputs().bfloat16())
    for chunk_size in CHUNKS:
        found = rollout(half, chunk=chunk_size)
        assert found.values.dtype == torch.float32
        torch.testing.assert_close(
            found.values.double(), rollout(exact).values, rtol=0.2, atol=0.02
        )


def test_unsupported_traces_and_arguments_raise() -> None:
    model = Encoder()
    with watch(model) as twice:
        model(inputs())
        model(inputs())
    with pytest.raises(ValueError, match="one forward .* 2"):
        rollout(twice)
    assert len(twice.at(0)) == 3 and rollout(twice.at(0)).check()
    seen, _ = seen_of(model, inputs())
    with pytest.raises(ValueError, match=r"discard .* 1\.0"):
        rollout(seen, discard=1.0)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    crossing = Call("cross", torch.nn.Identity(), QKCall(q, k, 1.0), Route.SDPA, True)
    with pytest.raises(ValueError, match="cross.* 3 .* 5 keys"):
        rollout(AttentionTrace([crossing]))


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_rollout_of_selected_rows_does_not_synchronize_the_gpu(
    chunk_size: int | None, masked: bool
) -> None:
    """Meta tensors replace GPU tensors: reading a value raises."""
    shape = (2, 3, 12, 4)
    near = torch.ones(2, 1, 12, 12, dtype=torch.bool, device="meta") if masked else None
    layers = [
        [torch.randn(shape, device="meta", requires_grad=True) for _ in range(2)] for _ in range(3)
    ]
    calls = [
        Call(str(at), torch.nn.Identity(), QKCall(q, k, 0.5, allowed=near), Route.SDPA, False)
        for at, (q, k) in enumerate(layers)
    ]
    found = rollout(AttentionTrace(calls), torch.zeros(2, 5, dtype=torch.long, device="meta"),
                    chunk=chunk_size)  # fmt: skip
    assert found.values.shape == (2, 1, 1, 5, 12)
    found.values.sum().backward()
    assert all(one.grad is not None for pair in layers for one in pair)


def test_a_model_in_place_of_a_trace_raises() -> None:
    with pytest.raises(TypeError, match=r"Linear.*watch\("):
        inspect.unwrap(rollout)(torch.nn.Linear(2, 2))
