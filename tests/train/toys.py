"""A small dataset of numbers, a network with dropout and an adversary, and a training step."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.losses.loss import Loss
from overt.train import FitConfig, Losses, ParameterSet, Progress, fit, warmup_cosine


class Numbers:
    """`count` samples with 8 features and one of 3 classes; equal in every process."""

    def __init__(self, count: int = 50) -> None:
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(count, 1, 8, generator=generator)
        self.labels = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor(list(indices))
        return Batch(
            ids=tuple(f"number-{i}" for i in indices),
            features=self.features[rows],
            labels=self.labels[rows],
        )


class Net(nn.Module):
    """A network, and an adversary that guesses the class from its hidden state."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 16)
        )
        self.head = nn.Linear(16, 3)
        self.adversary = nn.Linear(16, 3)

    def hidden(self, batch: Batch) -> Tensor:
        assert batch.features is not None
        return self.main(batch.features[:, 0])


def make(dropout: float = 0.3, seed: int = 0) -> tuple[Net, dict[str, ParameterSet]]:
    torch.manual_seed(seed)
    net = Net(dropout)
    main_parameters = [*net.main.parameters(), *net.head.parameters()]
    return net, {
        "model": ParameterSet(
            torch.optim.AdamW(main_parameters, lr=1e-2), warmup_cosine(), clip=1.0
        ),
        "adversary": ParameterSet(
            torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
        ),
    }


def cross_entropy(logits: Tensor, labels: Tensor, rows: Tensor | None = None) -> Loss:
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    rows = torch.ones_like(labels, dtype=torch.bool) if rows is None else rows
    return Loss((losses * rows).sum(), rows.sum())


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """Task loss on all rows, an extra loss on rows of class 0, and the loss of the adversary."""
    assert isinstance(model, Net) and batch.labels is not None
    hidden = model.hidden(batch)
    logits = model.head(hidden)
    fooling = cross_entropy(model.adversary(hidden), batch.labels)
    return {
        "model": {
            "task": cross_entropy(logits, batch.labels),
            "extra": 0.5 * Loss(*_zero_class(hidden, batch.labels)),
            "fool": -0.1 * fooling,
        },
        "adversary": {"guess": cross_entropy(model.adversary(hidden), batch.labels)},
    }


def _zero_class(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = labels == 0
    return (hidden.square().mean(dim=1) * rows).sum(), rows.sum()


LIMITS = FitConfig(epochs=4, batch=8, accumulate=2, save_every=3, log_every=4)


def train(out: Path, resume: bool = False, config: FitConfig = LIMITS, seed: int = 0) -> Net:
    net, sets = make(seed=seed)
    fit(net, Numbers(), step, sets, config, out=out, seed=seed, device="cpu", resume=resume)
    return net
