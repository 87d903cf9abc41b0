import json

import numpy as np
import pytest
import torch

from overt.data.coco import coco_boxes, coco_objects, decode_mask, decode_rle
from overt.errors import CorruptFileError, UserError

CROWD = {"size": [6, 8], "counts": [0, 6, 42]}  # the first column


def make_annotations(**changes):
    return {
        "categories": [{"id": 1, "name": "person"}, {"id": 17, "name": "cat"}],
        "images": [
            {"id": 9, "file_name": "000000000009.jpg", "height": 6, "width": 8},
            {"id": 4, "file_name": "000000000004.jpg", "height": 6, "width": 8},
            {"id": 5, "file_name": "empty.jpg", "height": 6, "width": 8},
        ],
        "annotations": [
            _make_object(9, 17, [[4, 0, 8, 0, 8, 6, 4, 6]], [4, 0, 4, 6]),
            _make_object(9, 1, CROWD, [0, 0, 1, 6], crowd=1),
            _make_object(9, 1, [[0, 3, 4, 3, 4, 6, 0, 6]], [0, 3, 4, 3]),
            _make_object(4, 17, [[0, 0, 4, 0, 4, 3, 0, 3]], [0, 0, 4, 3]),
        ],
        **changes,
    }


def _make_object(image, kind, shape, box, crowd=0):
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
        path.write_text(json.dumps(make_annotations() if value is None else value))
        return tmp_path

    return write


SMALL = {"size": (4, 4), "cells": (2, 2)}


def test_batches_match_hand_computed_values(root):
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


def test_coco_boxes_replace_outlines(root):
    batch = coco_boxes(root(), **SMALL).batch([1])
    torch.testing.assert_close(
        batch.target.weights[0, 0, 0, 0], torch.tensor([3 / 15, 0, 12 / 15, 0])
    )
    assert batch.ids == ("coco-boxes/000000000009.jpg/person",)


def test_objects_without_area_are_left_out(root):
    """The official files have boxes of width 0, whose target would be empty."""
    value = make_annotations()
    value["annotations"] += [
        _make_object(4, 1, [[1, 1, 1, 1, 1, 4]], [1, 1, 0, 3]),
        _make_object(4, 17, [[1, 1, 1, 1, 1, 4]], [1, 1, 0, 3]),
    ]
    for read in (coco_objects, coco_boxes):
        found = read(root(value), **SMALL)
        assert len(found) == 3 and sum(len(one.boxes) for one in found.things) == 4
        assert found.batch(range(3)).target.rows.all()


def test_runs_are_decoded_in_column_order():
    mask = decode_mask({"size": [2, 3], "counts": [1, 2, 3]}, (2, 3))
    assert mask.tolist() == [[False, True, False], [True, False, False]]


def test_packed_runs_agree_with_pycocotools():
    tools = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (7, 5), (40, 60)):
        for share in (0.0, 0.02, 0.5, 1.0):
            mask = rng.random((height, width)) < share
            packed = tools.encode(np.asfortranarray(mask.astype(np.uint8)))
            packed = {"size": packed["size"], "counts": packed["counts"].decode()}
            found = decode_mask({**packed, "size": list(packed["size"])}, (height, width))
            assert np.array_equal(found.numpy(), mask)
            assert sum(decode_rle(packed["counts"])) == height * width


POLYGON = [10.5, 3.25, 50.0, 8.0, 58.5, 30.0, 30.0, 36.7, 5.0, 25.0, 20.0, 18.0]


def test_polygons_agree_with_matplotlib():
    path = pytest.importorskip("matplotlib.path")
    corners = np.array(POLYGON).reshape(-1, 2)
    y, x = np.mgrid[:40, :60] + 0.5
    points = np.stack([x.ravel(), y.ravel()], axis=1)
    expected = path.Path(corners).contains_points(points).reshape(40, 60)
    assert np.array_equal(decode_mask([POLYGON], (40, 60)).numpy(), expected)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_polygons_agree_with_pycocotools_except_at_edges():
    tools = pytest.importorskip("pycocotools.mask")
    reference = tools.decode(tools.merge(tools.frPyObjects([POLYGON], 40, 60))).astype(bool)
    found = decode_mask([POLYGON], (40, 60)).numpy()
    assert (found & reference).sum() / (found | reference).sum() > 0.93
    assert (found & ~reference).sum() <= 10  # the reference is wider


def test_polygons_are_clipped_at_the_photo():
    mask = decode_mask([[-5, -5, 20, -5, 20, 1, -5, 1]], (2, 3))
    assert mask.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        ([[0, 0, 1]], "polygon of 3"),
        ({"size": [6, 8], "counts": [3]}, "runs of 3 .*48"),
        ({"size": [2, 2], "counts": [4]}, "not"),
        ({"size": [6, 8], "counts": [-1, 49]}, "not integers"),
        ({"size": [6, 8], "counts": "~~"}, "letter"),
    ],
    ids=["polygon", "short", "size", "negative", "packed"],
)
def test_invalid_outline_raises_with_its_photo(root, shape, wrong):
    value = make_annotations()
    value["annotations"][3]["segmentation"] = shape
    with pytest.raises(CorruptFileError, match="photo 0 has"):
        coco_objects(root(value), **SMALL).batch([0])
    with pytest.raises(ValueError, match=wrong):
        decode_mask(shape, (6, 8))


@pytest.mark.parametrize(
    "change",
    [
        {"annotations": [_make_object(77, 1, [[0, 0, 1, 0, 1, 1]], [0, 0, 1, 1])]},
        {"annotations": [_make_object(9, 3, [[0, 0, 1, 0, 1, 1]], [0, 0, 1, 1])]},
        {"annotations": [_make_object(9, 1, "all", [0, 0, 1, 1])]},
        {"annotations": [_make_object(9, 1, [[0, 0, 1, 0, 1, 1]], [0, 0, -1, 1])]},
        {"categories": None},
    ],
    ids=["photo", "kind", "outline", "box", "kinds"],
)
def test_invalid_annotation_file_raises_with_its_name(root, change):
    with pytest.raises(CorruptFileError, match=r"val2017\.json.*COCO"):
        coco_objects(root(make_annotations(**change)), **SMALL)


def test_unknown_splits_and_missing_files_raise(tmp_path):
    with pytest.raises(UserError, match=r"train.*val.*2014.*2017"):
        coco_objects(tmp_path, "test")
    with pytest.raises(UserError, match="is missing"):
        coco_objects(tmp_path)
