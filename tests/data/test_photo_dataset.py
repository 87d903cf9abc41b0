from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap
from overt.data import images, photo_dataset
from overt.data.dataset import Dataset
from overt.data.photo_dataset import PhotoDataset, PhotoEntry
from overt.data.splits import hold_out_indices
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry

ENTRIES = [PhotoEntry("a/1.jpg", 0), PhotoEntry("a/2.jpg", 0), PhotoEntry("b/1.jpg", 1)]


@pytest.fixture
def folder(tmp_path, write_photo) -> Path:
    for number, entry in enumerate(ENTRIES):
        write_photo(tmp_path / entry.path, (6 + number, 8), 50 * number)
    return tmp_path


def open_photos(folder: Path | str, **changes) -> PhotoDataset:
    given = {"resize": images.crop, "window": photo_dataset.whole_photo, **changes}
    return PhotoDataset("toy", "all", folder, ENTRIES, ("a", "b"), (4, 4), **given)


def test_batches_equal_the_loaded_photos(folder):
    found = open_photos(folder)
    batch = found.batch([2, 0])
    assert isinstance(found, Dataset) and len(found) == 3
    assert batch.ids == ("toy/b/1.jpg", "toy/a/1.jpg") and batch.labels.tolist() == [1, 0]
    assert batch.images.shape == (2, 3, 4, 4) and batch.images.dtype == torch.uint8
    assert abs(int(batch.images[0, 0, 1, 1]) - 100) <= 2
    assert batch.geometry.size.tolist() == [[8, 8], [6, 8]]
    expected, geometry = images.load_images([folder / "b/1.jpg", folder / "a/1.jpg"], (4, 4))
    assert torch.equal(batch.images, expected)
    assert torch.equal(batch.geometry.cells((2, 2)), geometry.cells((2, 2)))


def test_folder_may_be_a_string(folder):
    assert open_photos(str(folder)).files == open_photos(folder).files


def test_photos_are_opened_only_by_batch(folder, monkeypatch):
    monkeypatch.setattr(photo_dataset, "open_image", lambda path: pytest.fail("opened"))
    found = open_photos(folder)
    assert found.labels([0, 2]).tolist() == [0, 1] and found.ids([1]) == ("toy/a/2.jpg",)
    assert len(found.batch([])) == 0


@pytest.mark.parametrize("place", [-1, 3])
def test_out_of_range_index_raises(folder, place):
    for call in (open_photos(folder).batch, open_photos(folder).labels, open_photos(folder).ids):
        with pytest.raises(UserError, match=rf"toy all .*3 .*{place} "):
            call([place])


def test_missing_photo_raises_when_the_dataset_is_opened(folder):
    (folder / "b/1.jpg").unlink()
    with pytest.raises(CorruptFileError, match=r"b/1\.jpg.*missing"):
        open_photos(folder)
    (folder / "b/1.jpg").mkdir()
    with pytest.raises(CorruptFileError, match=r"b/1\.jpg.*folder"):
        open_photos(folder)


def test_error_of_an_unnamed_dataset_contains_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptFileError, match=rf"gone\.png.*missing.*{tmp_path}"):
        PhotoDataset("", "all", ".", [PhotoEntry("gone.png", 0)], ("a",), (4, 4))


@pytest.mark.parametrize("name", ["../x.jpg", "/etc/passwd", "a/../../x.jpg", "a\\x.jpg", "a\0b"])
def test_photo_path_outside_the_folder_raises(folder, name):
    with pytest.raises(CorruptFileError, match="points outside"):
        PhotoDataset("toy", "all", folder, [PhotoEntry(name, 0)], ("a",), (4, 4))


def test_corrupt_photo_raises_with_its_name(folder):
    path = folder / "a/2.jpg"
    path.write_bytes(path.read_bytes()[:-20])
    found = open_photos(folder)
    found.batch([0, 2])
    with pytest.raises(CorruptFileError, match=r"a/2\.jpg"):
        found.batch([1])


def test_empty_canvas_raises(folder):
    with pytest.raises(UserError, match="0 x 4"):
        PhotoDataset("toy", "all", folder, ENTRIES, ("a", "b"), (0, 4))


@pytest.mark.parametrize("resize", [images.crop, images.fit, images.stretch])
def test_window_crops_the_photo_with_matching_geometry(tmp_path, resize):
    """Each pixel of the photo has a unique colour, which identifies it on the canvas."""
    y, x = np.mgrid[:40, :60]
    photo = np.stack([4 * x, 6 * y, 0 * x], axis=-1).astype(np.uint8)
    Image.fromarray(photo).save(tmp_path / "x.png")
    box = (9.5, 4.0, 33.2, 20.0)
    found = PhotoDataset(
        "toy", "all", tmp_path, [PhotoEntry("x.png", 0)], ("a",), (16, 16), resize, lambda *_: box
    ).batch([0])
    assert found.geometry.size.tolist() == [[40, 60]]
    cells = found.geometry.cells((16, 16))[0].reshape(16, 16, 4)
    assert cells[..., 0].min() >= 9 and cells[..., 2].max() <= 34
    assert cells[..., 1].min() >= 4 and cells[..., 3].max() <= 20
    inner = cells[3:-3, 3:-3]
    centre = (inner[..., :2] + inner[..., 2:]) / 2 - 0.5
    inner_cells = (inner[..., 3] - inner[..., 1] > 0.5) & (inner[..., 2] - inner[..., 0] > 0.5)
    red, green, _ = found.images[0, :, 3:-3, 3:-3].float()
    assert inner_cells.sum() > 20
    assert ((red / 4 - centre[..., 0]).abs()[inner_cells] < 1.0).all()
    assert ((green / 6 - centre[..., 1]).abs()[inner_cells] < 1.0).all()


def test_window_contains_every_pixel_its_box_touches(tmp_path, write_photo):
    write_photo(tmp_path / "x.jpg", (40, 60))
    found = PhotoDataset(
        "toy",
        "all",
        tmp_path,
        [PhotoEntry("x.jpg", 0)],
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
def test_window_outside_the_photo_raises(folder, box):
    with pytest.raises(CorruptFileError, match=r"a/1\.jpg.*outside"):
        open_photos(folder, window=lambda *_: box).batch([0])


def test_digest_depends_on_photos_names_classes_and_split(folder, write_photo):
    before = open_photos(folder).digest()
    assert before == open_photos(folder).digest()
    others = [
        PhotoDataset("toy", "test", folder, ENTRIES, ("a", "b"), (4, 4)),
        PhotoDataset("toy", "all", folder, ENTRIES[:2], ("a", "b"), (4, 4)),
        PhotoDataset(
            "toy", "all", folder, [*ENTRIES[:2], PhotoEntry("b/1.jpg", 0)], ("a", "b"), (4, 4)
        ),
    ]
    write_photo(folder / "a/1.jpg", (6, 8), 201)
    digests = {before, open_photos(folder).digest(), *(other.digest() for other in others)}
    assert len(digests) == 5


def test_targets_are_normalised_and_may_be_empty():
    geometry = PixelGeometry.identity(2, (4, 4))
    shares = torch.tensor([[0.5, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    found = photo_dataset.density_target(shares, (2, 2), geometry)
    assert isinstance(found, AttentionMap)
    assert found.weights[0, 0, 0, 0].tolist() == [0.25, 0.5, 0.0, 0.25]
    assert found.weights[1].sum() == 0 and not found.mask[1].any() and found.mask[0].all()
    assert found.coverage is None  # a density has no edge
    region = photo_dataset.region_target(shares, (2, 2), geometry)
    assert torch.equal(region.weights, found.weights) and torch.equal(region.mask, found.mask)
    assert torch.equal(region.coverage[:, 0], shares)


def test_select_split_of_two_official_parts():
    train = [PhotoEntry(f"t{n}", 0) for n in range(10)]
    test = [PhotoEntry(f"e{n}", 0) for n in range(3)]
    assert photo_dataset.select_split("all", train, test, 2) == [*train, *test]
    assert photo_dataset.select_split("test", train, test, 2) == test
    assert photo_dataset.select_split("train+val", train, test, 2) == train
    for split, rows in zip(("train", "val"), hold_out_indices(10, 2), strict=True):
        assert photo_dataset.select_split(split, train, test, 2) == [train[row] for row in rows]
    assert (
        photo_dataset.parse_split_or_all("all") == "all"
        and photo_dataset.parse_split_or_all("val") == "val"
    )
    with pytest.raises(UserError, match="split"):
        photo_dataset.parse_split_or_all("dev")
    photo_dataset.check_only_all("toy", "all")
    with pytest.raises(UserError, match=r"toy .*split 'train'"):
        photo_dataset.check_only_all("toy", "train")


def test_lists_are_read_with_any_line_ending(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfone two\r\nthree\x0bfour\n\n five")
    assert photo_dataset.read_lines(path) == ["one two", "three\x0bfour", "five"]


def test_missing_empty_binary_and_long_lists_raise(tmp_path, monkeypatch):
    path = tmp_path / "list.txt"
    with pytest.raises(UserError, match=r"list\.txt.*overt data list"):
        photo_dataset.read_lines(path)
    for content, match in [(b"", "empty"), (b"\n \n", "empty"), (b"\xff\xfe\x00", "not text")]:
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=match):
            photo_dataset.read_lines(path)
    monkeypatch.setattr(photo_dataset, "MOST_BYTES", 10)
    path.write_bytes(b"x" * 11)
    with pytest.raises(CorruptFileError, match="11 bytes"):
        photo_dataset.read_lines(path)


def test_class_folders_contain_only_photos(folder):
    (folder / "a/Thumbs.db").write_bytes(b"x")
    (folder / "a/._1.jpg").write_bytes(b"x")
    (folder / "a/3.JPG").write_bytes((folder / "a/1.jpg").read_bytes())
    (folder / "a/deeper.jpg").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "rest").mkdir()
    assert photo_dataset.class_folders(folder, 2, "rest") == ("a", "b")
    expected = [
        PhotoEntry("a/1.jpg", 0),
        PhotoEntry("a/2.jpg", 0),
        PhotoEntry("a/3.JPG", 0),
        PhotoEntry("b/1.jpg", 1),
    ]
    assert photo_dataset.list_class_photos(folder, ("a", "b")) == expected
    with pytest.raises(CorruptFileError, match=r"3 classes.* 2"):
        photo_dataset.class_folders(folder, 2)
    with pytest.raises(CorruptFileError, match="rest .*photos"):
        photo_dataset.list_class_photos(folder, ("a", "rest"))
    with pytest.raises(CorruptFileError, match=r"c .*no photos"):
        photo_dataset.list_class_photos(folder, ("c",))
    for call in (
        lambda path: photo_dataset.class_folders(path, 2),
        lambda path: photo_dataset.list_class_photos(path, ()),
    ):
        with pytest.raises(UserError, match="missing"):
            call(folder / "nowhere")


def test_photos_are_sorted_by_name(folder, monkeypatch):
    before = photo_dataset.list_class_photos(folder, photo_dataset.class_folders(folder, 2))
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: sorted(listed(path), reverse=True))
    assert photo_dataset.list_class_photos(folder, photo_dataset.class_folders(folder, 2)) == before


def test_duplicate_photos_and_wrong_photo_counts_raise(tmp_path):
    photo_dataset.check_distinct(tmp_path, ENTRIES)
    with pytest.raises(CorruptFileError, match=r"'a/1\.jpg' twice"):
        photo_dataset.check_distinct(tmp_path, [*ENTRIES, ENTRIES[0]])
    photo_dataset.check_photo_count(tmp_path, 3, 3)
    photo_dataset.check_photo_count(tmp_path, 3, None)
    with pytest.raises(CorruptFileError, match=r"3 photos.* 4"):
        photo_dataset.check_photo_count(tmp_path, 3, 4)
