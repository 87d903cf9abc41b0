"""`scorecard`: every measure of every map of a model, sample by sample, over data of any size.

Maps are made, measured and forgotten, a portion of the data at a time: what is kept is one number a
sample, map and measure. With a folder, the numbers of each shard of items are written down as soon
as they are there, and work that was stopped goes on where it ended, on one process or many:

    FOLDER/plan.json               what is measured: model, data, measures, seed
    FOLDER/parts/part-00000/       the numbers of the first items: whole, or not there
    FOLDER/scorecard.json, .csv    means, intervals, comparisons with the controls
    FOLDER/samples.npz             one number a sample
    FOLDER/clock.json              what took how long
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from overt import files
from overt.capture import Unseen
from overt.capture.resting import still
from overt.data.batch import Batch
from overt.data.human import Truth, truth_of
from overt.data.source import Source
from overt.errors import BadInput, Damaged
from overt.measure.scorecards.card import JSON, MODEL, Numbers, Scorecard
from overt.measure.scorecards.catalogue import choose
from overt.measure.scorecards.entries import Entry, Unasked
from overt.measure.scorecards.sight import Look, Sight
from overt.supervise.surrogate.making import Share, digest_of, share_of_this_process, wait_for

FORMAT = "overt scorecard parts 1"
PLAN, PARTS, PART, NUMBERS, SECONDS = "plan.json", "parts", "part.json", "numbers.npz", "clock.json"

Progress = Callable[[int, int], None]


def scorecard(
    model: Callable[[Batch], Any] | None,
    data: Source,
    measures: Sequence[str] | None = None,
    maps: Mapping[str, Look] | None = None,
    *,
    over: str | None = None,
    name: str | None = None,
    seed: int = 0,
    limit: int | None = None,
    portion: int = 16,
    shard: int = 256,
    out: Path | str | None = None,
    share: Share | None = None,
    progress: Progress | None = None,
) -> Scorecard:
    """How good the attention of `model` is on `data`, beside maps that know nothing.

    `model` takes a batch and gives a prediction and maps, as our own models and adopted ones do;
    one that has `encode` and `decide` can also be asked with parts removed. `maps` are further ones
    by name, each a function of a batch; with `model` None they are all there is. `measures` are
    names of `catalogue()`, a name for all its baselines, or "all"; None takes the usual ones. What
    this model and this data do not allow is left out, and `skipped` says why. `over` names the span
    that is judged, such as "image"; without it, that of the truth.

    Random numbers belong to a sample, its id and the seed: neither the size of a `portion` nor the
    number of processes changes them. Agreement and location are judged on the keys of the truth, so
    that models with other grids can be compared; faithfulness on those of the model.

    With a folder `out` work that was stopped goes on, and comes to the same bytes. Several
    processes, as `torchrun` starts them, share the work there; each of them returns the card.
    `progress` hears how many items of how many this process has done.
    """
    entries, looks = choose(measures), dict(maps or {})
    if model is None and not looks:
        raise BadInput("a scorecard needs a model, or maps of somebody else, or both.")
    items = len(data) if limit is None else min(limit, len(data))
    if items < 1 or portion < 1 or shard < 1:
        raise BadInput(
            f"nothing to measure: {items} items in portions of {portion} and shards of {shard}."
        )
    here = share_of_this_process() if share is None else share
    if here.world > 1 and out is None:
        raise BadInput("many processes meet in a folder: give one with out=.")
    work = _Work(model, data, entries, looks, over, seed, items, portion, shard)
    label = name or (type(model).__name__ if model is not None else ", ".join(looks))
    held = still(model) if isinstance(model, nn.Module) else nullcontext()
    with held:
        if out is None:
            told = _Told(progress, items)
            parts = [work.part(number, told) for number in range(work.count)]
        else:
            parts = _kept(work, Path(out), here, progress, label)
    card = _joined(work, parts, label)
    if out is not None and here.rank == 0:
        card.save(out)
    return card


# --- the numbers of some items


@dataclass(frozen=True, eq=False)
class Part:
    """The numbers of a shard: `numbers[m, e, n]` of map m by measure e for sample n.

    `key_counts[n]` is how many keys the maps of sample n have; NaN where that was not written down.
    """

    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    maps: tuple[str, ...]
    numbers: NDArray[np.float32]
    key_counts: NDArray[np.float32]
    skipped: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Work:
    """What is to be measured, and how it is cut into shards."""

    model: Callable[[Batch], Any] | None
    data: Source
    entries: tuple[Entry, ...]
    looks: Mapping[str, Look]
    over: str | None
    seed: int
    items: int
    portion: int
    shard: int

    @property
    def count(self) -> int:
        return -(-self.items // self.shard)

    def span(self, number: int) -> range:
        return range(number * self.shard, min((number + 1) * self.shard, self.items))

    def plan(self, label: str) -> dict[str, Any]:
        """What tells this work from another, as plain values."""
        model = digest_of(self.model) if isinstance(self.model, nn.Module) else label
        return {
            "format": FORMAT,
            "model": model,
            "data": self.data.digest(),
            "measures": [entry.key for entry in self.entries],
            "maps": {name: str(getattr(look, "digest", name)) for name, look in self.looks.items()},
            "over": self.over,
            "seed": self.seed,
            "items": self.items,
            "portion": self.portion,
            "shard": self.shard,
        }

    def part(self, number: int, told: "_Told") -> Part:
        """Measure the items of one shard."""
        span = self.span(number)
        found = []
        for start in range(span.start, span.stop, self.portion):
            indices = range(start, min(start + self.portion, span.stop))
            found.append(_measured(self._sight(indices), self.entries))
            told.more(len(indices))
        return _together(found)

    def _sight(self, indices: range) -> Sight:
        batch, truth = known(self.data, indices)
        device = _device(self.model)
        batch = batch.to(device)
        if truth is not None and self.over not in (None, truth.target.keys.spans[0].name):
            truth = None
        truth = None if truth is None else truth.to(device)
        return Sight(self.model, batch, truth, self.looks, self.over, self.seed)


def known(data: Source, indices: Sequence[int]) -> tuple[Batch, Truth | None]:
    """The samples of these items, with all that is known of where attention should be, if any."""
    try:
        return truth_of(data, indices)
    except BadInput:
        batch = data.batch(indices)
        if batch.target is not None:  # something else was wrong
            raise
        return batch, None


def clusters_of(batch: Batch) -> tuple[str, ...]:
    """What tells the image of each sample, whichever batch it is in; its id where there is none."""
    if batch.images is None:
        return batch.ids
    pictures = batch.images.detach().cpu().contiguous()
    sums = [hashlib.sha256(one.view(torch.uint8).numpy()).hexdigest()[:16] for one in pictures]
    return tuple(sums[at] for at in batch.image_index.tolist())


def _measured(sight: Sight, entries: Sequence[Entry]) -> Part:
    """Every measure of every map; what cannot be asked is NaN, and the reason is kept."""
    clock: dict[str, float] = {}
    started = time.perf_counter()
    names = sight.names()
    if not names:
        where = "" if sight.wanted is None else f" over {sight.wanted!r}"
        raise BadInput(f"neither the model nor anybody else gives a map of these samples{where}.")
    clock["maps"] = time.perf_counter() - started
    rows = (*names, MODEL)
    numbers = np.full((len(rows), len(entries), len(sight)), np.nan, dtype=np.float32)
    skipped: dict[str, str] = {}
    for column, entry in enumerate(entries):
        started = time.perf_counter()
        for at, name in enumerate(names if entry.each_map else (MODEL,)):
            try:
                values = entry.ask(sight, name)
            except (Unasked, Unseen, ValueError) as reason:
                skipped.setdefault(entry.key, " ".join(str(reason).split()).rstrip("."))
                if name == names[0] or not entry.each_map:
                    break  # what cannot be asked of the judged map is of no use of a control
                continue
            place = at if entry.each_map else len(names)
            numbers[place, column] = values.detach().float().cpu().numpy()
            if name == names[0]:
                skipped.pop(entry.key, None)
        clock[entry.key] = time.perf_counter() - started
    counts = sight.key_counts.cpu().numpy()
    return Part(sight.batch.ids, clusters_of(sight.batch), rows, numbers, counts, skipped, clock)


def _together(parts: Sequence[Part]) -> Part:
    """Parts one after the other; a map that one of them lacks has no numbers there."""
    maps = tuple(dict.fromkeys(name for part in parts for name in part.maps if name != MODEL))
    maps = (*maps, MODEL)
    blocks = []
    for part in parts:
        block = np.full((len(maps), *part.numbers.shape[1:]), np.nan, dtype=np.float32)
        for at, name in enumerate(maps):
            if name in part.maps:
                block[at] = part.numbers[part.maps.index(name)]
        blocks.append(block)
    seconds: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for part in parts:
        for key, value in part.seconds.items():
            seconds[key] = seconds.get(key, 0.0) + value
        for key, why in part.skipped.items():
            skipped.setdefault(key, why)
    return Part(
        tuple(name for part in parts for name in part.ids),
        tuple(name for part in parts for name in part.clusters),
        maps,
        np.concatenate(blocks, axis=2),
        np.concatenate([part.key_counts for part in parts]),
        skipped,
        seconds,
    )


def _joined(work: _Work, parts: Sequence[Part], label: str) -> Scorecard:
    whole = _together(parts)
    if len(set(whole.ids)) < len(whole.ids):
        raise Damaged(f"{work.data.name} has two samples of one id; numbers go by ids.")
    numbers: dict[tuple[str, str], Numbers] = {}
    measures = []
    for column, entry in enumerate(work.entries):
        there = {
            name: whole.numbers[at, column]
            for at, name in enumerate(whole.maps)
            if not np.isnan(whole.numbers[at, column]).all()
        }
        if there:
            measures.append(entry.about())
            numbers |= {(name, entry.key): values for name, values in there.items()}
    asked = {str(one["key"]) for one in measures}
    skipped = {
        entry.key: whole.skipped.get(entry.key, "it is defined for none of these samples")
        for entry in work.entries
        if entry.key not in asked
    }
    seconds = {key: s for key, s in whole.seconds.items() if key == "maps" or key in asked}
    data = work.data
    return Scorecard(
        name=label,
        data={
            "name": data.name,
            "split": str(data.split),
            "digest": data.digest(),
            "items": work.items,
        },
        seed=work.seed,
        maps=tuple(name for name in whole.maps if name != MODEL),
        measures=tuple(measures),
        ids=whole.ids,
        clusters=whole.clusters,
        numbers=numbers,
        skipped=skipped,
        seconds=seconds,
        key_counts=whole.key_counts,
    )


def _device(model: Any) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


class _Told:
    """Tells how far the work has come."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def more(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


# --- in a folder


def _kept(work: _Work, out: Path, here: Share, progress: Progress | None, label: str) -> list[Part]:
    """The parts of all processes; this one measures its share of those that are not there."""
    plan = work.plan(label)
    key = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    first = here.rank == 0
    mine = range(here.rank, work.count, here.world)
    told = _Told(progress, sum(len(work.span(number)) for number in mine))
    with files.lock(out) if first else nullcontext():
        files.sweep(out / PARTS)
        _claim(out, plan, key, first)
        for number in mine:
            if _done(out, key, number):
                told.more(len(work.span(number)))
            else:
                _write(out, key, number, work.part(number, told))
        wait_for([_place(out, number) for number in range(work.count)], here)
    return [_read(out, key, number) for number in range(work.count)]


def _claim(out: Path, plan: Mapping[str, Any], key: str, first: bool) -> None:
    """Make the folder that of this work, or see that it already is; another's is refused.

    A plan of which nothing was ever scored is nobody's work: the first process puts its own there.
    """
    path = out / PLAN
    if not path.exists():
        files.write_json(path, plan)
        return
    theirs = files.read_json(path)
    if theirs == plan:
        return
    if not _scored(out, key):
        if first:
            files.write_json(path, plan)
        return
    other = [
        name for name in plan if not isinstance(theirs, dict) or theirs.get(name) != plan[name]
    ]
    raise BadInput(
        f"{out} holds a scorecard of other work, which differs in {', '.join(other)}; choose "
        "another folder or remove this one."
    )


def _scored(out: Path, key: str) -> bool:
    """Whether the folder holds numbers of other work: a card, or a part with another key."""
    numbers = (path.name.removeprefix("part-") for path in (out / PARTS).glob("part-*"))
    parts = [int(number) for number in numbers if number.isdecimal()]
    return (out / JSON).exists() or not all(_done(out, key, number) for number in parts)


def _place(out: Path, number: int) -> Path:
    return out / PARTS / f"part-{number:05d}"


def _done(out: Path, key: str, number: int) -> bool:
    place = _place(out, number)
    if not place.is_dir() or not files.is_whole(place):
        return False
    said = files.read_json(place / PART)
    return isinstance(said, dict) and (said.get("key"), said.get("number")) == (key, number)


def _write(out: Path, key: str, number: int, part: Part) -> None:
    with files.writing(_place(out, number)) as temporary:
        files.write_arrays(
            temporary / NUMBERS,
            {
                "id": np.array(part.ids, dtype=np.str_),
                "cluster": np.array(part.clusters, dtype=np.str_),
                "map": np.array(part.maps, dtype=np.str_),
                "numbers": part.numbers,
                "key_count": part.key_counts,
            },
        )
        said = {"format": FORMAT, "key": key, "number": number, "skipped": dict(part.skipped)}
        files.write_json(temporary / PART, said)
        files.write_json(temporary / SECONDS, dict(part.seconds))


def _read(out: Path, key: str, number: int) -> Part:
    place = _place(out, number)
    if not _done(out, key, number):
        raise Damaged(f"{place} is not the part of this work that was written; remove it.")
    arrays = files.read_arrays(place / NUMBERS)
    said, clock = files.read_json(place / PART), files.read_json(place / SECONDS)
    ids, clusters, maps = (
        tuple(str(word) for word in arrays[name]) for name in ("id", "cluster", "map")
    )
    counts = arrays.get("key_count", np.full(len(ids), np.nan, dtype=np.float32))
    return Part(ids, clusters, maps, arrays["numbers"], counts, said["skipped"], clock)
