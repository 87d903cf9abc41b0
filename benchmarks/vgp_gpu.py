"""What grounded supervision costs on a GPU: a training step with it beside the same step without.

    python benchmarks/vgp_gpu.py OUT.json [--steps N] [--sizes 164,512] [--samples 32]

The variants are those of `grounding_speed.py`. Steps of all of them run by turns, each between two
events of the card, and are compared with the plain step of the same round; medians. Memory is the
most that was held at once. A step that waits for its launches costs what Python costs, so two sizes
of batch tell more than one.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from grounding_speed import GROUNDED, batch_of, net, supervised

LEFT_OUT = ("direct, last layer", "direct, last layer by a mask")


def measured(samples: int, text: int, boxes: int, steps: int, seconds: float) -> dict[str, object]:
    """Ratios to the plain step, milliseconds and memory, at one size."""
    model, batch = net().cuda(), batch_of(samples, text, boxes).to("cuda")
    ways = {name: one for name, one in supervised().items() if name not in LEFT_OUT}
    times: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, int] = {}
    begun = time.monotonic()
    for number in range(steps + 3):
        if number > 8 and time.monotonic() - begun > seconds:
            break
        for name, loss in ways.items():
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            loss(model, batch).backward()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:  # the first ones are for warming up
                times[name].append(start.elapsed_time(end))
                memory[name] = torch.cuda.max_memory_allocated()
    rows = {
        name: {
            "ratio": round(
                statistics.median(a / b for a, b in zip(found, times["plain"], strict=True)), 3
            ),
            "milliseconds": round(statistics.median(found), 3),
            "peak_mib": round(memory[name] / 2**20, 1),
            "memory_ratio": round(memory[name] / memory["plain"], 3),
            "steps": len(found),
        }
        for name, found in times.items()
    }
    length = text + boxes + 2
    return {"length": length, "samples": samples, "text": text, "regions": boxes, "rows": rows}


def main() -> None:
    """Measure, print a table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sizes", default="164,512")
    parser.add_argument("--samples", default="4,64")
    parser.add_argument("--seconds", type=float, default=5.0, help="at most, for one size")
    given = parser.parse_args()
    found = []
    for samples in map(int, given.samples.split(",")):
        for size in map(int, given.sizes.split(",")):
            text = 64 if size < 256 else 128
            one = measured(samples, text, size - text - 2, given.steps, given.seconds)
            found.append(one)
            print(f"length {size}, {samples} samples")
            rows = one["rows"]
            assert isinstance(rows, dict)
            for name, row in rows.items():
                print(f"  {name:30} {row['ratio']:6.3f}  {row['milliseconds']:8.2f} ms "
                      f"{row['peak_mib']:9} MiB")  # fmt: skip
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "grounded": GROUNDED,
        "sizes": found,
    }
    given.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
