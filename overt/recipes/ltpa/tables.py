"""The tables and figures of Learn to Pay Attention as tables of ours.

Each network is trained once. Table 3 and the figures show other columns of the runs of Tables 1 and
2, which they find in the same folder: give all of them one `--out`.
"""

from collections.abc import Callable, Iterable

from overt.recipes.comparison import Row, Table
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.ltpa.recipe import LtpaRecipe, Model

Maker = Callable[[], LtpaRecipe]
CIFARS: dict[str, Maker] = {"cifar10": ltpa.ltpa_cifar10, "cifar100": ltpa.ltpa_cifar100}
OTHERS: dict[str, Maker] = {"cub": ltpa.ltpa_cub, "svhn": ltpa.ltpa_svhn}
FIRST, SECOND = "ltpa-1", "ltpa-2"

# The networks of each table; those called `mean` are controls that the paper does not have.
IN_TABLE_2 = (
    "vgg",
    "vgg-gap",
    "vgg-pan",
    "att2-concat-pc",
    "att3-concat-pc",
    "att2-mean",
    "att3-mean",
)
IN_TABLE_3 = (
    "vgg",
    "vgg-gap",
    "vgg-pan",
    "resnet-164",
    "att2-concat-pc",
    "att3-concat-pc",
    "rn164-att2",
    "att2-mean",
    "att3-mean",
)
WITH_MAPS = tuple(label for label in IN_TABLE_3 if label not in ("vgg", "resnet-164"))
ATTACKED = ("vgg", "vgg-gap", "att2-concat-pc", "att3-concat-pc", "att2-mean", "att3-mean")
ASKING = ("att2-concat-dp", "att3-concat-pc", "att2-concat-pc")

STRENGTHS = (1, 2, 4, 8, 16)
ATTENTION = ("accuracy", "pointing", "mass_inside", "rank_correlation", "deletion")


def tables() -> tuple[Table, ...]:
    """Tables 1 to 3, figures 6, 9 and 10, and the networks of Table 1 on scenes."""
    every = tuple(ltpa.models())
    return (
        Table(
            FIRST,
            "Learn to Pay Attention, Table 1, with controls that pool the same levels by the mean.",
            rows(CIFARS, every),
            ("error", "ece", "deletion", "entropy_8x8", "entropy_16x16", "entropy_32x32"),
        ),
        Table(
            SECOND,
            "Learn to Pay Attention, Table 2: birds of CUB at 80 x 80 pixels, and digits of SVHN.",
            rows(OTHERS, IN_TABLE_2),
            ("error", "ece", "entropy_8x8", "entropy_16x16"),
            stem=SECOND,
        ),
        Table(
            "ltpa-3",
            "Learn to Pay Attention, Table 3: features learned on CIFAR for other data sets.",
            rows(CIFARS, IN_TABLE_3, FIRST),
            (
                "stl10_train",
                "stl10_test",
                "transfer_caltech101",
                "transfer_caltech256",
                "transfer_event8",
                "transfer_action40",
                "transfer_scene67",
                "transfer_cifar10",
                "transfer_cifar100",
                "transfer_stl10",
                "transfer_scenes",
            ),
            stem="ltpa-3",
        ),
        Table(
            "ltpa-fig6",
            "Learn to Pay Attention, figure 6: how often an attack of so many 255ths fools.",
            (
                *rows({"cub": ltpa.ltpa_cub}, ATTACKED, SECOND),
                *rows(CIFARS, ATTACKED, FIRST),
            ),
            tuple(f"fooled_{how}_{steps}" for how in ("fgsm", "pgd") for steps in STRENGTHS),
            stem="ltpa-fig6",
        ),
        Table(
            "ltpa-fig9",
            "Learn to Pay Attention, figure 9: shapes cut out of the photos of Object Discovery.",
            rows(CIFARS, WITH_MAPS, FIRST),
            ("jaccard_airplane", "jaccard_car", "jaccard_horse"),
            stem="ltpa-fig9",
        ),
        Table(
            "ltpa-fig10",
            "Learn to Pay Attention, figure 10: what the query of another image changes.",
            (
                *rows(CIFARS, ASKING, FIRST),
                *(
                    Row(f"{data}-att2-concat-additive", make, ("model.score=additive",))
                    for data, make in CIFARS.items()
                ),
            ),
            (
                "moved_alike_16x16",
                "moved_unlike_16x16",
                "moved_alike_8x8",
                "moved_unlike_8x8",
                "swapped_alike",
                "swapped_unlike",
            ),
            stem="ltpa-fig10",
        ),
        Table(
            "ltpa-scenes",
            "The networks of ltpa-1 on scenes: whether their maps find and cut out what decides.",
            tuple(row("", ltpa.ltpa_scenes, label) for label in every),
            (
                *ATTENTION,
                *(f"pointing_{name}" for name in ("joined", "gradient", "gradient_input")),
                *(f"jaccard_{name}" for name in ("joined", "8x8", "cam_chosen", "cam_true")),
                *(f"jaccard_{name}" for name in ("gradient", "gradient_input", "centre")),
            ),
        ),
    )


def rows(data: dict[str, Maker], labels: Iterable[str], home: str = "") -> tuple[Row, ...]:
    """These networks on each of these data sets, whose runs are those of the table `home`."""
    chosen = tuple(labels)
    return tuple(row(name, make, label, home) for name, make in data.items() for label in chosen)


def row(data: str, make: Maker, label: str, home: str = "") -> Row:
    """One network on one data set, called by both."""
    model: Model = ltpa.models()[label]
    return Row(f"{data}-{label}" if data else label, make, ltpa.changes(model), home)
