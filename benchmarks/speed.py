"""How fast overt is, as ratios measured side by side.

    python benchmarks/speed.py [--out FILE] [--only NAME ...] [--rounds N]

Each section first asserts that the fast path gives the right answer, then times it. The variants of
a section take turns in one process, CPU time is counted (the machine may be shared), and the median
is reported: a ratio carries over to other machines, a rate is only for orientation.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

Section = Callable[[int], dict[str, Any]]


def cpu() -> float:
    """Seconds of CPU that this process and its ended children have used."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in times)


def race(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median CPU and wall seconds of each variant; they take turns, after one round to warm up."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            wall, used = time.perf_counter(), cpu()
            variant()
            if number:
                seen[name].append((cpu() - used, time.perf_counter() - wall))
    return {
        name: {
            "cpu_s": statistics.median(pair[0] for pair in pairs),
            "wall_s": statistics.median(pair[1] for pair in pairs),
        }
        for name, pairs in seen.items()
    }


# --- sections -------------------------------------------------------------------------------


def start(rounds: int) -> dict[str, Any]:
    """Starting the command line against starting Python; the goal is 8x."""
    overt = str(Path(sys.executable).with_name("overt"))
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "overt --version": [overt, "--version"],
        "overt --help": [overt, "--help"],
        "overt list": [overt, "list"],
    }

    def run(words: list[str]) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert metadata.version("overt") in run(commands["overt --version"])
    assert "run" in run(commands["overt --help"])
    assert run(commands["overt list"]).strip()
    times = race({name: (lambda w=words: run(w)) for name, words in commands.items()}, rounds)
    base = times["python -c pass"]
    ratios = {name: each["wall_s"] / base["wall_s"] for name, each in times.items()}
    return {"times": times, "wall_ratio_to_python": ratios, "goal": 8.0}


def scenes(rounds: int) -> dict[str, Any]:
    """Making scenes and batches of them; a kept item against one drawn anew."""
    import torch

    from overt.data.scenes.captions import CaptionScenes
    from overt.data.scenes.render import render
    from overt.data.scenes.world import scene

    count = 64
    every = list(range(count))

    whole = CaptionScenes("train", count=count).batch(every)
    parts = [CaptionScenes("train", count=count).batch([i]) for i in every[:4]]
    assert whole.images is not None
    for index, part in enumerate(parts):
        assert part.images is not None
        assert torch.equal(part.images[0], whole.images[index]), "a batch depends on its size"
    drawn = torch.from_numpy(render(scene("train", 0, 3), 64).image.copy())
    shown = whole.images[3]
    same = drawn.permute(2, 0, 1) if drawn.shape[-1] == 3 else drawn
    assert torch.equal(same, shown), "a batch shows another picture than the renderer"

    kept = CaptionScenes("train", count=count)
    kept.batch(every)
    times = race(
        {
            "world": lambda: [scene("train", 0, i) for i in every],
            "world and picture": lambda: [render(scene("train", 0, i), 64) for i in every],
            "batch, new": lambda: CaptionScenes("train", count=count).batch(every),
            "batch, kept": lambda: kept.batch(every),
        },
        rounds,
    )
    return {
        "times": times,
        "scenes_per_cpu_second": {name: count / each["cpu_s"] for name, each in times.items()},
        "new_over_kept": times["batch, new"]["cpu_s"] / times["batch, kept"]["cpu_s"],
    }


def hard(rounds: int) -> dict[str, Any]:
    """Aggregating kept cells against all cells.

    The goal is 0.85 of the ratio of operations, and for as many cells as are above uniform 0.9 of
    all cells over the mean number kept.
    """
    import hard_speed

    sections = hard_speed.sections("cpu")
    # a relation network on all pairs takes seconds, and is well above its goal: fewer rounds
    fixed = {
        "pairwise": sections["pairwise"](rounds),
        "relation": sections["relation"](min(rounds, 3)),
    }
    adaptive = sections["adaptive_pairwise"](rounds)
    cases = {f"{name} {case}": one for name, of in fixed.items() for case, one in of.items()}
    return {
        "times_faster": {case: one["ratio"] for case, one in cases.items()},
        "share_of_operations": {case: one["share"] for case, one in cases.items()},
        "goal": hard_speed.GOAL_GATHER,
        "share_of_cases_that_reach_it": _reached(
            [one["share"] for one in cases.values()], hard_speed.GOAL_GATHER
        ),
        "adaptive_times_faster": {case: one["ratio"] for case, one in adaptive.items()},
        "adaptive_share_of_cells": {c: one["share_of_cells"] for c, one in adaptive.items()},
        "adaptive_goal": hard_speed.GOAL_ADAPTIVE,
        "adaptive_over_equation": {c: one["literal_over_ours"] for c, one in adaptive.items()},
    }


def _reached(shares: list[float], goal: float) -> float:
    return sum(share >= goal for share in shares) / len(shares)


def grounding(rounds: int) -> dict[str, Any]:
    """A step with supervised attention against the same step without; goals are 1.05 and 1.20."""
    import grounding_speed

    found = {name: one["ratio"] for name, one in grounding_speed.cases(rounds).items()}
    goals = grounding_speed.GOALS
    return {
        "supervised_over_plain": found,
        "goal": goals,
        "verdict": {
            name: "within" if found[name] <= goal else "over" for name, goal in goals.items()
        },
    }


def measures(rounds: int) -> dict[str, Any]:
    """Rank correlations of 2,000 maps with ties; the goal is to be as fast as scipy by rows."""
    import measures_speed

    return measures_speed.section(race, rounds)


SECTIONS: dict[str, Section] = {
    "start": start,
    "scenes": scenes,
    "hard": hard,
    "grounding": grounding,
    "measures": measures,
}


# --- report ---------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "overt": metadata.version("overt"),
    }


def show(name: str, result: Mapping[str, Any]) -> None:
    """One section as a few lines for people."""
    print(f"{name}:")
    for key, value in result.items():
        if key == "times":
            continue
        if isinstance(value, Mapping):
            for what, number in value.items():
                told = number if isinstance(number, str) else f"{number:.3g}"
                print(f"  {key:24} {what:20} {told:>10}")
        else:
            print(f"  {key:24} {'':20} {value:10.3g}")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the numbers as JSON to this file")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    results = {}
    for name in given.only:
        results[name] = SECTIONS[name](given.rounds)
        show(name, results[name])
    report = {
        "command": f"python benchmarks/speed.py --only {' '.join(given.only)}"
        f" --rounds {given.rounds}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "results": results,
    }
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
