from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.models.answering.eyes import (
    CachedEye,
    Eye,
    NormedEye,
    PlacedEye,
    StridedEye,
    TrainedEye,
    eye_from,
    norm_a_cell,
    norm_an_image,
)
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


@pytest.fixture
def cells(generator):
    return torch.randn(4, 6, 5, generator=generator)


def test_a_cell_or_an_image_is_divided_by_its_norm(cells):
    torch.testing.assert_close(norm_a_cell(cells).norm(dim=-1), torch.ones(4, 6))
    whole = norm_an_image(cells)
    torch.testing.assert_close(whole.flatten(1).norm(dim=-1), torch.ones(4))
    # one number an image: cells keep their size beside each other
    ratio = whole / cells
    torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))
    for norm in (norm_a_cell, norm_an_image):
        assert norm(torch.zeros(1, 2, 3)).isfinite().all()


def test_a_normed_eye_divides_what_another_sees(cells):
    batch = replace(toy_batch(), features=cells)
    for norm in (norm_a_cell, norm_an_image):
        found = NormedEye(CachedEye(5, (2, 3)), norm)(batch)
        assert found.values.equal(norm(cells))
        assert found.layout.find("image").shape == (2, 3)


def test_the_small_network_has_the_layers_of_the_paper():
    layers = [one for one in StridedEye().modules() if isinstance(one, nn.Conv2d)]
    assert [(one.out_channels, one.kernel_size[0], one.stride[0]) for one in layers] == [
        (64, 7, 2), (256, 3, 2), (256, 3, 2), (512, 3, 2), (512, 3, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("side", "count"), [(32, 1), (96, 3), (320, 10)])
def test_a_cell_of_the_small_network_is_32_pixels(side, count):
    batch = replace(
        toy_batch(),
        images=torch.zeros(3, 3, side, side),
        geometry=PixelGeometry.identity(3, (side, side)),
    )
    found = StridedEye(wide=0.02).eval()(batch)
    assert found.layout.find("image").shape == (count, count)
    assert found.values.shape == (4, count * count, 10)


def test_bytes_and_their_numbers_look_the_same():
    batch, eye = toy_batch(), StridedEye(wide=0.02).eval()
    plain = replace(batch, images=(batch.images.float() - 110) / 70)
    torch.testing.assert_close(eye(batch).values, eye(plain).values)
    assert eye(batch).values[2].equal(eye(batch).values[3])  # they share an image
    with pytest.raises(ValueError, match="needs a batch with images"):
        eye(replace(batch, images=None, geometry=None, image_of=None))


@pytest.mark.parametrize(
    "eye",
    [
        NormedEye(CachedEye(7, (2, 3)), norm_an_image),
        PlacedEye(NormedEye(StridedEye(0.05))),
        StridedEye(0.05),
    ],
)
def test_an_eye_of_the_paper_comes_back_from_its_values(eye):
    assert isinstance(eye, Eye)
    again = eye_from(eye.config())
    assert again.config() == eye.config()
    assert again.width == eye.width


def test_what_cannot_be_saved_is_refused():
    with pytest.raises(BadInput, match="use overt's norms"):
        NormedEye(CachedEye(), lambda cells: cells).config()
