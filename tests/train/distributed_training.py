"""Train cases that give the same result in one and two processes.

Run `torchrun -m tests.train.distributed_training OUT WORD...`. WORD is a case, `case:resume`, or
`case:elastic`, which resumes if there are checkpoints.

Every process writes OUT/WORD-ends/rank-N.json and rank-N.safetensors: its outcome and its weights.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt import io
from overt.data.batch import Batch
from overt.errors import RunError, RunInterrupted
from overt.losses.loss import Loss
from overt.train import FitConfig, Losses, Monitor, ParameterSet, Progress, Reporter, fit, processes
from tests.train import toys


class Net(toys.Net):
    """A toy network without dropout, with a head used in some steps and an unused weight."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.rare = nn.Linear(16, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(16)  # its buffers change, its output is not used
        self.double()


class Numbers(toys.Numbers):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.features = self.features.double()


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """The toy step, with a loss that is missing if no row has it, and one that starts at step 3."""
    assert isinstance(model, Net) and batch.labels is not None
    losses = toys.step(model, batch, progress)
    hidden = model.hidden(batch)
    model.norm(hidden.detach()) if len(batch) > 1 else None
    extra = dict(losses["model"])
    rows = batch.labels == 0
    if rows.any():
        extra["rare"] = Loss((model.rare(hidden)[:, 0].square() * rows).sum(), rows.sum())
    if progress.step >= 3:
        extra["late"] = Loss(hidden.square().sum(), torch.tensor(len(batch)))
    return {**losses, "model": extra}


@dataclass(frozen=True)
class Case:
    """A training case: process `rank` calls `act` at step `at`."""

    count: int = 50
    config: FitConfig = FitConfig(epochs=2, batch=8, log_every=2)  # noqa: RUF009  frozen
    act: Callable[[Losses], Losses] = lambda losses: losses
    at: int = -1
    rank: int = 1


def make_loss_nan(losses: Losses) -> Losses:
    guess = losses["adversary"]["guess"]
    return {**losses, "adversary": {"guess": Loss(guess.total * float("nan"), guess.count)}}


def send_sigterm(losses: Losses) -> Losses:
    os.kill(os.getpid(), signal.SIGTERM)
    return losses


def send_sigkill(losses: Losses) -> Losses:
    os.kill(os.getpid(), signal.SIGKILL)
    return losses


def send_sigkill_once(losses: Losses) -> Losses:
    """Kill the process, but only before the first restart by `torchrun --max-restarts`."""
    return (
        send_sigkill(losses) if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else losses
    )


LONG = FitConfig(epochs=4, batch=8, log_every=3, save_every=4)
CASES = {
    **{
        f"last{last}-accumulate{accumulate}": Case(
            24 + last, FitConfig(epochs=2, batch=8, accumulate=accumulate, log_every=2)
        )
        for last in (1, 3)  # rows in the last batch of an epoch: fewer than processes, or uneven
        for accumulate in (1, 2, 4)
    },
    "small": Case(9, FitConfig(epochs=3, batch=2, log_every=2)),  # often no class 0 in a process
    "poison": Case(act=make_loss_nan, at=3),
    "stop": Case(config=LONG, act=send_sigterm, at=5),
    "patience": Case(config=FitConfig(epochs=6, batch=8, patience=1)),
    "workers": Case(config=FitConfig(epochs=2, batch=8, workers=1)),
    "slow": Case(config=replace(LONG, epochs=60)),
    "long": Case(config=LONG),
    "stop-first": Case(config=LONG, act=send_sigterm, at=9, rank=0),
    "killed": Case(config=LONG, act=send_sigkill, at=10),
    "killed-once": Case(config=LONG, act=send_sigkill_once, at=10),
}


class CountingReporter(Reporter):
    """A reporter that counts its messages."""

    messages = 0

    def say(self, sentence: str) -> None:
        self.messages += 1


def run(case: Case, out: Path, resume: bool = False, pause: float = 0.0) -> None:
    """Train one case and write the outcome of this process."""
    ranks = processes("cpu")
    torch.manual_seed(ranks.rank)  # the weights of the first process are broadcast
    net = Net()
    extra = [p for name, p in net.named_parameters() if not name.startswith("adversary")]
    sets = {
        "model": ParameterSet(torch.optim.AdamW(extra, lr=1e-2, weight_decay=0.1), clip=1.0),
        "adversary": ParameterSet(
            torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
        ),
    }
    written = record_written_files(out) if ranks.world > 1 else set()
    at_step: dict[str, Any] = {}

    def act(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = step(model, batch, progress)
        time.sleep(pause)
        if progress.step == case.at:
            at_step["ids"] = list(batch.ids)
            at_step["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            return case.act(losses) if ranks.rank == case.rank % ranks.world else losses
        return losses

    scores = iter(
        [0.1, 0.5, 0.4, 0.3, 0.2, 0.9] if ranks.is_main else [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    monitor = Monitor(lambda model: {"score": next(scores)}, "score")
    reporter, outcome = CountingReporter(), "done"
    data, used_monitor = Numbers(case.count), monitor if case.config.patience is not None else None
    try:
        fitted = fit(
            net, data, act, sets, case.config, out=out, seed=0, device="cpu", monitor=used_monitor,
            resume=resume, reporter=reporter,
        )  # fmt: skip
        outcome = f"done {fitted.steps} {fitted.samples}"
    except (RunError, RunInterrupted) as error:
        outcome = f"{type(error).__name__}: {error}"
    unchanged = all(
        torch.equal(p, dict(net.named_parameters())[n])
        for n, p in at_step.get("weights", {}).items()
    )
    report = {
        "outcome": outcome,
        "messages": reporter.messages,
        "written": [*written],
        "weights_unchanged": unchanged,
    }
    report["ids"] = at_step.get("ids", [])
    place = out.parent / f"{out.name}-ends"
    place.mkdir(parents=True, exist_ok=True)
    io.write_json(place / f"rank-{ranks.rank}.json", report)
    io.write_tensors(place / f"rank-{ranks.rank}.safetensors", net.state_dict())


def record_written_files(out: Path) -> set[str]:
    """Return a set that collects every file below `out` that this process opens for writing."""
    found: set[str] = set()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{out}/"):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                found.add(str(arguments[0]))
        elif event in ("os.mkdir", "os.rename") and str(arguments[0]).startswith(f"{out}/"):
            found.add(str(arguments[0]))

    sys.addaudithook(audit)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, _, how = word.partition(":")
        there = (place / name / "checkpoints").exists()
        run(
            CASES[name],
            place / name,
            resume=how == "resume" or (how == "elastic" and there),
            pause=0.02 if "slow" in name else 0.0,
        )
