import json
from pathlib import Path

import pytest

from overt.data.captions import (
    Captions,
    each_photo,
    flickr8k,
    flickr30k,
    karpathy,
    read_judgements,
    read_tokens,
)
from overt.data.dataset import Dataset
from overt.data.images import stretch
from overt.data.vocabulary import BEGIN, END, UNKNOWN, BpeVocabulary, Vocabulary
from overt.data.vqa_dataset import PhotoInput, open_photos
from overt.errors import CorruptFileError, UserError

PHOTOS = {"a.jpg": "train", "b.jpg": "dev", "c.jpg": "test"}


def write_flickr8k(root: Path, write_photo) -> Path:
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


def open_flickr8k(root: Path, split: str = "train", **options) -> Captions:
    return flickr8k(root, split, **{"sizes": None, "minimum": 1, **options})


def test_batches_match_hand_computed_values(tmp_path, write_photo):
    write_flickr8k(tmp_path, write_photo)
    found = open_flickr8k(tmp_path, photo_input=PhotoInput((4, 4), stretch))
    batch = found.batch([1, 0])
    assert isinstance(found, Dataset) and len(found) == 2
    assert batch.ids == ("flickr8k/a.jpg#1", "flickr8k/a.jpg#0")
    assert batch.text.tokens(0) == ["", "A", "a", "dog", "number", "1", ".", ""]
    assert batch.tokens[0, 0] == BEGIN and batch.tokens[0, -1] == END
    assert batch.references[0] == ("A a dog number 0 .", "A a dog number 1 .")
    assert batch.images.shape == (1, 3, 4, 4) and batch.image_of.tolist() == [0, 0]


def test_text_only_batches_use_the_vocabulary_of_train(tmp_path, write_photo):
    write_flickr8k(tmp_path, write_photo)
    test = open_flickr8k(tmp_path, "test")
    batch = test.batch([0])
    assert batch.images is None and test.files == ()
    assert batch.tokens[0, 2] == UNKNOWN  # "c" is not a word of train
    assert open_flickr8k(tmp_path, "val").reader == test.reader == open_flickr8k(tmp_path).reader
    assert "0" not in open_flickr8k(tmp_path, minimum=2).reader.words
    assert open_flickr8k(tmp_path, vocabulary=Vocabulary(("dog",))).reader.size == 6


def test_subwords_can_replace_words(tmp_path, write_photo):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    write_flickr8k(tmp_path, write_photo)
    pieces = BpeVocabulary.build([["a", "dog", "number"]] * 3, limit=270)
    found = open_flickr8k(tmp_path, "test", vocabulary=pieces)
    batch = found.batch([0])
    ids = batch.tokens[0][batch.token_mask[0]].tolist()
    assert ids[0] == BEGIN and ids[-1] == END and UNKNOWN not in ids
    assert pieces.text(ids) == "a c dog number 0 ."
    assert [one for one in batch.text.tokens(0) if one][:3] == ["A", "c", "dog"]


def test_each_photo_gives_one_item_per_photo(tmp_path, write_photo):
    write_flickr8k(tmp_path, write_photo)
    found = open_flickr8k(tmp_path, "test", items=each_photo)
    assert len(found) == 1 and len(found.batch([0]).references[0]) == 2
    assert found.digest() != open_flickr8k(tmp_path, "test").digest()


def test_cached_features_replace_photos(tmp_path, write_photo, cache_pixels):
    folder = write_flickr8k(tmp_path, write_photo) / "Flicker8k_Dataset"
    shown = open_photos("flickr8k", "train", folder, ["a.jpg"], PhotoInput((4, 4)))
    cache = cache_pixels(tmp_path / "cache", shown)
    (folder / "a.jpg").unlink()
    batch = open_flickr8k(tmp_path, photo_input=PhotoInput(features=cache)).batch([0, 1])
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


def test_karpathy_train_includes_restval(tmp_path):
    write_karpathy(tmp_path)
    train = karpathy(tmp_path, minimum=1)
    assert [one.captions for one in train.photos] == [("A cat train .",), ("A cat restval .",)]
    assert train.batch([0]).ids == ("coco-captions/val2014/COCO_val2014_000000000000.jpg#0",)
    test = karpathy(tmp_path, "test", minimum=1)
    assert len(test) == 1 and test.reader == train.reader
    assert test.digest() != train.digest() == karpathy(tmp_path, minimum=1).digest()
    with pytest.raises(CorruptFileError, match=r"val2014/.*0003\.jpg"):
        karpathy(tmp_path, "test", photo_input=PhotoInput())


def test_flickr30k_is_read_from_its_file_and_folder(tmp_path):
    image = {"filename": "7.jpg", "split": "test", "sentences": [{"raw": "A dog ."}]}
    write_karpathy(tmp_path, "flickr30k", [image, {**image, "split": "train"}])
    found = flickr30k(tmp_path, "test")
    assert [one.photo for one in found.photos] == ["7.jpg"] and len(found) == 1
    assert found.batch([0]).ids == ("flickr30k-captions/7.jpg#0",)
    with pytest.raises(CorruptFileError, match=r"7\.jpg is missing"):
        karpathy(tmp_path, "test", "flickr30k", photo_input=PhotoInput())


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
def test_invalid_entries_raise_with_their_number(tmp_path, entry):
    write_karpathy(tmp_path, images=[entry])
    with pytest.raises(CorruptFileError, match=r"entry 0 has"):
        karpathy(tmp_path)


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path, write_photo):
    folder = write_flickr8k(tmp_path, write_photo)
    with pytest.raises(CorruptFileError, match=r"1 photos.*6000"):
        flickr8k(tmp_path)
    with pytest.raises(UserError, match="train, val and test"):
        open_flickr8k(tmp_path, "all")
    with pytest.raises(UserError, match=r"2 \w+: 2 is out"):
        open_flickr8k(tmp_path).batch([2])
    with pytest.raises(UserError, match=r"choose.*flickr8k"):
        karpathy(tmp_path, name="voc")
    with pytest.raises(UserError, match=r"dataset_coco\.json"):
        karpathy(tmp_path)
    write_karpathy(tmp_path, images=[])
    with pytest.raises(UserError, match="no photo"):
        karpathy(tmp_path)
    (folder / "Flickr_8k.testImages.txt").write_text("z.jpg\n")
    with pytest.raises(CorruptFileError, match=r"caption.*z\.jpg"):
        open_flickr8k(tmp_path, "test")
    for line in ("a.jpg\tno number", "a.jpg#1\tsecond first", "#0\tno photo", "a.jpg#0\t"):
        (folder / "Flickr8k.token.txt").write_text(line + "\n")
        with pytest.raises(CorruptFileError, match="line 1 is not"):
            read_tokens(folder / "Flickr8k.token.txt")


def test_expert_judgements_are_read_from_lines(tmp_path, write_photo):
    folder = write_flickr8k(tmp_path, write_photo)
    (found,) = read_judgements(tmp_path)
    assert (found.photo, found.caption, found.scores) == ("c.jpg", "A a dog number 1 .", (1, 2, 4))
    for line in ("c.jpg\ta.jpg#9\t1\t2\t4", "c.jpg\ta.jpg#1\t1\t2", "c.jpg\ta.jpg#1\t1\t2\t5"):
        (folder / "ExpertAnnotations.txt").write_text(line + "\n")
        with pytest.raises(CorruptFileError, match="line 1 is not"):
            read_judgements(tmp_path)


@pytest.mark.long
def test_real_flickr8k(data_root, needs):
    needs(data_root, "flickr8k")
    train = flickr8k(data_root)
    assert len(train) == 30_000 and len(train.photos) == 6_000
    test = flickr8k(data_root, "test", items=each_photo, photo_input=PhotoInput((32, 32), stretch))
    assert len(test) == 1_000 and test.batch([0, 5]).images.shape == (2, 3, 32, 32)
    assert len(read_judgements(data_root)) == 5_822
