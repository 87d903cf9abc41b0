import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data import discovery
from overt.data.discovery import ObjectDiscovery
from overt.data.images import crop
from overt.data.source import Source
from overt.errors import BadInput, Damaged

SIZES = [(20, 30), (24, 16)]


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_photo) -> Path:
    """The official layout, two photos a kind; the second horse is no horse."""
    root = tmp_path_factory.mktemp("discovery")
    for kind in discovery.KINDS:
        folder = root / discovery.FOLDER / f"{kind.capitalize()}100"
        (folder / "GroundTruth").mkdir(parents=True)
        for number, (height, width) in enumerate(SIZES, start=1):
            write_photo(folder / f"{number:04d}.jpg", (height, width), 90)
            mask = np.zeros((height, width), dtype=bool)
            if (kind, number) != ("horse", 2):
                mask[4:12, 6:10] = True
            Image.fromarray(mask).save(folder / "GroundTruth" / f"{number:04d}.png")
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def test_photos_and_kinds(made):
    found = ObjectDiscovery(made, size=(8, 8), photos=2)
    assert isinstance(found, Source) and len(found) == 6
    batch = found.batch([4, 1])
    assert batch.ids == ("discovery/Horse100/0001.jpg", "discovery/Airplane100/0002.jpg")
    assert batch.labels.tolist() == [2, 0] and batch.groups == ("horse", "airplane")
    assert batch.images.shape == (2, 3, 8, 8)
    cars = ObjectDiscovery(made, kinds=("car",), photos=2)
    assert len(cars) == 2 and cars.labels([0]).tolist() == [1] and cars.classes == discovery.KINDS
    assert len(found.batch([])) == 0


def test_masks_are_read_at_the_size_of_the_photo(made):
    found = ObjectDiscovery(made, photos=2)
    first, empty = found.masks([0, 5])
    expected = torch.zeros(20, 30, dtype=torch.bool)
    expected[4:12, 6:10] = True
    assert torch.equal(first, expected)
    assert empty.shape == (24, 16) and not empty.any()


def test_any_value_but_black_is_the_object(root):
    path = root / discovery.FOLDER / "Car100" / "GroundTruth" / "0001.png"
    grey = np.zeros((20, 30), dtype=np.uint8)
    grey[0, 0], grey[5, 7] = 1, 255
    Image.fromarray(grey).save(path)
    (found,) = ObjectDiscovery(root, photos=2).masks([2])
    assert found.nonzero().tolist() == [[0, 0], [5, 7]]


def test_the_target_is_the_share_of_each_cell(made):
    batch = ObjectDiscovery(made, size=(10, 10), cells=(5, 5), photos=2).batch([0, 5])
    covered = torch.zeros(5, 5)
    mask = torch.zeros(20, 30)
    mask[4:12, 6:10] = 1
    for y in range(5):
        for x in range(5):
            covered[y, x] = mask[4 * y : 4 * y + 4, 6 * x : 6 * x + 6].mean()
    target = batch.target.weights[0, 0, 0, 0].reshape(5, 5)
    torch.testing.assert_close(target, covered / covered.sum())
    assert batch.target.weights[1].sum() == 0 and not batch.target.mask[1].any()


def test_the_target_follows_how_the_photo_was_brought_to_the_canvas(made):
    batch = ObjectDiscovery(made, size=(20, 20), how=crop, cells=(20, 20), photos=2).batch([0])
    target = batch.target.weights[0, 0, 0, 0].reshape(20, 20)
    expected = torch.zeros(20, 20)
    expected[4:12, 1:5] = 1 / 32  # five columns are cut away on the left
    torch.testing.assert_close(target, expected)


def test_the_digest_is_that_of_photos_and_masks(root):
    before = ObjectDiscovery(root, photos=2).digest()
    assert before == ObjectDiscovery(root, photos=2).digest()
    path = root / discovery.FOLDER / "Car100" / "GroundTruth" / "0001.png"
    Image.fromarray(np.ones((20, 30), dtype=bool)).save(path)
    assert ObjectDiscovery(root, photos=2).digest() != before


def test_what_is_wrong_is_named(root, write_photo):
    with pytest.raises(Damaged, match="Airplane100 has 2 photos, not 100"):
        ObjectDiscovery(root)
    with pytest.raises(BadInput, match="no kind 'boat'"):
        ObjectDiscovery(root, kinds=("boat",))
    with pytest.raises(BadInput, match="no official split"):
        ObjectDiscovery(root, "train")
    folder = root / discovery.FOLDER / "Car100"
    write_photo(folder / "GroundTruth" / "0002.png", (9, 9))
    found = ObjectDiscovery(root, photos=2)
    with pytest.raises(Damaged, match=r"0002\.png has 9 x 9 pixels, but its photo has 24 x 16"):
        found.batch([3])
    (folder / "GroundTruth" / "0002.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(Damaged, match=r"GroundTruth/0002\.png"):
        found.batch([3])
    (folder / "GroundTruth" / "0002.png").unlink()
    with pytest.raises(Damaged, match=r"0002\.png is missing, the mask of"):
        ObjectDiscovery(root, photos=2)
    shutil.rmtree(folder)
    with pytest.raises(BadInput, match="Car100 is missing"):
        ObjectDiscovery(root, photos=2)
