"""Numbers published in "Self Supervision for Attention Networks", by dataset, row and span."""

from collections.abc import Mapping

from overt.experiments.recipe import NO_PUBLISHED_VALUES, PublishedValue

PAPER = "Self Supervision for Attention Networks"

# Tables 1 and 2: accuracy in per cent, by the loss; "none" is the baseline.
TABLE_1 = {"none": 81.20, "coral": 81.89, "mse": 82.33, "mmd": 84.80, "adversarial": 84.91}
TABLE_2 = {"none": 69.59, "coral": 69.83, "mse": 69.87, "mmd": 70.80, "adversarial": 71.12}
# Table 3: rank correlation and earth mover's distance with human attention, by span and loss.
TABLE_3 = {
    ("", "none"): (0.08, 0.421),
    ("question", "coral"): (0.09, 0.393),
    ("question", "mse"): (0.10, 0.387),
    ("question", "mmd"): (0.12, 0.381),
    ("question", "adversarial"): (0.13, 0.370),
    ("image", "coral"): (0.10, 0.381),
    ("image", "mse"): (0.11, 0.372),
    ("image", "mmd"): (0.13, 0.369),
    ("image", "adversarial"): (0.15, 0.350),
    ("both", "adversarial"): (0.15, 0.352),
}
# Table 4: accuracy on VQA v1 in per cent.
TABLE_4 = {
    ("", "none"): 58.08,
    ("question", "coral"): 58.17,
    ("question", "mse"): 58.85,
    ("question", "mmd"): 59.29,
    ("question", "adversarial"): 60.11,
    ("image", "coral"): 59.23,
    ("image", "mse"): 60.42,
    ("image", "mmd"): 61.02,
    ("image", "adversarial"): 61.76,
    ("both", "adversarial"): 61.92,
}


def figures(data: str, row: str, over: str) -> Mapping[str, PublishedValue]:
    """Return the published numbers for a dataset and a loss ("none" for the baseline), if any."""
    place = ("" if row == "none" else over, row)
    match data:
        case "trec6" if row in TABLE_1:
            return {
                "accuracy": PublishedValue.from_percent(TABLE_1[row], f"{PAPER}, Table 1, {row}")
            }
        case "cifar10" if row in TABLE_2:
            return {
                "accuracy": PublishedValue.from_percent(TABLE_2[row], f"{PAPER}, Table 2, {row}")
            }
        case "vqa_hat" if place in TABLE_4:
            # Tables 3 and 4 have the same rows.
            correlation, distance = TABLE_3[place]
            where = " ".join(place).strip()
            return {
                "vqa_accuracy": PublishedValue.from_percent(
                    TABLE_4[place], f"{PAPER}, Table 4, {where}"
                ),
                "rank_correlation": PublishedValue(
                    correlation, "correlation", True, f"{PAPER}, Table 3, {where}"
                ),
                # The paper does not state the unit of its distance.
                "emd": PublishedValue(distance, "unstated", False, f"{PAPER}, Table 3, {where}"),
            }
        case _:
            return NO_PUBLISHED_VALUES
