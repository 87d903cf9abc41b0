"""What "Attending Self-Attention" states, by row and column of its table."""

from collections.abc import Mapping

from overt.recipes.recipe import NO_FIGURES, Figure

PAPER = "Attending Self-Attention"

# Table 1: VQA v2.0 val; RefCOCO+ with detected boxes, then with true ones: val, testA, testB.
TABLE_1 = {
    "none": (66.73, 67.10, 74.36, 57.07, 77.38, 81.28, 71.53),
    "indirect": (66.71, 65.95, 72.72, 54.49, 77.20, 80.61, 70.81),
    "direct": (67.09, 69.99, 76.25, 58.99, 77.07, 80.86, 70.96),
    "semi-direct": (67.41, 69.63, 75.93, 58.72, 78.12, 80.96, 71.75),
    "original": (67.73, 71.60, 77.72, 60.99, 79.88, 82.40, 75.01),
}
# Our measure that stands in for a column, on scenes, and the column.
COLUMNS = {
    "answers": (0, "VQA v2.0 val"),
    "located_detected": (1, "RefCOCO+ val, detected boxes"),
    "located_true": (4, "RefCOCO+ val, true boxes"),
}


def figures(row: str) -> Mapping[str, Figure]:
    """The numbers of a row, under the measures on scenes that stand in for its columns.

    They are of photos and a pretrained network of 12 layers: what can be compared is the order of
    the rows in a column, and no number.
    """
    if row not in TABLE_1:
        return NO_FIGURES
    return {
        name: Figure(TABLE_1[row][at] / 100, "share", True, f"{PAPER}, Table 1, {row}, {where}")
        for name, (at, where) in COLUMNS.items()
    }
