"""A page forbids everything it does not bring along, and escapes what comes from data."""

import pytest

from overt.show.template import POLICY, filled


def test_the_policy_allows_nothing_from_elsewhere() -> None:
    parts = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert parts["default-src"] == "'none'" and parts["img-src"] == "data:"
    assert "http" not in POLICY and "*" not in POLICY


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(Exception, match="undefined"):
        filled("report.html.jinja")
