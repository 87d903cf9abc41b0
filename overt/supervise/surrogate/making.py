"""Surrogates for a whole data set: searched batch by batch, kept shard by shard."""

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

from overt.data.source import Source
from overt.errors import BadInput, Failed
from overt.files import lock, sweep
from overt.supervise.surrogate import kept
from overt.supervise.surrogate.kept import Key, Plan, Surrogates
from overt.supervise.surrogate.look import (
    Asking,
    Reduce,
    Score,
    Select,
    asking,
    mean,
    of_truth,
    rows_of,
)
from overt.supervise.surrogate.masks import Grids, Masks
from overt.supervise.surrogate.search import Both, Found, Search, apart, search

Progress = Callable[[int, int], None]

PAPER = Grids()  # 500 grids of 3 x 3 on 14 x 14 cells


@dataclass(frozen=True)
class Share:
    """Which process this is, of how many that make surrogates together.

    `patience` is how many seconds without a new shard the others may take before this one gives up
    waiting for them.
    """

    rank: int = 0
    world: int = 1
    patience: float = 1800.0


def wait_for(places: Sequence[Path], here: Share) -> None:
    """Return when all of these folders are there, which processes make in turns."""
    missing, since = len(places) + 1, time.monotonic()
    while True:
        left = [number for number, place in enumerate(places) if not place.is_dir()]
        if not left:
            return
        if len(left) < missing:
            missing, since = len(left), time.monotonic()
        if time.monotonic() - since > here.patience:
            raise Failed(
                f"{places[left[0]]} has not come for {here.patience:g} seconds: is process "
                f"{left[0] % here.world} of {here.world} still running? Start again to go on; what "
                "is whole is kept."
            )
        time.sleep(0.05)


def share_of_this_process() -> Share:
    """The share that `torchrun` or `accelerate launch` gave this process, or all of the work."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
        raise BadInput(f"RANK={rank} and WORLD_SIZE={world} are not a process among others.")
    return Share(int(rank), int(world))


def surrogates(
    model: Asking,
    data: Source,
    out: Path | str,
    masks: Masks | Sequence[Masks] = PAPER,
    search: Search = search,
    both: Both = apart,
    score: Score = of_truth,
    reduce: Reduce = mean,
    select: Select = rows_of,
    weights: str | None = None,
    shard: int = 512,
    batch: int = 32,
    dtype: torch.dtype = torch.float32,
    share: Share | None = None,
    on_progress: Progress | None = None,
) -> Surrogates:
    """Targets for the attention of `model` on every sample of `data`, kept in the folder `out`.

    The model is asked about each sample with every one of its `masks`, and its own attention on
    the input where it was most sure of the truth becomes the target ("Self Supervision for
    Attention Networks", section 3). `search` may be `refine`, which asks less often. Several
    `masks`, one a kind of input, are searched `both` `apart` or `in_turn`. `score` says how sure
    the model is, `reduce` which map counts where there are several layers, hops or glimpses.

    Work that was stopped goes on where it ended and comes to the same bytes: a shard of `shard`
    items is whole or not there. Several processes, as started by `torchrun`, take turns at shards.
    A folder that holds surrogates of another model, other data or other settings is refused. A
    model that is no module has no weights to tell it by: say what it is with `weights`.

    The truth is what surrogates are found with, so they are refused for the test split. `dtype` is
    that of maps and masks on disk, float16 or float32. `on_progress` hears how many items of how
    many this process has done.
    """
    out, each = Path(out), list(masks) if isinstance(masks, Sequence) else [masks]
    check_split(data)
    _check(each, data, shard, batch, dtype)
    settings = {
        "masks": [described(one) for one in each],
        "search": described(search),
        "both": described(both),
        "score": described(score),
        "reduce": described(reduce),
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
    }
    key = Key(
        digest_of(model) if weights is None else weights,
        data.digest(),
        json.dumps(settings, sort_keys=True),
    )
    plan = Plan(key, len(data), shard)
    here = share_of_this_process() if share is None else share
    mine = range(here.rank, plan.count, here.world)
    total = sum(stop - start for start, stop in map(plan.span, mine))
    device = _device(model)
    finished = 0
    with lock(out) if here.rank == 0 else nullcontext():
        sweep(out)
        kept.claim(out, plan)
        for number in mine:
            start, stop = plan.span(number)
            if kept.done(out, plan, number):
                finished += stop - start
                _tell(on_progress, finished, total)
                continue
            ids: list[str] = []
            found: dict[str, list[Found]] = {one.name: [] for one in each}
            for first in range(start, stop, batch):
                last = min(first + batch, stop)
                part = data.batch(range(first, last))
                ids += part.ids
                names = [one.name for one in each]
                with asking(model, part.to(device), names, score, reduce, select) as look:
                    for name, one in both(look, each, search).items():
                        found[name].append(one)
                _tell(on_progress, finished + last - start, total)
            kept.keep(out, plan, number, ids, found, dtype)
            finished += stop - start
        _wait(out, plan, here)
    return Surrogates(out)


def check_split(data: Source) -> None:
    """Refuse the test split: targets for it would be made of its answers."""
    if str(data.split).lower().startswith("test"):
        raise BadInput(
            f"surrogates are found with the right answers, so the {data.split} split of "
            f"{data.name} is refused; make them for the training split."
        )


def digest_of(model: Any) -> str:
    """A hash of the kind of a model and of all its weights."""
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"a {type(model).__name__} has no weights to tell it by; say what it is with weights=."
        )
    whole = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        whole.update(f"\n{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        whole.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def described(value: Any) -> Any:
    """Settings as JSON: values as they are, functions by name, dataclasses by name and fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [described(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): described(one) for name, one in value.items()}
    if isinstance(value, partial):
        given = [described(one) for one in value.args]
        return {"call": described(value.func), "with": [given, described(value.keywords)]}
    if is_dataclass(value) and not isinstance(value, type):
        each = {one.name: described(getattr(value, one.name)) for one in fields(value)}
        return {"call": _name(type(value)), "with": each}
    if callable(value) and getattr(value, "__name__", "<lambda>") != "<lambda>":
        return _name(value)
    raise BadInput(
        f"what was made with {value!r} could not be told from what was made otherwise; give a "
        "function with a name, a partial of one, or a frozen dataclass."
    )


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _check(
    masks: Sequence[Masks], data: Source, shard: int, batch: int, dtype: torch.dtype
) -> None:
    if dtype not in (torch.float16, torch.float32):
        raise BadInput(f"surrogates are kept in float16 or float32, not {dtype}.")
    names = [one.name for one in masks]
    if not names or len(set(names)) < len(names):
        raise BadInput(f"masks are needed, one a kind of input, not {names}.")
    if shard < 1 or batch < 1 or not len(data):
        raise BadInput(
            f"nothing to search: {len(data)} items, shards of {shard}, batches of {batch}."
        )


def _device(model: Any) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def _tell(on_progress: Progress | None, finished: int, total: int) -> None:
    if on_progress is not None:
        on_progress(finished, total)


def _wait(out: Path, plan: Plan, here: Share) -> None:
    """Return when the shards of all processes are there."""
    if here.world == 1:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        return
    wait_for([kept.place_of(out, number) for number in range(plan.count)], here)
