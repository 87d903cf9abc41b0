import json
from pathlib import Path

import pytest
import torch

from overt.data.dataset import Dataset
from overt.data.flickr30k_entities import Flickr30kEntities, VgpPairs, read_boxes, read_sentence
from overt.data.images import stretch
from overt.data.vocabulary import BEGIN, END, Vocabulary
from overt.data.vqa_dataset import PhotoInput
from overt.errors import CorruptFileError, UserError

SENTENCES = [
    "[/EN#1/people Two men] in [/EN#2/clothing hats] talk .",
    "A talk by [/EN#3/scene the sea] of [/EN#1/people/other friends] .",
]
XML = """<annotation>
  <filename>{photo}.jpg</filename>
  <size><width>16</width><height>8</height><depth>3</depth></size>
  <object><name>1</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>8</ymax></bndbox>
  </object>
  <object><name>1</name><name>2</name>
    <bndbox><xmin>9</xmin><ymin>3</ymin><xmax>10</xmax><ymax>4</ymax></bndbox></object>
  <object><name>3</name><scene>1</scene><nobndbox>1</nobndbox></object>
</annotation>"""


def write_entities(root: Path, write_photo) -> Path:
    folder = root / "flickr30k_entities"
    for name in ("Sentences", "Annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for photo, split in ((7, "train"), (8, "val"), (9, "test")):
        (folder / f"{split}.txt").write_text(f"{photo}\n")
        (folder / "Sentences" / f"{photo}.txt").write_text("\n".join(SENTENCES) + "\n")
        (folder / "Annotations" / f"{photo}.xml").write_text(XML.format(photo=photo))
        write_photo(folder / "images" / f"{photo}.jpg", (4, 8))
    pairs = [
        {
            "image": "7",
            "split": "train",
            "has_image": True,
            "pos": [["two men", "friends"]],
            "neg": [["two men", "hats"], ["hats", "the sea"]],
        },
        {"image": "99", "split": "train", "has_image": False, "pos": [["a", "b"]], "neg": []},
        {"image": "8", "split": "val", "has_image": True, "pos": [], "neg": [["hats", "men"]]},
    ]
    (folder / "vgp_pairs.json").write_text(json.dumps(pairs))
    return folder


def open_entities(root: Path, split: str = "train", **options) -> Flickr30kEntities:
    return Flickr30kEntities(root, split, **{"photos": None, **options})


def test_entity_markup_is_parsed_into_phrases():
    found = read_sentence(SENTENCES[1])
    assert found.text == "A talk by the sea of friends ."
    phrases = [(found.text[p.start : p.end], p.entity, p.kinds) for p in found.phrases]
    assert phrases == [("the sea", "3", ("scene",)), ("friends", "1", ("people", "other"))]
    assert read_sentence("no mark [here]").text == "no mark [here]"
    for broken in ("[/EN#1/people Two men", "[/EN#x/people Two]"):
        with pytest.raises(UserError, match="markup"):
            read_sentence(broken)


def test_batches_match_hand_computed_values(tmp_path, write_photo):
    write_entities(tmp_path, write_photo)
    found = open_entities(tmp_path)
    batch = found.batch([1, 0])
    assert isinstance(found, Dataset) and len(found) == 2
    assert batch.ids == ("flickr30k/7#1", "flickr30k/7#0")
    assert batch.text.texts[1] == "Two men in hats talk ."
    assert batch.boxes[0].tolist() == [[0, 0, 4, 8], [8, 2, 10, 4], [8, 2, 10, 4]]
    assert batch.region_mask.all() and batch.images is None
    weights = batch.target.weights[1, 0, 0]
    men = [0.5, 0.5, 0]
    assert weights[:6].tolist() == [men, men, [0] * 3, [0, 0, 1], [0] * 3, [0] * 3]
    assert batch.target.rows[1].tolist() == [True, True, False, True, *[False] * 5][: len(weights)]
    assert batch.target.rows[0].sum() == 1  # the sea has no box
    batch.target.check()


def test_boxes_are_scaled_with_the_photo(tmp_path, write_photo):
    write_entities(tmp_path, write_photo)
    batch = open_entities(tmp_path, photo_input=PhotoInput((4, 4), stretch)).batch([0, 1])
    assert batch.images.shape == (1, 3, 4, 4) and batch.image_of.tolist() == [0, 0]
    assert batch.boxes[0, 0].tolist() == [0, 0, 2, 4]  # half as wide, half as high


def test_vocabulary_comes_from_train(tmp_path, write_photo):
    folder = write_entities(tmp_path, write_photo)
    (folder / "Sentences" / "9.txt").write_text("[/EN#1/animals A zebra] runs .\n")
    assert open_entities(tmp_path, "test").reader == open_entities(tmp_path).reader
    assert len(open_entities(tmp_path, "test")) == 1


def test_phrase_pairs_match_hand_computed_values(tmp_path, write_photo):
    write_entities(tmp_path, write_photo)
    found = VgpPairs(tmp_path)
    batch = found.batch([0, 1, 3])
    assert isinstance(found, Dataset) and len(found) == 4
    assert batch.labels.tolist() == [1, 0, 1] and batch.references[0] == ("two men", "friends")
    first = batch.tokens[0].tolist()
    assert first[0] == BEGIN and first[3] == END and first[5] == END
    assert batch.text.tokens(0)[:6] == ["", "two", "men", "", "friends", ""]
    shown = VgpPairs(tmp_path, photo_input=PhotoInput((4, 4), stretch))
    assert len(shown) == 3 and shown.batch([0, 2]).images.shape == (1, 3, 4, 4)
    val = VgpPairs(tmp_path, "val")
    assert val.reader == found.reader and val.digest() != found.digest() != shown.digest()
    with pytest.raises(UserError, match=r"no pairs.*test"):
        VgpPairs(tmp_path, "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<annotation>", "list.*boxes"),
        ("<annotation><size/></annotation>", "list.*boxes"),
        (XML.format(photo=7).replace("<xmax>4<", "<xmax>0<"), "the box"),
        (XML.format(photo=7).replace("<xmax>4<", "<xmax>wide<"), "list.*boxes"),
        (
            XML.format(photo=7).replace("<xmin>9<", "<xmin>90<").replace("<xmax>10<", "<xmax>99<"),
            r"\[90, .*photo",
        ),
        ('<!DOCTYPE x [<!ENTITY a "b">]>' + XML.format(photo=7), "with declarations"),
        ("x" * 1_000_001, "too long"),
    ],
)
def test_invalid_boxes_raise(tmp_path, write_photo, content, message):
    path = write_entities(tmp_path, write_photo) / "Annotations" / "7.xml"
    path.write_text(content)
    with pytest.raises(CorruptFileError, match=message):
        read_boxes(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"image": "7", "split": "train", "pos": []}, "entry 0 .*image"),
        ({"image": "7", "split": "train", "pos": [["a"]], "neg": []}, "not.*pair"),
        ({"image": "7", "split": "train", "pos": [["a", ""]], "neg": []}, "not.*pair"),
    ],
)
def test_invalid_pairs_raise(tmp_path, write_photo, entry, message):
    folder = write_entities(tmp_path, write_photo)
    (folder / "vgp_pairs.json").write_text(json.dumps([entry]))
    with pytest.raises(CorruptFileError, match=message):
        VgpPairs(tmp_path)


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path, write_photo):
    folder = write_entities(tmp_path, write_photo)
    with pytest.raises(CorruptFileError, match=r"1 photos.*29783"):
        Flickr30kEntities(tmp_path)
    for reader in (open_entities, VgpPairs):
        with pytest.raises(UserError, match="train, val and test"):
            reader(tmp_path, "all")
        with pytest.raises(UserError, match="9 is out"):
            reader(tmp_path).batch([9])
    (folder / "Sentences" / "7.txt").write_text("[/EN#1/people Two men\n")
    with pytest.raises(CorruptFileError, match=r"7\.txt.*line 1 "):
        open_entities(tmp_path)
    (folder / "Annotations" / "8.xml").unlink()
    with pytest.raises(UserError, match=r"8\.xml.*missing"):
        open_entities(tmp_path, "val")
    (folder / "images" / "9.jpg").unlink()
    with pytest.raises(CorruptFileError, match=r"9\.jpg.*missing"):
        open_entities(tmp_path, "test", reader=Vocabulary(("men",)), photo_input=PhotoInput((4, 4)))
    (folder / "test.txt").write_text("../../secret\n")
    with pytest.raises(CorruptFileError, match=r"not.*photo id"):
        open_entities(tmp_path, "test", reader=Vocabulary(("men",)))


def test_digest_depends_on_split_and_contents(tmp_path, write_photo):
    folder = write_entities(tmp_path, write_photo)
    before = open_entities(tmp_path).digest()
    assert open_entities(tmp_path).digest() == before != open_entities(tmp_path, "val").digest()
    (folder / "Sentences" / "7.txt").write_text("Other words .\n")
    assert open_entities(tmp_path).digest() != before


@pytest.mark.long
def test_real_phrase_pairs(data_root, needs):
    needs(data_root, "flickr30k_entities")
    sizes = [len(VgpPairs(data_root, split)) for split in ("train", "val", "test")]
    assert sum(sizes) == 9_386 + 54_615
    shown = VgpPairs(data_root, "val", photo_input=PhotoInput((32, 32), stretch))
    assert len(shown.files) == 29
    labels = shown.batch(range(0, len(shown), 50)).labels
    assert set(labels.tolist()) == {0, 1} and torch.is_tensor(labels)
