from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import metrics
from overt.data.custom import CustomMaps, CustomRationales, maps_in_folder
from overt.data.dataset import Dataset
from overt.data.human_attention import load_ground_truth
from overt.data.vocabulary import Vocabulary
from overt.errors import CorruptFileError, UserError

SMALL = {"size": (4, 4), "cells": (2, 2)}


def write_photos(root: Path, write_photo) -> list[Path]:
    return [write_photo(root / "photos" / f"{name}.jpg", (6, 8)) for name in ("a", "b", "c")]


def gaze_maps(photo: Path) -> list[torch.Tensor]:
    """Maps of two people for photo a, of one person (right half) for b, of nobody for c."""
    upper = torch.tensor([[1.0, 1], [0, 0]])
    return {"a": [upper, torch.eye(2)], "b": [torch.tensor([[0.0, 2.0]])], "c": []}[photo.stem]


def test_photo_maps_match_hand_computed_values(tmp_path, write_photo):
    mine = CustomMaps("mine", write_photos(tmp_path, write_photo), gaze_maps, **SMALL)
    assert isinstance(mine, Dataset) and len(mine) == 3
    batch, truth = load_ground_truth(mine, [0, 1, 2])
    assert batch.ids == ("mine/a.jpg", "mine/b.jpg", "mine/c.jpg") and batch.labels is None
    torch.testing.assert_close(
        truth.target.check().weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0.25, 0, 0.25], [0, 0.5, 0, 0.5], [0, 0, 0, 0]]),
    )
    assert truth.people.check().rows.tolist() == [[True, True], [True, False], [False, False]]
    ceiling = metrics.inter_human_agreement(metrics.sim, truth.people)
    torch.testing.assert_close(ceiling, torch.tensor([0.5, torch.nan, torch.nan]), equal_nan=True)


def test_photo_and_map_paths_may_be_strings(tmp_path, write_photo):
    paths = write_photos(tmp_path, write_photo)
    Image.fromarray(np.eye(2, dtype=np.uint8) * 255).save(tmp_path / "photos" / "b.png")
    folder = paths[0].parent
    mine = CustomMaps("mine", paths, maps_in_folder(folder), **SMALL)
    text = CustomMaps("mine", [str(path) for path in paths], maps_in_folder(str(folder)), **SMALL)
    assert text.files == mine.files and text.digest() == mine.digest()
    assert torch.equal(text.batch([1]).target.weights, mine.batch([1]).target.weights)


def test_labels_are_given_by_file_name(tmp_path, write_photo):
    paths = write_photos(tmp_path, write_photo)
    mine = CustomMaps(
        "mine", paths, gaze_maps, labels={"a.jpg": 2, "b.jpg": 0, "c.jpg": 1}, **SMALL
    )
    assert mine.batch([0, 2]).labels.tolist() == [2, 1]
    with pytest.raises(UserError, match=r"b\.jpg .*label"):
        CustomMaps("mine", paths, gaze_maps, labels={"a.jpg": 2}, **SMALL)


def test_maps_in_folder_finds_the_maps_of_each_person(tmp_path, write_photo):
    folder = tmp_path / "maps"
    folder.mkdir()
    left = np.zeros((2, 2), dtype=np.uint8)
    left[:, 0] = 255
    for name in ("a_2", "a_10", "a_b", "b"):
        Image.fromarray(left if name != "a_10" else 255 - left).save(folder / f"{name}.png")
    mine = CustomMaps("mine", write_photos(tmp_path, write_photo), maps_in_folder(folder), **SMALL)
    people = mine.people([0, 1, 2])
    assert people.rows.tolist() == [[True, True], [True, False], [False, False]]
    shares = people.normalize().weights[0, 0, 0]
    torch.testing.assert_close(shares, torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]))


def test_invalid_maps_and_photo_lists_raise(tmp_path, write_photo):
    paths = write_photos(tmp_path, write_photo)
    for wrong in (torch.tensor([[-1.0]]), torch.tensor([[torch.nan]])):
        mine = CustomMaps("mine", paths, lambda photo, wrong=wrong: [wrong], **SMALL)
        with pytest.raises(CorruptFileError, match=r"a\.jpg.*person 0"):
            mine.batch([0])
    with pytest.raises(UserError, match="no photos"):
        CustomMaps("mine", [], gaze_maps)
    with pytest.raises(UserError, match="2 folders"):
        CustomMaps("mine", [paths[0], tmp_path / "x.jpg"], gaze_maps)


def test_digest_depends_on_the_maps(tmp_path, write_photo):
    paths = write_photos(tmp_path, write_photo)
    first = CustomMaps("mine", paths, gaze_maps, **SMALL).digest()
    assert first == CustomMaps("mine", paths, gaze_maps, **SMALL).digest()
    assert first != CustomMaps("mine", paths, lambda photo: [torch.ones(1, 1)], **SMALL).digest()


# --- texts

TEXTS = ["a fine place", "bad"]
RATIONALES = [[[(2, 6)], [(2, 6), (7, 12)]], [[]]]


def make_texts(**options) -> CustomRationales:
    reader = Vocabulary.build([["a", "fine", "place"]])
    return CustomRationales("notes", TEXTS, RATIONALES, reader, **options)


def test_text_rationales_match_hand_computed_values():
    mine = make_texts(labels=[1, 0])
    assert isinstance(mine, Dataset)
    batch, truth = load_ground_truth(mine, [0, 1])
    assert batch.ids == ("notes/000000", "notes/000001") and batch.labels.tolist() == [1, 0]
    torch.testing.assert_close(
        truth.target.check().weights[:, 0, 0, 0],
        torch.tensor([[0, 2 / 3, 1 / 3], [0, 0, 0]]),
    )
    people = truth.people.check()
    assert people.values[0, 0, 0].tolist() == [[0, 1, 0], [0, 1, 1]]
    assert people.visible[1].tolist() == [[True, False, False], [False] * 3]
    assert make_texts().batch([0]).labels is None


def test_wrong_label_counts_and_indices_raise():
    with pytest.raises(UserError, match=r"2 texts.*1 labels"):
        make_texts(labels=[1])
    with pytest.raises(UserError, match="2 texts: 2 is out"):
        make_texts().batch([2])
    assert make_texts().digest() == make_texts().digest() != make_texts(labels=[1, 0]).digest()
