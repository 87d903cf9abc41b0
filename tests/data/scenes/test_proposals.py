import numpy as np
import pytest
import torch

from overt.data.scenes.proposals import (
    COUNT,
    NOTHING,
    OFF,
    Source,
    every,
    only_detected,
    only_true,
    overlaps,
    propose,
)
from overt.data.scenes.render import render
from overt.data.scenes.world import scene
from overt.errors import BadInput
from overt.geometry import RegionGeometry


def slow_overlap(a, b):
    """Intersection over union by counting pixels."""
    ours, theirs = np.zeros((2, 20, 20), bool)
    ours[int(a[1]) : int(a[3]), int(a[0]) : int(a[2])] = True
    theirs[int(b[1]) : int(b[3]), int(b[0]) : int(b[2])] = True
    either = (ours | theirs).sum()
    return (ours & theirs).sum() / either if either else 0.0


def test_overlap_agrees_with_counted_pixels():
    rng = np.random.default_rng(0)
    corners = np.sort(rng.integers(0, 20, (40, 2, 2)), axis=1)
    boxes = corners.reshape(40, 4).astype(np.float32)
    found = overlaps(boxes[:20], boxes[20:])
    for i in range(20):
        for j in range(20):
            assert found[i, j] == pytest.approx(slow_overlap(boxes[i], boxes[20 + j]), abs=1e-6)
    geometry = RegionGeometry(torch.from_numpy(boxes[None, 20:]))
    torch.testing.assert_close(
        torch.from_numpy(found), geometry.overlap(torch.from_numpy(boxes[None, :20]))[0]
    )


def test_proposals_are_what_they_say():
    for index in range(40):
        boxes = render(scene("train", 0, index), 64).boxes
        found = propose(boxes, 64, np.random.default_rng(index))
        assert found.boxes.shape == (COUNT, 4) and found.overlap.shape == (COUNT, len(boxes))
        np.testing.assert_allclose(found.overlap, overlaps(found.boxes, boxes))
        assert (found.boxes >= 0).all() and (found.boxes <= 64).all()
        assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
        for thing in range(len(boxes)):
            np.testing.assert_array_equal(found.boxes[found.place(thing)], boxes[thing])
        for row, source in enumerate(found.sources):
            best, thing = found.overlap[row].max(), found.things[row]
            if source is Source.TRUE:
                assert found.overlap[row, thing] == 1
            elif source is Source.OFF:
                assert OFF[0] - 1e-3 <= found.overlap[row, thing] <= OFF[1] + 1e-3
            else:
                assert thing == -1 and best < NOTHING + 0.1
        counts = [found.sources.count(source) for source in Source]
        assert counts[0] == len(boxes) and counts[1] >= (COUNT - len(boxes)) // 2 - 4
        assert counts[2] >= 1


def test_where_a_region_stands_tells_nothing():
    boxes = render(scene("train", 0, 0), 64).boxes
    places = [propose(boxes, 64, np.random.default_rng(n)).place(0) for n in range(160)]
    assert set(places) == set(range(COUNT))
    assert np.bincount(places).max() < 30


def test_the_same_stream_gives_the_same_proposals():
    boxes = render(scene("train", 0, 0), 64).boxes
    one, other = (propose(boxes, 64, np.random.default_rng(3), 20) for _ in range(2))
    np.testing.assert_array_equal(one.boxes, other.boxes)
    assert one.sources == other.sources


def test_all_true_boxes_must_fit():
    boxes = render(scene("train", 0, 0), 64).boxes
    assert len(propose(boxes, 64, np.random.default_rng(0), len(boxes)).boxes) == len(boxes)
    with pytest.raises(BadInput, match="cannot hold"):
        propose(boxes, 64, np.random.default_rng(0), len(boxes) - 1)


def test_candidates_are_all_the_true_or_the_others():
    found = propose(render(scene("train", 0, 3), 64).boxes, 64, np.random.default_rng(0))
    true = [source is Source.TRUE for source in found.sources]
    assert every(found).all() and every(found).shape == (COUNT,)
    assert only_true(found).tolist() == true and only_detected(found).tolist() == [
        not one for one in true
    ]
