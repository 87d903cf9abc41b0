"""What watching attention while training costs: a step as it is beside one that is watched.

    python benchmarks/monitor_speed.py OUT.json [--every 100]

Plain and watched steps take turns, so that a machine with other work slows both alike; the share is
the median extra time of a watched step over that of a plain one, divided by `every`. Times are the
processor's on a CPU.
"""

import argparse
import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from overt.files import write_json
from overt.train import AttentionMonitor

SIZES = {  # layers, width, heads, positions, samples
    "12 layers, 256 wide, 128 positions": (12, 256, 4, 128, 8),
    "6 layers, 384 wide, 512 positions": (6, 384, 6, 512, 4),
}


def step(model: nn.Module, tokens: torch.Tensor, device: str) -> None:
    model(tokens).square().mean().backward()
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()


def measure(sizes: tuple[int, ...], monitor: AttentionMonitor, device: str, turns: int) -> dict:
    layers, width, heads, positions, samples = sizes
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    tokens = torch.randn(samples, positions, width, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {"plain": [], "watched": []}
    for turn in range(turns + 2):
        for name, taken in seconds.items():
            begun = clock()
            with monitor.looking(model) if name == "watched" else nullcontext() as pulse:
                step(model, tokens, device)
            if pulse is not None:
                pulse.read()
            if turn >= 2:
                taken.append(clock() - begun)
    plain, watched = (statistics.median(one) for one in seconds.values())
    extra = watched / plain - 1
    return {"plain": plain, "watched": watched, "extra": extra, "cost": extra / monitor.every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    monitor = AttentionMonitor(every=asked.every)
    found = {
        name: measure(sizes, monitor, asked.device, asked.turns) for name, sizes in SIZES.items()
    }
    machine = torch.cuda.get_device_name() if asked.device == "cuda" else "one CPU thread"
    write_json(
        asked.out,
        {
            "what": "extra time of a watched step, and of training with one in `every` watched",
            "every": asked.every,
            "machine": machine,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "sizes": found,
        },
    )
    for name, one in found.items():
        print(f"{name}: a watched step {one['extra']:+.1%}, training {one['cost']:+.3%}")


if __name__ == "__main__":
    main()
