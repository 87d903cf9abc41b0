import json
from pathlib import Path

import pytest
import torch

from overt.data.images import crop, stretch
from overt.data.osie import Osie
from overt.data.source import Source
from overt.errors import BadInput, Damaged

# a person who looks twice at the upper left and once at the lower right; one who looks once
FIXATIONS = {
    "1001.jpg": [[[100, 110, 700], [100, 90, 500], [200, 150, 80]], [[750], [550], [300]]],
    "1002.jpg": [[[400.5], [300], [100]]],
}


def write(root: Path, write_photo, table: object = FIXATIONS) -> Path:
    folder = root / "osie"
    for name in FIXATIONS:
        write_photo(folder / "images" / name, (6, 8))
    (folder / "fixations.json").write_text(json.dumps(table))
    return folder


def small(root: Path, **options) -> Osie:
    return Osie(root, **{"size": (4, 4), "how": stretch, "cells": (2, 2), "photos": 2, **options})


def test_batches_by_hand(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path, bandwidth=0.0)
    batch = found.batch([0, 1])
    assert isinstance(found, Source) and len(found) == 2
    assert batch.ids == ("osie/1001.jpg", "osie/1002.jpg") and batch.labels is None
    assert batch.images.shape == (2, 3, 4, 4)
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0],
        torch.tensor([[1 / 3, 0, 0, 2 / 3], [0, 0, 0, 1.0]]),  # people count the same
    )
    people = found.people([0, 1])
    assert people.values[:, 0, 0].tolist() == [
        [[2, 0, 0, 1], [0, 0, 0, 1]],
        [[0, 0, 0, 1], [0, 0, 0, 0]],
    ]
    assert people.rows.tolist() == [[True, True], [True, False]]
    people.check()


def test_points_in_pixels_of_the_photo(tmp_path, write_photo):
    write(tmp_path, write_photo)
    found = small(tmp_path)
    points = found.points([0])[0]
    torch.testing.assert_close(points[1], torch.tensor([[5.5, 7.5]]))
    person = found.fixations([0])[0][0]
    assert person.points.tolist() == [[100, 100], [90, 110], [500, 700]]
    assert person.times.tolist() == [200, 150, 80]


def test_a_gaussian_keeps_its_mass_on_the_photo(tmp_path, write_photo):
    write(tmp_path, write_photo)
    wide = small(tmp_path, bandwidth=24.0).people([1]).values[0, 0, 0, 0]
    torch.testing.assert_close(wide, torch.full((4,), 0.25), atol=0.02, rtol=0)
    cut = small(tmp_path, bandwidth=24.0, how=crop, cells=(1, 1)).people([0]).values[0, 0, 0]
    assert cut[:, 0].tolist() == pytest.approx([2, 0], abs=0.01)  # the crop cut two away


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([], "no table of photos"),
        ({}, "no table of photos"),
        ({"1001.jpg": [], "1002.jpg": FIXATIONS["1002.jpg"]}, "nobody looked at 1001"),
        ({"1001.jpg": [[[1], [2]]]}, r"person 0 of 1001\.jpg"),
        ({"1001.jpg": [[[1], [2, 3], [4]]]}, r"person 0 of 1001\.jpg"),
        ({"1001.jpg": [[[1], [2], [4, 5]]]}, r"person 0 of 1001\.jpg"),
        ({"1001.jpg": [[[1], [700], [4]]]}, r"person 0 of 1001\.jpg"),
        ({"1001.jpg": [[["x"], [7], [4]]]}, r"person 0 of 1001\.jpg"),
        ({"1001.jpg": [[1, 7, 4]]}, r"person 0 of 1001\.jpg"),
    ],
)
def test_broken_fixations_are_named(tmp_path, write_photo, table, said):
    write(tmp_path, write_photo, table)
    with pytest.raises(Damaged, match=said):
        small(tmp_path)


def test_what_is_missing_is_named(tmp_path, write_photo):
    folder = write(tmp_path, write_photo)
    with pytest.raises(Damaged, match="2 photos, not 700"):
        Osie(tmp_path)
    with pytest.raises(BadInput, match="no official split 'train'"):
        small(tmp_path, split="train")
    with pytest.raises(BadInput, match="bandwidth of -1"):
        small(tmp_path, bandwidth=-1.0)
    with pytest.raises(BadInput, match="0 to 1, not 2"):
        small(tmp_path).batch([2])
    (folder / "images" / "1002.jpg").unlink()
    with pytest.raises(Damaged, match=r"1002\.jpg is missing"):
        small(tmp_path)
    (folder / "fixations.json").unlink()
    with pytest.raises(BadInput, match=r"fixations\.json is missing"):
        small(tmp_path)


def test_digest_tells_data_and_bandwidth_apart(tmp_path, write_photo):
    write(tmp_path, write_photo)
    before = small(tmp_path).digest()
    assert small(tmp_path).digest() == before != small(tmp_path, bandwidth=1.0).digest()
    write(tmp_path, write_photo, {**FIXATIONS, "1002.jpg": FIXATIONS["1001.jpg"]})
    assert small(tmp_path).digest() != before


def test_real_osie(data_root, needs):
    needs(data_root, "osie")
    found = Osie(data_root, bandwidth=0.0, how=stretch)
    everyone = found.fixations(range(700))
    assert {len(people) for people in everyone} == {15}
    assert sum(len(person.times) for people in everyone for person in people) == 98_321
    batch = found.batch([0, 350])
    batch.target.check()
    counted = found.people([0]).values.sum()
    assert counted == sum(len(person.times) for person in everyone[0])
