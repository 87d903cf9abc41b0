import hashlib
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.batch import Batch
from overt.data.features import ABOUT, FEATURES, SHARD, Cached, FeatureCache, Key, build
from overt.errors import BadInput, Damaged, Failed
from overt.files import lock, writing

KEY = Key("toy", "abc", "none", "123")


class Toy:
    """Ten items; item i is i % 3 + 1 samples, as a scene has several questions."""

    name, split = "toy", "train"

    def __len__(self) -> int:
        return 10

    def batch(self, indices) -> Batch:
        names = [(i, part) for i in indices for part in range(i % 3 + 1)]
        return Batch(
            tuple(f"{i}.{part}" for i, part in names),
            labels=torch.tensor([10 * i + part for i, part in names]),
        )

    def digest(self) -> str:
        return "d"


def encode(batch: Batch) -> torch.Tensor:
    assert not torch.is_grad_enabled()
    return batch.labels[:, None, None] + torch.arange(6.0).reshape(2, 3) / 7


def make(folder: Path, encode=encode, **options) -> FeatureCache:
    return build(folder, KEY, Toy(), encode, shard=3, batch=2, **options)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_second_build_is_refused_or_waits_and_takes_what_the_first_made(tmp_path) -> None:
    asked = []

    def first(batch: Batch) -> torch.Tensor:
        with pytest.raises(BadInput, match="is in use by process"):
            make(tmp_path / "cache")
        if not asked:
            asked.append(threading.Thread(target=second))
            asked[0].start()
        return encode(batch)

    def second() -> None:
        def never(batch: Batch) -> torch.Tensor:
            raise AssertionError("it was there")

        asked.append(make(tmp_path / "cache", never, wait=True))

    whole = make(tmp_path / "cache", first)
    asked[0].join(timeout=60)
    assert asked[1].digest() == whole.digest()
    with lock(tmp_path / "cache"):  # nobody holds it any more
        pass


@pytest.fixture
def folder(tmp_path) -> Path:
    make(tmp_path / "cache")
    return tmp_path / "cache"


def test_features_come_back_by_id(folder):
    cache = FeatureCache(folder)
    whole = Toy().batch(range(10))
    with torch.no_grad():
        expected = encode(whole)
    assert torch.equal(cache.get(whole.ids), expected)
    assert torch.equal(cache.get(("7.1", "0.0", "7.1")), expected[[14, 0, 14]])
    assert len(cache) == len(whole) == 19 and cache.shape == (2, 3)
    assert "7.1" in cache and "nobody" not in cache
    assert cache.get(()).shape == (0, 2, 3)
    cache.check()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_kinds_of_numbers_are_kept(tmp_path, given, kept):
    cache = make(tmp_path, lambda batch: encode(batch).to(given))
    found = cache.get(("4.1",))
    assert found.dtype == kept
    with torch.no_grad():
        assert torch.equal(found, encode(Toy().batch([4]))[1:].to(given).to(kept))


def test_the_batch_size_does_not_change_the_bytes(folder, tmp_path):
    build(tmp_path / "other", KEY, Toy(), encode, shard=3, batch=100)
    assert tree(tmp_path / "other") == tree(folder)


@pytest.mark.parametrize("stop", range(5))
def test_a_stopped_build_goes_on_and_ends_in_the_same_bytes(folder, tmp_path, stop):
    done: list[str] = []

    def until(batch: Batch) -> torch.Tensor:
        if len(done) >= stop:
            raise KeyboardInterrupt
        done.extend(["batch"])
        return encode(batch)

    def counting(batch: Batch) -> torch.Tensor:
        seen.extend(batch.ids)
        return encode(batch)

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "new", until)
    whole = sorted(path.name for path in (tmp_path / "new").glob("shard-*"))
    assert len(whole) == stop // 2  # two batches a shard
    if not whole:
        with pytest.raises(Damaged, match="shard-00000 is missing"):
            FeatureCache(tmp_path / "new")
    seen: list[str] = []
    progress: list[tuple[int, int]] = []
    make(tmp_path / "new", counting, on_progress=lambda *at: progress.append(at))
    assert tree(tmp_path / "new") == tree(folder)
    assert (
        len(seen)
        == len(set(seen))
        == 19 - sum(len(Toy().batch(range(3 * n, 3 * n + 3))) for n in range(len(whole)))
    )
    assert progress == [(3, 10), (6, 10), (9, 10), (10, 10)]


def test_a_finished_build_encodes_nothing(folder):
    make(folder, lambda batch: pytest.fail("encoded again"))


def test_a_broken_shard_is_made_again(folder):
    before = tree(folder)
    path = folder / "shard-00002" / FEATURES
    path.write_bytes(path.read_bytes()[:-3])
    shutil.rmtree(folder / "shard-00001")
    make(folder)
    assert tree(folder) == before


@pytest.mark.parametrize("field", ["backbone", "weights", "transform", "data"])
def test_another_key_is_refused(folder, field):
    with pytest.raises(BadInput, match=field):
        build(folder, replace(KEY, **{field: "other"}), Toy(), encode, shard=3)


def test_another_shard_size_is_refused(folder):
    with pytest.raises(BadInput, match="another shard"):
        build(folder, KEY, Toy(), encode, shard=4)


def test_keys_differ_when_any_part_does():
    parts = [Key("a", "b", "c", "d"), Key("ab", "", "c", "d"), Key("a", "b\n1 c", "", "d")]
    assert len({key.digest() for key in parts}) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_stop_the_build(tmp_path, bad):
    def wrong(batch: Batch) -> torch.Tensor:
        found = encode(batch)
        found[torch.tensor([name == "4.1" for name in batch.ids]), 1, 2] = bad
        return found

    with pytest.raises(Failed, match=r"4\.1"):
        make(tmp_path, wrong)
    assert [path.name for path in tmp_path.glob("shard-*")] == ["shard-00000"]


@pytest.mark.parametrize("shape", [(1, 2, 3), (19, 6), (0, 2, 3)])
def test_features_of_a_wrong_shape_stop_the_build(tmp_path, shape):
    with pytest.raises(Failed, match="shape"):
        make(tmp_path, lambda batch: torch.zeros(shape))


def test_features_that_change_shape_stop_the_build(tmp_path):
    with pytest.raises(Failed, match="shape"):
        make(tmp_path, lambda b: torch.zeros(len(b), 1 + int(b.ids[0] > "3"), 2))
    with pytest.raises(Failed, match="different shapes"):
        make(tmp_path / "b", lambda b: torch.zeros(len(b), 1 + int("2.0" in b.ids), 2))


def test_two_samples_of_one_name_are_refused(tmp_path):
    class Twice(Toy):
        def batch(self, indices) -> Batch:
            return Batch(tuple(f"{i % 5}" for i in indices), labels=torch.tensor(list(indices)))

    with pytest.raises(BadInput, match="two samples"):
        build(tmp_path, KEY, Twice(), encode, shard=3)


def test_nothing_to_cache_and_no_cache(tmp_path):
    with pytest.raises(BadInput):
        build(tmp_path, KEY, Toy(), encode, shard=0)
    with pytest.raises(BadInput, match="not a feature cache"):
        FeatureCache(tmp_path)


def test_an_unknown_sample_is_named(folder):
    with pytest.raises(BadInput, match="nobody"):
        FeatureCache(folder).get(("0.0", "nobody"))


def test_a_missing_shard_is_named_with_its_items(folder):
    shutil.rmtree(folder / "shard-00001")
    with pytest.raises(Damaged, match=r"shard-00001 is missing: shard 1, items 3 to 5"):
        FeatureCache(folder)


def test_swapped_shards_are_named(folder):
    (folder / "shard-00001").rename(folder / "aside")
    (folder / "shard-00002").rename(folder / "shard-00001")
    (folder / "aside").rename(folder / "shard-00002")
    with pytest.raises(Damaged, match=r"shard-00001.* not shard 1, items 3 to 5"):
        FeatureCache(folder)
    make(folder)  # and they can be made again
    FeatureCache(folder).check()


def test_a_shard_copied_over_another_is_named(folder):
    shutil.rmtree(folder / "shard-00002")
    shutil.copytree(folder / "shard-00001", folder / "shard-00002")
    with pytest.raises(Damaged, match="shard-00002"):
        FeatureCache(folder)


def test_a_shard_too_many_is_named(folder):
    shutil.copytree(folder / "shard-00001", folder / "shard-00009")
    with pytest.raises(Damaged, match="shard-00009 is one shard too many"):
        FeatureCache(folder)


def rewrite(folder: Path, number: int, change) -> None:
    """Write a shard anew, with a right manifest, after `change(about, features)`."""
    place = folder / f"shard-{number:05d}"
    about, features = json.loads((place / SHARD).read_text()), np.load(place / FEATURES)
    change(about, features)
    with writing(place) as temporary:
        (temporary / SHARD).write_text(json.dumps(about))
        np.save(temporary / FEATURES, features)


def test_a_duplicated_sample_is_named_with_its_row(folder):
    rewrite(folder, 2, lambda about, features: about["ids"].__setitem__(1, "3.0"))
    with pytest.raises(Damaged, match=r"shard-00002.*row 1 is sample '3.0', which shard 1"):
        FeatureCache(folder)


def test_a_nan_is_named_with_file_and_row(folder):
    rewrite(folder, 1, lambda about, features: features.__setitem__((2, 1, 0), np.nan))
    cache = FeatureCache(folder)
    assert cache.get(("0.0",)).isfinite().all()
    with pytest.raises(Damaged, match=r"shard-00001.features\.npy: row 2, sample '4.1'"):
        cache.get(("3.0",))
    with pytest.raises(Damaged, match="row 2"):
        cache.check()


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_truncated_shard_is_named(folder, cut):
    path = folder / "shard-00001" / FEATURES
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Damaged, match="shard-00001"):
        FeatureCache(folder)


def test_a_changed_byte_is_found_before_it_is_read(folder):
    path = folder / "shard-00001" / FEATURES
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="shard-00001"):
        FeatureCache(folder).get(("3.0",))


def test_features_swapped_between_shards_are_found(folder):
    paths = [folder / f"shard-0000{n}" / FEATURES for n in (0, 1)]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(Damaged, match="shard-0000"):
        FeatureCache(folder).check()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\0\x02\0{}", b"x" * 200])
def test_another_format_is_damaged(folder, content):
    (folder / "shard-00000" / FEATURES).write_bytes(content)
    with pytest.raises(Damaged, match="shard-00000"):
        FeatureCache(folder)


def test_pickled_objects_are_never_loaded(folder):
    np.save(folder / "shard-00000" / FEATURES, np.array([[[{}]]], dtype=object), allow_pickle=True)
    with pytest.raises(Damaged):
        FeatureCache(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "overt features 1", "key": {}}'])
def test_a_broken_description_is_damaged(folder, text):
    (folder / ABOUT).write_text(text)
    with pytest.raises(Damaged, match=ABOUT):
        FeatureCache(folder)
    with pytest.raises(Damaged, match=ABOUT):
        make(folder)


def test_a_cached_set_carries_its_features(folder):
    cached = Cached(Toy(), FeatureCache(folder))
    batch = cached.batch([2, 0])
    assert torch.equal(batch.features, FeatureCache(folder).get(batch.ids))
    assert len(cached) == 10 and cached.name == "toy" and cached.split == "train"
    assert cached.digest() not in (Toy().digest(), FeatureCache(folder).digest())
