"""Numbers published in "Learning Visual Question Answering by Bootstrapping Hard Attention".

Malinowski, Doersch, Santoro and Battaglia, ECCV 2018, https://arxiv.org/abs/1808.00300. Percentages
on VQA-CP v2: overall, yes / no, number, other. Two numbers of Table 2 are illegible in our copy and
are `None`.

Table 3 calls k = 16, 32, 48 "25, 50, 75 %", which would be of 64 cells; its rows with two layers
equal, digit by digit, those of Table 1 with 16, 32, 48 % of 100. So k is a count here.
"""

from overt.experiments.recipe import PublishedValue

PAPER = "Bootstrapping Hard Attention"
SANTORO = "A simple neural network module for relational reasoning"
KINDS = ("accuracy", "accuracy_yes_no", "accuracy_number", "accuracy_other")

Numbers = tuple[float | None, ...]

TABLE_1: dict[str, Numbers] = {
    "han-sum-16": (26.99, 40.53, 11.38, 24.15),
    "han-sum-32": (27.43, 41.05, 11.38, 24.68),
    "han-sum-48": (27.94, 41.35, 11.93, 25.27),
    "han-sum-64": (27.80, 40.74, 11.29, 25.52),
    "sum": (27.96, 43.23, 12.09, 24.29),
    "han-pairwise-16": (26.81, 41.24, 10.87, 23.61),
    "han-pairwise-32": (27.45, 40.91, 11.48, 24.75),
    "han-pairwise-48": (28.23, 41.23, 11.40, 25.98),
    "pairwise": (28.06, 44.10, 13.20, 23.71),
    "san2": (26.60, 39.69, 11.25, 23.92),
    "san2-pos": (27.77, 40.73, 11.31, 25.47),
}
TABLE_2: dict[str, Numbers] = {
    "adahan-sum": (27.40, None, None, 24.86),
    "adahan-pairwise": (28.65, None, None, 20.33),
}
KEPT = {"adahan-sum": 25.66, "adahan-pairwise": 32.63}  # of 100 cells, Table 2
TABLE_3: dict[str, Numbers] = {
    "han-sum-16-depth0": (26.38, 43.21, 13.12, 21.17),
    "han-sum-32-depth0": (26.75, 41.42, 10.94, 23.38),
    "han-sum-48-depth0": (26.82, 41.30, 11.48, 23.42),
}
SIMPLE: dict[str, Numbers] = {"simple-san": (21.0,), "simple-han": (24.0,)}  # "about", section 4.7
CLEVR = {"san2-pos": 68.5, "rn": 95.5, "han-sum": 89.7, "han-rn": 93.9}  # section 4.8
# A relation network on Sort-of-CLEVR reaches "above 94 %" on either kind of question.
SORT_OF_CLEVR = 94.0

WHERE = {
    "Table 1": TABLE_1,
    "Table 2": TABLE_2,
    "Table 3": TABLE_3,
    "section 4.7": SIMPLE,
}


def figures(data: str, label: str) -> dict[str, PublishedValue]:
    """Return the published numbers of a row on a dataset: accuracies as shares, cells kept."""
    if data == "clevr" and label in CLEVR:
        # the paper does not say whether it had positions
        row = "SAN" if label.startswith("san") else label
        return {
            "accuracy": PublishedValue.from_percent(CLEVR[label], f"{PAPER}, section 4.8, {row}")
        }
    if data == "sortclevr" and label == "rn":
        least = PublishedValue.from_percent(
            SORT_OF_CLEVR, f"{SANTORO}, Sort-of-CLEVR, more than that"
        )
        return {"accuracy_relational": least, "accuracy_non_relational": least}
    if data != "vqacp2":
        return {}
    found: dict[str, PublishedValue] = {}
    for where, rows in WHERE.items():
        for name, value in zip(KINDS, rows.get(label, ()), strict=False):
            if value is not None:
                found[name] = PublishedValue.from_percent(value, f"{PAPER}, {where}, {label}")
    if label in KEPT:
        found["cells_kept"] = PublishedValue(
            KEPT[label], "cells", False, f"{PAPER}, Table 2, {label}"
        )
    return found
