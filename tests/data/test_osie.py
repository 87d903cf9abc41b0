import json
from pathlib import Path

import pytest
import torch

from overt.data.dataset import Dataset
from overt.data.images import crop, stretch
from overt.data.osie import Osie
from overt.errors import CorruptFileError, UserError

# one person fixates the upper left twice and the lower right once; the others fixate once
FIXATIONS = {
    "1001.jpg": [[[100, 110, 700], [100, 90, 500], [200, 150, 80]], [[750], [550], [300]]],
    "1002.jpg": [[[400.5], [300], [100]]],
}


def write_osie(root: Path, write_photo, table: object = FIXATIONS) -> Path:
    folder = root / "osie"
    for name in FIXATIONS:
        write_photo(folder / "images" / name, (6, 8))
    (folder / "fixations.json").write_text(json.dumps(table))
    return folder


def open_osie(root: Path, **options) -> Osie:
    return Osie(
        root, **{"size": (4, 4), "resize": stretch, "cells": (2, 2), "photos": 2, **options}
    )


def test_batches_match_hand_computed_values(tmp_path, write_photo):
    write_osie(tmp_path, write_photo)
    found = open_osie(tmp_path, bandwidth=0.0)
    batch = found.batch([0, 1])
    assert isinstance(found, Dataset) and len(found) == 2
    assert batch.ids == ("osie/1001.jpg", "osie/1002.jpg") and batch.labels is None
    assert batch.images.shape == (2, 3, 4, 4)
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0],
        torch.tensor([[1 / 3, 0, 0, 2 / 3], [0, 0, 0, 1.0]]),  # every person has the same weight
    )
    people = found.people([0, 1])
    assert people.values[:, 0, 0].tolist() == [
        [[2, 0, 0, 1], [0, 0, 0, 1]],
        [[0, 0, 0, 1], [0, 0, 0, 0]],
    ]
    assert people.rows.tolist() == [[True, True], [True, False]]
    people.check()


def test_points_are_photo_pixels(tmp_path, write_photo):
    write_osie(tmp_path, write_photo)
    found = open_osie(tmp_path)
    points = found.points([0])[0]
    torch.testing.assert_close(points[1], torch.tensor([[5.5, 7.5]]))
    person = found.fixations([0])[0][0]
    assert person.points.tolist() == [[100, 100], [90, 110], [500, 700]]
    assert person.times.tolist() == [200, 150, 80]


def test_gaussian_mass_is_kept_on_the_photo(tmp_path, write_photo):
    write_osie(tmp_path, write_photo)
    wide = open_osie(tmp_path, bandwidth=24.0).people([1]).values[0, 0, 0, 0]
    torch.testing.assert_close(wide, torch.full((4,), 0.25), atol=0.02, rtol=0)
    cut = open_osie(tmp_path, bandwidth=24.0, resize=crop, cells=(1, 1)).people([0]).values[0, 0, 0]
    assert cut[:, 0].tolist() == pytest.approx([2, 0], abs=0.01)  # the crop removes two fixations


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "table.*photos"),
        ({}, "table.*photos"),
        ({"1001.jpg": [], "1002.jpg": FIXATIONS["1002.jpg"]}, r"1001\.jpg .*people"),
        ({"1001.jpg": [[[1], [2]]]}, r"person 0 .*1001\.jpg"),
        ({"1001.jpg": [[[1], [2, 3], [4]]]}, r"person 0 .*1001\.jpg"),
        ({"1001.jpg": [[[1], [2], [4, 5]]]}, r"person 0 .*1001\.jpg"),
        ({"1001.jpg": [[[1], [700], [4]]]}, r"person 0 .*1001\.jpg"),
        ({"1001.jpg": [[["x"], [7], [4]]]}, r"person 0 .*1001\.jpg"),
        ({"1001.jpg": [[1, 7, 4]]}, r"person 0 .*1001\.jpg"),
    ],
)
def test_invalid_fixations_raise_with_photo_and_person(tmp_path, write_photo, table, message):
    write_osie(tmp_path, write_photo, table)
    with pytest.raises(CorruptFileError, match=message):
        open_osie(tmp_path)


def test_missing_files_and_invalid_options_raise(tmp_path, write_photo):
    folder = write_osie(tmp_path, write_photo)
    with pytest.raises(CorruptFileError, match=r"2 photos.*700"):
        Osie(tmp_path)
    with pytest.raises(UserError, match="split 'train'"):
        open_osie(tmp_path, split="train")
    with pytest.raises(UserError, match=r"bandwidth .* -1"):
        open_osie(tmp_path, bandwidth=-1.0)
    with pytest.raises(UserError, match=r"2 \w+: 2 is out"):
        open_osie(tmp_path).batch([2])
    (folder / "images" / "1002.jpg").unlink()
    with pytest.raises(CorruptFileError, match=r"1002\.jpg.*missing"):
        open_osie(tmp_path)
    (folder / "fixations.json").unlink()
    with pytest.raises(UserError, match=r"fixations.*missing"):
        open_osie(tmp_path)


def test_digest_depends_on_data_and_bandwidth(tmp_path, write_photo):
    write_osie(tmp_path, write_photo)
    before = open_osie(tmp_path).digest()
    assert open_osie(tmp_path).digest() == before != open_osie(tmp_path, bandwidth=1.0).digest()
    write_osie(tmp_path, write_photo, {**FIXATIONS, "1002.jpg": FIXATIONS["1001.jpg"]})
    assert open_osie(tmp_path).digest() != before


@pytest.mark.long
def test_real_osie(data_root, needs):
    needs(data_root, "osie")
    found = Osie(data_root, bandwidth=0.0, resize=stretch)
    everyone = found.fixations(range(700))
    assert {len(people) for people in everyone} == {15}
    assert sum(len(person.times) for people in everyone for person in people) == 98_321
    batch = found.batch([0, 350])
    batch.target.check()
    counted = found.people([0]).values.sum()
    assert counted == sum(len(person.times) for person in everyone[0])
