import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch.nn import functional

from overt.data import clevr, sets
from overt.data.asked import Look
from overt.data.batch import Batch
from overt.data.clevr import ANSWERS, Clevr, turned
from overt.data.features import Key, build
from overt.data.images import stretch
from overt.data.source import Source
from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry

SMALL = Look((16, 24), stretch)


def thing(color: str, shape: str, at: tuple[float, float]) -> dict:
    return {
        "color": color,
        "shape": shape,
        "size": "large",
        "material": "metal",
        "rotation": 1.0,
        "3d_coords": [0.1, 0.2, 0.3],
        "pixel_coords": [*at, 11.5],
    }


def scene(split: str, number: int) -> dict:
    return {
        "image_index": number,
        "image_filename": f"CLEVR_{split}_{number:06d}.png",
        "split": split,
        "objects": [thing("red", "cube", (60, 40)), thing("blue", "sphere", (420, 280))],
        "relationships": {"left": [[], [0]], "right": [[1], []], "front": [[1], []]}
        | {"behind": [[], [0]]},
        "directions": {},
    }


def question(split: str, number: int, picture: int, color: str | None, answer: str) -> dict:
    steps = [("scene", [], [])]
    if color is None:
        steps.append(("count", [0], []))
        text = "How many things are there?"
    else:
        steps += [("filter_color", [0], [color]), ("exist", [1], [])]
        text = f"Is there a {color} thing?"
    return {
        "question_index": number,
        "question_family_index": 7 if color else 1,
        "image_index": picture,
        "image_filename": f"CLEVR_{split}_{picture:06d}.png",
        "split": split,
        "question": text,
        "answer": answer,
        "program": [{"function": f, "inputs": i, "value_inputs": v} for f, i, v in steps],
    }


ASKED = [(0, None, "2"), (0, "blue", "yes"), (1, "green", "no"), (1, "red", "yes")]


def write(root: Path) -> Path:
    folder = root / clevr.FOLDER
    for kind in ("questions", "scenes"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            picture = Image.fromarray(np.full((320, 480, 3), 50 * number, dtype=np.uint8))
            picture.save(folder / "images" / split / f"CLEVR_{split}_{number:06d}.png")
        asked = [question(split, n, *one) for n, one in enumerate(ASKED)]
        if split == "test":
            asked = [{k: v for k, v in q.items() if k not in ("answer", "program")} for q in asked]
        else:
            scenes = {"info": {}, "scenes": [scene(split, n) for n in range(2)]}
            (folder / "scenes" / f"CLEVR_{split}_scenes.json").write_text(json.dumps(scenes))
        path = folder / "questions" / f"CLEVR_{split}_questions.json"
        path.write_text(json.dumps({"info": {}, "questions": asked}))
    return folder


def small(root: Path, split: str = "train", **options) -> Clevr:
    return Clevr(root, split, **{"look": SMALL, "questions": None, "cells": (2, 2), **options})


def test_there_are_28_answers():
    assert len(ANSWERS) == len(set(ANSWERS)) == 28


def test_batches_by_hand(tmp_path):
    write(tmp_path)
    found = small(tmp_path, "val")
    batch = found.batch([2, 0, 1])
    assert isinstance(found, Source) and len(found) == 4
    assert batch.ids == ("clevr/val/000002", "clevr/val/000000", "clevr/val/000001")
    assert batch.images.shape == (2, 3, 16, 24) and batch.image_of.tolist() == [1, 0, 0]
    assert [ANSWERS[label] for label in batch.labels] == ["no", "2", "yes"]
    assert batch.answers.argmax(dim=1).tolist() == batch.labels.tolist()
    assert batch.groups == ("exist", "count", "exist")
    assert found.templates([0, 1]).tolist() == [1, 7]
    assert batch.text.tokens(0)[:3] == ["Is", "there", "a"]
    assert batch.target is None
    assert found.reader == small(tmp_path).reader


def test_the_target_is_around_what_the_answer_is_read_from(tmp_path):
    write(tmp_path)
    found = small(tmp_path, spread=5.0)
    batch = found.batch([0, 1, 2, 3])
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0, 0, 0.5], [0, 0, 0, 1], [0, 0, 0, 0], [1.0, 0, 0, 0]]),
    )
    assert batch.target.rows[:, 0].tolist() == [True, True, False, True]  # nothing is green
    assert found.points([1])[0].tolist() == [[280, 420]]
    with pytest.raises(BadInput, match="spread="):
        small(tmp_path).points([0])


def test_test_has_no_answers(tmp_path):
    write(tmp_path)
    found = small(tmp_path, "test")
    assert found.batch([0]).labels is None and found.batch([0]).groups is None
    with pytest.raises(BadInput, match="not public"):
        found.labels([0])
    with pytest.raises(BadInput, match="what to look at"):
        small(tmp_path, "test", spread=5.0)


def test_features_stand_in_for_pictures(tmp_path):
    write(tmp_path)
    alone = small(tmp_path).photos(SMALL)
    key = Key("mean", "none", "16 x 24", alone.digest())
    cache = build(tmp_path / "cache", key, alone, lambda b: b.images.float().flatten(2).mT)
    for path in alone.files:
        path.unlink()
    batch = small(tmp_path, spread=5.0, look=Look(features=cache)).batch([3, 1])
    assert batch.features.shape == (2, 384, 3) and batch.images is None
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0], torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    )


def change(path: Path, edit) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda v: v["questions"][1].pop("question"), "entry 1 has no question"),
        (lambda v: v["questions"][1].update(answer="11"), "entry 1 has no program, or the answer"),
        (lambda v: v["questions"][1].update(program=[]), "entry 1 has no program"),
        (lambda v: v["questions"][1].update(program=[3]), "entry 1: "),
        (lambda v: v["questions"][1].update(question_index=0), "two questions of one"),
        (lambda v: v["questions"][1].update(question_index="x"), "entry 1 has no whole number"),
        (lambda v: v["questions"][1].update(answer="no"), "program says 'yes', not 'no'"),
        (lambda v: v["questions"][1].update(image_filename="x.png"), "in no scene"),
        (lambda v: v["questions"].clear(), "has 0 questions"),
        (lambda v: v.clear(), "questions"),
    ],
)
def test_broken_questions_are_named(tmp_path, edit, said):
    folder = write(tmp_path)
    change(folder / "questions/CLEVR_train_questions.json", edit)
    with pytest.raises(Damaged, match=said):
        small(tmp_path, spread=5.0)


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s["objects"][0].pop("color"),
        lambda s: s["objects"][0].update(pixel_coords=[]),
        lambda s: s["relationships"].pop("left"),
        lambda s: s["relationships"]["left"].pop(),
        lambda s: s["relationships"]["left"][0].append(9),
        lambda s: s.update(objects=s["objects"] * 20),
    ],
)
def test_broken_scenes_are_named(tmp_path, edit):
    folder = write(tmp_path)
    change(folder / "scenes/CLEVR_train_scenes.json", lambda v: edit(v["scenes"][1]))
    with pytest.raises(Damaged, match="entry 1 is not a scene"):
        small(tmp_path, spread=5.0)


def test_what_is_missing_is_named(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(Damaged, match="4 questions, not 699989"):
        Clevr(tmp_path)
    with pytest.raises(BadInput, match="not 'train\\+val'"):
        small(tmp_path, "train+val")
    for place in (-1, 4):
        with pytest.raises(BadInput, match=f"0 to 3, not {place}"):
            small(tmp_path).batch([place])
    (folder / "images/train/CLEVR_train_000001.png").write_bytes(b"nothing of the kind")
    with pytest.raises(BadInput, match=r"000001\.png is not a JPEG"):
        small(tmp_path).batch([2])
    (folder / "images/train/CLEVR_train_000001.png").unlink()
    with pytest.raises(Damaged, match=r"000001\.png is missing"):
        small(tmp_path)
    (folder / "scenes/CLEVR_val_scenes.json").unlink()
    assert len(small(tmp_path, "val")) == 4  # needed for a target alone
    with pytest.raises(BadInput, match=r"CLEVR_val_scenes\.json is missing"):
        small(tmp_path, "val", spread=5.0)
    value = copy.deepcopy(question("val", 0, 0, None, "2"))
    value["split"] = "../../x"
    path = folder / "questions/CLEVR_val_questions.json"
    path.write_text(json.dumps({"questions": [value]}))
    with pytest.raises(Damaged, match="leads out of it"):
        small(tmp_path, "val")


def test_digest_tells_splits_and_targets_apart(tmp_path):
    write(tmp_path)
    kinds = [
        small(tmp_path),
        small(tmp_path, "val"),
        small(tmp_path, "test"),
        small(tmp_path, spread=5.0),
        small(tmp_path, spread=6.0),
    ]
    found = [one.digest() for one in kinds]
    assert len(set(found)) == 5 and small(tmp_path).digest() == found[0]


def test_it_is_listed():
    assert sets.find("clevr").opens and sets.find("clevr").photos


def test_pictures_are_turned_about_their_middle() -> None:
    """Against SciPy, which turns one plane at a time, away from the edges."""
    dice = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 16, 24, generator=dice)
    images = functional.avg_pool2d(images, 5, 1, 2)  # smooth, so that ways to sample agree
    batch = Batch(ids=("a", "b"), images=images, labels=torch.tensor([1, 2]))
    most = 0.3
    found = turned(batch, torch.Generator().manual_seed(7), most)
    drawn = torch.rand(2, generator=torch.Generator().manual_seed(7))
    angles = most * (2 * drawn - 1)
    assert found.images is not None and found.labels is batch.labels
    for number, angle in enumerate(angles.tolist()):
        for plane in range(3):
            slow = ndimage.rotate(
                images[number, plane].numpy(), math.degrees(angle), reshape=False, order=1
            )
            inside = found.images[number, plane, 5:-5, 5:-5].numpy()
            np.testing.assert_allclose(inside, slow[5:-5, 5:-5], atol=1e-5)


def test_turned_pictures_stay_bytes_and_lose_their_places() -> None:
    whole = torch.full((1, 3, 8, 8), 200, dtype=torch.uint8)
    batch = Batch(ids=("a",), images=whole, geometry=PixelGeometry.identity(1, (8, 8)))
    found = turned(batch, torch.Generator().manual_seed(0))
    assert found.images is not None and torch.equal(found.images, whole)  # no dark corners
    assert found.geometry is None and found.target is None
    with pytest.raises(BadInput, match="with images"):
        turned(Batch(ids=("a",)), torch.Generator())
