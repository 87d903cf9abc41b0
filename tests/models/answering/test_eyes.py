from dataclasses import replace

import pytest
import torch

from overt.errors import BadInput
from overt.models.answering.eyes import CachedEye, PlacedEye, TrainedEye, eye_from
from overt.testing import toy_batch


def cached(cells: int = 6, width: int = 5):
    return replace(toy_batch(), features=torch.randn(4, cells, width))


def test_cached_features_are_taken_as_they_are():
    batch = cached()
    cells = CachedEye(5, (2, 3))(batch)
    assert cells.values is batch.features
    span = cells.layout.find("image")
    assert span.shape == (2, 3) and len(span.geometry) == 4


def test_features_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="and the batch has none"):
        CachedEye()(toy_batch())
    with pytest.raises(ValueError, match="6 cells with 5 numbers each, for a model of 2 x 2"):
        CachedEye(5, (2, 2))(cached())


def test_a_trained_eye_sees_a_shared_image_once():
    eye, batch = TrainedEye([4, 6], [2, 2]).eval(), toy_batch(5)
    seen = []
    eye.backbone.register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    cells = eye(batch)
    assert seen == [4] and cells.values.shape == (5, 64, 6) and eye.width == 6


def test_a_placed_eye_adds_where_cells_stand():
    batch = cached(4)
    eye = PlacedEye(CachedEye(5, (2, 2)))
    cells = eye(batch).values
    assert eye.width == 7 and torch.equal(cells[..., :5], batch.features)
    assert cells[1, :, 5:].tolist() == [[-1, -1], [-1, 1], [1, -1], [1, 1]]


def test_an_eye_comes_back_from_its_values_and_an_unknown_one_is_refused():
    for eye in (CachedEye(5, (2, 3)), TrainedEye([4], [2]), PlacedEye(TrainedEye([4], [2]))):
        assert eye_from(eye.config()).config() == eye.config()
        assert eye_from(eye.config()).width == eye.width
    with pytest.raises(BadInput, match="kind 'third' is not one of cached, trained, placed"):
        eye_from({"kind": "third"})
