"""Steps that are recorded once and replayed: a small model's step is mostly Python and launches.

On a CUDA card the kernels of a step can be kept as a graph and sent off in one call. What is
recorded is the forward and backward pass of one batch shape; Python does not run again. So a step
must not read what changes in Python: the texts of a batch and the progress are sealed while it is
recorded, and reading them is refused.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from overt.errors import BadInput

G = TypeVar("G")
T = TypeVar("T")
Replay = Callable[[], None]

WARM = 2  # steps of a form before it is recorded: kernels are chosen and compiled in them
MOST = 32  # forms that are recorded; later ones run as they always do

# Given work, a replay of it and what it returned: tensors that each replay writes anew.
Record = Callable[[Callable[[], T]], tuple[Replay, T]]


class Card:
    """A CUDA card that records: one stream and one memory for all recordings of a run.

    Steps that come before a recording run on the same stream. The graph of an earlier step that is
    still alive somewhere would else bind gradients to another stream, and break the recording.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool: Any = None

    def beside(self, work: Callable[[], T]) -> T:
        """The work as it is, on the stream of the recordings."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            made = work()
        here.wait_stream(self.stream)
        return made

    def record(self, work: Callable[[], T]) -> tuple[Replay, T]:
        """The kernels of `work` as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # what a collector frees on the card while it records breaks the recording
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                made = work()
        finally:
            if collects:
                gc.enable()
        self.pool = self.pool or graph.pool()
        return graph.replay, made


class Sealed(str):
    """A text that can be handed on and not read."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise BadInput(
            "this step reads ids, groups or texts of its batch and cannot be recorded; set "
            "train.graph=false"
        )

    __hash__ = __eq__ = __iter__ = __getitem__ = __contains__ = __str__ = _refuse
    __len__ = __format__ = __add__ = split = partition = rpartition = encode = _refuse


class SealedProgress:
    """A progress that nothing can be read of."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BadInput(
            f"this step reads its progress ({name}) and cannot be recorded: let `before` of fit "
            "see to it, or set train.graph=false"
        )


def tensors(value: object) -> Iterator[Tensor]:
    """All tensors within a batch, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from tensors(getattr(value, one.name))
    elif isinstance(value, tuple) and value and not isinstance(value[0], str):
        for part in value:
            yield from tensors(part)


def form(value: object) -> Hashable:
    """What two batches must have in common to be replayed by one recording.

    Everything but the numbers in tensors and the texts.
    """
    match value:
        case Tensor():
            return value.shape, value.dtype, value.device
        case slice():
            return value.start, value.stop, value.step
        case tuple():
            if value and isinstance(value[0], str):
                return len(value)
            return tuple(form(one) for one in value)
        case _ if is_dataclass(value):
            return type(value), *(form(getattr(value, one.name)) for one in fields(value))
    return value if isinstance(value, Hashable) else id(value)


def sealed(value: Any) -> Any:
    """A batch of the same form with tensors of its own, whose texts cannot be read."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return (Sealed(),) * len(value)
        return tuple(sealed(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: sealed(getattr(value, one.name)) for one in fields(value)}
        )
    return value


@dataclass(frozen=True, eq=False)
class Recording(Generic[G, T]):
    """Recorded work: where what it is given lies, and what a replay leaves behind."""

    given: G
    replay: Replay
    made: T
    gradients: list[tuple[nn.Parameter, Tensor]]

    def play(self, given: G) -> T:
        """The work on something else of the same form."""
        for ours, theirs in zip(tensors(self.given), tensors(given), strict=True):
            ours.copy_(theirs)
        self.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.made


class Recorder(Generic[G, T]):
    """Does `work` on batches or the like, from a recording wherever there is one for their form.

    `work(given)` leaves gradients in `parameters`, which have none before. The first `warm` times a
    form is worked on as it is, by `beside`; then it is recorded. What `work` returns is written
    anew by each replay of the same form.
    """

    def __init__(
        self,
        work: Callable[[G], T],
        parameters: Sequence[nn.Parameter],
        record: Record[T],
        beside: Callable[[Callable[[], T]], T] = lambda work: work(),
        warm: int = WARM,
    ) -> None:
        self.work, self.parameters, self.record, self.beside = work, parameters, record, beside
        self.warm, self.recording = warm, False
        self._done: dict[Hashable, int] = {}
        self._kept: dict[Hashable, Recording[G, T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __call__(self, given: G, case: Hashable = None) -> T:
        """The work on this; what comes in another `case` does not share a recording."""
        key = (form(given), case)
        known = self._kept.get(key)
        if known is None:
            done = self._done[key] = self._done.get(key, 0) + 1
            if done <= self.warm or len(self._kept) >= MOST:
                return self.beside(lambda: self.work(given))
            known = self._kept[key] = self._recorded(given)
        return known.play(given)

    def _recorded(self, given: G) -> Recording[G, T]:
        still = sealed(given)
        self.recording = True
        try:
            replay, made = self.record(lambda: self.work(still))
        except RuntimeError as problem:
            if "captur" not in str(problem):
                raise
            # the card's random numbers are of no use after it: there is no way to go on
            raise BadInput(
                "this step waits for the card and cannot be recorded; set train.graph=false "
                f"({str(problem).splitlines()[0]})"
            ) from problem
        finally:
            self.recording = False
        left = [(p, p.grad) for p in self.parameters if p.grad is not None]
        return Recording(still, replay, made, left)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer on a card move all weights in a few kernels; the rule stays the same."""
    for group in optimizer.param_groups:
        there = [p for p in group["params"] if p.requires_grad]
        if "fused" in group and all(p.is_cuda and p.is_floating_point() for p in there):
            group["fused"], group["foreach"] = True, False
            for parameter in there:
                slots = optimizer.state.get(parameter, {})
                if isinstance(slots.get("step"), Tensor):
                    slots["step"] = slots["step"].to(parameter.device, torch.float32)
