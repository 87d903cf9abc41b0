import pytest
import torch

from overt.data.dataset import Dataset
from overt.data.human_attention import load_ground_truth
from overt.data.images import crop, stretch
from overt.data.object_masks import ObjectGroup, ObjectMasks, box_mask
from overt.errors import CorruptFileError, UserError

OBJECTS = [
    ObjectGroup(0, 0, ((0.0, 0.0, 4.0, 6.0),)),
    ObjectGroup(0, 1, ((4.0, 0.0, 8.0, 3.0), (4.0, 3.0, 8.0, 6.0))),
    ObjectGroup(1, 1, ((0.0, 0.0, 2.0, 3.0),)),
]


def open_masks(root, write_photo, objects=OBJECTS, outline=box_mask, **options) -> ObjectMasks:
    for name in ("a.jpg", "b.jpg"):
        write_photo(root / name, (6, 8))
    return ObjectMasks(
        "things",
        "test",
        root,
        ["a.jpg", "b.jpg"],
        objects,
        ("cup", "cat"),
        outline,
        **{"size": (4, 4), "resize": stretch, "cells": (2, 2), "about": "by hand", **options},
    )


def test_batches_match_hand_computed_values(tmp_path, write_photo):
    found = open_masks(tmp_path, write_photo)
    batch = found.batch([0, 1, 2])
    assert isinstance(found, Dataset) and len(found) == 3
    assert batch.ids == ("things/a.jpg/cup", "things/a.jpg/cat", "things/b.jpg/cat")
    assert batch.groups == ("cup", "cat", "cat") and batch.labels.tolist() == [0, 1, 1]
    # each photo is opened once
    assert len(batch.images) == 2 and batch.image_of.tolist() == [0, 0, 1]
    torch.testing.assert_close(
        batch.target.check().weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [1, 0, 0, 0]]),
    )
    shares = batch.target.coverage[:, 0]  # the share of each cell, not of the objects
    torch.testing.assert_close(
        shares / shares.sum(dim=-1, keepdim=True), batch.target.weights[:, 0, 0, 0]
    )
    assert float(shares.max()) == 1
    assert batch.boxes.shape == (3, 2, 4) and not batch.boxes[0, 1].any()


def test_sample_does_not_depend_on_its_batch(tmp_path, write_photo):
    found = open_masks(tmp_path, write_photo)
    both, alone = found.batch([2, 1]), found.batch([1])
    assert alone.ids == both.ids[1:]
    torch.testing.assert_close(alone.target.values[0], both.target.values[1])
    _, truth = load_ground_truth(found, [1])
    assert truth.people is None and len(truth) == 1


def test_box_mask_contains_pixels_by_their_center():
    mask = box_mask(ObjectGroup(0, 0, ((0.6, 0.0, 2.0, 1.4),)), (2, 3))
    assert mask.tolist() == [[False, True, False], [False, False, False]]


def test_masks_have_the_size_of_the_photo(tmp_path, write_photo):
    found = open_masks(tmp_path, write_photo)
    assert [int(one.sum()) for one in found.masks([0, 2])] == [24, 6]
    wrong = open_masks(
        tmp_path, write_photo, outline=lambda one, size: torch.ones(2, 2, dtype=torch.bool)
    )
    with pytest.raises(CorruptFileError, match=r"a.jpg.*2 x 2.*6 x 8"):
        wrong.batch([0])


def test_object_outside_the_crop_has_an_empty_target(tmp_path, write_photo):
    # the crop shows four fifths of the photo; this object is at the right edge
    found = open_masks(
        tmp_path, write_photo, [ObjectGroup(0, 0, ((7.0, 0.0, 8.0, 6.0),))], resize=crop
    )
    batch = found.batch([0])
    assert not batch.target.rows.any() and not batch.target.weights.any()


def test_digest_depends_on_boxes_and_mask_rule(tmp_path, write_photo):
    first = open_masks(tmp_path, write_photo).digest()
    moved = open_masks(tmp_path, write_photo, [ObjectGroup(0, 0, ((1.0, 0.0, 4.0, 6.0),))]).digest()
    other = open_masks(tmp_path, write_photo, about="by another hand").digest()
    assert len({first, moved, other}) == 3 and first == open_masks(tmp_path, write_photo).digest()


def test_empty_object_lists_and_wrong_indices_raise(tmp_path, write_photo):
    with pytest.raises(UserError, match=r"photo.*object"):
        open_masks(tmp_path, write_photo, [])
    with pytest.raises(UserError, match="3 samples: 3 "):
        open_masks(tmp_path, write_photo).batch([3])


@pytest.mark.parametrize("box", [(6.0, 1.0, 2.0, 3.0), (8.0, 0.0, 9.0, 2.0), (1.0, 2.0, 3.0, 2.0)])
def test_box_without_area_on_the_photo_raises(tmp_path, write_photo, box):
    """Inverted boxes, boxes outside the photo and boxes of height 0 have an empty target."""
    found = open_masks(tmp_path, write_photo, [*OBJECTS, ObjectGroup(1, 0, (box,))])
    assert len(found.batch([0, 1, 2])) == 3
    with pytest.raises(CorruptFileError, match=rf"b.jpg.*\({box[0]:g}, .*cup .*8 x 6"):
        found.batch([3])
