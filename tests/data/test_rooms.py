import shutil
from pathlib import Path

import pytest

from overt.data import rooms
from overt.data.rooms import scene67
from overt.errors import BadInput, Damaged

NAMES = [f"room_{number:02d}" for number in range(67)]


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_photo) -> Path:
    """The official layout: one photo of a room in each list, and one that no list names."""
    root = tmp_path_factory.mktemp("rooms")
    folder = root / rooms.FOLDER
    for number, name in enumerate(NAMES):
        for photo in ("a (1).jpg", "b.jpg", "c.jpg"):
            write_photo(folder / "Images" / name / photo, value=3 * number)
    (folder / "TrainImages.txt").write_text("\n".join(f"{name}/a (1).jpg" for name in NAMES))
    (folder / "TestImages.txt").write_text("\n".join(f"{name}/b.jpg" for name in NAMES[::-1]))
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_official_split_is_read(made):
    sizes = {"train": 57, "val": 10, "test": 67, "train+val": 67, "all": 201}
    for split, count in sizes.items():
        found = scene67(made, split, (4, 4), photos=(67, 67), validation=10)
        assert len(found) == count and found.classes == tuple(NAMES)
    test = scene67(made, "test", (4, 4), photos=None)
    assert test.ids([0]) == ("scene67/room_66/b.jpg",) and test.labels([0]).tolist() == [66]
    assert abs(int(test.batch([0]).images[0, 0, 1, 1]) - 198) <= 2
    assert scene67(made, "train+val", photos=None).ids([1]) == ("scene67/room_01/a (1).jpg",)


def test_the_official_number_of_photos_is_the_default(made):
    with pytest.raises(Damaged, match=r"TrainImages\.txt has 67 photos, not 5360"):
        scene67(made)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("room_00/b.jpg\nkitchen/b.jpg", "line 2 is not"),
        ("room_00", "line 1 is not"),
        ("room_00/", "line 1 is not"),
        ("room_00/a (1).jpg", "twice"),
        ("room_00/b.jpg\nroom_00/b.jpg", "twice"),
        ("room_00/../../TrainImages.txt", "leads out"),
        ("room_00/z.jpg", r"z\.jpg is missing"),
    ],
)
def test_lists_that_are_wrong_are_named(root, content, match):
    (root / rooms.FOLDER / "TestImages.txt").write_text(content)
    with pytest.raises(Damaged, match=match):
        scene67(root, "test", photos=None)


def test_what_is_missing_is_named(root, tmp_path):
    (root / rooms.FOLDER / "TestImages.txt").unlink()
    with pytest.raises(BadInput, match=r"TestImages\.txt is missing"):
        scene67(root, "train", photos=None)
    assert len(scene67(root, "all")) == 201  # needs no list
    shutil.rmtree(root / rooms.FOLDER / "Images" / NAMES[3])
    with pytest.raises(Damaged, match="66 classes, not 67"):
        scene67(root, "train", photos=None)
    with pytest.raises(BadInput, match="Images is missing"):
        scene67(tmp_path)
