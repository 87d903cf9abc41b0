"""The recipe of the small vision-language model and its two tables."""

from overt.experiments import settings, vision_language_recipes
from overt.experiments.vision_language_recipes import BoxTarget, PruningRule
from overt.papers.catalog import find_table


def test_every_rule_is_a_row_of_the_table() -> None:
    table = find_table("vlm-pruning")
    made = [settings.apply(row.recipe(), row.changes) for row in table.rows]
    assert {one.prune.rule for one in made} == set(PruningRule)
    assert made[0].prune.rule is PruningRule.NONE  # the others start from it
    # a control at the layer of each kind of rule
    places = {(one.prune.rule, one.prune.layer) for one in made}
    assert {(PruningRule.RANDOM, 0), (PruningRule.RANDOM, 2)} <= places


def test_the_placebo_differs_in_its_target_only() -> None:
    rows = find_table("vlm-boxes").rows
    plain, boxes, placebo = (settings.apply(row.recipe(), row.changes) for row in rows)
    assert plain == vision_language_recipes.scenes_vlm()
    assert boxes.supervise.target is BoxTarget.TRUTH
    differ = {
        key
        for key, value in settings.to_json(boxes).items()
        if settings.to_json(placebo)[key] != value
    }
    assert differ == {"supervise.target"}
