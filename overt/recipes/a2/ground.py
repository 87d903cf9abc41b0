"""Where the self-critical stage begins: at the captioner of a finished run beside this one.

A run in the folder of a table, OUT/<row>/seed-<n>, whose row differs from another only by its
critic has the same first stage, to the bit. It takes that captioner, once its files are checked,
and writes in `ground.json` whose it was; alone, or before the other has ended, it trains its own.
"""

from pathlib import Path

from torch import nn

from overt import files
from overt.errors import Damaged
from overt.recipes import folder, settings
from overt.recipes.a2.recipe import A2Recipe
from overt.recipes.recipe import Context

GROUND, FIRST = "ground.json", "first"
WEIGHTS = "model.safetensors"


def ground_of(recipe: A2Recipe, context: Context) -> Path | None:
    """The `model/` this run begins with: what it began with before, or what is beside it by now."""
    if not recipe.critic.epochs:
        return None
    written = context.out / GROUND
    if written.is_file():
        said = files.read_json(written).get(FIRST)
        found = None if said is None else Path(said)
    else:
        found = _beside(recipe, context)
        files.write_json(written, {FIRST: None if found is None else str(found)})
    if found is not None and not found.is_dir():
        raise Damaged(f"{context.out} began with {found}, which is gone; run it again.")
    return found


def _beside(recipe: A2Recipe, context: Context) -> Path | None:
    """The captioner of a finished run of the same seed that differs by its critic alone."""
    if context.out.name != f"seed-{context.seed}":
        return None
    ours = settings.to_json(recipe)
    for place in sorted(context.out.parent.parent.glob(f"*/{context.out.name}")):
        held = None if place == context.out else folder.look(place)
        if held is None or not held.done or held.results["recipe"] != recipe.name:
            continue
        theirs = held.results["settings"]
        shared = [key for key in {*ours, *theirs} if not key.startswith("critic.")]
        same = all(key in ours and key in theirs and ours[key] == theirs[key] for key in shared)
        if same and theirs["critic.epochs"] == 0 and held.results["seed"] == context.seed:
            files.verify(place)
            return place / "model"
    return None


def take(model: nn.Module, place: Path) -> None:
    """Give a captioner the weights of the one it begins with."""
    files.verify(place)
    device = next(model.parameters()).device
    weights = files.read_tensors(place / WEIGHTS)
    model.load_state_dict({name: one.to(device) for name, one in weights.items()})
