"""Versions of datasets and metrics of stored results."""

from pathlib import Path
from typing import Any

import pytest

from overt.experiments import data_versions
from overt.experiments.data_versions import outdated_parts
from overt.experiments.result_archive import read_archived_run
from overt.papers import catalog

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_outdated_parts_of_results() -> None:
    ours: dict[str, Any] = {"accuracy": {}, "pointing": {}, "mass_inside": {"version": 2}}
    results = {"ours": ours, "data": [{"name": "scenes-caption-pairs"}, {"name": "trec"}]}
    assert outdated_parts(results, ("accuracy", "pointing", "mass_inside")) == [
        "data scenes-caption-pairs",
        "metric pointing",
    ]
    newer = {"ours": ours, "data": [{"name": "scenes-caption-pairs", "version": 2}]}
    assert outdated_parts(newer, ("accuracy",)) == []
    grounding = {"ours": {**ours, "grounding_accuracy": {}}}
    assert outdated_parts(grounding, ("pointing",)) == []


def test_every_version_is_above_the_first() -> None:
    assert all(version > 1 for version in data_versions.VERSIONS.values())


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("ssa-scenes", "none", "metric pointing"),
        ("vgp-scenes", "original", "data scenes-caption-pairs"),
    ],
)
def test_archives_with_earlier_definitions_are_outdated(name: str, row: str, part: str) -> None:
    run = read_archived_run(RESULTS / f"{name}.zip", row, 0)
    assert run is not None and part in outdated_parts(run.results, catalog.tables()[name].columns)
