"""Statistics without the matrix, compared with slow copies that have it."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import overt
from overt import capture
from overt.attention import Kind, Layout, Span, grid, words
from overt.capture import block_scores
from overt.capture.attention_statistics import statistics
from overt.capture.call import Call, MaterializedCall, QKCall, Route
from overt.capture.trace import AttentionTrace
from overt.metrics import concentration
from tests.capture.toys import FusedAttention, Stack, WrittenAttention

B, H, G, N, D = 2, 4, 2, 24, 8
INF = torch.inf


def qk(b=B, h=H, g=G, q=N, k=N, d=D, dtype=torch.float32, **more) -> QKCall:
    """Random queries and keys, strided as projections are."""
    made = torch.Generator().manual_seed(1)
    query = torch.randn(b, q, h, d, generator=made).transpose(1, 2)
    key = torch.randn(b, k, g, d, generator=made).transpose(1, 2)
    return QKCall((2 * query).to(dtype), (2 * key).to(dtype), d**-0.5, **more)


def call_of(source, cross=False, name="layer") -> Call:
    return Call(name, nn.Identity(), source, Route.SDPA, cross)


def trace_of(*sources, layout=None, cross=False) -> AttentionTrace:
    calls = [call_of(one, cross, f"layers.{at}") for at, one in enumerate(sources)]
    return AttentionTrace(calls, layout)


def random_mask(*shape, share=0.6) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < share


def padding() -> Tensor:
    mask = torch.ones(B, 1, 1, N, dtype=torch.bool)
    mask[1, ..., 17:] = False
    return mask


def window(width: int) -> Tensor:
    gap = torch.arange(N)[:, None] - torch.arange(N)
    return (gap >= 0) & (gap < width)


def empty_rows() -> Tensor:
    """Left padding as boolean masks have it: no key is visible to a padded query."""
    mask = torch.ones(N, N, dtype=torch.bool).tril().expand(B, 1, N, N).clone()
    mask[0, ..., :5] = False
    mask[0, :, :5] = False
    return mask


def causal_bias(low: float) -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    distance = -slopes * (torch.arange(N)[:, None] - torch.arange(N)).abs()
    return distance.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), low)


def by_head(score, b, h, q, k):
    return score + 0.3 * (h + 1) * (b + 1) * torch.cos(q - 2.0 * k)


def mask_by_head(b, h, q, k):
    return (q >= k) & ((q - k) < 3 + 4 * h + b)


SINKS = torch.tensor([2.0, -1.0, 0.0, 30.0])
SOURCES = {
    "plain": qk(),
    "one key head": qk(g=1),
    "as many key heads": qk(g=H),
    "causal": qk(causal=True),
    "more keys than queries": qk(q=7),
    "causal, more keys": qk(q=7, causal=True),
    "causal, more queries": qk(k=7, causal=True),
    "one query": qk(q=1),
    "padding": qk(allowed=padding()),
    "causal and padding": qk(allowed=padding(), causal=True),
    "mask of all": qk(allowed=random_mask(N, N)),
    "mask per head": qk(allowed=random_mask(B, H, N, N)),
    "mask of queries": qk(allowed=random_mask(B, 1, N, 1)),
    "empty rows": qk(allowed=empty_rows()),
    "nothing visible": qk(allowed=torch.zeros(N, N, dtype=torch.bool)),
    "sliding window": qk(allowed=window(5)),
    "bias per head": qk(bias=torch.randn(H, N, N)),
    "bias with -inf": qk(bias=causal_bias(-INF)),
    "bias with a low number": qk(bias=causal_bias(torch.finfo(torch.float32).min)),
    "bias of keys": qk(bias=torch.where(padding(), 0.0, torch.finfo(torch.float32).min)),
    "bias and mask": qk(bias=torch.randn(1, H, 1, N), allowed=random_mask(1, 1, N, N)),
    "sinks": qk(sinks=SINKS),
    "sinks, window, empty rows": qk(sinks=SINKS, allowed=window(5) & empty_rows()),
    "softcap": qk(softcap=2.0, causal=True),
    "score_mod": qk(score_mod=by_head),
    "mask_mod": qk(mask_mod=mask_by_head),
    "score_mod and mask_mod": qk(score_mod=by_head, mask_mod=mask_by_head),
    "float64": qk(dtype=torch.float64, causal=True),
    "bfloat16": qk(dtype=torch.bfloat16, causal=True),
    "float16 with sinks": qk(dtype=torch.float16, sinks=SINKS, allowed=padding()),
}


def materialized(kind=Kind.PROBABILITY, dropped=0, mask=None, dtype=torch.float32):
    logits = 2 * torch.randn(B, H, N, N + dropped, generator=torch.Generator().manual_seed(3))
    if mask is not None:
        logits = logits.masked_fill(~mask, -INF)
    used = logits.softmax(-1).nan_to_num(0)[..., :N].to(dtype)
    if kind is Kind.SIGNED:
        return MaterializedCall(used - 0.5 * used.flip(1), kind)
    return MaterializedCall(used, kind, logits, dropped)


SOURCES |= {
    "eager": materialized(),
    "eager, empty rows": materialized(mask=empty_rows()),
    "eager, sinks": materialized(Kind.SUBPROBABILITY, dropped=1),
    "eager, bfloat16": materialized(dtype=torch.bfloat16),
    "edited": replace(materialized(), logits=None),
    "signed": materialized(Kind.SIGNED),
}
BUDGETS = (1, 1500, 2**21)  # one row of one group at a time; some rows or groups; all at once
LAYOUT = Layout(
    (
        Span("class", (1,), slice(0, 1)),
        Span("image", (2, 2), slice(3, 10, 2)),
        Span("text", (3,), torch.tensor([[2, 4, -1], [0, 23, 22]])),
    ),
    N,
)


def span_positions(sample: int) -> dict[str, list[int]]:
    """The positions of `LAYOUT`, by hand."""
    return {"class": [0], "image": [3, 5, 7, 9], "text": [[2, 4], [0, 23, 22]][sample]}


def expected_counted(call: Call) -> Tensor:
    """Queries that see a key and, in self-attention, whose own key some query sees."""
    b, _, q, k = call.shape
    shown = call.visible()
    if shown is None:
        return torch.ones(b, q, dtype=torch.bool)
    shown = shown.expand(b, q, k)
    found = shown.any(dim=-1)
    return found & shown.any(dim=1) if q == k and not call.cross else found


def slow_row(row: list[float]) -> tuple[float, list[int]]:
    """Entropy of one row, and its keys by weight, without torch."""
    total = sum(row)
    shares = [one / total for one in row if one > 0] if total else []
    order = sorted(range(len(row)), key=lambda at: -row[at])
    return -sum(one * math.log(one) for one in shares), order


@pytest.fixture(params=BUDGETS)
def budget(request, monkeypatch) -> int:
    monkeypatch.setitem(block_scores.MAX_CHUNK_BYTES, "cpu", request.param)
    return request.param


@pytest.mark.parametrize("name", SOURCES)
def test_all_statistics_agree_with_the_whole_map(name: str, budget: int) -> None:
    source = SOURCES[name]
    call = call_of(source)
    b, h, q, k = call.shape
    signed = call.kind is Kind.SIGNED
    whole = call.weights().double()
    masks = {"first": [0], "last": [-1], "some": random_mask(b, k, share=0.3)}
    found = statistics(call, received=True, entropy=not signed, top_k=min(5, k), spans=masks)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, check_dtype=False)

    counted = expected_counted(call)
    assert torch.equal(found.counted, counted)
    close(found.received, torch.einsum("bhqk,bq->bhk", whole, counted.double()))
    mean = found.received / counted.sum(-1).clamp_min(1)[:, None, None]
    close(found.mean_received, mean)

    total = torch.ones(b, h, q) if signed else whole.sum(-1)
    total = torch.where(total == 0, 1, total)
    some = whole * masks["some"][:, None, None]
    for one, given in (("first", whole[..., 0]), ("last", whole[..., -1]), ("some", some.sum(-1))):
        close(found.span_shares[one], given / total)

    close(found.top.weights, whole.topk(min(5, k)).values)
    present = found.top.indices >= 0
    close(whole.gather(-1, found.top.indices.clamp_min(0))[present], found.top.weights[present])
    assert signed or torch.equal(present, found.top.weights > 0)
    if not signed:
        slow = [slow_row(row)[0] for row in whole.flatten(0, 2).tolist()]
        close(found.entropy.flatten(), torch.tensor(slow))
    precise = torch.float64 if name == "float64" else torch.float32
    assert found.received.dtype == found.top.weights.dtype == precise


def test_one_row_by_hand() -> None:
    used = torch.tensor([[[[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]]]])
    found = statistics(
        call_of(MaterializedCall(used, Kind.PROBABILITY), cross=True),
        received=True,
        entropy=True,
        top_k=4,
        spans={"pair": (0, 1)},
    )
    assert found.received.tolist() == [[[0.5, 0.25, 0.25, 0.0]]]
    torch.testing.assert_close(found.entropy, torch.tensor([[[1.5 * math.log(2), 0.0]]]))
    assert found.top.indices[0, 0, 0, [0, 3]].tolist() == [0, -1]
    assert found.top.indices[0, 0, 1].tolist() == [-1] * 4
    assert found.span_shares["pair"].tolist() == [[[0.75, 0.0]]]


# --- queries that count


def test_padding_gives_nothing_and_is_not_counted() -> None:
    call = call_of(SOURCES["padding"])
    found = statistics(call, received=True)
    assert found.counted.sum(-1).tolist() == [N, 17]
    assert not found.received[1, :, 17:].any()
    torch.testing.assert_close(found.received[1].sum(-1), torch.full((H,), 17.0))
    torch.testing.assert_close(found.mean_received.sum(-1), torch.ones(B, H))


def test_padding_that_attends_evenly_is_not_counted() -> None:
    """As float masks have it: all scores of a padded query are very low, so it sees its own key."""
    bias = torch.where(empty_rows(), 0.0, torch.finfo(torch.float32).min)
    found = statistics(call_of(qk(bias=bias)), received=True)
    assert found.counted.sum(-1).tolist() == [N - 5, N]
    assert not found.received[0, :, :5].any()


def test_cross_attention_counts_queries_at_positions_of_hidden_keys() -> None:
    found = statistics(call_of(SOURCES["padding"], cross=True), received=True)
    assert found.counted.all()


def test_given_queries_replace_the_default() -> None:
    call = call_of(SOURCES["padding"])
    chosen = torch.zeros(B, N, dtype=torch.bool)
    chosen[0, 3], chosen[1, [2, 20]] = True, True
    weights = call.weights()
    expected = torch.stack([weights[0, :, 3], weights[1, :, 2] + weights[1, :, 20]])
    torch.testing.assert_close(capture.received(call, queries=chosen), expected)
    expected = expected / torch.tensor([1, 2])[:, None, None]
    torch.testing.assert_close(capture.received(call, mean=True, queries=chosen), expected)
    nobody = capture.received(call, mean=True, queries=torch.zeros_like(chosen))
    assert not nobody.any()
    trace = trace_of(call.source, layout=LAYOUT)
    weights = torch.stack([weights[0, :, [2, 4]].sum(1), weights[1, :, [0, 22, 23]].sum(1)])
    torch.testing.assert_close(trace.received(queries="text")[:, 0], weights)


# --- traces


def test_layers_are_stacked_as_in_the_map() -> None:
    trace = trace_of(SOURCES["plain"], SOURCES["causal"], layout=LAYOUT)
    whole = trace.map().weights
    torch.testing.assert_close(trace.received(), whole.sum(-2))
    torch.testing.assert_close(trace.received(mean=True), whole.mean(-2))
    torch.testing.assert_close(trace.received(layer=1), whole[:, 1:].sum(-2))
    assert trace.received(layer="layers.0").shape == (B, 1, H, N)
    terms = torch.where(whole > 0, whole * whole.clamp_min(1e-30).log(), 0)
    torch.testing.assert_close(trace.entropy(), -terms.sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trace.top_k(3).weights, whole.topk(3).values)
    torch.testing.assert_close(trace.sink_mass(), whole[..., 0])
    torch.testing.assert_close(trace.sink_mass(mean=True), whole[..., 0].mean(-1))
    found = trace.statistics(received=True, entropy=True, top_k=2, spans=["class", "text"])
    assert set(found.span_shares) == {"class", "text"}
    assert found.counted.shape == (B, 2, N)
    assert found.top.indices.shape == (B, 2, H, N, 2)


def test_spans_of_the_layout_stand_at_other_positions_in_each_sample() -> None:
    trace = trace_of(SOURCES["sinks"], layout=LAYOUT)
    whole = trace.map().normalize().weights
    found, mean = trace.span_shares(), trace.span_shares(mean=True)
    for sample in range(B):
        for name, places in span_positions(sample).items():
            expected = whole[sample, ..., places].sum(-1)
            torch.testing.assert_close(found[name][sample], expected)
            torch.testing.assert_close(mean[name][sample], expected.mean(-1))


def test_layers_of_different_sizes_come_one_by_one() -> None:
    trace = trace_of(qk(), qk(q=3, k=9))
    with pytest.raises(ValueError, match=r"1.*9.*0.*24"):
        trace.received()
    shapes = [one.received.shape for one in trace.layer_statistics(received=True)]
    assert shapes == [(B, 1, H, N), (B, 1, H, 9)]


def test_agrees_with_the_metrics_of_whole_maps() -> None:
    trace = trace_of(SOURCES["sinks"], SOURCES["eager, sinks"])
    whole = trace.map()
    mask = random_mask(N, share=0.2)
    expected = concentration.sink_mass(whole, mask)
    torch.testing.assert_close(trace.sink_mass(mask, mean=True).mean(dim=(1, 2)), expected)
    rows = replace(
        whole, values=whole.values[:, 1:, 2:3, 5:6], queries=words(1)
    )  # an entropy for one row
    torch.testing.assert_close(trace.entropy()[:, 1, 2, 5], concentration.entropy(rows))


@pytest.mark.parametrize("attention", [FusedAttention, WrittenAttention])
def test_every_route_on_the_fly_and_from_the_trace(attention) -> None:
    """The first block of a model follows exponentials into products: ours must not be seen."""
    model, x = Stack(attention(), attention()), torch.randn(2, 8, 16)
    model.requires_grad_(True)
    everything = partial(statistics, received=True, entropy=True, top_k=2, spans={"first": [0]})
    for _ in range(2):
        with overt.watch(model, each=everything) as live:
            model(x)
        with overt.watch(model) as trace:
            model(x)
        stored = trace.statistics(received=True, entropy=True, top_k=2, spans={"first": [0]})
        whole = trace.map().weights
        for found in (capture.AttentionStatistics.stack(live.results), stored):
            torch.testing.assert_close(found.received, whole.sum(-2))
            torch.testing.assert_close(found.top.weights, whole.topk(2).values)
            torch.testing.assert_close(found.span_shares["first"], whole[..., 0])
            assert not found.received.requires_grad
        assert len(live) == 0


def test_learned_modules_of_torch_on_the_fly() -> None:
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()
    with overt.watch(layer, each=capture.received) as trace:
        layer(torch.randn(2, 5, 16), torch.randn(2, 7, 16))
    assert [one.shape for one in trace.results] == [(2, 2, 5), (2, 2, 7)]
    torch.testing.assert_close(trace.results[1].sum(-1), torch.full((2, 2), 5.0))


def test_autocast_does_not_change_the_precision() -> None:
    call = call_of(qk())
    expected = capture.received(call)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(capture.received(call), expected)


# --- memory and work


class Recorder(TorchDispatchMode):
    """The size of the largest tensor that was made, and the number of products of queries."""

    largest, scores = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        for one in out if isinstance(out, tuple) else (out,):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        if name == "bmm" and args[0].shape[-1] == D:
            self.scores += out.numel()
        return out


def recorded(source, budget: int, monkeypatch, **which) -> Recorder:
    monkeypatch.setitem(block_scores.MAX_CHUNK_BYTES, "cpu", budget)
    call = call_of(source)
    with Recorder() as found:
        statistics(call, **which)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"sinks": SINKS}, {"softcap": 3.0}])
def test_memory_is_linear_in_the_length(dtype, more, monkeypatch) -> None:
    which = {"received": True, "entropy": True, "top_k": 2, "spans": {"first": [0]}}
    sizes = []
    for n in (128, 256, 512):
        source = qk(b=1, g=2, q=n, k=n, dtype=dtype, **more)
        sizes.append(recorded(source, 2**14, monkeypatch, **which).largest)
        linear = 4 * H * n * 8  # eight numbers per head and query: int64 indices and values, keys
        assert sizes[-1] <= max(2**14, linear), n
    assert sizes[2] <= 4 * sizes[0] * 1.1  # the matrix would be 16 times as large


def test_masks_and_eager_weights_are_read_in_blocks(monkeypatch) -> None:
    n, which = 256, {"received": True, "entropy": True}
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    used = torch.rand(1, H, n, n)
    sources = [
        qk(b=1, q=n, k=n, allowed=mask),
        qk(b=1, q=n, k=n, bias=torch.randn(n, n).masked_fill(~mask, -INF)),
        qk(b=1, g=H, q=n, k=n, score_mod=by_head, mask_mod=mask_by_head),
        MaterializedCall(used.half(), Kind.SUBPROBABILITY, used),
    ]
    for source in sources:
        found = recorded(source, 2**15, monkeypatch, **which)
        assert found.largest <= 2**16  # indices of score_mod are int64


def test_keys_of_groups_are_not_repeated(monkeypatch) -> None:
    n, d, h = 256, 64, 8
    for dtype in (torch.float32, torch.bfloat16):
        source = qk(b=2, h=h, g=1, q=n, k=n, d=d, dtype=dtype)
        found = recorded(source, 2**14, monkeypatch, received=True, top_k=1)
        assert found.largest < 4 * h * n * d


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({}, 1.0),
        ({"causal": True}, 0.6),
        ({"allowed": torch.ones(256, 256, dtype=torch.bool).tril()}, 0.6),
        ({"bias": torch.full((256, 256), -INF).triu(1)}, 0.6),
        ({"mask_mod": lambda b, h, q, k: q >= k}, 0.6),
        ({"mask_mod": lambda b, h, q, k: (q >= k) & (q - k < 16)}, 0.2),
        ({"allowed": torch.ones(256, 256, dtype=torch.bool).tril().triu(-15)}, 0.2),
    ],
)  # fmt: skip
def test_hidden_blocks_are_not_computed(more, share, monkeypatch) -> None:
    n = 256
    source = qk(b=1, q=n, k=n, **more)
    found = recorded(source, 4 * 2 * n * 16, monkeypatch, received=True)  # 16 rows of one group
    assert 0 < found.scores <= share * H * n * n


# --- errors


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({}, "received.*top_k"),
        ({"top_k": 0}, "top_k.*24.*0"),
        ({"top_k": 25}, "top_k.*24.*25"),
        ({"spans": grid(5, 5)}, "25.*24"),
        ({"spans": {"a": [24]}}, r"\[24\] of 'a'.*24"),
        ({"spans": {"a": torch.ones(3, dtype=torch.bool)}}, r"'a'.*\(24,\).*\(3,\)"),
        ({"received": True, "queries": torch.ones(B, 3, dtype=torch.bool)}, r"\(2, 24\).*\(2, 3\)"),
    ],
)
def test_bad_arguments_are_refused(which, message) -> None:
    with pytest.raises(ValueError, match=message):
        statistics(call_of(qk()), **which)


def test_what_was_not_requested_is_refused() -> None:
    found = statistics(call_of(qk()), top_k=1)
    assert found.received is found.entropy is found.span_shares is None
    with pytest.raises(ValueError, match="received=True"):
        _ = found.mean_received
    with pytest.raises(ValueError, match="spans="):
        _ = found.mean_span_shares


def test_signed_weights_have_no_entropy() -> None:
    trace = trace_of(SOURCES["signed"])
    with pytest.raises(ValueError, match=r"layers.*signed"):
        trace.entropy()
    torch.testing.assert_close(trace.received()[:, 0], SOURCES["signed"].used.sum(-2))


def test_names_need_a_layout() -> None:
    trace = trace_of(qk())
    for read in (trace.span_shares, lambda: trace.received(queries="text")):
        with pytest.raises(ValueError, match="layout="):
            read()
    with pytest.raises(ValueError, match="samples"):
        trace_of(qk(b=3), layout=LAYOUT).span_shares()
    with pytest.raises(ValueError, match="regions"):
        trace_of(qk(), layout=LAYOUT).span_shares(["regions"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_a_gpu_agrees_with_the_cpu(name: str) -> None:
    source = SOURCES[name]
    moved = {
        field: value.cuda() for field, value in vars(source).items() if isinstance(value, Tensor)
    }
    which = {"received": True, "top_k": 1, "spans": {"first": [0]}}
    which["entropy"] = source.kind is not Kind.SIGNED
    slow, fast = (statistics(call_of(one), **which) for one in (source, replace(source, **moved)))
    for one, other in ((slow.received, fast.received), (slow.entropy, fast.entropy)):
        if one is not None:
            torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-5)
    assert torch.equal(slow.counted, fast.counted.cpu())
