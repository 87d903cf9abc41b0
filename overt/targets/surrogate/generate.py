"""Generation of surrogates for a whole dataset, batch by batch and shard by shard."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt.data.collated_dataset import CollatedDataset, batch_ids, from_loader, move_batch
from overt.data.dataset import Dataset
from overt.data.global_rng import preserve_global_rng
from overt.errors import RunError, UserError
from overt.io import lock, remove_stale_temporaries
from overt.targets.surrogate import store
from overt.targets.surrogate.greedy_search import greedy_refine
from overt.targets.surrogate.masked_inference import (
    MaskableModel,
    Reduce,
    Score,
    Select,
    all_maps,
    answers_log_probability,
    label_log_probability,
    last_layer_map,
    masked_batch,
    mean_map,
    select_samples,
    truth_log_probability,
)
from overt.targets.surrogate.masks import (
    GridMasks,
    KeepWords,
    MaskGenerator,
    NoMask,
    RemoveWords,
    ShiftedGridMasks,
)
from overt.targets.surrogate.removable import each_position, whole_words
from overt.targets.surrogate.search import (
    JointSearch,
    Search,
    SearchResult,
    exhaustive_search,
    search_independently,
    search_sequentially,
    search_without_whole,
)
from overt.targets.surrogate.store import ShardPlan, SurrogateKey, Surrogates
from overt.targets.surrogate.weighted_mean import weighted_maps, weighted_masks

Progress = Callable[[int, int], None]
TorchData = torch.utils.data.Dataset[Any] | torch.utils.data.DataLoader[Any]

# Names in surrogates.json. A folder is resumed only with the names that it was written with, so
# these stay when functions, classes or modules are renamed.
_STORED_NAMES: Mapping[Any, str] = {
    value: f"overt.supervise.surrogate.{name}"
    for value, name in {
        GridMasks: "masks.Grids",
        KeepWords: "masks.OnlyWords",
        NoMask: "masks.Whole",
        RemoveWords: "masks.WithoutWords",
        ShiftedGridMasks: "masks.ShiftedGrids",
        all_maps: "look.every_one",
        answers_log_probability: "look.of_answers",
        each_position: "places.each_place",
        exhaustive_search: "search.search",
        greedy_refine: "refine.refine",
        label_log_probability: "look.of_label",
        last_layer_map: "look.last_layer",
        mean_map: "look.mean",
        search_independently: "search.apart",
        search_sequentially: "search.in_turn",
        search_without_whole: "search.without_whole",
        truth_log_probability: "look.of_truth",
        weighted_maps: "weighted.weighted_maps",
        weighted_masks: "weighted.weighted_masks",
        whole_words: "places.whole_words",
    }.items()
}

PAPER_MASKS = GridMasks()  # 500 grids of 3 x 3 on 14 x 14 cells


@dataclass(frozen=True)
class WorkerShare:
    """The rank of this process among those that generate surrogates together.

    Args:
        rank: The index of this process.
        world: The number of processes.
        patience: How many seconds without a new shard to wait for the others.

    Example:
        >>> WorkerShare(rank=1, world=4).world
        4
    """

    rank: int = 0
    world: int = 1
    patience: float = 1800.0


def wait_for_folders(places: Sequence[Path], here: WorkerShare) -> None:
    """Wait until all folders exist, which the processes create in turn.

    Raises:
        RunError: No folder appeared for `here.patience` seconds.
    """
    missing, since = len(places) + 1, time.monotonic()
    while True:
        left = [number for number, place in enumerate(places) if not place.is_dir()]
        if not left:
            return
        if len(left) < missing:
            missing, since = len(left), time.monotonic()
        if time.monotonic() - since > here.patience:
            raise RunError(
                f"{places[left[0]]} did not appear within {here.patience:g} seconds: check process "
                f"{left[0] % here.world} of {here.world}. Start again to continue; complete shards "
                "are kept."
            )
        time.sleep(0.05)


def worker_share() -> WorkerShare:
    """Return the share of this process under `torchrun` or `accelerate launch`, else all work.

    Raises:
        UserError: RANK or WORLD_SIZE is invalid.
    """
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={world} are invalid: RANK must be below WORLD_SIZE."
        )
    return WorkerShare(int(rank), int(world))


def generate_surrogates(
    model: MaskableModel,
    data: Dataset | TorchData | Sequence[Any],
    out: Path | str,
    masks: MaskGenerator | Sequence[MaskGenerator] = PAPER_MASKS,
    search: Search = exhaustive_search,
    both: JointSearch = search_independently,
    score: Score = truth_log_probability,
    reduce: Reduce = mean_map,
    select: Select = select_samples,
    weights: str | None = None,
    shard: int = 512,
    batch: int = 32,
    dtype: torch.dtype = torch.float32,
    share: WorkerShare | None = None,
    on_progress: Progress | None = None,
) -> Surrogates:
    """Generate target maps for the attention of a model on every sample of a dataset.

    The model is evaluated on each sample with every mask, and its own attention on the input with
    the highest score of the truth becomes the target ("Self Supervision for Attention Networks",
    section 3).

    Interrupted work resumes and produces the same bytes: a shard is complete or absent. Several
    processes, as started by `torchrun`, generate shards in turn. The labels determine surrogates,
    so the test split is rejected.

    Args:
        model: The model.
        data: The dataset: one of overt, a list, or a `Dataset` or `DataLoader` of PyTorch whose
            batches are mappings with "labels" or "answers". Its samples are named by "ids",
            or by their indices. All of its items are hashed first;
            `data.CollatedDataset(..., version=)` saves that, and is needed for random augmentation.
        out: The folder for the surrogates.
        masks: The masks, one generator per span: `GridMasks` of an image, `RemoveWords` or
            `KeepWords` of a text.
        search: The search: `exhaustive_search`, or `greedy_refine`, which needs fewer evaluations.
        both: How several spans are searched: `search_independently` or `search_sequentially`.
        score: How likely the truth is.
        reduce: Which map is the target if there are several layers, hops or glimpses.
        select: Selects samples of the features.
        weights: The identity of a model that is not a module and has no weights to hash.
        shard: The number of items per shard.
        batch: The number of items per batch.
        dtype: The dtype of maps and masks on disk, float16 or float32.
        share: The share of this process; None reads the environment.
        on_progress: Called with the finished and total items of this process.

    Returns:
        The surrogates.

    Raises:
        UserError: The split is a test split, an argument is invalid, or the folder has surrogates
            of another model, dataset or other settings.
        TypeError: The model has no `encode` or no `decide`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.testing import PlantedWord, toy_batch
        >>> class Data:
        ...     name, split = "toy", "train"
        ...     def __len__(self):
        ...         return 4
        ...     def batch(self, indices):
        ...         return toy_batch(4).select(torch.tensor(indices))
        ...     def digest(self):
        ...         return "toy"
        >>> model, masks = PlantedWord(), RemoveWords(count=20)
        >>> with TemporaryDirectory() as folder:
        ...     surrogates = generate_surrogates(model, Data(), folder, masks)
        ...     surrogates.ids, surrogates.target(["toy-0"]).weights.shape
        (('toy-0', 'toy-1', 'toy-2', 'toy-3'), torch.Size([1, 1, 1, 1, 6]))
    """
    out, each = Path(out), list(masks) if isinstance(masks, Sequence) else [masks]
    data = as_dataset(data)
    check_split(data)
    _check_model(model)
    _check(each, data, shard, batch, dtype)
    settings = {
        "masks": [settings_to_json(one) for one in each],
        "search": settings_to_json(search),
        "both": settings_to_json(both),
        "score": settings_to_json(score),
        "reduce": settings_to_json(reduce),
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
    }
    key = SurrogateKey(
        model_digest(model) if weights is None else weights,
        data.digest(),
        json.dumps(settings, sort_keys=True),
    )
    plan = ShardPlan(key, len(data), shard)
    here = worker_share() if share is None else share
    mine = range(here.rank, plan.count, here.world)
    total = sum(stop - start for start, stop in map(plan.span, mine))
    device = _device(model)
    finished = 0
    # Whoever finds these surrogates on disk continues with the same random numbers.
    with lock(out) if here.rank == 0 else nullcontext(), preserve_global_rng():
        remove_stale_temporaries(out)
        store.claim_folder(out, plan)
        for number in mine:
            start, stop = plan.span(number)
            if store.is_shard_done(out, plan, number):
                finished += stop - start
                _report_progress(on_progress, finished, total)
                continue
            ids: list[str] = []
            found: dict[str, list[SearchResult]] = {one.name: [] for one in each}
            for first in range(start, stop, batch):
                last = min(first + batch, stop)
                part: Any = move_batch(data.batch(range(first, last)), device)
                known = batch_ids(part, range(first, last))
                ids += known
                if isinstance(part, Mapping):  # masks are drawn by the id of a sample
                    part = {**part, "ids": known}
                names = [one.name for one in each]
                with masked_batch(model, part, names, score, reduce, select) as masked:
                    for name, one in both(masked, each, search).items():
                        found[name].append(one)
                _report_progress(on_progress, finished + last - start, total)
            store.write_shard(out, plan, number, ids, found, dtype)
            finished += stop - start
        _wait_for_shards(out, plan, here)
    return Surrogates(out)


def as_dataset(data: Dataset | TorchData | Sequence[Any]) -> Dataset:
    """Return a list of samples, a dataset or a loader of PyTorch as a dataset with batches."""
    if isinstance(data, torch.utils.data.DataLoader):
        return from_loader(data, data.batch_size or 0)
    return data if isinstance(data, Dataset) else CollatedDataset(data)


def check_split(data: Dataset) -> None:
    """Raise `UserError` for the test split: targets for it would use its labels."""
    if str(data.split).lower().startswith("test"):
        raise UserError(
            f"surrogates use labels, so the {data.split} split of {data.name} is not allowed; "
            "generate them for the training split."
        )


def model_digest(model: Any) -> str:
    """Return a hash of the class and the weights of a model.

    Raises:
        UserError: The model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"a {type(model).__name__} has no weights to hash; identify it with weights=."
        )
    whole = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        whole.update(f"\n{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        whole.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def settings_to_json(value: Any) -> Any:
    """Convert settings to JSON: functions by name, dataclasses by name and fields.

    Raises:
        UserError: A value has no name, such as a lambda.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [settings_to_json(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): settings_to_json(one) for name, one in value.items()}
    if isinstance(value, partial):
        given = [settings_to_json(one) for one in value.args]
        return {
            "call": settings_to_json(value.func),
            "with": [given, settings_to_json(value.keywords)],
        }
    if is_dataclass(value) and not isinstance(value, type):
        each = {one.name: settings_to_json(getattr(value, one.name)) for one in fields(value)}
        return {"call": _name(type(value)), "with": each}
    if callable(value) and getattr(value, "__name__", "<lambda>") != "<lambda>":
        return _name(value)
    raise UserError(
        f"{value!r} cannot be stored in the settings; use a named function, a partial of one, or "
        "a frozen dataclass."
    )


def _name(value: Any) -> str:
    return _STORED_NAMES.get(value) or f"{value.__module__}.{value.__qualname__}"


def _check_model(model: Any) -> None:
    missing = [name for name in ("encode", "decide") if not callable(getattr(model, name, None))]
    if missing:
        raise TypeError(
            "the search needs a model with encode(batch) and decide(features, mask), but "
            f"{type(model).__name__} has no {' and no '.join(missing)}: overt.wrap(model) adds "
            "both if its attention can be captured; for other models see docs/extending.md"
        )


def _check(
    masks: Sequence[MaskGenerator], data: Dataset, shard: int, batch: int, dtype: torch.dtype
) -> None:
    if dtype not in (torch.float16, torch.float32):
        raise UserError(f"dtype must be float16 or float32, got {dtype}.")
    names = [one.name for one in masks]
    if not names or len(set(names)) < len(names):
        raise UserError(f"masks need different spans, at least one, got {names}.")
    if shard < 1 or batch < 1 or not len(data):
        raise UserError(
            f"items, shard and batch must be at least 1, got {len(data)}, {shard} and {batch}."
        )


def _device(model: Any) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def _report_progress(on_progress: Progress | None, finished: int, total: int) -> None:
    if on_progress is not None:
        on_progress(finished, total)


def _wait_for_shards(out: Path, plan: ShardPlan, here: WorkerShare) -> None:
    """Wait until the shards of all processes exist."""
    if here.world == 1:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        return
    wait_for_folders([store.shard_folder(out, number) for number in range(plan.count)], here)
