"""The kernels of a card against the plain way: by Triton's interpreter, or on the card itself."""

import contextlib

import pytest
import torch

from overt.capture import block_scores as module
from overt.capture.block_scores import (
    block_log_softmax,
    can_fuse,
    fused_cross_entropy,
    tap_gradients,
)
from overt.capture.kernels import triton_launch

pytestmark = pytest.mark.skipif(
    not triton_launch.triton_installed()
    or not (triton_launch.INTERPRETED or torch.cuda.is_available()),
    reason="no card with Triton here, nor TRITON_INTERPRET=1",
)
DEVICE = "cpu" if triton_launch.INTERPRETED else "cuda"
NEAR = {torch.float32: 2e-5, torch.float16: 5e-3}
HALF = torch.float16
if DEVICE == "cuda":  # numpy, in which kernels are interpreted, has no such numbers
    HALF = torch.bfloat16
    NEAR[HALF] = 3e-2


def make(groups=2, layers=3, dtype=torch.float32, width=24, length=90, turned=True):
    """Queries and keys as models have them: heads beside features in memory."""
    torch.manual_seed(0)

    def one(heads):
        made = torch.randn(2, length, heads, width, device=DEVICE).to(dtype).transpose(1, 2)
        return (made if turned else made.contiguous()).requires_grad_()

    return [one(4) for _ in range(layers)], [one(groups) for _ in range(layers)]


def both(monkeypatch, queries, keys, *given):
    """Log-shares and gradients by the kernels, and by plain operations in the same format."""
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(triton_launch, "supports", lambda *_: False)
        logs = block_log_softmax(queries, keys, *given)
        seen = logs.detach() > -torch.inf
        torch.manual_seed(1)
        weights = torch.randn(logs.shape, device=DEVICE)
        total = (weights * logs.masked_fill(~seen, 0)).sum()
        found.append((logs.detach(), torch.autograd.grad(total, [*queries, *keys])))
    return found


ROWS = {
    "positions": torch.tensor([[0, 7, 7, 80, 3], [4, 1, 3, -1, -1]]),
    "a slice": slice(2, 21),
    "one": torch.tensor([[5], [6]]),
    "every third": slice(1, 30, 3),
}
COLUMNS = {"all": slice(None), "some": slice(3, 70), "few": slice(10, 13)}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_kernels_give_what_plain_operations_give(monkeypatch, dtype, groups, rows, columns):
    at = ROWS[rows] if isinstance(ROWS[rows], slice) else ROWS[rows].to(DEVICE)
    queries, keys = make(groups, dtype=dtype)
    assert triton_launch.supports(queries, keys, 19)
    (logs, slopes), (wanted, theirs) = both(
        monkeypatch, queries, keys, at, COLUMNS[columns], 24**-0.5
    )
    torch.testing.assert_close(logs, wanted, rtol=0, atol=NEAR[dtype])
    for one, two in zip(slopes, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("each", [True, False], ids=["a mask a row", "one for all rows"])
def test_hidden_keys_have_no_share_and_no_gradient(monkeypatch, each):
    queries, keys = make()
    visible = torch.rand(2, 5 if each else 1, 67, device=DEVICE) > 0.4
    visible[1, -1] = False  # a row that sees nothing
    at = ROWS["positions"].to(DEVICE)
    (logs, slopes), (wanted, theirs) = both(
        monkeypatch, queries, keys, at, slice(3, 70), 0.3, visible
    )
    assert torch.equal(logs == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(logs, wanted, rtol=0, atol=2e-5)
    for one, two in zip(slopes, theirs, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5)


def test_masks_that_were_turned_hide_what_they_say():
    queries, keys = make()
    visible = (torch.rand(2, 67, 5, device=DEVICE) > 0.4).transpose(1, 2)
    given = queries, keys, ROWS["positions"].to(DEVICE), slice(3, 70), 0.3
    found = [block_log_softmax(*given, one) for one in (visible, visible.contiguous())]
    assert torch.equal(*(one.isneginf() for one in found))
    torch.testing.assert_close(*(one.exp() for one in found))


def test_gradients_are_added_where_attention_has_left_its_own():
    queries, keys = make(groups=4)
    found = []
    for through in (True, False):
        parts = [
            tap_gradients(q, k) if through else (q, k) for q, k in zip(queries, keys, strict=True)
        ]
        taken = [[getattr(one, "tensor", one) for one in pair] for pair in parts]
        own = sum(
            torch.nn.functional.scaled_dot_product_attention(q, k, k).square().sum()
            for q, k in taken
        )
        logs = block_log_softmax(
            [p[0] for p in parts], [p[1] for p in parts], slice(0, 9), slice(3, 70)
        )
        found.append(torch.autograd.grad(own + logs.square().mean(), [*queries, *keys]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_gradients_in_another_format_or_order_are_added_too():
    queries, keys = make(dtype=HALF, layers=1)
    at = torch.arange(5, device=DEVICE).expand(2, 5)
    layers = triton_launch.BlockLauncher(
        *([one.detach() for one in each] for each in (queries, keys)), at, slice(3, 70), 1.0, None
    )
    logs = layers.log_softmax()
    slopes = torch.randn_like(logs)
    _, sums = layers.row_gradient(slopes, logs, once=True)
    wholes = [
        torch.ones_like(keys[0]),
        torch.ones_like(keys[0], dtype=torch.float32),
        torch.ones(2, 2, 24, 90, dtype=HALF, device=DEVICE).transpose(2, 3),
    ]
    for whole in wholes:
        layers.add_key_gradient((slopes, logs, sums), 0, whole)
    for whole in wholes[1:]:
        torch.testing.assert_close(whole.float(), wholes[0].float(), rtol=1e-2, atol=2e-2)


def test_a_second_derivative_is_left_to_plain_operations():
    queries, keys = make(layers=1, length=12, width=16)
    logs = block_log_softmax(queries, keys, slice(0, 3), slice(2, 9))
    first = torch.autograd.grad(logs.square().sum(), queries, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), queries)[0]
    assert second.isfinite().all() and second.abs().sum() > 0


def test_what_the_kernels_do_not_know_goes_the_plain_way():
    queries, keys = make()
    assert triton_launch.supports(queries, keys, triton_launch.MAX_ROWS)
    assert not triton_launch.supports(queries, keys, triton_launch.MAX_ROWS + 1)
    assert not triton_launch.supports([one.double() for one in queries], keys, 3)
    assert not triton_launch.supports([queries[0], queries[1][:, :, :9]], keys[:2], 3)
    assert not triton_launch.supports(*make(width=triton_launch.MAX_HEAD_DIM + 1), 3)
    near, far = (
        torch.empty_strided((1, 1, 3, 16), (1, 1, n, 1), device="meta") for n in (16, 2**30)
    )
    assert (
        triton_launch.supports([near], [near], 3) == triton_launch.INTERPRETED
    )  # no card has such tensors
    assert not triton_launch.supports([far], [far], 3)  # beyond what kernels count to
    assert module.block_log_softmax(queries, keys, slice(0, 70), slice(0, 9)).shape[3] == 70


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(slice(0, 0), slice(0, 5)), (slice(0, 3), slice(4, 4)), (slice(0, 3), slice(0, 9, 2))],
    ids=["no rows", "no keys", "every second key"],
)
def test_nothing_and_gaps_go_the_plain_way(rows, columns):
    queries, keys = make(layers=2)
    logs = block_log_softmax(queries, keys, rows, columns)
    assert logs.shape[3:] == (len(range(90)[rows]), len(range(90)[columns]))
    none = [one[:0] for one in queries], [one[:0] for one in keys]
    assert block_log_softmax(*none, slice(0, 3), slice(0, 9)).shape[1] == 0


# --- what rows cost

NOTHING = -20.7


def plain_cross_entropy(queries, keys, rows, columns, scale, visible, wanted):
    """The cross-entropies out of log-shares that are there."""
    logs = block_log_softmax(queries, keys, rows, columns, scale, visible)
    logs = torch.where(logs.isneginf(), NOTHING, logs)
    return -(wanted[:, None] * logs).sum(dim=-1)


def aimed(rows, long):
    torch.manual_seed(2)
    wanted = torch.rand(2, rows, long, device=DEVICE) * (torch.rand(2, rows, long) > 0.7).to(DEVICE)
    wanted[0, 0] = 0  # a row that has no target
    return wanted


def both_cross_entropies(monkeypatch, queries, keys, *given):
    found = []
    for kernels in (True, False):
        if kernels:
            values = fused_cross_entropy(queries, keys, *given, NOTHING)
        else:
            monkeypatch.setattr(triton_launch, "supports", lambda *_: False)
            values = plain_cross_entropy(queries, keys, *given)
        torch.manual_seed(1)
        weights = torch.randn(values.shape, device=DEVICE)
        slopes = torch.autograd.grad((weights * values).sum(), [*queries, *keys])
        found.append((values.detach(), slopes))
    return found


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("rows", ["positions", "a slice"])
@pytest.mark.parametrize("columns", ["some", "few"])
def test_costs_are_those_of_plain_operations(monkeypatch, dtype, groups, rows, columns):
    at, to = ROWS[rows], COLUMNS[columns]
    at = at if isinstance(at, slice) else at.to(DEVICE)
    queries, keys = make(groups, dtype=dtype)
    assert can_fuse(queries, keys, at, to)
    count = len(range(90)[at]) if isinstance(at, slice) else at.shape[1]
    wanted = aimed(count, len(range(90)[to]))
    (values, slopes), (plain, theirs) = both_cross_entropies(
        monkeypatch, queries, keys, at, to, 24**-0.5, None, wanted
    )
    near = 20 * NEAR[dtype]  # sums of up to thirty log-shares
    torch.testing.assert_close(values, plain, rtol=NEAR[dtype], atol=near)
    for one, two in zip(slopes, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=NEAR[dtype], atol=near)


@pytest.mark.parametrize("each", [True, False], ids=["a mask a row", "one for all rows"])
@pytest.mark.parametrize("through", [True, False], ids=["by taps", "whole"])
def test_a_hidden_key_costs_what_is_said_and_has_no_gradient(monkeypatch, each, through):
    queries, keys = make()
    visible = torch.rand(2, 5 if each else 1, 67, device=DEVICE) > 0.4
    visible[1, -1] = False  # a row that sees nothing
    at, wanted = ROWS["positions"].to(DEVICE), aimed(5, 67)
    given = queries, keys
    if through:
        taps = [tap_gradients(q, k) for q, k in zip(queries, keys, strict=True)]
        given = [one[0] for one in taps], [one[1] for one in taps]
    values = fused_cross_entropy(*given, at, slice(3, 70), 0.3, visible, wanted, NOTHING)
    own = sum(one.tensor.sum() for pair in taps for one in pair) if through else 0
    slopes = torch.autograd.grad(values.square().sum() + own, [*queries, *keys])
    monkeypatch.setattr(triton_launch, "supports", lambda *_: False)
    plain = plain_cross_entropy(queries, keys, at, slice(3, 70), 0.3, visible, wanted)
    theirs = torch.autograd.grad(plain.square().sum(), [*queries, *keys])
    torch.testing.assert_close(values, plain, rtol=2e-5, atol=2e-4)
    for one, two in zip(slopes, theirs, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two + through, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(values[:, 1, :, -1], -NOTHING * wanted[1, -1].sum().expand(3, 4))


def test_costs_of_gradients_in_another_format_or_order_are_added_too():
    queries, keys = make(dtype=HALF, layers=2)
    at = torch.arange(5, device=DEVICE).expand(2, 5)
    layers = triton_launch.BlockLauncher(
        *([one.detach() for one in each] for each in (queries, keys)), at, slice(3, 70), 1.0, None
    )
    made = layers.cross_entropy(aimed(5, 67), NOTHING)
    slopes = torch.randn_like(made.values)
    wholes = [
        torch.ones_like(keys[0]),
        torch.ones_like(keys[0], dtype=torch.float32),
        torch.ones(2, 2, 24, 90, dtype=HALF, device=DEVICE).transpose(2, 3),
    ]
    for whole in wholes:
        layers.add_cross_entropy_key_gradient((slopes, *made.saved), 1, whole)
    for whole in wholes[1:]:
        torch.testing.assert_close(whole.float(), wholes[0].float(), rtol=1e-2, atol=2e-2)


def test_a_second_derivative_of_costs_is_left_to_plain_operations():
    found = []
    for way in (fused_cross_entropy, lambda *given: plain_cross_entropy(*given[:-1])):
        queries, keys = make(layers=1, length=12, width=16)
        given = queries, keys, slice(0, 3), slice(2, 9), 0.3, None, aimed(3, 7), NOTHING
        first = torch.autograd.grad(way(*given).square().sum(), queries, create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), [*queries, *keys]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1], ids=["queries", "keys"])
def test_a_second_derivative_of_costs_needs_not_all_to_learn(frozen):
    pair = make(layers=1, length=12, width=16)
    pair[frozen][0].requires_grad_(False)
    learned = pair[1 - frozen][0]
    given = *pair, slice(0, 3), slice(2, 9), 0.3, None, aimed(3, 7), NOTHING
    first = torch.autograd.grad(
        fused_cross_entropy(*given).square().sum(), learned, create_graph=True
    )[0]
    second = torch.autograd.grad(first.square().sum(), learned)[0]
    assert second.isfinite().all() and second.abs().sum() > 0


# --- a block that nobody has read


def watched(mask=True):
    """Calls of two layers, queries and keys of which have gradients."""
    from overt.attention import Layout, Span
    from overt.capture.call import Call, QKCall, Route
    from overt.capture.trace import AttentionTrace

    queries, keys = make(groups=4, layers=2)
    allowed = torch.ones(2, 1, 1, 90, dtype=torch.bool, device=DEVICE)
    allowed[1, ..., 80:] = False
    calls = [
        Call(
            str(at),
            torch.nn.Identity(),
            QKCall(q, k, 0.2, None, allowed if mask else None, taps=tap_gradients(q, k)),
            Route.SDPA,
            False,
        )
        for at, (q, k) in enumerate(zip(queries, keys, strict=True))
    ]
    spans = Span("text", (30,), slice(0, 30)), Span("regions", (60,), slice(30, 90))
    return AttentionTrace(calls, Layout(spans, 90)), [*queries, *keys]


def target():
    from overt.attention import AttentionMap, Kind, regions, words

    torch.manual_seed(3)
    wanted = (torch.rand(2, 1, 1, 30, 60) > 0.98).float()
    wanted[1, :, :, :, 50:] = 0
    return AttentionMap(wanted, regions(60), words(30), kind=Kind.AMOUNT).normalize().to(DEVICE)


@pytest.mark.parametrize("words", [True, False], ids=["among words", "among all"])
def test_direct_supervision_reads_no_block_and_is_the_same(monkeypatch, words):
    from overt.capture import lazy_map
    from overt.losses.grounding import direct_supervision

    among = (torch.rand(2, 30) > 0.2).to(DEVICE) if words else None
    found = []
    for kernels in (True, False):
        trace, learned = watched()
        with monkeypatch.context() as patch:
            if kernels:
                patch.setattr(
                    lazy_map, "block_log_softmax", lambda **_: pytest.fail("a block was read")
                )
            else:
                patch.setattr(triton_launch, "supports", lambda *_: False)
            losses = direct_supervision(trace.log_block, target(), words=among)
            total = sum(one.mean() for one in losses.values())
            found.append((losses, torch.autograd.grad(total, learned)))
    (ours, slopes), (theirs, plain) = found
    for name in theirs:
        torch.testing.assert_close(ours[name].total, theirs[name].total, rtol=1e-5, atol=1e-4)
        assert torch.equal(ours[name].count, theirs[name].count)
    for one, two in zip(slopes, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_an_unread_block_is_a_map_like_any_other():
    from dataclasses import replace

    from overt.capture.lazy_map import LazyAttentionMap
    from overt.losses import cross_entropy

    rows = torch.tensor([[3, 4, 9], [1, 2, -1]], device=DEVICE)
    trace, _ = watched()
    block, other = (trace.log_block("text", "regions", rows) for _ in range(2))
    assert isinstance(block, LazyAttentionMap) and block.pending is not None
    assert block.shape == (2, 2, 4, 3, 60) and len(block) == 2
    assert block.visible.shape == (2, 3, 60) and block.pending is not None
    assert block.rows.tolist() == [[True] * 3, [True, True, False]]
    block.check()
    assert block.pending is None and block.shape == (2, 2, 4, 3, 60)
    weights = block.weights.sum(dim=-1)
    torch.testing.assert_close(weights[0], torch.ones_like(weights[0]))
    changed = replace(other, mask=other.mask)
    assert changed.values.shape == other.shape, "a copy has its values"
    wanted = replace(target(), values=target().values[:, :, :, :3], queries=block.queries)
    spread = replace(wanted, values=wanted.values.expand(2, 2, 4, 3, 60))
    fresh = trace.log_block("text", "regions", rows)
    one, two = (cross_entropy(block, some).total for some in (wanted, spread))
    three, four = (cross_entropy(fresh, some).total for some in (wanted, spread))
    for given in (two, three, four):
        torch.testing.assert_close(given, one, rtol=1e-5, atol=1e-4)
    with pytest.raises(AttributeError, match="no 'colour'"):
        fresh.colour  # noqa: B018


def test_a_block_asked_for_without_gradients_has_none():
    trace, _ = watched(mask=False)
    with torch.no_grad():
        block = trace.log_block("text", "regions")
    assert not block.values.requires_grad
    learns = trace.log_block("text", "regions")
    with torch.no_grad():
        assert learns.values.requires_grad
    assert trace.log_block("text", "regions").visible.all()


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("rows", ["positions", "a slice"])
def test_a_compiled_graph_calls_the_kernels(monkeypatch, groups, rows):
    at = ROWS[rows] if isinstance(ROWS[rows], slice) else ROWS[rows].to(DEVICE)
    queries, keys = make(groups)
    visible = torch.rand(2, 1, 67, device=DEVICE) > 0.4
    visible[..., 0] = True

    def loss():
        return block_log_softmax(queries, keys, at, slice(3, 70), 0.3, visible).exp().square().sum()

    wanted = [value := loss(), *torch.autograd.grad(value, [*queries, *keys])]
    made, called = triton_launch.BlockLauncher.log_softmax, []
    monkeypatch.setattr(
        triton_launch.BlockLauncher, "log_softmax", lambda self: called.append(1) or made(self)
    )
    value = torch.compile(loss, backend="aot_eager", fullgraph=True)()
    found = [value, *torch.autograd.grad(value, [*queries, *keys])]
    assert called
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("as_given", [True, False])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("groups", [4, 2])
def test_gradients_that_no_tap_takes_are_whole_and_laid_out_as_graphs_take_them(
    monkeypatch, groups, columns, as_given
):
    import torch._functorch.config as config

    monkeypatch.setattr(config, "guess_tangent_strides_as_outputs", as_given, raising=False)
    queries, keys = make(groups)
    at, span = ROWS["positions"].to(DEVICE), COLUMNS[columns]
    wanted = aimed(5, len(range(90)[span]))
    visible = torch.rand(2, 5, len(range(90)[span]), device=DEVICE) > 0.4
    losses = (
        lambda *pair: (
            fused_cross_entropy(*pair, at, span, 0.3, None, wanted, NOTHING).square().sum()
        ),
        lambda *pair: (
            fused_cross_entropy(*pair, at, span, 0.3, visible, wanted, NOTHING).square().sum()
        ),
        lambda *pair: block_log_softmax(*pair, at, span, 0.3).exp().square().sum(),
    )
    for loss in losses:
        found = torch.autograd.grad(loss(queries, keys), [*queries, *keys])
        for one, like in zip(found, [*queries, *keys], strict=True):
            layout = like.stride() if as_given else torch.empty(like.shape).stride()
            assert one.stride() == layout
        taps = [tap_gradients(*pair) for pair in zip(queries, keys, strict=True)]
        value = loss(*([pair[side] for pair in taps] for side in (0, 1)))
        tapped = torch.autograd.grad(value, [*queries, *keys])
        for one, two in zip(found, tapped, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["as they are", "packed"])
@pytest.mark.parametrize("way", ["shares", "costs"])
def test_memory_is_read_while_it_is_held(way, packed):
    """When a layer is due, attention has let go of its queries and keys, and others fill memory.

    Where saved tensors are packed, as by `save_on_cpu`, they are others than those that a tap has.
    """
    wanted, at = aimed(5, 67), ROWS["positions"].to(DEVICE)
    found = []
    for trashed in (False, True):
        torch.manual_seed(0)
        weights = [torch.randn(24, 24, device=DEVICE, requires_grad=True) for _ in range(6)]
        x = torch.randn(2, 90, 4, 24, device=DEVICE)
        junk, taps, out = [], [], x.transpose(1, 2)

        def fill(slope, junk=junk, size=x.shape):
            junk.extend(torch.full(size, torch.nan, device=DEVICE) for _ in range(8))

        hooks = contextlib.nullcontext()
        if packed and trashed:
            hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
        for q, k in zip(weights[:3], weights[3:], strict=True):
            pair = tap_gradients((out @ q).clone(), (out @ k).clone())
            if trashed:
                pair[0].tensor.register_hook(fill)
            out = torch.nn.functional.scaled_dot_product_attention(
                pair[0].tensor, pair[1].tensor, out
            )
            taps.append(pair)
        sides = [[pair[side] for pair in taps] for side in (0, 1)]
        given = *sides, at, slice(3, 70), 0.3
        with hooks:
            if way == "costs":
                rows = fused_cross_entropy(*given, None, wanted, NOTHING).square().mean()
            else:
                rows = block_log_softmax(*given).exp().square().mean()
        loss = out.square().mean() + rows
        del taps, pair, sides, given, rows, out
        loss.backward()
        found.append([one.grad for one in weights])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("way", ["shares", "costs"])
def test_gradients_of_repeated_rows_are_the_same_bits_each_time(monkeypatch, way, kernels):
    """Many rows of one position, through taps: no sum depends on the order of atomic adds."""
    if not kernels:
        monkeypatch.setattr(triton_launch, "supports", lambda *_: False)
    at = torch.randint(-1, 4, (2, 40), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted = aimed(40, 67)
    found = []
    for _ in range(6):
        queries, keys = make(groups=4, length=90)
        taps = [tap_gradients(q, k) for q, k in zip(queries, keys, strict=True)]
        given = [one[0] for one in taps], [one[1] for one in taps], at, slice(3, 70), 0.3
        if way == "shares":
            rows = block_log_softmax(*given).exp().square().sum()
        elif kernels:
            rows = fused_cross_entropy(*given, None, wanted, NOTHING).square().sum()
        else:
            rows = plain_cross_entropy(*given, None, wanted).square().sum()
        own = sum(one.tensor.square().sum() for pair in taps for one in pair)
        found.append(torch.autograd.grad(rows + own, [*queries, *keys]))
    for others in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(others, found[0], strict=True))
