"""Published numbers of hard attention, as printed in the paper."""

import pytest

from overt.papers.han import config as han
from overt.papers.han import published as han_figures
from overt.papers.han.published import figures

# Tables 1 to 3, typed from the paper a second time: overall, yes / no, number, other.
PRINTED = {
    "han-sum-16": "26.99 40.53 11.38 24.15",
    "han-sum-32": "27.43 41.05 11.38 24.68",
    "han-sum-48": "27.94 41.35 11.93 25.27",
    "han-sum-64": "27.80 40.74 11.29 25.52",
    "sum": "27.96 43.23 12.09 24.29",
    "han-pairwise-16": "26.81 41.24 10.87 23.61",
    "han-pairwise-32": "27.45 40.91 11.48 24.75",
    "han-pairwise-48": "28.23 41.23 11.40 25.98",
    "pairwise": "28.06 44.10 13.20 23.71",
    "san2": "26.60 39.69 11.25 23.92",
    "san2-pos": "27.77 40.73 11.31 25.47",
    "han-sum-16-depth0": "26.38 43.21 13.12 21.17",
    "han-sum-32-depth0": "26.75 41.42 10.94 23.38",
    "han-sum-48-depth0": "26.82 41.30 11.48 23.42",
}


@pytest.mark.parametrize("label", list(PRINTED))
def test_rows_have_the_printed_numbers(label: str) -> None:
    found = figures("vqacp2", label)
    wanted = [float(one) / 100 for one in PRINTED[label].split()]
    assert [found[name].value for name in han_figures.KINDS] == pytest.approx(wanted)
    table = "Table 3" if "depth0" in label else "Table 1"
    assert all(
        one.source.startswith(f"Bootstrapping Hard Attention, {table}, ") for one in found.values()
    )


def test_illegible_numbers_are_left_out() -> None:
    found = figures("vqacp2", "adahan-pairwise")
    assert set(found) == {"accuracy", "accuracy_other", "cells_kept"}
    assert found["cells_kept"].value == 32.63 and found["accuracy"].value == pytest.approx(0.2865)
    assert figures("vqacp2", "adahan-sum")["cells_kept"].value == 25.66


def test_other_datasets_have_their_own_numbers_or_none() -> None:
    assert figures("clevr", "han-rn")["accuracy"].value == pytest.approx(0.939)
    assert figures("clevr", "rn")["accuracy"].value == pytest.approx(0.955)
    assert set(figures("sortclevr", "rn")) == {"accuracy_relational", "accuracy_non_relational"}
    assert (
        figures("sortclevr", "han-rn") == figures("daquar", "sum") == figures("scenes", "sum") == {}
    )
    assert figures("vqacp2", "simple-han")["accuracy"].value == pytest.approx(0.24)


def test_every_published_number_belongs_to_a_row() -> None:
    rows = han.table_rows("vqacp2")
    for where in han_figures.WHERE.values():
        assert set(where) <= set(rows)
    assert set(han_figures.CLEVR) <= set(han.table_rows("clevr"))


def test_tables_1_and_3_disagree_about_percent() -> None:
    """Table 3 lists its two-layer rows as 25, 50, 75 %; they are those of 16, 32, 48 cells."""
    assert [f"han-sum-{k}" in han_figures.TABLE_1 for k in (16, 32, 48)] == [True] * 3
    assert not any(f"han-sum-{k}" in han_figures.TABLE_1 for k in (25, 50, 75))
