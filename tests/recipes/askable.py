"""A finished run, asked about a picture that it has never seen, as a person would."""

from pathlib import Path

import numpy as np

from overt.recipes.asking import Given
from overt.recipes.looking import Viewed, locate, open_model, view
from overt.recipes.own import maps_for
from overt.recipes.seeing import Wish

PHOTO = np.random.default_rng(5).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def ask(run: Path, text: str | None) -> Viewed:
    """Its own map; every other map that it has is made as well, and half of the picture removed."""
    subject = open_model(locate(str(run)), run.name)
    assert subject.spoken is not None
    for way in maps_for(subject.spoken):
        assert view(subject, Given(text, PHOTO), Wish(way=way)).panels, way
    half = view(subject, Given(text, PHOTO, without=((0.0, 0.0, 1.0, 0.5),)))
    whole = view(subject, Given(text, PHOTO))
    assert not half.panels[0].attention.weights.equal(whole.panels[0].attention.weights)
    return whole
