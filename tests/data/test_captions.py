import json
from pathlib import Path

import pytest

from overt.data import sets
from overt.data.asked import Look, gallery
from overt.data.captions import (
    Captions,
    each_photo,
    flickr8k,
    flickr30k,
    karpathy,
    read_judgements,
    read_tokens,
)
from overt.data.features import Key, build
from overt.data.images import stretch
from overt.data.source import Source
from overt.data.vocabulary import BEGIN, END, UNKNOWN, SubWords, Vocabulary
from overt.errors import BadInput, Damaged

PHOTOS = {"a.jpg": "train", "b.jpg": "dev", "c.jpg": "test"}


def write(root: Path, write_photo) -> Path:
    folder = root / "flickr8k"
    folder.mkdir()
    lines = []
    for photo, part in PHOTOS.items():
        (folder / f"Flickr_8k.{part}Images.txt").write_text(f"{photo}\n")
        lines += [f"{photo}#{n}\tA {photo[0]} dog number {n} ." for n in range(2)]
        write_photo(folder / "Flicker8k_Dataset" / photo, (6, 8))
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    (folder / "ExpertAnnotations.txt").write_text("c.jpg\ta.jpg#1\t1\t2\t4\n")
    return folder


def small(root: Path, split: str = "train", **options) -> Captions:
    return flickr8k(root, split, **{"sizes": None, "minimum": 1, **options})


def test_batches_by_hand(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, look=Look((4, 4), stretch))
    batch = found.batch([1, 0])
    assert isinstance(found, Source) and len(found) == 2
    assert batch.ids == ("flickr8k/a.jpg#1", "flickr8k/a.jpg#0")
    assert batch.text.tokens(0) == ["", "A", "a", "dog", "number", "1", ".", ""]
    assert batch.tokens[0, 0] == BEGIN and batch.tokens[0, -1] == END
    assert batch.references[0] == ("A a dog number 0 .", "A a dog number 1 .")
    assert batch.images.shape == (1, 3, 4, 4) and batch.image_of.tolist() == [0, 0]


def test_words_alone_and_words_of_train(tmp_path, write_photo):
    write(tmp_path, write_photo)
    test = small(tmp_path, "test")
    batch = test.batch([0])
    assert batch.images is None and test.files == ()
    assert batch.tokens[0, 2] == UNKNOWN  # "c" is no word of train
    assert small(tmp_path, "val").reader == test.reader == small(tmp_path).reader
    assert "0" not in small(tmp_path, minimum=2).reader.words
    assert small(tmp_path, vocabulary=Vocabulary(("dog",))).reader.size == 6


def test_sub_words_stand_in_for_words(tmp_path, write_photo):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    write(tmp_path, write_photo)
    pieces = SubWords.build([["a", "dog", "number"]] * 3, limit=270)
    found = small(tmp_path, "test", vocabulary=pieces)
    batch = found.batch([0])
    ids = batch.tokens[0][batch.token_mask[0]].tolist()
    assert ids[0] == BEGIN and ids[-1] == END and UNKNOWN not in ids
    assert pieces.text(ids) == "a c dog number 0 ."
    assert [one for one in batch.text.tokens(0) if one][:3] == ["A", "c", "dog"]


def test_an_item_a_photo(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, "test", items=each_photo)
    assert len(found) == 1 and len(found.batch([0]).references[0]) == 2
    assert found.digest() != small(tmp_path, "test").digest()


def test_features_stand_in_for_photos(tmp_path, write_photo):
    folder = write(tmp_path, write_photo) / "Flicker8k_Dataset"
    shown = gallery("flickr8k", "train", folder, ["a.jpg"], Look((4, 4)))
    key = Key("mean", "none", "4 x 4", "toy")
    cache = build(tmp_path / "cache", key, shown, lambda b: b.images.float().flatten(2).mT)
    (folder / "a.jpg").unlink()
    batch = small(tmp_path, look=Look(features=cache)).batch([0, 1])
    assert batch.features.shape == (2, 16, 3) and batch.images is None


def write_karpathy(root: Path, name: str = "coco", images: list | None = None) -> None:
    parts = ("train", "restval", "val", "test")
    made = [
        {
            "filepath": "val2014",
            "sentids": [number],
            "filename": f"COCO_val2014_{number:012d}.jpg",
            "imgid": number,
            "split": part,
            "sentences": [{"tokens": ["a"], "raw": f" A cat {part} .", "sentid": number}],
            "cocoid": number,
        }
        for number, part in enumerate(parts)
    ]
    (root / "captions").mkdir(exist_ok=True)
    value = {"images": made if images is None else images, "dataset": name}
    (root / "captions" / f"dataset_{name}.json").write_text(json.dumps(value))


def test_karpathy_splits(tmp_path):
    write_karpathy(tmp_path)
    train = karpathy(tmp_path, minimum=1)
    assert [one.captions for one in train.photos] == [("A cat train .",), ("A cat restval .",)]
    assert train.batch([0]).ids == ("coco-captions/val2014/COCO_val2014_000000000000.jpg#0",)
    test = karpathy(tmp_path, "test", minimum=1)
    assert len(test) == 1 and test.reader == train.reader
    assert test.digest() != train.digest() == karpathy(tmp_path, minimum=1).digest()
    with pytest.raises(Damaged, match=r"val2014/COCO_val2014_000000000003\.jpg is missing"):
        karpathy(tmp_path, "test", look=Look())


def test_flickr30k_has_a_file_and_a_folder_of_its_own(tmp_path):
    image = {"filename": "7.jpg", "split": "test", "sentences": [{"raw": "A dog ."}]}
    write_karpathy(tmp_path, "flickr30k", [image, {**image, "split": "train"}])
    found = flickr30k(tmp_path, "test")
    assert [one.photo for one in found.photos] == ["7.jpg"] and len(found) == 1
    assert found.batch([0]).ids == ("flickr30k-captions/7.jpg#0",)
    with pytest.raises(Damaged, match=r"7\.jpg is missing"):
        karpathy(tmp_path, "test", "flickr30k", look=Look())


@pytest.mark.parametrize(
    "entry",
    [
        {"filename": "a.jpg", "split": "train"},
        {"filename": "a.jpg", "split": "train", "sentences": []},
        {"filename": "a.jpg", "split": "train", "sentences": [{}]},
        {"filename": "a.jpg", "split": "train", "sentences": [{"raw": " "}]},
        {"filename": 3, "split": "train", "sentences": [{"raw": "x"}]},
    ],
)
def test_broken_entries_are_named(tmp_path, entry):
    write_karpathy(tmp_path, images=[entry])
    with pytest.raises(Damaged, match="entry 0 has no filename"):
        karpathy(tmp_path)


def test_what_is_missing_or_broken_is_named(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    with pytest.raises(Damaged, match="1 photos, not 6000"):
        flickr8k(tmp_path)
    with pytest.raises(BadInput, match="train, val and test"):
        small(tmp_path, "all")
    with pytest.raises(BadInput, match="0 to 1, not 2"):
        small(tmp_path).batch([2])
    with pytest.raises(BadInput, match="choose from flickr8k"):
        karpathy(tmp_path, name="voc")
    with pytest.raises(BadInput, match=r"dataset_coco\.json is missing"):
        karpathy(tmp_path)
    write_karpathy(tmp_path, images=[])
    with pytest.raises(BadInput, match="no photo"):
        karpathy(tmp_path)
    (folder / "Flickr_8k.testImages.txt").write_text("z.jpg\n")
    with pytest.raises(Damaged, match=r"no caption of z\.jpg"):
        small(tmp_path, "test")
    for line in ("a.jpg\tno number", "a.jpg#1\tsecond first", "#0\tno photo", "a.jpg#0\t"):
        (folder / "Flickr8k.token.txt").write_text(line + "\n")
        with pytest.raises(Damaged, match="line 1 is not"):
            read_tokens(folder / "Flickr8k.token.txt")


def test_judgements(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    (found,) = read_judgements(tmp_path)
    assert (found.photo, found.caption, found.scores) == ("c.jpg", "A a dog number 1 .", (1, 2, 4))
    for line in ("c.jpg\ta.jpg#9\t1\t2\t4", "c.jpg\ta.jpg#1\t1\t2", "c.jpg\ta.jpg#1\t1\t2\t5"):
        (folder / "ExpertAnnotations.txt").write_text(line + "\n")
        with pytest.raises(Damaged, match="line 1 is no judgement"):
            read_judgements(tmp_path)


def test_real_flickr8k(data_root, needs):
    needs(data_root, "flickr8k")
    train = flickr8k(data_root)
    assert len(train) == 30_000 and len(train.photos) == 6_000
    test = flickr8k(data_root, "test", items=each_photo, look=Look((32, 32), stretch))
    assert len(test) == 1_000 and test.batch([0, 5]).images.shape == (2, 3, 32, 32)
    assert len(read_judgements(data_root)) == 5_822
    assert sets.find("flickr8k").opens
