"""A loaded model with its processors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.experiments.inference_spec import InferenceSpec


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and the processors that turn images and text into its inputs.

    `processor` takes both images and text, if the folder has one. `transform` is the image
    transform of a timm model. `spec` is the inference specification of a network of overt. `notes`
    are remarks for the reader of any result.
    """

    name: str
    model: Any
    processor: Any = None
    tokenizer: Any = None
    image_processor: Any = None
    transform: Callable[[Any], Any] | None = None
    notes: tuple[str, ...] = ()
    spec: InferenceSpec | None = None


def run_notes(folder: Path) -> tuple[str, ...]:
    """Return the recipe and description of the run that a model folder is part of, as a note."""
    results = folder.parent / "results.json"
    about = io.read_json(results) if folder.name == "model" and results.is_file() else None
    if not isinstance(about, dict):
        return ()
    return (f"From a run of {about.get('recipe')}: {about.get('about')}.",)
