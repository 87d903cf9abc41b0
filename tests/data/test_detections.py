import json

import pytest

from overt.data.detections import read_detections
from overt.errors import CorruptFileError, UserError


def test_boxes_are_grouped_by_photo(tmp_path):
    path = tmp_path / "dets.json"
    path.write_text(json.dumps([
        {"det_id": 1, "h5_id": 0, "image_id": 9, "box": [1.5, 2, 3, 4], "score": 0.7},
        {"image_id": 10, "bbox": [0, 0, 2, 2]},
        {"image_id": 9, "box": [5, 5, 1, 1], "score": 0.2},
        {"image_id": 9, "box": [5, 5, 0, 1], "score": 0.9},
    ]))  # fmt: skip
    found = read_detections(path)
    assert {name: boxes.tolist() for name, boxes in found.items()} == {
        "COCO_train2014_000000000009.jpg": [[1.5, 2, 4.5, 6], [5, 5, 6, 6]],
        "COCO_train2014_000000000010.jpg": [[0, 0, 2, 2]],
    }
    better = read_detections(path, least=0.5, part="val2014")
    assert len(better["COCO_val2014_000000000009.jpg"]) == 1


@pytest.mark.parametrize("entry", [{"image_id": 9}, {"box": [0, 0, 1, 1]},
                                   {"image_id": 9, "box": [0, 0, 1]},
                                   {"image_id": 9, "box": "all"}],
                         ids=["no box", "no photo", "three numbers", "a word"])  # fmt: skip
def test_invalid_entries_raise_with_their_number(tmp_path, entry):
    path = tmp_path / "dets.json"
    path.write_text(json.dumps([{"image_id": 1, "box": [0, 0, 1, 1]}, entry]))
    with pytest.raises(CorruptFileError, match=r" 1 .*image_id.*box"):
        read_detections(path)


def test_missing_file_raises(tmp_path):
    with pytest.raises(UserError, match=r"dets\.json.*missing"):
        read_detections(tmp_path / "dets.json")
