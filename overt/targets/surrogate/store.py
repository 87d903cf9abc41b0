"""Storage of surrogates: memory-mapped shards that are written atomically, indexed by sample id.

    FOLDER/surrogates.json       model, data, masks and search; with a manifest
    FOLDER/shard-00000/          the samples of some items of the dataset
        shard.json               their ids, and the axes of every map
        map-0.npy                weights, (n, l, h, q, k), of the first span; map-1.npy of the next
        seen-0.npy               which keys are present, (n, k)
        mask-0.npy               the chosen mask, (n, k)
        base-0.npy, best-0.npy   log-probability of the truth without a mask and with it, (n,)
        probes-0.npy             the number of evaluations, (n,)

Words are stored up to the longest text of a shard.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, Span, words
from overt.errors import CorruptFileError, RunError, UserError
from overt.io import (
    MANIFEST,
    atomic_folder,
    is_intact,
    read_error,
    read_json,
    verify,
    write_json,
    write_manifest,
)
from overt.targets.surrogate.search import SearchResult

FORMAT = "overt surrogates 1"
ABOUT, SHARD = "surrogates.json", "shard.json"
PARTS = ("map", "seen", "mask", "base", "best", "probes")


@dataclass(frozen=True)
class SurrogateKey:
    """The inputs that determine surrogates: equal keys mean equal samples and equal searches.

    Args:
        model: The digest of the model.
        data: The digest of the dataset.
        settings: Masks, search and score, as JSON.
    """

    model: str
    data: str
    settings: str

    def digest(self) -> str:
        """Return one hash of all fields."""
        text = "\n".join(f"{len(part)} {part}" for part in asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ShardPlan:
    """The division of a dataset into shards of items; an item may be several samples.

    Args:
        key: The key of the surrogates.
        items: The number of items.
        shard: The number of items per shard.
    """

    key: SurrogateKey
    items: int
    shard: int

    @property
    def count(self) -> int:
        """The number of shards."""
        return -(-self.items // self.shard)

    def span(self, number: int) -> tuple[int, int]:
        """Return the first item of a shard, and the first one after it."""
        return number * self.shard, min((number + 1) * self.shard, self.items)

    def about(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "format": FORMAT,
            "key": asdict(self.key),
            "items": self.items,
            "shard": self.shard,
        }


# --- writing


def claim_folder(folder: Path, plan: ShardPlan) -> None:
    """Write the plan to the folder, or raise `UserError` if it has surrogates of another plan."""
    path = folder / ABOUT
    if not path.exists():
        _write_plan(folder, plan)
        return
    if (folder / MANIFEST).exists():
        verify(folder)
    theirs = _parse(path)
    if theirs == plan:
        if not (folder / MANIFEST).exists():  # a previous process was killed at this point
            write_manifest(folder, [ABOUT])
        return
    if not any(folder.glob("shard-*")):  # a call with other arguments failed before its first shard
        (folder / MANIFEST).unlink(missing_ok=True)
        _write_plan(folder, plan)
        return
    other = [part for part in ("model", "data") if _differ(theirs.key, plan.key, part)]
    other += _changed_settings(theirs.key.settings, plan.key.settings)
    if (theirs.items, theirs.shard) != (plan.items, plan.shard):
        other.append(f"split ({theirs.items} items in shards of {theirs.shard})")
    raise UserError(
        f"{folder} has surrogates with another {' and '.join(other)}; "
        "choose another folder or remove this one."
    )


def _write_plan(folder: Path, plan: ShardPlan) -> None:
    write_json(folder / ABOUT, plan.about())
    write_manifest(folder, [ABOUT])


def is_shard_done(folder: Path, plan: ShardPlan, number: int) -> bool:
    """Return whether a shard is intact and belongs to this plan."""
    place = shard_folder(folder, number)
    if not place.is_dir() or not is_intact(place):
        return False
    return _matches(read_json(place / SHARD), plan, number)


def write_shard(
    folder: Path,
    plan: ShardPlan,
    number: int,
    ids: Sequence[str],
    found: Mapping[str, Sequence[SearchResult]],
    dtype: torch.dtype,
) -> None:
    """Write one shard: the results of each span, batch after batch."""
    start, stop = plan.span(number)
    about: dict[str, Any] = {
        "format": FORMAT,
        "key": plan.key.digest(),
        "number": number,
        "start": start,
        "stop": stop,
        "ids": list(ids),
        "spans": [],
    }
    arrays: dict[str, NDArray[Any]] = {}
    for place, (name, parts) in enumerate(found.items()):
        span, joined = _concatenate(name, parts, ids, dtype)
        about["spans"].append(span)
        arrays |= {f"{part}-{place}.npy": array for part, array in joined.items()}
    with atomic_folder(shard_folder(folder, number)) as temporary:
        for name, array in arrays.items():
            np.save(temporary / name, array, allow_pickle=False)
        write_json(temporary / SHARD, about)


def shard_folder(folder: Path, number: int) -> Path:
    """Return the folder of one shard."""
    return folder / f"shard-{number:05d}"


def _concatenate(
    name: str, parts: Sequence[SearchResult], ids: Sequence[str], dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Concatenate the batches of a shard, with words padded to the longest text."""
    maps = [part.maps[name] for part in parts]
    shapes = {one.keys.find(name).shape for one in maps}
    ragged = all(len(shape) == 1 for shape in shapes)
    if len(shapes) > 1 and not ragged:
        raise RunError(f"the maps over {name!r} have different grids: {sorted(shapes)}.")
    axes = {tuple(one.values.shape[1:4]) for one in maps}
    kinds = {one.kind for one in maps}
    if len(axes) > 1 or len(kinds) > 1:
        raise RunError(f"the maps over {name!r} have different axes: {sorted(axes)}.")
    seen = [one.visible.any(dim=1) for one in maps]
    lengths = [_length(one) if ragged else one.shape[1] for one in seen]
    width = max(lengths, default=0)
    kind = np.float16 if dtype is torch.float16 else np.float32
    joined = {
        "map": np.concatenate([_pad_to_width(one.weights, width) for one in maps]).astype(kind),
        "seen": np.concatenate([_pad_to_width(one, width) for one in seen]),
        "mask": np.concatenate([_pad_to_width(part.masks[name], width) for part in parts]).astype(
            kind
        ),
        "base": np.concatenate([part.base.numpy() for part in parts]).astype(np.float32),
        "best": np.concatenate([part.best.numpy() for part in parts]).astype(np.float32),
        "probes": np.concatenate([part.probes.numpy() for part in parts]).astype(np.int32),
    }
    joined["mask"][~joined["seen"]] = 1  # padding is never removed
    for part in ("map", "base", "best"):
        wrong = _first_nonfinite(joined[part])
        if wrong is not None:
            raise RunError(f"the surrogate of sample {ids[wrong]!r} over {name!r} is not finite.")
    shape = (width,) if ragged else shapes.pop()
    return {"name": name, "shape": list(shape), "kind": kinds.pop().value}, joined


def _length(seen: Tensor) -> int:
    there = seen.any(dim=0).nonzero()
    return int(there.max()) + 1 if len(there) else 0


def _pad_to_width(values: Tensor, width: int) -> NDArray[Any]:
    """Cut or pad the last axis to a width; only padding is cut."""
    found = values[..., :width]
    return torch.nn.functional.pad(found, (0, width - found.shape[-1])).numpy()


# --- reading


class Surrogates:
    """Surrogate targets by sample id, read from disk on demand.

    Opening checks that every shard exists and that no sample is repeated. Before a shard is first
    read, its bytes are checked against its manifest and its numbers for finiteness.

    Args:
        folder: A folder of `generate_surrogates`.

    Raises:
        UserError: The folder has no surrogates, or a sample is missing.
        CorruptFileError: A shard is missing or damaged; the message names the file and the row.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.targets import generate_surrogates
        >>> from overt.targets.surrogate.masks import RemoveWords
        >>> from overt.testing import PlantedWord, toy_batch
        >>> class Data:
        ...     name, split = "toy", "train"
        ...     def __len__(self):
        ...         return 2
        ...     def batch(self, indices):
        ...         return toy_batch(2).select(torch.tensor(indices))
        ...     def digest(self):
        ...         return "toy"
        >>> with TemporaryDirectory() as folder:
        ...     _ = generate_surrogates(PlantedWord(), Data(), folder, RemoveWords(count=20))
        ...     surrogates = Surrogates(Path(folder))
        ...     surrogates.names, surrogates.best(["toy-0"]) >= surrogates.base(["toy-0"])
        (('text',), tensor([True]))
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / ABOUT).is_file() and not (folder / MANIFEST).exists():
            raise UserError(f"{folder} has no surrogates; generate them first.")
        verify(folder)
        self.folder, self.plan = folder, _parse(folder / ABOUT)
        self._spans: list[list[dict[str, Any]]] = []
        self._open: dict[tuple[int, str], NDArray[Any]] = {}
        self._rows_by_id: dict[str, tuple[int, int]] = {}
        for number in range(self.plan.count):
            self._add(number)

    def __len__(self) -> int:
        return len(self._rows_by_id)

    def __contains__(self, sample: str) -> bool:
        return sample in self._rows_by_id

    @property
    def ids(self) -> tuple[str, ...]:
        """All samples, in the order of the dataset."""
        return tuple(self._rows_by_id)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the spans."""
        return tuple(span["name"] for span in self._spans[0])

    def digest(self) -> str:
        """Return the hash of their key."""
        return self.plan.key.digest()

    def target(self, ids: Sequence[str], name: str | None = None) -> AttentionMap:
        """Return the surrogates of some samples.

        Weights that were stored in 16 bits are normalised again, because rounding changed their
        sums. Texts
        are as long as the longest of these samples: `match_keys` pads them to the keys of a model.

        Args:
            ids: The samples, in the order of the result.
            name: The name of the span; optional if there is only one.

        Returns:
            The target maps.

        Raises:
            UserError: A sample is missing.
            ValueError: The span does not exist, or the name is ambiguous.
        """
        place = self._place(name)
        rows = self._rows(ids)
        span = self._spans[0][place]
        weights = self._gather(rows, f"map-{place}", ragged=len(span["shape"]) == 1)
        seen = self._gather(rows, f"seen-{place}", ragged=len(span["shape"]) == 1)
        keys = words(seen.shape[1], span["name"])
        if len(span["shape"]) > 1:
            shape = tuple(span["shape"])
            keys = Layout((Span(span["name"], shape, slice(0, prod(shape))),), prod(shape))
        queries = GLOBAL_QUERY if weights.shape[3] == 1 else words(weights.shape[3], "query")
        half = weights.dtype == np.float16
        found = AttentionMap(
            torch.from_numpy(weights.astype(np.float32)),
            keys,
            queries,
            torch.from_numpy(seen)[:, None],
            Kind(span["kind"]),
        )
        return found.normalize() if half and found.kind is Kind.PROBABILITY else found

    def mask(self, ids: Sequence[str], name: str | None = None) -> Float[Tensor, "b k"]:
        """Return the chosen masks: 1 kept, 0 removed; 1 for padding."""
        place = self._place(name)
        ragged = len(self._spans[0][place]["shape"]) == 1
        rows = self._rows(ids)
        found = self._gather(rows, f"mask-{place}", ragged).astype(np.float32)
        found[~self._gather(rows, f"seen-{place}", ragged)] = 1
        return torch.from_numpy(found)

    def base(self, ids: Sequence[str], name: str | None = None) -> Float[Tensor, " b"]:
        """Return the log-probability of the truth without a mask."""
        return self._numbers(ids, "base", name)

    def best(self, ids: Sequence[str], name: str | None = None) -> Float[Tensor, " b"]:
        """Return the log-probability of the truth with the chosen mask."""
        return self._numbers(ids, "best", name)

    def probes(self, ids: Sequence[str], name: str | None = None) -> Int[Tensor, " b"]:
        """Return the number of evaluations."""
        return self._numbers(ids, "probes", name).long()

    def check(self) -> None:
        """Check every byte and every number now instead of on first use."""
        for number in range(self.plan.count):
            verify(shard_folder(self.folder, number))
            for place in range(len(self._spans[number])):
                for part in PARTS:
                    self._read(number, f"{part}-{place}")

    def _numbers(self, ids: Sequence[str], part: str, name: str | None) -> Tensor:
        place = self._place(name)
        found = self._gather(self._rows(ids), f"{part}-{place}", ragged=False)
        return torch.from_numpy(found)

    def _place(self, name: str | None) -> int:
        if name is None and len(self.names) > 1:
            raise ValueError(f"name is required: there are surrogates over {list(self.names)}")
        if name is not None and name not in self.names:
            raise ValueError(f"no surrogates over {name!r}; available: {self.names}")
        return 0 if name is None else self.names.index(name)

    def _rows(self, ids: Sequence[str]) -> list[tuple[int, int]]:
        missing = [one for one in ids if one not in self._rows_by_id]
        if missing:
            known = next(iter(self._rows_by_id), "")
            raise UserError(
                f"{self.folder} has no surrogate of sample {missing[0]!r} ({len(missing)} of "
                f"{len(ids)} are missing); its ids are like {known!r}: use them, or generate "
                "surrogates for this split."
            )
        return [self._rows_by_id[one] for one in ids]

    def _gather(self, rows: Sequence[tuple[int, int]], part: str, ragged: bool) -> NDArray[Any]:
        """Return one row per sample; ragged rows are padded to the longest text."""
        if not rows:
            return self._read(0, part)[:0].copy()
        found = [self._read(number, part)[row] for number, row in rows]
        if not ragged:
            return np.stack(found)
        place = part.partition("-")[2]
        seen = [self._read(number, f"seen-{place}")[row] for number, row in rows]
        width = max(1, *(int(one.nonzero()[0].max(initial=-1)) + 1 for one in seen))
        wide = np.zeros((len(found), *found[0].shape[:-1], width), dtype=found[0].dtype)
        for to, one in zip(wide, found, strict=True):
            to[..., : min(width, one.shape[-1])] = one[..., :width]
        return wide

    def _read(self, number: int, part: str) -> NDArray[Any]:
        if (number, part) not in self._open:
            place = shard_folder(self.folder, number)
            if not any(one == number for one, _ in self._open):
                verify(place)
            path = place / f"{part}.npy"
            try:
                found = np.lib.format.open_memmap(path, mode="r")
            except (OSError, ValueError, EOFError, SyntaxError) as problem:
                raise read_error(path, "is missing or truncated", problem) from problem
            self._open[number, part] = self._check_array(number, path, found)
        return self._open[number, part]

    def _check_array(self, number: int, path: Path, found: NDArray[Any]) -> NDArray[Any]:
        """Return the array if it has a finite row for every sample of its shard."""
        ids = [name for name, (shard, _) in self._rows_by_id.items() if shard == number]
        if found.ndim < 1 or len(found) != len(ids) or found.dtype.kind not in "fbi":
            raise CorruptFileError(
                f"{path} has {found.dtype} of shape {found.shape}, expected {len(ids)} rows. "
                "Remove the shard and generate it again."
            )
        wrong = _first_nonfinite(found)
        if wrong is not None:
            raise CorruptFileError(
                f"{path}: row {wrong}, sample {ids[wrong]!r}, is not finite. Remove the shard and "
                "generate it again."
            )
        return found

    def _add(self, number: int) -> None:
        place, (start, stop) = shard_folder(self.folder, number), self.plan.span(number)
        if not place.is_dir():
            raise CorruptFileError(
                f"{place} is missing: shard {number}, items {start} to {stop - 1}. Generate the "
                "surrogates again; complete shards are kept."
            )
        about = read_json(place / SHARD)
        if not _matches(about, self.plan, number):
            raise CorruptFileError(
                f"{place / SHARD} belongs to another shard or other surrogates: expected shard "
                f"{number}, items {start} to {stop - 1}. Remove it and generate it again."
            )
        spans = about["spans"]
        if self._spans and [_shared_axes(one) for one in spans] != [
            _shared_axes(o) for o in self._spans[0]
        ]:
            raise CorruptFileError(
                f"{place / SHARD} has maps of another shape than those of shard 0."
            )
        for row, name in enumerate(about["ids"]):
            if name in self._rows_by_id:
                raise CorruptFileError(
                    f"{place / SHARD}: row {row} is sample {name!r}, which is "
                    f"also in shard {self._rows_by_id[name][0]}."
                )
            self._rows_by_id[name] = number, row
        self._spans.append(spans)


def _shared_axes(span: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the axes that all shards have in common, which excludes the length of texts."""
    shape = span["shape"]
    return span["name"], span["kind"], *(shape if len(shape) > 1 else ())


def _matches(about: Any, plan: ShardPlan, number: int) -> bool:
    start, stop = plan.span(number)
    match about:
        case {
            "format": str(form),
            "key": str(key),
            "number": int(which),
            "start": int(first),
            "stop": int(end),
            "ids": list(),
            "spans": list(),
        }:
            wanted = (FORMAT, plan.key.digest(), number, start, stop)
            return (form, key, which, first, end) == wanted
    return False


def _parse(path: Path) -> ShardPlan:
    match read_json(path):
        case {
            "format": str(form),
            "key": {"model": str(), "data": str(), "settings": str()} as key,
            "items": int(items),
            "shard": int(shard),
        } if form == FORMAT and items > 0 and shard > 0 and len(key) == 3:
            return ShardPlan(SurrogateKey(**key), items, shard)
    raise CorruptFileError(
        f"{path} is not a description of surrogates; remove the folder and generate them again."
    )


def _differ(theirs: SurrogateKey, ours: SurrogateKey, part: str) -> bool:
    return getattr(theirs, part) != getattr(ours, part)


def _changed_settings(theirs: str, ours: str) -> list[str]:
    try:
        before, now = json.loads(theirs), json.loads(ours)
        return [name for name in now if before.get(name) != now[name]]
    except (ValueError, AttributeError):
        return ["settings"]


def _first_nonfinite(values: NDArray[Any]) -> int | None:
    good = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return None if good.all() else int(np.flatnonzero(~good)[0])
