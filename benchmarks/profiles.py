"""Where the time goes of what misses its goal: operations of ours beside those of its peer.

    python benchmarks/profiles.py [--device cuda] [--out benchmarks/speed/profiles-cpu.json]

Each pair runs under PyTorch's profiler. What is told, an operation, is the time spent in it and in
nothing that it calls, in ours and in the other, as a share of what the other takes in all; the
largest differences first.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from sections import grounding, hard, rollout, supervision
from sections.clock import race, timer
from sections.report import machine

ROUNDS, SHOWN = 5, 8
Pair = tuple[Callable[[], object], Callable[[], object]]  # ours, and what it stands beside


def pairs(device: str) -> dict[str, Pair]:
    """What is looked into."""
    bert = supervision.Bert.of(supervision.Size(164, 4), device)
    plain, taught = grounding.model(4, 164)
    short = rollout.Case(1, 164, device)
    torch.manual_seed(0)
    cells = hard.Case(hard.Pairwise(512), 32, 100, 512, device)
    few = partial(hard.keep_top, count=25)
    found = {
        "BERT 164, supervised and plain": (bert.step(bert.ours), bert.step(bert.plain)),
        "rollout 164, ours and weights kept": (
            short.step(short.ours),
            short.step(short.by_rows),
        ),
        "non-local, 25 of 100 cells and all": (
            lambda: cells.some(hard.chosen, few).square().sum().backward(),
            lambda: cells.all().square().sum().backward(),
        ),
    }
    if device == "cpu":
        found["VL-BERT 164, supervised and plain"] = (taught, plain)
    return found


def spent(way: Callable[[], object], device: str) -> dict[str, float]:
    """Seconds by operation, of as many runs as there are rounds."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    way()
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(ROUNDS):
            way()
        if device != "cpu":
            torch.cuda.synchronize()
    field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    return {one.key: getattr(one, field) / 1e6 / ROUNDS for one in seen.key_averages()}


def looked_into(pair: Pair, device: str) -> dict[str, Any]:
    """The largest differences, and the ratio without a profiler."""
    ours, theirs = (spent(way, device) for way in pair)
    times = race({"ours": pair[0], "theirs": pair[1]}, 2 * ROUNDS, timer(device), limit=20.0)
    whole = times.of("theirs").median
    rows = {
        name: {
            "ours": ours.get(name, 0.0) / whole,
            "theirs": theirs.get(name, 0.0) / whole,
            "more": (ours.get(name, 0.0) - theirs.get(name, 0.0)) / whole,
        }
        for name in ours | theirs
    }
    largest = sorted(rows, key=lambda name: -abs(rows[name]["more"]))[:SHOWN]
    return {
        "ratio": times.over("ours", "theirs").median,
        "seconds": {"ours": times.of("ours").median, "theirs": whole},
        "operations": {name: rows[name] for name in largest},
        "calls": {"ours": len(ours), "theirs": len(theirs)},
    }


def main() -> None:
    """Look, print and write down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, pair in pairs(given.device).items():
        found[name] = one = looked_into(pair, given.device)
        print(f"{name}: {one['ratio']:.3f}")
        for operation, row in one["operations"].items():
            told = f"{row['ours']:7.3f} {row['theirs']:7.3f} {row['more']:+7.3f}"
            print(f"  {operation:45} {told}", flush=True)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(given.device), "rounds": ROUNDS, "profiles": found}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
