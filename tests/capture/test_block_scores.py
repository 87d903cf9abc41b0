"""The scores of many layers in one function, held to plain autograd."""

import pytest
import torch

from overt.capture import block_scores as module
from overt.capture.block_scores import (
    ALL,
    block_log_softmax,
    block_scores,
    fused_cross_entropy,
    tap_gradients,
)
from overt.capture.kernels import triton_launch

INDEXES = {
    "all": ALL,
    "a slice": slice(1, 4),
    "positions": torch.tensor([[0, 2, 2], [4, 1, 3]]),
    "with absent ones": torch.tensor([[3, -1], [0, 2]]),
}


def make(groups=2, layers=3, dtype=torch.float64):
    torch.manual_seed(0)
    queries = [torch.randn(2, 4, 5, 6, dtype=dtype, requires_grad=True) for _ in range(layers)]
    keys = [torch.randn(2, groups, 5, 6, dtype=dtype, requires_grad=True) for _ in range(layers)]
    return queries, keys


def slow(queries, keys, rows, columns):
    """One sample, one head and one layer at a time, by indexing."""
    layers = []
    for query, key in zip(queries, keys, strict=True):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        samples = []
        for sample in range(len(query)):
            at = rows if isinstance(rows, slice) else rows[sample].clamp_min(0)
            to = columns if isinstance(columns, slice) else columns[sample].clamp_min(0)
            samples.append(query[sample][:, at] @ key[sample][:, to].transpose(1, 2))
        layers.append(torch.stack(samples))
    return torch.stack(layers)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("rows", INDEXES)
@pytest.mark.parametrize("columns", INDEXES)
def test_products_and_gradients_are_those_of_plain_autograd(groups, rows, columns):
    queries, keys = make(groups)
    rows, columns = INDEXES[rows], INDEXES[columns]
    found, expected = block_scores(queries, keys, rows, columns), slow(queries, keys, rows, columns)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(found)
    mine = torch.autograd.grad((weights * found).sum(), [*queries, *keys])
    theirs = torch.autograd.grad((weights * expected).sum(), [*queries, *keys])
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.long
def test_gradcheck_once_and_twice():
    queries, keys = make(layers=1)
    rows, columns = INDEXES["positions"], INDEXES["a slice"]

    def run(query, key):
        return block_scores([query], [key], rows, columns)

    assert torch.autograd.gradcheck(run, (queries[0], keys[0]))
    assert torch.autograd.gradgradcheck(run, (queries[0], keys[0]))


def test_only_what_is_wanted_gets_a_gradient():
    queries, keys = make(layers=2)
    keys = [key.detach() for key in keys]
    block_scores(queries, keys, ALL, ALL).sum().backward()
    assert all(query.grad is not None for query in queries)


def test_half_precision_is_multiplied_in_float32_and_nothing_is_saved_in_it():
    queries, keys = make(dtype=torch.bfloat16)
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        found = block_scores(queries, keys, ALL, slice(0, 3))
    exact = slow([q.double() for q in queries], [k.double() for k in keys], ALL, slice(0, 3))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    own = {tensor.data_ptr() for tensor in (*queries, *keys)}
    assert {tensor.data_ptr() for tensor in saved} == own
    found.sum().backward()
    assert queries[0].grad.dtype == torch.bfloat16


def through(tensor):
    """A tensor in the middle of a graph, used a second time as attention uses it."""
    middle = tensor * 2
    return middle, middle.square().sum()


@pytest.mark.parametrize("rows", INDEXES)
def test_taps_bring_the_same_gradients(rows):
    queries, keys = make()
    rows, columns = INDEXES[rows], slice(1, 5)
    found = []
    for tapped in (True, False):
        middles = [through(one) for one in (*queries, *keys)]
        given = [tap_gradients(middle)[0] if tapped else middle for middle, _ in middles]
        scores = block_scores(given[:3], given[3:], rows, columns)
        loss = scores.sin().sum() + sum(other for _, other in middles)
        found.append(torch.autograd.grad(loss, [*queries, *keys]))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_what_one_backward_pass_leaves_behind_does_not_enter_the_next():
    queries, keys = make(layers=2)
    taps = tap_gradients(*(one * 1 for one in (*queries, *keys)))
    loss = block_scores(taps[:2], taps[2:], ALL, ALL).square().sum()
    expected = torch.autograd.grad(loss, [*queries, *keys], retain_graph=True)
    torch.autograd.grad(loss, queries[0], retain_graph=True)  # brings parts that nobody takes
    again = torch.autograd.grad(loss, [*queries, *keys], retain_graph=True)
    for mine, theirs in zip(again, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_two_blocks_of_one_call_both_count():
    queries, keys = make(layers=1)
    taps = tap_gradients(queries[0] * 1, keys[0] * 1)
    loss = sum(
        block_scores(taps[:1], taps[1:], rows, ALL).square().sum() for rows in (ALL, slice(0, 2))
    )
    plain = sum(slow(queries, keys, rows, ALL).square().sum() for rows in (ALL, slice(0, 2)))
    mine = torch.autograd.grad(loss, [*queries, *keys])
    theirs = torch.autograd.grad(plain, [*queries, *keys])
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", INDEXES)
def test_a_tap_before_attention_adds_into_its_gradient(rows):
    """The rows of a loss and the gradient of the kernel meet in the tap, once and again."""
    queries, keys = make(groups=4, layers=1)
    value = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    rows, columns, found = INDEXES[rows], slice(1, 5), []
    for tapped in (True, False):
        query, key = queries[0] * 2, keys[0] * 2
        taps = tap_gradients(query, key)
        given = [tap.tensor for tap in taps] if tapped else [query, key]
        seen = torch.nn.functional.scaled_dot_product_attention(*given, value)
        scores = block_scores(*([one] for one in (taps if tapped else (query, key))), rows, columns)
        loss = scores.sin().sum() + seen.square().sum()
        given = [queries[0], keys[0]]
        found += [torch.autograd.grad(loss, given, retain_graph=True) for _ in range(2)]
    for mine in found[:-1]:
        for one, two in zip(mine, found[-1], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_the_scale_is_that_of_the_products():
    queries, keys = make()
    given = INDEXES["positions"], slice(1, 4)
    plain = [block_scores(queries, keys, *given) * 0.3, block_scores(queries, keys, *given, 0.3)]
    torch.testing.assert_close(*plain, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(one.sin().sum(), [*queries, *keys]) for one in plain]
    for one, two in zip(*slopes, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


# --- shares


def mask(rows, columns, empty=True):
    """Some columns hidden from some rows, of the sizes of two indexes; one row sees nothing."""
    s, r = (5 if one == ALL else 3 if isinstance(one, slice) else one.shape[1]
            for one in (rows, columns))  # fmt: skip
    drawn = torch.rand(2, s, r, generator=torch.Generator().manual_seed(4)) > 0.4
    drawn[..., 0] = True
    if empty:
        drawn[1, 0] = False
    return drawn


def slow_shares(scores, visible):
    """Row by row, over the columns that the row may see."""
    found = torch.full_like(scores, -torch.inf)
    for sample, row in visible.any(dim=-1).nonzero().tolist():
        seen = visible[sample, row]
        found[:, sample, :, row, seen] = scores[:, sample, :, row, seen].log_softmax(dim=-1)
    return found


@pytest.mark.parametrize("at_once", [1, 2**21])
@pytest.mark.parametrize("rows", INDEXES)
@pytest.mark.parametrize("columns", INDEXES)
def test_shares_and_gradients_are_those_of_plain_autograd(rows, columns, at_once, monkeypatch):
    """However many layers are multiplied at once, with taps and without."""
    monkeypatch.setitem(module.MAX_CHUNK_BYTES, "cpu", at_once)
    queries, keys = make()
    rows, columns = INDEXES[rows], INDEXES[columns]
    visible = mask(rows, columns)
    expected = slow_shares(0.3 * slow(queries, keys, rows, columns), visible)
    seen = expected.isfinite()
    weights = torch.randn_like(expected)
    theirs = torch.autograd.grad((weights * expected)[seen].sum(), [*queries, *keys])
    for tapped in (False, True):
        given = [tap_gradients(one * 1)[0] if tapped else one for one in (*queries, *keys)]
        found = block_log_softmax(given[:3], given[3:], rows, columns, 0.3, visible)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        loss = (weights * torch.where(found.isneginf(), -9.0, found)).sum()
        mine = torch.autograd.grad(loss, [*queries, *keys])
        for one, two in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_a_mask_that_hides_nothing_is_no_mask():
    queries, keys = make()
    rows, columns = INDEXES["positions"], slice(1, 4)
    bare = block_log_softmax(queries, keys, rows, columns)
    shown = block_log_softmax(
        queries, keys, rows, columns, visible=torch.ones(2, 1, 3, dtype=torch.bool)
    )
    assert torch.equal(bare, shown)
    torch.testing.assert_close(bare, block_scores(queries, keys, rows, columns).log_softmax(dim=-1))


@pytest.mark.long
def test_gradcheck_of_shares_once_and_twice():
    queries, keys = make(layers=2)
    rows, columns = INDEXES["positions"], slice(1, 4)
    visible = mask(rows, columns, empty=False)

    def run(*given):
        logs = block_log_softmax(given[:2], given[2:], rows, columns, 0.5, visible)
        return torch.where(logs.isneginf(), 0.0, logs)

    assert torch.autograd.gradcheck(run, (*queries, *keys))
    assert torch.autograd.gradgradcheck(run, (*queries, *keys))


def test_shares_keep_nothing_but_their_result():
    queries, keys = make(dtype=torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = block_log_softmax(queries, keys, ALL, slice(0, 3), visible=mask(ALL, slice(0, 3)))
    own = {tensor.data_ptr() for tensor in (*queries, *keys, found)}
    assert {tensor.data_ptr() for tensor in saved} == own


def test_bfloat16_is_no_further_from_float64_than_what_eager_attention_gives():
    queries, keys = make(groups=4, dtype=torch.bfloat16)
    exact = block_log_softmax(
        [q.double() for q in queries], [k.double() for k in keys], ALL, ALL, 0.4
    )
    found = block_log_softmax(queries, keys, ALL, ALL, 0.4)
    eager = [
        ((q @ k.transpose(-1, -2)) * 0.4).softmax(dim=-1, dtype=torch.float32).to(q.dtype).log()
        for q, k in zip(queries, keys, strict=True)
    ]

    def off(one):
        return float((one.double() - exact).detach().abs().max())

    assert off(found) <= off(torch.stack(eager)) / 10
    slope = torch.randn_like(exact)
    slopes = [
        torch.autograd.grad((slope * one).sum(), queries[0], retain_graph=True)[0].double()
        for one in (exact, found, torch.stack(eager))
    ]
    assert (slopes[1] - slopes[0]).norm() <= (slopes[2] - slopes[0]).norm()


def test_gradients_that_were_expanded_are_not_written_in_place():
    """The sum of a tensor has one number for its gradient, spread over all places."""
    queries, keys = make(layers=1)
    mine = tap_gradients(queries[0], keys[0])
    logs = block_log_softmax([mine[0]], [mine[1]], slice(0, 3), slice(1, 4))
    own = mine[0].tensor.sum() + mine[1].tensor.sum()
    found = torch.autograd.grad(logs.square().sum() + own, [*queries, *keys])
    plain = block_log_softmax(queries, keys, slice(0, 3), slice(1, 4))
    wanted = torch.autograd.grad(plain.square().sum(), [*queries, *keys])
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two + 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_costs_are_differentiated_twice_whoever_learns(monkeypatch, learned):
    """As with kernels, which leave second derivatives to plain operations; some may be frozen."""
    queries, keys = make()
    for some, learns in zip((queries, keys), learned, strict=True):
        for one in some:
            one.requires_grad_(learns)
    every = [one for one in (*queries, *keys) if one.requires_grad]
    wanted = torch.rand(2, 3, 4, dtype=torch.float64)
    given = queries, keys, slice(0, 3), slice(1, 5), 0.3
    plain = -(wanted[:, None] * block_log_softmax(*given)).sum(dim=-1)

    class Kernels:
        """What a GPU would have summed."""

        def cross_entropy(self, target, log_eps):
            values = plain.detach()
            return triton_launch.RowCrossEntropy(values, values, values, target)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_triton_launcher", lambda *_: Kernels())
        made = fused_cross_entropy(*given, None, wanted, -20.7)
    found = []
    for values in (made, plain):
        first = torch.autograd.grad(values.square().sum(), every, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in first), every))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
