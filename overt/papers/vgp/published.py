"""Numbers published in "Attending Self-Attention", by row and column of Table 1."""

from collections.abc import Mapping

from overt.experiments.recipe import NO_PUBLISHED_VALUES, PublishedValue

PAPER = "Attending Self-Attention"

# Table 1: VQA v2.0 val; RefCOCO+ with detected boxes, then with true ones: val, testA, testB.
TABLE_1 = {
    "none": (66.73, 67.10, 74.36, 57.07, 77.38, 81.28, 71.53),
    "indirect": (66.71, 65.95, 72.72, 54.49, 77.20, 80.61, 70.81),
    "direct": (67.09, 69.99, 76.25, 58.99, 77.07, 80.86, 70.96),
    "semi-direct": (67.41, 69.63, 75.93, 58.72, 78.12, 80.96, 71.75),
    "original": (67.73, 71.60, 77.72, 60.99, 79.88, 82.40, 75.01),
}
# The metric on scenes that stands in for a column, and the column.
COLUMNS = {
    "answers": (0, "VQA v2.0 val"),
    "located_detected": (1, "RefCOCO+ val, detected boxes"),
    "located_true": (4, "RefCOCO+ val, true boxes"),
}


def figures(row: str) -> Mapping[str, PublishedValue]:
    """Return the numbers of a row, under the metrics on scenes that stand in for its columns.

    They are for photos and a pretrained network of 12 layers: only the order of the rows in a
    column can be compared, not the values.
    """
    if row not in TABLE_1:
        return NO_PUBLISHED_VALUES
    return {
        name: PublishedValue.from_percent(TABLE_1[row][at], f"{PAPER}, Table 1, {row}, {where}")
        for name, (at, where) in COLUMNS.items()
    }
