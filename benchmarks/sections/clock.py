"""Time several variants of one operation, interleaved in one process.

On a CPU the clock is process CPU time, so that other work on the machine matters little; on a GPU
it is the time between two CUDA events. Variants alternate, in forward and reverse order, and are
compared within a round, so that a slow round affects all of them.
"""

import gc
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Variant = Callable[[], object]

LEAST = 3  # minimum number of rounds, whatever their duration


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of several numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def from_values(cls, numbers: Sequence[float]) -> "Spread":
        """Compute the quartiles, inclusive method."""
        if len(numbers) == 1:
            return cls(*(float(numbers[0]),) * 3)
        low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(middle, low, high)

    @classmethod
    def constant(cls, number: float) -> "Spread":
        """Wrap a number without spread, such as a count."""
        return cls(float(number), float(number), float(number))


@dataclass(frozen=True)
class Times:
    """Seconds of each variant in each round."""

    seconds: dict[str, list[float]]

    def spread(self, name: str) -> Spread:
        """Return the spread of one variant."""
        return Spread.from_values(self.seconds[name])

    def ratio(self, above: str, below: str) -> Spread:
        """Return the spread of the ratio of two variants, round by round."""
        pairs = zip(self.seconds[above], self.seconds[below], strict=True)
        return Spread.from_values([a / b for a, b in pairs])


def process_cpu_time() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in times)


def cpu_seconds(variant: Variant) -> float:
    """Return the CPU seconds of one run in this process."""
    start = time.process_time()
    variant()
    return time.process_time() - start


def gpu_seconds(variant: Variant) -> float:
    """Return the seconds between two CUDA events; the GPU is idle before the first."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    variant()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000


def wall_seconds(variant: Variant) -> float:
    """Return wall-clock seconds, for runs that wait, such as the start of a process."""
    start = time.perf_counter()
    variant()
    return time.perf_counter() - start


def device_clock(device: str) -> Callable[[Variant], float]:
    """Return the clock of a device."""
    return cpu_seconds if device == "cpu" else gpu_seconds


def time_variants(
    variants: Mapping[str, Variant],
    rounds: int,
    clock: Callable[[Variant], float] = cpu_seconds,
    before: Variant | None = None,
    limit: float = 30.0,
) -> Times:
    """Return the seconds of every variant, interleaved, after one warm-up round.

    `before` runs ahead of each variant and is not timed. Rounds end early after `limit` CPU or
    wall-clock seconds, but never before `LEAST`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    start = time.perf_counter(), process_cpu_time()
    for number in range(rounds + 1):
        used = min(time.perf_counter() - start[0], process_cpu_time() - start[1])
        if number > LEAST and used > limit:
            break
        names = list(variants)
        for name in names if number % 2 else reversed(names):  # the order may matter
            if before is not None:
                before()
            elapsed = clock(variants[name])
            if number:  # the first round is a warm-up
                seconds[name].append(elapsed)
    return Times(seconds)


def saved_bytes(loss: Callable[[], Any]) -> int:
    """Return the bytes that autograd saves for the backward pass, each storage once."""
    import torch

    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output referenced by its own node is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_value = loss()
    del loss_value
    return sum(found.values())


def peak_memory(variant: Variant) -> int:
    """Return the peak of GPU memory during a run, in bytes."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    variant()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def capture_graph(step: Callable[[], None]) -> Variant:
    """Capture a step in a CUDA graph; a step that synchronizes the GPU raises an error.

    This is checked before the capture: a capture that fails leaves the CUDA generator unusable, so
    that its state has to be replaced. Garbage collection is disabled during capture, because
    freeing an old graph or event breaks it too. Cached memory is released first: a capture can
    neither use nor free it.
    """
    import torch

    free_memory()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            step()
    except Exception:
        reset_cuda_rng()
        raise
    finally:
        gc.enable()
    replay: Variant = graph.replay
    return replay


def reset_cuda_rng() -> None:
    """Replace the state of the CUDA generator, which a failed capture leaves unusable."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        torch.cuda.default_generators[device].graphsafe_set_state(torch.Generator("cuda"))


def capture_graphs(
    steps: Mapping[str, Callable[[], None]], errors: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """Capture the steps in CUDA graphs; steps that fail are described in `errors`."""
    found: dict[str, Callable[[], object]] = {}
    for name, step in steps.items():
        try:
            found[name] = capture_graph(step)
        except Exception as error:
            traceback.print_exc()
            errors[name] = describe_error(error)
    return found


def free_memory() -> None:
    """Collect garbage and release cached GPU memory."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_error(error: Exception) -> str:
    """Describe in a table cell why a measurement failed."""
    lines = str(error).splitlines() or [""]
    if type(error).__name__ == "OutOfMemoryError":
        return "not measured: out of GPU memory"
    if any(word in str(error) for word in ("captur", "synchronizing")):
        return "cannot be captured in a CUDA graph: the step synchronizes or copies to the GPU"
    return f"not measured: {type(error).__name__}, {lines[0][:80]}".replace("|", "/")
