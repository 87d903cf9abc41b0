import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.easyvqa import EasyVqa, family
from overt.data.splits import held_out
from overt.errors import BadInput, Damaged

QUESTIONS = [
    ["what color is it?", "red", 0],
    ["is there a circle?", "yes", 0],
    ["what shape is it?", "circle", 1],
    ["is it blue?", "no", 2],
    ["what color is the thing?", "red", 2],
]


def write(folder: Path, questions: list = QUESTIONS) -> Path:
    for part in ("train", "test"):
        (folder / part / "images").mkdir(parents=True, exist_ok=True)
        (folder / part / "questions.json").write_text(json.dumps(questions))
        for number in range(3):
            image = np.full((8, 8, 3), number * 50 + (part == "test"), np.uint8)
            Image.fromarray(image).save(folder / part / "images" / f"{number}.png")
    (folder / "answers.txt").write_text("circle\nred\nyes\nno\n\n")
    return folder


def small(root: Path, split: str = "train+val") -> EasyVqa:
    return EasyVqa(root, split, validation=1)


def test_batches_by_hand(tmp_path):
    batch = small(write(tmp_path)).batch([4, 0, 3, 1])
    assert batch.ids == tuple(f"easyvqa/train/0000{row}" for row in (4, 0, 3, 1))
    assert batch.image_of.tolist() == [0, 1, 0, 1]
    assert batch.images[:, 0, 0, 0].tolist() == [100, 0] and batch.images.shape == (2, 3, 8, 8)
    assert batch.labels.tolist() == [1, 1, 3, 2]
    assert batch.groups == ("colour", "colour", "yes or no", "yes or no")
    assert batch.text.tokens(2) == ["is", "it", "blue", "?", "", ""]
    assert len(batch.geometry) == 2 and batch.geometry.canvas == (8, 8)


def test_a_batch_is_pure(tmp_path):
    found = small(write(tmp_path))
    first = found.batch([0, 2])
    first.images.zero_()
    assert torch.equal(found.batch([2]).images, small(tmp_path).batch([2]).images)
    assert len(found.batch([])) == 0


def test_a_folder_below_the_root_is_found(tmp_path):
    write(tmp_path / "easy-vqa")
    assert len(small(tmp_path)) == len(EasyVqa(str(tmp_path), "train+val", validation=1)) == 5
    assert small(tmp_path, "test").batch([0]).images[0, 0, 0, 0] == 1


def test_whole_pictures_are_held_out(tmp_path):
    write(tmp_path)
    _, held = held_out(3, 1)
    train, val = small(tmp_path, "train"), small(tmp_path, "val")
    assert len(train) + len(val) == 5
    rows = {int(name[-5:]) for name in val.batch(range(len(val))).ids}
    assert rows == {row for row, (_, _, number) in enumerate(QUESTIONS) if number == held[0]}


def test_the_vocabulary_is_that_of_train_alone(tmp_path):
    write(tmp_path)
    _, held = held_out(3, 1)
    kept = [text for text, _, number in QUESTIONS if number != held[0]]
    words = {word for text in kept for word in text.replace("?", " ?").split()}
    for split in ("train", "val", "test"):
        assert set(small(tmp_path, split).reader.words) == words


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["q", "red"], "question 2 is not"),
        ("q", "question 2 is not"),
        ([1, "red", 0], "question 2 is not"),
        (["q", "mauve", 0], "question 2 has the unknown answer 'mauve'"),
        (["q", "red", 9], r"9\.png is missing; question 2"),
    ],
)
def test_a_wrong_question_is_named(tmp_path, entry, message):
    write(tmp_path, [*QUESTIONS[:2], entry, *QUESTIONS[3:]])
    with pytest.raises(Damaged, match=message):
        small(tmp_path)


def test_broken_files_are_named(tmp_path):
    write(tmp_path)
    with pytest.raises(BadInput, match="99"):
        small(tmp_path).batch([99])
    (tmp_path / "train/images/1.png").write_bytes(b"")
    with pytest.raises(Damaged, match=r"1\.png is empty"):
        small(tmp_path).batch(range(5))
    Image.new("RGB", (9, 9)).save(tmp_path / "train/images/1.png")
    with pytest.raises(Damaged, match=r"1\.png has"):
        small(tmp_path).batch(range(5))
    for text in ("", "red\nred\n"):
        (tmp_path / "answers.txt").write_text(text)
        with pytest.raises(Damaged, match=r"answers\.txt"):
            small(tmp_path)
    (tmp_path / "answers.txt").unlink()
    with pytest.raises(Damaged, match=r"answers\.txt is missing"):
        small(tmp_path)
    (tmp_path / "train/questions.json").write_text("[]")
    with pytest.raises(Damaged):
        small(tmp_path)


def test_without_package_and_folder_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install easy-vqa"):
        EasyVqa(tmp_path)


def test_digest_tells_data_and_splits_apart(tmp_path):
    write(tmp_path)
    digests = {small(tmp_path, split).digest() for split in ("train", "val", "test", "train+val")}
    assert len(digests) == 4
    before = small(tmp_path).digest()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "train/images/1.png")
    assert small(tmp_path).digest() != before


def test_families():
    assert [family(a) for a in ("yes", "no", "triangle", "teal")] == [
        *("yes or no", "yes or no", "shape", "colour"),
    ]


def test_the_package_agrees_with_its_own_reader():
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
    held = EasyVqa(None, "val")
    assert len(EasyVqa(None, "train")) + len(held) == len(easy_vqa.get_train_questions()[0])
