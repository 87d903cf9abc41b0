import pytest
import torch

from overt.data.human import truth_of
from overt.data.images import crop, stretch
from overt.data.objects import Outlined, Things, inside_boxes
from overt.data.source import Source
from overt.errors import BadInput, Damaged

THINGS = [
    Things(0, 0, ((0.0, 0.0, 4.0, 6.0),)),
    Things(0, 1, ((4.0, 0.0, 8.0, 3.0), (4.0, 3.0, 8.0, 6.0))),
    Things(1, 1, ((0.0, 0.0, 2.0, 3.0),)),
]


def opened(root, write_photo, things=THINGS, outline=inside_boxes, **options) -> Outlined:
    for name in ("a.jpg", "b.jpg"):
        write_photo(root / name, (6, 8))
    return Outlined(
        "things",
        "test",
        root,
        ["a.jpg", "b.jpg"],
        things,
        ("cup", "cat"),
        outline,
        **{"size": (4, 4), "how": stretch, "cells": (2, 2), "about": "by hand", **options},
    )


def test_batches_by_hand(tmp_path, write_photo):
    found = opened(tmp_path, write_photo)
    batch = found.batch([0, 1, 2])
    assert isinstance(found, Source) and len(found) == 3
    assert batch.ids == ("things/a.jpg/cup", "things/a.jpg/cat", "things/b.jpg/cat")
    assert batch.groups == ("cup", "cat", "cat") and batch.labels.tolist() == [0, 1, 1]
    assert len(batch.images) == 2 and batch.image_of.tolist() == [0, 0, 1]  # a photo is opened once
    torch.testing.assert_close(
        batch.target.check().weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [1, 0, 0, 0]]),
    )
    assert batch.boxes.shape == (3, 2, 4) and not batch.boxes[0, 1].any()


def test_one_sample_is_the_same_alone(tmp_path, write_photo):
    found = opened(tmp_path, write_photo)
    whole, alone = found.batch([2, 1]), found.batch([1])
    assert alone.ids == whole.ids[1:]
    torch.testing.assert_close(alone.target.values[0], whole.target.values[1])
    _, truth = truth_of(found, [1])
    assert truth.people is None and len(truth) == 1


def test_pixels_belong_to_a_box_by_their_middle():
    mask = inside_boxes(Things(0, 0, ((0.6, 0.0, 2.0, 1.4),)), (2, 3))
    assert mask.tolist() == [[False, True, False], [False, False, False]]


def test_masks_have_the_size_of_the_photo(tmp_path, write_photo):
    found = opened(tmp_path, write_photo)
    assert [int(one.sum()) for one in found.masks([0, 2])] == [24, 6]
    wrong = opened(
        tmp_path, write_photo, outline=lambda one, size: torch.ones(2, 2, dtype=torch.bool)
    )
    with pytest.raises(Damaged, match=r"a\.jpg has 2 x 2 pixels, but the photo has 6 x 8"):
        wrong.batch([0])


def test_what_lies_outside_of_the_canvas_counts_nowhere(tmp_path, write_photo):
    # four fifths of the photo are shown, and this thing is at the very right
    found = opened(tmp_path, write_photo, [Things(0, 0, ((7.0, 0.0, 8.0, 6.0),))], how=crop)
    batch = found.batch([0])
    assert not batch.target.rows.any() and not batch.target.weights.any()


def test_digest_changes_with_boxes_and_rules(tmp_path, write_photo):
    first = opened(tmp_path, write_photo).digest()
    moved = opened(tmp_path, write_photo, [Things(0, 0, ((1.0, 0.0, 4.0, 6.0),))]).digest()
    other = opened(tmp_path, write_photo, about="by another hand").digest()
    assert len({first, moved, other}) == 3 and first == opened(tmp_path, write_photo).digest()


def test_bad_requests_are_refused(tmp_path, write_photo):
    with pytest.raises(BadInput, match="no photo with anything outlined"):
        opened(tmp_path, write_photo, [])
    with pytest.raises(BadInput, match="samples 0 to 2, not 3"):
        opened(tmp_path, write_photo).batch([3])
