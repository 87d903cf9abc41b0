"""How fast networks train, beside what the machine could do at best.

The limits are measured in the same run: a large product of matrices for operations, a large copy
for bytes. A step cannot take less than its operations over the one, nor than the bytes that it must
move over the other: what is kept for the backward pass is written once and read once, and a
parameter is read twice, its gradient written and read, and its state read and written. The share
of the limit is the larger of these two over what the step takes. Operations are those PyTorch
counts; bytes are fewer than a network without perfect fusion moves. On a machine with other work
the limits are measured too low, and a share may then be above one. On a card the same step is also
taken from a recording of its kernels, as `train.graph=true` does in the loop itself.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from overt import models, supervise
from overt.data.batch import Batch

from .captions import pictures as captioned
from .clock import Spread, Times, graphed, kept, race, timer
from .report import Report, Row, Setting, at_most, dearer, faster

CLASSES = 100
BLOCK = 25  # steps of the loop that are timed together
CONTROL = 1.10  # times as long as the same network without attention, at most
PAIRS = (("att2-concat-pc", "att2-mean"), ("att3-concat-pc", "att3-mean"))


@dataclass(frozen=True)
class Limits:
    """What the machine does at best: operations and bytes a second."""

    flops: float
    bytes: float

    def seconds(self, step: "Step") -> float:
        """The least that a step can take."""
        return max(step.flops / self.flops, step.moved / self.bytes)


def limits(setting: Setting) -> Limits:
    """A product of matrices in the precision of training, and a copy."""
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    n = setting.some(8192 if setting.gpu else 1536, 256)
    one, two = (torch.randn(n, n, device=setting.device, dtype=dtype) for _ in range(2))
    many = setting.some(2**30 if setting.gpu else 2**27, 2**22)
    source = torch.empty(many, dtype=torch.uint8, device=setting.device).zero_()
    sink = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "product": lambda: one @ two,
        "copy": lambda: sink.copy_(source),
    }
    times = race(ways, 2 * setting.rounds, timer(setting.device), limit=10.0)
    return Limits(2 * n**3 / min(times.seconds["product"]), 2 * many / min(times.seconds["copy"]))


@dataclass
class Step:
    """A network, its loss and its optimizer; what a step has to compute and to move."""

    net: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    bf16: bool
    flops: float = 0.0
    moved: float = 0.0

    def __call__(self, loss: Callable[[], Tensor] | None = None) -> None:
        """Forward, backward, and the change of the weights."""
        self.slopes(loss)
        self.optimizer.step()

    def slopes(self, loss: Callable[[], Tensor] | None = None) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=True)
        self.value(loss).backward()

    def recorded(self) -> Callable[[], None]:
        """The same step with its gradients out of one recording, as `fit` has it."""
        replay = graphed(self.slopes)
        left = [(p, p.grad) for p in self.net.parameters() if p.grad is not None]

        def run() -> None:
            replay()
            for parameter, gradient in left:
                parameter.grad = gradient
            self.optimizer.step()

        return run

    def value(self, loss: Callable[[], Tensor] | None = None) -> Tensor:
        """The loss, in bfloat16 where there is a card."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            return (loss or self.loss)()

    def counted(self) -> "Step":
        """Count operations and bytes of one step."""
        self()
        with FlopCounterMode(display=False) as counter:
            self()
        self.flops = float(counter.get_total_flops())
        size = sum(p.numel() * p.element_size() for p in self.net.parameters())
        state = 2 * sum(
            one.numel() * one.element_size()
            for per in self.optimizer.state.values()
            for one in per.values()
            if isinstance(one, Tensor)
        )
        self.moved = 2 * kept(self.value) + 5 * size + state
        return self


def classifier(batch: int, device: str, width: float = 1.0) -> Step:
    """VGG-att2 on pictures of 32 x 32 pixels."""
    torch.manual_seed(0)
    net: Any = models.vgg_attention(CLASSES, levels=2, width=width).to(device)
    return classifying(net, batch, device)


def classifying(net: Any, batch: int, device: str) -> Step:
    """A step of a network that tells classes of pictures."""
    net.to(memory_format=torch.channels_last).train()
    images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (batch,))
    given = Batch(tuple(map(str, range(batch))), images=images, labels=labels).to(device)
    wanted = given.labels
    assert wanted is not None

    def loss() -> Tensor:
        return supervise.classification(net(given).prediction, wanted).mean()

    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    return Step(net, loss, optimizer, device != "cpu")


def control(label: str, batch: int, device: str, width: float = 1.0) -> Step:
    """A row of Learn to Pay Attention, as the loop trains it."""
    from overt.recipes.ltpa import building, recipe

    torch.manual_seed(0)
    net: Any = building.network(replace(recipe.models()[label], width=width), CLASSES).to(device)
    return classifying(net, batch, device)


def captioner(batch: int, device: str) -> Step:
    """The captioner of the paper, its next words given the ones before."""
    from overt.models.answering.eyes import CachedEye
    from overt.recipes.a2.building import next_word_losses
    from overt.recipes.a2.networks import network
    from overt.recipes.a2.recipe import Align, a2_coco

    torch.manual_seed(0)
    recipe, words = a2_coco(), 10_000
    data = captioned(max(64, batch), words, 49, 1280).to(device)
    net: Any = network(recipe.model, Align(), words, CachedEye(1280, (7, 7))).to(device).train()
    part = data.batch(range(batch))

    def loss() -> Tensor:
        found = next_word_losses(net, part, recipe, data.each)
        return torch.stack([one.mean() for many in found.values() for one in many.values()]).sum()

    optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=device != "cpu")
    return Step(net, loss, optimizer, device != "cpu")


def measured(name: str, batch: int, make: Callable[[], Step], setting: Setting, report: Report,
             best: Limits) -> None:  # fmt: skip
    """Samples a second and the share of the limit; on a card from a recording too."""
    step = make().counted()
    told_by(name, batch, {"as it is": step}, step, setting, report, best)
    if setting.gpu:
        what = f"{name}, batch {batch}, recorded"

        def again() -> None:
            # a network of its own: gradients that were made on another stream cannot be recorded
            ways = {"as it is": step, "recorded": make().recorded()}
            times = told_by(name, batch, ways, step, setting, report, best, "recorded")
            report.add(faster(f"{name}, batch {batch}", times, "recorded", "as it is"))

        report.part(what, again)


def compiled(name: str, batch: int, make: Callable[[], Step], setting: Setting, report: Report,
             best: Limits) -> None:  # fmt: skip
    """The same step with its loss compiled, beside the step as it is."""
    torch.compiler.reset()
    step = make().counted()
    loss = torch.compile(step.loss, dynamic=False)
    ways = {"as it is": step, "compiled": lambda: step(loss)}
    times = told_by(name, batch, ways, step, setting, report, best, "compiled")
    report.add(faster(f"{name}, batch {batch}", times, "compiled", "as it is"))


def told_by(
    name: str,
    batch: int,
    ways: dict[str, Callable[[], object]],
    step: Step,
    setting: Setting,
    report: Report,
    best: Limits,
    way: str = "as it is",
) -> Times:
    """Time ways by turns, and tell of one of them."""
    times = race(ways, setting.rounds, timer(setting.device), limit=5.0 if setting.gpu else 20.0)
    least, taken = best.seconds(step), times.of(way)
    share = Spread(least / taken.median, least / taken.high, least / taken.low)
    what = f"{name}, batch {batch}, {way}"
    report.add(Row(what, "step", "", "of the limit", share, None, taken))
    report.facts[what] = {
        "samples_per_second": batch / taken.median,
        "operations_per_second": step.flops / taken.median,
        "share_of_operations": step.flops / taken.median / best.flops,
        "share_of_bandwidth": step.moved / taken.median / best.bytes,
        "operations_a_sample": step.flops / batch,
        "bytes_a_sample": step.moved / batch,
    }
    return times


def controls(setting: Setting, report: Report) -> None:
    """VGG-att beside its controls once more, each step out of a recording."""
    width = setting.some(8, 1) / 8
    batch = setting.some(256, 4)
    for pair in PAIRS:

        def raced(pair: tuple[str, str] = pair) -> None:
            made = {label: control(label, batch, setting.device, width) for label in pair}
            ways = {label: step.recorded() for label, step in made.items()}
            times = race(ways, 2 * setting.rounds, timer(setting.device), limit=4.0)
            report.add(dearer(f"{pair[0]}, recorded", times, *pair, at_most(CONTROL)))

        report.part(f"{pair[0]}, recorded", raced)


# --- the loop of the recipes


@dataclass(frozen=True)
class Loops:
    """The training loop of each row, `steps` steps a run of `batch` pictures each."""

    ways: dict[str, Callable[[], object]]
    steps: int
    batch: int


@contextmanager
def looping(setting: Setting, pair: tuple[str, str]) -> Iterator[Loops]:
    """VGG-att and its control in the training loop itself, with data that lies on the card."""
    from overt.recipes import settings
    from overt.recipes.ltpa import building as ltpa_building
    from overt.recipes.ltpa import recipe as ltpa
    from overt.recipes.recipe import Context
    from overt.train import Reporter, checkpoint
    from overt.train.loop import seed_everything

    names = tuple(map(str, range(CLASSES)))
    steps, count = setting.some(BLOCK, 3), setting.some(45_000, 2_000)
    train = _pictures(count, setting.device)

    def built(label: str, out: Path) -> Any:
        changes = [*ltpa.changes(ltpa.models()[label]), f"train.steps={steps}"]
        recipe = settings.apply(ltpa.ltpa_cifar100(), changes)
        assert isinstance(recipe, ltpa.LtpaRecipe)
        seed_everything(0)
        context = Context(out / label, 0, setting.device, None)
        made = ltpa_building.trained(recipe, context, train, None, _pictures(8, "cpu"), names)
        made.model.to(setting.device)
        return made.stages[0], recipe.train.batch

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(checkpoint, "save"):
        made = {label: built(label, Path(folder)) for label in pair}
        ways: dict[str, Callable[[], object]] = {
            label: lambda stage=stage: stage.run(False, Reporter(enabled=False))
            for label, (stage, _) in made.items()
        }
        yield Loops(ways, steps, made[pair[0]][1])


def _pictures(many: int, device: str) -> Any:
    """Random pictures and classes, as a data set that lies there."""
    from overt.data.resident import Resident

    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (many, 3, 32, 32), generator=drawn, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (many,), generator=drawn)
    ids = tuple(map(str, range(many)))
    return Resident("random", "train", ids, images.to(device), labels.to(device), "")


def loop(setting: Setting, report: Report) -> None:
    """VGG-att beside its controls in the training loop."""
    for pair in PAIRS:
        with looping(setting, pair) as loops:
            times = race(loops.ways, min(9, 2 * setting.rounds), timer(setting.device), limit=8.0)
        rate = loops.steps * loops.batch / times.of(pair[0]).median
        told = {"samples_per_second": rate, "batch": loops.batch}
        report.facts[f"loop, {pair[0]}"] = told
        report.add(dearer(f"the loop, {rate:.0f} images / s", times, *pair, at_most(CONTROL)))


def networks(setting: Setting) -> dict[str, tuple[int, Callable[[], Step]]]:
    """What is trained, by name: samples a step, and how it is made."""
    width = 1.0 if not setting.quick else 0.125
    batch = setting.some(256 if setting.gpu else 8, 2)
    return {
        "VGG-att2": (batch, partial(classifier, batch, setting.device, width)),
        "captioner": (batch, partial(captioner, batch, setting.device)),
    }


def section(setting: Setting, report: Report) -> None:
    """The limits first, then both networks, then the loop of a recipe."""
    torch.set_num_threads(1)
    best = limits(setting)
    report.facts["limits"] = {"operations_per_second": best.flops, "bytes_per_second": best.bytes}
    for name, (batch, make) in networks(setting).items():
        report.part(name, partial(measured, name, batch, make, setting, report, best))
    if setting.gpu:
        report.part("controls", partial(controls, setting, report))
        report.part("the loop", partial(loop, setting, report))
