"""The tables of self-supervision: the paper's rows, a placebo for each, one ground for all."""

from dataclasses import replace

from overt.recipes import tables
from overt.recipes.settings import to_json
from overt.recipes.ssa import tables as ssa_tables
from overt.recipes.ssa.ground import OF_BASELINE, alike
from overt.recipes.ssa.recipe import Distance, SsaRecipe, Target
from overt.recipes.tables import made

TABLES = {one.name: one for one in ssa_tables.tables()}
WHOLE_BATCH = (Distance.CORAL, Distance.MMD, Distance.MMD_LINEAR)


def rows(name: str) -> dict[str, SsaRecipe]:
    found = {row.label: made(row, []) for row in TABLES[name].rows}
    assert all(isinstance(one, SsaRecipe) for one in found.values())
    return found  # type: ignore[return-value]


def test_they_are_among_all_tables() -> None:
    assert TABLES.items() <= tables.tables().items()
    wanted = {"ssa-1", "ssa-2", "ssa-3", "ssa-4", "ssa-scenes", "ssa-masks", "ssa-words"}
    assert set(TABLES) == wanted


def test_tables_1_and_2_have_the_papers_five_rows_with_its_numbers() -> None:
    for name in ("ssa-1", "ssa-2"):
        found = rows(name)
        for label in ("none", "coral", "mse", "mmd", "adversarial"):
            assert "accuracy" in found[label].paper, label
        assert not found["shuffled-mse"].paper


def test_every_loss_of_the_paper_has_a_placebo_that_it_can_tell_apart() -> None:
    for name in ("ssa-1", "ssa-2", "ssa-scenes"):
        placebos = {
            one.supervise.loss: one.supervise.target
            for one in rows(name).values()
            if one.supervise.target in (Target.SHUFFLED, Target.SCATTERED)
        }
        for loss in ssa_tables.PAPERS:
            wanted = Target.SCATTERED if loss in WHOLE_BATCH else Target.SHUFFLED
            assert placebos[loss] is wanted


def test_rows_of_one_task_share_their_ground() -> None:
    found = [one for one in rows("ssa-1").values() if one.name == "ssa-trec"]
    assert all(alike(to_json(found[0]), one, OF_BASELINE) for one in found)
    searches = rows("ssa-masks")
    assert len({one.surrogate for one in searches.values()}) == len(searches)


def test_a_weighted_mean_of_maps_stands_beside_the_best_one_without_its_number() -> None:
    found = rows("ssa-1")
    best, mean = found["mse"], found["mean-map-mse"]
    assert best.paper and not mean.paper
    assert replace(mean, surrogate=best.surrogate) == best
    assert not rows("ssa-masks")["mean-of-maps"].paper


def test_training_on_is_a_row_of_its_own_without_the_papers_number() -> None:
    for name, label in (
        ("ssa-1", "trained-on"),
        ("ssa-1", "minilm-trained-on"),
        ("ssa-2", "trained-on"),
        ("ssa-3", "yelp-trained-on"),
        ("ssa-scenes", "trained-on"),
    ):
        one = rows(name)[label]
        assert one.taught and one.supervise.target is Target.NONE and not one.paper


def test_table_4_teaches_questions_images_and_both() -> None:
    labels = set(rows("ssa-4"))
    for data in ("easyvqa", "daquar", "vqa"):
        sides = {f"{data}-{side}-adversarial" for side in ("question", "image", "both")}
        assert {f"{data}-none", *sides} <= labels
