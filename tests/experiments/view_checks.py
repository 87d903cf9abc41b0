"""Checks of the interactive view of a finished run on a new image."""

from pathlib import Path

import numpy as np

from overt.inspect.inputs import ModelInput
from overt.inspect.look import ModelView, load_model, locate_model, view_model
from overt.inspect.panels import ViewOptions
from overt.inspect.predict_answer import available_maps

PHOTO = np.random.default_rng(5).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def check_view(run: Path, text: str | None) -> ModelView:
    """Check every available map and a removed half of the image; return the view."""
    loaded = load_model(locate_model(str(run)), run.name)
    assert loaded.spec is not None
    for method in available_maps(loaded.spec):
        assert view_model(loaded, ModelInput(text, PHOTO), ViewOptions(method=method)).panels, (
            method
        )
    half = view_model(loaded, ModelInput(text, PHOTO, removed_boxes=((0.0, 0.0, 1.0, 0.5),)))
    whole = view_model(loaded, ModelInput(text, PHOTO))
    assert not half.panels[0].attention.weights.equal(whole.panels[0].attention.weights)
    return whole
