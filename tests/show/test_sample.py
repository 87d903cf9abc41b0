"""A gallery comes back as it went in, and what is not one is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overt import files
from overt.errors import Damaged
from overt.geometry import PixelGeometry
from overt.show.sample import Sample, load_gallery, save_gallery


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b)


def test_a_gallery_comes_back_as_it_went_in(
    tmp_path: Path, samples: Callable[..., list[Sample]]
) -> None:
    geometry = PixelGeometry.identity(1, (64, 64)).resize((32, 48)).crop(3, 5, 24, 24).flip()
    cropped = Sample(
        id="strange id/../ü",
        image=np.zeros((64, 64, 3), np.uint8),
        geometry=geometry,
        text="línea\n<b>",
        scores={"mass inside": math.nan, "pointing": 1.0},
        cells=np.eye(3, dtype=np.float32),
        levels={"low, 4x4": np.ones((4, 4), np.float32), "ü": np.eye(2)},
        prediction="two words",
        answer_cells=np.arange(8.0).reshape(2, 2, 2),
        boxes=np.array([[0.0, 1.0, 2.0, 3.0]], np.float32),
    )
    before = [*samples("soft attention", 3), cropped, Sample(id="bare")]
    save_gallery(tmp_path / "gallery", before)
    after = load_gallery(tmp_path / "gallery")
    assert [sample.id for sample in after] == [sample.id for sample in before]
    for a, b in zip(before, after, strict=True):
        arrays = ("word_cells", "answer_cells", "boxes")
        for name in ("image", "spans", "cells", "word_weights", "truth_cells", *arrays):
            assert same(getattr(a, name), getattr(b, name)), name
        for name in ("text", "group", "prediction", "truth"):
            assert getattr(a, name) == getattr(b, name)
        assert a.confidence == b.confidence or math.isnan(a.confidence + b.confidence)
        assert list(a.levels) == list(b.levels)
        assert all(same(a.levels[name], b.levels[name]) for name in a.levels)
    read = after[3]
    assert read.geometry is not None and read.geometry.canvas == geometry.canvas
    for name in ("size", "scale", "offset", "kept"):
        assert getattr(read.geometry, name).equal(getattr(geometry, name))
    assert read.scores["pointing"] == 1 and math.isnan(read.scores["mass inside"])


def test_samples_that_share_an_image_share_it_on_disk(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    save_gallery(tmp_path / "one", [Sample(id="0", image=image)])
    save_gallery(tmp_path / "many", [Sample(id=str(i), image=image.copy()) for i in range(10)])
    one, many = ((tmp_path / name / "arrays.npz").stat().st_size for name in ("one", "many"))
    assert many < 1.1 * one
    assert all(same(sample.image, image) for sample in load_gallery(tmp_path / "many"))


def test_right_is_known_only_with_a_truth() -> None:
    assert Sample(id="a", prediction="red", truth="red").right is True
    assert Sample(id="a", prediction="red", truth="blue").right is False
    assert Sample(id="a", prediction="red").right is None


def test_parts_that_do_not_fit_are_refused_with_the_numbers() -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(6, 4\)"):
        Sample(id="a", image=image, geometry=PixelGeometry.identity(1, (6, 4)))
    with pytest.raises(ValueError, match="of one, not of 2"):
        Sample(id="a", image=image, geometry=PixelGeometry.identity(2, (4, 6)))
    with pytest.raises(ValueError, match="3 word weights for 0 spans"):
        Sample(id="a", text="a b c", word_weights=np.ones(3))


@pytest.mark.parametrize("harm", ["byte", "missing", "schema", "keys", "list", "empty"])
def test_a_folder_that_is_no_gallery_is_damaged(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "gallery"
    save_gallery(folder, [Sample(id="a", cells=np.ones((2, 2)))])
    about = json.loads((folder / "samples.json").read_text())
    if harm == "byte":
        data = bytearray((folder / "arrays.npz").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "arrays.npz").write_bytes(data)
    elif harm == "missing":
        (folder / "arrays.npz").unlink()
    elif harm == "empty":
        for path in folder.iterdir():
            path.unlink()
    else:
        changed = {
            "schema": {**about, "schema": 99},
            "keys": {"schema": 1, "samples": [{"id": "a"}]},
            "list": [1, 2],
        }[harm]
        files.write_json(folder / "samples.json", changed)
        files.seal(folder, ["samples.json", "arrays.npz"])
    with pytest.raises(Damaged, match="gallery"):
        load_gallery(folder)


def test_galleries_of_earlier_versions_have_no_levels(tmp_path: Path) -> None:
    save_gallery(tmp_path / "now", [Sample(id="a", cells=np.ones((2, 2)))])
    about = files.read_json(tmp_path / "now" / "samples.json")
    for row in about["samples"]:
        del row["levels"]
    with files.writing(tmp_path / "before") as new:
        files.write_json(new / "samples.json", about)
        arrays = files.read_arrays(tmp_path / "now" / "arrays.npz")
        files.write_arrays(new / "arrays.npz", dict(arrays))
    (sample,) = load_gallery(tmp_path / "before")
    assert sample.levels == {} and sample.cells is not None


def test_maps_of_words_are_as_many_as_the_words() -> None:
    with pytest.raises(ValueError, match="2 maps for 0 spans"):
        Sample(id="a", word_cells=np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match="2 maps for 3 words of its answer"):
        Sample(id="a", prediction="a red dog", answer_cells=np.zeros((2, 2, 2)))
