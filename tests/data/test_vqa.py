import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import catalog, vqa
from overt.data.dataset import Dataset
from overt.data.images import stretch
from overt.data.vqa import CP1, CP2, V1, V2, Vqa, VqaEdition, question_type
from overt.data.vqa_answers import people_share, vqa_scores
from overt.data.vqa_dataset import PhotoInput
from overt.errors import CorruptFileError, UserError
from overt.metrics import mean, soft_accuracy, vqa_accuracy
from tests.data.vqa_files import TRAIN, write_vqa

SMALL = PhotoInput((4, 4), stretch)


def open_vqa(root: Path, split: str = "train", edition: VqaEdition = V2, **options) -> Vqa:
    few = replace(edition, questions={})
    return Vqa(root, split, few, **{"photo_input": SMALL, "validation": 1, **options})


@pytest.mark.parametrize("edition", [V1, V2])
def test_batches_match_hand_computed_values(tmp_path, write_photo, edition):
    write_vqa(tmp_path, write_photo, edition)
    found = open_vqa(tmp_path, "train", edition)
    batch = found.batch([2, 1, 0])
    assert isinstance(found, Dataset) and len(found) == 4
    assert batch.ids == tuple(f"{edition.name}/{number}" for number in (110, 101, 100))
    assert batch.images.shape == (2, 3, 4, 4) and batch.image_of.tolist() == [1, 0, 0]
    assert batch.images[:, 0, 0, 0].tolist() == pytest.approx([36, 44], abs=2)
    assert batch.text.texts == ("how many", "is it red", "what color is it")
    assert batch.groups == ("number", "yes/no", "other")
    assert batch.references[2] == ("red",) * 7 + ("blue",) * 3
    assert found.classes == ("yes", "2", "red")
    assert batch.labels.tolist() == [1, 0, 2]
    torch.testing.assert_close(batch.answers, torch.tensor([[0, 1.0, 0], [1.0, 0, 0], [0, 0, 1.0]]))
    kinds = open_vqa(tmp_path, "train", edition, group=question_type).batch([0]).groups
    assert kinds == ("what color",)


def test_answers_outside_the_classes_have_label_minus_one(tmp_path, write_photo):
    write_vqa(tmp_path, write_photo)
    found = open_vqa(tmp_path, "val")
    batch = found.batch([0, 1])
    assert batch.labels.tolist() == [-1, -1] and found.classes == ("yes", "2", "red")
    torch.testing.assert_close(batch.answers, torch.tensor([[0.0, 0, 0], [0.3, 0, 0]]))
    assert mean(soft_accuracy(torch.eye(3)[:2], batch.answers)) == 0


def test_class_scores_agree_with_vqa_accuracy(tmp_path, write_photo):
    """The soft score of a class is the official metric for the word of the class."""
    write_vqa(tmp_path, write_photo)
    for split in ("train", "val"):
        found = open_vqa(tmp_path, split, classes=("yes", "no", "red", "blue", "2", "3", "4"))
        batch = found.batch(range(len(found)))
        for number, word in enumerate(found.classes):
            expected = vqa_accuracy(
                [word] * len(batch), batch.references, lambda a, t: (a, list(t))
            )
            torch.testing.assert_close(batch.answers[:, number], expected)
    shares = open_vqa(tmp_path, score=people_share).batch([2]).answers
    torch.testing.assert_close(shares, torch.tensor([[0, 0.4, 0]]))


def test_limit_and_given_classes(tmp_path, write_photo):
    write_vqa(tmp_path, write_photo)
    assert open_vqa(tmp_path, limit=1).classes == ("yes",)
    given = open_vqa(tmp_path, "val", classes=("dog",), reader=open_vqa(tmp_path).reader)
    assert given.batch([0]).labels.tolist() == [0]


def test_train_val_contains_both_splits(tmp_path, write_photo):
    write_vqa(tmp_path, write_photo)
    both = open_vqa(tmp_path, "train+val")
    assert both.ids.tolist() == [100, 101, 110, 120, 500, 501]
    batch = both.batch([5, 0])
    assert batch.references == (("no",) * 9 + ("yes",), ("red",) * 7 + ("blue",) * 3)
    assert batch.groups == ("yes/no", "other")
    assert both.photo_ids([5, 0]) == (
        "vqa2/val2014/COCO_val2014_000000000051.jpg",
        "vqa2/train2014/COCO_train2014_000000000009.jpg",
    )
    assert both.classes == open_vqa(tmp_path).classes


def test_test_split_has_no_answers(tmp_path, write_photo):
    write_vqa(tmp_path, write_photo)
    for split in ("test", "test-dev"):
        found = open_vqa(tmp_path, split)
        batch = found.batch([0])
        assert batch.labels is None and batch.answers is None and batch.groups is None
        assert found.photo_ids([0]) == ("vqa2/test2015/COCO_test2015_000000000050.jpg",)
        with pytest.raises(UserError, match="not public"):
            found.labels([0])


@pytest.mark.parametrize("edition", [CP1, CP2])
def test_changing_priors_splits_are_read(tmp_path, write_photo, edition):
    write_vqa(tmp_path, write_photo, edition)
    train, val, test = (open_vqa(tmp_path, split, edition) for split in ("train", "val", "test"))
    assert len(train) + len(val) == 4 and len(test) == 2
    assert not set(train.photo_ids(range(len(train)))) & set(val.photo_ids(range(len(val))))
    assert test.batch([1]).references == (("no",) * 9 + ("yes",),)  # annotations in another order
    assert "train2014/COCO_train2014_000000000051" in test.photo_ids([1])[0]
    assert "val2014/COCO_val2014" in train.photo_ids([0])[0]
    assert train.classes == val.classes == test.classes
    both = open_vqa(tmp_path, "train+val", edition)
    assert sorted([*train.ids, *val.ids]) == sorted(both.ids)


def test_keep_selects_questions_by_id(tmp_path, write_photo):
    write_vqa(tmp_path, write_photo)
    found = open_vqa(tmp_path, keep={101, 120}.__contains__)
    assert found.ids.tolist() == [101, 120] and found.classes == ("yes", "2", "red")
    assert found.batch([1]).references[0][0] == "yes" and len(found.files) == 2
    with pytest.raises(UserError, match="no question that"):
        open_vqa(tmp_path, keep=lambda number: False)


def test_cached_features_replace_photos(tmp_path, write_photo, cache_pixels):
    write_vqa(tmp_path, write_photo)
    alone = open_vqa(tmp_path).photos(SMALL)
    assert len(alone) == 3
    cache = cache_pixels(tmp_path / "cache", alone)
    for path in alone.files:
        path.unlink()
    found = open_vqa(tmp_path, photo_input=PhotoInput(features=cache))
    assert found.batch([3, 0]).features.shape == (2, 16, 3) and found.batch([0]).images is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, a: q["questions"].pop(), "question 120.*unknown"),
        (lambda q, a: a["annotations"].pop(), "answers .*question 120"),
        (lambda q, a: a["annotations"].append(a["annotations"][0]), "already answered"),
        (lambda q, a: q["questions"].append(q["questions"][0]), "_(index|id) twice"),
        (lambda q, a: q["questions"][1].pop("image_id"), "entry 1 .*question_id"),
        (lambda q, a: q["questions"][1].update(image_id="x"), "entry 1 .*question_id"),
        (lambda q, a: a["annotations"][1].pop("answers"), "entry 1 .*question_id"),
        (lambda q, a: a["annotations"][1]["answers"][3].pop("answer"), "entry 1 has no"),
        (lambda q, a: a["annotations"][1]["answers"].pop(), "entry 1 .*9 answers"),
        (lambda q, a: a["annotations"][1].update(answers=[]), "entry 1 .*question_id"),
        (lambda q, a: q.pop("questions"), "'questions'"),
        (lambda q, a: q["questions"].clear(), "has 0 questions"),
        (lambda q, a: q["questions"][0].update(coco_split="../x"), "unknown coco_split"),
    ],
)
def test_invalid_entries_raise(tmp_path, write_photo, change, message):
    folder = write_vqa(tmp_path, write_photo)
    paths = [
        folder / name.format(part="train2014") for name in (V2.questions_file, V2.annotations_file)
    ]
    questions, annotations = (json.loads(path.read_text()) for path in paths)
    change(questions, annotations)
    for path, value in zip(paths, (questions, annotations), strict=True):
        path.write_text(json.dumps(value))
    with pytest.raises(CorruptFileError, match=message):
        open_vqa(tmp_path)


def test_missing_files_and_unknown_splits_raise(tmp_path, write_photo):
    folder = write_vqa(tmp_path, write_photo)
    with pytest.raises(CorruptFileError, match=r"4 questions.*443757"):
        vqa.vqa2(tmp_path)
    with pytest.raises(UserError, match=r"'dev'.*test-dev"):
        open_vqa(tmp_path, "dev")
    for place in (-1, 4):
        with pytest.raises(UserError, match=rf"4 \w+: {place} is out"):
            open_vqa(tmp_path).batch([place])
    (tmp_path / "coco/train2014/COCO_train2014_000000000011.jpg").unlink()
    with pytest.raises(CorruptFileError, match=r"0011\.jpg.*missing"):
        open_vqa(tmp_path)
    (folder / V2.annotations_file.format(part="train2014")).unlink()
    with pytest.raises(UserError, match=r"v2_mscoco_train2014_annotations\.json"):
        open_vqa(tmp_path, "val")
    with pytest.raises(UserError, match=r"OpenEnded_mscoco_train2014_questions\.json"):
        open_vqa(tmp_path, edition=V1)


def test_digest_depends_on_data_split_and_score(tmp_path, write_photo):
    write_vqa(tmp_path, write_photo)
    kinds = [
        open_vqa(tmp_path),
        open_vqa(tmp_path, "val"),
        open_vqa(tmp_path, "train+val"),
        open_vqa(tmp_path, "test"),
        open_vqa(tmp_path, limit=1),
        open_vqa(tmp_path, score=people_share),
        open_vqa(tmp_path, keep={101}.__contains__),
    ]
    found = [one.digest() for one in kinds]
    assert len(set(found)) == len(found) and open_vqa(tmp_path).digest() == found[0]
    write_vqa(tmp_path, write_photo, train=[*TRAIN[:3], (120, 12, "x", ["a"] * 10, "other", "x")])
    assert open_vqa(tmp_path).digest() != found[0]


def test_answers_are_stored_as_integers(tmp_path, write_photo):
    """Each answer takes 4 bytes, whatever its length."""
    rows = [(n, 9, f"is it {n}", ["yes"] * 10, "yes/no", "is it") for n in range(500)]
    write_vqa(tmp_path, write_photo, train=rows)
    found = open_vqa(tmp_path)
    assert found.annotations.given.dtype == np.int32 and found.annotations.given.nbytes == 20_000
    assert found.annotations.words == ("yes",)
    assert len({id(kind) for kind in found.annotations.answer_types}) == 1
    assert vqa_scores(torch.tensor([[10.0]])).item() == 1


def test_every_edition_is_in_the_catalog():
    for edition in (V1, V2, CP1, CP2):
        found = catalog.find_dataset(edition.name)
        names = {file.path for file in found.files}
        for split in ("train", "val" if edition.wrapped else "test"):
            for part in edition.parts[split]:
                assert f"vqa/{edition.questions_file.format(part=part)}" in names
                assert f"vqa/{edition.annotations_file.format(part=part)}" in names
        assert callable(getattr(vqa, edition.name))
