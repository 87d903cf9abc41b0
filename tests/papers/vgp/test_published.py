"""Table 1 of the paper, as printed."""

import pytest

from overt.papers.vgp.published import TABLE_1, figures

PRINTED = {
    "none": "66.73 67.10 74.36 57.07 77.38 81.28 71.53",
    "indirect": "66.71 65.95 72.72 54.49 77.20 80.61 70.81",
    "direct": "67.09 69.99 76.25 58.99 77.07 80.86 70.96",
    "semi-direct": "67.41 69.63 75.93 58.72 78.12 80.96 71.75",
    "original": "67.73 71.60 77.72 60.99 79.88 82.40 75.01",
}


@pytest.mark.parametrize("row", list(PRINTED))
def test_rows_have_the_printed_numbers(row: str) -> None:
    assert TABLE_1[row] == tuple(map(float, PRINTED[row].split()))


def test_published_numbers_have_a_source() -> None:
    found = figures("direct")
    assert found["located_true"].value == pytest.approx(0.7707)
    assert "RefCOCO+ val, true boxes" in found["located_true"].source
    assert found["answers"].value == pytest.approx(0.6709)
    assert figures("indirect-slip") == {}
