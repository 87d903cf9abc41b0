"""What two processes and one must agree on: `torchrun -m tests.trust.together OUT WORD...`.

Every process leaves OUT/WORD-rank-N.safetensors or .json.
"""

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from overt import files
from overt.attention import AttentionMap, words
from overt.capture.seen import Seen
from overt.capture.watching import watch
from overt.data.batch import Batch
from overt.models.adopting.adopted import Adopted, adopt
from overt.supervise import Loss, classification, cross_entropy
from overt.train import Limits, Losses, ParameterSet, Progress, fit, processes, shared_mean
from overt.train.loop import mixed
from tests.train.wrapped import gathered

ROOT = Path(__file__).resolve().parents[2]


def start(
    module: str, *said: str, launcher: Sequence[str] = ("--standalone", "--nproc-per-node", "2")
) -> subprocess.Popen[str]:
    """Start a module of the tests under torchrun."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", module, *said],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(started: subprocess.Popen[str]) -> str:
    """What it said, when it has come to a good end."""
    said, _ = started.communicate(timeout=300)
    assert started.returncode == 0, said
    return said


def start_apart(module: str, *said: str, world: int = 2) -> list[subprocess.Popen[str]]:
    """Start each process by itself, as `srun` does, with nobody to look after them."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *said],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


# --- fit, one step


@dataclass(frozen=True)
class Case:
    """`supervised` are places in the order of the epoch; the first half is that of process 0."""

    count: int
    batch: int
    accumulate: int
    supervised: tuple[int, ...]


CASES = {
    f"{name}-{accumulate}": Case(count, 8 // accumulate, accumulate, supervised)
    for accumulate in (1, 2, 4)
    for name, count, supervised in (
        ("uneven", 8, (0, 4, 5, 6)),
        ("none", 8, (0, 1, 2)),
        ("last", 7, (1, 5, 6)),  # a last batch of fewer
        ("single", 5, (0, 4)),  # one that leaves a process without an item
    )
}


class Looker(nn.Module):
    """Attends to eight numbers and answers from what it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.decision = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> tuple[Tensor, AttentionMap]:
        scores = self.score(features)[:, None, None, None]
        attention = AttentionMap.from_scores(scores, words(8))
        return self.decision(features * attention.weights[:, 0, 0, 0]), attention


class Items:
    """Items of which some have a target."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(case.count, 1, 8, generator=generator)
        self.labels = torch.randint(0, 3, (case.count,), generator=generator)
        drawn = torch.Generator().manual_seed(mixed(0, "train", "order", 0))
        order = torch.randperm(case.count, generator=drawn)
        self.wanted = torch.zeros(case.count, 8)
        self.wanted[order[list(case.supervised)], 3] = 1

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor(list(indices))
        target = AttentionMap.from_cells(self.wanted[rows], words(8))
        ids = tuple(str(at) for at in indices)
        return Batch(ids, features=self.features[rows], labels=self.labels[rows], target=target)


def losses_of(model: nn.Module, batch: Batch) -> tuple[Loss, Loss]:
    """The loss of the answers, and that of the attention where it has a target."""
    assert batch.features is not None and batch.labels is not None and batch.target is not None
    prediction, attention = model(batch.features[:, 0])
    return classification(prediction, batch.labels), cross_entropy(attention, batch.target)


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """Task and attention."""
    task, attention = losses_of(model, batch)
    return {"model": {"task": task, "attention": attention}}


def looker() -> Looker:
    """The same weights in every process."""
    torch.manual_seed(3)
    return Looker()


def one_step(case: Case, out: Path) -> dict[str, Tensor]:
    """The gradients of one step of `fit`, over all processes."""
    model = looker()
    limits = Limits(epochs=1, batch=case.batch, accumulate=case.accumulate, steps=1)
    sets = {"model": ParameterSet(torch.optim.SGD(model.parameters(), lr=0.1))}
    fit(model, Items(case), step, sets, limits, out=out, seed=0, device="cpu")
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def naive(case: Case) -> dict[str, Tensor]:
    """The same step as many loops do it: a mean in each process, and a mean of these."""
    ranks, items = processes("cpu"), Items(case)
    model = looker()
    wrapped = DistributedDataParallel(model)
    drawn = torch.Generator().manual_seed(mixed(0, "train", "order", 0))
    order = torch.randperm(case.count, generator=drawn).tolist()
    task, attention = losses_of(wrapped, items.batch(ranks.slice(order)))
    (task.mean() + attention.mean()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def poisoned() -> bool:
    """Whether weights stay finite where each process looks at its own loss alone, after one step.

    The loss of the second process is no number. It does not step; the first one has no reason not
    to, and its gradient is the mean of both.
    """
    ranks, items = processes("cpu"), Items(CASES["uneven-1"])
    model = looker()
    wrapped = DistributedDataParallel(model)
    task, _ = losses_of(wrapped, items.batch(ranks.slice(range(8))))
    loss = task.mean() * (float("nan") if ranks.rank else 1.0)
    loss.backward()
    if bool(loss.isfinite()):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return all(bool(p.isfinite().all()) for p in model.parameters())


# --- a loss on attention that nothing else reaches


class Aside(nn.Module):
    """Answers without its attention, which is only there to be taught."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.relu(self.body(x))
        query, key = self.query(states)[:, None], self.key(states)[:, None]
        nn.functional.scaled_dot_product_attention(query, key, states[:, None])
        return self.head(states.mean(dim=1))


SUPERVISED = {"uneven": (0, 1, 5), "none": (0, 1, 2)}  # of eight rows, four a process


def aside_batch(supervised: Sequence[int] = range(8)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    wanted = torch.zeros(8)
    wanted[list(supervised)] = 1
    return {
        "x": torch.randn(8, 5, 6, generator=generator),
        "labels": torch.arange(8) % 3,
        "wanted": wanted,
    }


def first_word(seen: Seen, batch: Mapping[str, Tensor]) -> Loss:
    """The first word of some samples should look at the second."""
    each = -seen.calls[0].log_weights()[:, 0, 0, 1]
    return Loss((each * batch["wanted"]).sum(), batch["wanted"].sum())


Objective = Callable[[Loss, Loss], Tensor]


def both(task: Loss, attention: Loss) -> Tensor:
    return shared_mean(task) + shared_mean(attention)


def attention_alone(task: Loss, attention: Loss) -> Tensor:
    return shared_mean(attention)


def adopted() -> Adopted:
    """The loss is computed in the forward pass that is wrapped, as `adopt` has it."""
    torch.manual_seed(1)
    return adopt(Aside(), lambda model, batch: model(batch["x"]), loss=first_word)


def sharded(model: Adopted) -> nn.Module:
    for layer in (model.model.body, model.model.query, model.model.key):
        fully_shard(layer)
    return fully_shard(model)


def sharded_whole(model: Adopted) -> nn.Module:
    return fully_shard(model)


def plain(model: Adopted) -> nn.Module:
    return DistributedDataParallel(model)


def unused(model: Adopted) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


WRAPPERS = (plain, unused, sharded, sharded_whole)


def wrapped_gradients(
    model: nn.Module, batch: Mapping[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """Two forward and backward passes; the whole gradient of every parameter after the second."""
    for _ in range(2):
        model.zero_grad()
        output = model(dict(batch))
        objective(classification(output.prediction, batch["labels"]), output.loss).backward()
    return gathered(model)


def rows_of(batch: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    return {name: value[list(rows)] for name, value in batch.items()}


def outside(find_unused: bool, objective: Objective) -> str:
    """The loss is computed after the wrapped forward, on what was seen."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Aside(), find_unused_parameters=find_unused)
    batch = aside_batch()
    try:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with watch(model) as seen:
                    prediction = model(batch["x"])
            task = classification(prediction, batch["labels"])
            objective(task, first_word(seen, batch)).backward()
    except RuntimeError as error:
        return str(error)
    return "done"


# --- work that is shared out


def share_out(out: Path) -> None:
    """A scorecard and surrogates, made by all processes together."""
    from overt.supervise import surrogates
    from overt.supervise.surrogate.masks import Grids, WithoutWords
    from tests.measure.scorecards import many
    from tests.supervise.surrogate.toys import Planted, Toys

    many.run(out / "scorecard", pause=float(os.environ.get("PAUSE", "0")))
    masks = [Grids(20, 2), WithoutWords()]
    surrogates(Planted(), Toys(), out / "surrogates", masks=masks, shard=3, batch=2)


def main(out: Path, said: Sequence[str]) -> None:
    torch.set_num_threads(1)
    ranks = processes("cpu")
    for word in said:
        place = f"{word}-rank-{ranks.rank}"
        if word == "shared":
            share_out(out)
        elif word == "wrapped":
            for wrap in WRAPPERS:
                for objective in (both, attention_alone):
                    for name, supervised in SUPERVISED.items():
                        mine = ranks.slice(range(8))
                        batch = rows_of(aside_batch(supervised), mine)
                        found = wrapped_gradients(wrap(adopted()), batch, objective)
                        which = f"{wrap.__name__}-{objective.__name__}-{name}"
                        files.write_tensors(out / f"{which}-rank-{ranks.rank}.safetensors", found)
        elif word == "outside":
            told = {
                f"{objective.__name__}-{'unused' if find else 'plain'}": outside(find, objective)
                for find in (False, True)
                for objective in (both, attention_alone)
            }
            files.write_json(out / f"{place}.json", told)
        elif word == "poisoned":
            files.write_json(out / f"{place}.json", {"finite": poisoned()})
        elif word == "naive":
            for name in ("uneven-1", "none-1"):
                found = naive(CASES[name])
                files.write_tensors(out / f"naive-{name}-rank-{ranks.rank}.safetensors", found)
        else:
            files.write_tensors(out / f"{place}.safetensors", one_step(CASES[word], out / word))
    ranks.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
