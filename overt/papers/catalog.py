"""Recipes, tables and networks of the five papers, by name. Imports nothing heavy."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.experiments import (
    baseline_recipes,
    scenes_recipes,
    settings,
    vision_language_recipes,
)
from overt.experiments.recipe import Recipe, RunContext
from overt.experiments.recipe_file import RecipeFile, is_recipe_file, load_recipe_file
from overt.experiments.table import RowSpec, TableSpec

if TYPE_CHECKING:
    from overt.experiments.experiment import Experiment

HOLD_OUT_RELATIONS = ("data.held_out=relate",)


def recipes() -> dict[str, Callable[[], Recipe]]:
    """Return every recipe by name, in listing order."""
    from overt.papers.a2 import config as a2
    from overt.papers.han import config as han
    from overt.papers.ltpa import config as ltpa
    from overt.papers.ssa import config as ssa
    from overt.papers.vgp import config as vgp

    packages = (
        *(scenes_recipes, baseline_recipes, vision_language_recipes),
        *(ltpa, ssa, han, vgp, a2),
    )
    every: list[Callable[[], Recipe]] = [make for one in packages for make in one.RECIPES]
    return {make().name: make for make in every}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name."""
    known = recipes()
    if name not in known:
        raise UserError(f"unknown recipe {name[:60]!r}; {settings.suggest_names(name, known)}")
    return known[name]()


def resolve_recipe(word: str) -> tuple[Recipe, RecipeFile | None]:
    """Return the recipe of a command line: by name, or FILE.py:NAME, with its file."""
    if not is_recipe_file(word):
        return find_recipe(word), None
    file = load_recipe_file(word, recipes())
    return file.recipe, file


def resolve_table(word: str) -> tuple[TableSpec, RecipeFile | None]:
    """Return the table of a command line: by name, or FILE.py:NAME, with its file."""
    if not is_recipe_file(word):
        return find_table(word), None
    file = load_recipe_file(word, recipes())
    return file.table, file


def load_recipe_files(words: Iterable[str]) -> tuple[RecipeFile, ...]:
    """Load the files of the option --recipe, FILE.py:NAME each."""
    for word in words:
        if not is_recipe_file(word):
            raise UserError(f"--recipe needs a Python file and a name, FILE.py:NAME, got {word!r}.")
    return tuple(load_recipe_file(word, recipes()) for word in words)


def listing(name: str | None = None) -> dict[str, Any]:
    """Return all recipes and tables, or those of one name, as JSON values."""
    found = [make() for make in recipes().values()]
    return {
        "recipes": [describe_recipe(recipe) for recipe in found if name in (None, recipe.name)],
        "tables": [
            describe_table(table) for table in tables().values() if name in (None, table.name)
        ],
    }


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe with its settings as JSON values."""
    return {
        "name": recipe.name,
        "about": recipe.about,
        "paper": {key: asdict(figure) for key, figure in recipe.paper.items()},
        "settings": settings.to_json(recipe),
        "takes": {one.key: one.accepts for one in settings.describe(recipe)},
    }


def describe_table(table: TableSpec) -> dict[str, Any]:
    """Return a table with its rows as JSON values."""
    return {
        "name": table.name,
        "about": table.about,
        "rows": [
            {"row": row.label, "recipe": row.recipe().name, "set": list(row.changes)}
            for row in table.rows
        ],
        "columns": list(table.columns),
    }


def tables() -> dict[str, TableSpec]:
    """Return every table by name."""
    from overt.papers.a2 import tables as a2_tables
    from overt.papers.han import tables as han_tables
    from overt.papers.ltpa import tables as ltpa_tables
    from overt.papers.ssa import tables as ssa_tables
    from overt.papers.vgp import tables as vgp_tables

    attention = ("accuracy", "pointing", "mass_inside", "rank_correlation", "deletion")
    every = (
        TableSpec(
            "scenes",
            "Questions about scenes: no attention, soft attention, supervised attention.",
            (
                RowSpec("question-only", scenes_recipes.scenes_question),
                RowSpec("no-attention", scenes_recipes.scenes_none),
                RowSpec("soft-attention", scenes_recipes.scenes_soft),
                RowSpec("truth-supervised", scenes_recipes.scenes_truth),
                RowSpec("soft-held-out", scenes_recipes.scenes_soft, HOLD_OUT_RELATIONS),
                RowSpec("truth-held-out", scenes_recipes.scenes_truth, HOLD_OUT_RELATIONS),
            ),
            (*attention, "accuracy_held_out", "mass_inside_held_out"),
        ),
        TableSpec(
            "baselines",
            "Plain models on datasets from disk, compared with the papers' baselines.",
            (
                RowSpec("cifar10", baseline_recipes.cifar10_cnn),
                RowSpec("cifar100", baseline_recipes.cifar100_cnn),
                RowSpec("trec", baseline_recipes.trec_attention),
                RowSpec("easyvqa", baseline_recipes.easyvqa_soft),
            ),
            ("accuracy", "deletion", "entropy"),
        ),
        *_vision_language_tables(),
        *ltpa_tables.tables(),
        *ssa_tables.tables(),
        *han_tables.tables(),
        *vgp_tables.tables(),
        *a2_tables.tables(),
    )
    return {table.name: table for table in every}


def _vision_language_tables() -> tuple[TableSpec, ...]:
    """Return the tables of the small vision-language model."""
    make = vision_language_recipes.scenes_vlm

    def pruned(rule: str, *changes: str) -> RowSpec:
        before = "-before" if "prune.layer=0" in changes else ""
        return RowSpec(f"{rule}{before}", make, (f"prune.rule={rule}", *changes))

    inside = ("last-query", "pyramid", "adaptive", "merge", "random", "grid", "centre")
    before = ("merge", "random", "grid", "centre")
    return (
        TableSpec(
            "vlm-pruning",
            "A small vision-language model with a quarter of its image tokens: rules and controls, "
            "inside the decoder and before it.",
            (
                RowSpec("all-tokens", make),
                *(pruned(rule) for rule in inside),
                *(pruned(rule) for rule in ("image-encoder", "zip")),
                *(pruned(rule, "prune.layer=0") for rule in before),
            ),
            ("accuracy", "evidence_kept", "image_tokens", "prefill", "decode", "cache"),
        ),
        TableSpec(
            "vlm-boxes",
            "A small vision-language model whose attention is supervised by the evidence, and by "
            "that of another scene.",
            (
                RowSpec("unsupervised", make),
                RowSpec("boxes", make, ("supervise.target=truth",)),
                RowSpec("placebo", make, ("supervise.target=swapped",)),
            ),
            (
                *("accuracy", "pointing", "mass_inside", "deletion"),
                *("wrong_by_signals", "wrong_by_length", "wrong_by_both", "wrong_by_confidence"),
            ),
        ),
    )


def find_table(name: str) -> TableSpec:
    """Return the table of this name."""
    known = tables()
    if name not in known:
        raise UserError(f"unknown table {name[:60]!r}; {settings.suggest_names(name, known)}")
    return known[name]


def networks() -> dict[str, Any]:
    """Return the networks that `overt look` and `overt serve` load, by saved class name."""
    from overt import nn
    from overt.nn.vqa.vision_language import VisionLanguageVQA
    from overt.papers.a2.model import AlignedCaptioner
    from overt.papers.han.networks import HAN
    from overt.papers.ltpa.resnet import ResNet, ResNetAttention
    from overt.papers.ltpa.vgg import VGG, VGGAttention, VGGGap, VGGProgressive

    known = (
        *(nn.VQA, nn.ShowAskAttend, nn.StackedAttention, HAN, nn.SmallCNN, nn.AttentiveCNN),
        *(nn.TextClassifier, nn.StructuredClassifier),
        *(VGG, VGGGap, VGGAttention, VGGProgressive, ResNet, ResNetAttention),
        *(nn.VLBert, nn.Captioner, AlignedCaptioner, VisionLanguageVQA),
    )
    return {kind.__name__: kind for kind in known}


def build(recipe: Recipe, context: RunContext) -> "Experiment":
    """Return the data, the model and the stages of a recipe.

    This is the one place where plain values become code; a recipe of the user has its own `build`.

    Args:
        recipe: The recipe.
        context: Output folder, seed, device and data folder.

    Returns:
        The experiment.

    Raises:
        UserError: The data are missing, or a setting is invalid.

    Example:
        >>> from pathlib import Path
        >>> from overt.experiments.settings import apply
        >>> changes = ["data.limit=8", "model.width=0.1"]
        >>> recipe = apply(find_recipe("scenes-soft"), changes)
        >>> made = build(recipe, RunContext(Path("run"), device="cpu"))
        >>> [stage.name for stage in made.stages]
        ['train']
    """
    from overt.experiments import baselines
    from overt.papers.a2 import config as a2
    from overt.papers.han import config as han
    from overt.papers.ltpa import config as ltpa
    from overt.papers.ssa import config as ssa
    from overt.papers.vgp import config as vgp

    match recipe:
        case scenes_recipes.ScenesRecipe():
            return baselines.build_scenes(recipe, context)
        case baseline_recipes.BaselineRecipe():
            return baselines.build_baseline(recipe, context)
        case vision_language_recipes.VisionLanguageRecipe():
            from overt.experiments import vision_language

            return vision_language.build_vision_language(recipe, context)
        # The training code of a paper is imported for its own recipes only.
        case ltpa.LtpaRecipe():
            from overt.papers.ltpa import train as ltpa_train

            return ltpa_train.build(recipe, context)
        case ssa.SsaRecipe():
            from overt.papers.ssa import train as ssa_train

            return ssa_train.build(recipe, context)
        case han.HanRecipe():
            from overt.papers.han import train as han_train

            return han_train.build(recipe, context)
        case vgp.VgpRecipe():
            from overt.papers.vgp import train as vgp_train

            return vgp_train.build(recipe, context)
        case a2.A2Recipe():
            from overt.papers.a2 import train as a2_train

            return a2_train.build(recipe, context)
    if callable(own := getattr(recipe, "build", None)):  # of a file of the user
        found: Experiment = own(context)
        return found
    raise TypeError(f"{recipe.name} is not a recipe of this package: pass your own build function")
