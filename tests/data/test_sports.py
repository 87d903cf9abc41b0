import pytest

from overt.data import sports
from overt.data.sports import event8
from overt.errors import BadInput, Damaged

NAMES = tuple("RockClimbing badminton bocce croquet polo rowing sailing snowboarding".split())


def test_eight_folders_are_eight_classes(tmp_path, write_photo):
    for number, name in enumerate(NAMES):
        for photo in range(1 + number % 2):
            write_photo(tmp_path / sports.FOLDER / name / f"{name}_{photo}.jpg", value=20 * number)
    found = event8(tmp_path, size=(4, 4))
    assert len(found) == 12 and found.classes == NAMES and found.split == "all"
    assert found.labels([0, 1, 2, 11]).tolist() == [0, 1, 1, 7]
    assert abs(int(found.batch([11]).images[0, 0, 1, 1]) - 140) <= 2
    assert len(event8(tmp_path, photos=12)) == 12
    with pytest.raises(Damaged, match="12 photos, not 1574"):
        event8(tmp_path, photos=1574)
    with pytest.raises(BadInput, match="no official split"):
        event8(tmp_path, "train")
    (tmp_path / sports.FOLDER / "polo").rename(tmp_path / "polo")
    with pytest.raises(Damaged, match="7 classes, not 8"):
        event8(tmp_path)
    (tmp_path / sports.FOLDER / "polo").mkdir()
    with pytest.raises(Damaged, match="polo has no photos"):
        event8(tmp_path)


def test_a_missing_folder_says_where_to_look(tmp_path):
    with pytest.raises(BadInput, match=r"event_dataset is missing.*overt data list"):
        event8(tmp_path)
