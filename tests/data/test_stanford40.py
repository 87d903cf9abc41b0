from pathlib import Path

import pytest

from overt.data import stanford40
from overt.data.stanford40 import action40
from overt.errors import CorruptFileError, UserError

NAMES = [f"doing_{number:02d}" for number in range(40)]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory, write_photo) -> Path:
    """The official layout, with one photo of each action in train and two in test."""
    root = tmp_path_factory.mktemp("actions")
    folder = root / stanford40.FOLDER
    (folder / "ImageSplits").mkdir(parents=True)
    lines = ["action_name\tnumber_of_images", *(f"{name}\t3" for name in NAMES)]
    (folder / "ImageSplits" / "actions.txt").write_text("\n".join(lines) + "\n")
    for number, name in enumerate(NAMES):
        photos = [f"{name}_{photo:03d}.jpg" for photo in range(3)]
        for photo in photos:
            write_photo(folder / "JPEGImages" / photo, value=6 * number)
        (folder / "ImageSplits" / f"{name}_train.txt").write_text(photos[0] + "\r\n")
        (folder / "ImageSplits" / f"{name}_test.txt").write_text("\n".join(photos[1:]))
    return root


def test_official_split_is_read(shared_root):
    sizes = {"train": 32, "val": 8, "test": 80, "train+val": 40, "all": 120}
    for split, count in sizes.items():
        found = action40(shared_root, split, (4, 4), photos=(40, 80), validation=8)
        assert len(found) == count and found.classes == tuple(NAMES)
    test = action40(shared_root, "test", (4, 4), photos=None)
    assert test.ids([0, 3]) == ("action40/doing_00_001.jpg", "action40/doing_01_002.jpg")
    assert test.labels([0, 3, 79]).tolist() == [0, 1, 39]
    assert abs(int(test.batch([79]).images[0, 0, 1, 1]) - 6 * 39) <= 2


def test_the_official_number_of_photos_is_the_default(shared_root):
    with pytest.raises(CorruptFileError, match=r"_train.* 40 .*4000"):
        action40(shared_root)
    with pytest.raises(CorruptFileError, match=r"_test.* 80 .* 81"):
        action40(shared_root, photos=(40, 81))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("actions.txt", "heading\n" + "\n".join(NAMES[:39]), "39 actions"),
        ("actions.txt", "heading\n" + "\n".join([*NAMES[:39], NAMES[0]]), "39 actions"),
        ("actions.txt", "heading\n" + "\n".join([*NAMES[:39], "../x"]), "not.*name"),
        ("doing_05_train.txt", "", "empty"),
        ("doing_05_train.txt", "nothing.jpg", r"nothing\.jpg.*missing"),
        ("doing_05_train.txt", "../ImageSplits/actions.txt", "points outside"),
        ("doing_05_train.txt", "doing_05_001.jpg", "twice"),
    ],
)
def test_invalid_lists_raise(root, name, content, match):
    (root / stanford40.FOLDER / "ImageSplits" / name).write_text(content)
    with pytest.raises(CorruptFileError, match=match):
        action40(root, photos=None, validation=8)


def test_missing_lists_and_unknown_splits_raise(root):
    (root / stanford40.FOLDER / "ImageSplits" / "doing_07_test.txt").unlink()
    with pytest.raises(UserError, match=r"doing_07_test\.txt"):
        action40(root, photos=None)
    with pytest.raises(UserError, match="split"):
        action40(root, "dev")
