"""Statistics: intervals, paired differences, permutation tests and corrections."""

import inspect
import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from overt.metrics import (
    confidence_interval,
    holm,
    mean,
    paired_difference,
    permutation_test,
    statistics,
    two_level_difference,
    two_level_interval,
)
from overt.metrics.statistics import (
    benjamini_hochberg,
    effect_size,
    mean_over_seeds,
    probability_of_superiority,
)

NAN = math.nan


def test_the_mean_ignores_nan():
    assert mean(torch.tensor([1.0, NAN, 3.0])) == 2
    assert math.isnan(mean(torch.tensor([NAN])))


# --- reference implementation of the formulas


def reference_crossed(
    arms: list[list[list[float]]], clusters: list[str], confidence: float = 0.95
) -> tuple[float, float, float, float]:
    """Compute mean, low, high and df of one method, or of the first minus the second."""
    names = [
        name
        for name in dict.fromkeys(clusters)
        if any(
            not math.isnan(run[at])
            for arm in arms
            for run in arm
            for at, one in enumerate(clusters)
            if one == name
        )
    ]
    c, means, sums = len(names), [], []
    for arm in arms:
        there = [x for run in arm for x in run if not math.isnan(x)]
        means.append(sum(there) / len(there))
        sums.append(
            [
                [
                    sum(
                        (run[at] - means[-1]) / len(there)
                        for at, one in enumerate(clusters)
                        if one == name and not math.isnan(run[at])
                    )
                    for name in names
                ]
                for run in arm
                if not all(math.isnan(x) for x in run)
            ]
        )
    columns = [[sum(run[k] for run in one) for k in range(c)] for one in sums]
    apart = columns[0] if len(arms) == 1 else [x - y for x, y in zip(*columns, strict=True)]
    items = c / (c - 1) * sum(x * x for x in apart)
    rows = both = below = mixed = 0.0
    for one, column in zip(sums, columns, strict=True):
        s = len(one)
        if s == 1:
            continue
        row = [sum(run) for run in one]
        r = s / (s - 1) * sum(x * x for x in row)
        d = [one[i][k] - row[i] / c - column[k] / s for i in range(s) for k in range(c)]
        b = s * c / ((s - 1) * (c - 1)) * sum(x * x for x in d)
        rows, both = rows + r, both + b
        below += r * r / (s - 1)
        mixed += b * b / ((s - 1) * (c - 1))
    variance = max(rows + items - both, rows, items)
    below += items * items / (c - 1)
    if variance > max(rows, items):
        below += mixed
    df = variance * variance / below
    half = float(scipy.stats.t.ppf((1 + confidence) / 2, df)) * math.sqrt(variance)
    middle = means[0] if len(arms) == 1 else means[0] - means[1]
    return middle, middle - half, middle + half, df


def noisy_values(seed: int, runs: int, items: int, of_runs: float, of_items: float) -> torch.Tensor:
    """Return values of runs by items with noise of runs, of items and of single values."""
    generator = torch.Generator().manual_seed(seed)
    rows = of_runs * torch.randn(runs, 1, generator=generator, dtype=torch.float64)
    columns = of_items * torch.randn(1, items, generator=generator, dtype=torch.float64)
    return 0.5 + rows + columns + torch.randn(runs, items, generator=generator).double()


@pytest.mark.parametrize(("of_runs", "of_items"), [(2.0, 0.1), (0.0, 3.0), (1.0, 3.0), (0.0, 0.0)])
@pytest.mark.parametrize("runs", [1, 2, 3, 6])
def test_crossed_intervals_agree_with_the_reference(runs, of_runs, of_items):
    values = noisy_values(runs, runs, 24, of_runs, of_items)
    values[0, 3] = values[-1, 7] = NAN
    clusters = [f"image {at % 9}" for at in range(24)]
    for names in (clusters, None):
        found = two_level_interval(values, clusters=names)
        slow = reference_crossed([values.tolist()], names or [str(at) for at in range(24)])
        assert (found.mean, found.low, found.high, found.df) == pytest.approx(slow)
        assert found.count == 24 - (runs == 1) * 2 and found.runs == runs
    narrow = two_level_interval(values, confidence=0.5)
    assert (narrow.low, narrow.high) == pytest.approx(
        reference_crossed([values.tolist()], [str(at) for at in range(24)], 0.5)[1:3]
    )


@pytest.mark.parametrize("runs", [(1, 1), (2, 3), (5, 5)])
def test_differences_agree_with_the_reference(runs):
    shared = torch.randn(18, generator=torch.Generator().manual_seed(9)).double()
    first, second = (noisy_values(at, s, 18, 0.5, 0.2) + shared for at, s in enumerate(runs))
    first[0, 0] = NAN
    clusters = [f"image {at // 2}" for at in range(18)]
    found = two_level_difference(first, second, clusters=clusters)
    slow = reference_crossed([first.tolist(), second.tolist()], clusters)
    assert (found.mean, found.low, found.high, found.df) == pytest.approx(slow)
    assert found.runs == min(runs) and found.count == 18


def test_variance_at_its_lower_bound_has_no_interaction_term():
    """If the noise of single values hides that of runs, the variance is its lower bound."""
    values = noisy_values(4, 3, 40, 0.0, 0.0)
    mean = values.mean()
    rest = values - mean
    rows = 1.5 * float((rest.sum(dim=1) / 120).square().sum())
    items = 40 / 39 * float((rest.sum(dim=0) / 120).square().sum())
    floor = max(rows, items)
    found = two_level_interval(values)
    assert found.error == pytest.approx(math.sqrt(floor))
    assert found.df == pytest.approx(floor**2 / (rows**2 / 2 + items**2 / 39))


# --- coverage

CASES = {"seeds": (1.0, 0.3, 0.3), "both": (0.12, 1.0, 1.0), "items": (0.0, 1.0, 0.3)}


def coverage(noise: str, runs: int, repeats: int, items: int = 100) -> float:
    """Simulate how often the interval contains the true value 0."""
    of_runs, of_items, rest = CASES[noise]
    generator = torch.Generator().manual_seed(runs)
    hits = 0
    for _ in range(repeats):
        rows = of_runs * torch.randn(runs, 1, generator=generator)
        columns = of_items * torch.randn(1, items, generator=generator)
        found = two_level_interval(
            rows + columns + rest * torch.randn(runs, items, generator=generator)
        )
        hits += found.low <= 0 <= found.high
    return hits / repeats


@pytest.mark.long
@pytest.mark.parametrize("runs", [3, 10])
@pytest.mark.parametrize("noise", CASES)
def test_crossed_intervals_cover_the_truth(noise, runs):
    """Short version of the long test: a bootstrap with coverage 72 % or 85 % would fail."""
    assert 0.91 <= coverage(noise, runs, 200) <= 0.99


@pytest.mark.long
@pytest.mark.parametrize("runs", [3, 5, 10])
@pytest.mark.parametrize("noise", CASES)
def test_crossed_intervals_cover_95_percent(noise, runs):
    assert coverage(noise, runs, 1000) == pytest.approx(0.95, abs=0.02)


@pytest.mark.long
def test_two_runs_cover_about_90_percent_where_seeds_dominate():
    assert 0.87 <= coverage("seeds", 2, 1000) <= 0.965
    assert two_level_interval(noisy_values(0, 2, 9, 1, 1)).note == "two runs: coverage about 90 %"


@pytest.mark.parametrize("clusters", [2, 4, 8])
def test_one_run_in_clusters_covers_the_truth(clusters):
    generator, hits = torch.Generator().manual_seed(clusters), 0
    names = [f"image {at % clusters}" for at in range(5 * clusters)]
    for _ in range(300):
        images = torch.randn(clusters, generator=generator).repeat(5)
        values = images + 0.5 * torch.randn(5 * clusters, generator=generator)
        found = confidence_interval(values, clusters=names)
        hits += found.low <= 0 <= found.high
    assert 0.92 <= hits / 300 <= 0.985


def test_few_samples_of_one_run_cover_the_truth():
    generator, hits = torch.Generator().manual_seed(2), 0
    for _ in range(500):
        found = confidence_interval(torch.randn(10, generator=generator) + 1)
        hits += found.low <= 1 <= found.high
    assert 0.925 <= hits / 500 <= 0.975


def test_shares_near_one_cover_the_truth():
    """With ten samples and 97 % correct, a percentile bootstrap covers 26 times of 100."""
    generator, hits = torch.Generator().manual_seed(4), 0
    for _ in range(500):
        right = (torch.rand(10, generator=generator) < 0.97).double()
        found = confidence_interval(right, share=True)
        hits += found.low <= 0.97 <= found.high
    assert hits / 500 >= 0.9


# --- one run


def test_one_run_agrees_with_scipy(generator):
    values = torch.rand(20, generator=generator).double()
    found = confidence_interval(values)
    theirs = scipy.stats.ttest_1samp(values.numpy(), 0)
    ends = theirs.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high))
    assert found.p == pytest.approx(theirs.pvalue) and found.df == 19 and found.count == 20
    holes = torch.cat([values, torch.full((9,), NAN)])
    again = confidence_interval(holes)
    assert (again.low, again.high) == pytest.approx((found.low, found.high)), "NaN is left out"
    assert found.note == ""


def test_wilson_agrees_with_scipy():
    for right, n in ((10, 10), (9, 10), (3, 40), (0, 7)):
        values = torch.tensor([1.0] * right + [0.0] * (n - right))
        found = confidence_interval(values, share=True)
        theirs = scipy.stats.binomtest(right, n).proportion_ci(method="wilson")
        assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
        assert found.mean == right / n and found.count == n and math.isnan(found.p)


def test_clustered_shares_use_t_or_wilson_intervals():
    """Use t over clusters, and Wilson's interval over clusters if the values do not vary."""
    values = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 1])
    names = list("aabbccdd")
    plain = confidence_interval(values, clusters=names)
    clustered = confidence_interval(values, clusters=names, share=True)
    assert plain.high > 1 and clustered == replace(plain, low=max(0.0, plain.low), high=1.0)
    same = confidence_interval(torch.ones(8), clusters=names, share=True)
    few = confidence_interval(torch.ones(4), share=True)
    assert (same.low, same.high) == (few.low, few.high) and same.low < 0.6 and same.count == 8
    with pytest.raises(ValueError, match=r"0 and 1, got 0.5"):
        confidence_interval([0.5, 1.0], share=True)


def test_binary_differences_do_not_use_the_share_interval():
    """Two of 40 better and none worse can be chance, though all differences are 0 or 1."""
    found = confidence_interval([1.0, 1.0] + [0.0] * 38)
    assert found.low < 0 < found.high


def has_no_interval(found):
    return math.isnan(found.low) and math.isnan(found.high)


def test_one_sample_has_no_interval():
    found = confidence_interval([0.7])
    assert has_no_interval(found) and found.mean == 0.7 and found.count == 1
    one = torch.tensor([[1.0]])
    for found in (
        confidence_interval([0.7]),
        confidence_interval([1.0], share=True),
        confidence_interval([0.7, NAN]),
        two_level_interval(one.expand(3, 1)),
        two_level_difference(one, one),
        paired_difference([1.0], [0.0], ["a"], ["a"]),
    ):
        assert has_no_interval(found) and found.count == 1 and math.isnan(found.p)


def test_one_cluster_has_no_interval():
    values = torch.rand(3, 6)
    names = ["one image"] * 6
    for found in (
        confidence_interval(values[0], clusters=names),
        confidence_interval(torch.ones(6), clusters=names, share=True),
        two_level_interval(values, clusters=names),
        two_level_difference(values, values[:2], clusters=names),
    ):
        assert has_no_interval(found) and found.count == 6


def test_constant_values_have_a_p_but_no_interval():
    found = confidence_interval(torch.full((40,), 0.7))
    assert has_no_interval(found) and found.mean == pytest.approx(0.7) and found.error == 0
    assert found.p == pytest.approx(2**-39)
    assert confidence_interval(torch.zeros(5)).p == 1
    assert has_no_interval(two_level_interval(torch.full((3, 5), 0.1)))


def test_empty_and_nan_values_have_no_interval():
    for values in (torch.tensor([]), torch.tensor([NAN, NAN])):
        found = confidence_interval(values)
        assert math.isnan(found.mean) and has_no_interval(found) and found.count == 0
    assert statistics.confidence_intervals(torch.zeros(0, 4)) == ()


def test_paired_difference_matches_by_id_and_is_narrower(generator):
    hard = torch.randn(300, generator=generator)
    first = hard + 0.1 + 0.05 * torch.randn(300, generator=generator)
    order = torch.randperm(300, generator=generator)
    ids = [f"s{i}" for i in range(300)]
    found = paired_difference(first, hard[order], ids, [ids[int(i)] for i in order])
    assert found.mean == pytest.approx(0.1, abs=0.02) and found.low > 0.08
    alone = confidence_interval(first)
    assert found.high - found.low < 0.1 * (alone.high - alone.low)
    assert found == confidence_interval(first.double() - hard.double())


def test_paired_difference_ignores_pairs_with_nan():
    first, second = torch.tensor([1.0, NAN, 3.0]), torch.tensor([NAN, 1.0, 1.0])
    for names in ((), ("abc", "abc")):
        with pytest.warns(UserWarning, match="^2 of 3 "):
            found = paired_difference(first, second, *names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no sample is left out on one side alone
        assert paired_difference([NAN, 2.0], [NAN, 1.0]).count == 1
    assert found.mean == 2 and found.count == 1 and has_no_interval(found)


def test_paired_difference_of_other_samples_raises():
    one = torch.zeros(2)
    with pytest.raises(ValueError, match=r"2 .* 'b'"):
        paired_difference(one, one, ["a", "b"], ["a", "c"])
    with pytest.raises(ValueError, match="unique"):
        paired_difference(one, one, ["a", "a"], ["a", "b"])
    with pytest.raises(ValueError, match="2 and 1"):
        paired_difference(one, one, ["a"], ["a", "b"])


# --- several runs


def test_mean_over_seeds_matches_an_example_by_hand():
    found = mean_over_seeds(torch.tensor([[1.0, 3.0], [4.0, NAN], [6.0, 6.0]]))
    assert found.mean == 4 and found.deviation == 2 and found.seeds == 3
    assert math.isnan(mean_over_seeds(torch.ones(1, 4)).deviation)


def test_few_runs_have_a_note():
    values = noisy_values(0, 6, 20, 1, 1)
    notes = [two_level_interval(values[:runs]).note for runs in (1, 2, 3, 4, 5)]
    assert notes == [
        "",
        "two runs: coverage about 90 %",
        "provisional: 3 runs",
        "provisional: 4 runs",
        "",
    ]


def test_a_run_of_nan_is_not_counted():
    values = noisy_values(0, 3, 20, 1, 1)
    values[1] = NAN
    found, fewer = two_level_interval(values), two_level_interval(values[[0, 2]])
    assert (found.low, found.high, found.df) == pytest.approx((fewer.low, fewer.high, fewer.df))
    assert found.runs == fewer.runs == 2


def test_a_single_run_of_one_method_gives_no_interval():
    values = noisy_values(0, 3, 20, 1, 1)
    assert has_no_interval(two_level_difference(values, values[:1]))
    both = (
        two_level_difference(values[:1], values[1:2]),
        two_level_interval(values[:1] - values[1:2]),
    )
    assert both[0].low == pytest.approx(both[1].low) and both[0].df == both[1].df == 19


def test_two_levels_are_wider_when_runs_differ(generator):
    items = torch.rand(1, 200, generator=generator)
    same = two_level_interval(items.expand(3, 200))
    one = confidence_interval(items[0])
    assert same.high - same.low == pytest.approx(one.high - one.low, rel=1e-6)
    differ = two_level_interval(items + torch.tensor([[0.0], [0.3], [0.6]]))
    assert differ.high - differ.low > 3 * (same.high - same.low)


def test_differences_cancel_the_difficulty_of_items(generator):
    items = 3 * torch.rand(1, 100, generator=generator)
    first = items + 0.2 + 0.01 * torch.randn(3, 100, generator=generator)
    second = items + 0.01 * torch.randn(4, 100, generator=generator)
    found = two_level_difference(first, second)
    assert found.mean == pytest.approx(0.2, abs=0.01)
    assert 0.18 < found.low < found.high < 0.22
    assert two_level_interval(first).low < two_level_interval(second).high, (
        "separate intervals would overlap"
    )


def test_differences_of_other_samples_raise(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match="4 and 5"):
        two_level_difference(torch.zeros(2, 4), torch.zeros(2, 5))


def test_p_is_below_5_percent_where_the_interval_excludes_zero():
    for seed in range(30):
        found = two_level_interval(noisy_values(seed, 4, 30, 0.5, 0.5))
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


# --- clusters


def test_clustered_copies_do_not_narrow_the_interval(generator):
    """With five copies of each value, the clustered interval is that of the values."""
    values = torch.rand(60, generator=generator)
    copies = values.repeat_interleave(5)
    names = [f"image {at // 5}" for at in range(300)]
    once, clustered = confidence_interval(values), confidence_interval(copies, clusters=names)
    fooled = confidence_interval(copies)
    assert (clustered.low, clustered.high) == pytest.approx((once.low, once.high))
    assert fooled.high - fooled.low < 0.6 * (once.high - once.low)
    both = two_level_interval(copies.expand(3, -1), clusters=names)
    assert both.high - both.low == pytest.approx(once.high - once.low)


def test_clusters_of_nan_are_left_out():
    values = torch.tensor([1.0, NAN, NAN, 3.0])
    found = confidence_interval(values, clusters=["a", "a", "b", "c"])
    assert found.mean == 2 and found.count == 2 and found.df == 1
    with pytest.raises(ValueError, match="1 for 4 samples"):
        confidence_interval(values, clusters=["a"])


# --- tests and corrections


@pytest.mark.newer("scipy>=1.15")
def test_permutation_test_agrees_with_scipy(generator):
    few = torch.randn(10, generator=generator) + 0.4
    exact = scipy.stats.permutation_test(
        (few.double().numpy(),), np.mean, permutation_type="samples", n_resamples=math.inf
    ).pvalue
    assert permutation_test(few) == pytest.approx(exact)
    many = torch.randn(80, generator=generator) + 0.2
    drawn = scipy.stats.permutation_test(
        (many.double().numpy(),), np.mean, permutation_type="samples", n_resamples=9999, rng=0
    ).pvalue
    assert permutation_test(many) == pytest.approx(drawn, abs=0.02)


def test_permutation_test_has_the_nominal_error_rate():
    generator = torch.Generator().manual_seed(5)
    found = [permutation_test(torch.randn(12, generator=generator)) for _ in range(300)]
    assert sum(p <= 0.1 for p in found) / 300 == pytest.approx(0.1, abs=0.05)


def test_skewed_differences_exceed_the_nominal_error_rate():
    """With ten log-normal samples both tests reject in far more than 5 % of cases."""
    generator, signs, ts = torch.Generator().manual_seed(6), 0, 0
    for _ in range(400):
        skewed = torch.randn(10, generator=generator).double().mul(1.2).exp() - math.exp(0.72)
        signs += permutation_test(skewed) < 0.05
        ts += confidence_interval(skewed).p < 0.05
    assert signs / 400 > 0.1 and ts / 400 > 0.1


def test_p_is_never_zero_and_nan_without_samples():
    assert permutation_test(torch.ones(200), draws=99) == pytest.approx(1 / 100)
    assert permutation_test(torch.ones(200), draws=99, seed=1) == pytest.approx(1 / 100)
    assert permutation_test(torch.zeros(5)) == 1
    assert math.isnan(permutation_test(torch.tensor([NAN])))


def test_corrections_agree_with_scipy_and_examples_by_hand(generator):
    p = torch.rand(9, generator=generator).double().square().tolist()
    expected = scipy.stats.false_discovery_control(p)
    assert benjamini_hochberg(p) == pytest.approx(expected.tolist())
    assert holm([0.01, 0.04, 0.03]) == pytest.approx((0.03, 0.06, 0.06))
    assert holm([0.5, 0.9]) == (1.0, 1.0)
    assert all(h >= b for h, b in zip(holm(p), benjamini_hochberg(p), strict=True))
    for correct in (holm, benjamini_hochberg):
        first, missing, second = correct([0.01, NAN, 0.02])
        assert math.isnan(missing) and (first, second) == pytest.approx((0.02, 0.02))
        assert correct([]) == ()
        with pytest.raises(ValueError, match="from 0 to 1, got 1"):
            correct([1.5])


def test_effect_sizes_match_examples_by_hand():
    difference = torch.tensor([1.0, 2.0, 3.0, NAN])
    assert effect_size(difference) == pytest.approx(2.0)
    assert math.isnan(effect_size(torch.ones(4))) and math.isnan(effect_size(torch.ones(1)))
    assert probability_of_superiority(torch.tensor([1.0, 0.0, -2.0, 3.0, NAN])) == pytest.approx(
        2.5 / 4
    )


# --- many metrics at once


def test_batched_intervals_equal_single_intervals() -> None:
    values = torch.rand(3, 7, generator=torch.Generator().manual_seed(1))
    values[1, 2] = values[2, 0] = torch.nan
    values[0] = (values[0] > 0.5).float()
    clusters = ["a", "b", "a", "c", "c", "b", "d"]
    for names in (clusters, None):
        found = statistics.confidence_intervals(values, clusters=names, shares=[True, False, False])
        for at, (one, row) in enumerate(zip(found, values, strict=True)):
            assert one == confidence_interval(row, clusters=names, share=at == 0)
    with pytest.raises(ValueError, match="1 for 3"):
        statistics.confidence_intervals(values, shares=[True])


@pytest.mark.parametrize("n", [6, 40])
def test_batched_permutation_tests_equal_single_tests(n: int) -> None:
    """Equal for exhaustive signs and for signs drawn from the same seed."""
    values = torch.randn(4, n, generator=torch.Generator().manual_seed(3)) + 0.3
    values[3, :2] = torch.nan
    found = statistics.permutation_tests(values, seed=1, draws=500)
    for p, row in zip(found[:3], values[:3], strict=True):
        assert p == pytest.approx(statistics.permutation_test(row, seed=1, draws=500))
    alone = statistics.permutation_test(values[3], seed=1, draws=500)
    assert found[3] == pytest.approx(alone, abs=0.08)
    nothing = statistics.permutation_tests(torch.full((1, 5), torch.nan))
    assert math.isnan(nothing[0])


def test_samples_of_a_cluster_change_sign_together() -> None:
    """Ten copies of a sample add no information: p of two clusters is at least 1/2."""
    values = torch.ones(1, 20)
    clusters = ["a"] * 10 + ["b"] * 10
    assert statistics.permutation_tests(values, clusters=clusters) == (0.5,)
    assert statistics.permutation_tests(values)[0] < 1e-3


def test_lists_are_accepted_and_other_shapes_raise() -> None:
    first, second = [1.0, 2.0, 4.0], [0.0, 2.0, 1.0]
    assert confidence_interval(first) == confidence_interval(torch.tensor(first))
    names = ["a", "b", "c"]
    both = statistics.paired_difference(first, second, names, names)
    assert both == statistics.paired_difference(
        torch.tensor(first), torch.tensor(second), names, names
    )
    assert (
        statistics.probability_of_superiority([1.0, -1.0]) == 0.5
        and statistics.effect_size([1.0, 3.0]) > 0
    )
    assert statistics.permutation_test([1.0, 1.0]) == 0.5
    with pytest.raises(ValueError, match=r"samples,.*\(1, 2\)"):
        statistics._as_float64([[1.0, 2.0]])


# --- infinite values


INF = math.inf


@pytest.mark.parametrize("clusters", [None, list("abcd"), list("aabb")])
def test_an_infinite_value_gives_an_infinite_mean_without_interval(clusters):
    values = torch.tensor([INF, 0, 0, 0])
    for sign in (1, -1):
        found = confidence_interval(sign * values, clusters=clusters)
        assert found.mean == sign * INF and has_no_interval(found) and found.count == 4
        assert math.isnan(found.p)
    both = torch.tensor([INF, -INF, 0.0])
    assert math.isnan(confidence_interval(both).mean) and has_no_interval(
        two_level_interval(both[None])
    )


def test_an_infinite_value_of_one_run_gives_an_infinite_mean():
    values = torch.tensor([[INF, 1.0, 2.0], [0.0, 1.0, 2.0]])
    found = two_level_interval(values)
    assert found.mean == INF and has_no_interval(found)
    less = two_level_difference(values.clamp_max(1), values)
    assert less.mean == -INF and has_no_interval(less)


def test_infinite_differences_give_nan_p():
    assert math.isnan(permutation_test([1.0, 2.0, INF, 3.0]))
    rows = torch.tensor([[1.0, 2.0, INF, 3.0], [1.0, 2.0, 4.0, 3.0]])
    first, second = statistics.permutation_tests(rows)
    assert math.isnan(first) and second == permutation_test(rows[1])


def test_samples_infinite_in_both_are_left_out():
    ids = ["a", "b", "c"]
    assert paired_difference([INF, 1.0, 2.0], [INF, 0.0, 0.0], ids, ids).count == 2


# --- counts and invalid input


def test_samples_that_are_nan_in_all_runs_are_not_counted():
    values = torch.tensor([[1.0, NAN, 3.0], [2.0, NAN, NAN]])
    assert two_level_interval(values).count == 2
    assert two_level_difference(values, values).count == 2
    assert two_level_difference(values, torch.ones(1, 3)).count == 3


def test_means_accept_lists():
    assert mean([1.0, NAN, 2.0]) == 1.5
    assert mean_over_seeds([[1.0, 3.0], [3.0, NAN]]) == mean_over_seeds(
        torch.tensor([[1.0, 3], [3, NAN]])
    )
    rows = [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 5.0])]
    assert mean_over_seeds(rows) == mean_over_seeds(torch.stack(rows))


@pytest.mark.parametrize(
    "wrong", [[[1.0, 2.0], [3.0]], ["one"], None, [torch.ones(2), torch.ones(3)]]
)
def test_values_that_are_not_numbers_raise(wrong):
    with pytest.raises(ValueError, match="expected numbers"):
        statistics._as_float64(wrong, 2)


ROWS = torch.ones(2, 3)
INTERVAL_FUNCTIONS = {
    "one": lambda **more: confidence_interval(ROWS[0], **more),
    "in clusters": lambda **more: confidence_interval(ROWS[0], clusters=list("abb"), **more),
    "paired": lambda **more: paired_difference(ROWS[0], ROWS[1], list("abc"), list("abc"), **more),
    "many": lambda **more: statistics.confidence_intervals(ROWS, **more),
    "two_level": lambda **more: two_level_interval(ROWS, **more),
    "two_level_difference": lambda **more: two_level_difference(ROWS, ROWS, **more),
}


@pytest.mark.parametrize("name", INTERVAL_FUNCTIONS)
def test_a_confidence_outside_0_to_1_raises(name):
    for confidence in (95.0, -0.1, NAN):
        with pytest.raises(ValueError, match="from 0 to 1"):
            INTERVAL_FUNCTIONS[name](confidence=confidence)


def test_zero_draws_raise():
    with pytest.raises(ValueError, match="draws .* 0"):
        permutation_test(ROWS[0], draws=0)
    with pytest.raises(ValueError, match="draws .* 0"):
        statistics.permutation_tests(ROWS, draws=0)


def test_intervals_print_the_digits_that_they_justify() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    one = confidence_interval(values)
    text = repr(one)
    assert len(text) < 70 and text.startswith("Interval(mean=0.") and text.endswith(", count=50)")
    shown = [float(number) for number in re.findall(r"=(-?\d+\.\d+)", text)]
    for number, exact in zip(shown, (one.mean, one.low, one.high), strict=True):
        assert abs(number - exact) < 0.01 * (one.high - one.low)
    assert "low=nan" in repr(confidence_interval([0.7])) and "mean=0.7000" in repr(
        confidence_interval([0.7])
    )
    assert repr(confidence_interval([1e-6, 2e-6, 3e-6])).startswith("Interval(mean=0.0000020")


def test_values_of_another_type_raise_in_one_sentence(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match="complex"):
        confidence_interval(torch.ones(3) + 0j)
    with pytest.raises(ValueError, match="str"):
        holm(["0.1", "0.2"])
    for confidence in ("0.95", None):
        with pytest.raises(ValueError, match="0.95"):
            confidence_interval([0.1, 0.2, 0.3], confidence=confidence)
    with pytest.raises(TypeError, match=r"seed.*list"):
        permutation_test([0.1, 0.2], [0.3, 0.4])  # two groups instead of their differences


def test_corrected_p_values_are_python_numbers(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    for p_values in (torch.tensor([0.01, 0.04]), np.array([0.01, 0.04])):
        for correct in (holm, benjamini_hochberg):
            found = correct(p_values)
            assert found == pytest.approx((0.02, 0.04)) and all(type(p) is float for p in found)


def test_paired_difference_without_ids_takes_samples_in_order():
    first, second = torch.tensor([0.9, 0.6, math.nan]), torch.tensor([0.5, 0.7, 0.1])
    assert paired_difference(first, second) == paired_difference(first, second, "abc", "abc")
    with pytest.raises(ValueError, match="got 3 and 2"):
        paired_difference(first.tolist(), [0.5, 0.7])
    with pytest.raises(ValueError, match="second_ids, or"):
        paired_difference(first, second, ["a", "b", "c"])


def test_permutation_test_of_two_results_asks_for_their_difference():
    unchecked = inspect.unwrap(permutation_test)  # without the type checks of the test suite
    with pytest.raises(TypeError, match=r"first - second"):
        unchecked(torch.ones(3), torch.zeros(3))
