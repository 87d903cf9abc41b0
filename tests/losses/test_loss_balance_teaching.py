"""Training attention end to end: a network, targets, a loss with a measured weight, `fit`.

Images have one bright cell that decides the class, and distractors. Its position is a target
that works, so failures with other targets are not failures of the training code.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.losses import (
    Discriminator,
    LossBalancer,
    SupervisedModel,
    classification,
    coral,
    cross_entropy,
    discriminator_loss,
    emd,
    generator_loss,
    mse,
)
from overt.metrics import mass_inside
from overt.nn import AttentiveCNN
from overt.targets import Targets, dataset_targets, match_keys, placebos
from overt.train import FitConfig, Losses, ParameterSet, Progress, fit

COUNT, SIDE = 48, 16  # images of 16 x 16 pixels: 4 x 4 cells


class Spots:
    """A red or a blue cell decides the class; green cells are distractors."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (COUNT, 3, SIDE, SIDE)
        self.images = torch.randint(0, 40, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, 2, (COUNT,), generator=generator)
        self.cells = torch.randint(0, 16, (COUNT,), generator=generator)
        for at in range(COUNT):
            self.paint(at, int(self.cells[at]), 2 * int(self.labels[at]))
            self.paint(at, int(self.cells[at] + 5) % 16, 1)

    def paint(self, at: int, cell: int, channel: int) -> None:
        y, x = divmod(cell, 4)
        self.images[at, channel, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = 255

    def __len__(self) -> int:
        return COUNT

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor(list(indices))
        return Batch(
            ids=tuple(f"{at}" for at in indices),
            images=self.images[rows],
            geometry=PixelGeometry.identity(len(rows), (SIDE, SIDE)),
            labels=self.labels[rows],
            target=AttentionMap.from_cells(
                nn.functional.one_hot(self.cells[rows], 16).float(), grid(4, 4)
            ),
        )


DATA = Spots()
TRUTH = dataset_targets(lambda ids: DATA.batch([int(one) for one in ids]))


def attention_on_target(net: nn.Module) -> float:
    """Measure the attention on the deciding cell."""
    batch = DATA.batch(range(COUNT))
    with torch.no_grad():
        found = net.eval()(batch)
    assert batch.target is not None
    return float(mass_inside(found.attention_to("image"), batch.target).mean())


def make() -> AttentiveCNN:
    torch.manual_seed(0)
    return AttentiveCNN(2, channels=(8, 8, 8, 8), hidden=16, dropout=0.0)


def train(out: Path, step: Callable[..., Losses], net: SupervisedModel, epochs: int = 14) -> float:
    sets = {"model": ParameterSet(torch.optim.AdamW(net.model.parameters(), 1e-2))}
    if "rival" in net.loss_modules:
        sets["rival"] = ParameterSet(torch.optim.Adam(net.loss_modules["rival"].parameters(), 2e-3))
    limits = FitConfig(epochs, batch=24)
    fit(net, DATA, step, sets, limits, out=out, seed=0, device="cpu")
    return attention_on_target(net.model)


def train_with_loss(
    out: Path, loss: Callable[..., object], targets: Targets
) -> tuple[float, float]:
    """Train and return the attention on the deciding cell and the measured weight."""
    net = SupervisedModel(make(), gamma=LossBalancer(5))

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert isinstance(net, SupervisedModel) and isinstance(net.gamma, LossBalancer)
        output = net.model(batch)
        assert batch.labels is not None
        task = classification(output.prediction, batch.labels)
        attention = output.attention_to("image").over_heads()
        found = loss(attention, match_keys(targets(batch.ids), attention))
        return {"model": {"task": task, "map": net.gamma(task, found), **net.gamma.log_entry()}}

    found = train(out, step, net)
    assert isinstance(net.gamma, LossBalancer)
    return found, net.gamma.weight


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> float:
    return train_with_loss(tmp_path_factory.mktemp("nothing"), mse, placebos.no_targets(TRUTH))[0]


@pytest.mark.long
@pytest.mark.parametrize("loss", [mse, cross_entropy, emd])
def test_true_targets_move_attention_and_placebos_do_not(tmp_path, loss, baseline):
    real, weight = train_with_loss(tmp_path / "real", loss, TRUTH)
    ids = [str(at) for at in range(COUNT)]
    fake, _ = train_with_loss(tmp_path / "fake", loss, placebos.swapped_targets(TRUTH, ids, 0))
    assert real > 0.5 > baseline and real > fake + 0.3
    assert weight > 0


@pytest.mark.long
def test_batch_losses_do_not_distinguish_targets_from_placebos(tmp_path, baseline):
    """They make maps as sharp as the targets but ignore which sample a target belongs to."""
    ids = [str(at) for at in range(COUNT)]
    real, weight = train_with_loss(tmp_path / "real", coral, TRUTH)
    fake, _ = train_with_loss(tmp_path / "fake", coral, placebos.swapped_targets(TRUTH, ids, 0))
    assert abs(real - fake) < 0.3 and weight > 1000


@pytest.mark.long
def test_discriminator_with_context_moves_attention(tmp_path, baseline):
    rival = Discriminator(16, context=48, hidden=64, dropout=0.1)
    net = SupervisedModel(make(), rival=rival, gamma=LossBalancer(5))

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert isinstance(net, SupervisedModel) and isinstance(net.gamma, LossBalancer)
        assert isinstance(net.rival, Discriminator) and isinstance(net.model, AttentiveCNN)
        features = net.model.encode(batch)
        output = net.model.decide(features)
        assert batch.labels is not None and batch.images is not None
        attention, target = output.attention_to("image").over_heads(), TRUTH(batch.ids)
        # the context of a sample is its image, downsampled four times
        context = nn.functional.avg_pool2d(batch.images.float() / 255, 4).flatten(1)
        task = classification(output.prediction, batch.labels)
        fooled = generator_loss(net.rival, attention, target, context)
        return {
            "model": {"task": task, "map": net.gamma(task, fooled)},
            "rival": {"rival": discriminator_loss(net.rival, attention, target, context)},
        }

    found = train(tmp_path, step, net, epochs=30)
    assert found > 0.5 > baseline
