"""Finished runs, rebuilt from their recipe: the experiment with its trained weights.

Recipes of overt are found by name. The recipe of a user's own experiment comes from the Python
files that the command line names, never from the folder of the run.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from overt import io
from overt.errors import UserError
from overt.experiments import run_folder
from overt.experiments.recipe import Recipe, RunContext
from overt.experiments.recipe_file import RecipeFile, file_errors, find_recipe_of_run
from overt.inspect.loaded_model import LoadedModel
from overt.papers import catalog

if TYPE_CHECKING:
    from overt.experiments.experiment import Experiment
    from overt.experiments.inference_spec import InferenceSpec, NotInteractive


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A finished run: its recipe, its results, and its experiment with the trained weights."""

    recipe: Recipe
    results: Any
    experiment: "Experiment"

    @property
    def label(self) -> str:
        """Title and seed."""
        title = str(self.results.get("title") or self.recipe.name)
        return f"{title}, seed {self.results['seed']}"

    @property
    def model(self) -> Any:
        """The model that predicts on the test split."""
        return self.experiment.evaluated_model or self.experiment.model


def load_run(
    folder: Path, root: Path | None, device: Any, files: Collection[RecipeFile] = ()
) -> LoadedRun:
    """Build the experiment of a finished run and load its weights.

    Raises:
        UserError: The run is not finished, or no file in `files` defines its recipe.
    """
    existing = run_folder.read_run(folder)
    weights = folder / "model" / "model.safetensors"
    if existing is None or not existing.is_finished or not weights.is_file():
        raise UserError(f"{folder} is not a finished run with a model; `overt doctor` checks it.")
    io.verify(weights.parent)
    name = str(existing.results["recipe"])
    recipe = existing.restore(find_recipe_of_run(name, files, catalog.recipes()))
    path = next((one.path for one in files if name in one.recipes()), None)
    with file_errors(path):
        experiment = catalog.build(
            recipe, RunContext(folder, int(existing.results["seed"]), str(device), root)
        )
    model = experiment.model
    if hasattr(model, "load_pretrained"):  # a wrapper saves the inner model under its own names
        cast(Any, model).load_pretrained(weights.parent)
    else:
        _load_weights(model, weights)
    return LoadedRun(recipe, existing.results, experiment)


def _load_weights(model: Any, path: Path) -> None:
    try:
        model.load_state_dict(io.read_tensors(path))
    except RuntimeError as error:  # the user has changed the network since the run
        reason = str(error).strip().splitlines()[-1].strip()[:300]
        raise UserError(
            f"{path} does not fit the network of the recipe, which may have changed since the run: "
            f"{reason}"
        ) from error


def is_custom_run(folder: Path, files: Collection[RecipeFile]) -> bool:
    """Return whether a folder has a finished run of a recipe that one of the files defines."""
    existing = run_folder.read_run(folder)
    if existing is None or not existing.is_finished:
        return False
    name = existing.results["recipe"]
    return name not in catalog.recipes() and any(name in one.recipes() for one in files)


def load_custom_model(
    folder: Path, name: str, files: Collection[RecipeFile], root: Path | None = None
) -> LoadedModel:
    """Load the model of a run of a user's own recipe, for `overt look` and `overt serve`.

    It takes batches; its inputs are those of the first test sample.

    Raises:
        UserError: The model cannot be used with an image or a text given by hand.
    """
    from overt.experiments.inference_spec import InferenceSpec
    from overt.nn.backbone_attention.attached_model import AttachedAttention

    run = load_run(folder, root, "cpu", files)
    model = run.model.eval()
    note = f"From a run of {run.recipe.name}: {run.recipe.about}."
    spec = _spec_of_run(run)
    if not isinstance(spec, InferenceSpec):
        raise UserError(
            f"{folder} cannot be used interactively: {spec.reason}; `overt report {folder}` shows "
            "its samples."
        )
    if isinstance(model, AttachedAttention) and model.processor is not None:
        return LoadedModel(name, model, image_processor=model.processor, notes=(note,))
    return LoadedModel(name, model, notes=(note,), spec=spec)


def _spec_of_run(run: LoadedRun) -> "InferenceSpec | NotInteractive":
    """Return what the model of a run takes, or why it cannot be used by hand."""
    from overt.experiments.inference_spec import NotInteractive

    found, model = run.experiment.inference_spec, run.model
    if isinstance(found, NotInteractive):
        return found
    lacking = [one for one in ("encode", "decide") if not callable(getattr(model, one, None))]
    if lacking:
        return NotInteractive(f"{type(model).__name__} has no method `{lacking[0]}`")
    if found is None:
        return NotInteractive("its Experiment has no `inference_spec`, see `describe_inputs`")
    example = run.experiment.example()
    if example.images is not None and example.images.is_floating_point():
        return NotInteractive(
            "its images are floats, whose normalization is unknown: let the dataset return uint8 "
            "images, and normalize in the model"
        )
    # A full name: the class may have the name of one of overt.
    kind = type(model)
    return replace(found, network=f"{kind.__module__}.{kind.__qualname__}")
