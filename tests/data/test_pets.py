import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.pets import animal_and_edge, oxford_pets
from overt.errors import CorruptFileError, UserError

LIST = "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_201 1 1 1\ngreat_pyrenees_9 16 2 9\n"


@pytest.fixture
def root(tmp_path, write_photo):
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "annotations" / "trimaps").mkdir(parents=True)
    (folder / "annotations" / "test.txt").write_text(LIST)
    trimap = np.full((6, 8), 2, dtype=np.uint8)
    trimap[:3, :4], trimap[3:, :4] = 1, 3
    for name in ("Abyssinian_201", "great_pyrenees_9"):
        write_photo(folder / "images" / f"{name}.jpg", (6, 8))
        Image.fromarray(trimap).save(folder / "annotations" / "trimaps" / f"{name}.png")
    return tmp_path


SMALL = {"size": (4, 4), "cells": (2, 2), "photos": None}


def test_batches_match_hand_computed_values(root):
    found = oxford_pets(root, **SMALL)
    batch = found.batch([0, 1])
    assert batch.ids[1] == "pets/great_pyrenees_9.jpg/great_pyrenees"
    assert batch.labels.tolist() == [0, 15] and len(found.classes) == 37
    assert batch.target.weights[0, 0, 0, 0].tolist() == [1, 0, 0, 0]
    assert not batch.boxes.any()


def test_animal_and_edge_includes_the_edge(root):
    found = oxford_pets(root, inside=animal_and_edge, **SMALL)
    assert found.batch([0]).target.weights[0, 0, 0, 0].tolist() == [0.5, 0, 0.5, 0]
    assert found.digest() != oxford_pets(root, **SMALL).digest()


def test_missing_or_corrupt_files_raise_with_their_name(root):
    folder = root / "oxford-iiit-pet" / "annotations"
    Image.fromarray(np.zeros((6, 8), dtype=np.uint8)).save(
        folder / "trimaps" / "Abyssinian_201.png"
    )
    with pytest.raises(CorruptFileError, match=r"_201\.png.*values"):
        oxford_pets(root, **SMALL).batch([0])
    (folder / "trimaps" / "Abyssinian_201.png").unlink()
    with pytest.raises(CorruptFileError, match=r"_201\.png.*missing"):
        oxford_pets(root, **SMALL)
    for line in ("Abyssinian_201 1 1", "Abyssinian_201 38 1 1", "../x_1 1 1 1"):
        (folder / "test.txt").write_text(line)
        with pytest.raises(CorruptFileError, match="line 1 is not"):
            oxford_pets(root, **SMALL)


def test_unknown_splits_and_wrong_photo_counts_raise(root):
    with pytest.raises(UserError, match=r"pets.*trainval.*test"):
        oxford_pets(root, "val")
    with pytest.raises(CorruptFileError, match=r"2 photos.*3669"):
        oxford_pets(root)


def test_masks_are_boolean_pixels_of_the_photo(root):
    mask = oxford_pets(root, **SMALL).masks([0])[0]
    assert mask.dtype == torch.bool and int(mask.sum()) == 12
