"""Where the time goes of what misses its goal: operations of ours beside those of its peer.

    python benchmarks/profiles.py [--device cuda] [--only NAME ...] [--commit NAME]
                                  [--out benchmarks/speed/profiles-cpu.json]

Each pair runs under PyTorch's profiler. What is told, an operation, is the time spent in it and in
nothing that it calls, in ours and in the other: on a CPU that of the processor, on a card that of
its kernels. On a card `busy` is how long kernels ran at all; the rest of a step it waits. Goals of
recorded steps stand beside `busy`: a recording runs the same kernels and does not wait. `added` are
the kernels there in which ours spends most more than the other. The loop is told a step. Pairs that
are not asked for stay in the file as they are.
"""

import argparse
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from sections import compiled, grounding, hard, monitor, rollout, supervision, surrogates, training
from sections.clock import race, tidy, timer
from sections.report import Setting, commit, machine

from overt.train import AttentionMonitor

ROUNDS, SHOWN, ADDED, SECONDS = 5, 8, 16, {"cpu": 8.0, "cuda": 1.5}
KERNELS = {  # of our own
    *("best", "above_uniform", "places", "first_rows", "queries_and_keys", "levels", "shares"),
    *("mixes", "slopes", "to_queries", "to_keys", "by_their_share", "to_cells", "turned_cells"),
    *(
        "to_weight",
        "log_shares",
        "to_rows",
        "costs",
        "costs_to_rows",
        "costs_to_keys",
        "costs_to_both",
    ),
}
FUSED = "what graphs fuse"  # each has a name of its own
LAUNCHED = {"_Seen", "_SeenBackward"}  # by these: kernels stand there by themselves


class Pair(NamedTuple):
    """Ours, and what it stands beside; how many steps a run of either is."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    steps: int = 1


def pairs(device: str, until: ExitStack) -> dict[str, Callable[[], Pair]]:
    """What is looked into, and how it is made; what is open meanwhile is left to `until`."""
    found: dict[str, Callable[[], Pair]] = {
        "BERT 164": partial(_bert, device),
        "rollout 164": partial(_rollout, device),
        "non-local, 25 of 100": partial(_hard, device, 32, 100, partial(hard.keep_top, count=25)),
        "AdaHAN non-local, mean 6.5": partial(_hard, device, 32, 100, _adaptive(0.5)),
        "BERT 512, compiled": partial(_compiled, device),
        "VL-BERT 164, compiled": partial(_own_compiled, device),
    }
    if device == "cpu":
        return {
            **found,
            "VL-BERT 164": lambda: Pair(*reversed(grounding.model(4, 164))),
            "BERT, Python alone": partial(_bert, device, supervision.Size(64, 1, 12, 24)),
        }
    return {
        "AdaHAN non-local, mean 9.7": partial(_hard, device, 256, 196, _adaptive(0.5)),
        "AdaHAN non-local, mean 28.5": partial(_hard, device, 256, 196, _adaptive(1.0)),
        "AdaHAN non-local, mean 55.8": partial(_hard, device, 256, 196, _adaptive(2.0)),
        "AdaHAN non-local, 2048 samples": partial(_hard, device, 2048, 196, _adaptive(0.5)),
        **{
            f"non-local, {count} of 196": partial(
                _hard, device, 256, 196, partial(hard.keep_top, count=count)
            )
            for count in (31, 49, 65)
        },
        "relation, 16 of 100": partial(_relation, device),
        "the loop, att3": partial(_loop, device, until),
        "watching, 12 layers of 256": partial(_monitor, device),
        "500 masks, float32": partial(_search, device),
        "BERT 512, compiled": found["BERT 512, compiled"],
        "VL-BERT 164, compiled": found["VL-BERT 164, compiled"],
        "rollout 512": partial(_rollout, device, 512),
        "rollout 1024": partial(_rollout, device, 1024),
        "BERT 164": found["BERT 164"],
        "VL-BERT 164": partial(_own, device, 164, 64),
        "VL-BERT 512": partial(_own, device, 512, 32),
    }


def _adaptive(temperature: float) -> hard.Rule:
    return partial(hard.keep_above_uniform, temperature=temperature)


def _bert(device: str, size: supervision.Size | None = None) -> Pair:
    usual = supervision.Size(164, 4) if device == "cpu" else supervision.Size(164, 64, 12, 768)
    bert = supervision.Bert.of(size or usual, device)
    return Pair(bert.step(bert.ours), bert.step(bert.plain))


def _own(device: str, positions: int, samples: int) -> Pair:
    case = supervision.Own(positions, samples, Setting(device))
    return Pair(case.step(case.ways["direct"]), case.step(case.ways["plain"]))


def _rollout(device: str, positions: int = 164) -> Pair:
    case = rollout.Case(1 if device == "cpu" else 32, positions, device)
    return Pair(case.step(case.ours), case.step(case.by_rows))


def _monitor(device: str) -> Pair:
    model, tokens = monitor.made(monitor.SIZES["12 layers of 256, 128 positions"], device)
    return Pair(*monitor.steps(model, tokens, AttentionMonitor(), []))


def _search(device: str) -> Pair:
    case = surrogates.Case(32, device)
    masks = surrogates.Grids(surrogates.MASKS, grid=(3, 3))
    return Pair(case.ours(masks), partial(case.loop, case.drawn()))


def _compiled(device: str) -> Pair:
    torch.compiler.reset()
    many = supervision.Size(512, 32, compiled.LAYERS, 768)
    bert = supervision.Bert.of(supervision.Size(512, 2) if device == "cpu" else many, device)
    return Pair(bert.step(compiled.watched(bert)), bert.step(compiled.plain(bert)))


def _own_compiled(device: str) -> Pair:
    torch.compiler.reset()
    case = supervision.Own(164, 4 if device == "cpu" else 64, Setting(device), compiled.LAYERS)
    ours, plain = (torch.compile(case.ways[kind], dynamic=False) for kind in ("direct", "plain"))
    return Pair(case.step(ours), case.step(plain))


def _loop(device: str, until: ExitStack) -> Pair:
    """Attention at three levels in the training loop, as the section `training` times it."""
    made = until.enter_context(training.looping(Setting(device), training.PAIRS[1]))
    return Pair(*made.ways.values(), made.steps)


def _hard(device: str, samples: int, cells: int, rule: hard.Rule) -> Pair:
    torch.manual_seed(0)
    case = hard.Case(hard.Pairwise(512), samples, cells, 512, device)
    return _chosen(case, rule)


def _relation(device: str) -> Pair:
    torch.manual_seed(0)
    case = hard.Case(hard.Relation(256, 128), 128, 100, 256, device)
    return _chosen(case, partial(hard.keep_top, count=16))


def _chosen(case: hard.Case, rule: hard.Rule) -> Pair:
    def step(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def once() -> None:
            case.clear()
            run().square().sum().backward()

        return once

    return Pair(step(partial(case.some, hard.chosen, rule)), step(case.all))


class Spent(NamedTuple):
    """Seconds a step, by operation, and on a card by kernel."""

    operations: dict[str, float]
    kernels: dict[str, float]


def spent(way: Callable[[], object], device: str, steps: int = 1) -> Spent:
    """Where the time of a step goes."""
    rounds = max(1, ROUNDS // steps)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    way()
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(rounds):
            way()
        if device != "cpu":
            torch.cuda.synchronize()
    every = seen.key_averages()
    field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    # kernels are listed beside the operations that launched them, and would count twice; only
    # kernels of our own have names that say what they do
    told = [one for one in every if ("CPU" in str(one.device_type)) != (one.key in KERNELS)]
    each = 1e-6 / (rounds * steps)
    found: dict[str, float] = defaultdict(float)
    for one in told:
        if one.key not in LAUNCHED:
            found[FUSED if "CompiledFxGraph" in one.key else one.key] += getattr(one, field) * each
    kernels = {
        one.key: one.self_device_time_total * each
        for one in every
        if "CPU" not in str(one.device_type)
    }
    return Spent({name: taken for name, taken in found.items() if taken > 0}, kernels)


def looked_into(pair: Pair, device: str) -> dict[str, Any]:
    """Where the time of ours goes, and what the other spends there; times without a profiler."""
    ways = {"ours": pair.ours, "theirs": pair.theirs}
    times = race(ways, 2 * ROUNDS, timer(device), limit=SECONDS[device])
    seen = [spent(way, device, pair.steps) for way in ways.values()]
    ours, theirs = (one.operations for one in seen)
    largest = sorted(ours, key=lambda name: -ours[name])[:SHOWN]
    more = {name: taken - seen[1].kernels.get(name, 0.0) for name, taken in seen[0].kernels.items()}
    return {
        "ratio": times.over("ours", "theirs").median,
        "seconds": {name: times.of(name).median / pair.steps for name in ways},
        "busy": {"ours": sum(ours.values()), "theirs": sum(theirs.values())},
        "operations": {
            name: {"ours": ours[name], "theirs": theirs.get(name, 0.0)} for name in largest
        },
        "added": {name: more[name] for name in sorted(more, key=lambda name: -more[name])[:ADDED]},
    }


def main() -> None:
    """Look, print and write down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the pairs, as printed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of what is run, where it is no checkout")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.device != "cpu":
        torch.set_float32_matmul_precision("high")  # as the section of hard attention has it
    kept = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    found: dict[str, Any] = dict(kept["profiles"]) if given.only and kept else {}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"machine": machine(given.device), "date": date, "rounds": ROUNDS, "profiles": found}
    at = commit(given.commit)
    with ExitStack() as until:
        every = pairs(given.device, until)
        unknown = set(given.only or ()) - set(every)
        if unknown:
            parser.error(f"no pair is called {sorted(unknown)}; there are {sorted(every)}")
        for name in given.only or every:
            make = every[name]
            told(name, make, given.device, found)
            if name in found:
                found[name]["commit"] = at
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(report, indent=1) + "\n")


def told(name: str, make: Callable[[], Pair], device: str, found: dict[str, Any]) -> None:
    """Look into one pair and print it; one that breaks is passed over, and said so."""
    try:
        found[name] = one = looked_into(make(), device)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"{name} did not come to its end", flush=True)
        return
    finally:
        tidy()
    print(f"{name}: {one['ratio']:.3f}, busy {one['busy']['ours'] * 1e3:.2f} ms of ours")
    for operation, row in one["operations"].items():
        print(f"  {operation:45} {row['ours'] * 1e6:9.0f} {row['theirs'] * 1e6:9.0f} us")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
