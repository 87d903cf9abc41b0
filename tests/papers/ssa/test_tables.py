"""Tables of self-supervision: rows of the paper, placebos, and shared warm starts."""

from dataclasses import replace

from overt.experiments.settings import to_json
from overt.experiments.table_runner import row_recipe
from overt.papers.ssa import tables as ssa_tables
from overt.papers.ssa.config import SsaLoss, SsaRecipe, SsaTarget, SsaTextNetwork
from overt.papers.ssa.warm_start import OF_BASELINE, same_settings

TABLES = {one.name: one for one in ssa_tables.tables()}
WHOLE_BATCH = (SsaLoss.CORAL, SsaLoss.MMD, SsaLoss.MMD_LINEAR)


def make_rows(name: str) -> dict[str, SsaRecipe]:
    found = {row.label: row_recipe(row, []) for row in TABLES[name].rows}
    assert all(isinstance(one, SsaRecipe) for one in found.values())
    return found  # type: ignore[return-value]


def test_tables_1_and_2_have_the_five_rows_of_the_paper_with_numbers() -> None:
    for name in ("ssa-1", "ssa-2"):
        found = make_rows(name)
        for label in ("none", "coral", "mse", "mmd", "adversarial"):
            assert "accuracy" in found[label].paper, label
        assert not found["shuffled-mse"].paper


def test_each_loss_of_the_paper_has_a_placebo_it_can_distinguish() -> None:
    for name in ("ssa-1", "ssa-2", "ssa-scenes"):
        placebos = {
            one.supervise.loss: one.supervise.target
            for one in make_rows(name).values()
            if one.supervise.target in (SsaTarget.SHUFFLED, SsaTarget.SCATTERED)
        }
        for loss in ssa_tables.PAPER_LOSSES:
            wanted = SsaTarget.SCATTERED if loss in WHOLE_BATCH else SsaTarget.SHUFFLED
            assert placebos[loss] is wanted


def test_rows_of_one_task_share_their_warm_start() -> None:
    found = [one for one in make_rows("ssa-1").values() if one.name == "ssa-trec"]
    assert all(same_settings(to_json(found[0]), one, OF_BASELINE) for one in found)
    searches = make_rows("ssa-masks")
    assert len({one.surrogate for one in searches.values()}) == len(searches)


def test_mean_map_rows_differ_only_by_the_search_and_are_unpublished() -> None:
    found = make_rows("ssa-1")
    best, mean = found["mse"], found["mean-map-mse"]
    assert best.paper and not mean.paper
    assert replace(mean, surrogate=best.surrogate) == best
    assert not make_rows("ssa-masks")["mean-of-maps"].paper


def test_trained_on_rows_have_no_target_and_no_published_number() -> None:
    for name, label in (
        ("ssa-1", "trained-on"),
        ("ssa-1", "minilm-trained-on"),
        ("ssa-2", "trained-on"),
        ("ssa-3", "yelp-trained-on"),
        ("ssa-scenes", "trained-on"),
    ):
        one = make_rows(name)[label]
        assert one.supervised and one.supervise.target is SsaTarget.NONE and not one.paper


def test_table_4_supervises_questions_images_and_both() -> None:
    labels = set(make_rows("ssa-4"))
    for data in ("easyvqa", "daquar", "vqa"):
        sides = {f"{data}-{side}-adversarial" for side in ("question", "image", "both")}
        assert {f"{data}-none", *sides} <= labels


def test_rows_with_thirty_hops_are_table_1_with_another_network() -> None:
    small, large = make_rows("ssa-1"), make_rows("ssa-1-hops")
    assert set(large) < set(small)
    for label, one in large.items():
        assert (one.model.net, one.model.hops) == (SsaTextNetwork.STRUCTURED, 30)
        assert replace(one, model=small[label].model) == small[label]


def test_weight_rows_differ_only_by_the_weight_and_share_their_warm_start() -> None:
    found, tasks = make_rows("ssa-weights"), {"trec": "ssa-1", "cifar10": "ssa-2"}
    assert len(found) == len(tasks) * (1 + len(ssa_tables.PAPER_LOSSES) * len(ssa_tables.WEIGHTS))
    for task, table in tasks.items():
        one = make_rows(table)
        assert found[f"{task}-none"] == one["none"]
        for loss in ssa_tables.PAPER_LOSSES:
            for weight in ssa_tables.WEIGHTS:
                made = found[f"{task}-{loss.value}-{weight:g}"]
                assert made.supervise.weight == weight
                assert replace(made, supervise=one[loss.value].supervise) == one[loss.value]
                assert replace(made.supervise, weight=1.0) == one[loss.value].supervise
