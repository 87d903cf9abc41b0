import pytest

from overt.data import uiuc_sports
from overt.data.uiuc_sports import event8
from overt.errors import CorruptFileError, UserError

NAMES = tuple("RockClimbing badminton bocce croquet polo rowing sailing snowboarding".split())


def test_eight_folders_give_eight_classes(tmp_path, write_photo):
    for number, name in enumerate(NAMES):
        for photo in range(1 + number % 2):
            write_photo(
                tmp_path / uiuc_sports.FOLDER / name / f"{name}_{photo}.jpg", value=20 * number
            )
    found = event8(tmp_path, size=(4, 4))
    assert len(found) == 12 and found.classes == NAMES and found.split == "all"
    assert found.labels([0, 1, 2, 11]).tolist() == [0, 1, 1, 7]
    assert abs(int(found.batch([11]).images[0, 0, 1, 1]) - 140) <= 2
    assert len(event8(tmp_path, photos=12)) == 12
    with pytest.raises(CorruptFileError, match=r"12 photos.*1574"):
        event8(tmp_path, photos=1574)
    with pytest.raises(UserError, match="no official split"):
        event8(tmp_path, "train")
    (tmp_path / uiuc_sports.FOLDER / "polo").rename(tmp_path / "polo")
    with pytest.raises(CorruptFileError, match=r"7 classes.* 8"):
        event8(tmp_path)
    (tmp_path / uiuc_sports.FOLDER / "polo").mkdir()
    with pytest.raises(CorruptFileError, match="polo .*photos"):
        event8(tmp_path)


def test_missing_folder_raises_with_the_list_command(tmp_path):
    with pytest.raises(UserError, match=r"event_dataset.*overt data list"):
        event8(tmp_path)
