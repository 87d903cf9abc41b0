"""Pictures with captions: what a batch of them holds, and where it comes from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import captions as read
from overt.data import features
from overt.data.batch import Batch
from overt.data.features import FeatureCache
from overt.data.photos import PhotoSet
from overt.data.scenes.captions import CaptionScenes
from overt.data.vocabulary import BEGIN, END
from overt.errors import BadInput
from overt.measure.captions import caption_words
from overt.recipes.a2 import data
from overt.recipes.a2.data import Kept, Read, crops, every, one_each, photos, scenes
from overt.recipes.a2.recipe import Files, Photos, Scenes
from overt.recipes.han import features as kept
from tests.recipes.a2.small import SAID, write_coco, write_flickr8k, write_flickr30k


@pytest.fixture(scope="module")
def drawn() -> data.Parts:
    return scenes(Scenes(train=6, val=2, test=3))


def test_a_batch_of_scenes_has_all_captions_of_each(drawn: data.Parts) -> None:
    batch = drawn.train.batch([4, 1])
    assert len(batch) == 10 and batch.image_index.tolist() == [0] * 5 + [1] * 5
    theirs = CaptionScenes("train", 1, 6).batch([4, 1])
    assert batch.tokens is not None and theirs.tokens is not None
    wide = theirs.tokens.shape[1]
    assert torch.equal(batch.tokens[:, :wide], theirs.tokens)
    assert torch.equal(batch.token_mask[:, :wide], theirs.token_mask)  # type: ignore[index]
    assert batch.tokens.shape[1] == drawn.train.lengths.max()  # whatever captions are in it
    assert not batch.token_mask[:, wide:].any()  # type: ignore[index]
    assert batch.references == theirs.references
    assert torch.equal(batch.boxes, theirs.boxes)  # type: ignore[arg-type]
    assert batch.ids[6] == "scenes-captions-train-1-000001#1"


def test_a_picture_is_encoded_once_whatever_is_said_of_it(drawn: data.Parts) -> None:
    batch = drawn.train.batch([3, 0, 5])
    pictures, of = one_each(batch)
    assert len(pictures) == 3 and torch.equal(of, batch.image_index)
    assert torch.equal(pictures.features[of], batch.features)  # type: ignore[index, arg-type]


def test_pictures_of_equally_many_captions_are_found_without_looking(drawn: data.Parts) -> None:
    batch = drawn.train.batch([3, 0, 5])
    assert drawn.train.each == 5
    ours, (theirs, _) = every(batch, 5), one_each(batch)
    assert len(ours) == 3
    for name in ("images", "image_of", "boxes", "features", "region_mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    uneven = replace(drawn.train, first=np.array([0, 5, 7, 15, 20, 25, 30]))
    assert uneven.each is None


def test_pictures_without_captions_are_there_to_be_described(drawn: data.Parts) -> None:
    batch = drawn.test.pictures([0, 2])
    assert len(batch) == 2 and batch.tokens is None
    assert batch.references is not None and len(batch.references[1]) == 5


def test_references_of_a_reward_end_and_do_not_begin(drawn: data.Parts) -> None:
    texts = drawn.train.texts()
    assert len(texts) == 6 and all(len(many) == 5 for many in texts)
    assert all(text[-1] == END and BEGIN not in text for many in texts for text in many)


def test_crops_are_the_pixels_of_the_box() -> None:
    images = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    images[0, 0, 10:20, 20:30] = 255
    boxes = torch.tensor([[[20.0, 10.0, 30.0, 20.0], [0.0, 20.0, 20.0, 40.0]]])
    found = crops(images, boxes)[0]
    pixels, where = found[:, :-6].reshape(2, 3, data.CROP, data.CROP), found[:, -6:]
    torch.testing.assert_close(pixels[0, 0], torch.ones(10, 10))
    torch.testing.assert_close(pixels[0, 1], -torch.ones(10, 10))
    torch.testing.assert_close(pixels[1], -torch.ones(3, 10, 10))
    torch.testing.assert_close(where[0], torch.tensor([0.5, 0.25, 0.75, 0.5, 0.25, 0.25]))
    assert found.shape[1] == data.WIDTH


def test_what_is_held_is_given_in_full_bits_and_moves() -> None:
    kept = Kept({"features": torch.arange(6.0).half().reshape(3, 2)})
    assert kept([2, 0])["features"].tolist() == [[4, 5], [0, 1]]
    assert kept.to("cpu")([1])["features"].dtype == torch.float32
    asked = Read(lambda chosen: {"features": torch.tensor(chosen)}).to("cpu")
    assert asked([3, 4])["features"].tolist() == [3, 4]


def test_photos_of_flickr8k_are_cells_of_a_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_flickr8k(tmp_path)
    _expect_few(monkeypatch)
    cells = _cells(tmp_path / "cells", [f"flickr8k/{number}.jpg" for number in range(12)])
    monkeypatch.setattr(data, "_cells", lambda *_: cells)
    parts = photos(Photos(Files.FLICKR8K, minimum=1), root)
    assert [len(one) for one in (parts.train, parts.val, parts.test)] == [6, 3, 3]
    batch = parts.val.batch([1])
    assert batch.features is not None and batch.features.unique().tolist() == [7]
    assert parts.words.size == 5 + len({word for text in SAID for word in caption_words(text)})
    assert batch.tokens is not None
    assert parts.words.decode(batch.tokens[1][:7].tolist()) == [
        *("<begin>", "a", "brown", "dog", "is", "running", "<end>")
    ]
    assert parts.photos is not None and len(parts.photos) == 3
    few = photos(Photos(Files.FLICKR8K, minimum=1, limit=2, longest=2), root)
    assert len(few.train) == 2 and int(few.train.lengths.max()) == 4


def test_too_many_features_are_read_by_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [str(number) for number in range(5)]
    cells = _cells(tmp_path / "cells", wanted)
    for most in (data.HELD, 10):
        monkeypatch.setattr(data, "HELD", most)
        show = data._cached(cells, wanted)
        assert isinstance(show, Kept if most > 10 else Read)
        assert show([3, 1])["features"][:, 0, 0].tolist() == [3, 1]


def test_coco_is_read_from_the_official_files(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    parts = photos(Photos(Files.COCO, features=str(folder), minimum=1), tmp_path)
    assert [len(one) for one in (parts.train, parts.val, parts.test)] == [6, 3, 3]
    batch = parts.test.pictures([0, 1])  # photos 3 and 7, with 2 and 3 regions
    assert batch.region_mask is not None
    assert batch.region_mask.sum(dim=1).tolist() == [2, 3]
    assert batch.features is not None and batch.features.shape == (2, 3, 8)
    assert parts.photos is None and parts.eye.width == 8


def test_flickr30k_is_read_in_karpathys_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photos are found below the folder of Flickr30k, and cells are asked of all of them."""
    root = write_flickr30k(tmp_path)
    asked: list[str] = []

    def cells_of(shown: PhotoSet, *_: object) -> FeatureCache:
        asked.extend(shown.batch(range(len(shown))).ids)
        return _cells(tmp_path / "cells", asked)

    monkeypatch.setattr(kept, "cells_of", cells_of)
    parts = photos(Photos(Files.FLICKR30K, minimum=1), root)
    assert [len(one) for one in (parts.train, parts.val, parts.test)] == [6, 3, 3]
    assert len(asked) == 12 and set(parts.test.ids) <= set(asked)
    assert parts.test.references[0] == SAID
    assert parts.photos is not None and len(parts.photos) == 3


def test_a_photo_without_features_is_named(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    lines = (folder / "karpathy.tsv").read_text().splitlines()
    (folder / "karpathy.tsv").write_text("\n".join(lines[:4]) + "\n")
    parts = photos(Photos(Files.COCO, features=str(folder), minimum=1), tmp_path)
    with pytest.raises(BadInput, match="no features of photo 7"):
        parts.test.pictures([1])


def test_parts_move_as_one(drawn: data.Parts) -> None:
    moved = drawn.to("cpu")
    assert moved.train.tokens.device.type == "cpu" and moved.words == drawn.words
    assert replace(moved, train=drawn.train).train is drawn.train


def _cells(folder: Path, names: list[str]) -> FeatureCache:
    """A cache in which all four cells of photo n are n."""

    class Named:
        name, split = "photos", "all"

        def __len__(self) -> int:
            return len(names)

        def batch(self, indices: Sequence[int]) -> Batch:
            return Batch(ids=tuple(names[one] for one in indices))

        def digest(self) -> str:
            return ""

    def encode(batch: Batch) -> torch.Tensor:
        return torch.stack([torch.full((4, 3), float(names.index(one))) for one in batch.ids])

    return features.build(folder, features.Key("none", "", "", ""), Named(), encode)


def _expect_few(patch: pytest.MonkeyPatch) -> None:
    def flickr8k(root: Path, split: str) -> read.Captions:
        return read.flickr8k(root, split, sizes=None)

    patch.setattr(data, "flickr8k", flickr8k)
