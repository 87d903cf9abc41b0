"""Regions: the mean under a box by a slow copy, flips and crops, and features computed before."""

import math
from dataclasses import replace

import pytest
import torch

from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.models.vlbert.regions import (
    WAVES,
    GivenRegions,
    PooledRegions,
    box_means,
    on_canvas,
    region_eye_from,
    waves,
)
from tests.models.vlbert.scenes import batch, eye


def slow_mean(features, box, size):
    """Each of `size` x `size` tiny squares of the box votes for the cell it lies in."""
    d, rows, columns = features.shape
    x0, y0, x1, y1 = box
    total, count = torch.zeros(d), 0
    for i in range(size):
        for j in range(size):
            y, x = y0 + (i + 0.5) / size * (y1 - y0), x0 + (j + 0.5) / size * (x1 - x0)
            total += features[:, int(y * rows), int(x * columns)]
            count += 1
    return total / count


def test_the_mean_under_a_box_agrees_with_many_votes():
    maps = torch.randn(2, 3, 4, 8)
    boxes = torch.tensor([[[0.0, 0, 16, 8], [2, 3, 9, 7]], [[1, 1, 15, 5], [4, 2, 12, 6]]])
    found = box_means(maps, boxes, PixelGeometry.identity(2, (8, 16)))
    for row in range(2):
        for at in range(2):
            share = (boxes[row, at] / torch.tensor([16.0, 8, 16, 8])).tolist()
            torch.testing.assert_close(
                found[row, at], slow_mean(maps[row], share, 64), atol=0.03, rtol=0
            )
    torch.testing.assert_close(found[0, 0], maps[0].mean(dim=(1, 2)))


def test_one_cell_is_that_cell_and_a_box_of_nothing_is_the_whole():
    maps = torch.arange(8.0).view(1, 1, 2, 4)
    boxes = torch.tensor([[[2.0, 1, 3, 2], [1, 1, 1, 1]]])
    found = box_means(maps, boxes, PixelGeometry.identity(1, (2, 4)))
    assert found[0, :, 0].tolist() == [6.0, 3.5]


def test_boxes_follow_resizes_crops_and_flips():
    geometry = PixelGeometry.identity(1, (10, 20)).resize((20, 40)).crop(0, 10, 20, 20)
    boxes = torch.tensor([[[5.0, 0, 10, 5], [0, 0, 20, 10]]])
    assert on_canvas(boxes, geometry)[0].tolist() == [[0, 0, 0.5, 0.5], [0, 0, 1, 1]]
    flipped = on_canvas(boxes, geometry.flip())[0]
    assert flipped.tolist() == [[0.5, 0, 1, 0.5], [0, 0, 1, 1]]


def test_waves_by_hand():
    found = waves(torch.tensor([0.25, 0.0, 0.5, 1.0]))
    assert found.shape == (8 * WAVES,)
    angles = [25.0 / 1000 ** (step / WAVES) for step in range(WAVES)]
    assert found[:WAVES].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-4)
    assert found[WAVES : 2 * WAVES].tolist() == pytest.approx(
        [math.cos(a) for a in angles], abs=1e-4
    )
    assert found[2 * WAVES : 4 * WAVES].tolist() == [0.0] * WAVES + [1.0] * WAVES


def test_regions_of_images_and_of_features_have_one_face():
    given = batch()
    features = torch.randn(4, 10, 5)
    given = replace(given, features=features)
    for look, size in ((eye(), 6), (GivenRegions(5), 5)):
        found = look(given)
        assert found.values.shape == (4, 10, size + 8 * WAVES) == (4, 10, look.width)
        assert found.whole.shape == (4, look.width)
        assert torch.equal(found.present, given.region_mask)
        torch.testing.assert_close(
            found.values[..., size:], waves(on_canvas(given.boxes, given.sample_geometry))
        )
    there = given.region_mask[1]
    torch.testing.assert_close(found.whole[1, :5], features[1][there].mean(dim=0))


def test_an_image_that_samples_share_is_seen_once():
    given = batch(2)
    look = eye().eval()
    alone = look(given)
    shared = replace(
        given.select(torch.tensor([0, 0])), boxes=given.boxes[[0, 0]], image_of=torch.tensor([0, 0])
    )
    assert len(shared.images) == 1
    torch.testing.assert_close(look(shared).values[1], alone.values[0])


def test_eyes_come_back_from_their_values():
    for look in (eye(), GivenRegions(7)):
        again = region_eye_from(look.config())
        assert type(again) is type(look) and again.config() == look.config()
    with pytest.raises(BadInput, match="pooled, given"):
        region_eye_from({"kind": "third"})


def test_what_is_missing_is_told():
    given = batch(2)
    with pytest.raises(ValueError, match="cut out of images"):
        PooledRegions([4], [2])(replace(given, images=None))
    with pytest.raises(ValueError, match="boxes and the geometry"):
        eye()(replace(given, boxes=None))
    with pytest.raises(ValueError, match="the batch has none"):
        GivenRegions(4)(given)
    with pytest.raises(ValueError, match="features of 3 numbers for a model of 4"):
        GivenRegions(4)(replace(given, features=torch.zeros(2, 10, 3)))
    every = replace(given, region_mask=None)
    assert eye()(every).present.all()
