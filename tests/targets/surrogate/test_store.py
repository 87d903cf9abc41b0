"""Stored surrogates: reading by id, dtypes, corrupt and missing shards."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import Kind
from overt.errors import CorruptFileError, RunError, UserError
from overt.io import atomic_folder
from overt.targets.surrogate import store
from overt.targets.surrogate.generate import generate_surrogates
from overt.targets.surrogate.masked_inference import all_maps, masked_batch
from overt.targets.surrogate.masks import GridMasks, RemoveWords
from overt.targets.surrogate.search import SearchResult, exhaustive_search, search_independently
from overt.targets.surrogate.store import ShardPlan, SurrogateKey, Surrogates
from tests.targets.surrogate.toys import Planted, Toys

MASKS = [GridMasks(20, 2), RemoveWords()]


def make_surrogates(folder: Path, **options) -> Surrogates:
    return generate_surrogates(Planted(), Toys(), folder, MASKS, shard=3, batch=2, **options)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "surrogates"
    make_surrogates(folder)
    return folder


@pytest.fixture
def folder(shared_folder, tmp_path) -> Path:
    return Path(shutil.copytree(shared_folder, tmp_path / "copy"))


def expected_results(ids) -> dict[str, SearchResult]:
    whole = Toys().batch(range(10))
    rows = torch.tensor([whole.ids.index(one) for one in ids])
    with masked_batch(Planted(), whole.select(rows), ["image", "text"]) as look:
        return search_independently(look, MASKS, exhaustive_search)


def test_targets_are_read_by_id_in_any_order(shared_folder):
    found = Surrogates(shared_folder)
    ids = ("7.1", "0.0", "3.0", "7.1")
    wanted = expected_results(ids)
    assert found.names == ("image", "text") and len(found) == 15
    assert found.ids == Toys().batch(range(10)).ids
    assert "7.1" in found and "nobody" not in found
    for name in found.names:
        target = found.target(ids, name).check()
        width = len(target.keys)
        assert target.keys.find(name).shape == ((4, 4) if name == "image" else (width,))
        torch.testing.assert_close(target.weights, wanted[name].maps[name].weights[..., :width])
        torch.testing.assert_close(found.mask(ids, name), wanted[name].masks[name][:, :width])
        torch.testing.assert_close(found.base(ids, name), wanted[name].base)
        torch.testing.assert_close(found.best(ids, name), wanted[name].best)
        assert torch.equal(found.probes(ids, name), wanted[name].probes)


def test_text_targets_are_as_long_as_the_longest_requested_text(shared_folder):
    found, whole = Surrogates(shared_folder), Toys().batch(range(10))
    lengths = whole.token_mask.sum(dim=1)
    for row, one in enumerate(whole.ids):
        target = found.target([one], "text")
        assert len(target.keys) == int(lengths[row]) and target.visible.all()
    both = found.target(whole.ids, "text")
    assert torch.equal(both.visible[:, 0], whole.token_mask)
    assert (both.weights[:, 0, 0, 0][~whole.token_mask] == 0).all()
    assert (found.mask(whole.ids, "text")[~whole.token_mask] == 1).all()


def test_no_ids_give_no_rows(shared_folder):
    found = Surrogates(shared_folder)
    assert found.target((), "image").values.shape == (0, 1, 1, 1, 16)
    assert found.base((), "image").shape == (0,)


def test_arrays_are_memory_mapped_on_demand(shared_folder):
    found = Surrogates(shared_folder)
    assert found._open == {}
    found.target(["7.1"], "image")
    assert {number for number, _ in found._open} == {2}
    assert all(isinstance(one, np.memmap) for one in found._open.values())


def test_float16_maps_are_normalised_when_read(tmp_path, shared_folder):
    half = make_surrogates(tmp_path / "half", dtype=torch.float16)
    ids = half.ids
    assert np.load(half.folder / "shard-00000" / "map-0.npy").dtype == np.float16
    whole = Surrogates(shared_folder)
    for name in half.names:
        target = half.target(ids, name).check()
        torch.testing.assert_close(
            target.weights, whole.target(ids, name).weights, atol=1e-3, rtol=0
        )
        torch.testing.assert_close(half.mask(ids, name), whole.mask(ids, name), atol=1e-3, rtol=0)


def test_layers_and_hops_are_stored(tmp_path):
    found = make_surrogates(tmp_path / "hops", reduce=all_maps)
    assert found.target(found.ids[:2], "image").values.shape == (2, 1, 2, 1, 16)
    assert found.target(found.ids[:2], "image").kind is Kind.PROBABILITY


# --- errors


def test_missing_samples_raise_with_their_ids(shared_folder):
    with pytest.raises(UserError, match=r"'x'.*'0\.0'"):
        Surrogates(shared_folder).target(["0.0", "x"], "image")
    with pytest.raises(UserError, match="2 of 3"):
        Surrogates(shared_folder).target(["0.0", "x", "y"], "image")


def test_ambiguous_or_unknown_span_raises(shared_folder):
    with pytest.raises(ValueError, match="'image'.*'text'"):
        Surrogates(shared_folder).target(["0.0"])
    with pytest.raises(ValueError, match=r"surrogates.*'sound'"):
        Surrogates(shared_folder).target(["0.0"], "sound")


def test_empty_folder_raises(tmp_path):
    with pytest.raises(UserError, match="no surrogates"):
        Surrogates(tmp_path)


def test_missing_shard_raises_with_its_name(folder):
    shutil.rmtree(folder / "shard-00001")
    with pytest.raises(CorruptFileError, match=r"shard-00001.* 3.* 5"):
        Surrogates(folder)


@pytest.mark.parametrize("name", ["map-0.npy", "mask-1.npy", "best-0.npy"])
def test_changed_byte_raises_before_it_is_used(folder, name):
    path = folder / "shard-00001" / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    found = Surrogates(folder)
    with pytest.raises(CorruptFileError, match=name):
        found.target(["3.0"], "image")
    with pytest.raises(CorruptFileError, match=name):
        found.check()
    found.target(["0.0"], "image")


def test_swapped_shards_raise(folder):
    (folder / "shard-00000").rename(folder / "x")
    (folder / "shard-00001").rename(folder / "shard-00000")
    (folder / "x").rename(folder / "shard-00001")
    with pytest.raises(CorruptFileError, match=r"shard 0.*0 .*2"):
        Surrogates(folder)


def edit_shard(place: Path, change) -> None:
    arrays = {path.name: np.load(path) for path in place.glob("*.npy")}
    about = json.loads((place / "shard.json").read_text())
    change(about)
    with atomic_folder(place) as temporary:
        for name, array in arrays.items():
            np.save(temporary / name, array)
        (temporary / "shard.json").write_text(json.dumps(about))


def test_duplicate_sample_raises(folder):
    edit_shard(folder / "shard-00001", lambda about: about["ids"].__setitem__(0, "0.0"))
    with pytest.raises(CorruptFileError, match=r"row 0 .*'0.0'.* 0"):
        Surrogates(folder)


def test_shard_of_another_shape_raises(folder):
    edit_shard(folder / "shard-00001", lambda about: about["spans"][0].update(shape=[2, 8]))
    with pytest.raises(CorruptFileError, match="another shape"):
        Surrogates(folder)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "overt surrogates 1"}', "x"])
def test_invalid_description_raises(folder, text):
    (folder / "surrogates.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"surrogates\.json"):
        Surrogates(folder)


def test_shard_plan_splits_samples_into_shards():
    plan = ShardPlan(SurrogateKey("m", "d", "{}"), 10, 4)
    assert plan.count == 3 and [plan.span(n) for n in range(3)] == [(0, 4), (4, 8), (8, 10)]


def test_surrogate_key_digest_depends_on_every_part():
    key = SurrogateKey("a", "b", "c")
    others = [replace(key, **{part: "x"}) for part in ("model", "data", "settings")]
    assert len({one.digest() for one in [key, *others, SurrogateKey("ab", "", "c")]}) == 5


def test_non_finite_scores_are_not_stored(tmp_path):
    found = expected_results(("0.0", "1.0"))
    broken = replace(found["image"], best=torch.tensor([0.0, torch.nan]))
    with pytest.raises(RunError, match=r"'1\.0'.*'image'.*finite"):
        store.write_shard(
            tmp_path, ShardPlan(SurrogateKey("", "", ""), 2, 2), 0, ("0.0", "1.0"),
            {"image": [broken]}, torch.float32,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
