"""Trust of a metric: how often it ranked the truthful map of a planted model first.

The counts are computed by `overt.testing.rank_truthful_maps` and shipped in `metric_trust.json`
(`python results/metric_trust.py`). They hold for planted rules on 4 x 4 cells.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from overt import io

FILE = Path(__file__).with_name("metric_trust.json")


@dataclass(frozen=True)
class Trust:
    """How often a metric ranked the truthful map first.

    Args:
        key: The key of the metric.
        version: The version of its definition that was counted.
        shares: The share of draws by planted rule.
    """

    key: str
    version: int
    shares: Mapping[str, float]

    @property
    def share(self) -> float:
        """The mean share over the planted rules."""
        return sum(self.shares.values()) / len(self.shares)

    @property
    def worst(self) -> str:
        """The planted rule with the smallest share."""
        return min(self.shares, key=lambda rule: self.shares[rule])

    def __str__(self) -> str:
        """Return the share and the worst rule.

        >>> str(find_trust("deletion_area@mask"))
        'ranks the truthful map first in 64 % of planted tests, in 0 % for "and"'
        """
        worst = (
            ""
            if self.shares[self.worst] == self.share
            else (f', in {self.shares[self.worst]:.0%} for "{self.worst}"')
        )
        words = f"ranks the truthful map first in {self.share:.0%} of planted tests{worst}"
        return words.replace("%", " %")


def find_trust(key: str, version: int | None = None) -> Trust | None:
    """Return the trust of a metric.

    Args:
        key: The key of the metric.
        version: The version of its definition; None for the one that was counted.

    Returns:
        The trust; None for a metric or a version that was not counted, such as one without a better
        direction or one that needs people.
    """
    found = _all_trust().get(key)
    return found if found is not None and version in (None, found.version) else None


@cache
def _all_trust() -> dict[str, Trust]:
    held: dict[str, Any] = io.read_json(FILE)
    shares: dict[str, dict[str, float]] = {}
    for row in held["rows"]:
        shares.setdefault(row["key"], {})[row["rule"]] = row["first"] / row["repeats"]
    versions = held["versions"]
    return {key: Trust(key, versions[key], found) for key, found in shares.items()}
