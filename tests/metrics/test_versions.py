"""Versions of metric definitions in results."""

import pytest

from overt.metrics.versions import current_version, label_with_version, newest_version, version_of


def test_results_without_a_version_have_version_1() -> None:
    assert version_of({}) == 1 and version_of({"version": 3}) == 3
    assert version_of({"version": True}) == 1 and version_of({"version": "2"}) == 1


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("pointing", 2), ("pointing_held_out", 2), ("val_pointing", 2), ("mass inside", 2),
        ("surrogate_mass_inside", 2), ("mass_joined", 2), ("jaccard_car", 2), ("gain_same", 2),
        ("grounding_mass", 1), ("grounding_accuracy", 1), ("accuracy", 1), ("massive", 1),
    ],
)  # fmt: skip
def test_result_names_map_to_the_version_of_their_metric(name: str, version: int) -> None:
    assert current_version(name) == version


def test_an_older_definition_is_labelled() -> None:
    old, new = {"pointing": {}}, {"pointing": {"version": 3}}
    assert newest_version("pointing", [old]) == 2 and newest_version("pointing", [new, old]) == 3
    assert newest_version("cider_d", [{"cider_d": {"version": 2}}, {"cider_d": {}}]) == 2
    assert (
        newest_version("pointing", [{}]) == 1
        and newest_version("pointing", [{"pointing": {"version": 1}}]) == 1
    )
    assert (
        newest_version("pointing", [{**old, "grounding_accuracy": {}}]) == 1
    )  # another pointing game
    assert label_with_version("pointing", 1, 2) == "pointing (definition 1)"
    assert label_with_version("pointing", 2, 2) == "pointing"
