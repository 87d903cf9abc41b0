"""Feature cache: features of any dataset by any frozen backbone, computed once and stored in
shards.

A shard is a folder that is complete or absent, so an interrupted build resumes and ends in the
same bytes. The key of the cache names the backbone, a digest of its weights, the transform and a
digest of the data. Shards are memory-mapped.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.global_rng import preserve_global_rng
from overt.errors import CorruptFileError, RunError, UserError
from overt.io import (
    MANIFEST,
    atomic_folder,
    is_intact,
    lock,
    read_error,
    read_json,
    remove_stale_temporaries,
    verify,
    write_json,
    write_manifest,
)

FORMAT = "overt features 1"
ABOUT, SHARD, FEATURES = "cache.json", "shard.json", "features.npy"

Encoder = Callable[[Batch], Float[Tensor, "b k d"]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FeatureKey:
    """Identity of cached features; two caches with equal keys hold the same numbers.

    Args:
        backbone: Name of the backbone.
        weights: Digest of its weights.
        transform: Description of the preprocessing.
        data: Digest of the dataset.

    Example:
        >>> FeatureKey("efficientnet-lite0", "sha256:1f", "crop 224", "daquar train").backbone
        'efficientnet-lite0'
    """

    backbone: str
    weights: str
    transform: str
    data: str

    def digest(self) -> str:
        """Return one hash of all four fields."""
        text = "\n".join(f"{len(part)} {part}" for part in asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()


def build_feature_cache(
    folder: Path | str,
    key: FeatureKey,
    dataset: Dataset,
    encode: Encoder,
    shard: int = 512,
    batch: int = 64,
    on_progress: Progress | None = None,
    wait: bool = False,
) -> "FeatureCache":
    """Encode every item of `dataset` into `folder`, or resume an interrupted build.

    Complete shards are kept, broken ones are made again. The returned cache reads from disk, and
    the global random generators are left as they were, so a run does not depend on whether it found
    the cache or built it.

    Args:
        folder: Folder of the cache.
        key: Identity of the features.
        dataset: Dataset to encode.
        encode: Function from a batch to features, one row per sample.
        shard: Number of items per shard.
        batch: Number of items per call of `encode`.
        on_progress: Called with the number of items done and the total.
        wait: Wait for another process that builds this folder, and use its result.

    Returns:
        The opened cache.

    Raises:
        UserError: The folder has features of another key, or another process builds it.
        RunError: Features are not finite or have different shapes; the message names the sample.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.data import PhrasePairs
        >>> data = PhrasePairs("train", seed=0, count=3)
        >>> key = FeatureKey("zeros", "none", "none", data.digest())
        >>> with TemporaryDirectory() as folder:
        ...     len(build_feature_cache(folder, key, data, lambda b: torch.zeros(len(b), 2, 4)))
        3
    """
    folder = Path(folder)
    if shard < 1 or batch < 1 or not len(dataset):
        raise UserError(
            f"Nothing to cache: {len(dataset)} items, shards of {shard}, batches of {batch}."
        )
    total = len(dataset)
    about = {"format": FORMAT, "key": asdict(key), "items": total, "shard": shard}
    # A run that builds the cache continues with the random numbers of one that finds it.
    with lock(folder, wait), preserve_global_rng():
        remove_stale_temporaries(folder)
        _claim_folder(folder, about)
        shape: tuple[int, ...] | None = None
        seen: set[str] = set()
        for number in range(_shards(total, shard)):
            place = _place(folder, number)
            start, stop = number * shard, min((number + 1) * shard, total)
            if not _is_done(place, number, key):
                ids, features = _encode(dataset, encode, start, stop, batch)
                if shape is not None and features.shape[1:] != shape:
                    raise RunError(
                        f"Items {start} to {stop - 1} have features of shape "
                        f"{features.shape[1:]}, the items before {shape}."
                    )
                about_shard = {
                    "format": FORMAT,
                    "key": key.digest(),
                    "number": number,
                    "start": start,
                    "stop": stop,
                    "ids": ids,
                }
                with atomic_folder(place) as temporary:
                    np.save(temporary / FEATURES, features, allow_pickle=False)
                    write_json(temporary / SHARD, about_shard)
            shape = _open(place / FEATURES).shape[1:]
            _check_unique_ids(read_json(place / SHARD)["ids"], seen)
            if on_progress is not None:
                on_progress(stop, total)
    return FeatureCache(folder)


class FeatureCache:
    """Features by sample id, read from disk on demand.

    Opening checks that every shard is present and has the right length, and that ids are unique. On
    first use, the bytes of a shard are checked against its manifest and its values for finiteness.

    Args:
        folder: Folder of the cache.

    Raises:
        UserError: The folder is not a feature cache.
        CorruptFileError: A shard is missing or damaged; the message names file and index.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.data import PhrasePairs
        >>> data = PhrasePairs("train", seed=0, count=3)
        >>> key = FeatureKey("zeros", "none", "none", data.digest())
        >>> with TemporaryDirectory() as folder:
        ...     _ = build_feature_cache(folder, key, data, lambda b: torch.zeros(len(b), 2, 4))
        ...     cache = FeatureCache(folder)
        ...     len(cache), cache.shape, cache.get(data.batch([1]).ids).shape
        (3, (2, 4), torch.Size([1, 2, 4]))
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        if not (folder / ABOUT).is_file() and not (folder / MANIFEST).exists():
            raise UserError(f"{folder} is not a feature cache; call build_feature_cache first.")
        verify(folder)
        self.folder = folder
        about = read_json(folder / ABOUT)
        self.key, self.items, shard = _parse(folder / ABOUT, about)
        self._shards: list[NDArray[Any]] = []
        self._ids: list[list[str]] = []
        self._at: dict[str, tuple[int, int]] = {}
        self._checked: set[int] = set()
        count = _shards(self.items, shard)
        for number in range(count):
            start, stop = number * shard, min((number + 1) * shard, self.items)
            self._add(number, start, stop)
        names = {_place(folder, number).name for number in range(count)}
        for extra in sorted(folder.glob("shard-*")):
            if extra.name not in names and ".replaced-" not in extra.name:
                raise CorruptFileError(f"{extra} is unexpected: the cache has {count} shards.")

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, sample: str) -> bool:
        return sample in self._at

    @property
    def shape(self) -> tuple[int, int]:
        """Number of positions and of features per position, (k, d), of every sample."""
        found = self._shards[0].shape
        return found[1], found[2]

    def get(self, ids: Sequence[str]) -> Float[Tensor, "b k d"]:
        """Return the features of these samples, in this order; an id may be repeated."""
        found = np.empty((len(ids), *self.shape), dtype=self._shards[0].dtype)
        for row, name in enumerate(ids):
            if name not in self._at:
                raise UserError(f"{self.folder} has no features of sample {name!r}.")
            number, place = self._at[name]
            self._check(number)
            found[row] = self._shards[number][place]
        return torch.from_numpy(found)

    def check(self) -> None:
        """Check every byte and every value now instead of on first use."""
        for number in range(len(self._shards)):
            self._check(number)

    def digest(self) -> str:
        """Return the hash of the key."""
        return self.key.digest()

    def _add(self, number: int, start: int, stop: int) -> None:
        place = _place(self.folder, number)
        if not place.is_dir():
            raise CorruptFileError(
                f"{place} is missing: shard {number}, items {start} to {stop - 1}. "
                "Build the cache again; complete shards are kept."
            )
        about = read_json(place / SHARD)
        wanted = (FORMAT, self.key.digest(), number, start, stop)
        fields = ("format", "key", "number", "start", "stop")
        found = tuple(about.get(field) for field in fields) if isinstance(about, dict) else ()
        if found != wanted:
            raise CorruptFileError(
                f"{place / SHARD} belongs to another shard or another cache: expected shard "
                f"{number}, items {start} to {stop - 1}. Remove it and build the cache again."
            )
        ids, features = about.get("ids"), _open(place / FEATURES)
        if not isinstance(ids, list) or len(ids) != len(features):
            raise CorruptFileError(
                f"{place / FEATURES} has {len(features)} rows, which do not match its ids."
            )
        if self._shards and self._shards[0].shape[1:] != features.shape[1:]:
            raise CorruptFileError(f"{place / FEATURES} has another shape than shard 0.")
        for row, name in enumerate(ids):
            if name in self._at:
                raise CorruptFileError(
                    f"{place / SHARD}: row {row}, sample {name!r}, is also in shard "
                    f"{self._at[name][0]}."
                )
            self._at[name] = number, row
        self._ids.append(ids)
        self._shards.append(features)

    def _check(self, number: int) -> None:
        if number in self._checked:
            return
        place = _place(self.folder, number)
        verify(place)
        row = _first_not_finite(self._shards[number])
        if row is not None:
            raise CorruptFileError(
                f"{place / FEATURES}: row {row}, sample {self._ids[number][row]!r}, is not finite. "
                "Remove the shard and build the cache again."
            )
        self._checked.add(number)


class CachedFeatures:
    """A dataset whose batches carry the features of a cache.

    Args:
        dataset: The dataset.
        cache: Features of its samples.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.data import PhrasePairs
        >>> data = PhrasePairs("train", seed=0, count=3)
        >>> key = FeatureKey("zeros", "none", "none", data.digest())
        >>> with TemporaryDirectory() as folder:
        ...     cache = build_feature_cache(folder, key, data, lambda b: torch.zeros(len(b), 2, 4))
        ...     CachedFeatures(data, cache).batch([0, 2]).features.shape
        torch.Size([2, 2, 4])
    """

    def __init__(self, dataset: Dataset, cache: FeatureCache) -> None:
        self.dataset, self.cache = dataset, cache
        self.name, self.split = dataset.name, dataset.split

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of the dataset, with `features`."""
        found = self.dataset.batch(indices)
        return replace(found, features=self.cache.get(found.ids))

    def digest(self) -> str:
        """Return a hash of the dataset and of the key of the cache."""
        both = f"{self.dataset.digest()} {self.cache.digest()}"
        return hashlib.sha256(both.encode()).hexdigest()


def _check_unique_ids(ids: Sequence[str], seen: set[str]) -> None:
    for name in ids:
        if name in seen:
            raise UserError(f"The dataset has two samples with id {name!r}; ids must be unique.")
        seen.add(name)


def _shards(items: int, shard: int) -> int:
    return -(-items // shard)


def _place(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _claim_folder(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder the cache of this key, or check that it is."""
    path = folder / ABOUT
    if not path.exists():
        write_json(path, about)
        write_manifest(folder, [ABOUT])
        return
    if (folder / MANIFEST).exists():
        verify(folder)
    found = read_json(path)
    if found != about:
        _parse(path, found)
        theirs, ours = found["key"] | found, about["key"] | about
        other = [
            name for name in ours if name not in ("format", "key") and theirs[name] != ours[name]
        ]
        raise UserError(
            f"{folder} holds features made with another {' and '.join(other)}; "
            "choose another folder or remove this one."
        )
    if not (folder / MANIFEST).exists():  # a previous build was killed here
        write_manifest(folder, [ABOUT])


def _parse(path: Path, about: Any) -> tuple[FeatureKey, int, int]:
    match about:
        case {
            "format": "overt features 1",
            "key": {
                "backbone": str(),
                "weights": str(),
                "transform": str(),
                "data": str(),
            } as key,
            "items": int(items),
            "shard": int(shard),
        } if items > 0 and shard > 0 and len(key) == 4:
            return FeatureKey(**key), items, shard
    raise CorruptFileError(
        f"{path} does not describe a feature cache; remove the folder and build it again."
    )


def _is_done(place: Path, number: int, key: FeatureKey) -> bool:
    """Return whether a shard is complete and belongs to this cache."""
    if not place.is_dir() or not is_intact(place):
        return False
    about = read_json(place / SHARD)
    return bool(about["number"] == number and about["key"] == key.digest())


def _encode(
    dataset: Dataset, encode: Encoder, start: int, stop: int, size: int
) -> tuple[list[str], NDArray[Any]]:
    ids: list[str] = []
    parts: list[NDArray[Any]] = []
    for first in range(start, stop, size):
        batch = dataset.batch(range(first, min(first + size, stop)))
        with torch.no_grad():
            features = encode(batch).detach().cpu()
        if features.dtype == torch.bfloat16:  # NumPy has no such type; float32 holds it exactly
            features = features.float()
        if features.ndim != 3 or len(features) != len(batch):
            raise RunError(
                f"Encoding {len(batch)} samples gave features of shape {tuple(features.shape)}; "
                "expected (samples, positions, features)."
            )
        part = features.numpy()
        wrong = _first_not_finite(part)
        if wrong is not None:
            raise RunError(f"The features of sample {batch.ids[wrong]!r} are not finite.")
        ids += batch.ids
        parts.append(part)
    if len({part.shape[1:] for part in parts}) != 1 or len({part.dtype for part in parts}) != 1:
        raise RunError(f"Items {start} to {stop - 1} have features of different shapes or dtypes.")
    return ids, np.concatenate(parts)


def _first_not_finite(features: NDArray[Any]) -> int | None:
    """Return the first row with a value that is not finite, or None."""
    good = np.isfinite(features).reshape(len(features), -1).all(axis=1)
    return None if good.all() else int(np.flatnonzero(~good)[0])


def _open(path: Path) -> NDArray[Any]:
    """Memory-map one shard; raise `CorruptFileError` if it is truncated or malformed."""
    if not path.is_file():  # opening a named pipe would block
        raise CorruptFileError(f"{path} is missing or not a plain file.")
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError) as problem:
        raise read_error(path, "is missing or cut off", problem) from problem
    if found.ndim != 3 or found.dtype.kind != "f" or not len(found):
        raise CorruptFileError(
            f"{path} does not have features: shape {found.shape} of {found.dtype}."
        )
    return found
