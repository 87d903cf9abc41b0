"""External maps: found by sample id, aligned with the image, and validated."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import metrics
from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry
from overt.io import write_arrays
from overt.metrics.scorecard.external_maps import CELLS, load_external_maps, target_grid
from tests.metrics.scorecard.toys import Pictures, Texts


def test_arrays_by_id_cover_the_whole_image(tmp_path: Path) -> None:
    """A bright quarter of a map of any size is a quarter of the cells."""
    quarter = np.zeros((20, 30), dtype=np.float32)
    quarter[:10, :15] = 1
    path = tmp_path / "maps.npz"
    write_arrays(path, {f"picture-{at:05d}": quarter for at in range(3)})
    found = (
        load_external_maps(path)(Pictures(3).batch(range(3))).weights[:, 0, 0, 0].reshape(3, 4, 4)
    )
    assert len(load_external_maps(path)) == 3
    assert torch.equal(found[0] > 0, torch.tensor([[1, 1, 0, 0]] * 2 + [[0] * 4] * 2).bool())


def test_maps_are_cropped_like_their_image(tmp_path: Path) -> None:
    across = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    write_arrays(tmp_path / "maps.npz", {"a": across})
    where = PixelGeometry.identity(1, (4, 8)).crop(0, 4, 4, 4)  # the right half
    batch = Batch(("a",), images=torch.zeros(1, 3, 4, 4), geometry=where)
    found = load_external_maps(tmp_path / "maps.npz")(batch).weights.reshape(CELLS)
    assert float(found.min()) > 0 and target_grid(batch) == CELLS
    left, right = float(found[:, :7].sum()), float(found[:, 7:].sum())
    assert (left, right) == pytest.approx((4 * (4 + 5), 4 * (6 + 7)), rel=1e-5)


def test_maps_without_photos_are_divided_by_area(tmp_path: Path) -> None:
    """Four columns become three: each takes a whole column and a third of another."""
    write_arrays(tmp_path / "maps.npz", {"a": np.array([[1.0, 2, 4, 8]])})
    target = AttentionMap.from_cells(torch.ones(1, 3), grid(1, 3))
    found = load_external_maps(tmp_path / "maps.npz")(Batch(("a",), target=target))
    expected = torch.tensor([1 + 2 / 3, 2 * 2 / 3 + 4 * 2 / 3, 4 / 3 + 8])
    torch.testing.assert_close(found.weights.flatten(), expected)
    assert found.keys.spans[0].geometry is None


def test_image_files_are_matched_by_the_last_part_of_the_id(tmp_path: Path) -> None:
    for name in ("dog", "cat.v2"):
        Image.fromarray(np.full((5, 5), 200, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    ids = ("pets/train/dog.jpg", "pets/train/cat.v2")
    batch = replace(Pictures(2).batch(range(2)), ids=ids)
    assert load_external_maps(tmp_path)(batch).weights.shape == (2, 1, 1, 1, 16)
    with pytest.raises(UserError, match=r"'pets/bird'.*2 maps"):
        load_external_maps(tmp_path)(replace(batch, ids=("pets/bird", "dog")))


def test_stacked_maps_with_ids_and_word_weights_load(tmp_path: Path) -> None:
    batch = Texts(2).batch(range(2))
    assert batch.token_mask is not None
    lengths = batch.token_mask.sum(dim=1).tolist()
    each = {
        name: np.arange(1, count + 1, dtype=np.float64)
        for name, count in zip(batch.ids, lengths, strict=True)
    }
    write_arrays(tmp_path / "words.npz", each)
    found = load_external_maps(tmp_path / "words.npz")(batch)
    assert found.weights[0, 0, 0, 0, : lengths[0]].tolist() == list(range(1, lengths[0] + 1))
    assert not bool((found.weights[:, 0, 0, 0] > 0)[~batch.token_mask].any())
    short = {name: values[:2] for name, values in each.items()}
    write_arrays(tmp_path / "short.npz", short)
    with pytest.raises(UserError, match=r"2 .*'toy-0'.* 6 "):
        load_external_maps(tmp_path / "short.npz")(batch)
    stack = {"ids": np.array(["picture-00000"]), "maps": np.ones((1, 6, 6))}
    write_arrays(tmp_path / "stack.npz", stack)
    assert len(load_external_maps(tmp_path / "stack.npz")(Pictures(1).batch([0]))) == 1


def test_a_scorecard_without_a_model_uses_external_maps(tmp_path: Path) -> None:
    data = Pictures(4)
    truth = {name: np.eye(16)[5].reshape(4, 4) for name in data.batch(range(4)).ids}
    write_arrays(tmp_path / "maps.npz", truth)
    maps = load_external_maps(tmp_path / "maps.npz")
    card = metrics.scorecard(None, data, ["spearman", "cc"], {"theirs": maps}, out=tmp_path / "out")
    assert card.intervals["theirs", "cc"].mean == pytest.approx(1)
    write_arrays(tmp_path / "maps.npz", {name: 2 * one for name, one in truth.items()})
    again = {"theirs": load_external_maps(tmp_path / "maps.npz")}
    with pytest.raises(UserError, match="differs in maps"):
        metrics.scorecard(None, data, ["spearman", "cc"], again, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"picture-00000": np.ones((2, 2, 3))}, r"shape \(2, 2, 3\)"),
        ({"picture-00000": -np.ones((2, 2))}, "finite weights"),
        ({"picture-00000": np.full((2, 2), np.nan)}, "finite weights"),
        ({"picture-00000": np.full((2, 2), 1 + 2j)}, "got complex128"),
        ({"picture-00000": np.array([["a", "b"]])}, "got <U1"),
        ({"ids": np.array(["a", "a"]), "maps": np.ones((2, 3))}, "unique id"),
    ],
)
def test_invalid_arrays_raise_corrupt_file_error(tmp_path: Path, arrays, message: str) -> None:
    write_arrays(tmp_path / "maps.npz", arrays)
    with pytest.raises(CorruptFileError, match=message):
        load_external_maps(tmp_path / "maps.npz")(Pictures(1).batch([0]))


def test_missing_and_unsupported_files_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.png"):
        load_external_maps(tmp_path)
    for gone in ("maps.txt", "maps.npz", "maps"):
        with pytest.raises(UserError, match=rf"{gone} does not exist"):
            load_external_maps(tmp_path / gone)
    (tmp_path / "maps.txt").touch()
    with pytest.raises(UserError, match=r"neither an \.npz"):
        load_external_maps(tmp_path / "maps.txt")
    write_arrays(tmp_path / "stack.npz", {"maps": np.ones((3, 6, 6))})
    with pytest.raises(UserError, match=r"3 .*`maps`.*`ids`"):
        load_external_maps(tmp_path / "stack.npz")
    both = {"picture-00000": np.ones((2, 2)), "picture-00001": np.ones(3)}
    write_arrays(tmp_path / "both.npz", both)
    with pytest.raises(CorruptFileError, match="two files"):
        load_external_maps(tmp_path / "both.npz")(Pictures(2).batch(range(2)))
    write_arrays(tmp_path / "words.npz", {"picture-00000": np.ones(3)})
    with pytest.raises(UserError, match="not texts"):
        load_external_maps(tmp_path / "words.npz")(Pictures(1).batch([0]))
