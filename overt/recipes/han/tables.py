"""The tables and figures of hard attention as tables of ours.

Tables 1 to 3 and section 4.7 are of VQA-CP v2, and stand as they are in the paper. Each set that
stands in for it has one table with all of those rows and with controls. Figure 3 is of CLEVR and
stands here for Sort-of-CLEVR too; it shows other columns of the same runs, which it finds in the
same folder: give both tables one `--out`.
"""

from collections.abc import Callable, Iterable, Mapping

from overt.recipes.comparison import Row, Table
from overt.recipes.han import recipe as han
from overt.recipes.han.recipe import HanRecipe, Model

COST = ("cells_kept", "share_kept", "flops", "seconds")
FOUND = ("covered", "beyond_chance", "mass_inside", "deletion")
BY_TYPE = ("accuracy", "accuracy_yes_no", "accuracy_number", "accuracy_other")
RELATIONS = ("accuracy", "accuracy_relational", "accuracy_non_relational")
FIGURE_3 = ("rn", "rn-aligned", "han-rn", "han-rn-fine", "adahan-rn", "st-rn", "han-sum")
REACHED = tuple(f"seconds_to_{level}" for level in (70, 80, 90, 94))
REACHED_RELATIONAL = tuple(f"seconds_to_{level}_relational" for level in (70, 80, 90, 94))
FIRST = "han-1"
IN_TABLE_2 = (*han.IN_TABLE_2, "han-sum-32", "han-sum-48", "han-pairwise-32", "han-pairwise-48")
IN_TABLE_3 = (*han.IN_TABLE_3, "han-sum-16", "han-sum-32", "han-sum-48")


def tables() -> tuple[Table, ...]:
    """Tables 1 to 3, section 4.7, CLEVR, figure 3, and the sets that stand in."""
    rows = han.rows_of("vqacp2")
    return (
        Table(
            FIRST,
            "Bootstrapping Hard Attention, Table 1: how many cells, and what is made of them.",
            _rows(rows, han.IN_TABLE_1, han.han_vqacp),
            (*BY_TYPE, *COST),
        ),
        Table(
            "han-2",
            "Bootstrapping Hard Attention, Table 2: as many cells as a question needs.",
            _rows(rows, IN_TABLE_2, han.han_vqacp, FIRST, han.IN_TABLE_1),
            (*BY_TYPE, *COST),
            stem="han-2",
        ),
        Table(
            "han-3",
            "Bootstrapping Hard Attention, Table 3: no layers before cells and question are added.",
            _rows(rows, IN_TABLE_3, han.han_vqacp, FIRST, han.IN_TABLE_1),
            (*BY_TYPE, *COST),
            stem="han-3",
        ),
        Table(
            "han-simple",
            "Bootstrapping Hard Attention, section 4.7: a small CNN that learns with the rest.",
            _rows(rows, han.IN_SIMPLE, han.han_vqacp),
            (*BY_TYPE, *COST),
            stem="han-simple",
        ),
        Table(
            "han-clevr",
            "Bootstrapping Hard Attention, section 4.8 and figure 3: CLEVR from pixels.",
            _all("clevr", han.han_clevr),
            ("accuracy", *COST, *FOUND, *REACHED),
        ),
        Table(
            "han-sortclevr",
            "The rows of section 4.8 on Sort-of-CLEVR, with controls of the choice.",
            _all("sortclevr", han.han_sortclevr),
            (*RELATIONS, *COST, *FOUND),
        ),
        Table(
            "han-fig3",
            "Bootstrapping Hard Attention, figure 3, on Sort-of-CLEVR: seconds to an accuracy.",
            _rows(
                han.rows_of("sortclevr"),
                FIGURE_3,
                han.han_sortclevr,
                "han-sortclevr",
                han.rows_of("sortclevr"),
            ),
            ("accuracy_relational", "training", *REACHED, *REACHED_RELATIONAL, "flops"),
            stem="han-fig3",
        ),
        Table(
            "han-scenes",
            "Tables 1 to 3 on scenes, with controls, and whether kept cells are those that decide.",
            _all("scenes", han.han_scenes),
            ("accuracy", *COST, *FOUND),
        ),
        Table(
            "han-easyvqa",
            "Tables 1 to 3 on easy-VQA, with controls.",
            _all("easyvqa", han.han_easyvqa),
            (
                "accuracy",
                "accuracy_yes_or_no",
                "accuracy_shape",
                "accuracy_colour",
                *COST,
                "deletion",
            ),
        ),
        Table(
            "han-daquar",
            "Tables 1 to 3 and section 4.7 on DAQUAR, with controls.",
            _all("daquar", han.han_daquar),
            (
                "accuracy",
                "wups_90",
                "accuracy_object",
                "accuracy_colour",
                "accuracy_number",
                *COST,
                "deletion",
            ),
        ),
    )


def _all(data: str, make: Callable[[], HanRecipe]) -> tuple[Row, ...]:
    rows = han.rows_of(data)
    return _rows(rows, rows, make)


def _rows(
    models: Mapping[str, Model],
    labels: Iterable[str],
    make: Callable[[], HanRecipe],
    home: str = "",
    homed: Iterable[str] = (),
) -> tuple[Row, ...]:
    """These rows of a recipe; those in `homed` belong to the table `home`."""
    theirs = set(homed)
    return tuple(
        Row(label, make, han.changes(models[label]), home if label in theirs else "")
        for label in labels
    )
