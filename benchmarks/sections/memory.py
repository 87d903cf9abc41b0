"""How many bytes of tensors are alive at once while something runs."""

from collections.abc import Callable

import torch

from .clock import peak


def most_alive(run: Callable[[], object], device: str) -> int:
    """Bytes held at once beyond those held at the start; on a CPU the profiler tells them."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        return peak(run) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        run()
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    moves = [event for event in results.events() if event.name() == "[memory]"]
    moves.sort(key=lambda event: event.start_ns())
    alive = most = 0
    for event in moves:
        alive += event.nbytes()
        most = max(most, alive)
    return most
