from pathlib import Path

import pytest

from overt.data import caltech
from overt.data.caltech import caltech101, caltech256
from overt.errors import CorruptFileError, UserError

NAMES = ["BACKGROUND_Google", "Faces", *(f"thing_{number:03d}" for number in range(100))]


@pytest.fixture(scope="module")
def root(tmp_path_factory, write_photo) -> Path:
    """Both datasets with one or two photos per class, and the other files of the archives."""
    found = tmp_path_factory.mktemp("caltech")
    for name in NAMES:
        write_photo(found / caltech.FOLDER_101 / name / "image_0001.jpg")
    write_photo(found / caltech.FOLDER_101 / "Faces" / "image_0002.jpg", (9, 5), 7)
    for number in range(1, 258):
        name = "clutter" if number == 257 else f"kind-{number}"
        folder = found / caltech.FOLDER_256 / f"{number:03d}.{name}"
        write_photo(folder / f"{number:03d}_0001.jpg")
    (found / caltech.FOLDER_256 / "198.kind-198" / "RENAME2").write_text("#!/bin/sh")
    (found / caltech.FOLDER_256 / "056.kind-56" / "greg").mkdir()
    return found


def test_caltech101_skips_the_background_folder(root):
    found = caltech101(root, size=(8, 8), photos=None)
    assert len(found) == 102 and len(found.classes) == 101 and found.classes[0] == "Faces"
    assert found.labels([0, 1, 2, 101]).tolist() == [0, 0, 1, 100]
    batch = found.batch([1])
    assert batch.ids == ("caltech101/Faces/image_0002.jpg",)
    assert batch.images.shape == (1, 3, 8, 8) and abs(int(batch.images[0, 0, 4, 4]) - 7) <= 2
    assert batch.geometry.size.tolist() == [[9, 5]]


def test_caltech256_skips_the_clutter_folder(root):
    found = caltech256(root, size=(8, 8), photos=None)
    assert len(found) == 256 and found.classes[:2] == ("kind-1", "kind-2")
    assert found.labels([0, 255]).tolist() == [0, 255]
    assert found.ids([1]) == ("caltech256/002.kind-2/002_0001.jpg",)


def test_the_official_number_of_photos_is_the_default(root):
    with pytest.raises(CorruptFileError, match=r"102 photos.*8677"):
        caltech101(root)
    with pytest.raises(CorruptFileError, match=r"256 photos.*29780"):
        caltech256(root)
    assert len(caltech101(root, photos=102)) == 102


@pytest.mark.parametrize("read", [caltech101, caltech256])
def test_unknown_splits_and_missing_classes_raise(root, tmp_path, read, write_photo):
    with pytest.raises(UserError, match="split 'test'"):
        read(root, "test")
    with pytest.raises(UserError, match="ObjectCategories"):
        read(tmp_path)
    for name in (caltech.FOLDER_101, caltech.FOLDER_256):
        write_photo(tmp_path / name / "001.one" / "1.jpg")
    with pytest.raises(CorruptFileError, match="1 classes, expected"):
        read(tmp_path)
