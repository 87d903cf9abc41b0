"""Published numbers of Learn to Pay Attention outside of Table 1."""

import pytest

from overt.papers.ltpa import config as ltpa
from overt.papers.ltpa.published import FIGURE_6, FIGURE_9, STL, TABLE_2, TABLE_3, figures


def percentages(label: str, data: str) -> dict[str, float]:
    return {name: round(100 * one.value, 4) for name, one in figures(label, data).items()}


def test_networks_are_rows_of_table_1() -> None:
    for table in (TABLE_2, TABLE_3, STL, FIGURE_6, FIGURE_9):
        assert set(table) <= set(ltpa.table_models())
    assert set(STL) == set(TABLE_3)


@pytest.mark.parametrize(
    ("label", "cub", "svhn"),
    [
        ("vgg", 34.64, 4.27),
        ("vgg-gap", 29.50, 5.84),
        ("vgg-pan", 31.46, 8.02),
        ("att2-concat-pc", 26.80, 3.74),
        ("att3-concat-pc", 26.95, 3.52),
    ],
)
def test_table_2_errors(label: str, cub: float, svhn: float) -> None:
    assert percentages(label, "cub")["error"] == cub and percentages(label, "svhn") == {
        "error": svhn
    }
    assert not figures(label, "cub")["error"].higher_is_better


def test_figure_6_has_fooling_rates_on_cub() -> None:
    rates = {"fooled_fgsm_1": 53.78, "fooled_fgsm_2": 76.0, "fooled_fgsm_4": 89.9}
    rates |= {"fooled_fgsm_8": 95.27, "fooled_fgsm_16": 97.6}
    assert percentages("att2-concat-pc", "cub") == {"error": 26.8, **rates}
    assert percentages("vgg", "cub")["fooled_fgsm_1"] == 58.58
    assert list(percentages("att3-concat-pc", "cub")) == ["error"]


def test_table_3_and_figure_9_have_numbers_of_cifar_networks() -> None:
    assert percentages("att3-concat-pc", "cifar10") == {
        "stl10_train": 48.42,
        "stl10_test": 48.32,
        "transfer_caltech101": 58.34,
        "transfer_caltech256": 29.99,
        "transfer_event8": 77.06,
        "transfer_action40": 26.75,
        "transfer_scene67": 26.86,
        "jaccard_airplane": 48.07,
        "jaccard_car": 61.19,
        "jaccard_horse": 40.95,
    }
    assert percentages("att3-concat-pc", "cifar100") == {
        "transfer_caltech101": 75.39,
        "transfer_caltech256": 44.14,
        "transfer_event8": 82.08,
        "transfer_action40": 30.96,
        "transfer_scene67": 33.72,
        "jaccard_airplane": 35.66,
        "jaccard_car": 41.23,
        "jaccard_horse": 29.68,
    }
    assert "jaccard_car" in percentages("vgg-gap", "cifar10")
    assert "jaccard_car" not in percentages("vgg-gap", "cifar100")  # the paper has a dash there
    assert all(one.higher_is_better for one in figures("rn164-att2", "cifar10").values())


def test_controls_and_scenes_have_no_published_numbers() -> None:
    for label in ("att2-mean", "att-dp"):
        for data in ("cifar10", "cub", "svhn"):
            assert figures(label, data) == {}
    assert figures("vgg", "scenes") == {}
