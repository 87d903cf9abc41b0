"""Regions: box pooling compared with a slow reference, geometry, precomputed features."""

import math
from dataclasses import replace

import pytest
import torch

from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.nn.vlbert.regions import (
    FREQUENCIES,
    PooledRegionEncoder,
    PrecomputedRegionEncoder,
    normalize_boxes,
    pool_boxes,
    region_encoder_from_config,
    sinusoidal_boxes,
)
from tests.nn.vlbert.scenes import batch, region_encoder


def slow_mean(features, box, size):
    """Average over `size` x `size` points of the box, each in the cell that contains it."""
    d, rows, columns = features.shape
    x0, y0, x1, y1 = box
    total, count = torch.zeros(d), 0
    for i in range(size):
        for j in range(size):
            y, x = y0 + (i + 0.5) / size * (y1 - y0), x0 + (j + 0.5) / size * (x1 - x0)
            total += features[:, int(y * rows), int(x * columns)]
            count += 1
    return total / count


def test_pool_boxes_agrees_with_dense_sampling():
    maps = torch.randn(2, 3, 4, 8)
    boxes = torch.tensor([[[0.0, 0, 16, 8], [2, 3, 9, 7]], [[1, 1, 15, 5], [4, 2, 12, 6]]])
    found = pool_boxes(maps, boxes, PixelGeometry.identity(2, (8, 16)))
    for row in range(2):
        for at in range(2):
            share = (boxes[row, at] / torch.tensor([16.0, 8, 16, 8])).tolist()
            torch.testing.assert_close(
                found[row, at], slow_mean(maps[row], share, 64), atol=0.03, rtol=0
            )
    torch.testing.assert_close(found[0, 0], maps[0].mean(dim=(1, 2)))


def test_box_of_one_cell_is_that_cell_and_empty_box_is_the_image_mean():
    maps = torch.arange(8.0).view(1, 1, 2, 4)
    boxes = torch.tensor([[[2.0, 1, 3, 2], [1, 1, 1, 1]]])
    found = pool_boxes(maps, boxes, PixelGeometry.identity(1, (2, 4)))
    assert found[0, :, 0].tolist() == [6.0, 3.5]


def test_normalized_boxes_follow_resizes_crops_and_flips():
    geometry = PixelGeometry.identity(1, (10, 20)).resize((20, 40)).crop(0, 10, 20, 20)
    boxes = torch.tensor([[[5.0, 0, 10, 5], [0, 0, 20, 10]]])
    assert normalize_boxes(boxes, geometry)[0].tolist() == [[0, 0, 0.5, 0.5], [0, 0, 1, 1]]
    flipped = normalize_boxes(boxes, geometry.flip())[0]
    assert flipped.tolist() == [[0.5, 0, 1, 0.5], [0, 0, 1, 1]]


def test_sinusoidal_boxes_by_hand():
    found = sinusoidal_boxes(torch.tensor([0.25, 0.0, 0.5, 1.0]))
    assert found.shape == (8 * FREQUENCIES,)
    angles = [25.0 / 1000 ** (step / FREQUENCIES) for step in range(FREQUENCIES)]
    assert found[:FREQUENCIES].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-4)
    assert found[FREQUENCIES : 2 * FREQUENCIES].tolist() == pytest.approx(
        [math.cos(a) for a in angles], abs=1e-4
    )
    assert (
        found[2 * FREQUENCIES : 4 * FREQUENCIES].tolist()
        == [0.0] * FREQUENCIES + [1.0] * FREQUENCIES
    )


def test_pooled_and_precomputed_regions_have_one_interface():
    given = batch()
    features = torch.randn(4, 10, 5)
    given = replace(given, features=features)
    for look, size in ((region_encoder(), 6), (PrecomputedRegionEncoder(5), 5)):
        found = look(given)
        assert found.values.shape == (4, 10, size + 8 * FREQUENCIES) == (4, 10, look.width)
        assert found.whole.shape == (4, look.width)
        assert torch.equal(found.present, given.region_mask)
        torch.testing.assert_close(
            found.values[..., size:],
            sinusoidal_boxes(normalize_boxes(given.boxes, given.sample_geometry)),
        )
    there = given.region_mask[1]
    torch.testing.assert_close(found.whole[1, :5], features[1][there].mean(dim=0))


def test_shared_image_is_encoded_once():
    given = batch(2)
    look = region_encoder().eval()
    alone = look(given)
    shared = replace(
        given.select(torch.tensor([0, 0])), boxes=given.boxes[[0, 0]], image_of=torch.tensor([0, 0])
    )
    assert len(shared.images) == 1
    torch.testing.assert_close(look(shared).values[1], alone.values[0])


def test_region_encoders_are_rebuilt_from_their_config():
    for look in (region_encoder(), PrecomputedRegionEncoder(7)):
        again = region_encoder_from_config(look.config())
        assert type(again) is type(look) and again.config() == look.config()
    with pytest.raises(UserError, match="pooled or given"):
        region_encoder_from_config({"kind": "third"})


def test_missing_batch_fields_raise():
    given = batch(2)
    with pytest.raises(ValueError, match="images"):
        PooledRegionEncoder([4], [2])(replace(given, images=None))
    with pytest.raises(ValueError, match="boxes"):
        region_encoder()(replace(given, boxes=None))
    with pytest.raises(ValueError, match="features"):
        PrecomputedRegionEncoder(4)(given)
    with pytest.raises(ValueError, match=r"3 features.* 4"):
        PrecomputedRegionEncoder(4)(replace(given, features=torch.zeros(2, 10, 3)))
    every = replace(given, region_mask=None)
    assert region_encoder()(every).present.all()
