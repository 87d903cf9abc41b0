"""Training throughput compared with the limits of the hardware.

The limits are measured in the same run: a large matrix product for operations, a large copy for
bytes. The time of a step is at least its operations divided by the one, and its bytes divided by
the other: saved tensors are written once and read once, a parameter is read twice, its gradient
written and read, and its optimizer state read and written. The reported share is the larger of the
two times divided by that of the step. Operations are counted by PyTorch; the number of bytes is a
lower bound, reached only with perfect fusion. On a busy machine the measured limits are too low,
and a share may exceed one. On a GPU the same step is also captured in a CUDA graph, as with
`train.graph=true`.
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

from overt import losses
from overt.data.batch import Batch
from overt.papers.ltpa.vgg import vgg_attention

from .captions import random_images
from .clock import Spread, Times, capture_graph, device_clock, saved_bytes, time_variants
from .report import Report, Row, Setting, at_most, relative_time_row, speedup_row

CLASSES = 100
BLOCK = 25  # steps of the loop per timing
CONTROL = 1.10  # maximum time relative to the network without attention
PAIRS = (("att2-concat-pc", "att2-mean"), ("att3-concat-pc", "att3-mean"))


@dataclass(frozen=True)
class HardwareLimits:
    """Peak operations and bytes per second of the machine."""

    flops: float
    bytes: float

    def seconds(self, step: "Step") -> float:
        """Return the minimum time of a step."""
        return max(step.flops / self.flops, step.bytes_moved / self.bytes)


def measure_limits(setting: Setting) -> HardwareLimits:
    """Measure a matrix product in the training precision, and a copy."""
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    n = setting.size(8192 if setting.gpu else 1536, 256)
    one, two = (torch.randn(n, n, device=setting.device, dtype=dtype) for _ in range(2))
    many = setting.size(2**30 if setting.gpu else 2**27, 2**22)
    source = torch.empty(many, dtype=torch.uint8, device=setting.device).zero_()
    sink = torch.empty_like(source)
    variants: dict[str, Callable[[], object]] = {
        "product": lambda: one @ two,
        "copy": lambda: sink.copy_(source),
    }
    times = time_variants(variants, 2 * setting.rounds, device_clock(setting.device), limit=10.0)
    return HardwareLimits(
        2 * n**3 / min(times.seconds["product"]), 2 * many / min(times.seconds["copy"])
    )


@dataclass
class Step:
    """A network, its loss and its optimizer, with the operations and bytes of a step."""

    net: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    bf16: bool
    flops: float = 0.0
    bytes_moved: float = 0.0

    def __call__(self, loss: Callable[[], Tensor] | None = None) -> None:
        """Run forward, backward and the update."""
        self.compute_gradients(loss)
        self.optimizer.step()

    def compute_gradients(self, loss: Callable[[], Tensor] | None = None) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad(set_to_none=True)
        self.value(loss).backward()

    def in_cuda_graph(self) -> Callable[[], None]:
        """Return the same step with its gradients from a CUDA graph, as in `fit`."""
        replay = capture_graph(self.compute_gradients)
        gradients = [(p, p.grad) for p in self.net.parameters() if p.grad is not None]

        def run() -> None:
            replay()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self.optimizer.step()

        return run

    def value(self, loss: Callable[[], Tensor] | None = None) -> Tensor:
        """Return the loss, in bfloat16 on a GPU."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            return (loss or self.loss)()

    def count_work(self) -> "Step":
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
        self.bytes_moved = 2 * saved_bytes(self.value) + 5 * size + state
        return self


def vgg_step(batch: int, device: str, width: float = 1.0) -> Step:
    """Return a step of VGG-att2 on images of 32 x 32 pixels."""
    torch.manual_seed(0)
    net: Any = vgg_attention(CLASSES, levels=2, width=width).to(device)
    return classifier_step(net, batch, device)


def classifier_step(net: Any, batch: int, device: str) -> Step:
    """Return a step of an image classifier."""
    net.to(memory_format=torch.channels_last).train()
    images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (batch,))
    samples = Batch(tuple(map(str, range(batch))), images=images, labels=labels).to(device)
    labels_on_device = samples.labels
    assert labels_on_device is not None

    def loss() -> Tensor:
        return losses.classification(net(samples).prediction, labels_on_device).mean()

    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    return Step(net, loss, optimizer, device != "cpu")


def control_step(label: str, batch: int, device: str, width: float = 1.0) -> Step:
    """Return a step of a row of Learn to Pay Attention."""
    from overt.papers.ltpa import config
    from overt.papers.ltpa import train as train_module

    torch.manual_seed(0)
    net: Any = train_module.build_network(
        replace(config.table_models()[label], width=width), CLASSES
    ).to(device)
    return classifier_step(net, batch, device)


def captioner_step(batch: int, device: str) -> Step:
    """Return a next-word training step of the paper's captioner."""
    from overt.nn.vqa.image_encoders import CachedImageEncoder
    from overt.papers.a2.config import A2Align, a2_coco
    from overt.papers.a2.model import build_captioner
    from overt.papers.a2.train import next_word_losses

    torch.manual_seed(0)
    config, words = a2_coco(), 10_000
    data = random_images(max(64, batch), words, 49, 1280).to(device)
    net: Any = (
        build_captioner(config.model, A2Align(), words, CachedImageEncoder(1280, (7, 7)))
        .to(device)
        .train()
    )
    part = data.batch(range(batch))

    def loss() -> Tensor:
        found = next_word_losses(net, part, config, data.each)
        return torch.stack([one.mean() for many in found.values() for one in many.values()]).sum()

    optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=device != "cpu")
    return Step(net, loss, optimizer, device != "cpu")


def measure(
    name: str,
    batch: int,
    make: Callable[[], Step],
    setting: Setting,
    report: Report,
    best: HardwareLimits,
) -> None:
    """Report samples per second and the share of the limit; on a GPU also in a CUDA graph."""
    step = make().count_work()
    time_and_report(name, batch, {"eager": step}, step, setting, report, best)
    if setting.gpu:
        label = f"{name}, batch {batch}, CUDA graph"

        def measure_graph() -> None:
            # a separate network: gradients allocated on another stream cannot be captured
            variants = {"eager": step, "CUDA graph": make().in_cuda_graph()}
            times = time_and_report(
                name, batch, variants, step, setting, report, best, "CUDA graph"
            )
            report.add(speedup_row(f"{name}, batch {batch}", times, "CUDA graph", "eager"))

        report.part(label, measure_graph)


def measure_compiled(
    name: str,
    batch: int,
    make: Callable[[], Step],
    setting: Setting,
    report: Report,
    best: HardwareLimits,
) -> None:
    """Compare the step with a compiled loss with the eager step."""
    torch.compiler.reset()
    step = make().count_work()
    loss = torch.compile(step.loss, dynamic=False)
    variants = {"eager": step, "compiled": lambda: step(loss)}
    times = time_and_report(name, batch, variants, step, setting, report, best, "compiled")
    report.add(speedup_row(f"{name}, batch {batch}", times, "compiled", "eager"))


def time_and_report(
    name: str,
    batch: int,
    variants: dict[str, Callable[[], object]],
    step: Step,
    setting: Setting,
    report: Report,
    best: HardwareLimits,
    variant: str = "eager",
) -> Times:
    """Time the variants and report one of them."""
    times = time_variants(
        variants, setting.rounds, device_clock(setting.device), limit=5.0 if setting.gpu else 20.0
    )
    minimum, elapsed = best.seconds(step), times.spread(variant)
    share = Spread(minimum / elapsed.median, minimum / elapsed.high, minimum / elapsed.low)
    label = f"{name}, batch {batch}, {variant}"
    report.add(Row(label, "step", "", "share of the limit", share, None, elapsed))
    report.facts[label] = {
        "samples_per_second": batch / elapsed.median,
        "operations_per_second": step.flops / elapsed.median,
        "share_of_operations": step.flops / elapsed.median / best.flops,
        "share_of_bandwidth": step.bytes_moved / elapsed.median / best.bytes,
        "operations_per_sample": step.flops / batch,
        "bytes_per_sample": step.bytes_moved / batch,
    }
    return times


def compare_controls(setting: Setting, report: Report) -> None:
    """Compare VGG-att with its controls, both in CUDA graphs."""
    width = setting.size(8, 1) / 8
    batch = setting.size(256, 4)
    for pair in PAIRS:

        def measure_pair(pair: tuple[str, str] = pair) -> None:
            made = {label: control_step(label, batch, setting.device, width) for label in pair}
            variants = {label: step.in_cuda_graph() for label, step in made.items()}
            times = time_variants(
                variants, 2 * setting.rounds, device_clock(setting.device), limit=4.0
            )
            report.add(relative_time_row(f"{pair[0]}, CUDA graph", times, *pair, at_most(CONTROL)))

        report.part(f"{pair[0]}, CUDA graph", measure_pair)


# --- training loop


@dataclass(frozen=True)
class TrainingLoops:
    """Training loop of each row: `steps` steps per run, `batch` images per step."""

    variants: dict[str, Callable[[], object]]
    steps: int
    batch: int


@contextmanager
def training_loops(setting: Setting, pair: tuple[str, str]) -> Iterator[TrainingLoops]:
    """Set up VGG-att and its control in the training loop, with data on the device."""
    from overt.experiments import settings
    from overt.experiments.recipe import RunContext
    from overt.papers.ltpa import config as ltpa
    from overt.papers.ltpa import train as ltpa_building
    from overt.train import Reporter, checkpoint
    from overt.train.compare_loops import seed_everything

    names = tuple(map(str, range(CLASSES)))
    steps, count = setting.size(BLOCK, 3), setting.size(45_000, 2_000)
    train = _random_dataset(count, setting.device)

    def build_stage(label: str, out: Path) -> Any:
        changes = [*ltpa.model_changes(ltpa.table_models()[label]), f"train.steps={steps}"]
        config = settings.apply(ltpa.ltpa_cifar100(), changes)
        assert isinstance(config, ltpa.LtpaRecipe)
        seed_everything(0)
        context = RunContext(out / label, 0, setting.device, None)
        made = ltpa_building.build_experiment(
            config, context, train, None, _random_dataset(8, "cpu"), names
        )
        made.model.to(setting.device)
        return made.stages[0], config.train.batch

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(checkpoint, "save"):
        made = {label: build_stage(label, Path(folder)) for label in pair}
        variants: dict[str, Callable[[], object]] = {
            label: lambda stage=stage: stage.run(False, Reporter(enabled=False))
            for label, (stage, _) in made.items()
        }
        yield TrainingLoops(variants, steps, made[pair[0]][1])


def _random_dataset(many: int, device: str) -> Any:
    """Return a dataset of random images and classes on the device."""
    from overt.data.in_memory_images import InMemoryImages

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (many, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (many,), generator=generator)
    ids = tuple(map(str, range(many)))
    return InMemoryImages("random", "train", ids, images.to(device), labels.to(device), "")


def compare_loops(setting: Setting, report: Report) -> None:
    """Compare VGG-att with its controls in the training loop."""
    for pair in PAIRS:
        with training_loops(setting, pair) as loops:
            times = time_variants(
                loops.variants, min(9, 2 * setting.rounds), device_clock(setting.device), limit=8.0
            )
        rate = loops.steps * loops.batch / times.spread(pair[0]).median
        facts = {"samples_per_second": rate, "batch": loops.batch}
        report.facts[f"training loop, {pair[0]}"] = facts
        report.add(
            relative_time_row(
                f"training loop, {rate:.0f} images / s", times, *pair, at_most(CONTROL)
            )
        )


def networks(setting: Setting) -> dict[str, tuple[int, Callable[[], Step]]]:
    """Return batch size and constructor of each network."""
    width = 1.0 if not setting.quick else 0.125
    batch = setting.size(256 if setting.gpu else 8, 2)
    return {
        "VGG-att2": (batch, partial(vgg_step, batch, setting.device, width)),
        "captioner": (batch, partial(captioner_step, batch, setting.device)),
    }


def section(setting: Setting, report: Report) -> None:
    """Measure the limits, both networks, then the training loop."""
    torch.set_num_threads(1)
    best = measure_limits(setting)
    report.facts["limits"] = {"operations_per_second": best.flops, "bytes_per_second": best.bytes}
    for name, (batch, make) in networks(setting).items():
        report.part(name, partial(measure, name, batch, make, setting, report, best))
    if setting.gpu:
        report.part("controls", partial(compare_controls, setting, report))
        report.part("training loop", partial(compare_loops, setting, report))
