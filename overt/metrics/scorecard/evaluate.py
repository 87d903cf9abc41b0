"""Evaluate a scorecard: every metric of every map of a model, per sample, on data of any size.

Maps are computed, scored and discarded, one portion of the data at a time; what is kept is one
score per sample, map and metric. With a folder, the scores of each shard of items are written as
soon as they are computed, and interrupted work resumes, with one process or several:

    FOLDER/plan.json               what is evaluated: model, data, metrics and versions, seed
    FOLDER/parts/part-00000/       the scores of the first items: complete, or absent; with the
                                   maps and predictions of its first portion, and a hash of each
                                   sample's maps, which are computed again and compared before the
                                   part is used
    FOLDER/scorecard.json, .csv    means, intervals, comparisons with the controls
    FOLDER/samples.npz             one score per sample
    FOLDER/clock.json              timings
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from overt import io
from overt.attention import AttentionMap, Form, Kind
from overt.capture import UncapturedAttentionError
from overt.capture.eval_mode import eval_mode
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.human_attention import GroundTruth, load_ground_truth
from overt.errors import CorruptFileError, UserError
from overt.metrics.metric import MetricUnavailableError, single_row
from overt.metrics.scorecard.catalog import select_metrics
from overt.metrics.scorecard.entry import ScorecardMetric
from overt.metrics.scorecard.metric_context import (
    ACTIVATION,
    ATTENTION,
    CONTROLS,
    GRADIENT,
    PERSON,
    MapFunction,
    MetricContext,
)
from overt.metrics.scorecard.result import JSON, MODEL, Numbers, Scorecard
from overt.metrics.scorecard.sample_pairs import partner_batch
from overt.targets.surrogate.generate import (
    WorkerShare,
    model_digest,
    wait_for_folders,
    worker_share,
)

FORMAT = "overt scorecard parts 2"
PLAN, PARTS, PART, NUMBERS, SECONDS = "plan.json", "parts", "part.json", "numbers.npz", "clock.json"
PROBE, PROBED = "probe.npz", "items"  # the maps of the first items of a part, and their number
HASHES = "hash"  # of what has no digest of its own, one number per sample of the part
OLD_PROBED = 2  # items in the probe of a part that does not name their number
NEAR = 1e-3  # relative to a weight: machines differ by less, different maps by more
ROUNDING = 1e-6  # relative to the largest weight, for weights near 0

Progress = Callable[[int, int], None]
Announce = Callable[[str, float], None]


def scorecard(
    model: Callable[[Batch], Any] | None,
    data: Dataset,
    measures: Sequence[str] | None = None,
    maps: Mapping[str, MapFunction] | None = None,
    *,
    over: str | None = None,
    name: str | None = None,
    seed: int = 0,
    limit: int | None = None,
    portion: int = 16,
    shard: int = 256,
    out: Path | str | None = None,
    share: WorkerShare | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Scorecard:
    """Score the attention of `model` on `data`, beside control maps without information.

    Random numbers depend on a sample's id and the seed only, not on the size of a `portion` or the
    number of processes. Agreement and localization are evaluated on the keys of the truth, so that
    models with different grids are comparable; faithfulness on the keys of the model.

    With a folder `out`, interrupted work resumes and ends in the same bytes. A folder of other work
    raises an error: the maps of finished parts are computed again and compared. A module is
    identified by its weights, and a map function with an attribute `digest` by that text; of these
    only the first portion of every part is computed again, of all others every sample. Several
    processes, as `torchrun` starts them, share the work there, and each of them returns the
    scorecard.

    Args:
        model: Takes a batch and returns a prediction and maps, as the models of `overt.nn` and
            wrapped models do; with `encode` and `decide` it can also be evaluated with parts
            removed. None if there are only `maps`.
        data: The dataset.
        measures: Keys of `available_metrics()`, a name for all its removals, or "all"; None for the
            default metrics. Metrics that the model or the data do not allow are listed in
            `skipped`, with the reason.
        maps: Further maps by name, each a function of a batch. Set an attribute `digest` on a slow
            one, such as a hash of its settings, so that resuming does not compute all maps again.
        over: Name of the evaluated span, such as "image"; by default that of the truth.
        name: Name of the model in tables.
        seed: Seed of all random numbers.
        limit: Evaluate at most this many items.
        portion: Items per batch.
        shard: Items per part of the folder.
        out: Folder to write to and resume from.
        share: Rank and number of processes; by default from the environment.
        progress: Called with the number of finished items and their total in this process.
        announce: Called before the work with a description of the evaluated map and the estimated
            seconds, from one item.

    Returns:
        The scorecard.

    Raises:
        UserError: There is nothing to evaluate, a metric is unknown, a map has the name of a
            control, or the folder is of other work.

    Example:
        >>> from overt.data import Scenes
        >>> data = Scenes("train", seed=0, count=2, size=32)
        >>> truth = {"truth": lambda batch: batch.target.normalize()}
        >>> card = scorecard(None, data, ["mass_inside"], truth)
        >>> card.maps
        ('truth', 'other sample', 'shuffled', 'random', 'centre', 'uniform')
    """
    entries, looks = select_metrics(measures), dict(maps or {})
    if model is None and not looks:
        raise UserError("a scorecard needs a model, maps, or both.")
    _check_names(looks)
    items = len(data) if limit is None else min(limit, len(data))
    if items < 1 or portion < 1 or shard < 1:
        raise UserError(
            f"items, portion and shard must be at least 1, got {items}, {portion} and {shard}."
        )
    here = worker_share() if share is None else share
    if here.world > 1 and out is None:
        raise UserError("several processes need a shared folder: give one with out=.")
    work = _ScorecardJob(model, data, entries, looks, over, seed, items, portion, shard)
    label = name or (type(model).__name__ if model is not None else ", ".join(looks))
    evaluating = eval_mode(model) if isinstance(model, nn.Module) else nullcontext()
    with evaluating:
        if announce is not None:
            announce(*work.estimate(_remaining_items(work, out, here, label)))
        if out is None:
            counter = _ProgressCounter(progress, items)
            parts = [work.part(number, counter) for number in range(work.count)]
        else:
            parts = _run_in_folder(work, Path(out), here, progress, label)
    card = _build_scorecard(work, parts, label)
    if out is not None and here.rank == 0:
        card.save(out)
    return card


def _check_names(looks: Mapping[str, MapFunction]) -> None:
    """Raise for a map with the name of one of ours: it would be scored under the wrong name."""
    taken = (ATTENTION, ACTIVATION, GRADIENT, *CONTROLS, PERSON, MODEL)
    for name in looks:
        if name in taken or "|" in name or not name:
            raise UserError(
                f"a map cannot be named {name!r}: choose a name without | other than "
                f"{', '.join(taken)}."
            )


# --- scores of some items


@dataclass(frozen=True, eq=False)
class ScoreShard:
    """Scores of a shard of items.

    Args:
        ids: Ids of the samples.
        clusters: The cluster of each sample, such as its image.
        maps: Names of the maps.
        numbers: Scores [map, metric, sample].
        key_counts: Number of keys of each sample's maps; NaN where unknown.
        skipped: Reasons of metrics that were not computed, by key.
        seconds: Seconds by metric.
        judged: Description of the evaluated map.
        probe: What identifies the maps that were scored: see `_ScorecardJob.probe`.
    """

    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    maps: tuple[str, ...]
    numbers: NDArray[np.float32]
    key_counts: NDArray[np.float32]
    skipped: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    judged: str = ""
    probe: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _ScorecardJob:
    """What to evaluate, and how it is split into shards."""

    model: Callable[[Batch], Any] | None
    data: Dataset
    entries: tuple[ScorecardMetric, ...]
    looks: Mapping[str, MapFunction]
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
        """Describe the work as JSON values, to tell it from other work."""
        model = model_digest(self.model) if isinstance(self.model, nn.Module) else label
        return {
            "format": FORMAT,
            "model": model,
            "data": self.data.digest(),
            "measures": {entry.key: entry.info.version for entry in self.entries},
            "maps": {name: str(getattr(look, "digest", name)) for name, look in self.looks.items()},
            "over": self.over,
            "seed": self.seed,
            "items": self.items,
            "portion": self.portion,
            "shard": self.shard,
        }

    def part(self, number: int, counter: "_ProgressCounter") -> ScoreShard:
        """Evaluate the items of one shard."""
        found, hashes = [], []
        probe: dict[str, NDArray[Any]] = {}
        for indices in self._portions(number):
            context = self._context(indices)
            found.append(_compute_shard(context, self.entries))
            hashes.append(self._hashes(context))
            probe = probe or self._first_maps(context, len(indices))
            counter.more(len(indices))
        return replace(_concatenate(found), probe=probe | _join_hashes(hashes))

    def probe(self, number: int, items: int, hashed: bool) -> dict[str, NDArray[Any]]:
        """Compute what identifies the maps of a part, without any score.

        That is the maps and predictions of its first `items`, and a hash per sample of everything
        that has no digest. A hash alone would differ between machines, the first maps alone would
        not tell maps apart that differ in later samples only.

        Args:
            number: Number of the part.
            items: How many items to return the maps of.
            hashed: Whether to compute the hashes.
        """
        found = self._first_maps(self._context(self.span(number)[:items]), items)
        if not hashed:
            return found
        if not self._unnamed:
            return found | _join_hashes([])
        each = [self._hashes(self._context(indices)) for indices in self._portions(number)]
        return found | _join_hashes(each)

    def _portions(self, number: int) -> Iterator[range]:
        span = self.span(number)
        for start in range(span.start, span.stop, self.portion):
            yield range(start, min(start + self.portion, span.stop))

    @property
    def _unnamed(self) -> tuple[str, ...]:
        """Names of the map functions without a digest, and of a model that is not a module."""
        looks = [name for name, look in self.looks.items() if not hasattr(look, "digest")]
        callable_model = self.model is not None and not isinstance(self.model, nn.Module)
        return (*looks, *([MODEL] if callable_model else []))

    def _first_maps(self, context: MetricContext, items: int) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {PROBED: np.array(items)}
        for name in (ATTENTION, *self.looks):
            try:
                weights, seen = single_row(context.map(name))
            except MetricUnavailableError:
                continue
            found[f"map {name}"] = weights.float().cpu().numpy()
            found[f"visible {name}"] = seen.float().cpu().numpy()
        if self.model is not None:
            found["prediction"] = context.output.prediction.detach().float().cpu().numpy()
        return found

    def _hashes(self, context: MetricContext) -> dict[str, NDArray[np.uint64]]:
        """Hash for each sample what has no digest: maps, and the output of a plain function."""
        found = {}
        for name in self._unnamed:
            try:
                if name == MODEL:
                    shown = [context.output.prediction]
                    for one in context.output.attention:
                        shown += [one.weights, one.visible]
                else:
                    shown = list(single_row(context.map(name)))
            except MetricUnavailableError:
                continue
            found[f"{HASHES} {name}"] = _hash_rows(shown)
        return found

    def estimate(self, items: int) -> tuple[str, float]:
        """Evaluate one item: return which map is evaluated, and estimated seconds for `items`."""
        started = time.perf_counter()
        context = self._context(range(1))
        judged = context.describe(_map_names(context)[0])
        if items:
            _compute_shard(context, self.entries)
        return judged, (time.perf_counter() - started) * items

    def _context(self, indices: range) -> MetricContext:
        batch, truth = load_with_truth(self.data, indices)
        device = _device(self.model)
        batch = batch.to(device)
        if truth is not None and self.over not in (None, truth.target.keys.spans[0].name):
            truth = None
        truth = None if truth is None else truth.to(device)
        other = partial(self._other_sample_maps, indices, batch) if len(self.data) > 1 else None
        return MetricContext(self.model, batch, truth, self.looks, self.over, self.seed, other)

    def _other_sample_maps(self, indices: range, ours: Batch, over: str) -> AttentionMap:
        """Return the map of another sample for each; empty where both show the same picture."""
        batch, at = partner_batch(self.data, indices, len(ours), self.seed)
        batch = batch.to(_device(self.model))
        found = MetricContext(self.model, batch, None, self.looks, over, self.seed).like
        found = found.select(at.to(found.values.device))
        mine, theirs = image_clusters(ours), image_clusters(batch)
        apart = [one != theirs[place] for one, place in zip(mine, at.tolist(), strict=True)]
        keep = torch.tensor(apart, device=found.values.device)[:, None, None, None, None]
        return replace(found, values=found.weights * keep, kind=Kind.AMOUNT, form=Form.PLAIN)


def _hash_rows(tensors: Sequence[Tensor]) -> NDArray[np.uint64]:
    """Hash the row of every sample in all tensors together."""
    arrays = [one.detach().double().cpu().contiguous().numpy() for one in tensors]
    found = []
    for row in range(len(arrays[0])):
        whole = hashlib.sha256()
        for one in arrays:
            whole.update(one[row].tobytes())
        found.append(int.from_bytes(whole.digest()[:8], "little"))
    return np.array(found, dtype=np.uint64)


def _join_hashes(parts: Sequence[Mapping[str, NDArray[np.uint64]]]) -> dict[str, NDArray[Any]]:
    """Concatenate the hashes of portions; a map that a portion lacks has no hashes there."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: np.concatenate([part[name] for part in parts if name in part]) for name in names
    } | {HASHES: np.array(True)}


def load_with_truth(data: Dataset, indices: Sequence[int]) -> tuple[Batch, GroundTruth | None]:
    """Load samples, with all that is known of where attention should be, if anything."""
    try:
        return load_ground_truth(data, indices)
    except UserError:
        batch = data.batch(indices)
        if batch.target is not None:  # the error has another cause
            raise
        return batch, None


def image_clusters(batch: Batch) -> tuple[str, ...]:
    """Hash the image of each sample, independent of the batch; the id where there is no image."""
    if batch.images is None:
        return batch.ids
    pictures = batch.images.detach().cpu().contiguous()
    sums = [hashlib.sha256(one.view(torch.uint8).numpy()).hexdigest()[:16] for one in pictures]
    return tuple(sums[at] for at in batch.image_index.tolist())


def _map_names(context: MetricContext) -> tuple[str, ...]:
    names = context.names()
    if not names:
        where = "" if context.requested is None else f" over {context.requested!r}"
        raise UserError(
            f"no map of these samples{where} is available: the model has none, and none was given."
        )
    return names


def _compute_shard(context: MetricContext, entries: Sequence[ScorecardMetric]) -> ScoreShard:
    """Compute every metric of every map; NaN, with a reason, where it is unavailable."""
    clock: dict[str, float] = {}
    started = time.perf_counter()
    names = _map_names(context)
    clock["maps"] = time.perf_counter() - started
    rows = (*names, MODEL)
    numbers = np.full((len(rows), len(entries), len(context)), np.nan, dtype=np.float32)
    skipped: dict[str, str] = {}
    for column, entry in enumerate(entries):
        started = time.perf_counter()
        for at, name in enumerate(names if entry.each_map else (MODEL,)):
            try:
                values = entry.compute(context, name)
            except (MetricUnavailableError, UncapturedAttentionError, ValueError) as reason:
                skipped.setdefault(entry.key, " ".join(str(reason).split()).rstrip("."))
                if name == names[0] or not entry.each_map:
                    break  # unavailable for the evaluated map: a control alone is useless
                continue
            place = at if entry.each_map else len(names)
            numbers[place, column] = values.detach().float().cpu().numpy()
            if name == names[0]:
                skipped.pop(entry.key, None)
        clock[entry.key] = time.perf_counter() - started
    counts = context.key_counts.cpu().numpy()
    ids, clusters = context.batch.ids, image_clusters(context.batch)
    return ScoreShard(
        ids, clusters, rows, numbers, counts, skipped, clock, context.describe(names[0])
    )


def _concatenate(parts: Sequence[ScoreShard]) -> ScoreShard:
    """Concatenate shards; a map that one of them lacks has no scores there."""
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
    return ScoreShard(
        tuple(name for part in parts for name in part.ids),
        tuple(name for part in parts for name in part.clusters),
        maps,
        np.concatenate(blocks, axis=2),
        np.concatenate([part.key_counts for part in parts]),
        skipped,
        seconds,
        parts[0].judged,
    )


def _build_scorecard(work: _ScorecardJob, parts: Sequence[ScoreShard], label: str) -> Scorecard:
    whole = _concatenate(parts)
    if len(set(whole.ids)) < len(whole.ids):
        raise CorruptFileError(
            f"{work.data.name} has two samples with the same id: ids must be unique."
        )
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
        entry.key: whole.skipped.get(entry.key, "not defined for any of these samples")
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
        judged=whole.judged,
    )


def _device(model: Any) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


class _ProgressCounter:
    """Count finished items and report progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def more(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


# --- in a folder


def _run_in_folder(
    work: _ScorecardJob, out: Path, here: WorkerShare, progress: Progress | None, label: str
) -> list[ScoreShard]:
    """Compute this process's missing shards and return the shards of all processes."""
    plan = work.plan(label)
    key = _key(plan)
    first = here.rank == 0
    mine = range(here.rank, work.count, here.world)
    counter = _ProgressCounter(progress, sum(len(work.span(number)) for number in mine))
    with io.lock(out) if first else nullcontext():
        io.remove_stale_temporaries(out / PARTS)
        _claim_folder(out, plan, key, first)
        for number in mine:
            if _is_done(out, key, number):
                _check_same_maps(out, number, work)
                counter.more(len(work.span(number)))
            else:
                _write(out, key, number, work.part(number, counter))
        wait_for_folders([_shard_folder(out, number) for number in range(work.count)], here)
    return [_read(out, key, number) for number in range(work.count)]


def _claim_folder(out: Path, plan: Mapping[str, Any], key: str, first: bool) -> None:
    """Write the plan to the folder, or check that it is the same; raise for other work.

    A plan without any scores is overwritten by the first process.
    """
    path = out / PLAN
    if not path.exists():
        io.write_json(path, plan)
        return
    theirs = io.read_json(path)
    if theirs == plan:
        return
    if not _has_scores(out, key):
        if first:
            io.write_json(path, plan)
        return
    other = [
        name for name in plan if not isinstance(theirs, dict) or theirs.get(name) != plan[name]
    ]
    raise UserError(
        f"{out} holds another scorecard, which differs in {', '.join(other)}: choose another "
        "folder or remove this one."
    )


def _has_scores(out: Path, key: str) -> bool:
    """Return whether the folder holds scores of other work: a scorecard, or other parts."""
    numbers = (path.name.removeprefix("part-") for path in (out / PARTS).glob("part-*"))
    parts = [int(number) for number in numbers if number.isdecimal()]
    return (out / JSON).exists() or not all(_is_done(out, key, number) for number in parts)


def _check_same_maps(out: Path, number: int, work: _ScorecardJob) -> None:
    """Raise if samples of a part now have other maps: another function wrote it.

    Equal bits in the first items show that this machine repeats the maps exactly: then every hash
    has to be equal too. Otherwise rounding differs, and the first items have to be close.
    """
    kept = io.read_arrays(_shard_folder(out, number) / PROBE)
    items = int(kept.pop(PROBED, np.array(OLD_PROBED)))
    now = work.probe(number, items, HASHES in kept)
    del now[PROBED]
    hashed = {name for name in {*kept, *now} if name.partition(" ")[0] == HASHES}
    exact = True
    for name in sorted({*kept, *now} - hashed):
        if name not in kept or name not in now or not _all_close(kept[name], now[name]):
            _refuse_part(out, number, name, "the first items")
        exact = exact and np.array_equal(kept[name], now[name], equal_nan=True)
    for name in sorted(hashed) if exact else ():
        if name not in kept or name not in now or not np.array_equal(kept[name], now[name]):
            _refuse_part(out, number, name, "later items")


def _refuse_part(out: Path, number: int, name: str, where: str) -> NoReturn:
    what = name.partition(" ")[2] or name
    raise UserError(
        f"{out} holds another scorecard: {what!r} differs in {where} of part {number}, or is not "
        "reproducible. Choose another folder or remove this one."
    )


def _all_close(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether every weight is equal up to rounding, small weights beside large ones too."""
    if one.shape != other.shape:
        return False
    size = max((float(np.abs(x[np.isfinite(x)]).max(initial=0)) for x in (one, other)), default=0.0)
    return bool(np.allclose(one, other, rtol=NEAR, atol=ROUNDING * size, equal_nan=True))


def _remaining_items(
    work: _ScorecardJob, out: Path | str | None, here: WorkerShare, label: str
) -> int:
    """Count the items that this process still has to evaluate."""
    mine = range(here.rank, work.count, here.world)
    key = None if out is None else _key(work.plan(label))
    done = {number for number in mine if out and key and _is_done(Path(out), key, number)}
    return sum(len(work.span(number)) for number in mine if number not in done)


def _key(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _shard_folder(out: Path, number: int) -> Path:
    return out / PARTS / f"part-{number:05d}"


def _is_done(out: Path, key: str, number: int) -> bool:
    place = _shard_folder(out, number)
    if not place.is_dir() or not io.is_intact(place):
        return False
    said = io.read_json(place / PART)
    return isinstance(said, dict) and (said.get("key"), said.get("number")) == (key, number)


def _write(out: Path, key: str, number: int, part: ScoreShard) -> None:
    with io.atomic_folder(_shard_folder(out, number)) as temporary:
        io.write_arrays(temporary / PROBE, dict(part.probe))
        io.write_arrays(
            temporary / NUMBERS,
            {
                "id": np.array(part.ids, dtype=np.str_),
                "cluster": np.array(part.clusters, dtype=np.str_),
                "map": np.array(part.maps, dtype=np.str_),
                "numbers": part.numbers,
                "key_count": part.key_counts,
            },
        )
        said = {
            "format": FORMAT,
            "key": key,
            "number": number,
            "skipped": dict(part.skipped),
            "judged": part.judged,
        }
        io.write_json(temporary / PART, said)
        io.write_json(temporary / SECONDS, dict(part.seconds))


def _read(out: Path, key: str, number: int) -> ScoreShard:
    place = _shard_folder(out, number)
    if not _is_done(out, key, number):
        raise CorruptFileError(f"{place} is not a part of this scorecard: remove it.")
    arrays = io.read_arrays(place / NUMBERS)
    said, clock = io.read_json(place / PART), io.read_json(place / SECONDS)
    ids, clusters, maps = (
        tuple(str(word) for word in arrays[name]) for name in ("id", "cluster", "map")
    )
    counts = arrays.get("key_count", np.full(len(ids), np.nan, dtype=np.float32))
    numbers, skipped = arrays["numbers"], said["skipped"]
    return ScoreShard(ids, clusters, maps, numbers, counts, skipped, clock, said["judged"])
