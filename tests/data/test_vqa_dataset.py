from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.feature_cache import FeatureCache, FeatureKey, build_feature_cache
from overt.data.images import stretch
from overt.data.splits import Split
from overt.data.vqa_dataset import (
    PhotoInput,
    PhotoQuestions,
    build_vocabulary,
    hold_out_photos,
    most_common_answers,
    one_hot,
    open_photos,
)
from overt.errors import CorruptFileError, UserError

PHOTOS = ["a.png", "b.png", "c.png"]
TEXTS = ["what is it ?", "how many ?", "what color ?", "is it red ?"]
SMALL = PhotoInput((4, 4), stretch)


@pytest.fixture
def folder(tmp_path, write_photo) -> Path:
    for number, name in enumerate(PHOTOS):
        write_photo(tmp_path / name, (4, 8), 10 * number)
    return tmp_path


def open_questions(folder: Path, photo_input: PhotoInput = SMALL) -> PhotoQuestions:
    return PhotoQuestions(
        "toy",
        "train",
        folder,
        PHOTOS,
        np.array([2, 0, 2, 1]),
        TEXTS,
        [f"toy/{number}" for number in range(4)],
        build_vocabulary(TEXTS),
        photo_input,
    )


def build_features(folder: Path, names: list[str] = PHOTOS) -> FeatureCache:
    key = FeatureKey("mean", "none", "4 x 4", "toy")
    shown = open_photos("toy", "train", folder, names, SMALL)
    return build_feature_cache(
        folder / "cache", key, shown, lambda b: b.images.float().flatten(2).mT
    )


def test_photos_are_opened_once_per_batch(folder):
    batch = open_questions(folder).batch([2, 1, 0])
    assert batch.ids == ("toy/2", "toy/1", "toy/0")
    assert batch.images.shape == (2, 3, 4, 4) and batch.image_of.tolist() == [1, 0, 1]
    assert batch.images[:, 0, 0, 0].tolist() == [0, 20]
    assert batch.geometry.size.tolist() == [[4, 8], [4, 8]]
    assert batch.text.texts == ("what color ?", "how many ?", "what is it ?")
    assert batch.token_mask.sum(dim=1).tolist() == [3, 3, 4]
    assert open_questions(folder).photo_ids([0, 3]) == ("toy/c.png", "toy/b.png")
    assert len(open_questions(folder).batch([])) == 0


def test_cached_features_replace_photos(folder):
    photo_input = PhotoInput(features=build_features(folder))
    for name in PHOTOS:
        (folder / name).unlink()
    found = open_questions(folder, photo_input)
    batch = found.batch([2, 1, 0])
    assert batch.images is None and batch.geometry is None and found.files == ()
    assert batch.features.shape == (3, 16, 3) and batch.features[:, 0, 0].tolist() == [20, 0, 20]
    assert found.digest() == found.digest_names() == photo_input.features.digest()


def test_missing_photos_and_features_raise(folder):
    with pytest.raises(UserError, match=r"toy/c\.png"):
        open_questions(folder, PhotoInput(features=build_features(folder, PHOTOS[:2])))
    (folder / "b.png").unlink()
    with pytest.raises(CorruptFileError, match=r"b\.png.*missing"):
        open_questions(folder)


def test_digests_depend_on_names_and_sizes_or_contents(folder, write_photo):
    before = open_questions(folder).digest_names(), open_questions(folder).digest()
    content = bytearray((folder / "a.png").read_bytes())
    content[-1] ^= 1  # the size is unchanged
    (folder / "a.png").write_bytes(content)
    assert open_questions(folder).digest_names() == before[0]
    assert open_questions(folder).digest() != before[1]
    write_photo(folder / "a.png", (40, 80), 3)
    assert open_questions(folder).digest_names() != before[0]


def test_out_of_range_index_raises(folder):
    for place in (-1, 4):
        with pytest.raises(UserError, match=rf"4 \w+: {place} is out"):
            open_questions(folder).batch([place])


def test_hold_out_photos_keeps_the_questions_of_a_photo_together():
    photo_of = np.array([0, 0, 1, 2, 2, 2, 3, 4])
    train, val = (hold_out_photos(split, photo_of, 2) for split in (Split.TRAIN, Split.VAL))
    assert sorted(train + val) == list(range(8)) == hold_out_photos(Split.TRAIN_VAL, photo_of, 2)
    assert len(set(photo_of[val])) == 2 and not set(photo_of[val]) & set(photo_of[train])


def test_most_common_answers_and_one_hot():
    assert most_common_answers(["b", "a", "c", "c"]) == ("c", "a", "b")
    assert most_common_answers(["b", "a", "c", "c"], 2) == ("c", "a")
    assert one_hot(torch.tensor([1, -1, 0]), 2).tolist() == [[0, 1], [0, 0], [1, 0]]
