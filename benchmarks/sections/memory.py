"""Peak memory of tensors during a run."""

from collections.abc import Callable

import torch

from .clock import peak_memory


def peak_allocated(run: Callable[[], object], device: str) -> int:
    """Return the peak bytes above those at the start; on a CPU from the profiler."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        return peak_memory(run) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as trace:
        run()
    results = trace.profiler.kineto_results  # type: ignore[union-attr]
    moves = [event for event in results.events() if event.name() == "[memory]"]
    moves.sort(key=lambda event: event.start_ns())
    allocated = peak_bytes = 0
    for event in moves:
        allocated += event.nbytes()
        peak_bytes = max(peak_bytes, allocated)
    return peak_bytes
