"""Profile variants that miss their goal, by operation, next to their alternatives.

    python benchmarks/profiles.py [--device cuda] [--only NAME ...] [--commit NAME]
                                  [--out results/speed/profiles-cpu.json]

Each pair runs under PyTorch's profiler. Reported is the self time of each operation, in ours and
in the alternative: CPU time on a CPU, kernel time on a GPU. On a GPU `busy` is the total time of
all kernels; the rest of a step waits for Python. Compare `busy` with the goals of CUDA graphs: a
graph runs the same kernels without waiting. `added` lists the kernels in which ours spends the most
additional time. The training loop is reported per step. Pairs that are not selected keep their
results in the file.
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
from sections.clock import device_clock, free_memory, time_variants
from sections.report import Setting, commit, machine

from overt.train import AttentionMonitor

ROUNDS, NUM_OPERATIONS, NUM_KERNELS, SECONDS = 5, 8, 16, {"cpu": 8.0, "cuda": 1.5}
KERNELS = {  # our Triton kernels
    *("top_cells", "above_uniform", "list_kept", "kept_first_rows", "queries_and_keys"),
    *("value_gradient", "add_projection_gradient", "transpose_kept", "weight_gradient"),
    *("log_sum_exp", "attention_received", "mix_cells", "received_gradient"),
    *("query_gradient", "key_gradient", "row_log_softmax", "row_gradient", "cross_entropy"),
    *("cross_entropy_row_gradient", "cross_entropy_key_gradient", "cross_entropy_gradients"),
}
COMPILED = "fused by the compiler"  # each compiled graph has its own name
# these launch our kernels, which are listed themselves
LAUNCHERS = {"_TritonSummedAttention", "_TritonSummedAttentionBackward"}


class Pair(NamedTuple):
    """Our variant and its alternative, and the number of steps per call of either."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    steps: int = 1


def pairs(device: str, stack: ExitStack) -> dict[str, Callable[[], Pair]]:
    """Return a constructor for each pair; contexts that stay open are entered in `stack`."""
    found: dict[str, Callable[[], Pair]] = {
        "BERT 164": partial(_bert, device),
        "rollout 164": partial(_rollout, device),
        "non-local, 25 of 100": partial(_hard, device, 32, 100, partial(hard.keep_top, count=25)),
        "AdaHAN non-local, mean 6.5": partial(_hard, device, 32, 100, _adaptive(0.5)),
        "BERT 512, compiled": partial(_compiled, device),
        "VL-BERT 164, compiled": partial(_vlbert_compiled, device),
    }
    if device == "cpu":
        return {
            **found,
            "VL-BERT 164": lambda: Pair(*reversed(grounding.model_steps(4, 164))),
            "BERT, Python overhead": partial(_bert, device, supervision.Size(64, 1, 12, 24)),
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
        "training loop, att3": partial(_loop, device, stack),
        "watching, 12 layers of 256": partial(_monitor, device),
        "500 masks, float32": partial(_search, device),
        "BERT 512, compiled": found["BERT 512, compiled"],
        "VL-BERT 164, compiled": found["VL-BERT 164, compiled"],
        "rollout 512": partial(_rollout, device, 512),
        "rollout 1024": partial(_rollout, device, 1024),
        "BERT 164": found["BERT 164"],
        "VL-BERT 164": partial(_vlbert, device, 164, 64),
        "VL-BERT 512": partial(_vlbert, device, 512, 32),
    }


def _adaptive(temperature: float) -> hard.Rule:
    return partial(hard.keep_above_uniform, temperature=temperature)


def _bert(device: str, size: supervision.Size | None = None) -> Pair:
    usual = supervision.Size(164, 4) if device == "cpu" else supervision.Size(164, 64, 12, 768)
    bert = supervision.Bert.create(size or usual, device)
    return Pair(bert.step(bert.ours), bert.step(bert.plain))


def _vlbert(device: str, positions: int, samples: int) -> Pair:
    case = supervision.VLBertCase(positions, samples, Setting(device))
    return Pair(case.step(case.variants["direct"]), case.step(case.variants["plain"]))


def _rollout(device: str, positions: int = 164) -> Pair:
    case = rollout.Case(1 if device == "cpu" else 32, positions, device)
    return Pair(case.step(case.ours), case.step(case.saved_rows))


def _monitor(device: str) -> Pair:
    model, tokens = monitor.build_model(monitor.SIZES["12 layers of 256, 128 positions"], device)
    return Pair(*monitor.build_steps(model, tokens, AttentionMonitor(), []))


def _search(device: str) -> Pair:
    case = surrogates.Case(32, device)
    masks = surrogates.GridMasks(surrogates.MASKS, grid=(3, 3))
    return Pair(case.ours(masks), partial(case.loop, case.all_masks()))


def _compiled(device: str) -> Pair:
    torch.compiler.reset()
    many = supervision.Size(512, 32, compiled.LAYERS, 768)
    bert = supervision.Bert.create(supervision.Size(512, 2) if device == "cpu" else many, device)
    return Pair(bert.step(compiled.watched_loss(bert)), bert.step(compiled.plain_loss(bert)))


def _vlbert_compiled(device: str) -> Pair:
    torch.compiler.reset()
    case = supervision.VLBertCase(
        164, 4 if device == "cpu" else 64, Setting(device), compiled.LAYERS
    )
    ours, plain = (
        torch.compile(case.variants[kind], dynamic=False) for kind in ("direct", "plain")
    )
    return Pair(case.step(ours), case.step(plain))


def _loop(device: str, stack: ExitStack) -> Pair:
    """Return attention at three levels in the training loop, as in the section `training`."""
    made = stack.enter_context(training.training_loops(Setting(device), training.PAIRS[1]))
    return Pair(*made.variants.values(), made.steps)


def _hard(device: str, samples: int, cells: int, rule: hard.Rule) -> Pair:
    torch.manual_seed(0)
    case = hard.Case(hard.NonLocalAggregation(512), samples, cells, 512, device)
    return _kept_cells(case, rule)


def _relation(device: str) -> Pair:
    torch.manual_seed(0)
    case = hard.Case(hard.RelationAggregation(256, 128), 128, 100, 256, device)
    return _kept_cells(case, partial(hard.keep_top, count=16))


def _kept_cells(case: hard.Case, rule: hard.Rule) -> Pair:
    def step(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run_step() -> None:
            case.zero_grad()
            run().square().sum().backward()

        return run_step

    return Pair(step(partial(case.select, hard.gather_kept, rule)), step(case.all))


class ProfiledTime(NamedTuple):
    """Seconds per step, by operation, and on a GPU by kernel."""

    operations: dict[str, float]
    kernels: dict[str, float]


def profile_variant(variant: Callable[[], object], device: str, steps: int = 1) -> ProfiledTime:
    """Profile a variant and return its time per step."""
    rounds = max(1, ROUNDS // steps)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    variant()
    with torch.profiler.profile(activities=kinds) as trace:
        for _ in range(rounds):
            variant()
        if device != "cpu":
            torch.cuda.synchronize()
    events = trace.key_averages()
    field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    # kernels are listed in addition to the operations that launched them and would count twice;
    # only our own kernels have descriptive names
    own = [one for one in events if ("CPU" in str(one.device_type)) != (one.key in KERNELS)]
    each = 1e-6 / (rounds * steps)
    found: dict[str, float] = defaultdict(float)
    for one in own:
        if one.key not in LAUNCHERS:
            found[COMPILED if "CompiledFxGraph" in one.key else one.key] += (
                getattr(one, field) * each
            )
    kernels = {
        one.key: one.self_device_time_total * each
        for one in events
        if "CPU" not in str(one.device_type)
    }
    return ProfiledTime(
        {name: duration for name, duration in found.items() if duration > 0}, kernels
    )


def profile_pair(pair: Pair, device: str) -> dict[str, Any]:
    """Profile both variants, and time them without a profiler."""
    variants = {"ours": pair.ours, "theirs": pair.theirs}
    times = time_variants(variants, 2 * ROUNDS, device_clock(device), limit=SECONDS[device])
    profiled = [profile_variant(variant, device, pair.steps) for variant in variants.values()]
    ours, theirs = (one.operations for one in profiled)
    largest = sorted(ours, key=lambda name: -ours[name])[:NUM_OPERATIONS]
    more = {
        name: duration - profiled[1].kernels.get(name, 0.0)
        for name, duration in profiled[0].kernels.items()
    }
    return {
        "ratio": times.ratio("ours", "theirs").median,
        "seconds": {name: times.spread(name).median / pair.steps for name in variants},
        "busy": {"ours": sum(ours.values()), "theirs": sum(theirs.values())},
        "operations": {
            name: {"ours": ours[name], "theirs": theirs.get(name, 0.0)} for name in largest
        },
        "added": {
            name: more[name] for name in sorted(more, key=lambda name: -more[name])[:NUM_KERNELS]
        },
    }


def main() -> None:
    """Profile the pairs, print the results and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of pairs, as printed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="measured commit, if this is not a checkout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device != "cpu":
        torch.set_float32_matmul_precision("high")  # as in the section on hard attention
    previous = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    found: dict[str, Any] = dict(previous["profiles"]) if args.only and previous else {}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"machine": machine(args.device), "date": date, "rounds": ROUNDS, "profiles": found}
    at = commit(args.commit)
    with ExitStack() as stack:
        constructors = pairs(args.device, stack)
        unknown = set(args.only or ()) - set(constructors)
        if unknown:
            parser.error(f"unknown pairs: {sorted(unknown)}; available: {sorted(constructors)}")
        for name in args.only or constructors:
            make = constructors[name]
            run_and_print(name, make, args.device, found)
            if name in found:
                found[name]["commit"] = at
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n")


def run_and_print(name: str, make: Callable[[], Pair], device: str, found: dict[str, Any]) -> None:
    """Profile one pair and print the result; a pair that fails is reported and skipped."""
    try:
        found[name] = one = profile_pair(make(), device)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"{name} failed", flush=True)
        return
    finally:
        free_memory()
    print(f"{name}: {one['ratio']:.3f}, busy {one['busy']['ours'] * 1e3:.2f} ms of ours")
    for operation, row in one["operations"].items():
        print(f"  {operation:45} {row['ours'] * 1e6:9.0f} {row['theirs'] * 1e6:9.0f} us")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
