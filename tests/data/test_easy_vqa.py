import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.easy_vqa import EasyVqa, question_family
from overt.data.splits import hold_out_indices
from overt.errors import CorruptFileError, UserError

QUESTIONS = [
    ["what color is it?", "red", 0],
    ["is there a circle?", "yes", 0],
    ["what shape is it?", "circle", 1],
    ["is it blue?", "no", 2],
    ["what color is the thing?", "red", 2],
]


def write_easyvqa(folder: Path, questions: list = QUESTIONS) -> Path:
    for part in ("train", "test"):
        (folder / part / "images").mkdir(parents=True, exist_ok=True)
        (folder / part / "questions.json").write_text(json.dumps(questions))
        for number in range(3):
            image = np.full((8, 8, 3), number * 50 + (part == "test"), np.uint8)
            Image.fromarray(image).save(folder / part / "images" / f"{number}.png")
    (folder / "answers.txt").write_text("circle\nred\nyes\nno\n\n")
    return folder


def open_easyvqa(root: Path, split: str = "train+val") -> EasyVqa:
    return EasyVqa(root, split, validation=1)


def test_batches_match_hand_computed_values(tmp_path):
    batch = open_easyvqa(write_easyvqa(tmp_path)).batch([4, 0, 3, 1])
    assert batch.ids == tuple(f"easyvqa/train/0000{row}" for row in (4, 0, 3, 1))
    assert batch.image_of.tolist() == [0, 1, 0, 1]
    assert batch.images[:, 0, 0, 0].tolist() == [100, 0] and batch.images.shape == (2, 3, 8, 8)
    assert batch.labels.tolist() == [1, 1, 3, 2]
    assert batch.groups == ("colour", "colour", "yes or no", "yes or no")
    assert batch.text.tokens(2) == ["is", "it", "blue", "?", "", ""]
    assert len(batch.geometry) == 2 and batch.geometry.canvas == (8, 8)


def test_batches_are_copies(tmp_path):
    found = open_easyvqa(write_easyvqa(tmp_path))
    first = found.batch([0, 2])
    first.images.zero_()
    assert torch.equal(found.batch([2]).images, open_easyvqa(tmp_path).batch([2]).images)
    assert len(found.batch([])) == 0


def test_folder_below_the_root_is_found(tmp_path):
    write_easyvqa(tmp_path / "easy-vqa")
    assert (
        len(open_easyvqa(tmp_path)) == len(EasyVqa(str(tmp_path), "train+val", validation=1)) == 5
    )
    assert open_easyvqa(tmp_path, "test").batch([0]).images[0, 0, 0, 0] == 1


def test_validation_split_holds_out_all_questions_of_an_image(tmp_path):
    write_easyvqa(tmp_path)
    _, held_out = hold_out_indices(3, 1)
    train, val = open_easyvqa(tmp_path, "train"), open_easyvqa(tmp_path, "val")
    assert len(train) + len(val) == 5
    rows = {int(name[-5:]) for name in val.batch(range(len(val))).ids}
    assert rows == {row for row, (_, _, number) in enumerate(QUESTIONS) if number == held_out[0]}


def test_vocabulary_contains_only_train_words(tmp_path):
    write_easyvqa(tmp_path)
    _, held_out = hold_out_indices(3, 1)
    kept = [text for text, _, number in QUESTIONS if number != held_out[0]]
    words = {word for text in kept for word in text.replace("?", " ?").split()}
    for split in ("train", "val", "test"):
        assert set(open_easyvqa(tmp_path, split).reader.words) == words


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["q", "red"], "question 2 is not"),
        ("q", "question 2 is not"),
        ([1, "red", 0], "question 2 is not"),
        (["q", "mauve", 0], "question 2 .*'mauve'"),
        (["q", "red", 9], r"9\.png.*question 2"),
    ],
)
def test_invalid_question_raises_with_its_number(tmp_path, entry, message):
    write_easyvqa(tmp_path, [*QUESTIONS[:2], entry, *QUESTIONS[3:]])
    with pytest.raises(CorruptFileError, match=message):
        open_easyvqa(tmp_path)


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path):
    write_easyvqa(tmp_path)
    with pytest.raises(UserError, match="99"):
        open_easyvqa(tmp_path).batch([99])
    (tmp_path / "train/images/1.png").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"1\.png is empty"):
        open_easyvqa(tmp_path).batch(range(5))
    Image.new("RGB", (9, 9)).save(tmp_path / "train/images/1.png")
    with pytest.raises(CorruptFileError, match=r"1\.png has"):
        open_easyvqa(tmp_path).batch(range(5))
    for text in ("", "red\nred\n"):
        (tmp_path / "answers.txt").write_text(text)
        with pytest.raises(CorruptFileError, match=r"answers\.txt"):
            open_easyvqa(tmp_path)
    (tmp_path / "answers.txt").unlink()
    with pytest.raises(CorruptFileError, match=r"answers.*missing"):
        open_easyvqa(tmp_path)
    (tmp_path / "train/questions.json").write_text("[]")
    with pytest.raises(CorruptFileError):
        open_easyvqa(tmp_path)


def test_missing_package_and_folder_raise_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="install easy-vqa"):
        EasyVqa(tmp_path)


def test_digest_depends_on_data_and_split(tmp_path):
    write_easyvqa(tmp_path)
    digests = {
        open_easyvqa(tmp_path, split).digest() for split in ("train", "val", "test", "train+val")
    }
    assert len(digests) == 4
    before = open_easyvqa(tmp_path).digest()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "train/images/1.png")
    assert open_easyvqa(tmp_path).digest() != before


def test_question_family_is_read_from_the_answer():
    assert [question_family(a) for a in ("yes", "no", "triangle", "teal")] == [
        *("yes or no", "yes or no", "shape", "colour"),
    ]


@pytest.mark.long
def test_samples_agree_with_the_easy_vqa_package():
    easy_vqa = pytest.importorskip("easy_vqa")
    texts, answers, numbers = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    found = EasyVqa(None, "test")
    assert len(found) == len(texts) and list(found.classes) == easy_vqa.get_answers()
    rows = [0, 17, 5_000, len(texts) - 1]
    batch = found.batch(rows)
    assert batch.text.texts == tuple(texts[row] for row in rows)
    assert [found.classes[label] for label in batch.labels] == [answers[row] for row in rows]
    for row, image in zip(rows, batch.images[batch.image_index], strict=True):
        expected = np.asarray(Image.open(paths[numbers[row]]).convert("RGB"))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
    val = EasyVqa(None, "val")
    assert len(EasyVqa(None, "train")) + len(val) == len(easy_vqa.get_train_questions()[0])
