from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data import vqa_hat
from overt.data.dataset import Dataset
from overt.data.images import crop, fit, stretch
from overt.data.vqa import V1
from overt.data.vqa_dataset import PhotoInput
from overt.data.vqa_hat import VqaHat, first_map, read_map, sum_in_boxes
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry
from tests.data.vqa_files import write_vqa

FEW = replace(V1, questions={})


def save_image(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def write_vqa_hat(root: Path, write_photo) -> Path:
    """Photos of 6 x 8; the maps cover the left half, the right half, or nothing."""
    write_vqa(root, write_photo, V1)
    left, right = np.zeros((6, 8)), np.zeros((6, 8))
    left[:, :4], right[:, 4:] = 200, 100
    folder = root / vqa_hat.FOLDER
    save_image(folder / "vqahat_train" / "100_1.png", left)
    save_image(folder / "vqahat_train" / "120_1.png", np.zeros((6, 8)))
    for person, picture in enumerate((left, right, np.zeros((6, 8))), start=1):
        save_image(folder / "vqahat_val" / f"501_{person}.png", picture)
    return folder


def open_vqa_hat(root: Path, split: str = "train", **options) -> VqaHat:
    options = {"photo_input": PhotoInput((4, 4), stretch), "cells": (2, 2), "maps": None, **options}
    return VqaHat(root, split, edition=FEW, **options)


def test_batches_match_hand_computed_values(tmp_path, write_photo):
    write_vqa_hat(tmp_path, write_photo)
    found = open_vqa_hat(tmp_path)
    batch = found.batch([0, 1])
    assert isinstance(found, Dataset) and len(found) == 2
    assert batch.ids == ("vqa1/100", "vqa1/120") and batch.groups == ("other", "yes/no")
    assert batch.target.weights[0, 0, 0, 0].tolist() == [0.5, 0, 0.5, 0]
    assert batch.target.rows[:, 0].tolist() == [True, False]  # a black map is ignored
    # classes of all of train, not only of questions with maps
    assert found.classes == ("yes", "2", "red")


def test_maps_of_people_are_fused_with_equal_weight(tmp_path, write_photo):
    write_vqa_hat(tmp_path, write_photo)
    found = open_vqa_hat(tmp_path, "val")
    target = found.batch([0]).target.weights[0, 0, 0, 0]
    # brightness does not change the weight
    torch.testing.assert_close(target, torch.full((4,), 0.25))
    alone = open_vqa_hat(tmp_path, "val", fuse=first_map).batch([0]).target.weights[0, 0, 0, 0]
    assert alone.tolist() == [0.5, 0, 0.5, 0]
    people = found.people([0])
    assert people.values.shape == (1, 1, 1, 3, 4) and people.rows.tolist() == [[True, True, False]]
    assert people.values[0, 0, 0, 1].tolist() == pytest.approx([0, 12 * 100 / 255] * 2)
    people.check()


@pytest.mark.parametrize("resize", [stretch, crop, fit])
def test_maps_are_resized_like_their_photos(tmp_path, write_photo, resize, generator):
    """Sums over the pixels of the original map agree with the boxes of the cells."""
    folder = write_vqa_hat(tmp_path, write_photo)
    values = torch.randint(0, 256, (12, 16), generator=generator).numpy()  # twice the photo's size
    save_image(folder / "vqahat_train" / "100_1.png", values)
    found = open_vqa_hat(tmp_path, photo_input=PhotoInput((8, 8), resize), cells=(4, 4))
    people = found.people([0]).values[0, 0, 0, 0]
    boxes = found.vqa.batch([0]).geometry.cells((4, 4))[0]
    expected = []
    for x0, y0, x1, y1 in (boxes * 2).tolist():
        total = 0.0
        for y in range(12):
            for x in range(16):
                height = max(0.0, min(y + 1, y1) - max(y, y0))
                width = max(0.0, min(x + 1, x1) - max(x, x0))
                total += height * width * values[y, x] / 255
        expected.append(total)
    assert people.tolist() == pytest.approx(expected, abs=1e-4)


def test_sum_in_boxes_keeps_the_total(generator):
    picture = torch.rand(7, 5, generator=generator)
    for cells in ((1, 1), (3, 2), (14, 14)):
        geometry = PixelGeometry.identity(1, (70, 100)).resize((32, 32))
        found = sum_in_boxes(picture, geometry.cells(cells)[0], geometry.size[0])
        torch.testing.assert_close(found.sum(), picture.sum())


def test_cached_features_replace_photos(tmp_path, write_photo, cache_pixels):
    write_vqa_hat(tmp_path, write_photo)
    alone = open_vqa_hat(tmp_path).vqa.photos(PhotoInput((4, 4), stretch))
    cache = cache_pixels(tmp_path / "cache", alone)
    for path in alone.files:
        path.unlink()
    found = open_vqa_hat(tmp_path, photo_input=PhotoInput(features=cache))
    batch = found.batch([0])
    assert batch.features.shape == (1, 16, 3) and batch.images is None
    assert batch.target.weights[0, 0, 0, 0].tolist() == [0.5, 0, 0.5, 0]
    assert found.people([1]).rows.tolist() == [[False]]


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path, write_photo):
    folder = write_vqa_hat(tmp_path, write_photo)
    with pytest.raises(CorruptFileError, match=r"2 maps.*58475"):
        VqaHat(tmp_path, edition=FEW)
    with pytest.raises(UserError, match=r"train.*val.*'test'"):
        open_vqa_hat(tmp_path, "test")
    (folder / "vqahat_train" / "100_1.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(CorruptFileError, match=r"100_1\.png"):
        open_vqa_hat(tmp_path).batch([0])
    save_image(folder / "vqahat_train" / "777_1.png", np.zeros((2, 2)))
    with pytest.raises(CorruptFileError, match="no question 777"):
        open_vqa_hat(tmp_path)
    (folder / "vqahat_train" / "777_1.png").rename(folder / "vqahat_train" / "x_1.png")
    with pytest.raises(CorruptFileError, match="QUESTION_PERSON"):
        open_vqa_hat(tmp_path)
    for path in (folder / "vqahat_val").iterdir():
        path.unlink()
    with pytest.raises(CorruptFileError, match="no maps"):
        open_vqa_hat(tmp_path, "val")
    (folder / "vqahat_val").rmdir()
    with pytest.raises(UserError, match=r"vqahat_val.*missing"):
        open_vqa_hat(tmp_path, "val")


def test_digest_depends_on_maps_and_fusion(tmp_path, write_photo):
    folder = write_vqa_hat(tmp_path, write_photo)
    found = [one.digest() for one in (open_vqa_hat(tmp_path), open_vqa_hat(tmp_path, "val"))]
    found.append(open_vqa_hat(tmp_path, fuse=first_map).digest())
    assert len(set(found)) == 3 and open_vqa_hat(tmp_path).digest() == found[0]
    save_image(folder / "vqahat_train" / "100_1.png", np.eye(50) * 255)
    assert open_vqa_hat(tmp_path).digest() != found[0]
    assert read_map(folder / "vqahat_train" / "100_1.png").sum() == 50
