import json
from pathlib import Path

import pytest
import torch

from overt.data import sets
from overt.data.asked import Look
from overt.data.images import stretch
from overt.data.phrases import FLAT, Expressions, flickr30k_phrases, refcoco, refer
from overt.data.source import Source
from overt.errors import BadInput, Damaged

PHOTO = "COCO_train2014_000000000007.jpg"


def entry(phrase: str, box: list[float], photo: int = 7, kind: str = "person") -> dict:
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
    entry("the man", [1, 2, 3, 4]),
    entry("tall lady left", [4, 0, 2, 2]),
    entry("guy", [1, 2, 3, 4]),
    entry("cup", [0, 0, 2, 1], 8, "cup"),
]


def dump(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def flat(root: Path, entries: list[dict] = ENTRIES, **options) -> Expressions:
    dump(root / "refcoco" / "refcoco+_testA.json", entries)
    return refcoco(root, count=None, **options)


def test_batches_by_hand(tmp_path):
    found = flat(tmp_path)
    batch = found.batch([1, 3, 2])
    assert isinstance(found, Source) and len(found) == 4 and found.name == "refcoco+"
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


def test_photos_are_shown_when_asked_for(tmp_path, write_photo):
    for photo in (7, 8):
        write_photo(tmp_path / "coco/train2014" / f"COCO_train2014_{photo:012d}.jpg", (8, 8))
    batch = flat(tmp_path, look=Look((4, 4), stretch)).batch([0, 2, 3])
    assert batch.images.shape == (2, 3, 4, 4) and batch.image_of.tolist() == [0, 0, 1]
    assert batch.boxes[0, 0].tolist() == [1, 2, 4, 6]
    (tmp_path / "coco/train2014" / PHOTO).unlink()
    with pytest.raises(Damaged, match=r"000000000007\.jpg is missing"):
        flat(tmp_path, look=Look((4, 4)))


def flickr(root: Path, write_photo, look: Look | None = None) -> Expressions:
    folder = root / "flickr30k_entities"
    entries = [{**one, "image": f"{one['image']}#2", "pos": ["NN"]} for one in ENTRIES]
    dump(folder / "annotation_test.json", entries)
    about = {"7": {"file": "7_abc.jpg", "original_size": [16, 8]}}
    dump(folder / "images.json", about)
    write_photo(folder / "images" / "7.jpg", (4, 4))
    return flickr30k_phrases(root, look=look, count=None)


def test_boxes_follow_a_photo_that_was_made_smaller(tmp_path, write_photo):
    whole = flickr(tmp_path, write_photo)
    assert len(whole) == 4 and whole.batch([0]).boxes[0, 0].tolist() == [1, 2, 4, 6]
    shown = flickr(tmp_path, write_photo, Look((4, 4), stretch))
    batch = shown.batch([0, 1])
    assert len(shown) == 3  # one photo is not there
    assert batch.boxes[0].tolist() == [[0.25, 1, 1, 3], [1, 0, 1.5, 1]]
    covered = batch.sample_geometry.cover_boxes(batch.boxes, (1, 1))[0, :, 0]
    torch.testing.assert_close(covered, torch.tensor([0.75 * 2 / 16, 0.5 * 1 / 16]))


def official(root: Path, split: str = "train", **options) -> Expressions:
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
    dump(folder / "instances.json", instances)
    dump(folder / "refs(unc).json", refs)
    return refer(root, split, **options)


def test_the_official_release(tmp_path):
    batch = official(tmp_path).batch([0, 1])
    assert batch.ids == ("refcoco/5", "refcoco/6") and batch.text.texts == ("the table", "wood")
    assert batch.boxes[0].tolist() == [[1, 2, 4, 6], [0, 0, 8, 8]]
    assert batch.labels.tolist() == [1, 1] and batch.groups == ("table", "table")
    assert official(tmp_path, "testA").batch([0]).labels.tolist() == [0]
    with pytest.raises(BadInput, match="no split 'val'; it has testA, train"):
        official(tmp_path, "val")


def test_a_pickle_is_never_read(tmp_path):
    official(tmp_path)
    folder = tmp_path / "refcoco" / "refcoco"
    (folder / "refs(unc).json").unlink()
    (folder / "refs(unc).p").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(BadInput, match=r"is a pickle.*never read: turn it into refs\(unc\)\.json"):
        refer(tmp_path)
    assert not Path("hacked").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"box": [1, 2, 0, 4]}, "entry 1 is no phrase with a box"),
        ({"box": [1, 2, 3]}, "entry 1 is no phrase with a box"),
        ({"box": [1, 2, "x", 4]}, "entry 1 is no phrase with a box"),
        ({"box": [1, 2, float("inf"), 4]}, "entry 1"),
        ({"phrase": []}, "entry 1 has no words"),
        ({"phrase": None}, "entry 1 is no phrase"),
        ({"categories": 3}, "entry 1 is no phrase"),
    ],
)
def test_broken_entries_are_named(tmp_path, wrong, said):
    with pytest.raises(Damaged, match=said):
        flat(tmp_path, [ENTRIES[0], {**ENTRIES[1], **wrong}])


def test_what_is_missing_or_broken_is_named(tmp_path):
    found = flat(tmp_path)
    with pytest.raises(Damaged, match="4 expressions, not 5726"):
        refcoco(tmp_path)
    with pytest.raises(BadInput, match=r"no flat file of refcoco train.*refcocog test"):
        refcoco(tmp_path, "train", "refcoco")
    with pytest.raises(BadInput, match="test alone"):
        flickr30k_phrases(tmp_path, "train")
    for place in (-1, 4):
        with pytest.raises(BadInput, match=f"0 to 3, not {place}"):
            found.batch([place])
    with pytest.raises(BadInput, match="no expression"):
        flat(tmp_path, [])
    with pytest.raises(BadInput, match=r"refcocog_test\.json is missing"):
        refcoco(tmp_path, "test", "refcocog")
    with pytest.raises(BadInput, match=r"instances\.json is missing"):
        refer(tmp_path)
    official(tmp_path)
    folder = tmp_path / "refcoco" / "refcoco"
    dump(folder / "refs(unc).json", [{"split": "train", "ann_id": 5, "sentences": []}])
    with pytest.raises(Damaged, match="thing 5, which is not there"):
        refer(tmp_path)
    dump(folder / "refs(unc).json", [{"split": "train"}])
    with pytest.raises(Damaged, match="entry 0 has no split, ann_id"):
        refer(tmp_path)
    dump(folder / "instances.json", {"images": [], "annotations": [{}], "categories": []})
    with pytest.raises(Damaged, match="no list of things"):
        refer(tmp_path)


def test_digests_tell_files_apart(tmp_path):
    before = flat(tmp_path).digest()
    assert flat(tmp_path).digest() == before
    assert flat(tmp_path, ENTRIES[:3]).digest() != before


def test_real_refcoco(data_root, needs):
    needs(data_root, "refcoco")
    for (name, split), (_, count) in FLAT.items():
        found = refcoco(data_root, split, name)
        assert len(found) == count
        batch = found.batch(range(0, count, 500))
        assert bool(batch.region_mask.gather(1, batch.labels[:, None]).all())
        batch.target.check()
    assert sets.check(data_root, "refcoco") == []


def test_real_flickr30k_phrases(data_root, needs):
    needs(data_root, "flickr30k_entities")
    assert len(flickr30k_phrases(data_root)) == 14_481
    shown = flickr30k_phrases(data_root, look=Look((64, 64), stretch))
    assert len(shown.files) == 285
    batch = shown.batch(range(0, len(shown), 400))
    size = batch.sample_geometry.size.flip(-1).repeat(1, 2)[:, None]
    inside = batch.boxes <= size + 1.5  # a pixel of rounding
    assert bool(inside[batch.region_mask].all())
