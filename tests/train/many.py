"""Training that one process and two must agree on: `torchrun -m tests.train.many OUT WORD...`.

WORD is a case, `case:resume`, or `case:elastic`, which resumes where there is something to resume.

Every process leaves OUT/WORD/rank-N.json and rank-N.safetensors: how it ended, and its weights.
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

from overt import files
from overt.data.batch import Batch
from overt.errors import Failed, Stopped
from overt.supervise.loss import Loss
from overt.train import Limits, Losses, Monitor, ParameterSet, Progress, Reporter, fit, processes
from tests.train import toys


class Net(toys.Net):
    """Without dropout, with a head that only some steps reach and a weight that none does."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.rare = nn.Linear(16, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(16)  # its buffers move, its output goes nowhere
        self.double()


class Numbers(toys.Numbers):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.features = self.features.double()


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """The toy step, with a loss that is not there where no row has it, and one that comes late."""
    assert isinstance(model, Net) and batch.labels is not None
    losses = toys.step(model, batch, progress)
    hidden = model.hidden(batch)
    model.norm(hidden.detach()) if len(batch) > 1 else None
    own = dict(losses["model"])
    rows = batch.labels == 0
    if rows.any():
        own["rare"] = Loss((model.rare(hidden)[:, 0].square() * rows).sum(), rows.sum())
    if progress.step >= 3:
        own["late"] = Loss(hidden.square().sum(), torch.tensor(len(batch)))
    return {**losses, "model": own}


@dataclass(frozen=True)
class Case:
    """`at` is the step at which process `who` does `act`."""

    count: int = 50
    limits: Limits = Limits(epochs=2, batch=8, log_every=2)  # noqa: RUF009  frozen
    act: Callable[[Losses], Losses] = lambda losses: losses
    at: int = -1
    who: int = 1


def poison(losses: Losses) -> Losses:
    guess = losses["adversary"]["guess"]
    return {**losses, "adversary": {"guess": Loss(guess.total * float("nan"), guess.count)}}


def end(losses: Losses) -> Losses:
    os.kill(os.getpid(), signal.SIGTERM)
    return losses


def die(losses: Losses) -> Losses:
    os.kill(os.getpid(), signal.SIGKILL)
    return losses


def die_once(losses: Losses) -> Losses:
    """Only in the first life of a run that `torchrun --max-restarts` starts again."""
    return die(losses) if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else losses


LONG = Limits(epochs=4, batch=8, log_every=3, save_every=4)
CASES = {
    **{
        f"last{last}-accumulate{accumulate}": Case(
            24 + last, Limits(epochs=2, batch=8, accumulate=accumulate, log_every=2)
        )
        for last in (1, 3)  # rows in the last batch of an epoch: fewer than processes, uneven
        for accumulate in (1, 2, 4)
    },
    "small": Case(9, Limits(epochs=3, batch=2, log_every=2)),  # often a process has no class 0
    "poison": Case(act=poison, at=3),
    "stop": Case(limits=LONG, act=end, at=5),
    "patience": Case(limits=Limits(epochs=6, batch=8, patience=1)),
    "workers": Case(limits=Limits(epochs=2, batch=8, workers=1)),
    "slow": Case(limits=replace(LONG, epochs=60)),
    "long": Case(limits=LONG),
    "stop-first": Case(limits=LONG, act=end, at=9, who=0),
    "killed": Case(limits=LONG, act=die, at=10),
    "mortal": Case(limits=LONG, act=die_once, at=10),
}


class Aloud(Reporter):
    """A reporter that remembers whether anything was said."""

    said = 0

    def say(self, sentence: str) -> None:
        self.said += 1


def run(case: Case, out: Path, resume: bool = False, pause: float = 0.0) -> None:
    """Train one case, and write down how it ended here."""
    ranks = processes("cpu")
    torch.manual_seed(ranks.rank)  # the first process decides on the weights
    net = Net()
    own = [p for name, p in net.named_parameters() if not name.startswith("adversary")]
    sets = {
        "model": ParameterSet(torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1), clip=1.0),
        "adversary": ParameterSet(
            torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
        ),
    }
    written = writes(out) if ranks.world > 1 else set()
    seen: dict[str, Any] = {}

    def act(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = step(model, batch, progress)
        time.sleep(pause)
        if progress.step == case.at:
            seen["ids"] = list(batch.ids)
            seen["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            return case.act(losses) if ranks.rank == case.who % ranks.world else losses
        return losses

    scores = iter([0.1, 0.5, 0.4, 0.3, 0.2, 0.9] if ranks.first else [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    monitor = Monitor(lambda model: {"score": next(scores)}, "score")
    reporter, ended = Aloud(), "done"
    data, wanted = Numbers(case.count), monitor if case.limits.patience is not None else None
    try:
        fitted = fit(
            net, data, act, sets, case.limits, out=out, seed=0, device="cpu", monitor=wanted,
            resume=resume, reporter=reporter,
        )  # fmt: skip
        ended = f"done {fitted.steps} {fitted.samples}"
    except (Failed, Stopped) as error:
        ended = f"{type(error).__name__}: {error}"
    same = all(
        torch.equal(p, dict(net.named_parameters())[n]) for n, p in seen.get("weights", {}).items()
    )
    told = {"ended": ended, "said": reporter.said, "written": [*written], "same": same}
    told["ids"] = seen.get("ids", [])
    place = out.parent / f"{out.name}-ends"
    place.mkdir(parents=True, exist_ok=True)
    files.write_json(place / f"rank-{ranks.rank}.json", told)
    files.write_tensors(place / f"rank-{ranks.rank}.safetensors", net.state_dict())


def writes(out: Path) -> set[str]:
    """The files below `out` that this process, for the rest of its life, opens for writing."""
    found: set[str] = set()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{out}/"):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                found.add(str(arguments[0]))
        elif event in ("os.mkdir", "os.rename") and str(arguments[0]).startswith(f"{out}/"):
            found.add(str(arguments[0]))

    sys.addaudithook(hear)
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
