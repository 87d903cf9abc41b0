import numpy as np
import pytest
from PIL import Image

from overt.data.dataset import Dataset
from overt.data.photo_dataset import PhotoDataset, PhotoEntry
from overt.data.skip_corrupt import skip_corrupt_items
from overt.errors import CorruptFileError, UserError


@pytest.fixture
def photos(tmp_path):
    for number in range(10):
        image = Image.fromarray(np.full((8, 8, 3), 20 * number, np.uint8))
        image.save(tmp_path / f"{number}.png")
    entries = [PhotoEntry(f"{number}.png", number) for number in range(10)]
    classes = tuple("abcdefghij")
    return PhotoDataset("own", "all", tmp_path, entries, classes, (8, 8))


def corrupt_files(photos, *numbers):
    for number in numbers:
        photos.files[number].write_bytes(photos.files[number].read_bytes()[:40])


def test_dataset_without_corrupt_items_is_unchanged(photos):
    messages = []
    found = skip_corrupt_items(photos, messages.append)
    assert (
        isinstance(found, Dataset) and len(found) == 10 and messages == [] and found.skipped == ()
    )
    assert found.digest() == photos.digest() and (found.name, found.split) == ("own", "all")


def test_corrupt_items_are_skipped_counted_and_reported(photos):
    corrupt_files(photos, 3)
    with pytest.raises(CorruptFileError, match=r"3\.png"):
        photos.batch([2, 3])
    messages = []
    found = skip_corrupt_items(photos, messages.append, most=0.2)
    assert len(found) == 9 and [one.index for one in found.skipped] == [3]
    assert "3.png" in found.skipped[0].why
    assert messages[0].startswith("item 3 of own all is skipped: ") and "3.png" in messages[0]
    assert messages[1:] == ["1 of 10 items of own all were skipped."]
    assert found.batch([2, 3]).ids == ("own/2.png", "own/4.png")
    assert found.batch(range(9)).labels.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_digest_depends_on_the_skipped_items(photos):
    corrupt_files(photos, 3)
    one = skip_corrupt_items(photos, lambda line: None, most=0.2).digest()
    corrupt_files(photos, 4)
    two = skip_corrupt_items(photos, lambda line: None, most=0.2).digest()
    assert len({one, two, photos.digest()}) == 3


def test_too_many_corrupt_items_raise(photos):
    corrupt_files(photos, 1, 4)
    with pytest.raises(CorruptFileError, match=r"2 of 10 .*own all .*5%.* 1: .*1\.png"):
        skip_corrupt_items(photos, lambda line: None)


def test_other_errors_are_not_skipped(photos):
    photos.files[3].write_bytes(b"GIF89a")  # not corrupt: another file format
    with pytest.raises(UserError):
        skip_corrupt_items(photos, lambda line: None, most=1.0)
