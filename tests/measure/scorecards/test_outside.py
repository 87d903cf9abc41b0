"""Maps of somebody else: found by the names of samples, laid over their photos, or refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import measure
from overt.data.batch import Batch
from overt.errors import BadInput, Damaged
from overt.files import write_arrays
from overt.geometry import PixelGeometry
from overt.measure.scorecards.outside import CELLS, cells_of, outside_maps
from tests.measure.scorecards.toys import Pictures, Texts


def test_arrays_by_id_lie_over_the_whole_photo(tmp_path: Path) -> None:
    """A bright quarter of a map of any size is the quarter of the cells."""
    quarter = np.zeros((20, 30), dtype=np.float32)
    quarter[:10, :15] = 1
    path = tmp_path / "maps.npz"
    write_arrays(path, {f"picture-{at:05d}": quarter for at in range(3)})
    found = outside_maps(path)(Pictures(3).batch(range(3))).weights[:, 0, 0, 0].reshape(3, 4, 4)
    assert len(outside_maps(path)) == 3
    assert torch.equal(found[0] > 0, torch.tensor([[1, 1, 0, 0]] * 2 + [[0] * 4] * 2).bool())


def test_what_was_cropped_away_is_cropped_from_the_map(tmp_path: Path) -> None:
    across = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    write_arrays(tmp_path / "maps.npz", {"a": across})
    where = PixelGeometry.identity(1, (4, 8)).crop(0, 4, 4, 4)  # the right half
    batch = Batch(("a",), images=torch.zeros(1, 3, 4, 4), geometry=where)
    found = outside_maps(tmp_path / "maps.npz")(batch).weights.reshape(CELLS)
    assert float(found.min()) > 0 and cells_of(batch) == CELLS
    left, right = float(found[:, :7].sum()), float(found[:, 7:].sum())
    assert (left, right) == pytest.approx((4 * (4 + 5), 4 * (6 + 7)), rel=1e-5)


def test_pictures_in_a_folder_go_by_the_end_of_an_id(tmp_path: Path) -> None:
    for name in ("dog", "cat.v2"):
        Image.fromarray(np.full((5, 5), 200, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    ids = ("pets/train/dog.jpg", "pets/train/cat.v2")
    batch = replace(Pictures(2).batch(range(2)), ids=ids)
    assert outside_maps(tmp_path)(batch).weights.shape == (2, 1, 1, 1, 16)
    with pytest.raises(BadInput, match=r"no map of the sample 'pets/bird'; its 2 maps are called"):
        outside_maps(tmp_path)(replace(batch, ids=("pets/bird", "dog")))


def test_ids_and_maps_beside_each_other_and_weights_of_words(tmp_path: Path) -> None:
    batch = Texts(2).batch(range(2))
    assert batch.token_mask is not None
    lengths = batch.token_mask.sum(dim=1).tolist()
    each = {
        name: np.arange(1, count + 1, dtype=np.float64)
        for name, count in zip(batch.ids, lengths, strict=True)
    }
    write_arrays(tmp_path / "words.npz", each)
    found = outside_maps(tmp_path / "words.npz")(batch)
    assert found.weights[0, 0, 0, 0, : lengths[0]].tolist() == list(range(1, lengths[0] + 1))
    assert not bool((found.weights[:, 0, 0, 0] > 0)[~batch.token_mask].any())
    short = {name: values[:2] for name, values in each.items()}
    write_arrays(tmp_path / "short.npz", short)
    with pytest.raises(BadInput, match="has 2 weights for 'toy-0', which is read as 6 words"):
        outside_maps(tmp_path / "short.npz")(batch)
    stack = {"ids": np.array(["picture-00000"]), "maps": np.ones((1, 6, 6))}
    write_arrays(tmp_path / "stack.npz", stack)
    assert len(outside_maps(tmp_path / "stack.npz")(Pictures(1).batch([0]))) == 1


def test_a_scorecard_of_maps_alone(tmp_path: Path) -> None:
    data = Pictures(4)
    truth = {name: np.eye(16)[5].reshape(4, 4) for name in data.batch(range(4)).ids}
    write_arrays(tmp_path / "maps.npz", truth)
    maps = outside_maps(tmp_path / "maps.npz")
    card = measure.scorecard(None, data, ["spearman", "cc"], {"theirs": maps}, out=tmp_path / "out")
    assert card.intervals["theirs", "cc"].mean == pytest.approx(1)
    write_arrays(tmp_path / "maps.npz", {name: 2 * one for name, one in truth.items()})
    again = {"theirs": outside_maps(tmp_path / "maps.npz")}
    with pytest.raises(BadInput, match="a scorecard of other work, which differs in maps"):
        measure.scorecard(None, data, ["spearman", "cc"], again, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"picture-00000": np.ones((2, 2, 3))}, "has the shape"),
        ({"picture-00000": -np.ones((2, 2))}, "numbers that are no weights"),
        ({"picture-00000": np.full((2, 2), np.nan)}, "numbers that are no weights"),
        ({"picture-00000": np.full((2, 2), 1 + 2j)}, "holds complex128 and no plain numbers"),
        ({"picture-00000": np.array([["a", "b"]])}, "holds <U1 and no plain numbers"),
        ({"ids": np.array(["a", "a"]), "maps": np.ones((2, 3))}, "or one twice"),
    ],
)
def test_what_is_no_map_is_damaged(tmp_path: Path, arrays, said: str) -> None:
    write_arrays(tmp_path / "maps.npz", arrays)
    with pytest.raises(Damaged, match=said):
        outside_maps(tmp_path / "maps.npz")(Pictures(1).batch([0]))


def test_what_is_no_file_of_maps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no \.png in it"):
        outside_maps(tmp_path)
    for gone in ("maps.txt", "maps.npz", "maps"):
        with pytest.raises(BadInput, match=rf"{gone} does not exist; name an \.npz of maps"):
            outside_maps(tmp_path / gone)
    (tmp_path / "maps.txt").touch()
    with pytest.raises(BadInput, match=r"neither an \.npz"):
        outside_maps(tmp_path / "maps.txt")
    write_arrays(tmp_path / "stack.npz", {"maps": np.ones((3, 6, 6))})
    with pytest.raises(BadInput, match=r"has 3 maps in one array `maps`.*put an array `ids`"):
        outside_maps(tmp_path / "stack.npz")
    both = {"picture-00000": np.ones((2, 2)), "picture-00001": np.ones(3)}
    write_arrays(tmp_path / "both.npz", both)
    with pytest.raises(Damaged, match="pictures and texts"):
        outside_maps(tmp_path / "both.npz")(Pictures(2).batch(range(2)))
    write_arrays(tmp_path / "words.npz", {"picture-00000": np.ones(3)})
    with pytest.raises(BadInput, match="no texts"):
        outside_maps(tmp_path / "words.npz")(Pictures(1).batch([0]))
