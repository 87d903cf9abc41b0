import json

import numpy as np
import pytest
import torch

from overt.data.coco import coco_boxes, coco_objects, filled, unpacked
from overt.errors import BadInput, Damaged

CROWD = {"size": [6, 8], "counts": [0, 6, 42]}  # the first column


def table(**changes):
    return {
        "categories": [{"id": 1, "name": "person"}, {"id": 17, "name": "cat"}],
        "images": [
            {"id": 9, "file_name": "000000000009.jpg", "height": 6, "width": 8},
            {"id": 4, "file_name": "000000000004.jpg", "height": 6, "width": 8},
            {"id": 5, "file_name": "empty.jpg", "height": 6, "width": 8},
        ],
        "annotations": [
            _thing(9, 17, [[4, 0, 8, 0, 8, 6, 4, 6]], [4, 0, 4, 6]),
            _thing(9, 1, CROWD, [0, 0, 1, 6], crowd=1),
            _thing(9, 1, [[0, 3, 4, 3, 4, 6, 0, 6]], [0, 3, 4, 3]),
            _thing(4, 17, [[0, 0, 4, 0, 4, 3, 0, 3]], [0, 0, 4, 3]),
        ],
        **changes,
    }


def _thing(image, kind, shape, box, crowd=0):
    return {
        "id": 1,
        "image_id": image,
        "category_id": kind,
        "segmentation": shape,
        "bbox": box,
        "iscrowd": crowd,
    }


@pytest.fixture
def root(tmp_path, write_photo):
    def write(value=None):
        for name in ("000000000009", "000000000004"):
            write_photo(tmp_path / "coco" / "val2017" / f"{name}.jpg", (6, 8))
        path = tmp_path / "coco" / "annotations" / "instances_val2017.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table() if value is None else value))
        return tmp_path

    return write


SMALL = {"size": (4, 4), "cells": (2, 2)}


def test_batches_by_hand(root):
    found = coco_objects(root(), **SMALL)
    batch = found.batch(range(3))
    assert batch.ids == (
        "coco/000000000004.jpg/cat",
        "coco/000000000009.jpg/person",
        "coco/000000000009.jpg/cat",
    )
    assert found.classes == ("person", "cat") and batch.labels.tolist() == [1, 0, 1]
    # 12 pixels of the lower left are a person, and three of the upper left are of a crowd
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0],
        torch.tensor([[1, 0, 0, 0], [3 / 15, 0, 12 / 15, 0], [0, 0.5, 0, 0.5]]),
        atol=1e-5,
        rtol=1e-5,
    )
    assert batch.boxes[1].tolist() == [[0, 0, 1, 6], [0, 3, 4, 6]]


def test_boxes_stand_in_for_outlines(root):
    batch = coco_boxes(root(), **SMALL).batch([1])
    torch.testing.assert_close(
        batch.target.weights[0, 0, 0, 0], torch.tensor([3 / 15, 0, 12 / 15, 0])
    )
    assert batch.ids == ("coco-boxes/000000000009.jpg/person",)


def test_runs_go_down_the_columns():
    mask = filled({"size": [2, 3], "counts": [1, 2, 3]}, (2, 3))
    assert mask.tolist() == [[False, True, False], [True, False, False]]


def test_packed_runs_agree_with_the_official_tools():
    tools = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (7, 5), (40, 60)):
        for share in (0.0, 0.02, 0.5, 1.0):
            mask = rng.random((height, width)) < share
            packed = tools.encode(np.asfortranarray(mask.astype(np.uint8)))
            packed = {"size": packed["size"], "counts": packed["counts"].decode()}
            found = filled({**packed, "size": list(packed["size"])}, (height, width))
            assert np.array_equal(found.numpy(), mask)
            assert sum(unpacked(packed["counts"])) == height * width


POLYGON = [10.5, 3.25, 50.0, 8.0, 58.5, 30.0, 30.0, 36.7, 5.0, 25.0, 20.0, 18.0]


def test_polygons_agree_with_another_library():
    path = pytest.importorskip("matplotlib.path")
    corners = np.array(POLYGON).reshape(-1, 2)
    y, x = np.mgrid[:40, :60] + 0.5
    points = np.stack([x.ravel(), y.ravel()], axis=1)
    wanted = path.Path(corners).contains_points(points).reshape(40, 60)
    assert np.array_equal(filled([POLYGON], (40, 60)).numpy(), wanted)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_polygons_are_those_of_the_official_tools_but_for_edges():
    tools = pytest.importorskip("pycocotools.mask")
    theirs = tools.decode(tools.merge(tools.frPyObjects([POLYGON], 40, 60))).astype(bool)
    ours = filled([POLYGON], (40, 60)).numpy()
    assert (ours & theirs).sum() / (ours | theirs).sum() > 0.93
    assert (ours & ~theirs).sum() <= 10  # theirs are wider


def test_polygons_may_leave_the_photo():
    mask = filled([[-5, -5, 20, -5, 20, 1, -5, 1]], (2, 3))
    assert mask.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        ([[0, 0, 1]], "a polygon of 3 numbers"),
        ({"size": [6, 8], "counts": [3]}, "runs of 3 pixels in a photo of 48"),
        ({"size": [2, 2], "counts": [4]}, "not"),
        ({"size": [6, 8], "counts": [-1, 49]}, "no whole numbers"),
        ({"size": [6, 8], "counts": "~~"}, "letter"),
    ],
    ids=["polygon", "short", "size", "negative", "packed"],
)
def test_a_broken_outline_is_named(root, shape, wrong):
    value = table()
    value["annotations"][3]["segmentation"] = shape
    with pytest.raises(Damaged, match="photo 0 has"):
        coco_objects(root(value), **SMALL).batch([0])
    with pytest.raises(ValueError, match=wrong):
        filled(shape, (6, 8))


@pytest.mark.parametrize(
    "change",
    [
        {"annotations": [_thing(77, 1, [[0, 0, 1, 0, 1, 1]], [0, 0, 1, 1])]},
        {"annotations": [_thing(9, 3, [[0, 0, 1, 0, 1, 1]], [0, 0, 1, 1])]},
        {"annotations": [_thing(9, 1, "all", [0, 0, 1, 1])]},
        {"annotations": [_thing(9, 1, [[0, 0, 1, 0, 1, 1]], [0, 0, -1, 1])]},
        {"categories": None},
    ],
    ids=["photo", "kind", "outline", "box", "kinds"],
)
def test_a_broken_file_is_named(root, change):
    with pytest.raises(Damaged, match=r"instances_val2017\.json is not what COCO publishes"):
        coco_objects(root(table(**change)), **SMALL)


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(BadInput, match="coco has train and val of 2014 and 2017"):
        coco_objects(tmp_path, "test")
    with pytest.raises(BadInput, match="is missing"):
        coco_objects(tmp_path)
