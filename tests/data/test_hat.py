from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data import hat, sets
from overt.data.asked import Look
from overt.data.features import Key, build
from overt.data.hat import VqaHat, first_map, gathered, read_map
from overt.data.images import crop, fit, stretch
from overt.data.source import Source
from overt.data.vqa import V1
from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry
from tests.data.vqa_files import write as write_vqa

FEW = replace(V1, questions={})


def save(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def write(root: Path, write_photo) -> Path:
    """Photos of 6 x 8; people looked at the left half, the right half, or nowhere."""
    write_vqa(root, write_photo, V1)
    left, right = np.zeros((6, 8)), np.zeros((6, 8))
    left[:, :4], right[:, 4:] = 200, 100
    folder = root / hat.FOLDER
    save(folder / "vqahat_train" / "100_1.png", left)
    save(folder / "vqahat_train" / "120_1.png", np.zeros((6, 8)))
    for person, picture in enumerate((left, right, np.zeros((6, 8))), start=1):
        save(folder / "vqahat_val" / f"501_{person}.png", picture)
    return folder


def small(root: Path, split: str = "train", **options) -> VqaHat:
    options = {"look": Look((4, 4), stretch), "cells": (2, 2), "maps": None, **options}
    return VqaHat(root, split, edition=FEW, **options)


def test_batches_by_hand(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path)
    batch = found.batch([0, 1])
    assert isinstance(found, Source) and len(found) == 2
    assert batch.ids == ("vqa1/100", "vqa1/120") and batch.groups == ("other", "yes/no")
    assert batch.target.weights[0, 0, 0, 0].tolist() == [0.5, 0, 0.5, 0]
    assert batch.target.rows[:, 0].tolist() == [True, False]  # a black map is nobody's
    assert found.classes == ("yes", "2", "red")  # those of all of train, not of the few with maps


def test_three_people(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, "val")
    target = found.batch([0]).target.weights[0, 0, 0, 0]
    torch.testing.assert_close(target, torch.full((4,), 0.25))  # half as bright counts the same
    alone = small(tmp_path, "val", fuse=first_map).batch([0]).target.weights[0, 0, 0, 0]
    assert alone.tolist() == [0.5, 0, 0.5, 0]
    people = found.people([0])
    assert people.values.shape == (1, 1, 1, 3, 4) and people.rows.tolist() == [[True, True, False]]
    assert people.values[0, 0, 0, 1].tolist() == pytest.approx([0, 12 * 100 / 255] * 2)
    people.check()


@pytest.mark.parametrize("how", [stretch, crop, fit])
def test_maps_go_the_way_of_their_photos(tmp_path, write_photo, how, generator):
    """The map at its own size, painted pixel by pixel, agrees with the boxes of the cells."""
    folder = write(tmp_path, write_photo)
    values = torch.randint(0, 256, (12, 16), generator=generator).numpy()  # twice the photo's size
    save(folder / "vqahat_train" / "100_1.png", values)
    found = small(tmp_path, look=Look((8, 8), how), cells=(4, 4))
    people = found.people([0]).values[0, 0, 0, 0]
    boxes = found.vqa.batch([0]).geometry.cells((4, 4))[0]
    expected = []
    for x0, y0, x1, y1 in (boxes * 2).tolist():
        total = 0.0
        for y in range(12):
            for x in range(16):
                high = max(0.0, min(y + 1, y1) - max(y, y0))
                wide = max(0.0, min(x + 1, x1) - max(x, x0))
                total += high * wide * values[y, x] / 255
        expected.append(total)
    assert people.tolist() == pytest.approx(expected, abs=1e-4)


def test_nothing_is_lost_on_any_grid(generator):
    picture = torch.rand(7, 5, generator=generator)
    for cells in ((1, 1), (3, 2), (14, 14)):
        geometry = PixelGeometry.identity(1, (70, 100)).resize((32, 32))
        found = gathered(picture, geometry.cells(cells)[0], geometry.size[0])
        torch.testing.assert_close(found.sum(), picture.sum())


def test_features_stand_in_for_photos(tmp_path, write_photo):
    write(tmp_path, write_photo)
    alone = small(tmp_path).vqa.photos(Look((4, 4), stretch))
    key = Key("mean", "none", "4 x 4", alone.digest())
    cache = build(tmp_path / "cache", key, alone, lambda b: b.images.float().flatten(2).mT)
    for path in alone.files:
        path.unlink()
    found = small(tmp_path, look=Look(features=cache))
    batch = found.batch([0])
    assert batch.features.shape == (1, 16, 3) and batch.images is None
    assert batch.target.weights[0, 0, 0, 0].tolist() == [0.5, 0, 0.5, 0]
    assert found.people([1]).rows.tolist() == [[False]]


def test_what_is_missing_or_broken_is_named(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    with pytest.raises(Damaged, match="2 maps, not 58475"):
        VqaHat(tmp_path, edition=FEW)
    with pytest.raises(BadInput, match="train and val, not 'test'"):
        small(tmp_path, "test")
    (folder / "vqahat_train" / "100_1.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(Damaged, match=r"100_1\.png"):
        small(tmp_path).batch([0])
    save(folder / "vqahat_train" / "777_1.png", np.zeros((2, 2)))
    with pytest.raises(Damaged, match="no question 777"):
        small(tmp_path)
    (folder / "vqahat_train" / "777_1.png").rename(folder / "vqahat_train" / "x_1.png")
    with pytest.raises(Damaged, match="called after a question"):
        small(tmp_path)
    for path in (folder / "vqahat_val").iterdir():
        path.unlink()
    with pytest.raises(Damaged, match="no maps"):
        small(tmp_path, "val")
    (folder / "vqahat_val").rmdir()
    with pytest.raises(BadInput, match="vqahat_val is missing"):
        small(tmp_path, "val")


def test_digest_tells_maps_and_ways_apart(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    found = [one.digest() for one in (small(tmp_path), small(tmp_path, "val"))]
    found.append(small(tmp_path, fuse=first_map).digest())
    assert len(set(found)) == 3 and small(tmp_path).digest() == found[0]
    save(folder / "vqahat_train" / "100_1.png", np.eye(50) * 255)
    assert small(tmp_path).digest() != found[0]
    assert read_map(folder / "vqahat_train" / "100_1.png").sum() == 50


def test_it_is_listed():
    assert sets.find("vqa_hat").opens
