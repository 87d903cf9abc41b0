"""Gallery files: exact round trip, shared images, invalid samples and corrupt files."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overt import io
from overt.errors import CorruptFileError
from overt.geometry import PixelGeometry
from overt.viz.gallery_sample import GallerySample, load_gallery, save_gallery


def equal_arrays(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b)


def test_saved_gallery_loads_unchanged(
    tmp_path: Path, samples: Callable[..., list[GallerySample]]
) -> None:
    geometry = PixelGeometry.identity(1, (64, 64)).resize((32, 48)).crop(3, 5, 24, 24).flip()
    cropped = GallerySample(
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
    before = [*samples("soft attention", 3), cropped, GallerySample(id="bare")]
    save_gallery(tmp_path / "gallery", before)
    after = load_gallery(tmp_path / "gallery")
    assert [sample.id for sample in after] == [sample.id for sample in before]
    for a, b in zip(before, after, strict=True):
        arrays = ("word_cells", "answer_cells", "boxes")
        for name in ("image", "spans", "cells", "word_weights", "truth_cells", *arrays):
            assert equal_arrays(getattr(a, name), getattr(b, name)), name
        for name in ("text", "group", "prediction", "truth"):
            assert getattr(a, name) == getattr(b, name)
        assert a.confidence == b.confidence or math.isnan(a.confidence + b.confidence)
        assert list(a.levels) == list(b.levels)
        assert all(equal_arrays(a.levels[name], b.levels[name]) for name in a.levels)
    loaded = after[3]
    assert loaded.geometry is not None and loaded.geometry.canvas == geometry.canvas
    for name in ("size", "scale", "offset", "kept"):
        assert getattr(loaded.geometry, name).equal(getattr(geometry, name))
    assert loaded.scores["pointing"] == 1 and math.isnan(loaded.scores["mass inside"])


def test_shared_images_are_stored_once(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    save_gallery(tmp_path / "one", [GallerySample(id="0", image=image)])
    save_gallery(
        tmp_path / "many", [GallerySample(id=str(i), image=image.copy()) for i in range(10)]
    )
    one, many = ((tmp_path / name / "arrays.npz").stat().st_size for name in ("one", "many"))
    assert many < 1.1 * one
    assert all(equal_arrays(sample.image, image) for sample in load_gallery(tmp_path / "many"))


def test_right_is_none_without_a_truth() -> None:
    assert GallerySample(id="a", prediction="red", truth="red").right is True
    assert GallerySample(id="a", prediction="red", truth="blue").right is False
    assert GallerySample(id="a", prediction="red").right is None


def test_mismatched_parts_raise_with_their_sizes() -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(6, 4\)"):
        GallerySample(id="a", image=image, geometry=PixelGeometry.identity(1, (6, 4)))
    with pytest.raises(ValueError, match="geometry.*2"):
        GallerySample(id="a", image=image, geometry=PixelGeometry.identity(2, (4, 6)))
    with pytest.raises(ValueError, match=r"3 word.*0 spans"):
        GallerySample(id="a", text="a b c", word_weights=np.ones(3))


@pytest.mark.parametrize("damage", ["byte", "missing", "schema", "keys", "list", "empty"])
def test_corrupt_gallery_folder_raises(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "gallery"
    save_gallery(folder, [GallerySample(id="a", cells=np.ones((2, 2)))])
    about = json.loads((folder / "samples.json").read_text())
    if damage == "byte":
        data = bytearray((folder / "arrays.npz").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "arrays.npz").write_bytes(data)
    elif damage == "missing":
        (folder / "arrays.npz").unlink()
    elif damage == "empty":
        for path in folder.iterdir():
            path.unlink()
    else:
        changed = {
            "schema": {**about, "schema": 99},
            "keys": {"schema": 1, "samples": [{"id": "a"}]},
            "list": [1, 2],
        }[damage]
        io.write_json(folder / "samples.json", changed)
        io.write_manifest(folder, ["samples.json", "arrays.npz"])
    with pytest.raises(CorruptFileError, match="gallery"):
        load_gallery(folder)


def test_galleries_of_earlier_versions_load_without_levels(tmp_path: Path) -> None:
    save_gallery(tmp_path / "now", [GallerySample(id="a", cells=np.ones((2, 2)))])
    about = io.read_json(tmp_path / "now" / "samples.json")
    for row in about["samples"]:
        del row["levels"]
    with io.atomic_folder(tmp_path / "before") as new:
        io.write_json(new / "samples.json", about)
        arrays = io.read_arrays(tmp_path / "now" / "arrays.npz")
        io.write_arrays(new / "arrays.npz", dict(arrays))
    (sample,) = load_gallery(tmp_path / "before")
    assert sample.levels == {} and sample.cells is not None


def test_wrong_number_of_word_maps_raises() -> None:
    with pytest.raises(ValueError, match="2 maps.*0 spans"):
        GallerySample(id="a", word_cells=np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match=r"2 maps.*3 words"):
        GallerySample(id="a", prediction="a red dog", answer_cells=np.zeros((2, 2, 2)))
