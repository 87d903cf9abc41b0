import json
from pathlib import Path

import pytest
import torch

from overt.data import catalog
from overt.data.dataset import Dataset
from overt.data.images import stretch
from overt.data.referring_expressions import (
    FLAT,
    ReferringExpressions,
    flickr30k_phrases,
    refcoco,
    refer,
)
from overt.data.vqa_dataset import PhotoInput
from overt.errors import CorruptFileError, UserError

PHOTO = "COCO_train2014_000000000007.jpg"


def make_entry(phrase: str, box: list[float], photo: int = 7, kind: str = "person") -> dict:
    return {
        "box": box,
        "image": str(photo),
        "entity": "1",
        "phraseId": "1",
        "imageName": f"COCO_train2014_{photo:012d}.jpg",
        "phrase": phrase.split(),
        "categories": [kind],
    }


ENTRIES = [
    make_entry("the man", [1, 2, 3, 4]),
    make_entry("tall lady left", [4, 0, 2, 2]),
    make_entry("guy", [1, 2, 3, 4]),
    make_entry("cup", [0, 0, 2, 1], 8, "cup"),
]


def dump_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_refcoco(root: Path, entries: list[dict] = ENTRIES, **options) -> ReferringExpressions:
    dump_json(root / "refcoco" / "refcoco+_testA.json", entries)
    return refcoco(root, count=None, **options)


def test_batches_match_hand_computed_values(tmp_path):
    found = write_refcoco(tmp_path)
    batch = found.batch([1, 3, 2])
    assert isinstance(found, Dataset) and len(found) == 4 and found.name == "refcoco+"
    assert batch.ids == ("refcoco+/00001", "refcoco+/00003", "refcoco+/00002")
    assert batch.text.texts == ("tall lady left", "cup", "guy")
    assert batch.boxes.tolist() == [
        [[1, 2, 4, 6], [4, 0, 6, 2]],
        [[0, 0, 2, 1], [0, 0, 0, 0]],
        [[1, 2, 4, 6], [4, 0, 6, 2]],
    ]
    assert batch.region_mask.tolist() == [[True, True], [True, False], [True, True]]
    assert batch.labels.tolist() == [1, 0, 0] and batch.groups == ("person", "cup", "person")
    assert batch.target.weights[0, 0, 0].tolist() == [[0, 1]] * 3
    assert batch.target.rows.tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert batch.images is None


def test_photo_input_adds_images(tmp_path, write_photo):
    for photo in (7, 8):
        write_photo(tmp_path / "coco/train2014" / f"COCO_train2014_{photo:012d}.jpg", (8, 8))
    batch = write_refcoco(tmp_path, photo_input=PhotoInput((4, 4), stretch)).batch([0, 2, 3])
    assert batch.images.shape == (2, 3, 4, 4) and batch.image_of.tolist() == [0, 0, 1]
    assert batch.boxes[0, 0].tolist() == [1, 2, 4, 6]
    (tmp_path / "coco/train2014" / PHOTO).unlink()
    with pytest.raises(CorruptFileError, match=r"0007\.jpg.*missing"):
        write_refcoco(tmp_path, photo_input=PhotoInput((4, 4)))


def write_flickr30k(
    root: Path, write_photo, photo_input: PhotoInput | None = None
) -> ReferringExpressions:
    folder = root / "flickr30k_entities"
    entries = [{**one, "image": f"{one['image']}#2", "pos": ["NN"]} for one in ENTRIES]
    dump_json(folder / "annotation_test.json", entries)
    about = {"7": {"file": "7_abc.jpg", "original_size": [16, 8]}}
    dump_json(folder / "images.json", about)
    write_photo(folder / "images" / "7.jpg", (4, 4))
    return flickr30k_phrases(root, photo_input=photo_input, count=None)


def test_boxes_are_scaled_with_the_photo(tmp_path, write_photo):
    found = write_flickr30k(tmp_path, write_photo)
    assert len(found) == 4 and found.batch([0]).boxes[0, 0].tolist() == [1, 2, 4, 6]
    shown = write_flickr30k(tmp_path, write_photo, PhotoInput((4, 4), stretch))
    batch = shown.batch([0, 1])
    assert len(shown) == 3  # one photo is missing
    assert batch.boxes[0].tolist() == [[0.25, 1, 1, 3], [1, 0, 1.5, 1]]
    covered = batch.sample_geometry.cover_boxes(batch.boxes, (1, 1))[0, :, 0]
    torch.testing.assert_close(covered, torch.tensor([0.75 * 2 / 16, 0.5 * 1 / 16]))


def write_official_refcoco(root: Path, split: str = "train", **options) -> ReferringExpressions:
    folder = root / "refcoco" / "refcoco"
    instances = {
        "info": {},
        "images": [{"id": 7, "file_name": PHOTO, "height": 8, "width": 8}],
        "annotations": [
            {"id": 70, "image_id": 7, "bbox": [1, 2, 3, 4], "category_id": 1},
            {"id": 71, "image_id": 7, "bbox": [0, 0, 8, 8], "category_id": 2},
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 2, "name": "table"}],
    }
    refs = [
        {
            "ann_id": 71,
            "ref_id": 1,
            "image_id": 7,
            "split": "train",
            "sentences": [
                {"sent_id": 5, "sent": "the table", "raw": "the table!", "tokens": []},
                {"sent_id": 6, "sent": "wood", "raw": "wood", "tokens": []},
            ],
        },
        {"ann_id": 70, "split": "testA", "sentences": [{"sent_id": 9, "sent": "man"}]},
    ]
    dump_json(folder / "instances.json", instances)
    dump_json(folder / "refs(unc).json", refs)
    return refer(root, split, **options)


def test_official_release_is_read(tmp_path):
    batch = write_official_refcoco(tmp_path).batch([0, 1])
    assert batch.ids == ("refcoco/5", "refcoco/6") and batch.text.texts == ("the table", "wood")
    assert batch.boxes[0].tolist() == [[1, 2, 4, 6], [0, 0, 8, 8]]
    assert batch.labels.tolist() == [1, 1] and batch.groups == ("table", "table")
    assert write_official_refcoco(tmp_path, "testA").batch([0]).labels.tolist() == [0]
    with pytest.raises(UserError, match=r"'val'.*testA, train"):
        write_official_refcoco(tmp_path, "val")


def test_pickle_files_are_never_read(tmp_path):
    write_official_refcoco(tmp_path)
    folder = tmp_path / "refcoco" / "refcoco"
    (folder / "refs(unc).json").unlink()
    (folder / "refs(unc).p").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(UserError, match=r"pickle.*refs\(unc\)\.json"):
        refer(tmp_path)
    assert not Path("hacked").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"box": [1, 2, 0, 4]}, "entry 1 .*phrase"),
        ({"box": [1, 2, 3]}, "entry 1 .*phrase"),
        ({"box": [1, 2, "x", 4]}, "entry 1 .*phrase"),
        ({"box": [1, 2, float("inf"), 4]}, "entry 1"),
        ({"phrase": []}, "entry 1 .*words"),
        ({"phrase": None}, "entry 1 .*phrase"),
        ({"categories": 3}, "entry 1 .*phrase"),
    ],
)
def test_invalid_entries_raise_with_their_number(tmp_path, wrong, message):
    with pytest.raises(CorruptFileError, match=message):
        write_refcoco(tmp_path, [ENTRIES[0], {**ENTRIES[1], **wrong}])


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path):
    found = write_refcoco(tmp_path)
    with pytest.raises(CorruptFileError, match=r"4 expressions.*5726"):
        refcoco(tmp_path)
    with pytest.raises(UserError, match=r"refcoco train.*refcocog test"):
        refcoco(tmp_path, "train", "refcoco")
    with pytest.raises(UserError, match="only test"):
        flickr30k_phrases(tmp_path, "train")
    for place in (-1, 4):
        with pytest.raises(UserError, match=rf"4 \w+: {place} is out"):
            found.batch([place])
    with pytest.raises(UserError, match="no expression"):
        write_refcoco(tmp_path, [])
    with pytest.raises(UserError, match=r"refcocog_test\.json"):
        refcoco(tmp_path, "test", "refcocog")
    with pytest.raises(UserError, match=r"instances.*missing"):
        refer(tmp_path)
    write_official_refcoco(tmp_path)
    folder = tmp_path / "refcoco" / "refcoco"
    dump_json(folder / "refs(unc).json", [{"split": "train", "ann_id": 5, "sentences": []}])
    with pytest.raises(CorruptFileError, match=r"object 5\b"):
        refer(tmp_path)
    dump_json(folder / "refs(unc).json", [{"split": "train"}])
    with pytest.raises(CorruptFileError, match=r" 0 .*split.*ann_id"):
        refer(tmp_path)
    dump_json(folder / "instances.json", {"images": [], "annotations": [{}], "categories": []})
    with pytest.raises(CorruptFileError, match=r"list.*objects"):
        refer(tmp_path)


def test_digest_depends_on_the_file(tmp_path):
    before = write_refcoco(tmp_path).digest()
    assert write_refcoco(tmp_path).digest() == before
    assert write_refcoco(tmp_path, ENTRIES[:3]).digest() != before


@pytest.mark.long
def test_real_refcoco(data_root, needs):
    needs(data_root, "refcoco")
    for (name, split), (_, count) in FLAT.items():
        found = refcoco(data_root, split, name)
        assert len(found) == count
        batch = found.batch(range(0, count, 500))
        assert bool(batch.region_mask.gather(1, batch.labels[:, None]).all())
        batch.target.check()
    assert catalog.check_dataset(data_root, "refcoco") == []


@pytest.mark.long
def test_real_flickr30k_phrases(data_root, needs):
    needs(data_root, "flickr30k_entities")
    assert len(flickr30k_phrases(data_root)) == 14_481
    shown = flickr30k_phrases(data_root, photo_input=PhotoInput((64, 64), stretch))
    assert len(shown.files) == 285
    batch = shown.batch(range(0, len(shown), 400))
    size = batch.sample_geometry.size.flip(-1).repeat(1, 2)[:, None]
    inside = batch.boxes <= size + 1.5  # a pixel of rounding
    assert bool(inside[batch.region_mask].all())
