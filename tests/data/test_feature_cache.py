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
from overt.data.feature_cache import (
    ABOUT,
    FEATURES,
    SHARD,
    CachedFeatures,
    FeatureCache,
    FeatureKey,
    build_feature_cache,
)
from overt.errors import CorruptFileError, RunError, UserError
from overt.io import atomic_folder, lock
from tests.data.cache_checks import content, rng_state

KEY = FeatureKey("toy", "abc", "none", "123")


class Toy:
    """Ten items; item i has i % 3 + 1 samples, as a scene has several questions."""

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


def build_cache(folder: Path, encode=encode, **options) -> FeatureCache:
    return build_feature_cache(folder, KEY, Toy(), encode, shard=3, batch=2, **options)


def file_hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_second_build_raises_or_waits_for_the_first(tmp_path) -> None:
    results = []

    def first(batch: Batch) -> torch.Tensor:
        with pytest.raises(UserError, match=r"in use.*process"):
            build_cache(tmp_path / "cache")
        if not results:
            results.append(threading.Thread(target=second))
            results[0].start()
        return encode(batch)

    def second() -> None:
        def never(batch: Batch) -> torch.Tensor:
            raise AssertionError("the cache exists")

        results.append(build_cache(tmp_path / "cache", never, wait=True))

    cache = build_cache(tmp_path / "cache", first)
    results[0].join(timeout=600)
    assert results[1].digest() == cache.digest()
    with lock(tmp_path / "cache"):  # the lock is free again
        pass


@pytest.fixture
def folder(tmp_path) -> Path:
    build_cache(tmp_path / "cache")
    return tmp_path / "cache"


def test_features_are_returned_by_id(folder):
    cache = FeatureCache(folder)
    batch = Toy().batch(range(10))
    with torch.no_grad():
        expected = encode(batch)
    assert torch.equal(cache.get(batch.ids), expected)
    assert torch.equal(cache.get(("7.1", "0.0", "7.1")), expected[[14, 0, 14]])
    assert len(cache) == len(batch) == 19 and cache.shape == (2, 3)
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
def test_dtype_is_kept_or_widened(tmp_path, given, kept):
    cache = build_cache(tmp_path, lambda batch: encode(batch).to(given))
    found = cache.get(("4.1",))
    assert found.dtype == kept
    with torch.no_grad():
        assert torch.equal(found, encode(Toy().batch([4]))[1:].to(given).to(kept))


def test_batch_size_does_not_change_the_files(folder, tmp_path):
    build_feature_cache(tmp_path / "other", KEY, Toy(), encode, shard=3, batch=100)
    assert file_hashes(tmp_path / "other") == file_hashes(folder)


@pytest.mark.parametrize("stop", range(5))
def test_resumed_build_writes_the_same_files(folder, tmp_path, stop):
    done: list[str] = []

    def until(batch: Batch) -> torch.Tensor:
        if len(done) >= stop:
            raise KeyboardInterrupt
        done.extend(["batch"])
        return encode(batch)

    def counting(batch: Batch) -> torch.Tensor:
        encoded.extend(batch.ids)
        return encode(batch)

    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path / "new", until)
    shards = sorted(path.name for path in (tmp_path / "new").glob("shard-*"))
    assert len(shards) == stop // 2  # two batches per shard
    if not shards:
        with pytest.raises(CorruptFileError, match=r"00000.*missing"):
            FeatureCache(tmp_path / "new")
    encoded: list[str] = []
    progress: list[tuple[int, int]] = []
    build_cache(tmp_path / "new", counting, on_progress=lambda *at: progress.append(at))
    assert file_hashes(tmp_path / "new") == file_hashes(folder)
    assert (
        len(encoded)
        == len(set(encoded))
        == 19 - sum(len(Toy().batch(range(3 * n, 3 * n + 3))) for n in range(len(shards)))
    )
    assert progress == [(3, 10), (6, 10), (9, 10), (10, 10)]


def test_built_features_equal_those_read_to_the_last_bit(tmp_path):
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        cache = build_cache(tmp_path / "cache", lambda batch: torch.rand(len(batch), 3, 2).mT)
        ids = Toy().batch(range(10)).ids
        found.append((content(cache.get(ids)), rng_state(), torch.rand(()).item()))
    assert found[0] == found[1]


def test_finished_build_encodes_nothing(folder):
    build_cache(folder, lambda batch: pytest.fail("encoded again"))


def test_corrupt_and_missing_shards_are_rebuilt(folder):
    before = file_hashes(folder)
    path = folder / "shard-00002" / FEATURES
    path.write_bytes(path.read_bytes()[:-3])
    shutil.rmtree(folder / "shard-00001")
    build_cache(folder)
    assert file_hashes(folder) == before


@pytest.mark.parametrize("field", ["backbone", "weights", "transform", "data"])
def test_different_key_raises(folder, field):
    with pytest.raises(UserError, match=field):
        build_feature_cache(folder, replace(KEY, **{field: "other"}), Toy(), encode, shard=3)


def test_different_shard_size_raises(folder):
    with pytest.raises(UserError, match="another shard"):
        build_feature_cache(folder, KEY, Toy(), encode, shard=4)


def test_key_digest_depends_on_every_part():
    parts = [
        FeatureKey("a", "b", "c", "d"),
        FeatureKey("ab", "", "c", "d"),
        FeatureKey("a", "b\n1 c", "", "d"),
    ]
    assert len({key.digest() for key in parts}) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_features_raise(tmp_path, bad):
    def wrong(batch: Batch) -> torch.Tensor:
        found = encode(batch)
        found[torch.tensor([name == "4.1" for name in batch.ids]), 1, 2] = bad
        return found

    with pytest.raises(RunError, match=r"4\.1"):
        build_cache(tmp_path, wrong)
    assert [path.name for path in tmp_path.glob("shard-*")] == ["shard-00000"]


@pytest.mark.parametrize("shape", [(1, 2, 3), (19, 6), (0, 2, 3)])
def test_features_of_the_wrong_shape_raise(tmp_path, shape):
    with pytest.raises(RunError, match="shape"):
        build_cache(tmp_path, lambda batch: torch.zeros(shape))


def test_features_of_different_shapes_raise(tmp_path):
    with pytest.raises(RunError, match="shape"):
        build_cache(tmp_path, lambda b: torch.zeros(len(b), 1 + int(b.ids[0] > "3"), 2))
    with pytest.raises(RunError, match="different shapes"):
        build_cache(tmp_path / "b", lambda b: torch.zeros(len(b), 1 + int("2.0" in b.ids), 2))


def test_duplicate_sample_ids_raise(tmp_path):
    class Twice(Toy):
        def batch(self, indices) -> Batch:
            return Batch(tuple(f"{i % 5}" for i in indices), labels=torch.tensor(list(indices)))

    with pytest.raises(UserError, match="two samples"):
        build_feature_cache(tmp_path, KEY, Twice(), encode, shard=3)


def test_invalid_shard_size_and_missing_cache_raise(tmp_path):
    with pytest.raises(UserError):
        build_feature_cache(tmp_path, KEY, Toy(), encode, shard=0)
    with pytest.raises(UserError, match="feature cache"):
        FeatureCache(tmp_path)


def test_unknown_sample_raises_with_its_id(folder):
    with pytest.raises(UserError, match="nobody"):
        FeatureCache(folder).get(("0.0", "nobody"))


def test_missing_shard_raises_with_its_items(folder):
    shutil.rmtree(folder / "shard-00001")
    with pytest.raises(CorruptFileError, match=r"shard-00001.* 3.* 5"):
        FeatureCache(folder)


def test_swapped_shards_raise(folder):
    (folder / "shard-00001").rename(folder / "aside")
    (folder / "shard-00002").rename(folder / "shard-00001")
    (folder / "aside").rename(folder / "shard-00002")
    with pytest.raises(CorruptFileError, match=r"shard-00001.* 3.* 5"):
        FeatureCache(folder)
    build_cache(folder)  # the shards can be rebuilt
    FeatureCache(folder).check()


def test_shard_copied_over_another_raises(folder):
    shutil.rmtree(folder / "shard-00002")
    shutil.copytree(folder / "shard-00001", folder / "shard-00002")
    with pytest.raises(CorruptFileError, match="shard-00002"):
        FeatureCache(folder)


def test_extra_shard_raises(folder):
    shutil.copytree(folder / "shard-00001", folder / "shard-00009")
    with pytest.raises(CorruptFileError, match="shard-00009"):
        FeatureCache(folder)


def rewrite_shard(folder: Path, number: int, change) -> None:
    """Rewrite a shard with a valid manifest after `change(about, features)`."""
    place = folder / f"shard-{number:05d}"
    about, features = json.loads((place / SHARD).read_text()), np.load(place / FEATURES)
    change(about, features)
    with atomic_folder(place) as temporary:
        (temporary / SHARD).write_text(json.dumps(about))
        np.save(temporary / FEATURES, features)


def test_duplicate_sample_raises_with_its_row(folder):
    rewrite_shard(folder, 2, lambda about, features: about["ids"].__setitem__(1, "3.0"))
    with pytest.raises(CorruptFileError, match=r"shard-00002.*row 1\b.*'3.0'.* shard 1"):
        FeatureCache(folder)


def test_nan_raises_with_file_and_row(folder):
    rewrite_shard(folder, 1, lambda about, features: features.__setitem__((2, 1, 0), np.nan))
    cache = FeatureCache(folder)
    assert cache.get(("0.0",)).isfinite().all()
    with pytest.raises(CorruptFileError, match=r"shard-00001.features\.npy.*row 2\b.*'4.1'"):
        cache.get(("3.0",))
    with pytest.raises(CorruptFileError, match="row 2"):
        cache.check()


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_truncated_shard_raises(folder, cut):
    path = folder / "shard-00001" / FEATURES
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptFileError, match="shard-00001"):
        FeatureCache(folder)


def test_changed_byte_raises_on_read(folder):
    path = folder / "shard-00001" / FEATURES
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="shard-00001"):
        FeatureCache(folder).get(("3.0",))


def test_features_swapped_between_shards_raise(folder):
    paths = [folder / f"shard-0000{n}" / FEATURES for n in (0, 1)]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(CorruptFileError, match="shard-0000"):
        FeatureCache(folder).check()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\0\x02\0{}", b"x" * 200])
def test_other_file_format_raises(folder, content):
    (folder / "shard-00000" / FEATURES).write_bytes(content)
    with pytest.raises(CorruptFileError, match="shard-00000"):
        FeatureCache(folder)


def test_pickled_objects_raise(folder):
    np.save(folder / "shard-00000" / FEATURES, np.array([[[{}]]], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptFileError):
        FeatureCache(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "overt features 1", "key": {}}'])
def test_corrupt_description_raises(folder, text):
    (folder / ABOUT).write_text(text)
    with pytest.raises(CorruptFileError, match=ABOUT):
        FeatureCache(folder)
    with pytest.raises(CorruptFileError, match=ABOUT):
        build_cache(folder)


def test_cached_dataset_adds_features_to_its_batches(folder):
    cached = CachedFeatures(Toy(), FeatureCache(folder))
    batch = cached.batch([2, 0])
    assert torch.equal(batch.features, FeatureCache(folder).get(batch.ids))
    assert len(cached) == 10 and cached.name == "toy" and cached.split == "train"
    assert cached.digest() not in (Toy().digest(), FeatureCache(folder).digest())
