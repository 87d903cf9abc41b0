from pathlib import Path

import pytest
import torch

from overt.data import catalog, daquar
from overt.data.daquar import Daquar, any_answers, question_kind, read_table
from overt.data.dataset import Dataset
from overt.data.images import stretch
from overt.data.vqa_dataset import PhotoInput
from overt.errors import CorruptFileError, UserError
from overt.metrics import mean, soft_accuracy

LINES = [
    "what is on the table,cup,image1",
    'what are the objects on the desk,"book, red_pen",image1',
    "how many chairs are there,2,image2",
    "what is the colour of the wall,white,image3",
    "what is behind the sofa,lamp,image4",
    "how many cups are there,7,image5",
    "what is on the bed,cup,image5",
]


def write_daquar(root: Path, write_photo, lines: list[str] = LINES) -> Path:
    folder = root / daquar.FOLDER
    for number in range(1, 6):
        write_photo(folder / "images" / f"image{number}.jpg", (6, 8), 40 * number)
    (folder / daquar.TABLE).write_text("\n".join(["question,answer,image_id", *lines]) + "\n")
    (folder / daquar.TRAIN_LIST).write_text("image1\nimage2\nimage3\nimage4\n")
    (folder / daquar.TEST_LIST).write_text("image5\n")
    return folder


def open_daquar(root: Path, split: str = "train", **options) -> Daquar:
    options = {
        "photo_input": PhotoInput((4, 4), stretch),
        "questions": None,
        "validation": 1,
        **options,
    }
    return Daquar(root, split, **options)


def test_batches_match_hand_computed_values(tmp_path, write_photo):
    write_daquar(tmp_path, write_photo)
    found = open_daquar(tmp_path, "test")
    batch = found.batch([1, 0])
    assert isinstance(found, Dataset) and len(found) == 2
    assert batch.ids == ("daquar/00006", "daquar/00005")
    assert batch.images.shape == (1, 3, 4, 4) and batch.image_of.tolist() == [0, 0]
    assert batch.text.texts == ("what is on the bed", "how many cups are there")
    assert batch.references == (("cup",), ("7",)) and batch.groups == ("object", "number")


def test_answers_outside_train_count_as_wrong(tmp_path, write_photo):
    write_daquar(tmp_path, write_photo)
    found = open_daquar(tmp_path, "test", validation=0)
    assert set(found.classes) == {"cup", "2", "white", "lamp"} and found.classes[0] == "2"
    batch = found.batch(range(2))
    assert batch.labels.tolist() == [-1, found.classes.index("cup")]
    assert batch.answers.sum(dim=1).tolist() == [0, 1]
    perfect = torch.eye(4)[batch.labels.clamp_min(0)]
    assert mean(soft_accuracy(perfect, batch.answers)) == 0.5


def test_any_answers_keeps_questions_with_several_answers(tmp_path, write_photo):
    write_daquar(tmp_path, write_photo)
    assert len(open_daquar(tmp_path, "train+val")) == 4
    found = open_daquar(tmp_path, "train+val", keep=any_answers, validation=0)
    assert len(found) == 5 and "book, red_pen" in found.classes
    assert found.batch([1]).references == (("book", "red_pen"),)


def test_val_shares_the_vocabulary_but_no_photos_with_train(tmp_path, write_photo):
    write_daquar(tmp_path, write_photo)
    train, val = open_daquar(tmp_path), open_daquar(tmp_path, "val")
    assert len(train) + len(val) == 4
    assert not set(train.photo_ids(range(len(train)))) & set(val.photo_ids(range(len(val))))
    assert train.classes == val.classes == open_daquar(tmp_path, "test").classes
    assert train.reader == val.reader and train.reader != open_daquar(tmp_path, validation=0).reader
    answer = val.batch([0]).references[0][0]
    assert answer not in train.classes or answer == "cup"
    assert open_daquar(tmp_path, limit=1, validation=0).classes == ("2",)


def test_photos_are_a_dataset_of_images(tmp_path, write_photo):
    write_daquar(tmp_path, write_photo)
    found = open_daquar(tmp_path, "train+val")
    alone = found.photos(PhotoInput((2, 2)))
    assert alone.ids(range(len(alone))) == tuple(dict.fromkeys(found.photo_ids(range(4))))
    assert alone.batch([0]).images.shape == (1, 3, 2, 2)


def test_first_release_gives_the_same_samples(tmp_path, write_photo):
    folder = write_daquar(tmp_path, write_photo)
    table = open_daquar(tmp_path, "train+val", keep=any_answers)
    before = table.digest()
    lines: dict[str, list[str]] = {daquar.RAW_TRAIN: [], daquar.RAW_TEST: []}
    for line in read_table(folder / daquar.TABLE, None):
        part = daquar.RAW_TEST if line.photo == "image5" else daquar.RAW_TRAIN
        lines[part] += [f"{line.question} in the {line.photo} ?", ", ".join(line.answers)]
    for name, some in lines.items():
        (folder / name).write_text("\n".join(some) + "\n")
    (folder / daquar.TABLE).unlink()
    raw = open_daquar(tmp_path, "train+val", keep=any_answers)
    found_batch, expected = raw.batch(range(len(raw))), table.batch(range(len(table)))
    assert (
        found_batch.text.texts == expected.text.texts
        and found_batch.references == expected.references
    )
    assert found_batch.labels.tolist() == expected.labels.tolist() and raw.digest() != before
    for photo in (folder / "images").glob("*.jpg"):
        photo.rename(photo.with_suffix(".png"))
    assert open_daquar(tmp_path, "test").photo_ids([0]) == ("daquar/image5.png",)
    for broken in ("what is it ?\ncup\n", "what is it in the image1 ?\n"):
        (folder / daquar.RAW_TEST).write_text(broken)
        with pytest.raises(CorruptFileError, match=r"test\.txt.*line 1 "):
            open_daquar(tmp_path)
    (folder / daquar.RAW_TEST).unlink()
    with pytest.raises(UserError, match=r"test\.txt.*missing"):
        open_daquar(tmp_path)


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
def test_question_kind_is_number_colour_or_object(question, expected):
    assert question_kind(question) == expected


@pytest.mark.parametrize(
    "line", ["what is it,cup", "what,cup,image1,x", ",cup,image1", 'what,"cup,,",image1', "a,b,"]
)
def test_invalid_line_raises_with_its_number(tmp_path, write_photo, line):
    write_daquar(tmp_path, write_photo, [*LINES[:2], line, *LINES[3:]])
    with pytest.raises(CorruptFileError, match=r"data\.csv: line 4"):
        open_daquar(tmp_path)


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path, write_photo):
    folder = write_daquar(tmp_path, write_photo)
    with pytest.raises(CorruptFileError, match=r"7 questions.*12468"):
        Daquar(tmp_path)
    for place in (-1, 2):
        with pytest.raises(UserError, match=str(place)):
            open_daquar(tmp_path, "test").batch([place])
    with pytest.raises(UserError, match=r"question.*keep="):
        open_daquar(tmp_path, keep=lambda answers: False)
    (folder / "images" / "image5.jpg").write_bytes(b"\xff\xd8\xff broken")
    with pytest.raises(CorruptFileError, match=r"image5\.jpg"):
        open_daquar(tmp_path, "test").batch([0])
    (folder / "images" / "image5.jpg").unlink()
    with pytest.raises(CorruptFileError, match=r"image5.jpg.*missing"):
        open_daquar(tmp_path, "test")
    (folder / daquar.TEST_LIST).write_text("image6\n")
    with pytest.raises(CorruptFileError, match=r"image5.*question 5"):
        open_daquar(tmp_path)
    (folder / daquar.TEST_LIST).write_text("image5\nimage1\n")
    with pytest.raises(CorruptFileError, match="image1 is in"):
        open_daquar(tmp_path)
    for content, message in [
        (b"question;answer\n", "does not start with"),
        (b"question,answer,image_id\n\xff,a,b\n", "not a table of text"),
        (b'question,answer,image_id\n"what,a,b\n', "not a table of text"),
    ]:
        (folder / daquar.TABLE).write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            read_table(folder / daquar.TABLE)
    (folder / daquar.TABLE).unlink()
    with pytest.raises(UserError, match=r"data\.csv.*missing"):
        open_daquar(tmp_path)


def test_digest_depends_on_data_split_and_answers(tmp_path, write_photo):
    write_daquar(tmp_path, write_photo)
    splits = ("train", "val", "test", "train+val")
    assert len({open_daquar(tmp_path, split).digest() for split in splits}) == 4
    before = open_daquar(tmp_path, "test").digest()
    assert open_daquar(tmp_path, "test", keep=any_answers).digest() != before
    write_photo(tmp_path / "daquar" / "images" / "image5.jpg", (6, 8), 7)
    assert open_daquar(tmp_path, "test").digest() != before


@pytest.mark.long
def test_real_daquar(data_root, needs):
    needs(data_root, "daquar")
    lengths = [len(Daquar(data_root, split)) for split in ("train", "val", "test")]
    assert lengths == [5_519, 630, 5_076]
    whole = [len(Daquar(data_root, split, any_answers)) for split in ("train+val", "test")]
    assert whole == [6_795, 5_673]  # as published
    test = Daquar(data_root, "test")
    labels = test.labels(range(len(test)))
    assert len(test.classes) == 442 and int((labels < 0).sum()) == 156
    batch = test.batch([0])
    assert batch.images.shape == (1, 3, 224, 224)
    assert batch.text.texts[0].startswith("what is on the left side of the white oven")


@pytest.mark.long
def test_real_daquar_checks(data_root, needs):
    needs(data_root, "daquar")
    assert catalog.check_dataset(data_root, "daquar") == []
