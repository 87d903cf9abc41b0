"""The training loop.

A step is a function `(model, batch, progress) -> losses by parameter set`. Losses are sums with
counts, and are divided here once, by the count over all processes and accumulated batches. So
gradients do not depend on the number of processes or on how a batch is split.
"""

import hashlib
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from overt import io
from overt.data.batch import Batch
from overt.data.collated_dataset import (
    CollatedDataset,
    batch_ids,
    count_samples,
    from_loader,
    is_map_style,
    move_batch,
)
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.losses.loss import Loss
from overt.train import checkpoint
from overt.train.checkpoint import TrainState
from overt.train.cuda_graph import (
    GraphCapture,
    GraphedFunction,
    UnreadableProgress,
    enable_fused_kernels,
)
from overt.train.distributed import GradientReducer, Processes, processes
from overt.train.monitor import AttentionMonitor, AttentionStats
from overt.train.progress import Reporter, TrainLog
from overt.train.shards import (
    ShardedModel,
    local_part,
    shared_folder,
    whole_tensor,
    write_shards,
)

Losses = Mapping[str, Mapping[str, Loss]]
# What a step may return; all but the first are for a single parameter set.
StepLosses = Losses | Mapping[str, Loss | Tensor] | Loss | Tensor
LrSchedule = Callable[[float], float]


@runtime_checkable
class TrainDataset(Protocol):
    """Training data: items by index, and a deterministic batch for a list of indices."""

    def __len__(self) -> int: ...
    def batch(self, indices: Sequence[int]) -> Any: ...


@dataclass(frozen=True)
class Progress:
    """The position of a step in its stage.

    Args:
        step: Completed optimizer steps of the stage.
        steps: All optimizer steps of the stage.
        epoch: Completed passes over the data.

    Example:
        >>> Progress(step=50, steps=200, epoch=1).fraction
        0.25
    """

    step: int
    steps: int
    epoch: int

    @property
    def fraction(self) -> float:
        """The completed fraction of the stage, from 0 to 1."""
        return self.step / max(1, self.steps)


Step = Callable[[nn.Module, Any, Progress], StepLosses]
BeforeStep = Callable[[Progress], Hashable]
TorchData = torch.utils.data.Dataset[Any] | torch.utils.data.DataLoader[Any]


@dataclass
class ParameterSet:
    """Parameters of one optimizer; its losses reach no other parameters.

    Args:
        optimizer: The optimizer, with the peak learning rates.
        schedule: Returns the factor on the learning rate from the completed fraction of training.
        clip: Maximum gradient norm; None does not clip.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> adamw = torch.optim.AdamW(net.parameters(), lr=1e-3)
        >>> one = ParameterSet(adamw, warmup_cosine(), clip=1.0)
        >>> len(one.parameters), one.rates
        (2, [0.001])
    """

    optimizer: torch.optim.Optimizer
    schedule: LrSchedule = field(default=lambda fraction: 1.0)
    clip: float | None = None

    def __post_init__(self) -> None:
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters of the optimizer."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]


@dataclass(frozen=True)
class FitConfig:
    """Length of training, batch size, and how often to save and log.

    Args:
        epochs: Passes over the data.
        batch: Items per batch, over all processes.
        steps: Maximum number of optimizer steps.
        accumulate: Batches per optimizer step.
        patience: Stop after more than this many validations without a new best.
        save_every: Steps between checkpoints.
        log_every: Steps between lines of the log.
        workers: Data-loading processes; 0 loads in this one.
        bf16: Run the forward pass in bfloat16.
        graph: Capture steps in CUDA graphs, one per batch signature (`overt.train.cuda_graph`).
            Only for a single process on a CUDA device; no effect elsewhere.
        shard: Keep a part of every parameter in each process (`overt.train.shards`). Only for
            several processes and one parameter set; no effect in one process.

    Raises:
        UserError: A value is not a whole number or is too small.

    Example:
        >>> FitConfig(epochs=3, batch=32, accumulate=2).save_every
        200
    """

    epochs: int
    batch: int
    steps: int | None = None
    accumulate: int = 1
    patience: int | None = None
    save_every: int = 200
    log_every: int = 20
    workers: int = 0
    bf16: bool = False
    graph: bool = False
    shard: bool = False

    def __post_init__(self) -> None:
        least = dict.fromkeys(("batch", "accumulate", "save_every", "log_every"), 1)
        for name, low in {**dict.fromkeys(_COUNTS, 0), **least}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise UserError(f"{name} must be a whole number, got {value!r}")
            if value is not None and value < low:
                raise UserError(f"{name} must be at least {low}, got {value}")


_COUNTS = ("epochs", "steps", "patience", "workers")  # may be 0


@dataclass(frozen=True)
class Monitor:
    """Validation: `evaluate(model)` returns metrics; `best` names the one that is compared.

    Args:
        evaluate: Returns metrics by name from the model.
        best: Name of the metric that is compared.
        higher_is_better: Whether a higher value is better.

    Example:
        >>> validation = Monitor(lambda model: {"accuracy": 0.9}, best="accuracy")
        >>> validation.evaluate(nn.Linear(2, 2))
        {'accuracy': 0.9}
    """

    evaluate: Callable[[nn.Module], Mapping[str, float]]
    best: str
    higher_is_better: bool = True


@dataclass(frozen=True)
class FitResult:
    """Steps, epochs, samples and seconds of a training stage.

    Args:
        steps: Optimizer steps.
        epochs: Completed passes over the data.
        samples: Training samples, over all processes.
        seconds: Duration of training and validation.

    Example:
        >>> FitResult(steps=10, epochs=1, samples=640, seconds=2.0).samples_per_second
        320.0
    """

    steps: int
    epochs: int
    samples: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """Training samples per second, over all processes."""
        return self.samples / max(self.seconds, 1e-9)


def warmup_cosine(warmup: float = 0.1) -> LrSchedule:
    """Return a schedule with linear warmup over a fraction of training, then a cosine to 0.

    Args:
        warmup: The fraction of training with a growing rate.

    Returns:
        The factor on the learning rate, as a function of the completed fraction of training.

    Example:
        >>> schedule = warmup_cosine(0.1)
        >>> [round(schedule(fraction), 2) for fraction in (0.05, 0.1, 0.55, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
    """

    def factor(fraction: float) -> float:
        # never 0: the first step would do nothing
        if fraction < warmup:
            return max(fraction / warmup, 0.01)
        return 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / max(1e-9, 1 - warmup)))

    return factor


def doubling_warmup(first: float = 0.01, every: float = 0.04) -> LrSchedule:
    """Return a schedule that starts at the factor `first` and doubles up to 1.

    It doubles after each fraction `every` of training. Relation networks learn CLEVR from pixels
    with such a warmup and stop near 65 % without it: 5e-6, doubled every 20 epochs up to 5e-4, is
    `doubling_warmup(0.01, 20 / epochs)` on a rate of 5e-4, as public reproductions found.

    Args:
        first: The first factor.
        every: The fraction of training after which the factor doubles.

    Returns:
        The factor on the learning rate, as a function of the completed fraction of training.

    Raises:
        ValueError: `first` is not in (0, 1], or `every` is not positive.

    Example:
        >>> schedule = doubling_warmup(0.25, every=0.1)
        >>> [schedule(fraction) for fraction in (0.0, 0.1, 0.2, 0.9)]
        [0.25, 0.5, 1.0, 1.0]
    """
    if not (0 < first <= 1 and every > 0):
        raise ValueError(f"first must be in (0, 1] and every above 0, got {first} and {every}")

    def factor(fraction: float) -> float:
        # 1e-9: 0.12 / 0.04 is slightly below 3 in floating point
        # 60: 2**steps stays a finite float for any `every`
        steps = min(int(fraction / every + 1e-9), 60)
        return min(1.0, first * 2**steps)

    return factor


def fit(
    model: nn.Module,
    data: TrainDataset | TorchData,
    step: Step,
    sets: Mapping[str, ParameterSet] | ParameterSet | torch.optim.Optimizer,
    config: FitConfig,
    *,
    out: Path | str,
    seed: int,
    stage: str = "train",
    device: str = "auto",
    monitor: Monitor | None = None,
    attention: AttentionMonitor | None = None,
    before_step: BeforeStep | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
) -> FitResult:
    """Train `model` in place; write checkpoints and a log to `out`.

    With `resume`, training continues from the newest intact checkpoint of the stage, bit for bit as
    if it had not stopped, on one CPU process or on a GPU with deterministic algorithms. SIGINT and
    SIGTERM save after the current step and raise `RunInterrupted`. A non-finite loss or gradient
    raises `RunError` before any optimizer step, and non-finite weights are never saved. With
    `config.patience`, training stops early and the best weights are restored.

    Several processes share each batch and take the same steps as one process would, as far as
    samples are independent: batch norm and batch-level losses use the part of their process, and
    dropout draws other numbers. All processes start from the weights of rank 0, which alone writes
    files and decides on validations.

    Args:
        model: The model to train.
        data: Training data: `len(data)` and `data.batch(indices)`, or a `Dataset` or `DataLoader`
            of PyTorch. `fit` draws the order of the items itself, so that training can resume.
        step: Function `(model, batch, progress) -> {set: {name: Loss}}`. With a single parameter
            set it may also return `{name: loss}` or one loss. A loss is a `Loss`, or a tensor with
            one number, the mean over the samples of the batch.
        sets: Parameter sets by name, or a single one, or its optimizer.
        config: Length of training, batch size, checkpoints.
        out: Folder of checkpoints and log.
        seed: Seed of all random numbers.
        stage: Name of this training stage in `out`.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        monitor: Validation after each epoch.
        attention: Logs attention statistics per layer.
        before_step: Called with the progress before every step, for everything that follows a
            schedule: in a CUDA graph the Python code of a step runs only a few times. It changes
            tensors in place and returns a key; steps with different keys do not share a graph.
            Only steps on a `Batch` are captured.
        resume: Continue from the newest checkpoint.
        reporter: Prints progress.

    Returns:
        Steps, epochs, samples and seconds.

    Raises:
        UserError: The data, the sets, the losses or the checkpoints cannot be used.
        RunError: A loss, gradient or weight is not finite, or the disk is full.
        RunInterrupted: Training was stopped by a signal and saved.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> class Data:
        ...     def __len__(self):
        ...         return 8
        ...     def batch(self, indices):
        ...         numbers = torch.tensor(indices, dtype=torch.float32)
        ...         return Batch(ids=tuple(map(str, indices)), features=numbers[:, None, None])
        >>> def step(model, batch, progress):
        ...     error = model(batch.features) - 2 * batch.features
        ...     return {"model": {"mse": Loss(error.square().sum(), torch.tensor(len(batch)))}}
        >>> model = nn.Linear(1, 1)
        >>> sets = {"model": ParameterSet(torch.optim.Adam(model.parameters(), lr=0.1))}
        >>> config = FitConfig(epochs=3, batch=4)
        >>> with TemporaryDirectory() as out:
        ...     result = fit(model, Data(), step, sets, config, out=out, seed=0, device="cpu")
        >>> result.steps, result.epochs, result.samples
        (6, 3, 24)
    """
    # --- check the arguments before anything is written
    data, config = as_train_dataset(data, config)
    check_data(data, stage)
    if isinstance(sets, torch.optim.Optimizer):
        sets = ParameterSet(sets)
    sets = {"model": sets} if isinstance(sets, ParameterSet) else sets
    check_sets(sets, model)
    check_monitor(monitor, config)
    ranks = processes(device)
    if not (config.shard and ranks.world > 1):
        # the optimizers were built on these parameters: `to` moves them in place, their state
        # follows
        model.to(ranks.device)
    elif len(sets) > 1:
        raise UserError(f"sharded training needs a single parameter set, got {', '.join(sets)}")
    for one in sets.values():
        move_optimizer_state(one.optimizer, ranks.device)
    run = _FitLoop(
        model,
        data,
        step,
        dict(sets),
        config,
        Path(out),
        seed,
        stage,
        ranks,
        monitor,
        reporter,
        attention,
        before_step,
    )
    return run.run(resume)


def as_train_dataset(
    data: TrainDataset | TorchData, config: FitConfig
) -> tuple[TrainDataset, FitConfig]:
    """Return a dataset or a loader of PyTorch as items by index, with the loader's processes."""
    if isinstance(data, torch.utils.data.DataLoader):
        workers = config.workers or data.num_workers
        return from_loader(data, config.batch), replace(config, workers=workers)
    # `datasets.Dataset` has another method `batch`
    own = isinstance(data, TrainDataset) and not type(data).__module__.startswith("datasets.")
    if own or not (is_map_style(data) or isinstance(data, torch.utils.data.IterableDataset)):
        return cast(TrainDataset, data), config
    return CollatedDataset(data), config


def check_data(data: TrainDataset, stage: str) -> None:
    """Raise `UserError` if the data has no batches by index, or is empty."""
    if not isinstance(data, TrainDataset):
        raise UserError(
            f"cannot train on a {type(data).__name__}: data needs `len(data)` and "
            "`data.batch(indices)`, or is a Dataset or DataLoader of PyTorch; fit shuffles the "
            "indices itself"
        )
    if not len(data):
        raise UserError(f"cannot train on empty data in stage {stage!r}")


def check_sets(sets: Mapping[str, ParameterSet], model: nn.Module) -> None:
    """Raise if sets share a parameter, or have parameters that are not in the model.

    Parameters outside of the model would not be saved.
    """
    expected = '{"model": ParameterSet(optimizer)}'
    if not isinstance(sets, Mapping) or not sets:
        got = "no sets" if isinstance(sets, Mapping) else f"a {type(sets).__name__}"
        raise UserError(f"expected parameter sets by name, such as {expected}, got {got}")
    ours = {id(parameter) for parameter in model.parameters()}
    owner: dict[int, str] = {}
    for name, one in sets.items():
        if not isinstance(one, ParameterSet):
            raise UserError(f"set {name!r} is a {type(one).__name__}: expected {expected}")
        # by identity: tensors compare element by element
        for parameter in one.parameters:
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(
                    f"sets {other!r} and {name!r} share a parameter: use it in one of them"
                )
        foreign = sum(id(parameter) not in ours for parameter in one.parameters)
        if foreign:
            raise UserError(
                f"set {name!r} has {foreign} parameters that are not in the model and would not be "
                "saved: make every trainable module a submodule of the model"
            )


def check_monitor(monitor: Monitor | None, config: FitConfig) -> None:
    """Raise `UserError` for a monitor of a wrong type, or patience without a monitor."""
    if monitor is not None and not isinstance(monitor, Monitor):
        raise UserError(
            f"expected a monitor such as Monitor(evaluate, best='accuracy'), got a "
            f"{type(monitor).__name__}"
        )
    if config.patience is not None and monitor is None:
        raise UserError(
            f"patience={config.patience} needs validation: pass a monitor, or leave out patience"
        )


def name_losses(losses: Any, sets: Iterable[str], batch: Any) -> Any:
    """Return the losses of a simple step by set and name; other results are not changed.

    With a single set a step may return one loss, or losses by name. A tensor is the mean over the
    samples of the batch, and becomes a sum with a count, so that accumulated batches and processes
    of different sizes are weighted by their samples.
    """
    names = [*sets]
    if isinstance(losses, Loss | Tensor):
        losses = {"loss": losses}
    simple = isinstance(losses, Mapping) and losses and len(names) == 1
    if not simple or any(isinstance(one, Mapping) for one in losses.values()):
        return losses
    return {names[0]: {name: _as_sum(name, one, batch) for name, one in losses.items()}}


def _as_sum(name: str, loss: Any, batch: Any) -> Loss:
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(
            f"the loss {name!r} must be a Loss or a tensor with one number, such as the mean over "
            f"the samples, got {shape}"
        )
    count = count_samples(batch)
    return Loss(loss * count, torch.tensor(count))


def check_losses(losses: Any, sets: Iterable[str]) -> None:
    """Raise `UserError` unless a step returned losses by parameter set."""
    expected = 'a step must return losses by set, such as {"model": {"task": Loss(total, count)}}'
    if not isinstance(losses, Mapping):
        raise UserError(f"{expected}; got a {type(losses).__name__}")
    unknown = set(losses) - set(sets)
    if unknown:
        raise UserError(
            f"a step returned losses for the sets {sorted(unknown)}: fit has {sorted(sets)}"
        )
    for set_name, group in losses.items():
        if not isinstance(group, Mapping):
            raise UserError(f"{expected}; {set_name!r} is a {type(group).__name__}")
        for name, loss in group.items():
            if not isinstance(loss, Loss):
                raise UserError(f"{expected}; {name!r} is a {type(loss).__name__}")
            for part, value in (("total", loss.total), ("count", loss.count)):
                if not isinstance(value, Tensor) or value.ndim:
                    got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                    raise UserError(
                        f"{part} of the loss {name!r} must be a tensor with one number, got {got}"
                    )


def check_gradients(losses: Losses) -> None:
    """Raise `UserError` if the losses of a set are not zero and have no gradient."""
    for set_name, group in losses.items():
        # one loss with a gradient is enough: others may be zero or constant in this batch
        if any(one.total.requires_grad for one in group.values()):
            continue
        if any(bool(one.count) and bool(one.total) for one in group.values()):
            raise UserError(
                f"no loss of set {set_name!r} has a gradient: was it detached, or computed under "
                "no_grad?"
            )


def refuse_batch_level(losses: Losses) -> None:
    """Raise `UserError` for a batch-level loss: it cannot be accumulated."""
    for group in losses.values():
        for name, loss in group.items():
            if loss.batch_level:
                raise UserError(
                    f"the batch-level loss {name!r} cannot be accumulated: set train.accumulate=1"
                )


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer to a device."""
    for slots in optimizer.state.values():
        for name, value in slots.items():
            # torch keeps step counts on the CPU unless kernels are fused: on a GPU, reading one
            # in Python would synchronize
            if isinstance(value, Tensor) and name != "step":
                slots[name] = value.to(device)


def derive_seed(*parts: object) -> int:
    """Hash several values into one seed, the same in every process and on every machine."""
    text = "/".join(map(str, parts))
    # 56 bits: every generator accepts them, while a seed above 2^63 is an error in some
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def ignore_signals(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a data-loading process.

    The main process finishes its step first and then ends the loading processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def seed_everything(value: int) -> None:
    """Seed every random generator that a step may use, on the devices in use.

    `torch.manual_seed` also queues a seed call with its stack trace for each unused device type,
    which takes longer than the forward pass of a small model.
    """
    random.seed(value)
    # NumPy takes seeds of 32 bits
    np.random.seed(value % 2**32)  # noqa: NPY002  a step may use it
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(value)


class _FitLoop:
    """The state of one call of `fit`, and the loop over it."""

    def __init__(
        self,
        model: nn.Module,
        data: TrainDataset,
        step: Step,
        sets: dict[str, ParameterSet],
        config: FitConfig,
        out: Path,
        seed: int,
        stage: str,
        ranks: Processes,
        monitor: Monitor | None,
        reporter: Reporter | None,
        attention: AttentionMonitor | None,
        before_step: BeforeStep | None,
    ) -> None:
        self.model, self.data, self.step, self.sets = model, data, step, sets
        self.config, self.stage, self.ranks, self.monitor = config, stage, ranks, monitor
        self.state = TrainState(stage, seed)
        self.checkpoints = out / "checkpoints" / stage
        self.log = TrainLog(out, enabled=ranks.is_main)
        self.reporter = reporter if reporter and ranks.is_main else Reporter(enabled=ranks.is_main)
        self.attention, self.before_step = attention, before_step
        self.stats: AttentionStats | None = None
        self.stop_signal = 0
        self.first_step = True  # this process has not run a step yet
        self.known_losses: list[str] = []
        self.local_sums = torch.zeros(0)  # loss sums of this process in the current step
        # the last batch of an epoch may be smaller: it is not dropped
        self.micro_per_epoch = math.ceil(len(data) / config.batch)
        self.steps_per_epoch = math.ceil(self.micro_per_epoch / config.accumulate)
        self.steps = config.epochs * self.steps_per_epoch
        if config.steps is not None:
            self.steps = min(self.steps, config.steps)
        # what the counters mean: resuming with another batch size would repeat or skip samples
        self.state.plan = {
            "items": len(data),
            "batch": config.batch,
            "accumulate": config.accumulate,
            "steps": self.steps,
        }
        self.optimizers = {name: one.optimizer for name, one in sets.items()}
        self.reducers: dict[str, GradientReducer] = {}
        self.sharded: ShardedModel | None = None
        self.agreed_losses: list[str] = []
        self.graphed: GraphedFunction[Batch, _StepNumbers] | None = None

    # --- the loop

    def run(self, resume: bool) -> FitResult:
        if self.config.shard and self.ranks.world > 1:
            # each process keeps its shard of the weights of rank 0
            self.ranks.broadcast_tensors(self.model.state_dict().values())
            self.sharded = ShardedModel(self.model, self.ranks, [*self.optimizers.values()])
        # before graphs: fused optimizers need the loaded state on the GPU
        self.restore(resume)
        if self.config.graph and self.ranks.device.type == "cuda" and self.ranks.world == 1:
            self.enable_cuda_graphs()
        # gradients are summed over processes, weights are not: they stay equal only if they start
        # equal
        if self.sharded is None:
            self.ranks.broadcast_tensors(self.model.state_dict().values())
        state = self.state
        if not state.done:
            try:
                self.log.open(state.log_bytes if state.step else self.log.size_before(self.stage))
                with self.signals(), self.reporter.stage(self.stage, self.steps, state.step):
                    self.train()
            finally:
                self.log.close()
        self.model.eval()
        return FitResult(state.step, state.epoch, state.samples, state.seconds)

    def train(self) -> None:
        state = self.state
        self.model.train()
        mark = time.perf_counter()
        # --- one optimizer step
        for window in self.accumulation_windows():
            losses = self.update(window)
            state.step += 1
            now = time.perf_counter()
            state.seconds, mark = state.seconds + now - mark, now
            self.log_step(losses)
            epoch_over = state.step % self.steps_per_epoch == 0
            state.epoch = state.step // self.steps_per_epoch
            last = state.step == self.steps
            # --- validation at the end of an epoch
            if (epoch_over or last) and self.monitor is not None:
                self.validate(self.monitor)
                now = time.perf_counter()
                state.seconds, mark = state.seconds + now - mark, now
            patience = self.config.patience
            state.done = last or (patience is not None and state.waited > patience)
            if state.done and patience is not None and state.best is not None:
                self.restore_best()
            # --- save and stop: a signal may reach one process only, but all must stop together
            stopped = self.ranks.max(self.stop_signal)
            if state.done or stopped or state.step % self.config.save_every == 0:
                self.save()
            if stopped:  # also at the end of a stage: another may follow
                raise RunInterrupted(
                    f"stopped and saved at step {state.step} of {self.steps} of stage "
                    f"{self.stage!r}; the same command with --resume continues from there",
                    stopped,
                )
            if state.done:
                return

    def update(self, window: Sequence["_MicroBatch"]) -> dict[str, tuple[float, float]]:
        """Do one optimizer step of every set, on the batches of one accumulation window."""
        for one in self.sets.values():
            for group, rate in zip(one.optimizer.param_groups, one.rates, strict=True):
                group["lr"] = rate * one.schedule(self.progress.fraction)
            # None, not zero: a parameter without a gradient must not be moved by momentum or weight
            # decay
            one.optimizer.zero_grad(set_to_none=True)
        if self.sharded is not None:
            self.sharded.clear()
        found = self.gradients(window)
        # gradients of all sets exist before any optimizer steps, so no set sees the new weights of
        # another
        totals, norms = self.to_numbers(found)
        self.refuse_non_finite(totals, norms, window)
        for name, one in self.sets.items():
            if one.clip is not None:
                # the factor of torch.nn.utils.clip_grad_norm_
                scale_gradients(one.parameters, min(1.0, one.clip / (norms[name] + 1e-6)))
            one.optimizer.step()
        return totals

    def gradients(self, window: Sequence["_MicroBatch"]) -> "_StepNumbers":
        """Compute the gradients of a window, from a CUDA graph if possible."""
        key = None if self.before_step is None else self.before_step(self.progress)
        # monitoring runs Python in the forward pass, and accumulation has several batches; a graph
        # needs inputs at fixed addresses, which only the fields of a `Batch` have
        single = len(window) == 1 and isinstance(window[0].batch, Batch)
        replayable = single and not self.monitor_due
        if self.graphed is not None and replayable:
            # a replay draws from the same generators as an eager step: seed them here, outside of
            # the graph
            self.seed(0)
            return self.graphed(window[0].batch, key)
        return self.compute_gradients(window)

    def enable_cuda_graphs(self) -> None:
        """Capture steps in CUDA graphs and use fused optimizers from now on."""
        graphs = GraphCapture()
        parameters = [p for one in self.sets.values() for p in one.parameters]
        self.graphed = GraphedFunction(
            lambda batch: self.compute_gradients([_MicroBatch(batch, counts=True)]),
            parameters,
            graphs.capture,
            graphs.run_on_stream,
        )
        for optimizer in self.optimizers.values():
            enable_fused_kernels(optimizer)

    def compute_gradients(self, window: Sequence["_MicroBatch"]) -> "_StepNumbers":
        """Compute the gradients of a window over all processes, and their norm per set.

        Every loss is divided by its count over all batches and processes, which are known after the
        last forward pass. Several processes exchange them in a small message then, and gradients
        during the last backward pass.
        """
        # one process has nothing to overlap: all batches of its window are treated alike
        alike = self.ranks.world == 1 and len(window) > 1
        former, last = (window, []) if alike else (window[:-1], window[-1:])
        kept, gradients_of = self.separate_gradients(former)
        losses = self.forward(last[0], len(former)) if last else {}
        if len(window) > 1:
            refuse_batch_level(losses)
        sums = self.loss_sums([*kept, losses])
        norms = []
        remaining = sum(name in losses for name in self.sets)
        for set_name, one in self.sets.items():  # the same order in all processes
            remaining -= set_name in losses
            objective = torch.zeros((), device=self.ranks.device)
            for loss_name, loss in losses.get(set_name, {}).items():
                # a device tensor: reading it as a number would synchronize the GPU before the
                # backward pass
                count = sums.count(f"{set_name}/{loss_name}").to(loss.total)
                objective = objective + loss.weight * loss.total / count
            shares: list[Tensor | None] = []
            for name, gradients in gradients_of.items():
                if name.split("/")[0] == set_name:
                    count = sums.count(name)
                    add_gradients(
                        shares, [None if g is None else g / count.to(g) for g in gradients]
                    )
            # the losses of one set must not reach the parameters of another
            self.reducer(set_name).backward(objective, shares, retain_graph=remaining > 0)
            norms.append(gradient_norm(one.parameters).to(sums.table))
        return _StepNumbers(sums.names, torch.cat([sums.table.flatten(), torch.stack(norms)]))

    def separate_gradients(
        self, window: Sequence["_MicroBatch"]
    ) -> tuple[list[Losses], dict[str, list[Tensor | None]]]:
        """Compute the gradients of several batches: one sum per loss, not divided.

        Each loss has its own count, known only after the last batch. The sums are those of this
        process; of all processes if the model is sharded.
        """
        kept: list[Losses] = []
        sums_of: dict[str, list[Tensor | None]] = {}
        for micro, part in enumerate(window):
            losses = self.forward(part, micro)
            refuse_batch_level(losses)
            flat = [(s, n, loss) for s, group in losses.items() for n, loss in group.items()]
            for place, (set_name, loss_name, loss) in enumerate(flat):
                if not loss.total.requires_grad:
                    continue
                gradients = self.reducer(set_name).gradients(
                    loss.weight * loss.total,
                    # losses of a batch share its graph; the last one frees it
                    retain_graph=place + 1 < len(flat),
                )
                add_gradients(sums_of.setdefault(f"{set_name}/{loss_name}", []), gradients)
            kept.append(
                {
                    s: {n: Loss(one.total.detach(), one.count) for n, one in group.items()}
                    for s, group in losses.items()
                }
            )
        return kept, sums_of

    def reducer(self, set_name: str) -> "GradientReducer | ShardedModel":
        """Return the reducer of a set; a step may freeze or unfreeze parameters."""
        if self.sharded is not None:
            return self.sharded
        parameters = self.sets[set_name].parameters
        former = self.reducers.get(set_name)
        if former is None or [*map(id, former.parameters)] != [*map(id, parameters)]:
            self.reducers[set_name] = GradientReducer(parameters, self.ranks.world)
        return self.reducers[set_name]

    def forward(self, part: "_MicroBatch", micro: int) -> Losses:
        """Compute the losses of one batch, with random numbers from the counters alone."""
        capturing = self.graphed is not None and self.graphed.capturing
        if not capturing:
            # seeded per batch, not once per run: resuming at a step gives the same dropout masks
            self.seed(micro)
        progress = UnreadableProgress() if capturing else self.progress
        with (
            torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.config.bf16),
            self.monitoring(micro),
        ):
            losses = self.in_model(lambda: self.checked_step(part.batch, progress))
        # checked once: `bool` of a loss synchronizes the GPU
        if self.first_step and not capturing:
            check_gradients(losses)
            self.first_step = False
        return (
            # an idle process runs the step on a borrowed item, so that its collectives match, and
            # counts 0
            losses if part.counts else {name: zero_losses(group) for name, group in losses.items()}
        )

    def in_model(self, step: Callable[[], Losses]) -> Losses:
        """Run a step, with gathered parameters if the model is sharded."""
        if self.sharded is None:
            return step()

        def work() -> tuple[Losses, list[Tensor]]:
            losses = step()
            return losses, [one.total for group in losses.values() for one in group.values()]

        losses = self.sharded.run(work)
        self.refuse_uneven_losses(losses)
        return losses

    def checked_step(self, batch: Any, progress: Progress | UnreadableProgress) -> Losses:
        """Return the checked losses of a batch."""
        found = self.step(self.model, batch, cast(Progress, progress))
        losses = found if len(self.sets) > 1 else name_losses(found, self.sets, batch)
        check_losses(losses, self.sets)
        return cast(Losses, losses)

    def refuse_uneven_losses(self, losses: Losses) -> None:
        """Raise `UserError` in all processes if a process lacks a loss that another has.

        The messages of a sharded model would not match, and the processes would wait forever.
        """
        mine = sorted(
            f"{set_name}/{name}"
            for set_name, group in losses.items()
            for name, loss in group.items()
            if loss.total.requires_grad
        )
        if not self.ranks.max(int(mine != self.agreed_losses)):
            return
        everywhere = self.ranks.union(mine)
        if self.ranks.max(int(mine != everywhere)):
            raise UserError(
                f"a process lacks one of the losses {', '.join(everywhere)} at step "
                f"{self.state.step} of stage {self.stage!r}: with shard=True every process needs "
                "every loss, with count 0 and a total of 0 with a gradient if it has no row"
            )
        self.agreed_losses = mine

    def seed(self, micro: int) -> None:
        """Seed every random generator for one batch of the step."""
        state = self.state
        seed_everything(derive_seed(state.seed, state.stage, state.step, micro, self.ranks.rank))

    @property
    def monitor_due(self) -> bool:
        """Whether this process monitors the attention of this step."""
        at = self.attention
        return at is not None and self.ranks.is_main and at.due(self.state.step)

    @contextmanager
    def monitoring(self, micro: int) -> Iterator[None]:
        """Monitor the attention of this step if it is due."""
        if self.attention is None or micro or not self.monitor_due:
            yield
            return
        with self.attention.observe(self.model) as self.stats:
            yield

    # --- parts of the loop

    @property
    def progress(self) -> Progress:
        return Progress(self.state.step, self.steps, self.state.epoch)

    def accumulation_windows(self) -> Iterator[list["_MicroBatch"]]:
        """Yield the batches of each remaining optimizer step, in the order of its epoch."""
        state, config = self.state, self.config
        while state.step < self.steps:
            epoch, done = divmod(state.step, self.steps_per_epoch)
            generator = torch.Generator().manual_seed(
                derive_seed(state.seed, state.stage, "order", epoch)
            )
            # the order depends on seed, stage and epoch only: a resumed run skips what it has seen
            order = torch.randperm(len(self.data), generator=generator).tolist()
            parts = [
                order[start : start + config.batch] for start in range(0, len(order), config.batch)
            ]
            # `done` optimizer steps of this epoch were taken before the interruption
            parts = parts[done * config.accumulate :]
            window: list[_MicroBatch] = []
            remaining = len(parts)
            collated = isinstance(self.data, CollatedDataset)
            for part, batch in zip(parts, self.batches(parts), strict=True):
                if not isinstance(batch, Batch | Mapping) and not collated:
                    raise UserError(
                        f"data.batch must return a Batch, got a {type(batch).__name__}: use "
                        "Batch(ids, images=..., labels=...) or a mapping of tensors"
                    )
                # a small last batch may leave processes without items
                mine = self.ranks.shard(part)
                ids = batch_ids(batch, mine or [part[0]])
                moved = move_batch(batch, self.ranks.device)
                window.append(_MicroBatch(moved, bool(mine), ids))
                remaining -= 1
                if len(window) == config.accumulate or not remaining:
                    yield window
                    window = []
                    if state.step >= self.steps:
                        return

    def batches(self, parts: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield this process's part of each batch, or one item with count 0 if it has none."""
        # `or`: an empty shard borrows the first item of the batch
        mine = [self.ranks.shard(part) or [part[0]] for part in parts]
        if not self.config.workers:
            yield from (self.data.batch(part) for part in mine)
            return
        yield from torch.utils.data.DataLoader(
            _BatchDataset(self.data, mine),
            batch_size=None,
            num_workers=self.config.workers,
            worker_init_fn=ignore_signals,
        )

    def loss_sums(self, losses: Sequence[Losses]) -> "_LossSums":
        """Sum every loss and its count over a window and over all processes.

        A process may not have a loss that another has.
        """
        there = torch.ones((), device=self.ranks.device, dtype=self.ranks.widest_float)
        table: dict[str, list[Tensor]] = {}
        for one in losses:
            for set_name, group in one.items():
                for loss_name, loss in group.items():
                    # the third number counts on how many processes and batches a loss occurred
                    row = torch.stack([loss.total.detach().to(there), loss.count.to(there), there])
                    table.setdefault(f"{set_name}/{loss_name}", []).append(row)
        names = self.loss_names(sorted(table))
        if not names:
            raise UserError(
                f"the step returned no loss at step {self.state.step} of stage {self.stage!r}"
            )
        none = [there.new_zeros(3)]
        self.local_sums = torch.stack(
            [torch.stack(table.get(name, none)).sum(dim=0) for name in names]
        )
        return _LossSums(names, self.ranks.sum(self.local_sums))

    def to_numbers(
        self, found: "_StepNumbers"
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Copy the losses and the gradient norms to the CPU.

        In one transfer, after the backward pass was launched: the GPU is synchronized once per
        step. A loss that no process has is left out.
        """
        flat, sums = found.numbers.tolist(), 3 * len(found.names)
        totals = {
            name: (flat[place], flat[place + 1])
            for name, place in zip(found.names, range(0, sums, 3), strict=True)
            if flat[place + 2]
        }
        return totals, dict(zip(self.sets, flat[sums:], strict=True))

    def loss_names(self, names: list[str]) -> list[str]:
        """Return the names of the losses of all processes: all-reduce needs equal sizes."""
        if self.ranks.world == 1:
            return names
        if self.ranks.max(int(not set(names) <= set(self.known_losses))):
            self.known_losses = self.ranks.union({*self.known_losses, *names})
        return self.known_losses

    def refuse_non_finite(
        self,
        totals: Mapping[str, tuple[float, float]],
        norms: Mapping[str, float],
        window: Sequence["_MicroBatch"],
    ) -> None:
        """Raise `RunError` before any optimizer step; all processes see the same sums and stop."""
        wrong = [f"loss {name}" for name, (total, _) in totals.items() if not math.isfinite(total)]
        wrong += [f"gradient of {name}" for name, norm in norms.items() if not math.isfinite(norm)]
        if wrong:
            ids = [one for part in window for one in part.ids]
            # name the samples of the process whose own sums are wrong; a bad gradient may have
            # finite sums
            local = [] if self.local_sums.isfinite().all() else ids
            named = self.ranks.union(local) or self.ranks.union(ids)
            raise RunError(
                f"{' and '.join(wrong)} is not finite at step {self.state.step} of stage "
                f"{self.stage!r} (samples {', '.join(named[:3])} ...); no weight was changed: "
                "lower train.rate, or check these samples"
            )

    def refuse_non_finite_weights(self) -> None:
        """Raise `RunError` rather than save non-finite weights.

        A finite gradient can cause them, with a too large learning rate or momentum, and the loss
        shows it only at the next step. All processes have the same weights and stop together.
        """
        wrong = [
            name
            for name, weight in self.model.named_parameters()
            if not bool(local_part(weight).isfinite().all())
        ]
        if self.sharded is not None:
            wrong = self.ranks.union(wrong)
        if wrong:
            raise RunError(
                f"weight {wrong[0]} is not finite after step {self.state.step} of stage "
                f"{self.stage!r}; it was not saved: lower train.rate"
            )

    def log_step(self, losses: Mapping[str, tuple[float, float]]) -> None:
        """Update the running means, and log them every `log_every` steps."""
        state = self.state
        for name, (total, count) in losses.items():
            meter = state.meters.setdefault(name, [0.0, 0.0])
            meter[0] += total
            meter[1] += count
        # `step` was already advanced
        state.samples += self.window_samples(state.step - 1)
        means = {
            name.removeprefix("model/"): total / max(count, 1.0)
            for name, (total, count) in state.meters.items()
        }
        self.reporter.step(state.step, means)
        if self.stats is not None:
            self.log.write({**self.now, "split": "train", "layers": self.stats.compute()})
            self.stats = None
        # --- one line in the log; the meters restart after it
        if state.step % self.config.log_every == 0 or state.step == self.steps:
            rate = next(iter(self.optimizers.values())).param_groups[0]["lr"]
            self.log.write({**self.now, "split": "train", "losses": means, "rate": rate})
            state.meters.clear()

    @property
    def now(self) -> dict[str, object]:
        """The first values of every training line of the log."""
        step = self.state.step
        return {"stage": self.stage, "step": step, "epoch": (step - 1) // self.steps_per_epoch}

    def window_samples(self, step: int) -> int:
        """Return the number of items in the window of a step, over all processes."""
        first = step % self.steps_per_epoch * self.config.accumulate * self.config.batch
        return min(len(self.data) - first, self.config.accumulate * self.config.batch)

    def validate(self, monitor: Monitor) -> None:
        """Validate, log the metrics, and save the best weights."""
        state = self.state
        # batch-norm statistics differ per process, as each saw its own part of the batches
        self.ranks.broadcast_tensors(self.model.buffers())
        self.model.eval()
        with torch.no_grad():
            metrics = (
                monitor.evaluate(self.model)
                if self.sharded is None
                else self.sharded.evaluate(lambda: monitor.evaluate(self.model))
            )
        found = {name: float(value) for name, value in metrics.items()}
        # rank 0 decides: rounding may differ between GPUs, and processes must not disagree about
        # stopping
        measures = dict(zip(found, self.ranks.broadcast([*found.values()]), strict=True))
        self.model.train()
        self.log.write(
            {
                "stage": self.stage,
                "step": state.step,
                "epoch": state.epoch,
                "split": "val",
                "measures": measures,
            }
        )
        self.reporter.validated(state.epoch, measures)
        if monitor.best not in measures:
            names = ", ".join(measures) or "no metrics"
            raise UserError(f"Monitor(best={monitor.best!r}) is not among its metrics: {names}")
        value = measures[monitor.best] * (1 if monitor.higher_is_better else -1)
        if value > (-math.inf if state.best is None else state.best):  # NaN is never the best
            state.best, state.best_step, state.waited = value, state.step, 0
            if self.config.patience is not None:
                self.save_best()
        else:
            state.waited += 1

    def save_best(self) -> None:
        """Save the weights without the state of the optimizers."""
        best = self.checkpoints / "best"
        if self.sharded is not None:
            with shared_folder(best, self.ranks) as folder:
                write_shards(folder / "model", self.model.state_dict())
        elif self.ranks.is_main:
            with io.atomic_folder(best) as folder:
                io.write_tensors(
                    folder / "model.safetensors", checkpoint.cpu_copies(self.model.state_dict())
                )

    def restore_best(self) -> None:
        """Restore the best weights on all processes."""
        if self.sharded is not None:
            io.verify(self.checkpoints / "best")
            checkpoint.load_model(self.checkpoints / "best", self.model)
            return
        if self.ranks.is_main:
            io.verify(self.checkpoints / "best")
            checkpoint.load_model(self.checkpoints / "best", self.model)
        self.ranks.broadcast_tensors(self.model.state_dict().values())

    # --- save, resume and stop

    def save(self) -> None:
        self.refuse_non_finite_weights()
        self.ranks.broadcast_tensors(self.model.buffers())
        # synced to disk before the checkpoint that refers to this size
        self.state.log_bytes = self.log.size()
        if self.sharded is not None:
            checkpoint.save_shards(
                self.checkpoints, self.state, self.model, self.optimizers, self.ranks
            )
        elif self.ranks.is_main:
            checkpoint.save(self.checkpoints, self.state, self.model, self.optimizers)
        self.ranks.barrier()

    def restore(self, resume: bool) -> None:
        if not self.checkpoints.is_dir():
            return
        if self.ranks.is_main:
            io.remove_stale_temporaries(self.checkpoints)
        self.ranks.barrier()
        found, broken = io.newest(self.checkpoints, checkpoint.PREFIX)
        if not resume:
            if found is not None or broken:
                raise UserError(
                    f"{self.checkpoints} already has checkpoints: add --resume to continue, or "
                    "choose another --out"
                )
            return
        for folder in broken:
            self.reporter.say(f"skipped the damaged checkpoint {folder}")
        if found is None:
            if broken:
                raise CorruptFileError(
                    f"{self.checkpoints} has no intact checkpoint: choose another --out to start "
                    "again"
                )
            return
        seed, plan = self.state.seed, self.state.plan
        self.state = checkpoint.load(found, self.model, self.optimizers)
        if self.state.seed != seed:
            raise UserError(
                f"{found} is from a run with seed {self.state.seed}, not {seed}: resume with that "
                "seed, or choose another --out"
            )
        # `plan` are the settings of this call, `former` those of the checkpoint
        former = self.state.plan or plan  # old checkpoints do not have it
        other = [
            f"{name} {former[name]}, not {plan[name]}"
            for name in plan
            if former[name] != plan[name]
        ]
        if other:
            raise UserError(
                f"cannot resume with different settings: {found} is from a run with "
                f"{', '.join(other)}; use the same, or choose another --out"
            )
        for one in self.sets.values():
            move_optimizer_state(one.optimizer, self.ranks.device)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Stop after the current step on SIGINT or SIGTERM; at once on a second SIGINT."""
        # Python allows signal handlers in the main thread only
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request_stop(number: int, frame: FrameType | None) -> None:
            if self.stop_signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.stop_signal = number
            with suppress(RuntimeError):  # the signal may have interrupted another print
                self.reporter.say("stopping after this step; press Ctrl-C again to stop at once")

        former = {
            number: signal.signal(number, request_stop)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class _MicroBatch:
    """One process's part of a batch; without `counts` it only keeps the process in step."""

    batch: Any
    counts: bool
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class _LossSums:
    """Sum, count and number of occurrences of each loss, on the device."""

    names: list[str]
    table: Tensor

    def count(self, name: str) -> Tensor:
        """Return the divisor of a loss: its count, at least 1."""
        return self.table[self.names.index(name), 1].clamp_min(1)


@dataclass(frozen=True)
class _StepNumbers:
    """Numbers of a step on the device: three per loss, then a gradient norm per set."""

    names: list[str]
    numbers: Tensor


def zero_losses(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """Return the losses with total and count 0, so that an idle process keeps in step."""
    return {
        # times 0, not a constant: the graph stays, so backward hooks and collectives run as
        # elsewhere
        name: Loss(loss.total * 0, loss.count * 0, loss.weight, loss.batch_level)
        for name, loss in losses.items()
    }


class _BatchDataset(torch.utils.data.Dataset[Any]):
    """A torch dataset of whole batches, for data-loading processes."""

    def __init__(self, data: TrainDataset, parts: Sequence[Sequence[int]]) -> None:
        self.data, self.parts = data, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self.data.batch(self.parts[index])


def add_gradients(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to a list of sums, initially empty, in place; None means zero."""
    if not sums:
        sums.extend(gradients)
        return
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            former = sums[place]
            sums[place] = gradient if former is None else former + gradient


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    return whole_tensor(norm)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place; a factor of 1 or more does nothing."""
    if factor < 1.0:
        # one kernel for many tensors
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
