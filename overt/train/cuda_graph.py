"""CUDA graphs of training steps: capture once, replay afterwards.

The step of a small model is mostly Python and kernel launches. On a CUDA device, the forward and
backward pass of one batch shape can be captured in a CUDA graph and launched in one call; Python
does not run in a replay. So a step must not depend on values that change in Python: during the
capture, reading the texts of a batch or the progress raises `UserError`.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from overt.errors import UserError

G = TypeVar("G")
T = TypeVar("T")
Replay = Callable[[], None]

WARMUP_CALLS = 2  # eager calls per input signature: kernels are selected and compiled in them
MAX_GRAPHS = 32  # further input signatures run eagerly

# Captures a function; returns its replay and its output, which each replay overwrites.
CaptureFunction = Callable[[Callable[[], T]], tuple[Replay, T]]


class GraphCapture:
    """Captures CUDA graphs that share one stream and one memory pool.

    Eager warmup steps run on the same stream. Otherwise the autograd graph of an earlier step that
    is still alive would bind gradients to another stream, and the capture would fail.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool: Any = None

    def run_on_stream(self, work: Callable[[], T]) -> T:
        """Run `work` eagerly on the capture stream."""
        current = torch.cuda.current_stream()
        # both directions: the work must see the batch, and later kernels must see its results
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = work()
        current.wait_stream(self.stream)
        return output

    def capture(self, work: Callable[[], T]) -> tuple[Replay, T]:
        """Capture the kernels of `work` in a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # freeing GPU memory during the capture would break it
        collects = gc.isenabled()
        gc.disable()
        try:
            # all graphs share one memory pool: they never run at the same time
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                output = work()
        finally:
            if collects:
                gc.enable()
        self.pool = self.pool or graph.pool()
        return graph.replay, output


class UnreadableStr(str):
    """A string that can be passed on but not read."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UserError(
            "a step in a CUDA graph must not read ids, groups or texts of its batch: set "
            "train.graph=false"
        )

    __hash__ = __eq__ = __iter__ = __getitem__ = __contains__ = __str__ = _refuse
    __len__ = __format__ = __add__ = split = partition = rpartition = encode = _refuse


class UnreadableProgress:
    """A progress whose attributes cannot be read."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UserError(
            f"a step in a CUDA graph must not read its progress ({name}): move that to "
            "`before_step` of fit, or set train.graph=false"
        )


def iter_tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors of a batch, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from iter_tensors(getattr(value, one.name))
    # tuples of texts have no tensors
    elif isinstance(value, tuple) and value and not isinstance(value[0], str):
        for part in value:
            yield from iter_tensors(part)


def input_signature(value: object) -> Hashable:
    """Return what two batches must have in common to share a CUDA graph.

    That is everything except the contents of tensors and texts.
    """
    match value:
        case Tensor():
            return value.shape, value.dtype, value.device
        case slice():
            return value.start, value.stop, value.step
        case tuple():
            if value and isinstance(value[0], str):
                return len(value)
            return tuple(input_signature(one) for one in value)
        case _ if is_dataclass(value):
            parts = (input_signature(getattr(value, one.name)) for one in fields(value))
            return type(value), *parts
    # an unhashable value is compared by identity: at worst, a graph is captured too often
    return value if isinstance(value, Hashable) else id(value)


def static_copy(value: Any) -> Any:
    """Copy a batch into tensors of its own, with texts that cannot be read."""
    if isinstance(value, Tensor):
        # a replay reads the addresses of the capture, so every batch is copied into the same
        # tensors
        return value.clone()
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return (UnreadableStr(),) * len(value)
        return tuple(static_copy(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: static_copy(getattr(value, one.name)) for one in fields(value)}
        )
    return value


@dataclass(frozen=True, eq=False)
class CapturedGraph(Generic[G, T]):
    """A CUDA graph with its static input, its output and the gradients that it writes."""

    static_input: G
    replay: Replay
    output: T
    gradients: list[tuple[nn.Parameter, Tensor]]

    def run(self, batch: G) -> T:
        """Copy a batch of the same signature into the static input and replay the graph."""
        for ours, theirs in zip(iter_tensors(self.static_input), iter_tensors(batch), strict=True):
            ours.copy_(theirs)
        self.replay()
        # zero_grad(set_to_none=True) has dropped the reference; the graph writes into the same
        # tensor
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.output


class GraphedFunction(Generic[G, T]):
    """Runs `work` on batches, from a CUDA graph per input signature.

    The first `warmup` calls per signature run with `eager`; then the graph is captured. Each replay
    overwrites the output of the earlier ones.

    Args:
        work: Function of a batch that leaves gradients in `parameters`, which have none before.
        parameters: Parameters whose gradients `work` computes.
        capture: Captures a function, as `GraphCapture.capture`.
        eager: Runs a function without capture, as `GraphCapture.run_on_stream`.
        warmup: Eager calls per signature.
    """

    def __init__(
        self,
        work: Callable[[G], T],
        parameters: Sequence[nn.Parameter],
        capture: CaptureFunction[T],
        eager: Callable[[Callable[[], T]], T] = lambda work: work(),
        warmup: int = WARMUP_CALLS,
    ) -> None:
        self.work, self.parameters, self.capture, self.eager = work, parameters, capture, eager
        self.warmup, self.capturing = warmup, False
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, CapturedGraph[G, T]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, batch: G, key: Hashable = None) -> T:
        """Run `work` on a batch; batches with different keys do not share a graph."""
        signature = (input_signature(batch), key)
        graph = self._graphs.get(signature)
        if graph is None:
            # warmup per signature: cuDNN and autotuners choose kernels for a shape in its first
            # calls
            calls = self._calls[signature] = self._calls.get(signature, 0) + 1
            if calls <= self.warmup or len(self._graphs) >= MAX_GRAPHS:
                return self.eager(lambda: self.work(batch))
            graph = self._graphs[signature] = self._captured(batch)
        return graph.run(batch)

    def _captured(self, batch: G) -> CapturedGraph[G, T]:
        static_input = static_copy(batch)
        self.capturing = True
        try:
            replay, output = self.capture(lambda: self.work(static_input))
        except RuntimeError as error:
            # other errors of the step keep their own message
            if "captur" not in str(error):
                raise
            # The state of the GPU's random generator is lost, so training cannot continue.
            raise UserError(
                "a step in a CUDA graph must not synchronize the GPU: set train.graph=false "
                f"({str(error).splitlines()[0]})"
            ) from error
        finally:
            self.capturing = False
        # the gradients that the capture allocated in the pool
        gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]
        return CapturedGraph(static_input, replay, output, gradients)


# Other optimizers, such as Adagrad, have the option but no CUDA kernel.
FUSED_ON_CUDA = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def enable_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer on a GPU update all weights in a few kernels; results stay the same."""
    if not isinstance(optimizer, FUSED_ON_CUDA):
        return
    for group in optimizer.param_groups:
        there = [p for p in group["params"] if p.requires_grad]
        if "fused" in group and all(p.is_cuda and p.is_floating_point() for p in there):
            # the two options exclude each other
            group["fused"], group["foreach"] = True, False
            for parameter in there:
                slots = optimizer.state.get(parameter, {})
                if isinstance(slots.get("step"), Tensor):
                    # fused kernels keep the step count on the GPU; a loaded state may have it on
                    # the CPU
                    slots["step"] = slots["step"].to(parameter.device, torch.float32)
