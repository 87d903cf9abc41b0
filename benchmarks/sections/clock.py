"""Times of several ways to do one thing, taken by turns in one process.

On a CPU what counts is processor time, so that other work on the machine hardly matters; on a GPU
it is the time between two events of the card. Ways take turns, forwards and backwards, and are
compared round by round: whatever slows a round slows all of it alike.
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

Way = Callable[[], object]

LEAST = 3  # rounds that are run however long they take


@dataclass(frozen=True)
class Spread:
    """The median of several numbers, with their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        """Quartiles that are among the numbers or between two neighbours."""
        if len(numbers) == 1:
            return cls(*(float(numbers[0]),) * 3)
        low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(middle, low, high)

    @classmethod
    def exact(cls, number: float) -> "Spread":
        """A number that is counted or worked out and has no spread."""
        return cls(float(number), float(number), float(number))


@dataclass(frozen=True)
class Times:
    """Seconds of each way in each round."""

    seconds: dict[str, list[float]]

    def of(self, name: str) -> Spread:
        """How long one way takes."""
        return Spread.of(self.seconds[name])

    def over(self, above: str, below: str) -> Spread:
        """One time over another, round by round."""
        pairs = zip(self.seconds[above], self.seconds[below], strict=True)
        return Spread.of([a / b for a, b in pairs])


def processor() -> float:
    """Seconds of CPU that this process and its ended children have used."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in times)


def on_cpu(way: Way) -> float:
    """Processor seconds of one run of this process."""
    start = time.process_time()
    way()
    return time.process_time() - start


def on_gpu(way: Way) -> float:
    """Seconds between two events of the card, nothing before them left to do."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    way()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000


def on_wall(way: Way) -> float:
    """Seconds of the clock on the wall: for what waits, such as a process that starts."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def timer(device: str) -> Callable[[Way], float]:
    """The clock that means something on a device."""
    return on_cpu if device == "cpu" else on_gpu


def race(
    ways: Mapping[str, Way],
    rounds: int,
    clock: Callable[[Way], float] = on_cpu,
    before: Way | None = None,
    limit: float = 30.0,
) -> Times:
    """Seconds of every way, by turns, after one round to warm up.

    `before` runs ahead of each way, off the clock. Rounds end early once `limit` seconds of the
    processor or the wall are used, but never before `LEAST`.
    """
    seen: dict[str, list[float]] = {name: [] for name in ways}
    begun = time.perf_counter(), processor()
    for number in range(rounds + 1):
        used = min(time.perf_counter() - begun[0], processor() - begun[1])
        if number > LEAST and used > limit:
            break
        names = list(ways)
        for name in names if number % 2 else reversed(names):  # who goes first may matter
            if before is not None:
                before()
            taken = clock(ways[name])
            if number:  # the first round is for warming up
                seen[name].append(taken)
    return Times(seen)


def kept(loss: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    import torch

    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node holds is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = loss()
    del alive
    return sum(found.values())


def peak(way: Way) -> int:
    """Bytes of the card that were held at once while something ran, beyond nothing."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    way()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def graphed(step: Callable[[], None]) -> Way:
    """A whole step as one graph of the card, replayed. A step that waits for the card is refused.

    To find that out before anything is recorded is kinder: what breaks off while it is recorded
    leaves the card's random numbers unusable, so that new ones are put in their place. Nothing is
    collected meanwhile, because to free an old graph or event breaks a recording too. Memory that
    steps before have left over is handed back first: a recording cannot use it, nor free it.
    """
    import torch

    tidy()
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
        renew()
        raise
    finally:
        gc.enable()
    replay: Way = graph.replay
    return replay


def renew() -> None:
    """New random numbers for the card: those of a recording that broke off are unusable."""
    import torch

    if torch.cuda.is_available():
        place = torch.cuda.current_device()
        torch.cuda.default_generators[place].graphsafe_set_state(torch.Generator("cuda"))


def recorded(
    steps: Mapping[str, Callable[[], None]], broken: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """Those of the steps that can be recorded, as graphs; why not, of the others, in `broken`."""
    found: dict[str, Callable[[], object]] = {}
    for name, step in steps.items():
        try:
            found[name] = graphed(step)
        except Exception as error:
            traceback.print_exc()
            broken[name] = told(error)
    return found


def tidy() -> None:
    """Hand the memory of a card back that nobody uses any more."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def told(error: Exception) -> str:
    """Why something was not measured, in words that fit into a table."""
    lines = str(error).splitlines() or [""]
    if type(error).__name__ == "OutOfMemoryError":
        return "not measured: the memory of the card is too small"
    if any(word in str(error) for word in ("captur", "synchronizing")):
        return "cannot be recorded: within a step it waits for the card or copies to it"
    return f"not measured: {type(error).__name__}, {lines[0][:80]}".replace("|", "/")
