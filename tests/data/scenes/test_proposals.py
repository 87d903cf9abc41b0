import numpy as np
import pytest
import torch

from overt.data.scenes.proposals import (
    COUNT,
    MAX_BACKGROUND_IOU,
    PERTURBED_IOU,
    ProposalSource,
    all_proposals,
    box_iou,
    make_proposals,
    only_detected,
    only_true,
)
from overt.data.scenes.render import render
from overt.data.scenes.world import random_scene
from overt.errors import UserError
from overt.geometry import RegionGeometry


def slow_iou(a, b):
    """Intersection over union by counting pixels."""
    one, other = np.zeros((2, 20, 20), bool)
    one[int(a[1]) : int(a[3]), int(a[0]) : int(a[2])] = True
    other[int(b[1]) : int(b[3]), int(b[0]) : int(b[2])] = True
    either = (one | other).sum()
    return (one & other).sum() / either if either else 0.0


def test_box_iou_agrees_with_counted_pixels():
    rng = np.random.default_rng(0)
    corners = np.sort(rng.integers(0, 20, (40, 2, 2)), axis=1)
    boxes = corners.reshape(40, 4).astype(np.float32)
    found = box_iou(boxes[:20], boxes[20:])
    for i in range(20):
        for j in range(20):
            assert found[i, j] == pytest.approx(slow_iou(boxes[i], boxes[20 + j]), abs=1e-6)
    geometry = RegionGeometry(torch.from_numpy(boxes[None, 20:]))
    torch.testing.assert_close(
        torch.from_numpy(found), geometry.overlap(torch.from_numpy(boxes[None, :20]))[0]
    )


def test_proposals_have_the_overlap_of_their_source():
    for index in range(40):
        boxes = render(random_scene("train", 0, index), 64).boxes
        found = make_proposals(boxes, 64, np.random.default_rng(index))
        assert found.boxes.shape == (COUNT, 4) and found.overlap.shape == (COUNT, len(boxes))
        np.testing.assert_allclose(found.overlap, box_iou(found.boxes, boxes))
        assert (found.boxes >= 0).all() and (found.boxes <= 64).all()
        assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
        for thing in range(len(boxes)):
            np.testing.assert_array_equal(found.boxes[found.true_box(thing)], boxes[thing])
        for row, source in enumerate(found.sources):
            best, thing = found.overlap[row].max(), found.things[row]
            if source is ProposalSource.TRUE:
                assert found.overlap[row, thing] == 1
            elif source is ProposalSource.OFF:
                assert (
                    PERTURBED_IOU[0] - 1e-3 <= found.overlap[row, thing] <= PERTURBED_IOU[1] + 1e-3
                )
            else:
                assert thing == -1 and best < MAX_BACKGROUND_IOU + 0.1
        counts = [found.sources.count(source) for source in ProposalSource]
        assert counts[0] == len(boxes) and counts[1] >= (COUNT - len(boxes)) // 2 - 4
        assert counts[2] >= 1


def test_position_of_the_true_box_is_uniform():
    boxes = render(random_scene("train", 0, 0), 64).boxes
    positions = [
        make_proposals(boxes, 64, np.random.default_rng(n)).true_box(0) for n in range(160)
    ]
    assert set(positions) == set(range(COUNT))
    assert np.bincount(positions).max() < 30


def test_same_rng_gives_the_same_proposals():
    boxes = render(random_scene("train", 0, 0), 64).boxes
    one, other = (make_proposals(boxes, 64, np.random.default_rng(3), 20) for _ in range(2))
    np.testing.assert_array_equal(one.boxes, other.boxes)
    assert one.sources == other.sources


def test_too_few_regions_for_the_true_boxes_raise():
    boxes = render(random_scene("train", 0, 0), 64).boxes
    assert len(make_proposals(boxes, 64, np.random.default_rng(0), len(boxes)).boxes) == len(boxes)
    with pytest.raises(UserError, match=r"at least 6.* 5"):
        make_proposals(boxes, 64, np.random.default_rng(0), len(boxes) - 1)


def test_proposal_filters_select_by_source():
    found = make_proposals(
        render(random_scene("train", 0, 3), 64).boxes, 64, np.random.default_rng(0)
    )
    true = [source is ProposalSource.TRUE for source in found.sources]
    assert all_proposals(found).all() and all_proposals(found).shape == (COUNT,)
    assert only_true(found).tolist() == true and only_detected(found).tolist() == [
        not one for one in true
    ]
