"""How often a metric ranks the truthful map first, on models whose rule is known."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overt.data.human_attention import GroundTruth
from overt.metrics import mean as sample_mean
from overt.metrics.metric import MetricUnavailableError
from overt.metrics.scorecard.catalog import select_metrics
from overt.metrics.scorecard.entry import ScorecardMetric
from overt.metrics.scorecard.metric_context import MetricContext
from overt.testing.planted_rules import RuleModel, planted_rules, planted_samples

TRUTHFUL = "truthful"


@dataclass(frozen=True)
class MetricTrust:
    """How a metric ranks the truthful map on one rule.

    Args:
        key: The key of the metric.
        rule: The name of the rule.
        repeats: How many times samples were drawn.
        first: How often the truthful map had the best mean of all maps, without a tie.
        lost_to: How often each wrong map had a mean at least as good.

    Example:
        >>> MetricTrust("spearman", "colour", repeats=5, first=4, lost_to={"random": 1}).first
        4
    """

    key: str
    rule: str
    repeats: int
    first: int
    lost_to: dict[str, int]


def rank_truthful_maps(
    names: Sequence[str] | None = None, repeats: int = 10, samples: int = 16, seed: int = 0
) -> list[MetricTrust]:
    """Count how often each metric ranks the truthful map of a planted rule first.

    Args:
        names: Metrics as for `overt measure --measures`; None for the default metrics. Metrics
            without a better direction, or of the model, are left out.
        repeats: How many times samples are drawn.
        samples: How many samples each time; a metric compares the means over them.
        seed: Seed of the first draw.

    Returns:
        One row per metric and rule; none where the metric is not available.

    Raises:
        UserError: A metric is unknown.
        ValueError: `repeats` or `samples` is below 1.

    Example:
        >>> [row.first for row in rank_truthful_maps(["deletion_area@mask"], 2, 8)][0]  # one cell
        2
    """
    if repeats < 1 or samples < 1:
        raise ValueError(f"repeats and samples must be at least 1, got {repeats} and {samples}")
    entries = [e for e in select_metrics(names) if e.each_map and e.direction != "neither"]
    counts: dict[tuple[str, str], list[list[str]]] = {}
    for draw in range(seed, seed + repeats):
        for number, rule in enumerate(planted_rules(draw)):
            batch, maps = planted_samples(rule, samples, 1000 * draw + number)
            looks = {name: (lambda _, one=one: one) for name, one in maps.items()}
            assert batch.target is not None
            context = MetricContext(
                RuleModel(rule, maps[TRUTHFUL]).eval(), batch, GroundTruth(batch.target), looks,
                seed=draw,
            )  # fmt: skip
            for entry in entries:
                better = _at_least_as_good(context, entry, tuple(maps))
                if better is not None:
                    counts.setdefault((entry.key, rule.name), []).append(better)
    return [
        MetricTrust(
            key,
            rule,
            len(found),
            sum(not one for one in found),
            {name: sum(name in one for one in found) for name in sorted(set().union(*found))},
        )
        for (key, rule), found in counts.items()
    ]


def _at_least_as_good(
    context: MetricContext, entry: ScorecardMetric, names: Sequence[str]
) -> list[str] | None:
    """Return the wrong maps whose mean is at least as good; None if the metric is unavailable."""
    sign = 1 if entry.direction == "higher" else -1
    means = {}
    for name in names:
        try:
            with torch.no_grad():
                means[name] = sign * sample_mean(entry.compute(context, name))
        except (MetricUnavailableError, ValueError):
            return None
    # NaN is never better, and never worse: a metric that is undefined for the truth has failed
    truth = means.pop(TRUTHFUL)
    return [name for name, one in means.items() if not one < truth]
