"""Benchmark of explanation methods: scorecards of several models, as means, ranks and agreement.

A rank is a set, because close methods cannot be ordered: from 1 + the number of methods that are
significantly better to the number that are not significantly worse. All pairs of methods of one
model and metric are compared, paired by sample, and corrected by Holm's method; all sets of one
model and metric then contain the true ranks with at least 95 %. The same comparisons decide whether
a method is better than every control.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import torch

from overt.errors import UserError
from overt.metrics import ranks, statistics
from overt.metrics.scorecard.differences import paired_gaps
from overt.metrics.scorecard.metric_context import CONTROLS, PERSON
from overt.metrics.scorecard.result import (
    MODEL,
    Numbers,
    Scorecard,
    mean_over_runs,
    to_json_values,
)
from overt.metrics.scorecard.trust import find_trust
from overt.metrics.statistics import Interval

TARGET = "target"  # the map of the dataset: known evidence, or what people looked at
CEILINGS = (TARGET, PERSON)
LEVEL = 0.05


@dataclass(frozen=True)
class Standing:
    """A method among the others, by one metric of one model.

    Args:
        method: Name of the method.
        interval: The mean, with its 95 % interval.
        first: The best rank that the comparisons allow.
        last: The worst rank that they allow.
        beats_controls: Whether the method is significantly better than every control.
    """

    method: str
    interval: Interval
    first: int
    last: int
    beats_controls: bool


@dataclass(frozen=True, eq=False)
class ModelResult:
    """The methods of one model on one dataset.

    Args:
        model: Name of the model.
        data: Name of the dataset.
        cards: One scorecard per run of the model, with different seeds, on the same samples.
        unavailable: Reasons of methods that do not apply, by name.

    Example:
        >>> from overt.data import Scenes
        >>> from overt.metrics import scorecard
        >>> data = Scenes("train", seed=0, count=2, size=32)
        >>> good = lambda batch: batch.target.normalize()
        >>> card = scorecard(None, data, ["mass_inside"], {"mine": good})
        >>> result = ModelResult("none", "scenes", (card,))
        >>> [(one.method, one.first) for one in result.standings("mass_inside")]
        [('mine', 1)]
    """

    model: str
    data: str
    cards: tuple[Scorecard, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that all runs have the same samples."""
        if not self.cards:
            raise ValueError(f"{self.model} on {self.data} needs at least 1 scorecard, got 0")
        for one in self.cards[1:]:
            if one.ids != self.cards[0].ids:
                raise UserError(
                    f"the runs of {self.model} on {self.data} have different samples: give models "
                    "with the same name the same data, or different names."
                )

    @cached_property
    def maps(self) -> tuple[str, ...]:
        """Maps that every run has; a method has the name of its map."""
        return tuple(
            name for name in self.cards[0].maps if all(name in one.maps for one in self.cards)
        )

    @property
    def methods(self) -> tuple[str, ...]:
        """The ranked maps: neither controls nor ceilings."""
        return tuple(name for name in self.maps if name not in (*CONTROLS, *CEILINGS))

    @property
    def controls(self) -> tuple[str, ...]:
        """Maps that do not depend on the content of the sample."""
        return tuple(name for name in self.maps if name in CONTROLS)

    @property
    def ceilings(self) -> tuple[str, ...]:
        """Maps from the dataset: the target, and one person compared with all others."""
        return tuple(name for name in self.maps if name in CEILINGS)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Metrics of maps with a better direction that every run has."""
        first = self.cards[0]
        return tuple(
            key
            for key in first.keys
            if first.about(key)["direction"] != "neither"
            and all(key in one.keys and (MODEL, key) not in one.numbers for one in self.cards)
        )

    def interval(self, key: str, name: str) -> Interval | None:
        """Return the mean of a map by a metric with its interval; None where it has no scores."""
        if any((name, key) not in one.numbers for one in self.cards):
            return None
        if len(self.cards) == 1:
            return self.cards[0].intervals[name, key]
        return self._over_runs[name].get(key)

    @cached_property
    def _over_runs(self) -> dict[str, dict[str, Interval]]:
        return {name: mean_over_runs(self.cards, map=name) for name in self.maps}

    def standings(self, key: str) -> tuple[Standing, ...]:
        """Return the methods by one metric, the best mean first.

        A difference that is infinite for some sample, as of `kl`, is not tested.

        Args:
            key: The key of a metric.

        Returns:
            One standing per method with a score.
        """
        if key not in self._standings:
            self._standings[key] = self._rank(key)
        return self._standings[key]

    @cached_property
    def _standings(self) -> dict[str, tuple[Standing, ...]]:
        return {}

    def _rank(self, key: str) -> tuple[Standing, ...]:
        sign = 1 if self.cards[0].about(key)["direction"] == "higher" else -1
        found = {name: self.interval(key, name) for name in self.maps}
        known = {name: one for name, one in found.items() if one is not None and one.count}
        methods = [name for name in self.methods if name in known]
        controls = [name for name in self.controls if name in known]
        better = self._better(key, sign, list(combinations(methods, 2)))
        beaten = self._better(key, sign, [(one, other) for one in methods for other in controls])
        standings = [
            Standing(
                name,
                known[name],
                1 + sum((other, name) in better for other in methods),
                len(methods) - sum((name, other) in better for other in methods),
                bool(controls) and all((name, other) in beaten for other in controls),
            )
            for name in methods
        ]
        return tuple(sorted(standings, key=lambda one: _order(sign * one.interval.mean)))

    def _better(
        self, key: str, sign: int, pairs: Sequence[tuple[str, str]]
    ) -> set[tuple[str, str]]:
        """Return the pairs, better first, that differ at 5 % after Holm's correction."""
        tests = [self._difference(key, one, other) for one, other in pairs]
        corrected = statistics.holm([_p(one) for one in tests])
        return {
            (one, other) if sign * test.mean > 0 else (other, one)
            for (one, other), test, p in zip(pairs, tests, corrected, strict=True)
            if p < LEVEL
        }

    def _difference(self, key: str, one: str, other: str) -> Interval:
        rows = [
            paired_gaps(card.numbers[one, key], card.numbers[other, key]) for card in self.cards
        ]
        gaps = torch.from_numpy(np.stack(rows))
        return statistics.two_level_interval(gaps, clusters=self.cards[0].clusters)

    def agreement(self, key: str, reference: str) -> float:
        """Return Kendall's tau-b of the methods' means by two metrics, in their better direction.

        Returns:
            The correlation; NaN with fewer than three methods, or where all are equal.
        """
        means = []
        for name in (key, reference):
            sign = 1 if self.cards[0].about(name)["direction"] == "higher" else -1
            means.append({one.method: sign * one.interval.mean for one in self.standings(name)})
        shared = [name for name in means[0] if name in means[1]]
        shared = [name for name in shared if all(math.isfinite(one[name]) for one in means)]
        return _tau([[one[name] for name in shared] for one in means])


def _tau(rows: Sequence[Sequence[float]]) -> float:
    """Compute Kendall's tau-b of two rows of numbers; NaN with fewer than three."""
    n = len(rows[0])
    if n < 3:
        return math.nan
    first, second = (torch.tensor([row], dtype=torch.float64) for row in rows)
    return float(ranks.kendall_tau(first, second, torch.ones(1, n, dtype=torch.bool)))


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else -value


def _p(test: Interval) -> float:
    return 1.0 if math.isnan(test.mean) or math.isinf(test.mean) or math.isnan(test.p) else test.p


@dataclass(frozen=True)
class MetricAgreement:
    """Whether a metric orders methods as the reference metric does.

    Args:
        key: Key of the metric.
        taus: Kendall's tau over methods, by the name of the model and the dataset.
        trust: Share of planted tests in which the metric ranked the truthful map first; None where
            it was not counted.
    """

    key: str
    taus: Mapping[str, float]
    trust: float | None

    @property
    def mean(self) -> float:
        """The mean over models; NaN without any."""
        known = [one for one in self.taus.values() if not math.isnan(one)]
        return sum(known) / len(known) if known else math.nan


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Methods x models x metrics x data.

    Args:
        results: One entry per model and dataset.
        reference: Key of the metric with which the order of methods by other metrics is compared.
    """

    results: tuple[ModelResult, ...]
    reference: str = "spearman"

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """All ranked metrics, in the order of the first scorecards that have them."""
        return tuple(dict.fromkeys(key for one in self.results for key in one.keys))

    @cached_property
    def agreements(self) -> tuple[MetricAgreement, ...]:
        """Compare the order of methods by each metric with that by the reference metric."""
        found = []
        for key in self.keys:
            taus = {
                f"{one.model} on {one.data}": one.agreement(key, self.reference)
                for one in self.results
                if key in one.keys and self.reference in one.keys and key != self.reference
            }
            versions = {c.version(key) for one in self.results for c in one.cards if key in c.keys}
            trust = find_trust(key, versions.pop()) if len(versions) == 1 else None
            found.append(MetricAgreement(key, taus, None if trust is None else trust.share))
        return tuple(found)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dictionary per model, dataset, metric and map, for a data frame."""
        records = []
        for result in self.results:
            for key in result.keys:
                ranked = {one.method: one for one in result.standings(key)}
                trust = result.cards[0].trust(key)
                for name in result.maps:
                    interval = result.interval(key, name)
                    if interval is None:
                        continue
                    standing = ranked.get(name)
                    records.append({
                        "model": result.model, "data": result.data, "measure": key, "map": name,
                        "mean": interval.mean, "low": interval.low, "high": interval.high,
                        "n": interval.count, "runs": len(result.cards),
                        "direction": result.cards[0].about(key)["direction"],
                        "rank_first": None if standing is None else standing.first,
                        "rank_last": None if standing is None else standing.last,
                        "beats_controls": None if standing is None else standing.beats_controls,
                        "trust": None if trust is None else trust.share,
                    })  # fmt: skip
        return records

    def to_dict(self) -> dict[str, Any]:
        """Return the benchmark as JSON values."""
        return {
            "format": "overt benchmark 1",
            "reference": self.reference,
            "results": [
                {
                    "model": one.model,
                    "data": dict(one.cards[0].data),
                    "seeds": [card.name for card in one.cards],
                    "n": len(one.cards[0]),
                    "clusters": len(set(one.cards[0].clusters)),
                    "methods": list(one.methods),
                    "controls": list(one.controls),
                    "ceilings": list(one.ceilings),
                    "unavailable": dict(one.unavailable),
                    "skipped": dict(one.cards[0].skipped),
                }
                for one in self.results
            ],
            "agreement": [
                {
                    "measure": one.key,
                    "tau": to_json_values(one.taus),
                    "mean": to_json_values({"mean": one.mean})["mean"],
                    "trust": one.trust,
                }
                for one in self.agreements
            ],
            "records": [to_json_values(one) for one in self.to_records()],
        }


def merge_scorecards(first: Scorecard, more: Sequence[Scorecard]) -> Scorecard:
    """Add the maps of other scorecards of the same model, samples and seed to the first.

    Args:
        first: The scorecard whose controls and description are kept.
        more: Scorecards with further maps.

    Returns:
        One scorecard with all maps.

    Raises:
        UserError: They differ in samples or seed.
    """
    numbers: dict[tuple[str, str], Numbers] = dict(first.numbers)
    maps, measures = list(first.maps), list(first.measures)
    for one in more:
        if (one.ids, one.seed) != (first.ids, first.seed):
            raise UserError(f"{one.name} and {first.name} differ in samples or seed.")
        new = [name for name in one.maps if name not in maps]
        known = {measure["key"] for measure in measures}
        measures += [measure for measure in one.measures if measure["key"] not in known]
        # before the controls, which a scorecard lists last
        at = next((i for i, name in enumerate(maps) if name in (*CONTROLS, *CEILINGS)), len(maps))
        maps[at:at] = new
        numbers |= {pair: values for pair, values in one.numbers.items() if pair[0] in new}
    return Scorecard(
        first.name, first.data, first.seed, tuple(maps), tuple(measures), first.ids,
        first.clusters, numbers, first.skipped, first.seconds, first.key_counts, first.judged,
    )  # fmt: skip
