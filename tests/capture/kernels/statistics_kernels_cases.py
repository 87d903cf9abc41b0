"""Triton kernels for statistics compared with PyTorch; run by `test_statistics_kernels.py`.

On a GPU, or by Triton's interpreter.
"""

import pytest
import torch

from overt.capture.attention_statistics import statistics
from overt.capture.call import Call, QKCall, Route
from overt.capture.kernels import statistics_launch, triton_launch

# Doctests are collected from this file on machines without a GPU, too.
DEVICE = "cuda" if torch.cuda.is_available() and not triton_launch.INTERPRETED else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # numpy has no bfloat16
NEAR = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
B, H, G, N, D = 2, 4, 2, 70, 24


def qk(q=N, k=N, g=G, d=D, dtype=torch.float32, **more):
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(B, q, H, d, generator=draw).transpose(1, 2)
    key = torch.randn(B, k, g, d, generator=draw).transpose(1, 2)
    more = {
        name: one.to(DEVICE) if isinstance(one, torch.Tensor) else one for name, one in more.items()
    }
    return QKCall((2 * query).to(DEVICE, dtype), key.to(DEVICE, dtype), d**-0.5, **more)


def random_mask(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.4


def causal_mask(window=N):
    gap = torch.arange(N)[:, None] - torch.arange(N)
    return (gap >= 0) & (gap < window)


def empty_rows():
    mask = causal_mask().expand(B, 1, N, N).clone()
    mask[0, ..., :66] = False  # a whole block of queries sees nothing
    return mask


LOW = torch.finfo(torch.float32).min
SOURCES = {
    "plain": qk(),
    "one key head": qk(g=1),
    "as many key heads": qk(g=H),
    "causal": qk(causal=True),
    "causal, more keys": qk(q=66, causal=True),
    "causal, more queries": qk(k=66, causal=True),
    "one query": qk(q=1),
    "wide heads": qk(d=130),
    "padding": qk(allowed=random_mask(B, 1, 1, N)),
    "causal and padding": qk(allowed=random_mask(B, 1, 1, N), causal=True),
    "two axes": qk(allowed=random_mask(N, N)),
    "mask per head": qk(allowed=random_mask(B, H, N, N)),
    "sliding window": qk(allowed=causal_mask(7)),
    "empty rows": qk(allowed=empty_rows()),
    "bias per head": qk(bias=torch.randn(H, N, N)),
    "bias of a model": qk(bias=torch.where(causal_mask(), 0.0, LOW).expand(B, 1, N, N)),
    "bias with -inf": qk(bias=torch.where(causal_mask(9), 0.0, -torch.inf)),
    "bias and mask": qk(bias=torch.randn(1, H, 1, N), allowed=random_mask(1, 1, N, N)),
    "sinks": qk(sinks=torch.tensor([2.0, -1.0, 0.0, 30.0]), causal=True),
    "sinks, empty rows": qk(sinks=torch.tensor([2.0, -1.0, 0.0, 30.0]), allowed=empty_rows()),
    "softcap": qk(softcap=2.0, causal=True),
    "half": qk(dtype=HALF, causal=True),
    "half with sinks": qk(dtype=HALF, sinks=torch.randn(4).to(HALF), allowed=causal_mask(40)),
}


def call_of(source, name="layer"):
    return Call(name, torch.nn.Identity(), source, Route.SDPA, False)


def both(monkeypatch, source, **what):
    """Statistics by the kernels, and by plain operations."""
    monkeypatch.setattr(statistics_launch, "_AGREES", {})
    used, found = [], []
    reduce_rows = statistics_launch.reduce_rows
    monkeypatch.setattr(
        statistics_launch, "reduce_rows", lambda *given: used.append(1) or reduce_rows(*given)
    )
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(statistics_launch, "supports", lambda *_: False)
        found.append(statistics(call_of(source), **what))
    assert len(used) == 2  # the comparison, and the call
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_statistics_are_those_of_plain_operations(monkeypatch, name):
    source = SOURCES[name]
    k = source.shape[3]
    spans = {"first": (0,), "half": torch.arange(k) < k // 2, "some": random_mask(B, k)}
    found, wanted = both(
        monkeypatch, source, received=True, entropy=True, top_k=min(5, k), spans=spans
    )
    near = {"rtol": 1e-5, "atol": NEAR[source.query.dtype]}
    torch.testing.assert_close(found.received, wanted.received, **near)
    torch.testing.assert_close(found.entropy, wanted.entropy, **near)
    torch.testing.assert_close(found.top.weights, wanted.top.weights, **near)
    # the order of equal weights is not defined: the weights at the indices are compared
    weights = source.weights()
    there = found.top.indices >= 0
    at = weights.gather(-1, found.top.indices.clamp_min(0))
    torch.testing.assert_close(found.top.weights, at * there, **near)
    assert torch.equal(there, wanted.top.indices >= 0)
    for span in spans:
        torch.testing.assert_close(found.span_shares[span], wanted.span_shares[span], **near)


@pytest.mark.parametrize(
    "what",
    [{"received": True}, {"entropy": True}, {"top_k": 1}, {"spans": {"sinks": (0,)}}],
    ids=str,
)
def test_only_what_is_requested_is_computed(monkeypatch, what):
    queries = random_mask(B, N).to(DEVICE)
    found, wanted = both(monkeypatch, SOURCES["causal"], queries=queries, **what)
    for name in ("received", "entropy"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None) == (name not in what)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if "spans" in what:
        torch.testing.assert_close(found.span_shares["sinks"], wanted.span_shares["sinks"])
    if "top_k" in what:
        assert torch.equal(found.top.indices, wanted.top.indices)


def test_equal_keys_are_all_different():
    source = QKCall(torch.ones(1, 1, 3, 8).to(DEVICE), torch.ones(1, 1, 100, 8).to(DEVICE), 1.0)
    found = statistics(call_of(source), top_k=20).top
    assert all(len(set(row)) == 20 for row in found.indices[0, 0].tolist())
    torch.testing.assert_close(found.weights, torch.full_like(found.weights, 0.01))


def test_a_difference_is_reported_once_and_plain_operations_are_used(monkeypatch):
    monkeypatch.setattr(statistics_launch, "_AGREES", {})
    source = SOURCES["causal"]
    wanted = source.weights().sum(dim=2)
    arguments = statistics_launch._arguments
    monkeypatch.setattr(
        statistics_launch, "_arguments", lambda one: arguments(one) | {"scale": 0.5}
    )
    with pytest.warns(UserWarning, match=r"layers\.3"):
        found = statistics(call_of(source, "layers.3"), received=True)
    torch.testing.assert_close(found.received, wanted)
    again = statistics(call_of(source, "layers.4"), received=True)  # no second warning
    assert torch.equal(again.received, found.received)


@pytest.mark.parametrize("change", ["double", "score_mod", "turned"])
def test_other_calls_are_left_to_plain_operations(monkeypatch, change):
    monkeypatch.setattr(statistics_launch, "reduce_rows", lambda *_: pytest.fail("a kernel ran"))
    source = {
        "double": lambda: qk(dtype=torch.float64),
        "score_mod": lambda: qk(score_mod=lambda score, b, h, q, k: score + h),
        "turned": lambda: QKCall(*(one.mT.contiguous().mT for one in (qk().query, qk().key)), 0.2),
    }[change]()
    found = statistics(call_of(source), received=True).received
    torch.testing.assert_close(found, source.weights().sum(dim=2))


def test_memory_is_linear():
    if DEVICE == "cpu":
        return  # nothing to measure in an interpreter
    source = QKCall(
        *(torch.randn(1, 2, 16384, 64, device=DEVICE) for _ in range(2)), 0.1, causal=True
    )
    statistics(call_of(source), received=True, entropy=True, top_k=4)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    statistics(call_of(source), received=True, entropy=True, top_k=4)
    assert torch.cuda.max_memory_allocated() - before < 2**24  # one row of the matrix is 2**16
