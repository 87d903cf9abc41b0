from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap
from overt.data import images, photos
from overt.data.photos import Entry, PhotoSet
from overt.data.source import Source
from overt.data.splits import held_out
from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry

ENTRIES = [Entry("a/1.jpg", 0), Entry("a/2.jpg", 0), Entry("b/1.jpg", 1)]


@pytest.fixture
def folder(tmp_path, write_photo) -> Path:
    for number, entry in enumerate(ENTRIES):
        write_photo(tmp_path / entry.path, (6 + number, 8), 50 * number)
    return tmp_path


def toy(folder: Path | str, **changes) -> PhotoSet:
    given = {"how": images.crop, "window": photos.whole, **changes}
    return PhotoSet("toy", "all", folder, ENTRIES, ("a", "b"), (4, 4), **given)


def test_a_batch_is_what_the_photos_show(folder):
    found = toy(folder)
    batch = found.batch([2, 0])
    assert isinstance(found, Source) and len(found) == 3
    assert batch.ids == ("toy/b/1.jpg", "toy/a/1.jpg") and batch.labels.tolist() == [1, 0]
    assert batch.images.shape == (2, 3, 4, 4) and batch.images.dtype == torch.uint8
    assert abs(int(batch.images[0, 0, 1, 1]) - 100) <= 2
    assert batch.geometry.size.tolist() == [[8, 8], [6, 8]]
    expected, geometry = images.load([folder / "b/1.jpg", folder / "a/1.jpg"], (4, 4))
    assert torch.equal(batch.images, expected)
    assert torch.equal(batch.geometry.cells((2, 2)), geometry.cells((2, 2)))


def test_the_folder_may_be_text(folder):
    assert toy(str(folder)).files == toy(folder).files


def test_no_photo_is_opened_before_it_is_asked_for(folder, monkeypatch):
    monkeypatch.setattr(photos, "open_image", lambda path: pytest.fail("opened"))
    found = toy(folder)
    assert found.labels([0, 2]).tolist() == [0, 1] and found.ids([1]) == ("toy/a/2.jpg",)
    assert len(found.batch([])) == 0


@pytest.mark.parametrize("place", [-1, 3])
def test_a_place_out_of_range_is_refused(folder, place):
    for ask in (toy(folder).batch, toy(folder).labels, toy(folder).ids):
        with pytest.raises(BadInput, match=rf"toy all has samples 0 to 2, not {place}"):
            ask([place])


def test_a_photo_that_is_missing_is_named_when_the_set_is_opened(folder):
    (folder / "b/1.jpg").unlink()
    with pytest.raises(Damaged, match=r"b/1\.jpg is missing"):
        toy(folder)
    (folder / "b/1.jpg").mkdir()
    with pytest.raises(Damaged, match=r"b/1\.jpg is a folder and no photo; rename it"):
        toy(folder)


def test_a_set_without_a_name_goes_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Damaged, match=rf"gone\.png is missing, but {tmp_path} names it"):
        PhotoSet("", "all", ".", [Entry("gone.png", 0)], ("a",), (4, 4))


@pytest.mark.parametrize("name", ["../x.jpg", "/etc/passwd", "a/../../x.jpg", "a\\x.jpg", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(folder, name):
    with pytest.raises(Damaged, match="leads out of it"):
        PhotoSet("toy", "all", folder, [Entry(name, 0)], ("a",), (4, 4))


def test_a_broken_photo_is_named(folder):
    path = folder / "a/2.jpg"
    path.write_bytes(path.read_bytes()[:-20])
    found = toy(folder)
    found.batch([0, 2])
    with pytest.raises(Damaged, match=r"a/2\.jpg"):
        found.batch([1])


def test_a_canvas_of_nothing_is_refused(folder):
    with pytest.raises(BadInput, match="shows nothing"):
        PhotoSet("toy", "all", folder, ENTRIES, ("a", "b"), (0, 4))


@pytest.mark.parametrize("how", [images.crop, images.fit, images.stretch])
def test_a_window_shows_its_part_and_the_geometry_knows_it(tmp_path, how):
    """Each pixel of the photo has its own colour: what the canvas shows says where it is from."""
    y, x = np.mgrid[:40, :60]
    photo = np.stack([4 * x, 6 * y, 0 * x], axis=-1).astype(np.uint8)
    Image.fromarray(photo).save(tmp_path / "x.png")
    box = (9.5, 4.0, 33.2, 20.0)
    found = PhotoSet(
        "toy", "all", tmp_path, [Entry("x.png", 0)], ("a",), (16, 16), how, lambda *_: box
    ).batch([0])
    assert found.geometry.size.tolist() == [[40, 60]]
    cells = found.geometry.cells((16, 16))[0].reshape(16, 16, 4)
    assert cells[..., 0].min() >= 9 and cells[..., 2].max() <= 34
    assert cells[..., 1].min() >= 4 and cells[..., 3].max() <= 20
    inner = cells[3:-3, 3:-3]
    centre = (inner[..., :2] + inner[..., 2:]) / 2 - 0.5
    whole = (inner[..., 3] - inner[..., 1] > 0.5) & (inner[..., 2] - inner[..., 0] > 0.5)
    red, green, _ = found.images[0, :, 3:-3, 3:-3].float()
    assert whole.sum() > 20
    assert ((red / 4 - centre[..., 0]).abs()[whole] < 1.0).all()
    assert ((green / 6 - centre[..., 1]).abs()[whole] < 1.0).all()


def test_a_window_has_every_pixel_its_box_touches(tmp_path, write_photo):
    write_photo(tmp_path / "x.jpg", (40, 60))
    found = PhotoSet(
        "toy",
        "all",
        tmp_path,
        [Entry("x.jpg", 0)],
        ("a",),
        (16, 16),
        images.stretch,
        lambda *_: (9.5, 4.0, 33.2, 20.9),
    )
    cell = found.batch([0]).geometry.cells((1, 1))[0, 0]
    assert cell.tolist() == pytest.approx([9, 4, 34, 21])


@pytest.mark.parametrize(
    "box", [(9.0, 0.0, 12.0, 4.0), (4.0, 4.0, 2.0, 6.0), (-9.0, 0.0, -1.0, 2.0)]
)
def test_a_window_that_shows_nothing_is_damaged(folder, box):
    with pytest.raises(Damaged, match=r"a/1\.jpg: the box .* shows nothing"):
        toy(folder, window=lambda *_: box).batch([0])


def test_the_digest_changes_with_photos_names_classes_and_split(folder, write_photo):
    before = toy(folder).digest()
    assert before == toy(folder).digest()
    others = [
        PhotoSet("toy", "test", folder, ENTRIES, ("a", "b"), (4, 4)),
        PhotoSet("toy", "all", folder, ENTRIES[:2], ("a", "b"), (4, 4)),
        PhotoSet("toy", "all", folder, [*ENTRIES[:2], Entry("b/1.jpg", 0)], ("a", "b"), (4, 4)),
    ]
    write_photo(folder / "a/1.jpg", (6, 8), 201)
    digests = {before, toy(folder).digest(), *(other.digest() for other in others)}
    assert len(digests) == 5


def test_a_target_is_normalised_and_nothing_is_no_target():
    geometry = PixelGeometry.identity(2, (4, 4))
    shares = torch.tensor([[0.5, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    found = photos.target(shares, (2, 2), geometry)
    assert isinstance(found, AttentionMap)
    assert found.weights[0, 0, 0, 0].tolist() == [0.25, 0.5, 0.0, 0.25]
    assert found.weights[1].sum() == 0 and not found.mask[1].any() and found.mask[0].all()


def test_splits_of_two_official_parts():
    train = [Entry(f"t{n}", 0) for n in range(10)]
    test = [Entry(f"e{n}", 0) for n in range(3)]
    assert photos.chosen("all", train, test, 2) == [*train, *test]
    assert photos.chosen("test", train, test, 2) == test
    assert photos.chosen("train+val", train, test, 2) == train
    for split, rows in zip(("train", "val"), held_out(10, 2), strict=True):
        assert photos.chosen(split, train, test, 2) == [train[row] for row in rows]
    assert photos.split_or_all("all") == "all" and photos.split_or_all("val") == "val"
    with pytest.raises(BadInput, match="split"):
        photos.split_or_all("dev")
    photos.only_all("toy", "all")
    with pytest.raises(BadInput, match=r"toy has no official split 'train'"):
        photos.only_all("toy", "train")


def test_lists_are_read_with_any_line_ends(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfone two\r\nthree\x0bfour\n\n five")
    assert photos.read_lines(path) == ["one two", "three\x0bfour", "five"]


def test_lists_that_cannot_be_used(tmp_path, monkeypatch):
    path = tmp_path / "list.txt"
    with pytest.raises(BadInput, match=r"list\.txt is missing.*overt data list"):
        photos.read_lines(path)
    for content, match in [(b"", "empty"), (b"\n \n", "empty"), (b"\xff\xfe\x00", "not text")]:
        path.write_bytes(content)
        with pytest.raises(Damaged, match=match):
            photos.read_lines(path)
    monkeypatch.setattr(photos, "MOST_BYTES", 10)
    path.write_bytes(b"x" * 11)
    with pytest.raises(Damaged, match="11 bytes, too many"):
        photos.read_lines(path)


def test_folders_are_classes_and_only_photos_count(folder):
    (folder / "a/Thumbs.db").write_bytes(b"x")
    (folder / "a/._1.jpg").write_bytes(b"x")
    (folder / "a/3.JPG").write_bytes((folder / "a/1.jpg").read_bytes())
    (folder / "a/deeper.jpg").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "rest").mkdir()
    assert photos.class_folders(folder, 2, "rest") == ("a", "b")
    expected = [Entry("a/1.jpg", 0), Entry("a/2.jpg", 0), Entry("a/3.JPG", 0), Entry("b/1.jpg", 1)]
    assert photos.in_folders(folder, ("a", "b")) == expected
    with pytest.raises(Damaged, match="3 classes, not 2"):
        photos.class_folders(folder, 2)
    with pytest.raises(Damaged, match="rest has no photos"):
        photos.in_folders(folder, ("a", "rest"))
    with pytest.raises(Damaged, match="c has no photos"):
        photos.in_folders(folder, ("c",))
    for ask in (
        lambda path: photos.class_folders(path, 2),
        lambda path: photos.in_folders(path, ()),
    ):
        with pytest.raises(BadInput, match="missing"):
            ask(folder / "nowhere")


def test_the_order_is_that_of_names_whatever_the_disk_says(folder, monkeypatch):
    before = photos.in_folders(folder, photos.class_folders(folder, 2))
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: sorted(listed(path), reverse=True))
    assert photos.in_folders(folder, photos.class_folders(folder, 2)) == before


def test_lists_with_a_photo_twice_or_too_few_are_refused(tmp_path):
    photos.apart(tmp_path, ENTRIES)
    with pytest.raises(Damaged, match=r"names 'a/1\.jpg' twice"):
        photos.apart(tmp_path, [*ENTRIES, ENTRIES[0]])
    photos.counted(tmp_path, 3, 3)
    photos.counted(tmp_path, 3, None)
    with pytest.raises(Damaged, match="has 3 photos, not 4"):
        photos.counted(tmp_path, 3, 4)
