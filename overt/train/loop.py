"""The one training loop.

A step is a function `(model, batch, progress) -> losses by parameter set`. Losses come as sums with
their counts, and are divided here, once, by the count over all processes and accumulated batches:
so gradients do not depend on how many machines there are or how a batch was cut up.
"""

import hashlib
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from overt import files
from overt.data.batch import Batch
from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.supervise.loss import Loss
from overt.train import checkpoint
from overt.train.checkpoint import State
from overt.train.monitor import AttentionMonitor, Pulse
from overt.train.processes import Processes, processes
from overt.train.recording import Card, Recorder, SealedProgress, fuse
from overt.train.report import Log, Reporter

Losses = Mapping[str, Mapping[str, Loss]]
Schedule = Callable[[float], float]


@runtime_checkable
class DataSet(Protocol):
    """What can be trained on: items by number, and batches made of them without chance."""

    def __len__(self) -> int: ...
    def batch(self, indices: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class Progress:
    """Where in its stage a step stands; `fraction` runs from 0 to 1."""

    step: int
    steps: int
    epoch: int

    @property
    def fraction(self) -> float:
        """The share of the stage that is done."""
        return self.step / max(1, self.steps)


Step = Callable[[nn.Module, Batch, Progress], Losses]
Before = Callable[[Progress], Hashable]


@dataclass
class ParameterSet:
    """Parameters that one optimizer moves, on losses that reach no other parameter.

    `schedule` gives the factor on the learning rate from the share of training that is done;
    `clip` is the largest gradient norm.
    """

    optimizer: torch.optim.Optimizer
    schedule: Schedule = field(default=lambda fraction: 1.0)
    clip: float | None = None

    def __post_init__(self) -> None:
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that this optimizer moves; frozen ones are none of them."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]


@dataclass(frozen=True)
class Limits:
    """How long to train, in what portions, and when to look up.

    With `graph` a single process on a CUDA card records its steps and replays them, one recording
    for each form of batch (`overt.train.recording`); elsewhere it changes nothing.
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

    def __post_init__(self) -> None:
        least = dict.fromkeys(("batch", "accumulate", "save_every", "log_every"), 1)
        for name, low in {**dict.fromkeys(_COUNTS, 0), **least}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise BadInput(f"{name} must be a whole number, not {value!r}")
            if value is not None and value < low:
                raise BadInput(f"{name} must be at least {low}, not {value}")


_COUNTS = ("epochs", "steps", "patience", "workers")  # may be 0: nothing of it


@dataclass(frozen=True)
class Monitor:
    """What validation looks at: `measure(model)` gives numbers, `best` names the decisive one."""

    measure: Callable[[nn.Module], Mapping[str, float]]
    best: str
    higher_is_better: bool = True


@dataclass(frozen=True)
class Fitted:
    """What a stage of training came to."""

    steps: int
    epochs: int
    samples: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """Training samples a second, over all processes."""
        return self.samples / max(self.seconds, 1e-9)


def warm_then_cosine(warmup: float = 0.1) -> Schedule:
    """A rate that climbs over the first `warmup` of training, then falls along a cosine to 0."""

    def factor(fraction: float) -> float:
        if fraction < warmup:
            return max(fraction / warmup, 0.01)
        return 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / max(1e-9, 1 - warmup)))

    return factor


def doubling(first: float = 0.01, every: float = 0.04) -> Schedule:
    """A rate that starts at `first` of its own and doubles each time `every` of training is done.

    It stays at its own once it is there. Relation networks learn CLEVR from pixels under such a
    warm-up and stop near 65 % without it: 5e-6, doubled every 20 epochs up to 5e-4, is
    `doubling(0.01, 20 / epochs)` on a rate of 5e-4, as public reproductions found.
    """
    if not (0 < first <= 1 and every > 0):
        raise ValueError(f"a rate cannot start at {first} of its own and double each {every}")

    def factor(fraction: float) -> float:
        # a hair more, so that 0.12 / 0.04 is three steps though it is stored as 2.9999
        steps = min(int(fraction / every + 1e-9), 60)
        return min(1.0, first * 2**steps)

    return factor


def fit(
    model: nn.Module,
    data: DataSet,
    step: Step,
    sets: Mapping[str, ParameterSet],
    limits: Limits,
    *,
    out: Path | str,
    seed: int,
    stage: str = "train",
    device: str = "auto",
    monitor: Monitor | None = None,
    attention: AttentionMonitor | None = None,
    before: Before | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
) -> Fitted:
    """Train `model` in place, leaving checkpoints and a log under `out`.

    With `resume` the newest whole checkpoint of the stage is taken up and the run goes on as if it
    had never stopped: bit for bit on one CPU process, or on a GPU under deterministic algorithms.
    SIGINT and SIGTERM save after the current step and raise `Stopped`; a loss or gradient that is
    not finite raises `Failed` before any optimizer has moved, and weights that are not finite are
    never saved. With `limits.patience` training ends
    as soon as more than that many validations in a row bring no new best, and the best weights are
    put back. With `attention` the log also tells how each layer's attention does, now and then.

    `before(progress)` is called ahead of every step and is the place for what follows a schedule:
    where steps are recorded, Python within them runs but a few times. It changes tensors in place,
    and returns what tells apart steps that must not share a recording.

    Several processes share each batch and take the same steps as one would, as far as samples do
    not depend on each other: batch norm and batch-level losses see the share of their process, and
    dropout draws other numbers. All start from the weights of the first process, which alone
    writes files and decides on validations.
    """
    check_data(data, stage)
    check_sets(sets, model)
    check_monitor(monitor, limits)
    ranks = processes(device)
    model.to(ranks.device)
    for one in sets.values():
        move_state(one.optimizer, ranks.device)
    run = _Run(
        model,
        data,
        step,
        dict(sets),
        limits,
        Path(out),
        seed,
        stage,
        ranks,
        monitor,
        reporter,
        attention,
        before,
    )
    return run.go(resume)


def check_data(data: DataSet, stage: str) -> None:
    """Refuse what has no batches by number, and what is empty."""
    if not isinstance(data, DataSet):
        raise BadInput(
            f"a {type(data).__name__} is not data that can be trained on: it needs `len(data)` and "
            "`data.batch(indices)`, which gives a Batch; the order is made here, and resumed"
        )
    if not len(data):
        raise BadInput(f"there is nothing to train on in stage {stage!r}")


def check_sets(sets: Mapping[str, ParameterSet], model: nn.Module) -> None:
    """Refuse sets that share a parameter, and parameters that no checkpoint would hold.

    Each parameter must be moved by one optimizer alone, and be one of the model's.
    """
    wanted = '{"model": ParameterSet(optimizer)}'
    if not isinstance(sets, Mapping) or not sets:
        what = "nothing" if isinstance(sets, Mapping) else type(sets).__name__
        raise BadInput(f"parameters come in sets by name, as in {wanted}, not as {what}")
    ours = {id(parameter) for parameter in model.parameters()}
    owner: dict[int, str] = {}
    for name, one in sets.items():
        if not isinstance(one, ParameterSet):
            raise BadInput(f"set {name!r} is given as {type(one).__name__}, not as in {wanted}")
        for parameter in one.parameters:
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(f"sets {other!r} and {name!r} share a parameter")
        strange = sum(id(parameter) not in ours for parameter in one.parameters)
        if strange:
            raise BadInput(
                f"set {name!r} moves {strange} parameters that are not the model's, and would not "
                "be saved: make the optimizer of this model, with all that learns as a part of it"
            )


def check_monitor(monitor: Monitor | None, limits: Limits) -> None:
    """Refuse a validation that cannot be asked, and patience that has none to wait for."""
    if monitor is not None and not isinstance(monitor, Monitor):
        raise BadInput(
            f'the monitor is a {type(monitor).__name__}; give Monitor(measure, best="accuracy")'
        )
    if limits.patience is not None and monitor is None:
        raise BadInput(
            "patience waits for a better validation, and there is none here: give a monitor, or "
            "leave patience out"
        )


def check_losses(losses: Losses, sets: Iterable[str]) -> None:
    """Refuse what a step must not return."""
    wanted = 'a step returns {"model": {"task": Loss(total, count)}}, losses by parameter set'
    if not isinstance(losses, Mapping):
        raise BadInput(f"{wanted}; this one returned a {type(losses).__name__}")
    unknown = set(losses) - set(sets)
    if unknown:
        raise BadInput(f"losses for {sorted(unknown)}, but the sets are {sorted(sets)}")
    for set_name, group in losses.items():
        if not isinstance(group, Mapping):
            raise BadInput(f"{wanted}; {set_name!r} is a {type(group).__name__}")
        for name, loss in group.items():
            if not isinstance(loss, Loss):
                raise BadInput(f"{wanted}; {name!r} is a {type(loss).__name__}")
            for part, value in (("total", loss.total), ("count", loss.count)):
                if not isinstance(value, Tensor) or value.ndim:
                    what = list(value.shape) if isinstance(value, Tensor) else repr(value)
                    raise BadInput(
                        f"the {part} of loss {name!r} is {what}, not a tensor of one number"
                    )


def check_gradients(losses: Losses) -> None:
    """Refuse losses that nothing can be learned from, though they are not zero."""
    for set_name, group in losses.items():
        if any(one.total.requires_grad for one in group.values()):
            continue
        if any(bool(one.count) and bool(one.total) for one in group.values()):
            raise BadInput(
                f"no loss of set {set_name!r} has a gradient: it was detached, or computed under "
                "no_grad, and nothing would be learned"
            )


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Bring what an optimizer remembers to the device of its parameters."""
    for slots in optimizer.state.values():
        for name, value in slots.items():
            if isinstance(value, Tensor) and name != "step":
                slots[name] = value.to(device)


def mixed(*parts: object) -> int:
    """One seed out of several values, the same in every process and on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def leave_signals(worker: int) -> None:
    """In a process that loads data: signals to all of us are for the main process to answer.

    It still has to finish its step, and then ends the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def seed_everything(value: int) -> None:
    """Set the state of every random generator a step may use, on the devices that are in use.

    `torch.manual_seed` also leaves a note for every kind of device that is not, with the stack it
    came from, which takes longer than a small network's forward pass.
    """
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  a step may call code that uses it
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(value)


class _Run:
    """The state of one call of `fit`, and the loop over it."""

    def __init__(
        self,
        model: nn.Module,
        data: DataSet,
        step: Step,
        sets: dict[str, ParameterSet],
        limits: Limits,
        out: Path,
        seed: int,
        stage: str,
        ranks: Processes,
        monitor: Monitor | None,
        reporter: Reporter | None,
        attention: AttentionMonitor | None,
        before: Before | None,
    ) -> None:
        self.model, self.data, self.step, self.sets = model, data, step, sets
        self.limits, self.stage, self.ranks, self.monitor = limits, stage, ranks, monitor
        self.state = State(stage, seed)
        self.checkpoints = out / "checkpoints" / stage
        self.log = Log(out, enabled=ranks.first)
        self.reporter = reporter if reporter and ranks.first else Reporter(enabled=ranks.first)
        self.attention, self.before = attention, before
        self.pulse: Pulse | None = None
        self.stop_signal = 0
        self.fresh = True  # no step of this process was made yet
        self.agreed: list[str] = []
        self.own = torch.zeros(0)  # sums of this process at the latest step
        self.micro_per_epoch = math.ceil(len(data) / limits.batch)
        self.steps_per_epoch = math.ceil(self.micro_per_epoch / limits.accumulate)
        self.steps = limits.epochs * self.steps_per_epoch
        if limits.steps is not None:
            self.steps = min(self.steps, limits.steps)
        self.state.plan = {
            "items": len(data),
            "batch": limits.batch,
            "accumulate": limits.accumulate,
            "steps": self.steps,
        }
        self.optimizers = {name: one.optimizer for name, one in sets.items()}
        self.recorder: Recorder[Batch, _Gradients] | None = None

    # --- the loop

    def go(self, resume: bool) -> Fitted:
        self.restore(resume)
        if self.limits.graph and self.ranks.device.type == "cuda" and self.ranks.world == 1:
            self.record()
        self.ranks.share(self.model.state_dict().values())
        state = self.state
        if not state.done:
            try:
                self.log.open(state.log_bytes if state.step else self.log.before(self.stage))
                with self.signals(), self.reporter.stage(self.stage, self.steps, state.step):
                    self.train()
            finally:
                self.log.close()
        self.model.eval()
        return Fitted(state.step, state.epoch, state.samples, state.seconds)

    def train(self) -> None:
        state = self.state
        self.model.train()
        mark = time.perf_counter()
        for window in self.windows():
            losses = self.update(window)
            state.step += 1
            now = time.perf_counter()
            state.seconds, mark = state.seconds + now - mark, now
            self.note(losses)
            epoch_over = state.step % self.steps_per_epoch == 0
            state.epoch = state.step // self.steps_per_epoch
            last = state.step == self.steps
            if (epoch_over or last) and self.monitor is not None:
                self.validate(self.monitor)
                now = time.perf_counter()
                state.seconds, mark = state.seconds + now - mark, now
            patience = self.limits.patience
            state.done = last or (patience is not None and state.waited > patience)
            if state.done and patience is not None and state.best is not None:
                self.share_best()
            stopped = self.ranks.largest(self.stop_signal)
            if state.done or stopped or state.step % self.limits.save_every == 0:
                self.save()
            if stopped:  # at the end of a stage too: another one may follow
                raise Stopped(
                    f"stopped at step {state.step} of {self.steps} of stage {self.stage!r} and "
                    "saved; the same command with --resume goes on from there",
                    stopped,
                )
            if state.done:
                return

    def update(self, window: Sequence["_Part"]) -> dict[str, tuple[float, float]]:
        """One optimizer step of every set, on the batches of one accumulation window."""
        for one in self.sets.values():
            for group, rate in zip(one.optimizer.param_groups, one.rates, strict=True):
                group["lr"] = rate * one.schedule(self.progress.fraction)
            one.optimizer.zero_grad(set_to_none=True)
        found = self.gradients(window)
        totals, norms = self.read(found)
        self.refuse_non_finite(totals, norms, window)
        for name, one in self.sets.items():
            if one.clip is not None:
                scale_gradients(one.parameters, min(1.0, one.clip / (norms[name] + 1e-6)))
            one.optimizer.step()
        return totals

    def gradients(self, window: Sequence["_Part"]) -> "_Gradients":
        """The gradients of a window in the parameters: made, or replayed where that can be."""
        case = None if self.before is None else self.before(self.progress)
        alone = len(window) == 1 and not self.due
        if self.recorder is not None and alone:
            self.seed(0)
            return self.recorder(window[0].batch, case)
        return self.made(window)

    def record(self) -> None:
        """From now on, record steps and replay them."""
        card = Card()
        parameters = [p for one in self.sets.values() for p in one.parameters]
        self.recorder = Recorder(
            lambda batch: self.made([_Part(batch, counts=True)]),
            parameters,
            card.record,
            card.beside,
        )
        for optimizer in self.optimizers.values():
            fuse(optimizer)

    def made(self, window: Sequence["_Part"]) -> "_Gradients":
        """The gradients of a window, summed over all processes, and their lengths by set."""
        sums = self.accumulate(window) if len(window) > 1 else self.at_once(window[0])
        lengths = []
        for one in self.sets.values():
            self.ranks.sum_gradients(one.parameters)
            lengths.append(gradient_norm(one.parameters).to(sums.table))
        return _Gradients(sums.names, torch.cat([sums.table.flatten(), torch.stack(lengths)]))

    def at_once(self, part: "_Part") -> "_Sums":
        """The gradients of a window of one batch: all counts are known before the backward pass."""
        losses = self.forward(part, 0)
        sums = self.totals([losses])
        remaining = len(losses)
        for set_name, group in losses.items():
            objective = torch.zeros((), device=self.ranks.device)
            for loss_name, loss in group.items():
                count = sums.count(f"{set_name}/{loss_name}").to(loss.total)
                objective = objective + loss.weight * loss.total / count
            remaining -= 1
            if objective.requires_grad:
                objective.backward(
                    inputs=self.sets[set_name].parameters, retain_graph=remaining > 0
                )
        return sums

    def accumulate(self, window: Sequence["_Part"]) -> "_Sums":
        """The gradients of several batches: each loss is summed apart and divided at the end."""
        kept: list[Losses] = []
        sums_of: dict[str, list[Tensor | None]] = {}
        for micro, part in enumerate(window):
            losses = self.forward(part, micro)
            flat = [(s, n, loss) for s, group in losses.items() for n, loss in group.items()]
            for place, (set_name, loss_name, loss) in enumerate(flat):
                if loss.batch_level:
                    raise BadInput(
                        f"loss {loss_name!r} compares whole batches and cannot be accumulated; "
                        "set train.accumulate=1"
                    )
                if not loss.total.requires_grad:
                    continue
                gradients = torch.autograd.grad(
                    loss.weight * loss.total,
                    self.sets[set_name].parameters,
                    retain_graph=place + 1 < len(flat),
                    allow_unused=True,
                )
                add(sums_of.setdefault(f"{set_name}/{loss_name}", []), gradients)
            kept.append(
                {
                    s: {n: Loss(one.total.detach(), one.count) for n, one in group.items()}
                    for s, group in losses.items()
                }
            )
        sums = self.totals(kept)
        for name, gradients_of in sums_of.items():
            parameters = self.sets[name.split("/")[0]].parameters
            for parameter, gradient in zip(parameters, gradients_of, strict=True):
                if gradient is not None:
                    share = gradient / sums.count(name).to(gradient)
                    parameter.grad = share if parameter.grad is None else parameter.grad + share
        return sums

    def forward(self, part: "_Part", micro: int) -> Losses:
        """The losses of one batch, with random numbers that depend on nothing but the counters."""
        recording = self.recorder is not None and self.recorder.recording
        if not recording:
            self.seed(micro)
        progress = cast(Progress, SealedProgress()) if recording else self.progress
        with (
            torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.limits.bf16),
            self.looking(micro),
        ):
            losses = self.step(self.model, part.batch, progress)
        check_losses(losses, self.sets)
        if self.fresh and not recording:
            check_gradients(losses)
            self.fresh = False
        return losses if part.counts else {name: nothing(group) for name, group in losses.items()}

    def seed(self, micro: int) -> None:
        """Set every random generator for one batch of the step."""
        state = self.state
        seed_everything(mixed(state.seed, state.stage, state.step, micro, self.ranks.rank))

    @property
    def due(self) -> bool:
        """Whether the attention of this step is looked at, here."""
        at = self.attention
        return at is not None and self.ranks.first and at.due(self.state.step)

    @contextmanager
    def looking(self, micro: int) -> Iterator[None]:
        """Watch the attention of this step if its turn has come."""
        if self.attention is None or micro or not self.due:
            yield
            return
        with self.attention.looking(self.model) as self.pulse:
            yield

    # --- what the loop is made of

    @property
    def progress(self) -> Progress:
        return Progress(self.state.step, self.steps, self.state.epoch)

    def windows(self) -> Iterator[list["_Part"]]:
        """The batches of each optimizer step still to be made, in the order of its epoch."""
        state, limits = self.state, self.limits
        while state.step < self.steps:
            epoch, done = divmod(state.step, self.steps_per_epoch)
            generator = torch.Generator().manual_seed(
                mixed(state.seed, state.stage, "order", epoch)
            )
            order = torch.randperm(len(self.data), generator=generator).tolist()
            parts = [
                order[start : start + limits.batch] for start in range(0, len(order), limits.batch)
            ]
            parts = parts[done * limits.accumulate :]
            window: list[_Part] = []
            remaining = len(parts)
            for part, batch in zip(parts, self.batches(parts), strict=True):
                if not isinstance(batch, Batch):
                    raise BadInput(
                        f"the data gave a {type(batch).__name__}, and not a Batch: "
                        "Batch(ids, images=..., labels=...) makes one"
                    )
                counts = bool(self.ranks.slice(part))
                window.append(_Part(batch.to(self.ranks.device), counts))
                remaining -= 1
                if len(window) == limits.accumulate or not remaining:
                    yield window
                    window = []
                    if state.step >= self.steps:
                        return

    def batches(self, parts: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """This process's share of each batch, or one item that counts nothing where it has none."""
        mine = [self.ranks.slice(part) or [part[0]] for part in parts]
        if not self.limits.workers:
            yield from (self.data.batch(part) for part in mine)
            return
        yield from torch.utils.data.DataLoader(
            _Batches(self.data, mine),
            batch_size=None,
            num_workers=self.limits.workers,
            worker_init_fn=leave_signals,
        )

    def totals(self, losses: Sequence[Losses]) -> "_Sums":
        """Sum and count of every loss, over a window and over all processes.

        A process may lack a loss that another has.
        """
        there = torch.ones((), device=self.ranks.device, dtype=self.ranks.exact)
        table: dict[str, list[Tensor]] = {}
        for one in losses:
            for set_name, group in one.items():
                for loss_name, loss in group.items():
                    row = torch.stack([loss.total.detach().to(there), loss.count.to(there), there])
                    table.setdefault(f"{set_name}/{loss_name}", []).append(row)
        names = self.agree(sorted(table))
        if not names:
            raise BadInput(f"no loss at step {self.state.step} of stage {self.stage!r}")
        none = [there.new_zeros(3)]
        self.own = torch.stack([torch.stack(table.get(name, none)).sum(dim=0) for name in names])
        return _Sums(names, self.ranks.sum(self.own))

    def read(self, found: "_Gradients") -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """The losses and the lengths of the gradients as numbers.

        All in one go, and not before the backward pass is under way: a card is waited for once a
        step. A loss that no process has is left out.
        """
        flat, sums = found.numbers.tolist(), 3 * len(found.names)
        totals = {
            name: (flat[place], flat[place + 1])
            for name, place in zip(found.names, range(0, sums, 3), strict=True)
            if flat[place + 2]
        }
        return totals, dict(zip(self.sets, flat[sums:], strict=True))

    def agree(self, names: list[str]) -> list[str]:
        """The names of all losses on all processes, which must send messages of one size."""
        if self.ranks.world == 1:
            return names
        if self.ranks.largest(int(not set(names) <= set(self.agreed))):
            self.agreed = self.ranks.union({*self.agreed, *names})
        return self.agreed

    def refuse_non_finite(
        self,
        totals: Mapping[str, tuple[float, float]],
        norms: Mapping[str, float],
        window: Sequence["_Part"],
    ) -> None:
        """Stop before any optimizer moves; all processes see the same sums and stop together."""
        wrong = [f"loss {name}" for name, (total, _) in totals.items() if not math.isfinite(total)]
        wrong += [f"gradient of {name}" for name, norm in norms.items() if not math.isfinite(norm)]
        if wrong:
            ids = [one for part in window for one in part.batch.ids]
            guilty = [] if self.own.isfinite().all() else ids
            named = self.ranks.union(guilty) or self.ranks.union(ids)
            raise Failed(
                f"{' and '.join(wrong)} is not finite at step {self.state.step} of stage "
                f"{self.stage!r} (samples {', '.join(named[:3])} ...); no weight was changed: "
                "lower train.rate, or look at those samples"
            )

    def refuse_rotten(self) -> None:
        """Keep weights that an optimizer has driven to infinity out of every checkpoint.

        A finite gradient can do that, by a rate or a momentum that is too large, and the loss tells
        only at the next step. All processes have the same weights and stop together.
        """
        for name, weight in self.model.named_parameters():
            if not bool(weight.isfinite().all()):
                raise Failed(
                    f"weight {name} is not finite after step {self.state.step} of stage "
                    f"{self.stage!r}; nothing was saved after it: lower train.rate"
                )

    def note(self, losses: Mapping[str, tuple[float, float]]) -> None:
        """Add to the running means, and write them down every `log_every` steps."""
        state = self.state
        for name, (total, count) in losses.items():
            meter = state.meters.setdefault(name, [0.0, 0.0])
            meter[0] += total
            meter[1] += count
        state.samples += self.window_samples(state.step - 1)
        means = {
            name.removeprefix("model/"): total / max(count, 1.0)
            for name, (total, count) in state.meters.items()
        }
        self.reporter.step(state.step, means)
        if self.pulse is not None:
            self.log.write({**self.now, "split": "train", "layers": self.pulse.read()})
            self.pulse = None
        if state.step % self.limits.log_every == 0 or state.step == self.steps:
            rate = next(iter(self.optimizers.values())).param_groups[0]["lr"]
            self.log.write({**self.now, "split": "train", "losses": means, "rate": rate})
            state.meters.clear()

    @property
    def now(self) -> dict[str, object]:
        """What every line of the log about training starts with."""
        step = self.state.step
        return {"stage": self.stage, "step": step, "epoch": (step - 1) // self.steps_per_epoch}

    def window_samples(self, step: int) -> int:
        """How many items the window of a step holds, over all processes."""
        first = step % self.steps_per_epoch * self.limits.accumulate * self.limits.batch
        return min(len(self.data) - first, self.limits.accumulate * self.limits.batch)

    def validate(self, monitor: Monitor) -> None:
        """Measure, write down, and keep the best weights."""
        state = self.state
        self.ranks.share(self.model.buffers())
        self.model.eval()
        with torch.no_grad():
            found = {name: float(value) for name, value in monitor.measure(self.model).items()}
        measures = dict(zip(found, self.ranks.of_first([*found.values()]), strict=True))
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
        self.reporter.measured(state.epoch, measures)
        if monitor.best not in measures:
            names = ", ".join(measures) or "nothing"
            raise BadInput(f"the monitor goes by {monitor.best!r}, and measured {names}")
        value = measures[monitor.best] * (1 if monitor.higher_is_better else -1)
        if value > (-math.inf if state.best is None else state.best):  # NaN is no best
            state.best, state.best_step, state.waited = value, state.step, 0
            if self.ranks.first and self.limits.patience is not None:
                with files.writing(self.checkpoints / "best") as folder:
                    files.write_tensors(
                        folder / "model.safetensors", checkpoint.copy_of(self.model.state_dict())
                    )
        else:
            state.waited += 1

    def share_best(self) -> None:
        """Put the best weights back, on all processes."""
        if self.ranks.first:
            files.verify(self.checkpoints / "best")
            checkpoint.load_model(self.checkpoints / "best", self.model)
        self.ranks.share(self.model.state_dict().values())

    # --- stopping and going on

    def save(self) -> None:
        self.refuse_rotten()
        self.ranks.share(self.model.buffers())
        self.state.log_bytes = self.log.size()
        if self.ranks.first:
            checkpoint.save(self.checkpoints, self.state, self.model, self.optimizers)
        self.ranks.wait()

    def restore(self, resume: bool) -> None:
        if not self.checkpoints.is_dir():
            return
        if self.ranks.first:
            files.sweep(self.checkpoints)
        self.ranks.wait()
        found, broken = files.newest(self.checkpoints, checkpoint.PREFIX)
        if not resume:
            if found is not None or broken:
                raise BadInput(
                    f"{self.checkpoints} already holds checkpoints; add --resume to go on, or "
                    "choose another --out"
                )
            return
        for folder in broken:
            self.reporter.say(f"checkpoint {folder} is damaged and was passed over")
        if found is None:
            if broken:
                raise Damaged(
                    f"no whole checkpoint is left in {self.checkpoints}; choose another --out to "
                    "start again"
                )
            return
        seed, plan = self.state.seed, self.state.plan
        self.state = checkpoint.load(found, self.model, self.optimizers)
        if self.state.seed != seed:
            raise BadInput(
                f"{found} was left by a run with seed {self.state.seed}, not {seed}; go on with "
                "that seed, or choose another --out"
            )
        former = self.state.plan or plan  # checkpoints of before do not tell
        other = [
            f"{name} {former[name]}, not {plan[name]}"
            for name in plan
            if former[name] != plan[name]
        ]
        if other:
            raise BadInput(
                f"{found} was left by a run with {', '.join(other)}; a run goes on only as it "
                "began: go on with the same, or choose another --out"
            )
        for one in self.sets.values():
            move_state(one.optimizer, self.ranks.device)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a stop after the step; a second SIGINT does not wait."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop_signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.stop_signal = number
            with suppress(RuntimeError):  # it may have come in the middle of another line
                self.reporter.say("stopping after this step; press Ctrl-C again to stop at once")

        former = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class _Part:
    """One process's share of a batch; it may have been given items only to keep step."""

    batch: Batch
    counts: bool


@dataclass(frozen=True)
class _Sums:
    """Sum, count and number of occurrences of each loss, still where they were computed."""

    names: list[str]
    table: Tensor

    def count(self, name: str) -> Tensor:
        """What to divide a loss by: its rows, or 1 where it has none."""
        return self.table[self.names.index(name), 1].clamp_min(1)


@dataclass(frozen=True)
class _Gradients:
    """What is told of the gradients of a step: three numbers a loss, then a length a set."""

    names: list[str]
    numbers: Tensor


def nothing(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """The same losses with no weight and no rows, so that an idle process keeps in step."""
    return {
        name: Loss(loss.total * 0, loss.count * 0, loss.weight, loss.batch_level)
        for name, loss in losses.items()
    }


class _Batches(torch.utils.data.Dataset[Batch]):
    """Lists of items as a data set of ready batches, for loading in other processes."""

    def __init__(self, data: DataSet, parts: Sequence[Sequence[int]]) -> None:
        self.data, self.parts = data, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Batch:
        return self.data.batch(self.parts[index])


def add(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to a list of sums that starts empty; None stands for zero."""
    if not sums:
        sums.extend(gradients)
        return
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            former = sums[place]
            sums[place] = gradient if former is None else former + gradient


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The length of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient; a factor of one leaves the bits alone."""
    if factor < 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
