"""Train a sharded model: `torchrun -m tests.train.sharded_runs OUT WORD...`.

WORD is a case or `case:resume`. Every process writes OUT/WORD-ends/rank-N.json, its outcome, and
the first one rank-0.safetensors, the whole weights.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overt import io
from overt.capture.session import watch
from overt.data.batch import Batch
from overt.errors import RunInterrupted, UserError
from overt.losses import Loss, classification
from overt.train import FitConfig, Losses, Monitor, ParameterSet, Progress, fit, processes


class Block(nn.Module):
    """Attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = (one(x)[:, None] for one in (self.query, self.key, self.value))
        return x + nn.functional.scaled_dot_product_attention(*found)[:, 0]


class Net(nn.Module):
    """Two blocks between layers that belong to none, a weight without a gradient, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([Block(), Block()])
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(()))
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        states = torch.relu(self.body(x))
        for layer in self.layers:
            states = layer(states)
        return states

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x).mean(dim=1))


class MultiheadNet(Net):
    """The same with `nn.MultiheadAttention`, whose projections are not modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(6, 1, 12, 0.0, batch_first=True) for _ in range(2)]
        ).double()


class Items:
    """Sequences of five vectors; every third has a supervised row."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.features = torch.randn(count, 5, 6, generator=generator).double()

    def __len__(self) -> int:
        return len(self.features)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor(list(indices))
        ids = tuple(str(one) for one in indices)
        return Batch(ids, features=self.features[rows], labels=rows % 3)


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """Compute a task loss, and one on the attention of the first word in supervised samples."""
    assert isinstance(model, Net) and batch.features is not None and batch.labels is not None
    with watch(model) as trace:
        prediction = model(batch.features)
    if torch.is_grad_enabled():
        model.steps += 1
    wanted = batch.labels == 0
    each = -trace.calls[1].log_weights()[:, 0, 0, 1]
    return {
        "model": {
            "task": classification(prediction, batch.labels),
            "attention": 0.5 * Loss((each * wanted).sum(), wanted.sum()),
        }
    }


@dataclass(frozen=True)
class Case:
    """A training case; process 1 does `act` at step `at`."""

    config: FitConfig = FitConfig(epochs=2, batch=8, shard=True)  # noqa: RUF009  frozen
    act: str = ""
    at: int = -1
    net: type[Net] = Net


LONG = FitConfig(epochs=4, batch=8, log_every=3, save_every=4, shard=True)
CASES = {
    "accumulate1": Case(),
    "accumulate2": Case(FitConfig(epochs=2, batch=4, accumulate=2, shard=True)),
    "accumulate3": Case(FitConfig(epochs=2, batch=3, accumulate=3, shard=True)),
    "attention": Case(act="attention"),
    "multihead": Case(act="attention", net=MultiheadNet),
    "uneven": Case(act="drop", at=2),
    "poison": Case(act="poison", at=2),
    "patience": Case(FitConfig(epochs=6, batch=8, patience=1, shard=True)),
    "long": Case(LONG),
    "killed": Case(LONG, act="kill", at=10),
    "stop": Case(LONG, act="stop", at=5),
    "whole-stop": Case(replace(LONG, shard=False), act="stop", at=5),
}


def run(case: Case, out: Path, resume: bool = False) -> None:
    """Train one case and write its outcome."""
    ranks = processes("cpu")
    torch.manual_seed(ranks.rank)  # the weights of the first process are broadcast
    net = case.net()
    sets = {
        "model": ParameterSet(
            torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1), clip=1.0
        )
    }

    def act(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = step(model, batch, progress)
        if case.act == "attention":  # alone, in all processes
            return {"model": {"attention": losses["model"]["attention"]}}
        if progress.step != case.at or ranks.rank != 1 % ranks.world:
            return losses
        own = dict(losses["model"])
        if case.act == "drop":
            del own["attention"]
        elif case.act == "poison":
            own["task"] = Loss(own["task"].total * float("nan"), own["task"].count)
        else:
            os.kill(os.getpid(), signal.SIGKILL if case.act == "kill" else signal.SIGTERM)
        return {"model": own}

    scores = iter([0.1, 0.5, 0.4, 0.3, 0.2, 0.9])
    data = Items(25)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"score": next(scores), "mean": float(model(data.features).mean())}

    try:
        fitted = fit(
            net, data, act, sets, case.config, out=out, seed=0, device="cpu", resume=resume,
            monitor=Monitor(evaluate, "score") if case.config.patience is not None else None,
        )  # fmt: skip
        outcome = f"done {fitted.steps} {fitted.samples}"
    except (RuntimeError, RunInterrupted, UserError) as error:
        outcome = f"{type(error).__name__}: {error}"
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in net.parameters()]
    report = {
        "outcome": outcome,
        "numbers": sum(one.numel() for one in parts),
        "unused_has_gradient": net.unused.grad is not None,
    }
    whole = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in net.state_dict().items()
    }
    place = out.parent / f"{out.name}-ends"
    place.mkdir(parents=True, exist_ok=True)
    io.write_json(place / f"rank-{ranks.rank}.json", report)
    if ranks.is_main:
        io.write_tensors(place / "rank-0.safetensors", whole)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        name, _, how = word.partition(":")
        run(CASES[name], Path(sys.argv[1]) / name, resume=how == "resume")
