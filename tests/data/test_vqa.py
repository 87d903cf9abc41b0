import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import sets, vqa
from overt.data.answers import people_share, vqa_scores
from overt.data.asked import Look
from overt.data.features import Key, build
from overt.data.images import stretch
from overt.data.source import Source
from overt.data.vqa import CP1, CP2, V1, V2, Edition, Vqa, question_type
from overt.errors import BadInput, Damaged
from overt.measure import mean, soft_accuracy, vqa_accuracy
from tests.data.vqa_files import TRAIN, write

SMALL = Look((4, 4), stretch)


def small(root: Path, split: str = "train", edition: Edition = V2, **options) -> Vqa:
    few = replace(edition, questions={})
    return Vqa(root, split, few, **{"look": SMALL, "validation": 1, **options})


@pytest.mark.parametrize("edition", [V1, V2])
def test_batches_by_hand(tmp_path, write_photo, edition):
    write(tmp_path, write_photo, edition)
    found = small(tmp_path, "train", edition)
    batch = found.batch([2, 1, 0])
    assert isinstance(found, Source) and len(found) == 4
    assert batch.ids == tuple(f"{edition.name}/{number}" for number in (110, 101, 100))
    assert batch.images.shape == (2, 3, 4, 4) and batch.image_of.tolist() == [1, 0, 0]
    assert batch.images[:, 0, 0, 0].tolist() == pytest.approx([36, 44], abs=2)
    assert batch.text.texts == ("how many", "is it red", "what color is it")
    assert batch.groups == ("number", "yes/no", "other")
    assert batch.references[2] == ("red",) * 7 + ("blue",) * 3
    assert found.classes == ("yes", "2", "red")
    assert batch.labels.tolist() == [1, 0, 2]
    torch.testing.assert_close(batch.answers, torch.tensor([[0, 1.0, 0], [1.0, 0, 0], [0, 0, 1.0]]))
    kinds = small(tmp_path, "train", edition, group=question_type).batch([0]).groups
    assert kinds == ("what color",)


def test_answers_that_are_no_class(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, "val")
    batch = found.batch([0, 1])
    assert batch.labels.tolist() == [-1, -1] and found.classes == ("yes", "2", "red")
    torch.testing.assert_close(batch.answers, torch.tensor([[0.0, 0, 0], [0.3, 0, 0]]))
    assert mean(soft_accuracy(torch.eye(3)[:2], batch.answers)) == 0


def test_scores_agree_with_words(tmp_path, write_photo):
    """Soft scores of classes are what the official measure gives for the class's word."""
    write(tmp_path, write_photo)
    for split in ("train", "val"):
        found = small(tmp_path, split, classes=("yes", "no", "red", "blue", "2", "3", "4"))
        batch = found.batch(range(len(found)))
        for number, word in enumerate(found.classes):
            spelt = vqa_accuracy([word] * len(batch), batch.references, lambda a, t: (a, list(t)))
            torch.testing.assert_close(batch.answers[:, number], spelt)
    shares = small(tmp_path, score=people_share).batch([2]).answers
    torch.testing.assert_close(shares, torch.tensor([[0, 0.4, 0]]))


def test_limits_and_given_classes(tmp_path, write_photo):
    write(tmp_path, write_photo)
    assert small(tmp_path, limit=1).classes == ("yes",)
    given = small(tmp_path, "val", classes=("dog",), reader=small(tmp_path).reader)
    assert given.batch([0]).labels.tolist() == [0]


def test_train_and_val_together(tmp_path, write_photo):
    write(tmp_path, write_photo)
    both = small(tmp_path, "train+val")
    assert both.ids.tolist() == [100, 101, 110, 120, 500, 501]
    batch = both.batch([5, 0])
    assert batch.references == (("no",) * 9 + ("yes",), ("red",) * 7 + ("blue",) * 3)
    assert batch.groups == ("yes/no", "other")
    assert both.photo_ids([5, 0]) == (
        "vqa2/val2014/COCO_val2014_000000000051.jpg",
        "vqa2/train2014/COCO_train2014_000000000009.jpg",
    )
    assert both.classes == small(tmp_path).classes


def test_test_has_no_answers(tmp_path, write_photo):
    write(tmp_path, write_photo)
    for split in ("test", "test-dev"):
        found = small(tmp_path, split)
        batch = found.batch([0])
        assert batch.labels is None and batch.answers is None and batch.groups is None
        assert found.photo_ids([0]) == ("vqa2/test2015/COCO_test2015_000000000050.jpg",)
        with pytest.raises(BadInput, match="not public"):
            found.labels([0])


@pytest.mark.parametrize("edition", [CP1, CP2])
def test_changing_priors(tmp_path, write_photo, edition):
    write(tmp_path, write_photo, edition)
    train, val, test = (small(tmp_path, split, edition) for split in ("train", "val", "test"))
    assert len(train) + len(val) == 4 and len(test) == 2
    assert not set(train.photo_ids(range(len(train)))) & set(val.photo_ids(range(len(val))))
    assert test.batch([1]).references == (("no",) * 9 + ("yes",),)  # annotations in another order
    assert "train2014/COCO_train2014_000000000051" in test.photo_ids([1])[0]
    assert "val2014/COCO_val2014" in train.photo_ids([0])[0]
    assert train.classes == val.classes == test.classes
    whole = small(tmp_path, "train+val", edition)
    assert sorted([*train.ids, *val.ids]) == sorted(whole.ids)


def test_questions_kept_by_id(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, keep={101, 120}.__contains__)
    assert found.ids.tolist() == [101, 120] and found.classes == ("yes", "2", "red")
    assert found.batch([1]).references[0][0] == "yes" and len(found.files) == 2
    with pytest.raises(BadInput, match="none of the questions"):
        small(tmp_path, keep=lambda number: False)


def test_features_stand_in_for_photos(tmp_path, write_photo):
    write(tmp_path, write_photo)
    alone = small(tmp_path).photos(SMALL)
    assert len(alone) == 3
    key = Key("mean", "none", "4 x 4", alone.digest())
    cache = build(tmp_path / "cache", key, alone, lambda b: b.images.float().flatten(2).mT)
    for path in alone.files:
        path.unlink()
    found = small(tmp_path, look=Look(features=cache))
    assert found.batch([3, 0]).features.shape == (2, 16, 3) and found.batch([0]).images is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, a: q["questions"].pop(), "answers question 120, which is not asked"),
        (lambda q, a: a["annotations"].pop(), "no answers to question 120"),
        (lambda q, a: a["annotations"].append(a["annotations"][0]), "answered before"),
        (lambda q, a: q["questions"].append(q["questions"][0]), "two questions of one"),
        (lambda q, a: q["questions"][1].pop("image_id"), "entry 1 has no question_id"),
        (lambda q, a: q["questions"][1].update(image_id="x"), "entry 1 has no question_id"),
        (lambda q, a: a["annotations"][1].pop("answers"), "entry 1 has no question_id"),
        (lambda q, a: a["annotations"][1]["answers"][3].pop("answer"), "entry 1 has no"),
        (lambda q, a: a["annotations"][1]["answers"].pop(), "entry 1 has 9 answers"),
        (lambda q, a: a["annotations"][1].update(answers=[]), "entry 1 has no question_id"),
        (lambda q, a: q.pop("questions"), "no list called 'questions'"),
        (lambda q, a: q["questions"].clear(), "has 0 questions"),
        (lambda q, a: q["questions"][0].update(coco_split="../x"), "no folder of COCO"),
    ],
)
def test_files_that_are_broken_are_named(tmp_path, write_photo, change, said):
    folder = write(tmp_path, write_photo)
    paths = [
        folder / name.format(part="train2014") for name in (V2.questions_file, V2.annotations_file)
    ]
    asked, answered = (json.loads(path.read_text()) for path in paths)
    change(asked, answered)
    for path, value in zip(paths, (asked, answered), strict=True):
        path.write_text(json.dumps(value))
    with pytest.raises(Damaged, match=said):
        small(tmp_path)


def test_what_is_missing_is_named(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    with pytest.raises(Damaged, match="4 questions, not 443757"):
        vqa.vqa2(tmp_path)
    with pytest.raises(BadInput, match=r"no split 'dev'.*test-dev"):
        small(tmp_path, "dev")
    for place in (-1, 4):
        with pytest.raises(BadInput, match=f"0 to 3, not {place}"):
            small(tmp_path).batch([place])
    (tmp_path / "coco/train2014/COCO_train2014_000000000011.jpg").unlink()
    with pytest.raises(Damaged, match=r"000000000011\.jpg is missing"):
        small(tmp_path)
    (folder / V2.annotations_file.format(part="train2014")).unlink()
    with pytest.raises(BadInput, match=r"v2_mscoco_train2014_annotations\.json is missing"):
        small(tmp_path, "val")
    with pytest.raises(BadInput, match=r"OpenEnded_mscoco_train2014_questions\.json is missing"):
        small(tmp_path, edition=V1)


def test_digest_tells_data_splits_and_scores_apart(tmp_path, write_photo):
    write(tmp_path, write_photo)
    kinds = [
        small(tmp_path),
        small(tmp_path, "val"),
        small(tmp_path, "train+val"),
        small(tmp_path, "test"),
        small(tmp_path, limit=1),
        small(tmp_path, score=people_share),
        small(tmp_path, keep={101}.__contains__),
    ]
    found = [one.digest() for one in kinds]
    assert len(set(found)) == len(found) and small(tmp_path).digest() == found[0]
    write(tmp_path, write_photo, train=[*TRAIN[:3], (120, 12, "x", ["a"] * 10, "other", "x")])
    assert small(tmp_path).digest() != found[0]


def test_many_questions_take_little_memory(tmp_path, write_photo):
    """Answers are kept as numbers: 4 bytes each, whatever their spelling."""
    rows = [(n, 9, f"is it {n}", ["yes"] * 10, "yes/no", "is it") for n in range(500)]
    write(tmp_path, write_photo, train=rows)
    found = small(tmp_path)
    assert found.annotations.given.dtype == np.int32 and found.annotations.given.nbytes == 20_000
    assert found.annotations.words == ("yes",)
    assert len({id(kind) for kind in found.annotations.answer_types}) == 1
    assert vqa_scores(torch.tensor([[10.0]])).item() == 1


def test_every_edition_is_listed():
    for edition in (V1, V2, CP1, CP2):
        found = sets.find(edition.name)
        names = {file.path for file in found.files}
        for split in ("train", "val" if edition.wrapped else "test"):
            for part in edition.parts[split]:
                assert f"vqa/{edition.questions_file.format(part=part)}" in names
                assert f"vqa/{edition.annotations_file.format(part=part)}" in names
        assert callable(getattr(vqa, edition.name))
