"""Trust of metrics in the package: counts of current definitions, and where scorecards say it."""

from overt import io
from overt.metrics.scorecard.catalog import available_metrics
from overt.metrics.scorecard.trust import FILE, find_trust
from tests.metrics.scorecard.test_result import make_scorecard


def test_counts_are_of_the_present_definitions_and_of_every_metric_they_can_count() -> None:
    """A metric with a new version is counted again: python results/metric_trust.py."""
    known = {entry.key: entry for entry in available_metrics()}
    assert io.read_json(FILE)["settings"]["repeats"] == 20
    for key, version in io.read_json(FILE)["versions"].items():
        assert known[key].info.version == version, f"{key} has no counts of version {version}"
        trust = find_trust(key)
        assert trust is not None and len(trust.shares) == 6 and 0 <= trust.share <= 1


def test_the_share_is_the_mean_over_rules() -> None:
    trust = find_trust("comprehensiveness@mean")
    assert trust is not None
    assert trust.shares["one cell"] == 1 and trust.shares["and"] == 0.5  # of docs/metric-trust.md
    assert abs(trust.share - (1 + 1 + 0.5 + 1 + 1 + 0.9) / 6) < 1e-12 and trust.worst == "and"


def test_other_definitions_and_metrics_that_cannot_be_counted_have_no_trust() -> None:
    assert find_trust("mass_inside", 1) is None and find_trust("mass_inside", 2) is not None
    assert find_trust("entropy") is None and find_trust("nss") is None


def test_a_printed_scorecard_states_the_trust_of_its_metrics() -> None:
    card = make_scorecard()
    line = "ranks the truthful map of planted models first: spearman 67%, deletion_area@mask 64%."
    assert line in str(card)
    assert card.trust("entropy") is None
