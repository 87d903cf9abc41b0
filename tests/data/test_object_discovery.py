import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data import object_discovery
from overt.data.dataset import Dataset
from overt.data.images import crop
from overt.data.object_discovery import ObjectDiscovery
from overt.errors import CorruptFileError, UserError

SIZES = [(20, 30), (24, 16)]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory, write_photo) -> Path:
    """The official layout with two photos per class; the second horse has an empty mask."""
    root = tmp_path_factory.mktemp("discovery")
    for kind in object_discovery.KINDS:
        folder = root / object_discovery.FOLDER / f"{kind.capitalize()}100"
        (folder / "GroundTruth").mkdir(parents=True)
        for number, (height, width) in enumerate(SIZES, start=1):
            write_photo(folder / f"{number:04d}.jpg", (height, width), 90)
            mask = np.zeros((height, width), dtype=bool)
            if (kind, number) != ("horse", 2):
                mask[4:12, 6:10] = True
            Image.fromarray(mask).save(folder / "GroundTruth" / f"{number:04d}.png")
    return root


def test_batches_have_photos_and_classes(shared_root):
    found = ObjectDiscovery(shared_root, size=(8, 8), photos=2)
    assert isinstance(found, Dataset) and len(found) == 6
    batch = found.batch([4, 1])
    assert batch.ids == ("discovery/Horse100/0001.jpg", "discovery/Airplane100/0002.jpg")
    assert batch.labels.tolist() == [2, 0] and batch.groups == ("horse", "airplane")
    assert batch.images.shape == (2, 3, 8, 8)
    cars = ObjectDiscovery(shared_root, kinds=("car",), photos=2)
    assert (
        len(cars) == 2
        and cars.labels([0]).tolist() == [1]
        and cars.classes == object_discovery.KINDS
    )
    assert len(found.batch([])) == 0


def test_masks_have_the_size_of_the_photo(shared_root):
    found = ObjectDiscovery(shared_root, photos=2)
    first, empty = found.masks([0, 5])
    expected = torch.zeros(20, 30, dtype=torch.bool)
    expected[4:12, 6:10] = True
    assert torch.equal(first, expected)
    assert empty.shape == (24, 16) and not empty.any()


def test_every_nonzero_mask_value_is_the_object(root):
    path = root / object_discovery.FOLDER / "Car100" / "GroundTruth" / "0001.png"
    grey = np.zeros((20, 30), dtype=np.uint8)
    grey[0, 0], grey[5, 7] = 1, 255
    Image.fromarray(grey).save(path)
    (found,) = ObjectDiscovery(root, photos=2).masks([2])
    assert found.nonzero().tolist() == [[0, 0], [5, 7]]


def test_target_is_the_object_share_of_each_cell(shared_root):
    batch = ObjectDiscovery(shared_root, size=(10, 10), cells=(5, 5), photos=2).batch([0, 5])
    covered = torch.zeros(5, 5)
    mask = torch.zeros(20, 30)
    mask[4:12, 6:10] = 1
    for y in range(5):
        for x in range(5):
            covered[y, x] = mask[4 * y : 4 * y + 4, 6 * x : 6 * x + 6].mean()
    target = batch.target.weights[0, 0, 0, 0].reshape(5, 5)
    torch.testing.assert_close(target, covered / covered.sum())
    assert batch.target.weights[1].sum() == 0 and not batch.target.mask[1].any()


def test_target_follows_the_crop_of_the_photo(shared_root):
    batch = ObjectDiscovery(
        shared_root, size=(20, 20), resize=crop, cells=(20, 20), photos=2
    ).batch([0])
    target = batch.target.weights[0, 0, 0, 0].reshape(20, 20)
    expected = torch.zeros(20, 20)
    expected[4:12, 1:5] = 1 / 32  # the crop removes five columns on the left
    torch.testing.assert_close(target, expected)


def test_digest_depends_on_photos_and_masks(root):
    before = ObjectDiscovery(root, photos=2).digest()
    assert before == ObjectDiscovery(root, photos=2).digest()
    path = root / object_discovery.FOLDER / "Car100" / "GroundTruth" / "0001.png"
    Image.fromarray(np.ones((20, 30), dtype=bool)).save(path)
    assert ObjectDiscovery(root, photos=2).digest() != before


def test_missing_or_corrupt_files_raise_with_their_name(root, write_photo):
    with pytest.raises(CorruptFileError, match=r"Airplane.* 2 .* 100"):
        ObjectDiscovery(root)
    with pytest.raises(UserError, match="'boat'"):
        ObjectDiscovery(root, kinds=("boat",))
    with pytest.raises(UserError, match="no official split"):
        ObjectDiscovery(root, "train")
    folder = root / object_discovery.FOLDER / "Car100"
    write_photo(folder / "GroundTruth" / "0002.png", (9, 9))
    found = ObjectDiscovery(root, photos=2)
    with pytest.raises(CorruptFileError, match=r"0002\.png.*9 x 9 .*24 x 16"):
        found.batch([3])
    (folder / "GroundTruth" / "0002.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(CorruptFileError, match=r"Truth/0002\.png"):
        found.batch([3])
    (folder / "GroundTruth" / "0002.png").unlink()
    with pytest.raises(CorruptFileError, match=r"0002.*missing.*mask"):
        ObjectDiscovery(root, photos=2)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="Car100.*missing"):
        ObjectDiscovery(root, photos=2)
