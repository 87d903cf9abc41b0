"""Features computed once and kept: one cache, in shards, for any backbone and any data set.

A shard is a folder that is whole or not there, so a build that was killed goes on where it stopped
and ends in the same bytes. What the features are of is part of the cache: the backbone and a
digest of its weights, the transform, and a digest of the data. Reading maps the shards into memory.
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
from overt.data.source import Source
from overt.errors import BadInput, Damaged, Failed
from overt.files import (
    MANIFEST,
    is_whole,
    lock,
    read_json,
    seal,
    sweep,
    verify,
    write_json,
    writing,
)

FORMAT = "overt features 1"
ABOUT, SHARD, FEATURES = "cache.json", "shard.json", "features.npy"

Encode = Callable[[Batch], Float[Tensor, "b k d"]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Key:
    """What features are of; two caches with one key hold the same numbers."""

    backbone: str
    weights: str
    transform: str
    data: str

    def digest(self) -> str:
        """One hash of all four."""
        text = "\n".join(f"{len(part)} {part}" for part in asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()


def build(
    folder: Path | str,
    key: Key,
    dataset: Source,
    encode: Encode,
    shard: int = 512,
    batch: int = 64,
    on_progress: Progress | None = None,
    wait: bool = False,
) -> "FeatureCache":
    """Encode every item of `dataset` into `folder`, or finish a build that was stopped.

    Items are encoded `batch` at a time and written `shard` at a time; whole shards that are already
    there are kept, broken ones are made again. A folder with features of another key is refused.
    Features that are not finite stop the build and name the sample. A folder that another process
    builds is refused; with `wait` this one waits, and takes what is there then.
    """
    folder = Path(folder)
    if shard < 1 or batch < 1 or not len(dataset):
        raise BadInput(
            f"Nothing to cache: {len(dataset)} items, shards of {shard}, batches of {batch}."
        )
    total = len(dataset)
    about = {"format": FORMAT, "key": asdict(key), "items": total, "shard": shard}
    with lock(folder, wait):
        sweep(folder)
        _claim(folder, about)
        shape: tuple[int, ...] | None = None
        seen: set[str] = set()
        for number in range(_shards(total, shard)):
            place = _place(folder, number)
            start, stop = number * shard, min((number + 1) * shard, total)
            if not _is_done(place, number, key):
                ids, features = _encode(dataset, encode, start, stop, batch)
                if shape is not None and features.shape[1:] != shape:
                    raise Failed(f"Items {start} to {stop - 1} gave features of another shape.")
                about_shard = {
                    "format": FORMAT,
                    "key": key.digest(),
                    "number": number,
                    "start": start,
                    "stop": stop,
                    "ids": ids,
                }
                with writing(place) as temporary:
                    np.save(temporary / FEATURES, features, allow_pickle=False)
                    write_json(temporary / SHARD, about_shard)
            shape = _open(place / FEATURES).shape[1:]
            _no_repeats(read_json(place / SHARD)["ids"], seen)
            if on_progress is not None:
                on_progress(stop, total)
    return FeatureCache(folder)


class FeatureCache:
    """Features by sample id, read from disk when asked for.

    Opening checks that every shard is there, in its place and of the right length, and that no
    sample appears twice. Before a shard is read for the first time its bytes are checked against
    its manifest and its numbers are checked to be finite. What is wrong is `Damaged`, with the
    file and the index.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        if not (folder / ABOUT).is_file() and not (folder / MANIFEST).exists():
            raise BadInput(f"{folder} is not a feature cache; build one there first.")
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
                raise Damaged(f"{extra} is one shard too many: the cache has {count}.")

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, sample: str) -> bool:
        return sample in self._at

    @property
    def shape(self) -> tuple[int, int]:
        """The places and the numbers a place, (k, d), of every sample."""
        found = self._shards[0].shape
        return found[1], found[2]

    def get(self, ids: Sequence[str]) -> Float[Tensor, "b k d"]:
        """The features of these samples, in this order; one may be asked for twice."""
        found = np.empty((len(ids), *self.shape), dtype=self._shards[0].dtype)
        for row, name in enumerate(ids):
            if name not in self._at:
                raise BadInput(f"{self.folder} has no features of sample {name!r}.")
            number, place = self._at[name]
            self._check(number)
            found[row] = self._shards[number][place]
        return torch.from_numpy(found)

    def check(self) -> None:
        """Check every byte and every number now, not when it is first read."""
        for number in range(len(self._shards)):
            self._check(number)

    def digest(self) -> str:
        """The hash of the key."""
        return self.key.digest()

    def _add(self, number: int, start: int, stop: int) -> None:
        place = _place(self.folder, number)
        if not place.is_dir():
            raise Damaged(
                f"{place} is missing: shard {number}, items {start} to {stop - 1}. "
                "Build the cache again; whole shards are kept."
            )
        about = read_json(place / SHARD)
        wanted = (FORMAT, self.key.digest(), number, start, stop)
        fields = ("format", "key", "number", "start", "stop")
        found = tuple(about.get(field) for field in fields) if isinstance(about, dict) else ()
        if found != wanted:
            raise Damaged(
                f"{place / SHARD} belongs to another place or another cache: it is not shard "
                f"{number}, items {start} to {stop - 1}. Remove it and build the cache again."
            )
        ids, features = about.get("ids"), _open(place / FEATURES)
        if not isinstance(ids, list) or len(ids) != len(features):
            raise Damaged(f"{place / FEATURES} has {len(features)} rows for other ids.")
        if self._shards and self._shards[0].shape[1:] != features.shape[1:]:
            raise Damaged(f"{place / FEATURES} has another shape than shard 0.")
        for row, name in enumerate(ids):
            if name in self._at:
                raise Damaged(
                    f"{place / SHARD}: row {row} is sample {name!r}, which shard "
                    f"{self._at[name][0]} has already."
                )
            self._at[name] = number, row
        self._ids.append(ids)
        self._shards.append(features)

    def _check(self, number: int) -> None:
        if number in self._checked:
            return
        place = _place(self.folder, number)
        verify(place)
        row = _first_wrong(self._shards[number])
        if row is not None:
            raise Damaged(
                f"{place / FEATURES}: row {row}, sample {self._ids[number][row]!r}, is not finite. "
                "Remove the shard and build the cache again."
            )
        self._checked.add(number)


class Cached:
    """A data set whose batches carry the features of a cache."""

    def __init__(self, dataset: Source, cache: FeatureCache) -> None:
        self.dataset, self.cache = dataset, cache
        self.name, self.split = dataset.name, dataset.split

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The batch of the data set, with `features`."""
        found = self.dataset.batch(indices)
        return replace(found, features=self.cache.get(found.ids))

    def digest(self) -> str:
        """A hash of the data set and of what the features are."""
        both = f"{self.dataset.digest()} {self.cache.digest()}"
        return hashlib.sha256(both.encode()).hexdigest()


def _no_repeats(ids: Sequence[str], seen: set[str]) -> None:
    for name in ids:
        if name in seen:
            raise BadInput(f"The data set has two samples called {name!r}; ids must be unique.")
        seen.add(name)


def _shards(items: int, shard: int) -> int:
    return -(-items // shard)


def _place(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder the cache of this key, or see that it already is."""
    path = folder / ABOUT
    if not path.exists():
        write_json(path, about)
        seal(folder, [ABOUT])
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
        raise BadInput(
            f"{folder} holds features made with another {' and '.join(other)}; "
            "choose another folder or remove this one."
        )
    if not (folder / MANIFEST).exists():  # the builder before was killed right here
        seal(folder, [ABOUT])


def _parse(path: Path, about: Any) -> tuple[Key, int, int]:
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
            return Key(**key), items, shard
    raise Damaged(
        f"{path} does not describe a feature cache; remove the folder and build it again."
    )


def _is_done(place: Path, number: int, key: Key) -> bool:
    """Whether a shard is whole, and is this shard of this cache."""
    if not place.is_dir() or not is_whole(place):
        return False
    about = read_json(place / SHARD)
    return bool(about["number"] == number and about["key"] == key.digest())


def _encode(
    dataset: Source, encode: Encode, start: int, stop: int, size: int
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
            raise Failed(
                f"Encoding {len(batch)} samples gave features of shape {tuple(features.shape)}; "
                "one row a sample is needed."
            )
        part = features.numpy()
        wrong = _first_wrong(part)
        if wrong is not None:
            raise Failed(f"The features of sample {batch.ids[wrong]!r} are not finite.")
        ids += batch.ids
        parts.append(part)
    if len({part.shape[1:] for part in parts}) != 1 or len({part.dtype for part in parts}) != 1:
        raise Failed(f"Items {start} to {stop - 1} gave features of different shapes or kinds.")
    return ids, np.concatenate(parts)


def _first_wrong(features: NDArray[Any]) -> int | None:
    """The first row with a number that is not finite."""
    good = np.isfinite(features).reshape(len(features), -1).all(axis=1)
    return None if good.all() else int(np.flatnonzero(~good)[0])


def _open(path: Path) -> NDArray[Any]:
    """The rows of one shard, mapped; a file that is cut off or in another format is `Damaged`."""
    if not path.is_file():  # a pipe in its place would be waited for
        raise Damaged(f"{path} is missing, or no plain file.")
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError) as problem:
        raise Damaged(f"{path} is missing or cut off: {problem}.") from problem
    if found.ndim != 3 or found.dtype.kind != "f" or not len(found):
        raise Damaged(f"{path} holds no features: shape {found.shape} of {found.dtype}.")
    return found
