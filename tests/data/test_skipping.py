import numpy as np
import pytest
from PIL import Image

from overt.data.photos import Entry, PhotoSet
from overt.data.skipping import readable
from overt.data.source import Source
from overt.errors import BadInput, Damaged


@pytest.fixture
def photos(tmp_path):
    for number in range(10):
        image = Image.fromarray(np.full((8, 8, 3), 20 * number, np.uint8))
        image.save(tmp_path / f"{number}.png")
    entries = [Entry(f"{number}.png", number) for number in range(10)]
    classes = tuple("abcdefghij")
    return PhotoSet("own", "all", tmp_path, entries, classes, (8, 8))


def spoil(photos, *numbers):
    for number in numbers:
        photos.files[number].write_bytes(photos.files[number].read_bytes()[:40])


def test_a_whole_set_is_the_set_itself(photos):
    said = []
    found = readable(photos, said.append)
    assert isinstance(found, Source) and len(found) == 10 and said == [] and found.skipped == ()
    assert found.digest() == photos.digest() and (found.name, found.split) == ("own", "all")


def test_what_is_broken_is_passed_over_counted_and_reported(photos):
    spoil(photos, 3)
    with pytest.raises(Damaged, match=r"3\.png"):
        photos.batch([2, 3])
    said = []
    found = readable(photos, said.append, most=0.2)
    assert len(found) == 9 and [one.index for one in found.skipped] == [3]
    assert "3.png" in found.skipped[0].why
    assert said[0].startswith("item 3 of own all is passed over: ") and "3.png" in said[0]
    assert said[1:] == ["1 of 10 items of own all were passed over."]
    assert found.batch([2, 3]).ids == ("own/2.png", "own/4.png")
    assert found.batch(range(9)).labels.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_set_without_an_item_is_another_set(photos):
    spoil(photos, 3)
    one = readable(photos, lambda line: None, most=0.2).digest()
    spoil(photos, 4)
    two = readable(photos, lambda line: None, most=0.2).digest()
    assert len({one, two, photos.digest()}) == 3


def test_too_many_are_too_many(photos):
    spoil(photos, 1, 4)
    with pytest.raises(Damaged, match=r"2 of 10 items of own all .* more than 5%.* 1: .*1\.png"):
        readable(photos, lambda line: None)


def test_other_mistakes_are_not_passed_over(photos):
    photos.files[3].write_bytes(b"GIF89a")  # not broken: another kind of file
    with pytest.raises(BadInput):
        readable(photos, lambda line: None, most=1.0)
