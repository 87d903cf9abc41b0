"""Recipes: one file a paper, each a function that returns plain values. Nothing here is heavy."""

from collections.abc import Callable
from typing import Any

from overt.errors import BadInput
from overt.recipes.recipe import Recipe


def recipes() -> dict[str, Callable[[], Recipe]]:
    """Every recipe by name, in the order in which they are listed."""
    from overt.recipes import baselines, scenes
    from overt.recipes.a2 import recipe as a2
    from overt.recipes.han import recipe as han
    from overt.recipes.ltpa import recipe as ltpa
    from overt.recipes.ssa import recipe as ssa
    from overt.recipes.vgp import recipe as vgp

    every: tuple[Callable[[], Recipe], ...] = (
        scenes.scenes_question,
        scenes.scenes_none,
        scenes.scenes_soft,
        scenes.scenes_truth,
        baselines.cifar10_cnn,
        baselines.cifar100_cnn,
        baselines.trec_attention,
        baselines.easyvqa_soft,
        ltpa.ltpa_cifar10,
        ltpa.ltpa_cifar100,
        ltpa.ltpa_svhn,
        ltpa.ltpa_cub,
        ltpa.ltpa_scenes,
        ssa.ssa_trec,
        ssa.ssa_minilm,
        ssa.ssa_cifar10,
        ssa.ssa_easyvqa,
        ssa.ssa_daquar,
        ssa.ssa_yelp,
        ssa.ssa_vqa,
        ssa.ssa_scenes,
        han.han_sortclevr,
        han.han_scenes,
        han.han_easyvqa,
        han.han_daquar,
        han.han_vqacp,
        han.han_clevr,
        vgp.vgp_scenes,
        vgp.vgp_entities,
        a2.a2_scenes,
        a2.a2_flickr8k,
        a2.a2_flickr30k,
        a2.a2_coco,
    )
    return {make().name: make for make in every}


def find(name: str) -> Recipe:
    """The recipe of this name; another name is answered with the nearest."""
    from overt.recipes import settings

    known = recipes()
    if name not in known:
        raise BadInput(f"there is no recipe {name[:60]!r}; {settings.offer(name, known)}.")
    return known[name]()


def listing(name: str | None = None) -> dict[str, Any]:
    """All recipes and tables, or those of one name, as JSON values."""
    from dataclasses import asdict

    from overt.recipes import settings, tables

    found = [make() for make in recipes().values()]
    return {
        "recipes": [
            {
                "name": recipe.name,
                "about": recipe.about,
                "paper": {key: asdict(figure) for key, figure in recipe.paper.items()},
                "settings": settings.to_json(recipe),
                "takes": {one.key: one.wants for one in settings.describe(recipe)},
            }
            for recipe in found
            if name in (None, recipe.name)
        ],
        "tables": [
            {
                "name": table.name,
                "about": table.about,
                "rows": [
                    {"row": row.label, "recipe": row.recipe().name, "set": list(row.changes)}
                    for row in table.rows
                ],
                "columns": list(table.columns),
            }
            for table in tables.tables().values()
            if name in (None, table.name)
        ],
    }
