"""CORAL and MMD: values by hand, slow references, invariances, errors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.errors import UserError
from overt.losses import mse
from overt.losses.distribution_matching import (
    adaptive_gaussian_kernel,
    coral,
    coral_unscaled,
    gaussian_kernel,
    mmd,
    mmd_linear,
    mmd_unbiased,
)
from tests.losses.maps import random_map, random_target, rows_of

LOSSES = {
    "coral": coral,
    "coral_as_printed": coral_unscaled,
    "mmd_linear": mmd_linear,
    "mmd": mmd,
    "mmd_unbiased": mmd_unbiased,
}
MU, ALPHA = rows_of([0.5, 0.5], [0.9, 0.1]), rows_of([0.5, 0.5], [0.5, 0.5])


# --- slow references


def supervised_rows(attention: AttentionMap, target: AttentionMap):
    """Yield the supervised rows of attention and target for each layer and head."""
    b, l, h, q, k = attention.values.shape
    wanted = target.weights.expand(b, l, h, q, k)
    for layer in range(l):
        for head in range(h):
            ours, theirs = [], []
            for at in range(b):
                for query in range(q):
                    goal = wanted[at, layer, head, query]
                    if attention.visible[at, query].any() and goal.sum() > 0:
                        seen = attention.visible[at, query]
                        ours.append((attention.weights[at, layer, head, query] * seen).numpy())
                        theirs.append((goal * seen).numpy())
            yield np.array(ours), np.array(theirs)


def slow_coral(ours: np.ndarray, theirs: np.ndarray) -> float:
    gap = np.cov(theirs, rowvar=False) - np.cov(ours, rowvar=False)
    return float((gap**2).sum())


def slow_mmd(ours: np.ndarray, theirs: np.ndarray, factors, biased: bool) -> float:
    """Compute MMD pair by pair; the mean distance is over distinct rows of both sets."""
    both = [*theirs, *ours]
    far = [((a - b) ** 2).sum() for i, a in enumerate(both) for j, b in enumerate(both) if i != j]
    mean = sum(far) / len(far)

    def k(a, b):
        return sum(math.exp(-((a - b) ** 2).sum() / (f * mean)) for f in factors) / len(factors)

    n = len(ours)
    within = 0.0
    for heap in (ours, theirs):
        pairs = [(i, j) for i in range(n) for j in range(n) if biased or i != j]
        within += sum(k(heap[i], heap[j]) for i, j in pairs) / len(pairs)
    return within - 2 * sum(k(a, b) for a in ours for b in theirs) / n**2


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("masked", [True, False])
def test_every_loss_agrees_with_its_slow_reference(heads, masked):
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    for seed in range(2):
        attention = random_map(b=4, seed=seed, masked=masked)
        target = random_target(attention, seed + 10, heads)
        found = [*supervised_rows(attention, target)]
        keys = 5  # each is visible to some row
        expected = {
            "coral": [slow_coral(*pair) / (4 * keys**2) for pair in found],
            "coral_as_printed": [slow_coral(*pair) / 4 for pair in found],
            "mmd_linear": [float(np.linalg.norm(a.mean(0) - t.mean(0))) for a, t in found],
            "mmd": [slow_mmd(*pair, factors, True) for pair in found],
            "mmd_unbiased": [slow_mmd(*pair, factors, False) for pair in found],
        }
        for name, loss in LOSSES.items():
            one = loss(attention, target)
            assert float(one.total) == pytest.approx(np.mean(expected[name]), rel=1e-9), name
            assert float(one.count) == 1 and one.batch_level


def test_mmd_with_a_linear_kernel_equals_squared_linear_mmd():
    """`mmd` with `k = t a`, expressed by distances; the other terms of the product cancel."""
    attention = random_map(b=6, l=1, h=1, q=1, masked=False)
    target = random_target(random_map(b=6, l=1, h=1, q=1, seed=3, masked=False), seed=11)
    found = mmd(attention, target, kernel=lambda squared, real: -squared / 2)
    rows = target.weights[:, 0, 0, 0].sum(dim=-1) > 0
    assert int(rows.sum()) > 2
    assert float(found.total) == pytest.approx(float(mmd_linear(attention, target).total) ** 2)


# --- test vectors


def test_t_ssa_6_loss_and_gradient_are_zero_at_the_target():
    for name, loss in LOSSES.items():
        scores = torch.randn(4, 2, 2, 1, 5, dtype=torch.float64, requires_grad=True)
        attention = AttentionMap.from_scores(scores, words(5))
        found = loss(attention, attention.detach())
        found.total.backward()
        if name != "mmd_unbiased":  # unbiased, so zero on average only
            assert float(found.total.detach()) == pytest.approx(0.0, abs=1e-12), name
            torch.testing.assert_close(
                scores.grad, torch.zeros_like(scores), rtol=0, atol=1e-9, msg=name
            )


def test_t_ssa_7_toy_values_by_hand():
    assert float(coral_unscaled(ALPHA, MU).total) == pytest.approx(0.0256 / 4)
    assert float(coral(ALPHA, MU).total) == pytest.approx(0.0256 / 16)
    assert float(mmd_linear(ALPHA, MU).total) == pytest.approx(0.282843, abs=1e-6)
    assert float(mse(ALPHA, MU).mean()) == pytest.approx(0.08)


def test_t_ssa_8_permuted_targets_do_not_change_batch_losses():
    """So they cannot supervise single samples; the squared error can."""
    turned = MU.select(torch.tensor([1, 0]))
    for name, loss in LOSSES.items():
        one, other = loss(MU, MU), loss(MU, turned)
        assert float(other.total) == pytest.approx(float(one.total), abs=1e-9), name
        if name != "mmd_unbiased":
            assert float(other.total) == pytest.approx(0.0, abs=1e-6), name
    assert float(mse(MU, turned).mean()) == pytest.approx(0.16)
    attention = random_map(b=6, q=1, masked=False, seed=5)
    target = random_target(random_map(b=6, q=1, masked=False, seed=6), seed=7)
    target = replace(target, values=target.values + 0.1).normalize()
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    for name, loss in LOSSES.items():
        torch.testing.assert_close(
            loss(attention, target).total, loss(attention, target.select(order)).total, msg=name
        )
    assert abs(mse(attention, target).total - mse(attention, target.select(order)).total) > 1e-3


def test_t_ssa_9_a_single_row_is_never_nan():
    x, y = rows_of([0.7, 0.2, 0.1]), rows_of([0.1, 0.2, 0.7])
    for widths in ((0.3,), (0.1, 1.0)):
        kernel = gaussian_kernel(widths)
        k = sum(math.exp(-0.72 / (2 * w * w)) for w in widths) / len(widths)
        assert float(mmd(x, y, kernel).total) == pytest.approx(2 - 2 * k)
    for name, loss in LOSSES.items():
        weights = torch.tensor([[0.7, 0.2, 0.1]], requires_grad=True)
        one = loss(AttentionMap.from_cells(weights, words(3)), y)
        one.total.backward()
        assert one.total.isfinite() and weights.grad.isfinite().all(), name
        if name in ("coral", "coral_as_printed", "mmd_unbiased"):
            assert float(one.total.detach()) == 0 and float(one.count) == 0, name
            assert not weights.grad.any(), name
    same = mmd(x, x)
    assert float(same.total) == 0


def test_finding_14_mmd_of_one_row_with_a_wide_kernel_is_the_squared_error():
    """The published code: batches of one, `exp(-mean((x - y)^2) / 200)`, a weight of 10,000."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(1, 200, generator=generator, dtype=torch.float64) for _ in range(2))
    x, y = (AttentionMap.from_cells(one, words(200)).normalize() for one in (x, y))
    squared = float((x.weights - y.weights).square().sum())
    published = 2 - 2 * math.exp(-squared / 200**2)
    found = float(mmd(x, y, gaussian_kernel((200 / math.sqrt(2),))).total)
    assert found == pytest.approx(published, abs=1e-12)
    assert 10_000 * found == pytest.approx(0.5 * squared, abs=1e-9)


# --- invariances


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name):
    attention = random_map(b=4, l=1, q=2, k=3)
    target = random_target(attention)
    # the mean distance is detached, so finite differences need a kernel without it
    more = {"kernel": gaussian_kernel((0.2, 0.7))} if name in ("mmd", "mmd_unbiased") else {}

    def loss(scores: Tensor) -> Tensor:
        made = AttentionMap.from_scores(scores, attention.keys, attention.queries, attention.mask)
        return LOSSES[name](made, target, **more).total

    scores = torch.randn(attention.values.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (scores,))


def test_mean_distance_is_detached():
    values = torch.rand(6, 4, dtype=torch.float64)
    target = AttentionMap.from_cells(torch.rand(6, 4, dtype=torch.float64), words(4))
    gradients = []
    both = torch.cat([target.values[:, 0, 0, 0], values])
    far = (both[:, None] - both[None]).square().sum(-1)
    mean = float(far.sum() / (12 * 11))
    for kernel in (adaptive_gaussian_kernel((1.0,)), gaussian_kernel((math.sqrt(mean / 2),))):
        given = values.clone().requires_grad_()
        mmd(AttentionMap.from_cells(given, words(4)), target, kernel).total.backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_does_not_change_the_loss(name):
    attention = random_map(b=5, seed=3)
    target = random_target(attention, seed=4)
    pad = torch.nn.functional.pad
    wider = AttentionMap.from_scores(
        pad(attention.values.masked_fill(attention.values.isneginf(), 0.0), (0, 2)),
        words(7),
        attention.queries,
        pad(attention.mask, (0, 2)),
    )
    longer = replace(target, values=pad(target.values, (0, 2)), keys=words(7))
    torch.testing.assert_close(
        LOSSES[name](wider, longer).total, LOSSES[name](attention, target).total
    )


@pytest.mark.parametrize("name", LOSSES)
def test_rows_without_a_target_or_visible_keys_do_not_count(name):
    scores = torch.randn(5, 1, 2, 1, 4, requires_grad=True)
    mask = torch.ones(5, 1, 4, dtype=torch.bool)
    mask[1] = False
    attention = AttentionMap.from_scores(scores, words(4), mask=mask)
    target = rows_of(
        [0.0] * 4, [1.0, 0, 0, 0], [0.0, 1, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4]
    )
    loss = LOSSES[name](attention, target)
    loss.total.backward(retain_graph=True)
    assert not scores.grad[:2].any() and scores.grad[2:].any() and scores.grad.isfinite().all()
    some = torch.tensor([2, 3, 4])
    torch.testing.assert_close(
        loss.total, LOSSES[name](attention.select(some), target.select(some)).total
    )
    scores.grad = None
    none = LOSSES[name](attention, rows_of(*[[0.0] * 4] * 5))
    assert float(none.total.detach()) == 0 and float(none.count) == 0
    none.total.backward()
    assert not scores.grad.any()


@pytest.mark.parametrize("name", LOSSES)
def test_heads_are_compared_separately_and_averaged(name):
    attention = random_map(b=4, q=1, masked=False)
    target = random_target(random_map(b=4, q=1, masked=False, seed=2), seed=8)
    each = [
        LOSSES[name](attention.layer(l).head(h), target).total for l in range(2) for h in range(2)
    ]
    torch.testing.assert_close(LOSSES[name](attention, target).total, torch.stack(each).mean())


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_gives_a_float32_loss(name):
    attention = random_map(b=4, kind=torch.bfloat16)
    target = random_target(attention)
    loss = LOSSES[name](attention, target)
    assert loss.total.dtype == torch.float32 and loss.total.isfinite()


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_does_not_change_the_loss(name):
    attention = random_map(b=4, kind=torch.float32)
    target = random_target(attention)
    with torch.autocast("cpu", torch.bfloat16):
        found = LOSSES[name](attention, target).total
    assert torch.equal(found, LOSSES[name](attention, target).total)


def test_unbiased_mmd_is_zero_on_average_and_biased_is_not():
    """Many pairs of samples of one distribution."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        x, y = (
            AttentionMap.from_cells(torch.rand(6, 5, generator=generator), words(5)).normalize()
            for _ in range(2)
        )
        kernel = gaussian_kernel((0.3,))
        found.append([float(mmd(x, y, kernel).total), float(mmd_unbiased(x, y, kernel).total)])
    biased, unbiased = np.array(found).T
    error = unbiased.std() / math.sqrt(len(unbiased))
    assert abs(unbiased.mean()) < 3 * error and (unbiased < 0).mean() > 0.3
    assert biased.min() >= 0 and biased.mean() > 10 * error


def test_targets_of_another_shape_raise():
    for wrong in (rows_of([0.5, 0.5]), rows_of([1.0], [1.0])):
        with pytest.raises(ValueError, match=r"layers.*heads"):
            coral(ALPHA, wrong)


def test_gradient_accumulation_of_batch_losses_raises(tmp_path):
    from overt.train import FitConfig, fit
    from tests.train import toys

    net, sets = toys.make()

    def step(model, batch, progress):
        hidden = model.hidden(batch)
        attention = AttentionMap.from_cells(hidden.softmax(dim=-1), words(16))
        return {"model": {"coral": coral(attention, attention.detach())}}

    with pytest.raises(UserError, match="'coral' cannot be"):
        fit(
            net, toys.Numbers(), step, {"model": sets["model"]},
            FitConfig(epochs=1, batch=4, accumulate=2), out=tmp_path, seed=0, device="cpu",
        )  # fmt: skip


@pytest.fixture
def without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of shapes at each call, as for users."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("make", [gaussian_kernel, adaptive_gaussian_kernel])
@pytest.mark.parametrize(
    "widths", [(), (0.0,), (-1.0,), (1.0, float("nan")), (float("inf"),), 1.0, None]
)
def test_widths_that_are_not_positive_raise(make, widths):
    with pytest.raises(ValueError, match=r"(widths|factors).*positive"):
        make(widths)
