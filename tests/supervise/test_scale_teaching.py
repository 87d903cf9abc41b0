"""All of it together: a network with attention, a target, a loss with a measured weight, `fit`.

Images hold one bright cell that decides the class, and distractors. The truth about it is a target
that works; so whatever does not work with other targets is not the fault of the machinery.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.measure import mass_inside
from overt.models import AttentiveCNN
from overt.supervise import (
    Discriminator,
    Scale,
    Targets,
    Taught,
    classification,
    coral,
    cross_entropy,
    deceive,
    emd,
    fitted,
    known,
    mse,
    placebo,
    tell_apart,
)
from overt.train import Limits, Losses, ParameterSet, Progress, fit

COUNT, SIDE = 48, 16  # images of 16 x 16 pixels: 4 x 4 cells


class Spots:
    """A red or a blue spot on one cell decides; green spots stand elsewhere."""

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
TRUTH = known(lambda ids: DATA.batch([int(one) for one in ids]))


def seen_by(net: nn.Module) -> float:
    """The share of attention on the cell that decides."""
    batch = DATA.batch(range(COUNT))
    with torch.no_grad():
        found = net.eval()(batch)
    assert batch.target is not None
    return float(mass_inside(found.looking_at("image"), batch.target).mean())


def make() -> AttentiveCNN:
    torch.manual_seed(0)
    return AttentiveCNN(2, channels=(8, 8, 8, 8), hidden=16, dropout=0.0)


def train(out: Path, step: Callable[..., Losses], net: Taught, epochs: int = 14) -> float:
    sets = {"model": ParameterSet(torch.optim.AdamW(net.model.parameters(), 1e-2))}
    if "rival" in net.teachers:
        sets["rival"] = ParameterSet(torch.optim.Adam(net.teachers["rival"].parameters(), 2e-3))
    limits = Limits(epochs, batch=24)
    fit(net, DATA, step, sets, limits, out=out, seed=0, device="cpu")
    return seen_by(net.model)


def taught(out: Path, loss: Callable[..., object], targets: Targets) -> tuple[float, float]:
    """The attention on the right cell after training, and the weight that was found."""
    net = Taught(make(), gamma=Scale(5))

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert isinstance(net, Taught) and isinstance(net.gamma, Scale)
        output = net.model(batch)
        assert batch.labels is not None
        task = classification(output.prediction, batch.labels)
        attention = output.looking_at("image").over_heads()
        found = loss(attention, fitted(targets(batch.ids), attention))
        return {"model": {"task": task, "map": net.gamma(task, found), **net.gamma.noted()}}

    found = train(out, step, net)
    assert isinstance(net.gamma, Scale)
    return found, net.gamma.weight


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> float:
    return taught(tmp_path_factory.mktemp("nothing"), mse, placebo.nothing(TRUTH))[0]


@pytest.mark.parametrize("loss", [mse, cross_entropy, emd])
def test_the_truth_moves_attention_and_its_placebo_does_not(tmp_path, loss, untaught):
    real, weight = taught(tmp_path / "real", loss, TRUTH)
    ids = [str(at) for at in range(COUNT)]
    fake, _ = taught(tmp_path / "fake", loss, placebo.swapped(TRUTH, ids, 0))
    assert real > 0.5 > untaught and real > fake + 0.3
    assert weight > 0


def test_a_loss_over_batches_cannot_tell_the_truth_from_its_placebo(tmp_path, untaught):
    """It teaches maps as sharp as the targets, and does not see whose is whose."""
    ids = [str(at) for at in range(COUNT)]
    real, weight = taught(tmp_path / "real", coral, TRUTH)
    fake, _ = taught(tmp_path / "fake", coral, placebo.swapped(TRUTH, ids, 0))
    assert abs(real - fake) < 0.3 and weight > 1000


def test_an_adversary_that_knows_the_sample_moves_attention(tmp_path, untaught):
    rival = Discriminator(16, context=48, hidden=64, dropout=0.1)
    net = Taught(make(), rival=rival, gamma=Scale(5))

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert isinstance(net, Taught) and isinstance(net.gamma, Scale)
        assert isinstance(net.rival, Discriminator) and isinstance(net.model, AttentiveCNN)
        features = net.model.encode(batch)
        output = net.model.decide(features)
        assert batch.labels is not None and batch.images is not None
        attention, target = output.looking_at("image").over_heads(), TRUTH(batch.ids)
        # what the sample is: its picture, four times smaller
        context = nn.functional.avg_pool2d(batch.images.float() / 255, 4).flatten(1)
        task = classification(output.prediction, batch.labels)
        fooled = deceive(net.rival, attention, target, context)
        return {
            "model": {"task": task, "map": net.gamma(task, fooled)},
            "rival": {"rival": tell_apart(net.rival, attention, target, context)},
        }

    found = train(tmp_path, step, net, epochs=30)
    assert found > 0.5 > untaught
