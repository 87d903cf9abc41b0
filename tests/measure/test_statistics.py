import math

import numpy as np
import pytest
import scipy.stats
import torch

from overt.measure import (
    Interval,
    benjamini_hochberg,
    bootstrap,
    effect_size,
    holm,
    mean,
    over_seeds,
    paired,
    permutation_test,
    statistics,
    superiority,
    two_level,
    two_level_difference,
)

NAN = math.nan


def test_the_mean_leaves_out_what_is_not_defined():
    assert mean(torch.tensor([1.0, NAN, 3.0])) == 2
    assert math.isnan(mean(torch.tensor([NAN])))


def test_bootstrap_agrees_with_scipy(generator):
    values = torch.rand(150, generator=generator)
    found = bootstrap(values, draws=4000)
    theirs = scipy.stats.bootstrap(
        (values.numpy(),), np.mean, n_resamples=4000, method="percentile", rng=0
    ).confidence_interval
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(theirs.low, abs=0.006)
    assert found.high == pytest.approx(theirs.high, abs=0.006)
    assert found.count == 150


def test_bootstrap_is_as_wide_as_the_normal_interval(generator):
    values = torch.randn(400, generator=generator)
    found = bootstrap(values)
    error = float(values.std()) / 20
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    narrow = bootstrap(values, confidence=0.5)
    assert found.low < narrow.low < narrow.high < found.high


def test_the_interval_holds_the_truth_as_often_as_it_says():
    generator, hits = torch.Generator().manual_seed(2), 0
    for seed in range(200):
        found = bootstrap(torch.randn(60, generator=generator) + 1, seed=seed, draws=300)
        hits += found.low <= 1 <= found.high
    assert 176 <= hits <= 199


def test_the_same_seed_gives_the_same_interval(generator):
    values = torch.rand(50, generator=generator)
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) != bootstrap(values, seed=4)
    holes = torch.cat([values, torch.full((9,), NAN)])
    assert bootstrap(holes, seed=3) == bootstrap(values, seed=3), "NaN is left out"


def test_large_tables_are_drawn_in_parts(generator, monkeypatch):
    values = torch.rand(40, generator=generator)
    whole = bootstrap(values, draws=500)
    monkeypatch.setattr(statistics, "_AT_ONCE", 1000)
    parts = bootstrap(values, draws=500)
    assert parts.low == pytest.approx(whole.low, abs=0.02)
    assert two_level(values.reshape(2, 20), draws=500).count == 20


def test_nothing_to_count_is_no_interval():
    for values in (torch.tensor([]), torch.tensor([NAN, NAN])):
        found = bootstrap(values)
        assert math.isnan(found.mean) and math.isnan(found.low) and found.count == 0
    assert bootstrap(torch.tensor([2.0])) == Interval(2.0, 2.0, 2.0, 1)
    assert bootstrap(torch.tensor([1.0, math.inf])).mean == math.inf


def test_paired_matches_by_id_and_is_narrower(generator):
    hard = torch.randn(300, generator=generator)
    first = hard + 0.1 + 0.05 * torch.randn(300, generator=generator)
    order = torch.randperm(300, generator=generator)
    ids = [f"s{i}" for i in range(300)]
    found = paired(first, hard[order], ids, [ids[int(i)] for i in order])
    assert found.mean == pytest.approx(0.1, abs=0.02) and found.low > 0.08
    alone = bootstrap(first)
    assert found.high - found.low < 0.1 * (alone.high - alone.low)
    again = bootstrap(first.double() - hard.double())
    assert found == again


def test_paired_leaves_out_pairs_with_a_hole():
    first, second = torch.tensor([1.0, NAN, 3.0]), torch.tensor([NAN, 1.0, 1.0])
    found = paired(first, second, "abc", "abc")
    assert found == Interval(2.0, 2.0, 2.0, 1)


def test_paired_refuses_other_samples():
    one = torch.zeros(2)
    with pytest.raises(ValueError, match=r"2 samples are in one result only, such as 'b'"):
        paired(one, one, ["a", "b"], ["a", "c"])
    with pytest.raises(ValueError, match="an id appears twice"):
        paired(one, one, ["a", "a"], ["a", "b"])
    with pytest.raises(ValueError, match="2 numbers for 1 ids"):
        paired(one, one, ["a"], ["a", "b"])


def test_seeds_by_hand():
    found = over_seeds(torch.tensor([[1.0, 3.0], [4.0, NAN], [6.0, 6.0]]))
    assert found.mean == 4 and found.deviation == 2 and found.seeds == 3
    assert math.isnan(over_seeds(torch.ones(1, 4)).deviation)


def slow_two_level(values: np.ndarray, draws: int) -> tuple[float, float]:
    random = np.random.default_rng(0)
    means = []
    for _ in range(draws):
        seeds = random.integers(0, len(values), len(values))
        items = random.integers(0, values.shape[1], values.shape[1])
        means.append(np.nanmean(values[np.ix_(seeds, items)]))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def test_two_levels_agree_with_a_loop(generator):
    values = torch.rand(4, 30, generator=generator) + torch.rand(4, 1, generator=generator)
    values[1, 3] = NAN
    found = two_level(values, draws=4000)
    low, high = slow_two_level(values.numpy(), 4000)
    assert found.mean == pytest.approx(float(values.nanmean()))
    assert found.low == pytest.approx(low, abs=0.02)
    assert found.high == pytest.approx(high, abs=0.02)


def test_two_levels_are_wider_when_runs_differ(generator):
    items = torch.rand(1, 200, generator=generator)
    same = two_level(items.expand(3, 200))
    one = bootstrap(items[0])
    assert same.high - same.low == pytest.approx(one.high - one.low, rel=0.1)
    differ = two_level(items + torch.tensor([[0.0], [0.3], [0.6]]))
    assert differ.high - differ.low > 3 * (same.high - same.low)


def test_the_difference_of_two_methods_cancels_hard_items(generator):
    items = 3 * torch.rand(1, 100, generator=generator)
    first = items + 0.2 + 0.01 * torch.randn(3, 100, generator=generator)
    second = items + 0.01 * torch.randn(4, 100, generator=generator)
    found = two_level_difference(first, second)
    assert found.mean == pytest.approx(0.2, abs=0.01)
    assert 0.18 < found.low < found.high < 0.22
    assert two_level(first).low < two_level(second).high, "side by side they would overlap"


def test_the_difference_needs_the_same_samples(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match="4 and 5 samples"):
        two_level_difference(torch.zeros(2, 4), torch.zeros(2, 5))


# --- clusters


def test_clusters_of_one_are_samples(generator):
    values = torch.rand(40, generator=generator)
    alone = [str(at) for at in range(40)]
    ours, plain = bootstrap(values, clusters=alone, draws=4000), bootstrap(values, draws=4000)
    assert ours.mean == pytest.approx(plain.mean) and ours.count == 40
    assert ours.low == pytest.approx(plain.low, abs=0.01)
    assert ours.high == pytest.approx(plain.high, abs=0.01)


def test_copies_of_a_sample_are_no_news(generator):
    """Every number five times over: by clusters the interval is that of the numbers themselves."""
    values = torch.rand(60, generator=generator)
    copies = values.repeat_interleave(5)
    names = [f"image {at // 5}" for at in range(300)]
    once, clustered = bootstrap(values), bootstrap(copies, clusters=names)
    fooled = bootstrap(copies)
    assert clustered.high - clustered.low == pytest.approx(once.high - once.low, rel=0.1)
    assert fooled.high - fooled.low < 0.6 * (once.high - once.low)
    runs = copies.expand(3, -1)
    both = two_level(runs, clusters=names)
    assert both.high - both.low == pytest.approx(once.high - once.low, rel=0.1)
    apart = two_level_difference(runs + 1, runs, clusters=names)
    assert apart.mean == pytest.approx(1) and apart.low > 0.7
    ids = [str(at) for at in range(300)]
    same = paired(copies + 1, copies, ids, ids, clusters=names)
    assert same.low == pytest.approx(1) and same.count == 300


def test_clusters_without_numbers_are_left_out():
    values = torch.tensor([1.0, NAN, NAN, 3.0])
    found = bootstrap(values, clusters=["a", "a", "b", "c"])
    assert found.mean == 2 and found.count == 2 and found.low == 1 and found.high == 3
    with pytest.raises(ValueError, match="4 samples in 1 clusters"):
        bootstrap(values, clusters=["a"])


# --- tests and corrections


def test_signs_agree_with_scipy(generator):
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


def test_chance_is_found_as_often_as_it_should_be():
    generator = torch.Generator().manual_seed(5)
    found = [permutation_test(torch.randn(12, generator=generator)) for _ in range(300)]
    assert sum(p <= 0.1 for p in found) / 300 == pytest.approx(0.1, abs=0.05)


def test_a_p_is_never_zero_and_needs_samples():
    assert permutation_test(torch.ones(200), draws=99) == pytest.approx(1 / 100)
    assert permutation_test(torch.ones(200), draws=99, seed=1) == pytest.approx(1 / 100)
    assert permutation_test(torch.zeros(5)) == 1
    assert math.isnan(permutation_test(torch.tensor([NAN])))


def test_corrections_agree_with_scipy_and_by_hand(generator):
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
        with pytest.raises(ValueError, match="from 0 to 1, not 1"):
            correct([1.5])


def test_effects_by_hand():
    difference = torch.tensor([1.0, 2.0, 3.0, NAN])
    assert effect_size(difference) == pytest.approx(2.0)
    assert math.isnan(effect_size(torch.ones(4))) and math.isnan(effect_size(torch.ones(1)))
    assert superiority(torch.tensor([1.0, 0.0, -2.0, 3.0, NAN])) == pytest.approx(2.5 / 4)


# --- many measures at once


def test_many_means_at_once_are_the_means_of_clusters_drawn_anew() -> None:
    """A slow copy: clusters are drawn by the same generator, samples gathered one by one."""
    values = torch.rand(3, 7, generator=torch.Generator().manual_seed(1))
    values[1, 2] = values[2, 0] = torch.nan
    clusters = ["a", "b", "a", "c", "c", "b", "d"]
    found = statistics.bootstraps(values, seed=5, draws=50, clusters=clusters)
    names = ["a", "b", "c", "d"]
    generator = torch.Generator().manual_seed(5)
    means: list[list[float]] = [[], [], []]
    for drawn in torch.randint(4, (50, 4), generator=generator).tolist():
        rows = [at for one in drawn for at, name in enumerate(clusters) if name == names[one]]
        for measure, row in enumerate(values.double()):
            means[measure].append(float(row[rows].nanmean()))
    for one, row, drawn_means in zip(found, values.double(), means, strict=True):
        there = torch.tensor(drawn_means, dtype=torch.float64)
        there = there[~there.isnan()]
        low, high = there.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        assert one.mean == pytest.approx(float(row.nanmean()))
        assert (one.low, one.high) == pytest.approx((low, high))
        assert one.count == int((~row.isnan()).sum())


def test_many_means_are_near_those_of_one_at_a_time() -> None:
    values = torch.randn(2, 400, generator=torch.Generator().manual_seed(2))
    for one, row in zip(statistics.bootstraps(values), values, strict=True):
        alone = statistics.bootstrap(row)
        assert one.mean == pytest.approx(alone.mean, abs=1e-6)
        assert (one.low, one.high) == pytest.approx((alone.low, alone.high), abs=0.02)


@pytest.mark.parametrize("n", [6, 40])
def test_many_tests_at_once_are_the_tests_of_each(n: int) -> None:
    """To the bit where all signs are tried, and where they are drawn from the same seed."""
    values = torch.randn(4, n, generator=torch.Generator().manual_seed(3)) + 0.3
    values[3, :2] = torch.nan
    found = statistics.permutation_tests(values, seed=1, draws=500)
    for p, row in zip(found[:3], values[:3], strict=True):
        assert p == pytest.approx(statistics.permutation_test(row, seed=1, draws=500))
    alone = statistics.permutation_test(values[3], seed=1, draws=500)
    assert found[3] == pytest.approx(alone, abs=0.08)
    nothing = statistics.permutation_tests(torch.full((1, 5), torch.nan))
    assert math.isnan(nothing[0])


def test_samples_of_a_cluster_change_their_sign_together() -> None:
    """Ten copies of one sample say no more than the sample: p of two clusters is 1/2 at least."""
    values = torch.ones(1, 20)
    clusters = ["a"] * 10 + ["b"] * 10
    assert statistics.permutation_tests(values, clusters=clusters) == (0.5,)
    assert statistics.permutation_tests(values)[0] < 1e-3


def test_numbers_may_be_lists_and_other_shapes_are_told_what_is_wanted() -> None:
    first, second = [1.0, 2.0, 4.0], [0.0, 2.0, 1.0]
    wanted = statistics.bootstrap(torch.tensor(first))
    assert statistics.bootstrap(first) == wanted
    names = ["a", "b", "c"]
    both = statistics.paired(first, second, names, names)
    assert both == statistics.paired(torch.tensor(first), torch.tensor(second), names, names)
    assert statistics.superiority([1.0, -1.0]) == 0.5 and statistics.effect_size([1.0, 3.0]) > 0
    assert statistics.permutation_test([1.0, 1.0]) == 0.5
    with pytest.raises(ValueError, match=r"shape \(b,\), one a sample, are wanted, not \(1, 2\)"):
        statistics._numbers([[1.0, 2.0]])


# --- infinite numbers


INF = math.inf


@pytest.mark.parametrize("clusters", [None, list("abcd"), list("aabb")])
def test_an_infinite_number_reaches_the_end_of_its_interval(clusters):
    values = torch.tensor([INF, 0, 0, 0])
    assert bootstrap(values, clusters=clusters) == Interval(INF, 0.0, INF, 4)
    assert bootstrap(-values, clusters=clusters) == Interval(-INF, -INF, 0.0, 4)
    both = statistics.bootstraps(torch.stack([values, values.clamp_max(4)]), clusters=clusters)
    assert both[0] == Interval(INF, 0.0, INF, 4)
    assert both[1] == statistics.bootstraps(values.clamp_max(4)[None], clusters=clusters)[0]


def test_an_infinite_number_of_one_run():
    values = torch.tensor([[INF, 1.0, 2.0], [0.0, 1.0, 2.0]])
    found = two_level(values)
    assert found.mean == found.high == INF and math.isfinite(found.low)
    less = two_level_difference(values.clamp_max(1), values)
    assert less.mean == less.low == -INF and math.isfinite(less.high)


def test_what_is_infinite_both_ways_has_no_mean():
    for found in (bootstrap([INF, -INF, 0.0]), two_level(torch.tensor([[INF, -INF, 0.0]]))):
        assert all(math.isnan(one) for one in (found.mean, found.low, found.high))


@pytest.mark.parametrize(
    ("drawn", "at", "expected"),
    [
        ([0.0, 1.0, 2.0], 0.25, 0.5),
        ([0.0, 1.0, INF], 0.5, 1.0),
        ([0.0, 1.0, INF], 0.75, INF),
        ([-INF, 1.0, INF], 0.25, -INF),
        ([1.0, INF, INF], 0.75, INF),
        ([0.0, 2.0, 3.0, INF, INF], 0.125, 1.0),
    ],
)
def test_quantiles_beside_infinity(drawn, at, expected):
    numbers, share = (torch.tensor(one, dtype=torch.float64) for one in (drawn, [at]))
    assert statistics._quantiles(numbers, share).tolist() == [expected]


def test_signs_do_not_tell_infinite_differences_apart():
    assert math.isnan(permutation_test([1.0, 2.0, INF, 3.0]))
    rows = torch.tensor([[1.0, 2.0, INF, 3.0], [1.0, 2.0, 4.0, 3.0]])
    first, second = statistics.permutation_tests(rows)
    assert math.isnan(first) and second == permutation_test(rows[1])


def test_what_is_infinite_in_both_has_no_difference():
    ids = ["a", "b", "c"]
    assert paired([INF, 1.0, 2.0], [INF, 0.0, 0.0], ids, ids).count == 2


# --- what is counted, and what is refused


def test_samples_without_a_number_in_any_run_are_not_counted():
    values = torch.tensor([[1.0, NAN, 3.0], [2.0, NAN, NAN]])
    assert two_level(values).count == 2
    assert two_level_difference(values, values).count == 2
    assert two_level_difference(values, torch.ones(1, 3)).count == 3


def test_means_take_lists():
    assert mean([1.0, NAN, 2.0]) == 1.5
    assert over_seeds([[1.0, 3.0], [3.0, NAN]]) == over_seeds(torch.tensor([[1.0, 3], [3, NAN]]))
    rows = [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 5.0])]
    assert over_seeds(rows) == over_seeds(torch.stack(rows))


@pytest.mark.parametrize(
    "wrong", [[[1.0, 2.0], [3.0]], ["one"], None, [torch.ones(2), torch.ones(3)]]
)
def test_what_is_no_number_is_told(wrong):
    with pytest.raises(ValueError, match="these are no numbers"):
        statistics._numbers(wrong, 2)


ROWS = torch.ones(2, 3)
DRAWING = {
    "bootstrap": lambda **more: bootstrap(ROWS[0], **more),
    "in clusters": lambda **more: bootstrap(ROWS[0], clusters=list("abb"), **more),
    "paired": lambda **more: paired(ROWS[0], ROWS[1], list("abc"), list("abc"), **more),
    "bootstraps": lambda **more: statistics.bootstraps(ROWS, **more),
    "two_level": lambda **more: two_level(ROWS, **more),
    "two_level_difference": lambda **more: two_level_difference(ROWS, ROWS, **more),
}


@pytest.mark.parametrize("name", DRAWING)
def test_draws_and_confidence_that_make_no_interval_are_refused(name):
    with pytest.raises(ValueError, match="0 draws say nothing"):
        DRAWING[name](draws=0)
    for confidence in (95.0, -0.1, NAN):
        with pytest.raises(ValueError, match="a confidence is a share from 0 to 1"):
            DRAWING[name](confidence=confidence)


def test_a_test_of_no_signs_is_refused():
    with pytest.raises(ValueError, match="0 draws say nothing"):
        permutation_test(ROWS[0], draws=0)
    with pytest.raises(ValueError, match="0 draws say nothing"):
        statistics.permutation_tests(ROWS, draws=0)
