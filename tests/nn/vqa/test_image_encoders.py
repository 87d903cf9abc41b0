"""Image encoders: cached features, CNNs, coordinates, normalisation, configs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.nn.vqa.image_encoders import (
    CachedImageEncoder,
    CNNEncoder,
    CoordinateEncoder,
    ImageEncoder,
    NormalizedEncoder,
    StridedCNNEncoder,
    image_encoder_from_config,
    normalize_cells,
    normalize_image,
)
from overt.testing import toy_batch


def cached_batch(cells: int = 6, width: int = 5):
    return replace(toy_batch(), features=torch.randn(4, cells, width))


def test_cached_features_are_used_unchanged():
    batch = cached_batch()
    cells = CachedImageEncoder(5, (2, 3))(batch)
    assert cells.values is batch.features
    span = cells.layout.find("image")
    assert span.shape == (2, 3) and len(span.geometry) == 4


def test_missing_or_mismatched_cached_features_raise():
    with pytest.raises(ValueError, match="cached features"):
        CachedImageEncoder()(toy_batch())
    with pytest.raises(ValueError, match=r"6 cells.*5 .*2 x 2"):
        CachedImageEncoder(5, (2, 2))(cached_batch())


def test_cnn_encoder_encodes_a_shared_image_once():
    eye, batch = CNNEncoder([4, 6], [2, 2]).eval(), toy_batch(5)
    seen = []
    eye.backbone.register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    cells = eye(batch)
    assert seen == [4] and cells.values.shape == (5, 64, 6) and eye.width == 6


def test_coordinate_encoder_appends_cell_coordinates():
    batch = cached_batch(4)
    eye = CoordinateEncoder(CachedImageEncoder(5, (2, 2)))
    cells = eye(batch).values
    assert eye.width == 7 and torch.equal(cells[..., :5], batch.features)
    assert cells[1, :, 5:].tolist() == [[-1, -1], [-1, 1], [1, -1], [1, 1]]


def test_image_encoders_are_rebuilt_and_an_unknown_kind_raises():
    for eye in (
        CachedImageEncoder(5, (2, 3)),
        CNNEncoder([4], [2]),
        CoordinateEncoder(CNNEncoder([4], [2])),
    ):
        assert image_encoder_from_config(eye.config()).config() == eye.config()
        assert image_encoder_from_config(eye.config()).width == eye.width
    with pytest.raises(UserError, match=r"'third'.*cached.*placed"):
        image_encoder_from_config({"kind": "third"})


@pytest.fixture
def cells(generator):
    return torch.randn(4, 6, 5, generator=generator)


def test_normalize_cells_and_normalize_image_divide_by_the_norm(cells):
    torch.testing.assert_close(normalize_cells(cells).norm(dim=-1), torch.ones(4, 6))
    whole = normalize_image(cells)
    torch.testing.assert_close(whole.flatten(1).norm(dim=-1), torch.ones(4))
    # one norm per image: cells keep their relative size
    ratio = whole / cells
    torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))
    for norm in (normalize_cells, normalize_image):
        assert norm(torch.zeros(1, 2, 3)).isfinite().all()


def test_normalized_encoder_normalizes_the_inner_cells(cells):
    batch = replace(toy_batch(), features=cells)
    for norm in (normalize_cells, normalize_image):
        found = NormalizedEncoder(CachedImageEncoder(5, (2, 3)), norm)(batch)
        assert found.values.equal(norm(cells))
        assert found.layout.find("image").shape == (2, 3)


def test_strided_cnn_has_the_layers_of_the_paper():
    layers = [one for one in StridedCNNEncoder().modules() if isinstance(one, nn.Conv2d)]
    assert [(one.out_channels, one.kernel_size[0], one.stride[0]) for one in layers] == [
        (64, 7, 2), (256, 3, 2), (256, 3, 2), (512, 3, 2), (512, 3, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("side", "count"), [(32, 1), (96, 3), (320, 10)])
def test_strided_cnn_cells_have_a_stride_of_32_pixels(side, count):
    batch = replace(
        toy_batch(),
        images=torch.zeros(3, 3, side, side),
        geometry=PixelGeometry.identity(3, (side, side)),
    )
    found = StridedCNNEncoder(wide=0.02).eval()(batch)
    assert found.layout.find("image").shape == (count, count)
    assert found.values.shape == (4, count * count, 10)


def test_uint8_and_normalized_images_give_equal_cells():
    batch, eye = toy_batch(), StridedCNNEncoder(wide=0.02).eval()
    plain = replace(batch, images=(batch.images.float() - 110) / 70)
    torch.testing.assert_close(eye(batch).values, eye(plain).values)
    assert eye(batch).values[2].equal(eye(batch).values[3])  # they share an image
    with pytest.raises(ValueError, match="images"):
        eye(replace(batch, images=None, geometry=None, image_of=None))


@pytest.mark.parametrize(
    "eye",
    [
        NormalizedEncoder(CachedImageEncoder(7, (2, 3)), normalize_image),
        CoordinateEncoder(NormalizedEncoder(StridedCNNEncoder(0.05))),
        StridedCNNEncoder(0.05),
    ],
)
def test_image_encoders_of_the_paper_are_rebuilt_from_their_config(eye):
    assert isinstance(eye, ImageEncoder)
    again = image_encoder_from_config(eye.config())
    assert again.config() == eye.config()
    assert again.width == eye.width


def test_saving_a_custom_norm_raises():
    with pytest.raises(UserError, match="custom norm"):
        NormalizedEncoder(CachedImageEncoder(), lambda cells: cells).config()
