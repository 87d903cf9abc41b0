"""Tables and figures of Learn to Pay Attention.

Each network is trained once. Table 3 and the figures show other columns of the runs of Tables 1 and
2, which they find in the same folder: give all of them one `--out`.
"""

from collections.abc import Callable, Iterable

from overt.experiments.table import RowSpec, TableSpec
from overt.papers.ltpa import config as ltpa
from overt.papers.ltpa.config import LtpaRecipe
from overt.papers.ltpa.published import SETS, STRENGTHS

Maker = Callable[[], LtpaRecipe]
CIFARS: dict[str, Maker] = {"cifar10": ltpa.ltpa_cifar10, "cifar100": ltpa.ltpa_cifar100}
OTHERS: dict[str, Maker] = {"cub": ltpa.ltpa_cub, "svhn": ltpa.ltpa_svhn}
FIRST, SECOND = "ltpa-1", "ltpa-2"

# The networks of each table; `mean` rows are controls that the paper does not have.
VGGS, ATTENDING = ("vgg", "vgg-gap", "vgg-pan"), ("att2-concat-pc", "att3-concat-pc")
CONTROLS = ("att2-mean", "att3-mean")
IN_TABLE_2 = (*VGGS, *ATTENDING, *CONTROLS)
IN_TABLE_3 = (*VGGS, "resnet-164", *ATTENDING, "rn164-att2", *CONTROLS)
WITH_MAPS = tuple(label for label in IN_TABLE_3 if label not in ("vgg", "resnet-164"))
ATTACKED = ("vgg", "vgg-gap", *ATTENDING, *CONTROLS)
QUERY_SWAPPED = ("att2-concat-dp", "att3-concat-pc", "att2-concat-pc")

LEVELS = ("8x8", "16x16")
TRANSFERRED = (*SETS, "cifar10", "cifar100", "stl10", "scenes")
PARTNERS = ("alike", "unlike")  # images of the same class, and of another
ATTENTION = ("accuracy", "pointing", "mass_inside", "rank_correlation", "deletion")


def tables() -> tuple[TableSpec, ...]:
    """Return Tables 1 to 3, figures 6, 9 and 10, and the networks of Table 1 on scenes."""
    every = tuple(ltpa.table_models())
    return (
        TableSpec(
            FIRST,
            "Learn to Pay Attention, Table 1, with controls that pool the same levels by the mean.",
            rows(CIFARS, every),
            ("error", "ece", "deletion", "entropy_8x8", "entropy_16x16", "entropy_32x32"),
        ),
        TableSpec(
            SECOND,
            "Learn to Pay Attention, Table 2: CUB at 80 x 80 pixels, and SVHN.",
            rows(OTHERS, IN_TABLE_2),
            ("error", "ece", "entropy_8x8", "entropy_16x16"),
            stem=SECOND,
        ),
        TableSpec(
            "ltpa-3",
            "Learn to Pay Attention, Table 3: transfer of CIFAR features to other datasets.",
            rows(CIFARS, IN_TABLE_3, FIRST),
            ("stl10_train", "stl10_test", *(f"transfer_{name}" for name in TRANSFERRED)),
            stem="ltpa-3",
        ),
        TableSpec(
            "ltpa-fig6",
            "Learn to Pay Attention, figure 6: fooling rates of attacks of n / 255.",
            (
                *rows({"cub": ltpa.ltpa_cub}, ATTACKED, SECOND),
                *rows(CIFARS, ATTACKED, FIRST),
            ),
            tuple(f"fooled_{how}_{steps}" for how in ("fgsm", "pgd") for steps in STRENGTHS),
            stem="ltpa-fig6",
        ),
        TableSpec(
            "ltpa-fig9",
            "Learn to Pay Attention, figure 9: segmentation of Object Discovery photos.",
            rows(CIFARS, WITH_MAPS, FIRST),
            ("jaccard_airplane", "jaccard_car", "jaccard_horse"),
            stem="ltpa-fig9",
        ),
        TableSpec(
            "ltpa-fig10",
            "Learn to Pay Attention, figure 10: the effect of the query of another image.",
            (
                *rows(CIFARS, QUERY_SWAPPED, FIRST),
                *(
                    RowSpec(f"{data}-att2-concat-additive", make, ("model.score=additive",))
                    for data, make in CIFARS.items()
                ),
            ),
            (
                *(f"moved_{kind}_{grid}" for grid in ("16x16", "8x8") for kind in PARTNERS),
                *(f"swapped_{kind}" for kind in PARTNERS),
            ),
            stem="ltpa-fig10",
        ),
        TableSpec(
            "ltpa-parts",
            "Attention taken apart on CIFAR: resolution, parameters, bound, query, and the code.",
            part_rows(),
            ("error", "ece", "parameters", "entropy_8x8", "entropy_16x16", "swapped_unlike"),
            stem="ltpa-parts",
        ),
        TableSpec(
            "ltpa-scenes-parts",
            "Attention taken apart on scenes, beside maps of plain activations (figure 3).",
            tuple(
                RowSpec(label, ltpa.ltpa_scenes, ltpa.model_changes(model), "ltpa-scenes")
                for label, model in ltpa.PARTS.items()
            ),
            (
                *("accuracy", "pointing", "mass_inside"),
                *(f"pointing_{name}" for name in (*LEVELS, "joined")),
                *(f"pointing_activation_{name}" for name in (*LEVELS, "joined")),
                *(f"jaccard_{name}" for name in ("joined", "activation_joined")),
            ),
            stem="ltpa-scenes-parts",
        ),
        TableSpec(
            "ltpa-scenes",
            "The networks of ltpa-1 on scenes: do their maps find and segment the deciding object?",
            tuple(row("", ltpa.ltpa_scenes, label) for label in every),
            (
                *ATTENTION,
                *(f"pointing_{name}" for name in ("joined", "gradient", "gradient_input")),
                *(f"jaccard_{name}" for name in ("joined", "8x8", "cam_chosen", "cam_true")),
                *(f"jaccard_{name}" for name in ("gradient", "gradient_input", "centre")),
            ),
        ),
    )


def part_rows() -> tuple[RowSpec, ...]:
    """Return the rows of `ltpa-parts`; those that are in `ltpa-1` are its runs."""
    known = ltpa.table_models()
    chosen = {"vgg": known["vgg"], **ltpa.PARTS, **ltpa.AS_IN_THE_CODE}
    return tuple(
        RowSpec(
            f"{data}-{label}",
            make,
            (
                *ltpa.model_changes(model),
                *(ltpa.PUBLISHED_TRAINING if label.endswith("-published") else ()),
            ),
            FIRST if label in known else "",
        )
        for data, make in CIFARS.items()
        for label, model in chosen.items()
    )


def rows(data: dict[str, Maker], labels: Iterable[str], home: str = "") -> tuple[RowSpec, ...]:
    """Return these networks on each of these datasets, whose runs are those of the table `home`."""
    chosen = tuple(labels)
    return tuple(row(name, make, label, home) for name, make in data.items() for label in chosen)


def row(data: str, make: Maker, label: str, home: str = "") -> RowSpec:
    """Return one network on one dataset, labelled by both."""
    changes = ltpa.model_changes(ltpa.table_models()[label])
    return RowSpec(f"{data}-{label}" if data else label, make, changes, home)
