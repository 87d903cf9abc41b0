"""Work with equal results in one and two processes.

Run `torchrun -m tests.trust.two_processes OUT WORD...`. Every process writes
OUT/WORD-rank-N.safetensors or .json.
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

from overt import io
from overt.attention import AttentionMap, words
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace
from overt.data.batch import Batch
from overt.losses import Loss, classification, cross_entropy
from overt.nn.wrappers.wrapped_model import WrappedModel, wrap
from overt.train import FitConfig, Losses, ParameterSet, Progress, distributed_mean, fit, processes
from overt.train.loop import derive_seed
from tests.train.distributed_gradients import full_gradients

ROOT = Path(__file__).resolve().parents[2]


def start(
    module: str,
    *arguments: str,
    launcher: Sequence[str] = ("--standalone", "--nproc-per-node", "2"),
) -> subprocess.Popen[str]:
    """Start a module of the tests under torchrun."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(started: subprocess.Popen[str]) -> str:
    """Wait for a process, check its exit code and return its output."""
    arguments, _ = started.communicate(timeout=300)
    assert started.returncode == 0, arguments
    return arguments


def start_without_launcher(
    module: str, *arguments: str, world: int = 2
) -> list[subprocess.Popen[str]]:
    """Start each process separately, as `srun` does, without a launcher."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
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
    """`supervised`: positions in the order of the epoch; process 0 has the first half."""

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
        ("last", 7, (1, 5, 6)),  # a smaller last batch
        ("single", 5, (0, 4)),  # a batch that leaves a process without a sample
    )
}


class AttentionClassifier(nn.Module):
    """Attends to eight numbers and predicts from the weighted numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.decision = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> tuple[Tensor, AttentionMap]:
        scores = self.score(features)[:, None, None, None]
        attention = AttentionMap.from_scores(scores, words(8))
        return self.decision(features * attention.weights[:, 0, 0, 0]), attention


class Items:
    """Items, some with a target."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(case.count, 1, 8, generator=generator)
        self.labels = torch.randint(0, 3, (case.count,), generator=generator)
        order_generator = torch.Generator().manual_seed(derive_seed(0, "train", "order", 0))
        order = torch.randperm(case.count, generator=order_generator)
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
    """Return the loss of the predictions, and that of the attention for rows with a target."""
    assert batch.features is not None and batch.labels is not None and batch.target is not None
    prediction, attention = model(batch.features[:, 0])
    return classification(prediction, batch.labels), cross_entropy(attention, batch.target)


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """Task and attention."""
    task, attention = losses_of(model, batch)
    return {"model": {"task": task, "attention": attention}}


def make_model() -> AttentionClassifier:
    """The same weights in every process."""
    torch.manual_seed(3)
    return AttentionClassifier()


def one_step(case: Case, out: Path) -> dict[str, Tensor]:
    """The gradients of one step of `fit`, over all processes."""
    model = make_model()
    limits = FitConfig(epochs=1, batch=case.batch, accumulate=case.accumulate, steps=1)
    sets = {"model": ParameterSet(torch.optim.SGD(model.parameters(), lr=0.1))}
    fit(model, Items(case), step, sets, limits, out=out, seed=0, device="cpu")
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def naive(case: Case) -> dict[str, Tensor]:
    """The same step with a mean in each process and the mean of these means."""
    ranks, items = processes("cpu"), Items(case)
    model = make_model()
    wrapped = DistributedDataParallel(model)
    order_generator = torch.Generator().manual_seed(derive_seed(0, "train", "order", 0))
    order = torch.randperm(case.count, generator=order_generator).tolist()
    task, attention = losses_of(wrapped, items.batch(ranks.shard(order)))
    (task.mean() + attention.mean()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def nan_on_one_process() -> bool:
    """Whether weights stay finite after one step if each process checks only its loss.

    The loss of the second process is NaN, so it does not step. The first process steps with the
    mean of both gradients.
    """
    ranks, items = processes("cpu"), Items(CASES["uneven-1"])
    model = make_model()
    wrapped = DistributedDataParallel(model)
    task, _ = losses_of(wrapped, items.batch(ranks.shard(range(8))))
    loss = task.mean() * (float("nan") if ranks.rank else 1.0)
    loss.backward()
    if bool(loss.isfinite()):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return all(bool(p.isfinite().all()) for p in model.parameters())


# --- attention that only the attention loss trains


class SideAttention(nn.Module):
    """Predicts without its attention, which only the attention loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.relu(self.body(x))
        query, key = self.query(states)[:, None], self.key(states)[:, None]
        nn.functional.scaled_dot_product_attention(query, key, states[:, None])
        return self.head(states.mean(dim=1))


SUPERVISED = {"uneven": (0, 1, 5), "none": (0, 1, 2)}  # of eight rows, four per process


def side_batch(supervised: Sequence[int] = range(8)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    wanted = torch.zeros(8)
    wanted[list(supervised)] = 1
    return {
        "x": torch.randn(8, 5, 6, generator=generator),
        "labels": torch.arange(8) % 3,
        "wanted": wanted,
    }


def first_word_loss(trace: AttentionTrace, batch: Mapping[str, Tensor]) -> Loss:
    """Loss on the attention of the first word to the second in supervised samples."""
    each = -trace.calls[0].log_weights()[:, 0, 0, 1]
    return Loss((each * batch["wanted"]).sum(), batch["wanted"].sum())


Objective = Callable[[Loss, Loss], Tensor]


def task_and_attention(task: Loss, attention: Loss) -> Tensor:
    return distributed_mean(task) + distributed_mean(attention)


def attention_only(task: Loss, attention: Loss) -> Tensor:
    return distributed_mean(attention)


def wrapped_model() -> WrappedModel:
    """A model with the loss inside the forward pass, made by `wrap`."""
    torch.manual_seed(1)
    return wrap(SideAttention(), lambda model, batch: model(batch["x"]), loss=first_word_loss)


def fsdp_per_layer(model: WrappedModel) -> nn.Module:
    for layer in (model.model.body, model.model.query, model.model.key):
        fully_shard(layer)
    return fully_shard(model)


def fsdp_whole_model(model: WrappedModel) -> nn.Module:
    return fully_shard(model)


def ddp(model: WrappedModel) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_find_unused(model: WrappedModel) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


WRAPPERS = (ddp, ddp_find_unused, fsdp_per_layer, fsdp_whole_model)


def wrapped_gradients(
    model: nn.Module, batch: Mapping[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """Run two forward and backward passes; return the full gradients of the second."""
    for _ in range(2):
        model.zero_grad()
        output = model(dict(batch))
        objective(classification(output.prediction, batch["labels"]), output.loss).backward()
    return full_gradients(model)


def rows_of(batch: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    return {name: value[list(rows)] for name, value in batch.items()}


def try_loss_outside(find_unused: bool, objective: Objective) -> str:
    """Compute the loss after the wrapped forward pass; return the error or "done"."""
    torch.manual_seed(1)
    model = DistributedDataParallel(SideAttention(), find_unused_parameters=find_unused)
    batch = side_batch()
    try:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with watch(model) as trace:
                    prediction = model(batch["x"])
            task = classification(prediction, batch["labels"])
            objective(task, first_word_loss(trace, batch)).backward()
    except RuntimeError as error:
        return str(error)
    return "done"


# --- shared work


def run_shared_work(out: Path) -> None:
    """Compute a scorecard and surrogates in all processes."""
    from overt.targets import generate_surrogates
    from overt.targets.surrogate.masks import GridMasks, RemoveWords
    from tests.metrics.scorecard import multiprocess_run
    from tests.targets.surrogate.toys import Planted, Toys

    multiprocess_run.run(out / "scorecard", pause=float(os.environ.get("PAUSE", "0")))
    masks = [GridMasks(20, 2), RemoveWords()]
    generate_surrogates(Planted(), Toys(), out / "surrogates", masks=masks, shard=3, batch=2)


def main(out: Path, arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    ranks = processes("cpu")
    for word in arguments:
        place = f"{word}-rank-{ranks.rank}"
        if word == "shared":
            run_shared_work(out)
        elif word == "wrapped":
            for wrap in WRAPPERS:
                for objective in (task_and_attention, attention_only):
                    for name, supervised in SUPERVISED.items():
                        rows_of_process = ranks.shard(range(8))
                        batch = rows_of(side_batch(supervised), rows_of_process)
                        found = wrapped_gradients(wrap(wrapped_model()), batch, objective)
                        which = f"{wrap.__name__}-{objective.__name__}-{name}"
                        io.write_tensors(out / f"{which}-rank-{ranks.rank}.safetensors", found)
        elif word == "outside":
            errors = {
                f"{objective.__name__}-{'unused' if find else 'plain'}": try_loss_outside(
                    find, objective
                )
                for find in (False, True)
                for objective in (task_and_attention, attention_only)
            }
            io.write_json(out / f"{place}.json", errors)
        elif word == "poisoned":
            io.write_json(out / f"{place}.json", {"finite": nan_on_one_process()})
        elif word == "naive":
            for name in ("uneven-1", "none-1"):
                found = naive(CASES[name])
                io.write_tensors(out / f"naive-{name}-rank-{ranks.rank}.safetensors", found)
        else:
            io.write_tensors(out / f"{place}.safetensors", one_step(CASES[word], out / word))
    ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
