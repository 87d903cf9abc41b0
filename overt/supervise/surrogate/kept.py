"""Surrogates on disk: by sample id, in shards that are whole or not there, mapped into memory.

    FOLDER/surrogates.json       what they are of: model, data, masks, search; sealed
    FOLDER/shard-00000/          the samples of some items of the data set
        shard.json               their ids, and the axes of every map
        map-0.npy                weights, (n, l, h, q, k), of the first span; map-1.npy of the next
        seen-0.npy               which keys are there, (n, k)
        mask-0.npy               the chosen mask, (n, k)
        base-0.npy, best-0.npy   log-probability of the truth without a mask and with it, (n,)
        probes-0.npy             how often the model was asked, (n,)

Words are stored as far as the longest text of a shard goes.
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

from overt.attention import POINT, AttentionMap, Kind, Layout, Span, words
from overt.errors import BadInput, Damaged, Failed
from overt.files import MANIFEST, is_whole, read_json, seal, verify, write_json, writing
from overt.supervise.surrogate.search import Found

FORMAT = "overt surrogates 1"
ABOUT, SHARD = "surrogates.json", "shard.json"
PARTS = ("map", "seen", "mask", "base", "best", "probes")


@dataclass(frozen=True)
class Key:
    """What surrogates are of: two folders with one key hold the same samples and the same search.

    `model` and `data` are digests; `settings` says in JSON which masks, which search, which score.
    """

    model: str
    data: str
    settings: str

    def digest(self) -> str:
        """One hash of all three."""
        text = "\n".join(f"{len(part)} {part}" for part in asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """How a folder is cut into shards of items; an item may be several samples."""

    key: Key
    items: int
    shard: int

    @property
    def count(self) -> int:
        """The number of shards."""
        return -(-self.items // self.shard)

    def span(self, number: int) -> tuple[int, int]:
        """The first item of a shard, and the first that is beyond it."""
        return number * self.shard, min((number + 1) * self.shard, self.items)

    def about(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "format": FORMAT,
            "key": asdict(self.key),
            "items": self.items,
            "shard": self.shard,
        }


# --- writing


def claim(folder: Path, plan: Plan) -> None:
    """Make the folder that of this plan, or see that it already is; another's is refused."""
    path = folder / ABOUT
    if not path.exists():
        write_json(path, plan.about())
        seal(folder, [ABOUT])
        return
    if (folder / MANIFEST).exists():
        verify(folder)
    theirs = _parse(path)
    if theirs == plan:
        if not (folder / MANIFEST).exists():  # the maker before was killed right here
            seal(folder, [ABOUT])
        return
    other = [part for part in ("model", "data") if _differ(theirs.key, plan.key, part)]
    other += _settings_that_differ(theirs.key.settings, plan.key.settings)
    if (theirs.items, theirs.shard) != (plan.items, plan.shard):
        other.append(f"cut ({theirs.items} items in shards of {theirs.shard})")
    raise BadInput(
        f"{folder} holds surrogates made with another {' and '.join(other)}; "
        "choose another folder or remove this one."
    )


def done(folder: Path, plan: Plan, number: int) -> bool:
    """Whether a shard is whole, and is this shard of this plan."""
    place = place_of(folder, number)
    if not place.is_dir() or not is_whole(place):
        return False
    return _matches(read_json(place / SHARD), plan, number)


def keep(
    folder: Path,
    plan: Plan,
    number: int,
    ids: Sequence[str],
    found: Mapping[str, Sequence[Found]],
    dtype: torch.dtype,
) -> None:
    """Write one shard: what was found for each span, batch after batch."""
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
        span, joined = _joined(name, parts, ids, dtype)
        about["spans"].append(span)
        arrays |= {f"{part}-{place}.npy": array for part, array in joined.items()}
    with writing(place_of(folder, number)) as temporary:
        for name, array in arrays.items():
            np.save(temporary / name, array, allow_pickle=False)
        write_json(temporary / SHARD, about)


def place_of(folder: Path, number: int) -> Path:
    """The folder of one shard."""
    return folder / f"shard-{number:05d}"


def _joined(
    name: str, parts: Sequence[Found], ids: Sequence[str], dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The batches of a shard under each other, words as wide as the longest text."""
    maps = [part.maps[name] for part in parts]
    shapes = {one.keys.find(name).shape for one in maps}
    ragged = all(len(shape) == 1 for shape in shapes)
    if len(shapes) > 1 and not ragged:
        raise Failed(f"samples have maps over {name!r} of different grids: {sorted(shapes)}.")
    axes = {tuple(one.values.shape[1:4]) for one in maps}
    kinds = {one.kind for one in maps}
    if len(axes) > 1 or len(kinds) > 1:
        raise Failed(f"samples have maps over {name!r} of different axes {sorted(axes)}.")
    seen = [one.visible.any(dim=1) for one in maps]
    lengths = [_length(one) if ragged else one.shape[1] for one in seen]
    width = max(lengths, default=0)
    kind = np.float16 if dtype is torch.float16 else np.float32
    joined = {
        "map": np.concatenate([_wide(one.weights, width) for one in maps]).astype(kind),
        "seen": np.concatenate([_wide(one, width) for one in seen]),
        "mask": np.concatenate([_wide(part.masks[name], width) for part in parts]).astype(kind),
        "base": np.concatenate([part.base.numpy() for part in parts]).astype(np.float32),
        "best": np.concatenate([part.best.numpy() for part in parts]).astype(np.float32),
        "probes": np.concatenate([part.probes.numpy() for part in parts]).astype(np.int32),
    }
    joined["mask"][~joined["seen"]] = 1  # there is nothing to remove
    for part in ("map", "base", "best"):
        wrong = _first_wrong(joined[part])
        if wrong is not None:
            raise Failed(f"the surrogate of sample {ids[wrong]!r} over {name!r} is not finite.")
    shape = (width,) if ragged else shapes.pop()
    return {"name": name, "shape": list(shape), "kind": kinds.pop().value}, joined


def _length(seen: Tensor) -> int:
    there = seen.any(dim=0).nonzero()
    return int(there.max()) + 1 if len(there) else 0


def _wide(values: Tensor, width: int) -> NDArray[Any]:
    """The last axis cut or filled with nothing to a width; what is cut is padding."""
    found = values[..., :width]
    return torch.nn.functional.pad(found, (0, width - found.shape[-1])).numpy()


# --- reading


class Surrogates:
    """Targets for attention by sample id, read from disk when asked for.

    Opening checks that every shard is there and in its place, and that no sample comes twice.
    Before a shard is first read its bytes are checked against its manifest, and its numbers are
    checked to be finite. What is wrong is `Damaged`, with the file and the row.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / ABOUT).is_file() and not (folder / MANIFEST).exists():
            raise BadInput(f"{folder} holds no surrogates; make them there first.")
        verify(folder)
        self.folder, self.plan = folder, _parse(folder / ABOUT)
        self._spans: list[list[dict[str, Any]]] = []
        self._open: dict[tuple[int, str], NDArray[Any]] = {}
        self._at: dict[str, tuple[int, int]] = {}
        for number in range(self.plan.count):
            self._add(number)

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, sample: str) -> bool:
        return sample in self._at

    @property
    def ids(self) -> tuple[str, ...]:
        """All samples, in the order of the data set."""
        return tuple(self._at)

    @property
    def names(self) -> tuple[str, ...]:
        """The spans that there are maps over."""
        return tuple(span["name"] for span in self._spans[0])

    def digest(self) -> str:
        """The hash of what they are of."""
        return self.plan.key.digest()

    def target(self, ids: Sequence[str], name: str | None = None) -> AttentionMap:
        """The surrogates of these samples, in this order, over the span `name`.

        The name may be left out where there is only one. Words go as far as the longest of these
        texts: `supervise.fitted` brings them to the width of a model's map. Weights that
        were stored in sixteen bits are normalised again, because rounding has moved their sums.
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
        queries = POINT if weights.shape[3] == 1 else words(weights.shape[3], "query")
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
        """The chosen masks: 1 kept, 0 removed; 1 where a sample has no such key."""
        place = self._place(name)
        ragged = len(self._spans[0][place]["shape"]) == 1
        rows = self._rows(ids)
        found = self._gather(rows, f"mask-{place}", ragged).astype(np.float32)
        found[~self._gather(rows, f"seen-{place}", ragged)] = 1
        return torch.from_numpy(found)

    def base(self, ids: Sequence[str], name: str | None = None) -> Float[Tensor, " b"]:
        """The log-probability of the truth with nothing removed."""
        return self._numbers(ids, "base", name)

    def best(self, ids: Sequence[str], name: str | None = None) -> Float[Tensor, " b"]:
        """The log-probability of the truth with the chosen mask."""
        return self._numbers(ids, "best", name)

    def probes(self, ids: Sequence[str], name: str | None = None) -> Int[Tensor, " b"]:
        """How often the model was asked."""
        return self._numbers(ids, "probes", name).long()

    def check(self) -> None:
        """Check every byte and every number now, not when it is first read."""
        for number in range(self.plan.count):
            verify(place_of(self.folder, number))
            for place in range(len(self._spans[number])):
                for part in PARTS:
                    self._read(number, f"{part}-{place}")

    def _numbers(self, ids: Sequence[str], part: str, name: str | None) -> Tensor:
        place = self._place(name)
        found = self._gather(self._rows(ids), f"{part}-{place}", ragged=False)
        return torch.from_numpy(found)

    def _place(self, name: str | None) -> int:
        if name is None and len(self.names) > 1:
            raise ValueError(f"say over which span: there are surrogates over {list(self.names)}")
        if name is not None and name not in self.names:
            raise ValueError(f"no surrogates over {name!r}; there are those over {self.names}")
        return 0 if name is None else self.names.index(name)

    def _rows(self, ids: Sequence[str]) -> list[tuple[int, int]]:
        missing = [one for one in ids if one not in self._at]
        if missing:
            raise BadInput(
                f"{self.folder} has no surrogate of sample {missing[0]!r}, nor of "
                f"{len(missing) - 1} more of {len(ids)}: were they made for this split?"
                if len(missing) > 1
                else f"{self.folder} has no surrogate of sample {missing[0]!r}: was it made for "
                "this split?"
            )
        return [self._at[one] for one in ids]

    def _gather(self, rows: Sequence[tuple[int, int]], part: str, ragged: bool) -> NDArray[Any]:
        """One row a sample; ragged ones as wide as the longest text among them."""
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
            place = place_of(self.folder, number)
            if not any(one == number for one, _ in self._open):
                verify(place)
            path = place / f"{part}.npy"
            try:
                found = np.lib.format.open_memmap(path, mode="r")
            except (OSError, ValueError, EOFError, SyntaxError) as problem:
                raise Damaged(f"{path} is missing or cut off: {problem}.") from problem
            self._open[number, part] = self._sound(number, path, found)
        return self._open[number, part]

    def _sound(self, number: int, path: Path, found: NDArray[Any]) -> NDArray[Any]:
        """The array, when it has a row for every sample of its shard and only finite numbers."""
        ids = [name for name, (shard, _) in self._at.items() if shard == number]
        if found.ndim < 1 or len(found) != len(ids) or found.dtype.kind not in "fbi":
            raise Damaged(
                f"{path} holds {found.dtype} of shape {found.shape}, and not one row for each of "
                f"{len(ids)} samples. Remove the shard and make them again."
            )
        wrong = _first_wrong(found)
        if wrong is not None:
            raise Damaged(
                f"{path}: row {wrong}, sample {ids[wrong]!r}, is not finite. Remove the shard and "
                "make them again."
            )
        return found

    def _add(self, number: int) -> None:
        place, (start, stop) = place_of(self.folder, number), self.plan.span(number)
        if not place.is_dir():
            raise Damaged(
                f"{place} is missing: shard {number}, items {start} to {stop - 1}. Make the "
                "surrogates again; whole shards are kept."
            )
        about = read_json(place / SHARD)
        if not _matches(about, self.plan, number):
            raise Damaged(
                f"{place / SHARD} belongs to another place or other surrogates: it is not shard "
                f"{number}, items {start} to {stop - 1}. Remove it and make them again."
            )
        spans = about["spans"]
        if self._spans and [_fixed(one) for one in spans] != [_fixed(o) for o in self._spans[0]]:
            raise Damaged(f"{place / SHARD} has maps of another shape than shard 0.")
        for row, name in enumerate(about["ids"]):
            if name in self._at:
                raise Damaged(
                    f"{place / SHARD}: row {row} is sample {name!r}, which shard "
                    f"{self._at[name][0]} has already."
                )
            self._at[name] = number, row
        self._spans.append(spans)


def _fixed(span: Mapping[str, Any]) -> tuple[Any, ...]:
    """What all shards have in common: not the length of texts."""
    shape = span["shape"]
    return span["name"], span["kind"], *(shape if len(shape) > 1 else ())


def _matches(about: Any, plan: Plan, number: int) -> bool:
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


def _parse(path: Path) -> Plan:
    match read_json(path):
        case {
            "format": str(form),
            "key": {"model": str(), "data": str(), "settings": str()} as key,
            "items": int(items),
            "shard": int(shard),
        } if form == FORMAT and items > 0 and shard > 0 and len(key) == 3:
            return Plan(Key(**key), items, shard)
    raise Damaged(f"{path} does not describe surrogates; remove the folder and make them again.")


def _differ(theirs: Key, ours: Key, part: str) -> bool:
    return getattr(theirs, part) != getattr(ours, part)


def _settings_that_differ(theirs: str, ours: str) -> list[str]:
    try:
        before, now = json.loads(theirs), json.loads(ours)
        return [name for name in now if before.get(name) != now[name]]
    except (ValueError, AttributeError):
        return ["settings"]


def _first_wrong(values: NDArray[Any]) -> int | None:
    good = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return None if good.all() else int(np.flatnonzero(~good)[0])
