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

from overt.data import clevr
from overt.data.batch import Batch
from overt.data.clevr import ANSWERS, Clevr, rotate_images
from overt.data.dataset import Dataset
from overt.data.images import stretch
from overt.data.vqa_dataset import PhotoInput
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry

SMALL = PhotoInput((16, 24), stretch)


def make_object(color: str, shape: str, at: tuple[float, float]) -> dict:
    return {
        "color": color,
        "shape": shape,
        "size": "large",
        "material": "metal",
        "rotation": 1.0,
        "3d_coords": [0.1, 0.2, 0.3],
        "pixel_coords": [*at, 11.5],
    }


def make_scene(split: str, number: int) -> dict:
    return {
        "image_index": number,
        "image_filename": f"CLEVR_{split}_{number:06d}.png",
        "split": split,
        "objects": [
            make_object("red", "cube", (60, 40)),
            make_object("blue", "sphere", (420, 280)),
        ],
        "relationships": {"left": [[], [0]], "right": [[1], []], "front": [[1], []]}
        | {"behind": [[], [0]]},
        "directions": {},
    }


def make_question(split: str, number: int, picture: int, color: str | None, answer: str) -> dict:
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


QUESTIONS = [(0, None, "2"), (0, "blue", "yes"), (1, "green", "no"), (1, "red", "yes")]


def write_clevr(root: Path) -> Path:
    folder = root / clevr.FOLDER
    for kind in ("questions", "scenes"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            picture = Image.fromarray(np.full((320, 480, 3), 50 * number, dtype=np.uint8))
            picture.save(folder / "images" / split / f"CLEVR_{split}_{number:06d}.png")
        records = [make_question(split, n, *one) for n, one in enumerate(QUESTIONS)]
        if split == "test":
            records = [
                {k: v for k, v in q.items() if k not in ("answer", "program")} for q in records
            ]
        else:
            scenes = {"info": {}, "scenes": [make_scene(split, n) for n in range(2)]}
            (folder / "scenes" / f"CLEVR_{split}_scenes.json").write_text(json.dumps(scenes))
        path = folder / "questions" / f"CLEVR_{split}_questions.json"
        path.write_text(json.dumps({"info": {}, "questions": records}))
    return folder


def open_clevr(root: Path, split: str = "train", **options) -> Clevr:
    return Clevr(
        root, split, **{"photo_input": SMALL, "questions": None, "cells": (2, 2), **options}
    )


def test_there_are_28_answers():
    assert len(ANSWERS) == len(set(ANSWERS)) == 28


def test_batches_match_hand_computed_values(tmp_path):
    write_clevr(tmp_path)
    found = open_clevr(tmp_path, "val")
    batch = found.batch([2, 0, 1])
    assert isinstance(found, Dataset) and len(found) == 4
    assert batch.ids == ("clevr/val/000002", "clevr/val/000000", "clevr/val/000001")
    assert batch.images.shape == (2, 3, 16, 24) and batch.image_of.tolist() == [1, 0, 0]
    assert [ANSWERS[label] for label in batch.labels] == ["no", "2", "yes"]
    assert batch.answers.argmax(dim=1).tolist() == batch.labels.tolist()
    assert batch.groups == ("exist", "count", "exist")
    assert found.templates([0, 1]).tolist() == [1, 7]
    assert batch.text.tokens(0)[:3] == ["Is", "there", "a"]
    assert batch.target is None
    assert found.reader == open_clevr(tmp_path).reader


def test_target_covers_the_objects_of_the_answer(tmp_path):
    write_clevr(tmp_path)
    found = open_clevr(tmp_path, spread=5.0)
    batch = found.batch([0, 1, 2, 3])
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0, 0, 0.5], [0, 0, 0, 1], [0, 0, 0, 0], [1.0, 0, 0, 0]]),
    )
    assert batch.target.rows[:, 0].tolist() == [True, True, False, True]  # nothing is green
    assert found.points([1])[0].tolist() == [[280, 420]]
    with pytest.raises(UserError, match="spread="):
        open_clevr(tmp_path).points([0])


def test_test_split_has_no_answers(tmp_path):
    write_clevr(tmp_path)
    found = open_clevr(tmp_path, "test")
    assert found.batch([0]).labels is None and found.batch([0]).groups is None
    with pytest.raises(UserError, match="not public"):
        found.labels([0])
    with pytest.raises(UserError, match="no target"):
        open_clevr(tmp_path, "test", spread=5.0)


def test_cached_features_replace_images(tmp_path, cache_pixels):
    write_clevr(tmp_path)
    alone = open_clevr(tmp_path).photos(SMALL)
    cache = cache_pixels(tmp_path / "cache", alone)
    for path in alone.files:
        path.unlink()
    batch = open_clevr(tmp_path, spread=5.0, photo_input=PhotoInput(features=cache)).batch([3, 1])
    assert batch.features.shape == (2, 384, 3) and batch.images is None
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0], torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    )


def edit_json(path: Path, edit) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v["questions"][1].pop("question"), "entry 1 .*question"),
        (lambda v: v["questions"][1].update(answer="11"), "entry 1 .*program.*answer"),
        (lambda v: v["questions"][1].update(program=[]), "entry 1 .*program"),
        (lambda v: v["questions"][1].update(program=[3]), "entry 1: "),
        (lambda v: v["questions"][1].update(question_index=0), "_(index|id) twice"),
        (lambda v: v["questions"][1].update(question_index="x"), "entry 1 .*integer"),
        (lambda v: v["questions"][1].update(answer="no"), "program.*'yes'.*'no'"),
        (lambda v: v["questions"][1].update(image_filename="x.png"), "no scene"),
        (lambda v: v["questions"].clear(), "has 0 questions"),
        (lambda v: v.clear(), "questions"),
    ],
)
def test_invalid_questions_raise_with_their_entry(tmp_path, edit, message):
    folder = write_clevr(tmp_path)
    edit_json(folder / "questions/CLEVR_train_questions.json", edit)
    with pytest.raises(CorruptFileError, match=message):
        open_clevr(tmp_path, spread=5.0)


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
def test_invalid_scenes_raise_with_their_entry(tmp_path, edit):
    folder = write_clevr(tmp_path)
    edit_json(folder / "scenes/CLEVR_train_scenes.json", lambda v: edit(v["scenes"][1]))
    with pytest.raises(CorruptFileError, match=r"entry 1 .*scene"):
        open_clevr(tmp_path, spread=5.0)


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path):
    folder = write_clevr(tmp_path)
    with pytest.raises(CorruptFileError, match=r"4 questions.*699989"):
        Clevr(tmp_path)
    with pytest.raises(UserError, match="not 'train\\+val'"):
        open_clevr(tmp_path, "train+val")
    for place in (-1, 4):
        with pytest.raises(UserError, match=rf"4 \w+: {place} is out"):
            open_clevr(tmp_path).batch([place])
    (folder / "images/train/CLEVR_train_000001.png").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"000001\.png.*image"):
        open_clevr(tmp_path).batch([2])
    (folder / "images/train/CLEVR_train_000001.png").unlink()
    with pytest.raises(CorruptFileError, match=r"000001.png.*missing"):
        open_clevr(tmp_path)
    (folder / "scenes/CLEVR_val_scenes.json").unlink()
    assert len(open_clevr(tmp_path, "val")) == 4  # scenes are needed only for a target
    with pytest.raises(UserError, match=r"val_scenes.*missing"):
        open_clevr(tmp_path, "val", spread=5.0)
    value = copy.deepcopy(make_question("val", 0, 0, None, "2"))
    value["split"] = "../../x"
    path = folder / "questions/CLEVR_val_questions.json"
    path.write_text(json.dumps({"questions": [value]}))
    with pytest.raises(CorruptFileError, match="points outside"):
        open_clevr(tmp_path, "val")


def test_digest_depends_on_split_and_target(tmp_path):
    write_clevr(tmp_path)
    kinds = [
        open_clevr(tmp_path),
        open_clevr(tmp_path, "val"),
        open_clevr(tmp_path, "test"),
        open_clevr(tmp_path, spread=5.0),
        open_clevr(tmp_path, spread=6.0),
    ]
    found = [one.digest() for one in kinds]
    assert len(set(found)) == 5 and open_clevr(tmp_path).digest() == found[0]


def test_rotate_images_matches_scipy() -> None:
    """SciPy rotates one plane at a time; the edges are not compared."""
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 16, 24, generator=rng)
    images = functional.avg_pool2d(images, 5, 1, 2)  # smooth, so that interpolations agree
    batch = Batch(ids=("a", "b"), images=images, labels=torch.tensor([1, 2]))
    most = 0.3
    found = rotate_images(batch, torch.Generator().manual_seed(7), most)
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


def test_rotated_images_keep_their_dtype_and_drop_geometry() -> None:
    images = torch.full((1, 3, 8, 8), 200, dtype=torch.uint8)
    batch = Batch(ids=("a",), images=images, geometry=PixelGeometry.identity(1, (8, 8)))
    found = rotate_images(batch, torch.Generator().manual_seed(0))
    assert found.images is not None and torch.equal(found.images, images)  # no dark corners
    assert found.geometry is None and found.target is None
    with pytest.raises(UserError, match="with images"):
        rotate_images(Batch(ids=("a",)), torch.Generator())
