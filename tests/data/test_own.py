from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import measure
from overt.data.human import truth_of
from overt.data.own import OwnMaps, OwnMarks, pictures_in
from overt.data.source import Source
from overt.data.vocabulary import Vocabulary
from overt.errors import BadInput, Damaged

SMALL = {"size": (4, 4), "cells": (2, 2)}


def photos(root: Path, write_photo) -> list[Path]:
    return [write_photo(root / "photos" / f"{name}.jpg", (6, 8)) for name in ("a", "b", "c")]


def looks(photo: Path) -> list[torch.Tensor]:
    """Two people of photo a, one of b who looks at the right, none of c."""
    upper = torch.tensor([[1.0, 1], [0, 0]])
    return {"a": [upper, torch.eye(2)], "b": [torch.tensor([[0.0, 2.0]])], "c": []}[photo.stem]


def test_photos_by_hand(tmp_path, write_photo):
    mine = OwnMaps("mine", photos(tmp_path, write_photo), looks, **SMALL)
    assert isinstance(mine, Source) and len(mine) == 3
    batch, truth = truth_of(mine, [0, 1, 2])
    assert batch.ids == ("mine/a.jpg", "mine/b.jpg", "mine/c.jpg") and batch.labels is None
    torch.testing.assert_close(
        truth.target.check().weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0.25, 0, 0.25], [0, 0.5, 0, 0.5], [0, 0, 0, 0]]),
    )
    assert truth.people.check().rows.tolist() == [[True, True], [True, False], [False, False]]
    ceiling = measure.ceiling(measure.sim, truth.people)
    torch.testing.assert_close(ceiling, torch.tensor([0.5, torch.nan, torch.nan]), equal_nan=True)


def test_photos_and_the_folder_of_their_maps_may_be_text(tmp_path, write_photo):
    paths = photos(tmp_path, write_photo)
    Image.fromarray(np.eye(2, dtype=np.uint8) * 255).save(tmp_path / "photos" / "b.png")
    folder = paths[0].parent
    mine = OwnMaps("mine", paths, pictures_in(folder), **SMALL)
    text = OwnMaps("mine", [str(path) for path in paths], pictures_in(str(folder)), **SMALL)
    assert text.files == mine.files and text.digest() == mine.digest()
    assert torch.equal(text.batch([1]).target.weights, mine.batch([1]).target.weights)


def test_labels_are_by_name(tmp_path, write_photo):
    paths = photos(tmp_path, write_photo)
    mine = OwnMaps("mine", paths, looks, labels={"a.jpg": 2, "b.jpg": 0, "c.jpg": 1}, **SMALL)
    assert mine.batch([0, 2]).labels.tolist() == [2, 1]
    with pytest.raises(BadInput, match=r"b\.jpg has no label"):
        OwnMaps("mine", paths, looks, labels={"a.jpg": 2}, **SMALL)


def test_pictures_beside_photos(tmp_path, write_photo):
    folder = tmp_path / "maps"
    folder.mkdir()
    left = np.zeros((2, 2), dtype=np.uint8)
    left[:, 0] = 255
    for name in ("a_2", "a_10", "a_b", "b"):
        Image.fromarray(left if name != "a_10" else 255 - left).save(folder / f"{name}.png")
    mine = OwnMaps("mine", photos(tmp_path, write_photo), pictures_in(folder), **SMALL)
    people = mine.people([0, 1, 2])
    assert people.rows.tolist() == [[True, True], [True, False], [False, False]]
    shares = people.normalize().weights[0, 0, 0]
    torch.testing.assert_close(shares, torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]))


def test_maps_that_are_none_are_named(tmp_path, write_photo):
    paths = photos(tmp_path, write_photo)
    for wrong in (torch.tensor([[-1.0]]), torch.tensor([[torch.nan]])):
        mine = OwnMaps("mine", paths, lambda photo, wrong=wrong: [wrong], **SMALL)
        with pytest.raises(Damaged, match=r"a\.jpg: the map of person 0"):
            mine.batch([0])
    with pytest.raises(BadInput, match="no photos"):
        OwnMaps("mine", [], looks)
    with pytest.raises(BadInput, match="2 folders"):
        OwnMaps("mine", [paths[0], tmp_path / "x.jpg"], looks)


def test_digest_knows_what_people_did(tmp_path, write_photo):
    paths = photos(tmp_path, write_photo)
    first = OwnMaps("mine", paths, looks, **SMALL).digest()
    assert first == OwnMaps("mine", paths, looks, **SMALL).digest()
    assert first != OwnMaps("mine", paths, lambda photo: [torch.ones(1, 1)], **SMALL).digest()


# --- texts

TEXTS = ["a fine place", "bad"]
MARKED = [[[(2, 6)], [(2, 6), (7, 12)]], [[]]]


def texts(**options) -> OwnMarks:
    reader = Vocabulary.build([["a", "fine", "place"]])
    return OwnMarks("notes", TEXTS, MARKED, reader, **options)


def test_texts_by_hand():
    mine = texts(labels=[1, 0])
    assert isinstance(mine, Source)
    batch, truth = truth_of(mine, [0, 1])
    assert batch.ids == ("notes/000000", "notes/000001") and batch.labels.tolist() == [1, 0]
    torch.testing.assert_close(
        truth.target.check().weights[:, 0, 0, 0],
        torch.tensor([[0, 2 / 3, 1 / 3], [0, 0, 0]]),
    )
    people = truth.people.check()
    assert people.values[0, 0, 0].tolist() == [[0, 1, 0], [0, 1, 1]]
    assert people.visible[1].tolist() == [[True, False, False], [False] * 3]
    assert texts().batch([0]).labels is None


def test_texts_that_do_not_fit_are_refused():
    with pytest.raises(BadInput, match="notes has 2 texts and 1 labels"):
        texts(labels=[1])
    with pytest.raises(BadInput, match="texts 0 to 1, not 2"):
        texts().batch([2])
    assert texts().digest() == texts().digest() != texts(labels=[1, 0]).digest()
