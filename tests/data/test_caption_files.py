import json

import pytest

from overt.data.caption_files import read_captions
from overt.errors import CorruptFileError, UserError


def write_file(tmp_path, name, value):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


KARPATHY = {
    "dataset": "coco",
    "images": [
        {"filename": "a", "split": "train", "sentences": [{"raw": "A dog."}, {"raw": " A cat "}]},
        {"filename": "b", "split": "restval", "sentences": [{"raw": "Two dogs."}]},
        {"filename": "c", "split": "val", "sentences": [{"raw": "A bird."}]},
    ],
}
COCO = {
    "info": {},
    "images": [{"id": 7, "file_name": "a.jpg"}],
    "annotations": [
        {"image_id": 7, "id": 1, "caption": "A dog."},
        {"image_id": 8, "id": 2, "caption": "A bird."},
        {"image_id": 7, "id": 3, "caption": "A cat."},
    ],
}


def test_karpathy_splits_are_read_by_name(tmp_path):
    path = write_file(tmp_path, "dataset.json", KARPATHY)
    assert read_captions(path) == [("A dog.", "A cat"), ("Two dogs.",)]
    assert read_captions(path, "val") == [("A bird.",)]
    with pytest.raises(UserError, match="train, val and test"):
        read_captions(path, "dev")
    with pytest.raises(UserError, match=r"no caption.*test"):
        read_captions(path, "test")


@pytest.mark.parametrize("left_out", [(), ("images",), ("info", "images")])
def test_coco_captions_are_grouped_by_image(tmp_path, left_out):
    value = {name: one for name, one in COCO.items() if name not in left_out}
    path = write_file(tmp_path, "captions.json", value)
    assert read_captions(path) == [("A dog.", "A cat."), ("A bird.",)]
    with pytest.raises(UserError, match="no split 'train'"):
        read_captions(path, "train")


def test_text_lines_are_captions_with_or_without_an_image(tmp_path):
    alone = write_file(tmp_path, "one.txt", "A dog.\n\nA cat.\n")
    assert read_captions(alone) == [("A dog.",), ("A cat.",)]
    named = write_file(tmp_path, "two.txt", "a.jpg#0\tA dog.\nb.jpg\tA bird.\na.jpg#1\tA cat.\n")
    assert read_captions(named) == [("A dog.", "A cat."), ("A bird.",)]
    with pytest.raises(UserError, match="line 2 "):
        read_captions(write_file(tmp_path, "three.txt", "a\tA dog.\nA cat.\n"))
    with pytest.raises(UserError, match="no split 'train'"):
        read_captions(alone, "train")


def test_only_selects_images_by_name(tmp_path):
    named = write_file(tmp_path, "two.txt", "a.jpg#0\tA dog.\nb.jpg\tA bird.\na.jpg#1\tA cat.\n")
    assert read_captions(named, only={"a.jpg", "z.jpg"}) == [("A dog.", "A cat.")]
    assert read_captions(write_file(tmp_path, "c.json", COCO), only=["8"]) == [("A bird.",)]
    assert read_captions(write_file(tmp_path, "k.json", KARPATHY), only=["b"]) == [("Two dogs.",)]
    with pytest.raises(UserError, match="1 requested images"):
        read_captions(named, only={"c.jpg"})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("a.json", {"images": [{"sentences": [{"raw": "A dog."}]}]}, "filename"),
        (
            "b.json",
            {"images": [{"filename": "a", "split": "train", "sentences": [{"raw": " "}]}]},
            "no caption",
        ),
        ("c.json", {"annotations": [{"caption": "A dog."}]}, "no image_id"),
        ("d.json", {"annotations": [{"image_id": 1, "caption": 3}]}, "no caption"),
        ("e.json", {"other": []}, "'annotations'"),
        ("f.txt", "a.jpg\t \nb.jpg\tA dog.\n", "line 2"),
        ("g.txt", "\n", "empty"),
    ],
)
def test_invalid_files_raise(tmp_path, name, value, problem):
    with pytest.raises((UserError, CorruptFileError), match=problem):
        read_captions(write_file(tmp_path, name, value))


def test_missing_file_raises(tmp_path):
    with pytest.raises(UserError, match="not a file"):
        read_captions(tmp_path / "none.txt")
