from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data import cub
from overt.data.cub import Cub, bird_box, whole_photo
from overt.data.dataset import Dataset
from overt.errors import CorruptFileError, UserError

# The bird in each photo of 40 x 60 pixels: left, top, width, height.
BOXES = [(10, 5, 20, 20), (0, 0, 60, 40), (30, 20, 30, 20), (1.5, 2.5, 10, 10), (50, 30, 30, 30)]
CLASSES = [1, 1, 2, 3, 3]
TRAIN = [1, 0, 1, 1, 0]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory) -> Path:
    """The official layout with five photos of three classes; the bird is white."""
    root = tmp_path_factory.mktemp("cub")
    folder = root / cub.FOLDER
    (folder / "parts").mkdir(parents=True)
    kinds = ["001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross"]
    names = []
    for number, (box, kind) in enumerate(zip(BOXES, CLASSES, strict=True), start=1):
        names.append(f"{kinds[kind - 1]}/bird_{number:04d}.jpg")
        left, top, width, height = (round(value) for value in box)
        photo = np.full((40, 60, 3), 40, dtype=np.uint8)
        photo[top : top + height, left : left + width] = 255
        (folder / "images" / names[-1]).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo).save(folder / "images" / names[-1], quality=95)

    def write(name: str, rows: list[str]) -> None:
        (folder / name).write_text("\n".join(rows) + "\n")

    def numbered(values: list[object]) -> list[str]:
        return [f"{number} {value}" for number, value in enumerate(values, start=1)]

    write("classes.txt", numbered(kinds))
    write("images.txt", numbered(names))
    write("image_class_labels.txt", numbered(CLASSES))
    write("train_test_split.txt", numbered(TRAIN))
    write("bounding_boxes.txt", numbered([" ".join(f"{v:.1f}" for v in box) for box in BOXES]))
    write("parts/parts.txt", ["1 back", "2 left eye"])
    rows = [f"{n} {part} {n}.5 {10 * part}.0 {part % 2}" for n in range(1, 6) for part in (1, 2)]
    write("parts/part_locs.txt", rows)
    return root


def open_cub(root: Path, split: str = "all", **changes) -> Cub:
    return Cub(root, split, **{"photos": (3, 2), "validation": 1, **changes})


def test_splits_have_their_photos_and_classes(shared_root):
    sizes = {"train": 2, "val": 1, "test": 2, "train+val": 3, "all": 5}
    for split, count in sizes.items():
        assert len(open_cub(shared_root, split)) == count
    test = open_cub(shared_root, "test")
    assert isinstance(test, Dataset)
    assert test.classes == ("Black_footed_Albatross", "Laysan_Albatross", "Sooty_Albatross")
    assert test.labels([0, 1]).tolist() == [0, 2]
    assert test.batch([1]).ids == ("cub/003.Sooty_Albatross/bird_0005.jpg",)


def test_bird_box_crops_the_photo_to_the_bird(shared_root):
    found = open_cub(shared_root, size=(20, 20), view=bird_box)
    batch = found.batch([0])
    assert batch.images.shape == (1, 3, 20, 20)
    assert batch.images[0, :, 2:-2, 2:-2].min() > 240  # nothing but bird
    assert batch.boxes.tolist() == [[[10, 5, 30, 25]]]
    assert batch.geometry.cells((1, 1)).tolist() == [[[10, 5, 30, 25]]]
    assert batch.geometry.size.tolist() == [[40, 60]]


def test_target_of_the_whole_photo_is_the_box(shared_root):
    found = open_cub(shared_root, size=(40, 60), view=whole_photo, cells=(8, 12))
    batch = found.batch([0, 1])  # photos 1 and 3: `all` is train, then test
    for row, (left, top, width, height) in enumerate([BOXES[0], BOXES[2]]):
        expected = torch.zeros(8, 12)
        expected[top // 5 : (top + height) // 5, left // 5 : (left + width) // 5] = 1
        target = batch.target.weights[row, 0, 0, 0].reshape(8, 12)
        torch.testing.assert_close(target, expected / expected.sum())
        shown = batch.images[row, 0].float().unfold(0, 5, 5).unfold(1, 5, 5).mean((-1, -2)) > 150
        assert torch.equal(shown, expected > 0)


def test_box_beyond_the_photo_is_clipped(shared_root):
    batch = open_cub(shared_root, size=(10, 10)).batch([4])
    assert batch.geometry.cells((1, 1)).tolist() == [[[50, 30, 60, 40]]]
    assert batch.boxes.tolist() == [[[50, 30, 80, 60]]]  # as the file has it


def test_part_points_are_photo_coordinates(shared_root):
    found = open_cub(shared_root, "test")
    at, visible = found.part_points([1, 0])
    assert found.parts == ("back", "left eye")
    assert at.tolist() == [[[10, 5.5], [20, 5.5]], [[10, 2.5], [20, 2.5]]]
    assert visible.tolist() == [[True, False]] * 2
    geometry = found.batch([1, 0]).geometry
    assert geometry.density(list(at.double()), (1, 1), 0.0).shape == (2, 1)


def test_empty_and_out_of_range_indices(shared_root):
    batch = open_cub(shared_root).batch([])
    assert len(batch) == 0 and batch.boxes.shape == (0, 1, 4)
    with pytest.raises(UserError, match="5 is out"):
        open_cub(shared_root).batch([5])
    with pytest.raises(UserError, match="-1 is out"):
        open_cub(shared_root).part_points([-1])


def test_digest_depends_on_photos_and_lists(root):
    before = open_cub(root).digest()
    assert before == open_cub(root).digest() != open_cub(root, "test").digest()
    path = root / cub.FOLDER / "bounding_boxes.txt"
    path.write_text(path.read_text().replace("10.0 5.0", "11.0 5.0"))
    assert open_cub(root).digest() != before


def test_the_official_number_of_photos_is_the_default(shared_root):
    with pytest.raises(CorruptFileError, match=r"3 photos.*5994"):
        Cub(shared_root)
    assert len(Cub(shared_root, "test", photos=None)) == 2


@pytest.mark.parametrize(
    ("name", "old", "new", "match"),
    [
        ("classes.txt", "1 001", "7 001", "line 1 .*`1 NAME`"),
        ("images.txt", "2 001", "3 001", "line 2 .*`2 NAME`"),
        ("images.txt", "4 003.Sooty_Albatross/bird_0004", "4 ../../x", "points outside"),
        ("images.txt", "bird_0005", "bird_0004", "twice"),
        ("images.txt", "bird_0005", "bird_0006", r"bird_0006\.jpg.*missing"),
        ("image_class_labels.txt", "3 2", "3 4", "photo 3 .*class 4.* 3"),
        ("image_class_labels.txt", "3 2", "3 0", "photo 3 .*class 0"),
        ("image_class_labels.txt", "3 2", "3 1.5", "photo 3 .*class 1.5"),
        ("image_class_labels.txt", "3 2\n", "", "4 lines .*5 photos"),
        ("train_test_split.txt", "2 0", "2 2", "photo 2 .*2.*train"),
        ("train_test_split.txt", "2 0", "2 yes", "line 2 is not"),
        ("bounding_boxes.txt", "20.0 20.0", "20.0", "line 1 .*`1` .*4"),
        ("bounding_boxes.txt", "20.0 20.0", "20.0 nan", "line 1 is not"),
        ("bounding_boxes.txt", "20.0 20.0", "20.0 inf", "line 1 is not"),
        ("bounding_boxes.txt", "20.0 20.0", "20.0 0.0", "photo 1 is empty"),
        ("bounding_boxes.txt", "20.0 20.0", "-20.0 20.0", "photo 1 is empty"),
        ("parts/parts.txt", "2 left eye", "2", "line 2 is not"),
        ("parts/part_locs.txt", "5 2 5.5 20.0 0\n", "", "9 lines .*5 .*2 parts"),
        ("parts/part_locs.txt", "3 1 3.5", "3 2 3.5", "line 5 .*`3 1 X Y VISIBLE`"),
        ("parts/part_locs.txt", "5 2 5.5 20.0 0", "5 2 5.5 20.0 2", "line 10 is not"),
    ],
)
def test_invalid_lists_raise_with_the_line(root, name, old, new, match):
    path = root / cub.FOLDER / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(CorruptFileError, match=match):
        open_cub(root)


@pytest.mark.parametrize("name", cub.LISTS)
def test_missing_or_binary_lists_raise_with_their_name(root, name):
    path = root / cub.FOLDER / name
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFileError, match=f"{name}.*not text"):
        open_cub(root)
    path.unlink()
    with pytest.raises(UserError, match=f"{name}.*missing"):
        open_cub(root)


def test_box_outside_the_photo_raises(root):
    path = root / cub.FOLDER / "bounding_boxes.txt"
    path.write_text(path.read_text().replace("1 10.0 5.0", "1 610.0 5.0"))
    with pytest.raises(CorruptFileError, match=r"bird_0001.*outside"):
        open_cub(root).batch([0])
