"""Adversarial training with loss balancing: `torchrun -m tests.losses.adversarial_run OUT`.

Each process writes OUT/NAME-rank-N.safetensors: model, discriminator and measured weights.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from overt import io
from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.losses import (
    Discriminator,
    Loss,
    LossBalancer,
    SupervisedModel,
    classification,
    coral,
    discriminator_loss,
    generator_loss,
)
from overt.train import FitConfig, Losses, ParameterSet, Progress, fit, processes
from tests.train.toys import Numbers

CONFIG = FitConfig(epochs=3, batch=8, save_every=3, log_every=2)


class AttentionNet(nn.Module):
    """Classifier that attends over eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.decision = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> tuple[Tensor, AttentionMap]:
        attention = AttentionMap.from_scores(
            self.score(features)[:, None, None, None], words(features.shape[1])
        )
        return self.decision(features * attention.weights[:, 0, 0, 0]), attention


def targets(batch: Batch) -> AttentionMap:
    """Make the largest number the target, and none for samples of class 2."""
    assert batch.features is not None and batch.labels is not None
    wanted = nn.functional.one_hot(batch.features[:, 0].argmax(dim=-1), 8).to(batch.features)
    return AttentionMap.from_cells(wanted * (batch.labels != 2)[:, None], words(8))


def make(dropout: float = 0.5) -> tuple[SupervisedModel, dict[str, ParameterSet]]:
    rival = Discriminator(8, context=8, dropout=dropout)
    net = SupervisedModel(
        AttentionNet(), rival=rival, gamma=LossBalancer(4), beta=LossBalancer(4)
    ).double()
    return net, {
        "model": ParameterSet(torch.optim.AdamW(net.model.parameters(), lr=1e-2)),
        "rival": ParameterSet(torch.optim.Adam(rival.parameters(), 2e-4, betas=(0.5, 0.999))),
    }


def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """Compute the adversarial losses; their weight is measured and logged."""
    return _losses(net, batch)[0]


def with_coral(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
    """Add a batch-level loss with its own weight."""
    losses, attention, task = _losses(net, batch)
    assert isinstance(net, SupervisedModel) and isinstance(net.beta, LossBalancer)
    own = {**losses["model"], "coral": net.beta(task, coral(attention, targets(batch)))}
    return {**losses, "model": own}


def _losses(net: nn.Module, batch: Batch) -> tuple[Losses, AttentionMap, Loss]:
    assert isinstance(net, SupervisedModel) and isinstance(net.rival, Discriminator)
    assert isinstance(net.gamma, LossBalancer)
    assert batch.features is not None and batch.labels is not None
    features = batch.features[:, 0].double()
    prediction, attention = net.model(features)
    target = targets(batch)
    task = classification(prediction, batch.labels)
    fooled = net.gamma(task, generator_loss(net.rival, attention, target, features))
    losses = {
        "model": {"task": task, "map": fooled, **net.gamma.log_entry("gamma")},
        "rival": {"rival": discriminator_loss(net.rival, attention, target, features)},
    }
    return losses, attention, task


def train(
    out: Path,
    resume: bool = False,
    dropout: float = 0.5,
    step: Callable[[nn.Module, Batch, Progress], Losses] = with_coral,
) -> SupervisedModel:
    """Train once on 48 samples, so that every batch is full."""
    torch.manual_seed(0)
    net, sets = make(dropout)
    fit(net, Numbers(48), step, sets, CONFIG, out=out, seed=0, device="cpu", resume=resume)
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, taken in (("plain", step), ("coral", with_coral)):
        place = Path(sys.argv[1]) / name
        state = train(place, dropout=0.0, step=taken).state_dict()
        rank = processes("cpu").rank
        io.write_tensors(place.parent / f"{name}-rank-{rank}.safetensors", state)
