import pytest
import torch
from torch import Tensor

from overt import attention
from overt.attention import AttentionMap, Kind, words
from overt.capture.call import Call, Projected, Route
from overt.capture.derived import rolling as module
from overt.capture.derived.maps import Fuse
from overt.capture.derived.rolling import rollout
from overt.capture.seen import Seen
from overt.capture.watching import watch
from tests.capture.encoder import Encoder, inputs, padding, seen_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MODELS = {
    "plain": Encoder,
    "causal": lambda: Encoder(causal=True),
    "grouped": lambda: Encoder(groups=2),
}
# one way a portion size: decided by length, small portions that do not divide, all at once
PORTIONS = [None, 3, 100]


def gradients(found: Tensor, model: Encoder) -> list[Tensor]:
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
    ("name", "masked"),  # the kernel takes either a mask or is_causal
    [("plain", False), ("plain", True), ("causal", False), ("grouped", False), ("grouped", True)],
)
@pytest.mark.parametrize("fuse", [torch.mean, torch.amax, torch.amin])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("portion", PORTIONS)
def test_rollout_is_that_of_stacked_maps_with_its_gradient(
    name: str, masked: bool, fuse: Fuse, residual: bool, portion: int | None
) -> None:
    model = MODELS[name]()
    seen, _ = seen_of(model, inputs(), padding() if masked else None)
    expected = attention.rollout(seen.map(), fuse, residual=residual).layer(-1)
    found = rollout(seen, None, fuse, residual=residual, portion=portion)
    torch.testing.assert_close(found.values, expected.values, **EXACT)
    assert found.kind is expected.kind
    assert (found.mask is None) == (expected.mask is None)
    if found.mask is not None and expected.mask is not None:
        assert torch.equal(found.visible, expected.visible)
    for mine, theirs in zip(
        gradients(found.values, model), gradients(expected.values, model), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("fuse", [torch.mean, torch.amax])
def test_rows_travel_alone(name: str, portion: int | None, fuse: Fuse) -> None:
    model = MODELS[name]()
    seen, _ = seen_of(model, inputs())
    rows = torch.tensor([[6, 2, 0], [1, -1, 5]])
    found = rollout(seen, rows, fuse, portion=portion).check()
    whole = rollout(seen, None, fuse, portion=portion)
    at = rows.clamp_min(0)[:, None, None, :, None].expand(-1, 1, 1, -1, 7)
    expected = whole.values.gather(3, at) * (rows >= 0)[:, None, None, :, None]
    torch.testing.assert_close(found.values, expected, **EXACT)
    assert found.rows[1].tolist() == [True, False, True]
    for mine, theirs in zip(
        gradients(found.values, model), gradients(expected, model), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("residual", [True, False])
def test_windows_lead_further_with_every_layer(residual: bool) -> None:
    at = torch.arange(9)
    allowed = ((at[:, None] - at) >= 0) & ((at[:, None] - at) <= 2)
    seen, _ = seen_of(Encoder(), inputs(n=9), allowed)
    expected = attention.rollout(seen.map(), residual=residual).layer(-1)
    rows = torch.tensor([[8, 4]] * 2)
    found = rollout(seen, rows, residual=residual)
    assert torch.equal(found.visible, expected.visible[:, [8, 4]])
    assert found.visible[0, 0].tolist() == [False] * 2 + [True] * 7
    torch.testing.assert_close(found.values, expected.values[..., [8, 4], :], **EXACT)


def test_without_a_gradient_nothing_changes() -> None:
    seen, _ = seen_of(Encoder(), inputs(), padding())
    for fuse in (torch.mean, torch.amax):
        expected = rollout(seen, None, fuse)
        with torch.no_grad():
            found = rollout(seen, None, fuse, portion=2)
        torch.testing.assert_close(found.values, expected.values, **EXACT)
        assert not found.values.requires_grad


def test_weights_that_a_model_wrote_out_roll_out_too() -> None:
    model = Encoder()
    fused, _ = seen_of(model, inputs(), padding())
    written, _ = seen_of(model.written(), inputs(), padding())
    assert {call.route for call in written} == {Route.SOFTMAX}
    torch.testing.assert_close(rollout(written).values, rollout(fused).values, **EXACT)


def test_a_span_by_name_gives_its_rows() -> None:
    seen, _ = seen_of(Encoder(), inputs())
    named = seen.within(words(3, "first") + words(4, "rest"))
    found = rollout(named, "rest")
    torch.testing.assert_close(found.values, rollout(seen).values[..., 3:, :], **EXACT)
    assert found.block("rest", "first").values.shape == (2, 1, 1, 4, 3)


def slow_discard(weights: Tensor, discard: float) -> Tensor:
    """Row by row: the lowest share of the keys that are seen counts as nothing."""
    kept = weights.clone()
    for row in kept.reshape(-1, kept.shape[-1]):
        there = [i for i in range(len(row)) if row[i] > 0]
        for i in sorted(there, key=lambda i: float(row[i]))[: int(len(there) * discard)]:
            row[i] = 0
    return kept


@pytest.mark.parametrize("discard", [0.3, 0.9])
@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_lowest_share_is_discarded_row_by_row(
    discard: float, portion: int | None, causal: bool
) -> None:
    seen, _ = seen_of(Encoder(causal=causal), inputs())
    fused = seen.map().weights.mean(dim=2, keepdim=True).detach()
    stacked = AttentionMap(slow_discard(fused, discard), words(7), words(7), kind=Kind.AMOUNT)
    expected = attention.rollout(stacked).layer(-1)
    found = rollout(seen, discard=discard, portion=portion).check()
    torch.testing.assert_close(found.values, expected.values, **EXACT)


def test_a_row_without_keys_in_one_layer_only_keeps_itself() -> None:
    """The closed form agrees with the plain product where one layer hides a row from all."""
    shown = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    hidden = shown.clone()
    hidden[..., 1, :] = False
    calls = []
    for allowed in (shown, hidden, shown):
        q, k = torch.randn(2, 1, 2, 4, 3).double()
        source = Projected(q, k, 0.5, allowed=allowed)
        calls.append(Call("", torch.nn.Identity(), source, Route.SDPA, False))
    seen = Seen(calls)
    expected = attention.rollout(seen.map()).layer(-1)
    for portion in PORTIONS:
        found = rollout(seen, portion=portion)
        torch.testing.assert_close(found.values, expected.values, **EXACT)


def test_a_row_without_keys_in_any_layer_is_zero() -> None:
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    allowed[..., 1, :] = allowed[..., 1] = False
    leaves = torch.randn(6, 1, 2, 4, 3).double().requires_grad_()
    sources = [Projected(leaves[i], leaves[i + 3], 0.5, allowed=allowed) for i in range(3)]
    seen = Seen([Call("", torch.nn.Identity(), one, Route.SDPA, False) for one in sources])
    expected = attention.rollout(seen.map()).layer(-1)
    (theirs,) = torch.autograd.grad(expected.values.square().sum(), leaves, retain_graph=True)
    for portion in PORTIONS:
        for rows in (None, torch.arange(4)[None]):
            found = rollout(seen, rows, portion=portion).check()
            torch.testing.assert_close(found.values, expected.values, **EXACT)
            assert torch.equal(found.visible, expected.visible) and not found.rows[0, 1]
            (mine,) = torch.autograd.grad(found.values.square().sum(), leaves, retain_graph=True)
            torch.testing.assert_close(mine, theirs, **EXACT)


def test_autocast_does_not_make_it_coarse() -> None:
    model = Encoder().float()
    seen, _ = seen_of(model, inputs().float())
    expected = rollout(seen, portion=4)
    with torch.autocast("cpu", torch.bfloat16):
        found = rollout(seen, portion=4)
        found.values[..., 0].square().sum().backward(retain_graph=True)
    mine = model.blocks[0].attention.q.weight.grad.clone()
    model.zero_grad()
    expected.values[..., 0].square().sum().backward()
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(mine, model.blocks[0].attention.q.weight.grad, rtol=0.05, atol=1e-4)


def test_learned_biases_get_their_gradient() -> None:
    bias = torch.randn(1, 2, 5, 5).double().requires_grad_()
    calls = []
    for _ in range(3):
        q, k = torch.randn(2, 1, 2, 5, 3).double()
        calls.append(
            Call("", torch.nn.Identity(), Projected(q, k, 0.5, bias=bias), Route.SDPA, False)
        )
    seen = Seen(calls)
    for portion in PORTIONS:
        (mine,) = torch.autograd.grad(rollout(seen, portion=portion).values[..., 0].sum(), bias)
        expected = attention.rollout(seen.map()).layer(-1).values[..., 0].sum()
        (theirs,) = torch.autograd.grad(expected, bias)
        torch.testing.assert_close(mine, theirs, **EXACT)


def saved_bytes(portion: int | None, n: int) -> int:
    """What the backward pass keeps beyond the queries and keys that the model keeps anyhow."""
    q, k = torch.randn(2, 2, 1, 4, n, 8).unbind(0)
    leaves = [one.clone().requires_grad_() for one in (*q, *k)]
    sources = [Projected(leaves[i], leaves[i + 2], 0.3) for i in range(2)]
    seen = Seen([Call("", torch.nn.Identity(), one, Route.SDPA, False) for one in sources])
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rolled = rollout(seen, torch.tensor([[0]]), portion=portion)
    assert rolled.values.requires_grad
    own = {one.untyped_storage().data_ptr() for one in leaves}
    return sum(size for at, size in found.items() if at not in own)


def test_what_is_kept_grows_with_the_length_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long = saved_bytes(None, 128), saved_bytes(None, 512)
    assert long < 5 * short
    monkeypatch.setattr(module, "_in_closed_form", lambda *_: False)
    assert saved_bytes(None, 512) > 8 * long  # whole weights, as they would be kept
    assert saved_bytes(64, 512) < saved_bytes(None, 512) / 8  # made twice, the gradient by autograd


def test_half_precision_sums_in_single() -> None:
    q, k = torch.randn(2, 2, 1, 2, 40, 8).unbind(0)
    exact = Seen(
        [
            Call("", torch.nn.Identity(), Projected(a, b, 0.3), Route.SDPA, False)
            for a, b in zip(q.bfloat16().double(), k.bfloat16().double(), strict=True)
        ]
    )
    leaves = [one.bfloat16().requires_grad_() for one in (*q, *k)]
    half = Seen(
        [
            Call(
                "", torch.nn.Identity(), Projected(leaves[i], leaves[i + 2], 0.3), Route.SDPA, False
            )
            for i in range(2)
        ]
    )
    slopes = []
    for portion in PORTIONS:
        found = rollout(half, portion=portion)
        assert found.values.dtype == torch.float32
        torch.testing.assert_close(
            found.values.double(), rollout(exact).values, rtol=1e-5, atol=1e-6
        )
        slopes.append(torch.autograd.grad(found.values.square().sum(), leaves))
    for one, other, third in zip(*slopes, strict=True):
        assert one.dtype == other.dtype == third.dtype == torch.bfloat16
        torch.testing.assert_close(one, third, rtol=0.02, atol=1e-3)


def test_half_weights_that_a_model_wrote_out_are_multiplied_in_single() -> None:
    model = Encoder().written()
    exact, _ = seen_of(model, inputs())
    half, _ = seen_of(model.bfloat16(), inputs().bfloat16())
    for portion in PORTIONS:
        found = rollout(half, portion=portion)
        assert found.values.dtype == torch.float32
        torch.testing.assert_close(
            found.values.double(), rollout(exact).values, rtol=0.2, atol=0.02
        )


def test_what_cannot_be_rolled_out_is_refused() -> None:
    model = Encoder()
    with watch(model) as twice:
        model(inputs())
        model(inputs())
    with pytest.raises(ValueError, match=r"2 were seen; choose one with at\(step\)"):
        rollout(twice)
    assert len(twice.at(0)) == 3 and rollout(twice.at(0)).check()
    seen, _ = seen_of(model, inputs())
    with pytest.raises(ValueError, match=r"a share of 1.0 cannot be discarded"):
        rollout(seen, discard=1.0)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    crossing = Call("cross", torch.nn.Identity(), Projected(q, k, 1.0), Route.SDPA, True)
    with pytest.raises(ValueError, match="looks from 3 queries at 5 keys of another sequence"):
        rollout(Seen([crossing]))


@pytest.mark.parametrize("portion", [None, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_rollout_of_some_rows_asks_nothing_of_a_device(portion: int | None, masked: bool) -> None:
    """Tensors without values stand for a card: to read one is an error there, and a wait here."""
    shape = (2, 3, 12, 4)
    near = torch.ones(2, 1, 12, 12, dtype=torch.bool, device="meta") if masked else None
    layers = [
        [torch.randn(shape, device="meta", requires_grad=True) for _ in range(2)] for _ in range(3)
    ]
    calls = [
        Call(str(at), torch.nn.Identity(), Projected(q, k, 0.5, allowed=near), Route.SDPA, False)
        for at, (q, k) in enumerate(layers)
    ]
    found = rollout(Seen(calls), torch.zeros(2, 5, dtype=torch.long, device="meta"),
                    portion=portion)  # fmt: skip
    assert found.values.shape == (2, 1, 1, 5, 12)
    found.values.sum().backward()
    assert all(one.grad is not None for pair in layers for one in pair)
