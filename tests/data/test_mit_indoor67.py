import shutil
from pathlib import Path

import pytest

from overt.data import mit_indoor67
from overt.data.mit_indoor67 import scene67
from overt.errors import CorruptFileError, UserError

NAMES = [f"room_{number:02d}" for number in range(67)]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory, write_photo) -> Path:
    """The official layout: one photo of each room per list, and one in no list."""
    root = tmp_path_factory.mktemp("rooms")
    folder = root / mit_indoor67.FOLDER
    for number, name in enumerate(NAMES):
        for photo in ("a (1).jpg", "b.jpg", "c.jpg"):
            write_photo(folder / "Images" / name / photo, value=3 * number)
    (folder / "TrainImages.txt").write_text("\n".join(f"{name}/a (1).jpg" for name in NAMES))
    (folder / "TestImages.txt").write_text("\n".join(f"{name}/b.jpg" for name in NAMES[::-1]))
    return root


def test_official_split_is_read(shared_root):
    sizes = {"train": 57, "val": 10, "test": 67, "train+val": 67, "all": 201}
    for split, count in sizes.items():
        found = scene67(shared_root, split, (4, 4), photos=(67, 67), validation=10)
        assert len(found) == count and found.classes == tuple(NAMES)
    test = scene67(shared_root, "test", (4, 4), photos=None)
    assert test.ids([0]) == ("scene67/room_66/b.jpg",) and test.labels([0]).tolist() == [66]
    assert abs(int(test.batch([0]).images[0, 0, 1, 1]) - 198) <= 2
    assert scene67(shared_root, "train+val", photos=None).ids([1]) == ("scene67/room_01/a (1).jpg",)


def test_the_official_number_of_photos_is_the_default(shared_root):
    with pytest.raises(CorruptFileError, match=r"Train.* 67 .*5360"):
        scene67(shared_root)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("room_00/b.jpg\nkitchen/b.jpg", "line 2 is not"),
        ("room_00", "line 1 is not"),
        ("room_00/", "line 1 is not"),
        ("room_00/a (1).jpg", "twice"),
        ("room_00/b.jpg\nroom_00/b.jpg", "twice"),
        ("room_00/../../TrainImages.txt", "points outside"),
        ("room_00/z.jpg", r"z\.jpg.*missing"),
    ],
)
def test_invalid_lists_raise_with_the_line(root, content, match):
    (root / mit_indoor67.FOLDER / "TestImages.txt").write_text(content)
    with pytest.raises(CorruptFileError, match=match):
        scene67(root, "test", photos=None)


def test_missing_files_raise_with_their_name(root, tmp_path):
    (root / mit_indoor67.FOLDER / "TestImages.txt").unlink()
    with pytest.raises(UserError, match=r"TestImages.*missing"):
        scene67(root, "train", photos=None)
    assert len(scene67(root, "all")) == 201  # needs no list
    shutil.rmtree(root / mit_indoor67.FOLDER / "Images" / NAMES[3])
    with pytest.raises(CorruptFileError, match=r"66 classes.*67"):
        scene67(root, "train", photos=None)
    with pytest.raises(UserError, match="Images.*missing"):
        scene67(tmp_path)
