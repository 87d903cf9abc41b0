"""Benchmarks: sets of ranks, controls, agreement of metrics, and merged scorecards."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from overt.errors import UserError
from overt.metrics.scorecard.benchmark import Benchmark, ModelResult, merge_scorecards
from overt.metrics.scorecard.catalog import select_metrics
from overt.metrics.scorecard.result import Scorecard
from overt.metrics.statistics import holm

KEYS = ("spearman", "deletion_area@mask", "sufficiency@mask", "entropy")
COUNT = 40


def make_card(means: dict[str, float], seed: int = 0, noise: float = 0.1) -> Scorecard:
    """Return a scorecard whose maps have these means, or their negatives where lower is better."""
    dice = np.random.default_rng(seed)
    entries = select_metrics(KEYS)
    numbers = {
        (name, entry.key): dice.normal(
            -mean if entry.direction == "lower" else mean, noise, COUNT
        ).astype(np.float32)
        for entry in entries
        for name, mean in means.items()
    }
    return Scorecard(
        f"toy, seed {seed}", {"name": "toys", "split": "test", "digest": "0", "items": COUNT}, 0,
        tuple(means), tuple(e.about() for e in entries), tuple(f"s{at}" for at in range(COUNT)),
        tuple(f"s{at}" for at in range(COUNT)), numbers,
    )  # fmt: skip


MEANS = {"attention": 0.9, "ig": 0.5, "shap": 0.5, "lime": 0.0, "random": 0.4, "uniform": 0.0}


def test_ranks_are_sets_of_all_significant_comparisons() -> None:
    card = make_card(MEANS)
    result = ModelResult("toy", "toys", (card,))
    assert result.methods == ("attention", "ig", "shap", "lime")
    assert result.controls == ("random", "uniform") and result.ceilings == ()
    assert set(result.keys) == set(KEYS) - {"entropy"}  # it has no better direction
    for key, sign in (("spearman", 1), ("deletion_area@mask", -1)):
        rows = {name: card.numbers[name, key].astype(float) for name in MEANS}
        methods = ["attention", "ig", "shap", "lime"]
        pairs = list(combinations(methods, 2))
        tests = holm([float(stats.ttest_rel(rows[a], rows[b]).pvalue) for a, b in pairs])
        better = {
            (a, b) if sign * (rows[a] - rows[b]).mean() > 0 else (b, a)
            for (a, b), p in zip(pairs, tests, strict=True)
            if p < 0.05
        }
        found = {one.method: one for one in result.standings(key)}
        for name in methods:
            one = found[name]
            assert one.first == 1 + sum((other, name) in better for other in methods)
            assert one.last == 4 - sum((name, other) in better for other in methods)
    order = [one.method for one in result.standings("deletion_area@mask")]
    assert order[0] == "attention" and order[-1] == "lime"
    first = result.standings("spearman")[0]
    assert (first.method, first.first, first.last, first.beats_controls) == (
        "attention",
        1,
        1,
        True,
    )
    last = result.standings("spearman")[-1]
    assert last.method == "lime" and not last.beats_controls  # as uniform


def test_several_runs_widen_ranks_where_seeds_disagree() -> None:
    runs = [make_card(MEANS | {"ig": 0.5 + shift}, seed) for seed, shift in enumerate((-1, 0, 2))]
    result = ModelResult("toy", "toys", tuple(runs))
    found = {one.method: one for one in result.standings("spearman")}
    assert found["ig"].interval.runs == 3
    assert (found["ig"].first, found["ig"].last) == (1, 4)
    other = replace(runs[0], ids=tuple(f"x{at}" for at in range(COUNT)))
    with pytest.raises(UserError, match="different samples"):
        ModelResult("toy", "toys", (runs[0], other))


def test_undefined_and_infinite_scores_decide_nothing() -> None:
    card = make_card(MEANS)
    card.numbers["ig", "spearman"][:] = np.nan
    card.numbers["shap", "spearman"][3] = np.inf
    found = {one.method: one for one in ModelResult("toy", "toys", (card,)).standings("spearman")}
    assert "ig" not in found and (found["shap"].first, found["shap"].last) == (1, 3)


def test_agreement_is_kendalls_tau_in_the_better_direction() -> None:
    card = make_card({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4, "random": 0.0}, noise=0.2)
    result = ModelResult("toy", "toys", (card,))
    key = "sufficiency@mask"
    means = [[float(card.numbers[m, k].mean()) for m in "abcd"] for k in (key, "spearman")]
    wanted = stats.kendalltau(-np.array(means[0]), means[1]).statistic
    assert result.agreement(key, "spearman") == pytest.approx(wanted)
    found = {one.key: one for one in Benchmark((result,)).agreements}
    assert found[key].mean == pytest.approx(wanted) and found[key].trust == pytest.approx(
        0.808, abs=0.01
    )
    assert math.isnan(found["spearman"].mean) and found["spearman"].taus == {}
    two = ModelResult("toy", "toys", (make_card({"a": 0.1, "b": 0.2}),))
    assert math.isnan(two.agreement(key, "spearman"))


def test_records_and_json_have_ranks_and_trust() -> None:
    found = Benchmark((ModelResult("toy", "toys", (make_card(MEANS),), {"rise": "no image"}),))
    records = found.to_records()
    assert len(records) == 3 * len(MEANS)
    first = next(
        one for one in records if one["measure"] == "spearman" and one["map"] == "attention"
    )
    assert (first["rank_first"], first["rank_last"], first["beats_controls"]) == (1, 1, True)
    assert first["trust"] == pytest.approx(2 / 3) and first["n"] == COUNT
    control = next(one for one in records if one["map"] == "random")
    assert control["rank_first"] is None
    said = found.to_dict()
    assert said["results"][0]["unavailable"] == {"rise": "no image"}
    assert said["results"][0]["methods"] == ["attention", "ig", "shap", "lime"]


def test_merged_scorecards_have_the_maps_of_both_before_the_controls() -> None:
    first = make_card(MEANS)
    more = make_card({"attention": 0.9, "mine": 0.8, "random": 0.4}, seed=1)
    merged = merge_scorecards(first, [more])
    assert merged.maps == ("attention", "ig", "shap", "lime", "mine", "random", "uniform")
    np.testing.assert_array_equal(
        merged.values("spearman", "mine"), more.values("spearman", "mine")
    )
    np.testing.assert_array_equal(merged.values("spearman"), first.values("spearman"))
    with pytest.raises(UserError, match="samples or seed"):
        merge_scorecards(first, [replace(more, seed=1)])
