import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import Kind
from overt.errors import BadInput, Damaged, Failed
from overt.files import writing
from overt.supervise.surrogate import kept
from overt.supervise.surrogate.kept import Key, Plan, Surrogates
from overt.supervise.surrogate.look import asking, every_one
from overt.supervise.surrogate.making import surrogates
from overt.supervise.surrogate.masks import Grids, WithoutWords
from overt.supervise.surrogate.search import Found, apart, search
from tests.supervise.surrogate.toys import Planted, Toys

MASKS = [Grids(20, 2), WithoutWords()]


def make(folder: Path, **options) -> Surrogates:
    return surrogates(Planted(), Toys(), folder, MASKS, shard=3, batch=2, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "surrogates"
    make(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def expected(ids) -> dict[str, Found]:
    whole = Toys().batch(range(10))
    rows = torch.tensor([whole.ids.index(one) for one in ids])
    with asking(Planted(), whole.select(rows), ["image", "text"]) as look:
        return apart(look, MASKS, search)


def test_targets_come_back_by_id_and_in_any_order(made):
    found = Surrogates(made)
    ids = ("7.1", "0.0", "3.0", "7.1")
    wanted = expected(ids)
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


def test_words_go_as_far_as_the_longest_text_asked_for(made):
    found, whole = Surrogates(made), Toys().batch(range(10))
    lengths = whole.token_mask.sum(dim=1)
    for row, one in enumerate(whole.ids):
        target = found.target([one], "text")
        assert len(target.keys) == int(lengths[row]) and target.visible.all()
    both = found.target(whole.ids, "text")
    assert torch.equal(both.visible[:, 0], whole.token_mask)
    assert (both.weights[:, 0, 0, 0][~whole.token_mask] == 0).all()
    assert (found.mask(whole.ids, "text")[~whole.token_mask] == 1).all()


def test_no_ids_give_no_rows(made):
    found = Surrogates(made)
    assert found.target((), "image").values.shape == (0, 1, 1, 1, 16)
    assert found.base((), "image").shape == (0,)


def test_arrays_are_mapped_and_not_read(made):
    found = Surrogates(made)
    assert found._open == {}
    found.target(["7.1"], "image")
    assert {number for number, _ in found._open} == {2}
    assert all(isinstance(one, np.memmap) for one in found._open.values())


def test_sixteen_bits_are_normalised_again(tmp_path, made):
    half = make(tmp_path / "half", dtype=torch.float16)
    ids = half.ids
    assert np.load(half.folder / "shard-00000" / "map-0.npy").dtype == np.float16
    whole = Surrogates(made)
    for name in half.names:
        target = half.target(ids, name).check()
        torch.testing.assert_close(
            target.weights, whole.target(ids, name).weights, atol=1e-3, rtol=0
        )
        torch.testing.assert_close(half.mask(ids, name), whole.mask(ids, name), atol=1e-3, rtol=0)


def test_layers_and_hops_are_kept_as_they_are(tmp_path):
    found = make(tmp_path / "hops", reduce=every_one)
    assert found.target(found.ids[:2], "image").values.shape == (2, 1, 2, 1, 16)
    assert found.target(found.ids[:2], "image").kind is Kind.PROBABILITY


# --- what is wrong is said


def test_a_missing_sample_is_said(made):
    with pytest.raises(BadInput, match=r"no surrogate of sample 'x': was it made for this split"):
        Surrogates(made).target(["0.0", "x"], "image")
    with pytest.raises(BadInput, match="nor of 1 more of 3"):
        Surrogates(made).target(["0.0", "x", "y"], "image")


def test_the_span_has_to_be_said_where_there_are_two(made):
    with pytest.raises(ValueError, match="say over which span"):
        Surrogates(made).target(["0.0"])
    with pytest.raises(ValueError, match="no surrogates over 'sound'"):
        Surrogates(made).target(["0.0"], "sound")


def test_an_empty_folder_is_said(tmp_path):
    with pytest.raises(BadInput, match="holds no surrogates"):
        Surrogates(tmp_path)


def test_a_missing_shard_is_named(folder):
    shutil.rmtree(folder / "shard-00001")
    with pytest.raises(Damaged, match=r"shard-00001 is missing: shard 1, items 3 to 5"):
        Surrogates(folder)


@pytest.mark.parametrize("name", ["map-0.npy", "mask-1.npy", "best-0.npy"])
def test_a_changed_byte_is_found_before_it_is_used(folder, name):
    path = folder / "shard-00001" / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    found = Surrogates(folder)
    with pytest.raises(Damaged, match=name):
        found.target(["3.0"], "image")
    with pytest.raises(Damaged, match=name):
        found.check()
    found.target(["0.0"], "image")


def test_swapped_shards_are_found(folder):
    (folder / "shard-00000").rename(folder / "x")
    (folder / "shard-00001").rename(folder / "shard-00000")
    (folder / "x").rename(folder / "shard-00001")
    with pytest.raises(Damaged, match="it is not shard 0, items 0 to 2"):
        Surrogates(folder)


def rewrite(place: Path, change) -> None:
    arrays = {path.name: np.load(path) for path in place.glob("*.npy")}
    about = json.loads((place / "shard.json").read_text())
    change(about)
    with writing(place) as temporary:
        for name, array in arrays.items():
            np.save(temporary / name, array)
        (temporary / "shard.json").write_text(json.dumps(about))


def test_a_sample_that_comes_twice_is_found(folder):
    rewrite(folder / "shard-00001", lambda about: about["ids"].__setitem__(0, "0.0"))
    with pytest.raises(Damaged, match=r"row 0 is sample '0\.0', which shard 0 has already"):
        Surrogates(folder)


def test_another_shape_is_found(folder):
    rewrite(folder / "shard-00001", lambda about: about["spans"][0].update(shape=[2, 8]))
    with pytest.raises(Damaged, match="another shape"):
        Surrogates(folder)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "overt surrogates 1"}', "x"])
def test_a_broken_description_is_found(folder, text):
    (folder / "surrogates.json").write_text(text)
    with pytest.raises(Damaged, match=r"surrogates\.json"):
        Surrogates(folder)


def test_a_plan_is_cut_into_shards():
    plan = Plan(Key("m", "d", "{}"), 10, 4)
    assert plan.count == 3 and [plan.span(n) for n in range(3)] == [(0, 4), (4, 8), (8, 10)]


def test_keys_differ_in_every_part():
    key = Key("a", "b", "c")
    others = [replace(key, **{part: "x"}) for part in ("model", "data", "settings")]
    assert len({one.digest() for one in [key, *others, Key("ab", "", "c")]}) == 5


def test_numbers_that_are_not_finite_are_not_kept(tmp_path):
    found = expected(("0.0", "1.0"))
    broken = replace(found["image"], best=torch.tensor([0.0, torch.nan]))
    with pytest.raises(Failed, match=r"sample '1\.0' over 'image' is not finite"):
        kept.keep(
            tmp_path, Plan(Key("", "", ""), 2, 2), 0, ("0.0", "1.0"),
            {"image": [broken]}, torch.float32,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
