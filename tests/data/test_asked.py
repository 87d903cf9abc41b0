from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.asked import Asked, Look, gallery, hold_out, most_common, one_hot, words_of
from overt.data.features import FeatureCache, Key, build
from overt.data.images import stretch
from overt.data.splits import Split
from overt.errors import BadInput, Damaged

PHOTOS = ["a.png", "b.png", "c.png"]
TEXTS = ["what is it ?", "how many ?", "what color ?", "is it red ?"]
SMALL = Look((4, 4), stretch)


@pytest.fixture
def folder(tmp_path, write_photo) -> Path:
    for number, name in enumerate(PHOTOS):
        write_photo(tmp_path / name, (4, 8), 10 * number)
    return tmp_path


def asked(folder: Path, look: Look = SMALL) -> Asked:
    return Asked(
        "toy",
        "train",
        folder,
        PHOTOS,
        np.array([2, 0, 2, 1]),
        TEXTS,
        [f"toy/{number}" for number in range(4)],
        words_of(TEXTS),
        look,
    )


def features(folder: Path, names: list[str] = PHOTOS) -> FeatureCache:
    key = Key("mean", "none", "4 x 4", "toy")
    shown = gallery("toy", "train", folder, names, SMALL)
    return build(folder / "cache", key, shown, lambda b: b.images.float().flatten(2).mT)


def test_photos_are_opened_once_a_batch(folder):
    batch = asked(folder).batch([2, 1, 0])
    assert batch.ids == ("toy/2", "toy/1", "toy/0")
    assert batch.images.shape == (2, 3, 4, 4) and batch.image_of.tolist() == [1, 0, 1]
    assert batch.images[:, 0, 0, 0].tolist() == [0, 20]
    assert batch.geometry.size.tolist() == [[4, 8], [4, 8]]
    assert batch.text.texts == ("what color ?", "how many ?", "what is it ?")
    assert batch.token_mask.sum(dim=1).tolist() == [3, 3, 4]
    assert asked(folder).photo_ids([0, 3]) == ("toy/c.png", "toy/b.png")
    assert len(asked(folder).batch([])) == 0


def test_features_stand_in_for_photos(folder):
    look = Look(features=features(folder))
    for name in PHOTOS:
        (folder / name).unlink()
    found = asked(folder, look)
    batch = found.batch([2, 1, 0])
    assert batch.images is None and batch.geometry is None and found.files == ()
    assert batch.features.shape == (3, 16, 3) and batch.features[:, 0, 0].tolist() == [20, 0, 20]
    assert found.digest_photos() == found.digest_names() == look.features.digest()


def test_photos_and_features_that_are_missing_are_named(folder):
    with pytest.raises(BadInput, match=r"no features of toy/c\.png"):
        asked(folder, Look(features=features(folder, PHOTOS[:2])))
    (folder / "b.png").unlink()
    with pytest.raises(Damaged, match=r"b\.png is missing"):
        asked(folder)


def test_digests_see_names_and_sizes_or_contents(folder, write_photo):
    before = asked(folder).digest_names(), asked(folder).digest_photos()
    content = bytearray((folder / "a.png").read_bytes())
    content[-1] ^= 1  # the size stays
    (folder / "a.png").write_bytes(content)
    assert asked(folder).digest_names() == before[0]
    assert asked(folder).digest_photos() != before[1]
    write_photo(folder / "a.png", (40, 80), 3)
    assert asked(folder).digest_names() != before[0]


def test_places_out_of_range_are_named(folder):
    for place in (-1, 4):
        with pytest.raises(BadInput, match=f"0 to 3, not {place}"):
            asked(folder).batch([place])


def test_whole_photos_are_held_out():
    photo_of = np.array([0, 0, 1, 2, 2, 2, 3, 4])
    train, val = (hold_out(split, photo_of, 2) for split in (Split.TRAIN, Split.VAL))
    assert sorted(train + val) == list(range(8)) == hold_out(Split.TRAIN_VAL, photo_of, 2)
    assert len(set(photo_of[val])) == 2 and not set(photo_of[val]) & set(photo_of[train])


def test_classes_and_their_scores():
    assert most_common(["b", "a", "c", "c"]) == ("c", "a", "b")
    assert most_common(["b", "a", "c", "c"], 2) == ("c", "a")
    assert one_hot(torch.tensor([1, -1, 0]), 2).tolist() == [[0, 1], [0, 0], [1, 0]]
