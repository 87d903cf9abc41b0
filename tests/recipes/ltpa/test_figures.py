"""The paper's numbers outside of Table 1, against its text."""

import pytest

from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.ltpa.figures import FIGURE_6, FIGURE_9, STL, TABLE_2, TABLE_3, figures


def shown(label: str, data: str) -> dict[str, float]:
    return {name: round(100 * one.value, 4) for name, one in figures(label, data).items()}


def test_networks_are_rows_of_the_first_table() -> None:
    for table in (TABLE_2, TABLE_3, STL, FIGURE_6, FIGURE_9):
        assert set(table) <= set(ltpa.models())
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
def test_table_2(label: str, cub: float, svhn: float) -> None:
    assert shown(label, "cub")["error"] == cub and shown(label, "svhn") == {"error": svhn}
    assert not figures(label, "cub")["error"].higher_is_better


def test_figure_6_is_about_birds() -> None:
    rates = {"fooled_fgsm_1": 53.78, "fooled_fgsm_2": 76.0, "fooled_fgsm_4": 89.9}
    rates |= {"fooled_fgsm_8": 95.27, "fooled_fgsm_16": 97.6}
    assert shown("att2-concat-pc", "cub") == {"error": 26.8, **rates}
    assert shown("vgg", "cub")["fooled_fgsm_1"] == 58.58
    assert list(shown("att3-concat-pc", "cub")) == ["error"]


def test_table_3_and_figure_9_are_about_networks_of_cifar() -> None:
    assert shown("att3-concat-pc", "cifar10") == {
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
    assert shown("att3-concat-pc", "cifar100") == {
        "transfer_caltech101": 75.39,
        "transfer_caltech256": 44.14,
        "transfer_event8": 82.08,
        "transfer_action40": 30.96,
        "transfer_scene67": 33.72,
        "jaccard_airplane": 35.66,
        "jaccard_car": 41.23,
        "jaccard_horse": 29.68,
    }
    assert "jaccard_car" in shown("vgg-gap", "cifar10")
    assert "jaccard_car" not in shown("vgg-gap", "cifar100")  # the paper has a dash there
    assert all(one.higher_is_better for one in figures("rn164-att2", "cifar10").values())


def test_nothing_is_stated_for_controls_and_scenes() -> None:
    for label in ("att2-mean", "att-dp"):
        for data in ("cifar10", "cub", "svhn"):
            assert figures(label, data) == {}
    assert figures("vgg", "scenes") == {}
