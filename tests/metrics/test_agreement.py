"""Agreement metrics: Spearman, Kendall, CC, SIM, KL and JS compared with scipy."""

import math
import warnings

import pytest
import scipy.spatial.distance
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.attention import AttentionMap, Form, Kind, words
from overt.metrics import cc, js, kendall, kl, sim, spearman
from overt.metrics.agreement import correlation
from overt.metrics.query_swap import total_variation


@pytest.mark.parametrize(
    ("ours", "foreign"),
    [(spearman, scipy.stats.spearmanr), (kendall, scipy.stats.kendalltau)],
    ids=["spearman", "kendall"],
)
@given(st.integers(1, 24), st.integers(1, 5), st.integers(0, 2**31))
def test_rank_correlations_agree_with_scipy_row_by_row(ours, foreign, k, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**levels, (2, 6, k), generator=generator).float()
    seen = torch.rand(2, 6, k, generator=generator) > 0.2
    pair = [AttentionMap.from_cells(values[side], words(k), seen[side]) for side in (0, 1)]
    found = ours(*pair)
    for b in range(6):
        both = seen[0, b] & seen[1, b]
        first, second = values[0, b][both].numpy(), values[1, b][both].numpy()
        if len(first) < 2:
            assert found[b].isnan()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns of constant rows
            expected = foreign(first, second).statistic
        assert float(found[b]) == pytest.approx(float(expected), abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("measure", [spearman, kendall])
def test_rank_correlations_depend_on_order_only(measure, generator):
    """A map, its logarithm, its square and a signed copy agree perfectly."""
    values = torch.rand(4, 1, 1, 1, 9, generator=generator)
    truth = AttentionMap(values, words(9), kind=Kind.AMOUNT)
    for other in (
        AttentionMap(values.log(), words(9), kind=Kind.AMOUNT, form=Form.LOG),
        AttentionMap(values.square(), words(9), kind=Kind.AMOUNT),
        AttentionMap(values - 0.5, words(9), kind=Kind.SIGNED),
    ):
        torch.testing.assert_close(measure(other, truth), torch.ones(4))
    opposite = AttentionMap(-values, words(9), kind=Kind.SIGNED)
    torch.testing.assert_close(measure(opposite, truth), -torch.ones(4))


def test_correlation_agrees_with_scipy(generator):
    values = torch.randn(2, 5, 7, generator=generator)
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[:, 5] = False
    found = correlation(values[0], values[1], seen)
    for b in range(5):
        expected = scipy.stats.pearsonr(values[0, b][seen[b]], values[1, b][seen[b]]).statistic
        assert float(found[b]) == pytest.approx(float(expected), abs=1e-6)


def test_divergences_agree_with_scipy(generator):
    weights = torch.rand(2, 10, 6, generator=generator)
    weights[0, :, 2] = 0
    weights[1, :5, 2] = 0
    seen = torch.rand(10, 6, generator=generator) > 0.2
    ours = AttentionMap.from_cells(weights[0], words(6))
    theirs = AttentionMap.from_cells(weights[1], words(6), seen)
    costs, apart = kl(ours, theirs), js(ours, theirs)
    for b in range(10):
        p, q = weights[1, b][seen[b]].double().numpy(), weights[0, b][seen[b]].double().numpy()
        assert float(costs[b]) == pytest.approx(scipy.stats.entropy(p, q), abs=1e-6)
        expected = scipy.spatial.distance.jensenshannon(p, q) ** 2
        assert float(apart[b]) == pytest.approx(expected, abs=1e-6)
    assert costs[5:][seen[5:, 2]].isinf().all(), "no weight on a cell of the truth"


def test_divergences_match_examples_by_hand():
    one = AttentionMap.from_cells(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), words(2))
    two = AttentionMap.from_cells(torch.tensor([[0.0, 1.0], [5.0, 5.0]]), words(2))
    torch.testing.assert_close(js(one, two), torch.tensor([math.log(2), 0.0]))
    assert kl(one, two).tolist() == [math.inf, 0.0]


def test_long_rows_agree_with_scipy(generator):
    values = torch.randint(0, 90, (2, 3, 777), generator=generator).float()
    first, second = (AttentionMap.from_cells(one, words(777)) for one in values)
    for ours, foreign in ((kendall, scipy.stats.kendalltau), (spearman, scipy.stats.spearmanr)):
        expected = [float(foreign(*values[:, b].numpy()).statistic) for b in range(3)]
        torch.testing.assert_close(ours(first, second), torch.tensor(expected))


def test_sim_is_one_minus_total_variation(generator):
    first, second = (
        AttentionMap.from_cells(torch.rand(5, 7, generator=generator), words(7)) for _ in range(2)
    )
    torch.testing.assert_close(sim(first, second), 1 - total_variation(first, second))
    torch.testing.assert_close(sim(first, first), torch.ones(5))


def test_cc_uses_weights_instead_of_ranks(generator):
    weights = torch.rand(2, 4, 9, generator=generator)
    seen = torch.rand(4, 9, generator=generator) > 0.2
    first, second = (AttentionMap.from_cells(one, words(9), seen) for one in weights)
    found = cc(first, second)
    for b in range(4):
        expected = scipy.stats.pearsonr(weights[0, b][seen[b]], weights[1, b][seen[b]]).statistic
        assert float(found[b]) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("measure", [sim, kl, js, total_variation])
def test_negative_weights_give_nan(measure):
    signed = AttentionMap.from_cells(torch.tensor([[-1.0, 2, 0, 0], [1, 2, 0, 1]]), words(4))
    plain = AttentionMap.from_cells(torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 2]]), words(4))
    assert measure(signed, plain).isnan().tolist() == [True, False]
    assert measure(plain, signed).isnan().tolist() == [True, False]


def test_tiny_negative_weights_from_rounding_count_as_zero():
    rounded = AttentionMap.from_cells(torch.tensor([[0.5, 0.5, -1e-9]]), words(3))
    assert float(sim(rounded, rounded)) == pytest.approx(1)


@pytest.mark.parametrize("measure", [spearman, kendall, cc])
def test_correlations_accept_weights_of_any_sign(measure):
    signed = AttentionMap.from_cells(torch.tensor([[-1.0, 2, 0, 1]]), words(4))
    assert float(measure(signed, signed)) == pytest.approx(1)
