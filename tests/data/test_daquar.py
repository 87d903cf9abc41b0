from pathlib import Path

import pytest
import torch

from overt.data import daquar, sets
from overt.data.asked import Look
from overt.data.daquar import Daquar, any_number, kind, read_table
from overt.data.images import stretch
from overt.data.source import Source
from overt.errors import BadInput, Damaged
from overt.measure import mean, soft_accuracy

LINES = [
    "what is on the table,cup,image1",
    'what are the objects on the desk,"book, red_pen",image1',
    "how many chairs are there,2,image2",
    "what is the colour of the wall,white,image3",
    "what is behind the sofa,lamp,image4",
    "how many cups are there,7,image5",
    "what is on the bed,cup,image5",
]


def write(root: Path, write_photo, lines: list[str] = LINES) -> Path:
    folder = root / daquar.FOLDER
    for number in range(1, 6):
        write_photo(folder / "images" / f"image{number}.jpg", (6, 8), 40 * number)
    (folder / daquar.TABLE).write_text("\n".join(["question,answer,image_id", *lines]) + "\n")
    (folder / daquar.TRAIN_LIST).write_text("image1\nimage2\nimage3\nimage4\n")
    (folder / daquar.TEST_LIST).write_text("image5\n")
    return folder


def small(root: Path, split: str = "train", **options) -> Daquar:
    options = {"look": Look((4, 4), stretch), "questions": None, "validation": 1, **options}
    return Daquar(root, split, **options)


def test_batches_by_hand(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, "test")
    batch = found.batch([1, 0])
    assert isinstance(found, Source) and len(found) == 2
    assert batch.ids == ("daquar/00006", "daquar/00005")
    assert batch.images.shape == (1, 3, 4, 4) and batch.image_of.tolist() == [0, 0]
    assert batch.text.texts == ("what is on the bed", "how many cups are there")
    assert batch.references == (("cup",), ("7",)) and batch.groups == ("object", "number")


def test_an_answer_that_train_does_not_have_counts_as_wrong(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, "test", validation=0)
    assert set(found.classes) == {"cup", "2", "white", "lamp"} and found.classes[0] == "2"
    batch = found.batch(range(2))
    assert batch.labels.tolist() == [-1, found.classes.index("cup")]
    assert batch.answers.sum(dim=1).tolist() == [0, 1]
    perfect = torch.eye(4)[batch.labels.clamp_min(0)]
    assert mean(soft_accuracy(perfect, batch.answers)) == 0.5


def test_several_answers_are_kept_when_asked_for(tmp_path, write_photo):
    write(tmp_path, write_photo)
    assert len(small(tmp_path, "train+val")) == 4
    found = small(tmp_path, "train+val", keep=any_number, validation=0)
    assert len(found) == 5 and "book, red_pen" in found.classes
    assert found.batch([1]).references == (("book", "red_pen"),)


def test_val_has_photos_of_its_own_and_words_are_those_of_train(tmp_path, write_photo):
    write(tmp_path, write_photo)
    train, val = small(tmp_path), small(tmp_path, "val")
    assert len(train) + len(val) == 4
    assert not set(train.photo_ids(range(len(train)))) & set(val.photo_ids(range(len(val))))
    assert train.classes == val.classes == small(tmp_path, "test").classes
    assert train.reader == val.reader and train.reader != small(tmp_path, validation=0).reader
    held = val.batch([0]).references[0][0]
    assert held not in train.classes or held == "cup"
    assert small(tmp_path, limit=1, validation=0).classes == ("2",)


def test_the_photos_by_themselves(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, "train+val")
    alone = found.photos(Look((2, 2)))
    assert alone.ids(range(len(alone))) == tuple(dict.fromkeys(found.photo_ids(range(4))))
    assert alone.batch([0]).images.shape == (1, 3, 2, 2)


def test_the_first_release_is_the_same_set(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    table = small(tmp_path, "train+val", keep=any_number)
    before = table.digest()
    lines: dict[str, list[str]] = {daquar.RAW_TRAIN: [], daquar.RAW_TEST: []}
    for line in read_table(folder / daquar.TABLE, None):
        part = daquar.RAW_TEST if line.photo == "image5" else daquar.RAW_TRAIN
        lines[part] += [f"{line.question} in the {line.photo} ?", ", ".join(line.answers)]
    for name, some in lines.items():
        (folder / name).write_text("\n".join(some) + "\n")
    (folder / daquar.TABLE).unlink()
    raw = small(tmp_path, "train+val", keep=any_number)
    ours, theirs = raw.batch(range(len(raw))), table.batch(range(len(table)))
    assert ours.text.texts == theirs.text.texts and ours.references == theirs.references
    assert ours.labels.tolist() == theirs.labels.tolist() and raw.digest() != before
    for photo in (folder / "images").glob("*.jpg"):
        photo.rename(photo.with_suffix(".png"))
    assert small(tmp_path, "test").photo_ids([0]) == ("daquar/image5.png",)
    for broken in ("what is it ?\ncup\n", "what is it in the image1 ?\n"):
        (folder / daquar.RAW_TEST).write_text(broken)
        with pytest.raises(Damaged, match=r"test\.txt: line 1 is not a question"):
            small(tmp_path)
    (folder / daquar.RAW_TEST).unlink()
    with pytest.raises(BadInput, match=r"test\.txt is missing"):
        small(tmp_path)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("how many chairs are there", "number"),
        ("what is the colour of the wall", "colour"),
        ("what color are the walls", "colour"),
        ("which colours are there", "colour"),
        ("what is on the coloured table", "object"),
    ],
)
def test_what_is_asked_for(question, expected):
    assert kind(question) == expected


@pytest.mark.parametrize(
    "line", ["what is it,cup", "what,cup,image1,x", ",cup,image1", 'what,"cup,,",image1', "a,b,"]
)
def test_a_line_in_another_form_is_named(tmp_path, write_photo, line):
    write(tmp_path, write_photo, [*LINES[:2], line, *LINES[3:]])
    with pytest.raises(Damaged, match=r"data\.csv: line 4"):
        small(tmp_path)


def test_what_is_missing_or_broken_is_named(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    with pytest.raises(Damaged, match="7 questions, not 12468"):
        Daquar(tmp_path)
    for place in (-1, 2):
        with pytest.raises(BadInput, match=str(place)):
            small(tmp_path, "test").batch([place])
    with pytest.raises(BadInput, match="no question of the kind"):
        small(tmp_path, keep=lambda answers: False)
    (folder / "images" / "image5.jpg").write_bytes(b"\xff\xd8\xff broken")
    with pytest.raises(Damaged, match=r"image5\.jpg"):
        small(tmp_path, "test").batch([0])
    (folder / "images" / "image5.jpg").unlink()
    with pytest.raises(Damaged, match=r"image5\.jpg is missing"):
        small(tmp_path, "test")
    (folder / daquar.TEST_LIST).write_text("image6\n")
    with pytest.raises(Damaged, match="image5 of question 5 is in neither list"):
        small(tmp_path)
    (folder / daquar.TEST_LIST).write_text("image5\nimage1\n")
    with pytest.raises(Damaged, match="image1 is in"):
        small(tmp_path)
    for content, said in [
        (b"question;answer\n", "does not start with"),
        (b"question,answer,image_id\n\xff,a,b\n", "not a table of text"),
        (b'question,answer,image_id\n"what,a,b\n', "not a table of text"),
    ]:
        (folder / daquar.TABLE).write_bytes(content)
        with pytest.raises(Damaged, match=said):
            read_table(folder / daquar.TABLE)
    (folder / daquar.TABLE).unlink()
    with pytest.raises(BadInput, match=r"data\.csv is missing"):
        small(tmp_path)


def test_digest_tells_data_splits_and_kinds_apart(tmp_path, write_photo):
    write(tmp_path, write_photo)
    splits = ("train", "val", "test", "train+val")
    assert len({small(tmp_path, split).digest() for split in splits}) == 4
    before = small(tmp_path, "test").digest()
    assert small(tmp_path, "test", keep=any_number).digest() != before
    write_photo(tmp_path / "daquar" / "images" / "image5.jpg", (6, 8), 7)
    assert small(tmp_path, "test").digest() != before


def test_real_daquar(data_root, needs):
    needs(data_root, "daquar")
    lengths = [len(Daquar(data_root, split)) for split in ("train", "val", "test")]
    assert lengths == [5_519, 630, 5_076]
    whole = [len(Daquar(data_root, split, any_number)) for split in ("train+val", "test")]
    assert whole == [6_795, 5_673]  # as published
    test = Daquar(data_root, "test")
    labels = test.labels(range(len(test)))
    assert len(test.classes) == 442 and int((labels < 0).sum()) == 156
    batch = test.batch([0])
    assert batch.images.shape == (1, 3, 224, 224)
    assert batch.text.texts[0].startswith("what is on the left side of the white oven")


def test_real_daquar_checks(data_root, needs):
    needs(data_root, "daquar")
    assert sets.check(data_root, "daquar") == []
