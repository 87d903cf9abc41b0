"""Tables and figures of Bootstrapping Hard Attention.

Tables 1 to 3 and section 4.7 use VQA-CP v2 and follow the paper. Each smaller dataset has one table
with all of those rows and with controls. Figure 3 uses CLEVR, here also Sort-of-CLEVR; it shows
other columns of the same runs, which it finds in the same folder: give both tables one `--out`.
"""

from collections.abc import Callable, Iterable, Mapping

from overt.experiments.table import RowSpec, TableSpec
from overt.papers.han import config as han
from overt.papers.han.config import HanModel, HanRecipe

COST = ("cells_kept", "share_kept", "flops", "seconds")
TRUTH = ("covered", "beyond_chance", "mass_inside", "deletion")
BY_TYPE = ("accuracy", "accuracy_yes_no", "accuracy_number", "accuracy_other")
RELATIONS = ("accuracy", "accuracy_relational", "accuracy_non_relational")
# Figure 3a at full length, on Sort-of-CLEVR: as many questions for every row.
FULL_LENGTH = ("train.steps=36000", "train.precision=bf16", "train.graph=true", "train.card=0")
# Milliseconds of a training step of `han-rn`, over those of `rn-aligned`, each alone on an H200.
EQUAL_SECONDS = 1.87 / 3.02
FIGURE_3A = (
    *("rn-aligned", "han-rn", "oracle-rn", "blind-rn", "random-rn"),
    *("rn-aligned-fine", "han-rn-fine", "oracle-rn-fine"),
)
FIGURE_3 = ("rn", "rn-aligned", "han-rn", "han-rn-fine", "adahan-rn", "st-rn", "han-sum")
TIME_TO = tuple(f"seconds_to_{level}" for level in (70, 80, 90, 94))
TIME_TO_RELATIONAL = tuple(f"seconds_to_{level}_relational" for level in (70, 80, 90, 94))
FIRST = "han-1"
IN_TABLE_2 = (*han.IN_TABLE_2, "han-sum-32", "han-sum-48", "han-pairwise-32", "han-pairwise-48")
IN_TABLE_3 = (*han.IN_TABLE_3, "han-sum-16", "han-sum-32", "han-sum-48")


def tables() -> tuple[TableSpec, ...]:
    """Return Tables 1 to 3, section 4.7, CLEVR, figure 3, and the tables of smaller datasets."""
    rows, related = han.table_rows("vqacp2"), han.table_rows("sortclevr")
    return (
        TableSpec(
            FIRST,
            "Bootstrapping Hard Attention, Table 1: number of cells and aggregation.",
            _rows(rows, han.IN_TABLE_1, han.han_vqacp),
            (*BY_TYPE, *COST),
        ),
        TableSpec(
            "han-2",
            "Bootstrapping Hard Attention, Table 2: adaptive number of cells.",
            _rows(rows, IN_TABLE_2, han.han_vqacp, FIRST, han.IN_TABLE_1),
            (*BY_TYPE, *COST),
            stem="han-2",
        ),
        TableSpec(
            "han-3",
            "Bootstrapping Hard Attention, Table 3: no layers before cells and question are added.",
            _rows(rows, IN_TABLE_3, han.han_vqacp, FIRST, han.IN_TABLE_1),
            (*BY_TYPE, *COST),
            stem="han-3",
        ),
        TableSpec(
            "han-simple",
            "Bootstrapping Hard Attention, section 4.7: a small CNN trained end to end.",
            _rows(rows, han.IN_SIMPLE, han.han_vqacp),
            (*BY_TYPE, *COST),
            stem="han-simple",
        ),
        TableSpec(
            "han-clevr",
            "Bootstrapping Hard Attention, section 4.8 and figure 3: CLEVR from pixels.",
            _all_rows("clevr", han.han_clevr),
            ("accuracy", *COST, *TRUTH, *TIME_TO),
        ),
        TableSpec(
            "han-sortclevr",
            "The rows of section 4.8 on Sort-of-CLEVR, with controls of the selection.",
            _all_rows("sortclevr", han.han_sortclevr),
            (*RELATIONS, *COST, *TRUTH),
        ),
        TableSpec(
            "han-fig3",
            "Bootstrapping Hard Attention, figure 3, on Sort-of-CLEVR: seconds to an accuracy.",
            _rows(related, FIGURE_3, han.han_sortclevr, "han-sortclevr", related),
            ("accuracy_relational", "training", *TIME_TO, *TIME_TO_RELATIONAL, "flops"),
            stem="han-fig3",
        ),
        TableSpec(
            "han-fig3a",
            "Figure 3a at full length on Sort-of-CLEVR: controls and bounds of the selection.",
            figure_3a_rows(),
            ("accuracy_relational", "accuracy_non_relational", "covered", "training", *TIME_TO),
            stem="han-fig3a",
        ),
        TableSpec(
            "han-crowded",
            "Scenes where only the question tells which cells to keep, with bounds.",
            _all_rows("crowded", han.han_crowded),
            ("accuracy", *COST, *TRUTH),
        ),
        TableSpec(
            "han-scenes",
            "Tables 1 to 3 on scenes, with controls, and whether the deciding cells are kept.",
            _all_rows("scenes", han.han_scenes),
            ("accuracy", *COST, *TRUTH),
        ),
        TableSpec(
            "han-easyvqa",
            "Tables 1 to 3 on easy-VQA, with controls.",
            _all_rows("easyvqa", han.han_easyvqa),
            (
                *("accuracy", "accuracy_yes_or_no", "accuracy_shape", "accuracy_colour"),
                *(*COST, "deletion"),
            ),
        ),
        TableSpec(
            "han-daquar",
            "Tables 1 to 3 and section 4.7 on DAQUAR, with controls.",
            _all_rows("daquar", han.han_daquar),
            (
                *("accuracy", "wups_90", "accuracy_object", "accuracy_colour", "accuracy_number"),
                *(*COST, "deletion"),
            ),
        ),
    )


def figure_3a_rows() -> tuple[RowSpec, ...]:
    """Return the rows of figure 3a; runs of the same settings are those of `han-sortclevr`.

    `rn` has the initialization that validation chose for it. `rn-aligned-seconds` is `rn-aligned`
    for as many seconds as `han-rn`, and `rn-santoro` the relation network at its published size.
    """
    models, make, home = han.table_rows("sortclevr"), han.han_sortclevr, "han-sortclevr"
    aligned = (*han.model_changes(models["rn-aligned"]), *FULL_LENGTH)
    rn = (*han.model_changes(models["rn"]), "model.init=torch", *FULL_LENGTH)
    quick = FULL_LENGTH[1:]
    return (
        RowSpec("rn", make, rn, home),
        RowSpec("rn-santoro", han.han_rn_santoro, quick),
        RowSpec("rn-aligned-seconds", make, (*aligned, f"adam.length={EQUAL_SECONDS:.2f}")),
        *(
            RowSpec(label, make, (*han.model_changes(models[label]), *FULL_LENGTH), home)
            for label in FIGURE_3A
        ),
    )


def _all_rows(data: str, make: Callable[[], HanRecipe]) -> tuple[RowSpec, ...]:
    rows = han.table_rows(data)
    return _rows(rows, rows, make)


def _rows(
    models: Mapping[str, HanModel],
    labels: Iterable[str],
    make: Callable[[], HanRecipe],
    home: str = "",
    homed: Iterable[str] = (),
) -> tuple[RowSpec, ...]:
    """Return these rows of a recipe; those in `homed` belong to the table `home`."""
    theirs = set(homed)
    return tuple(
        RowSpec(label, make, han.model_changes(models[label]), home if label in theirs else "")
        for label in labels
    )
