"""Captioned images: the content of batches, and the datasets they are read from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data import captions as read
from overt.data import feature_cache
from overt.data.batch import Batch
from overt.data.feature_cache import FeatureCache
from overt.data.photo_dataset import PhotoDataset
from overt.data.scenes.captions import CaptionScenes
from overt.data.vocabulary import BEGIN, END
from overt.errors import UserError
from overt.metrics.captions import tokenize_caption
from overt.papers.a2 import data
from overt.papers.a2.config import A2Dataset, A2Photos, A2Scenes
from overt.papers.a2.data import (
    ImagesInMemory,
    ImagesOnDisk,
    crop_features,
    every_nth_image,
    load_photos,
    load_scenes,
    unique_images,
)
from tests.papers.a2.small import CAPTIONS, write_coco, write_flickr8k, write_flickr30k


@pytest.fixture(scope="module")
def scenes() -> data.A2Data:
    return load_scenes(A2Scenes(train=6, val=2, test=3))


def test_a_batch_of_scenes_has_all_captions_of_each(scenes: data.A2Data) -> None:
    batch = scenes.train.batch([4, 1])
    assert len(batch) == 10 and batch.image_index.tolist() == [0] * 5 + [1] * 5
    theirs = CaptionScenes("train", 1, 6).batch([4, 1])
    assert batch.tokens is not None and theirs.tokens is not None
    wide = theirs.tokens.shape[1]
    assert torch.equal(batch.tokens[:, :wide], theirs.tokens)
    assert torch.equal(batch.token_mask[:, :wide], theirs.token_mask)  # type: ignore[index]
    # the width does not depend on the captions of the batch
    assert batch.tokens.shape[1] == scenes.train.lengths.max()
    assert not batch.token_mask[:, wide:].any()  # type: ignore[index]
    assert batch.references == theirs.references
    assert torch.equal(batch.boxes, theirs.boxes)  # type: ignore[arg-type]
    assert batch.ids[6] == "scenes-captions-train-1-000001#1"


def test_unique_images_are_encoded_once(scenes: data.A2Data) -> None:
    batch = scenes.train.batch([3, 0, 5])
    pictures, of = unique_images(batch)
    assert len(pictures) == 3 and torch.equal(of, batch.image_index)
    assert torch.equal(pictures.features[of], batch.features)  # type: ignore[index, arg-type]


def test_every_nth_image_equals_unique_images_for_equal_caption_counts(scenes: data.A2Data) -> None:
    batch = scenes.train.batch([3, 0, 5])
    assert scenes.train.each == 5
    ours, (theirs, _) = every_nth_image(batch, 5), unique_images(batch)
    assert len(ours) == 3
    for name in ("images", "image_of", "boxes", "features", "region_mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    uneven = replace(scenes.train, first=np.array([0, 5, 7, 15, 20, 25, 30]))
    assert uneven.each is None


def test_batches_without_captions_keep_their_references(scenes: data.A2Data) -> None:
    batch = scenes.test.without_captions([0, 2])
    assert len(batch) == 2 and batch.tokens is None
    assert batch.references is not None and len(batch.references[1]) == 5


def test_reward_references_have_an_end_token_and_no_begin_token(scenes: data.A2Data) -> None:
    texts = scenes.train.texts()
    assert len(texts) == 6 and all(len(many) == 5 for many in texts)
    assert all(text[-1] == END and BEGIN not in text for many in texts for text in many)


def test_crops_are_the_pixels_of_the_box() -> None:
    images = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    images[0, 0, 10:20, 20:30] = 255
    boxes = torch.tensor([[[20.0, 10.0, 30.0, 20.0], [0.0, 20.0, 20.0, 40.0]]])
    found = crop_features(images, boxes)[0]
    pixels, where = found[:, :-6].reshape(2, 3, data.CROP, data.CROP), found[:, -6:]
    torch.testing.assert_close(pixels[0, 0], torch.ones(10, 10))
    torch.testing.assert_close(pixels[0, 1], -torch.ones(10, 10))
    torch.testing.assert_close(pixels[1], -torch.ones(3, 10, 10))
    torch.testing.assert_close(where[0], torch.tensor([0.5, 0.25, 0.75, 0.5, 0.25, 0.25]))
    assert found.shape[1] == data.REGION_WIDTH


def test_images_in_memory_are_returned_as_float32() -> None:
    kept = ImagesInMemory({"features": torch.arange(6.0).half().reshape(3, 2)})
    assert kept([2, 0])["features"].tolist() == [[4, 5], [0, 1]]
    assert kept.to("cpu")([1])["features"].dtype == torch.float32
    loaded = ImagesOnDisk(lambda chosen: {"features": torch.tensor(chosen)}).to("cpu")
    assert loaded([3, 4])["features"].tolist() == [3, 4]


def test_flickr8k_photos_are_given_as_backbone_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_flickr8k(tmp_path)
    _allow_small_files(monkeypatch)
    cells = _cells(tmp_path / "cells", [f"flickr8k/{number}.jpg" for number in range(12)])
    monkeypatch.setattr(data, "_backbone_cache", lambda *_: cells)
    parts = load_photos(A2Photos(A2Dataset.FLICKR8K, minimum=1), root)
    assert [len(one) for one in (parts.train, parts.val, parts.test)] == [6, 3, 3]
    batch = parts.val.batch([1])
    assert batch.features is not None and batch.features.unique().tolist() == [7]
    assert parts.words.size == 5 + len(
        {word for text in CAPTIONS for word in tokenize_caption(text)}
    )
    assert batch.tokens is not None
    assert parts.words.decode(batch.tokens[1][:7].tolist()) == [
        *("<begin>", "a", "brown", "dog", "is", "running", "<end>")
    ]
    assert parts.photos is not None and len(parts.photos) == 3
    few = load_photos(A2Photos(A2Dataset.FLICKR8K, minimum=1, limit=2, longest=2), root)
    assert len(few.train) == 2 and int(few.train.lengths.max()) == 4


def test_features_over_the_memory_limit_are_read_per_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [str(number) for number in range(5)]
    cells = _cells(tmp_path / "cells", wanted)
    for most in (data.MAX_BYTES_IN_MEMORY, 10):
        monkeypatch.setattr(data, "MAX_BYTES_IN_MEMORY", most)
        show = data._cached_features(cells, wanted)
        assert isinstance(show, ImagesInMemory if most > 10 else ImagesOnDisk)
        assert show([3, 1])["features"][:, 0, 0].tolist() == [3, 1]


def test_coco_is_read_from_the_official_files(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    parts = load_photos(A2Photos(A2Dataset.COCO, features=str(folder), minimum=1), tmp_path)
    assert [len(one) for one in (parts.train, parts.val, parts.test)] == [6, 3, 3]
    batch = parts.test.without_captions([0, 1])  # photos 3 and 7, with 2 and 3 regions
    assert batch.region_mask is not None
    assert batch.region_mask.sum(dim=1).tolist() == [2, 3]
    assert batch.features is not None and batch.features.shape == (2, 3, 8)
    assert parts.photos is None and parts.encoder.width == 8


def test_flickr30k_is_read_in_karpathys_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photos are found below the folder of Flickr30k; cells of all of them are cached."""
    root = write_flickr30k(tmp_path)
    loaded: list[str] = []

    def cache_cells(shown: PhotoDataset, *_: object) -> FeatureCache:
        loaded.extend(shown.batch(range(len(shown))).ids)
        return _cells(tmp_path / "cells", loaded)

    monkeypatch.setattr("overt.papers.a2.data.cache_cells", cache_cells)
    parts = load_photos(A2Photos(A2Dataset.FLICKR30K, minimum=1), root)
    assert [len(one) for one in (parts.train, parts.val, parts.test)] == [6, 3, 3]
    assert len(loaded) == 12 and set(parts.test.ids) <= set(loaded)
    assert parts.test.references[0] == CAPTIONS
    assert parts.photos is not None and len(parts.photos) == 3


def test_a_photo_without_features_raises_with_its_number(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    lines = (folder / "karpathy.tsv").read_text().splitlines()
    (folder / "karpathy.tsv").write_text("\n".join(lines[:4]) + "\n")
    parts = load_photos(A2Photos(A2Dataset.COCO, features=str(folder), minimum=1), tmp_path)
    with pytest.raises(UserError, match=r"features.*photo 7"):
        parts.test.without_captions([1])


def test_to_moves_all_splits(scenes: data.A2Data) -> None:
    moved = scenes.to("cpu")
    assert moved.train.tokens.device.type == "cpu" and moved.words == scenes.words
    assert replace(moved, train=scenes.train).train is scenes.train


def _cells(folder: Path, names: list[str]) -> FeatureCache:
    """Build a cache in which all four cells of photo n are n."""

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

    return feature_cache.build_feature_cache(
        folder, feature_cache.FeatureKey("none", "", "", ""), Named(), encode
    )


def _allow_small_files(patch: pytest.MonkeyPatch) -> None:
    def flickr8k(root: Path, split: str) -> read.Captions:
        return read.flickr8k(root, split, sizes=None)

    patch.setattr(data, "flickr8k", flickr8k)
