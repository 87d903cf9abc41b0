"""Measure leaks over thousands of steps: `python -m tests.trust.soak OUT KIND:STEPS...`.

Prints one JSON object per kind: resident bytes per step, blocks of Python objects per step and,
with OVERT_TRUST=full, their bytes, all after warm-up; and how many more files and threads are open.
"""

import gc
import json
import os
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overt.capture.trace import AttentionTrace
from overt.data.batch import Batch
from overt.losses import Loss, classification
from overt.losses.caption_reward import log_probabilities, self_critical, token_reward
from overt.nn.captioning.captioner import CachedRegionEncoder, Captioner, CaptionerSizes
from overt.nn.captioning.decoding import DecodingRules, sample
from overt.nn.wrappers.wrapped_model import SupervisedOutput, WrappedModel, wrap
from overt.targets import generate_surrogates
from overt.targets.surrogate.masks import GridMasks
from overt.train import FitConfig, Losses, ParameterSet, Progress, fit
from tests.targets.surrogate.toys import Planted
from tests.train.toys import Numbers, make
from tests.train.toys import step as plain_step
from tests.trust.two_processes import SideAttention

PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL = 25  # steps between two measurements
WARMUP = 0.3  # share of the steps before the first measurement


class LeakMeter:
    """Measures memory, files and threads at intervals."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.measurements: list[tuple[int, ...]] = []

    def __call__(self) -> None:
        """Count a step."""
        self.done += 1
        if self.done == round(self.steps * WARMUP):
            gc.collect()
            gc.freeze()  # present objects are not leaks and need no further collection
        if self.done % INTERVAL == 0 and self.done >= self.steps * WARMUP:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            blocks, traced = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
            self.measurements.append((self.done, resident, blocks, traced, files, threads))

    def growth(self) -> dict[str, float]:
        """Return growth between the medians of the first and last third, of memory per step.

        Medians also for files: a thread of TensorBoard opens its file for a moment at each flush.
        """
        third = len(self.measurements) // 3
        first, last = self.measurements[:third], self.measurements[-third:]
        steps_between = statistics.median(x[0] for x in last) - statistics.median(
            x[0] for x in first
        )
        resident, blocks, objects, files, threads = (
            statistics.median(x[at] for x in last) - statistics.median(x[at] for x in first)
            for at in range(1, 6)
        )
        return {
            "steps": self.done,
            "resident": resident / steps_between,
            "blocks": blocks / steps_between,
            "objects": objects / steps_between,
            "files": files,
            "threads": threads,
        }


# --- work that is repeated


def train(out: Path, steps: int, after: Callable[[Losses], None]) -> None:
    """`fit` with two optimizers, dropout, checkpoints and a log."""

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = plain_step(model, batch, progress)
        after(losses)
        return losses

    net, sets = make()
    limits = FitConfig(epochs=10**6, batch=8, steps=steps, save_every=200, log_every=20)
    fit(net, Numbers(), step, sets, limits, out=out, seed=0, device="cpu")


def plain_training(out: Path, meter: LeakMeter) -> None:
    """Plain training."""
    train(out, meter.steps, lambda losses: meter())


def leak_memory(out: Path, meter: LeakMeter) -> None:
    """The leaking counterpart: every loss is kept with its graph."""
    kept = []

    def keep(losses: Losses) -> None:
        kept.append(losses)
        meter()

    train(out, meter.steps, keep)


def leak_files(out: Path, meter: LeakMeter) -> None:
    """The counterpart for files: a log is opened at every step and never closed."""
    kept = []

    def keep(losses: Losses) -> None:
        kept.append(open(out / "log.jsonl"))  # noqa: SIM115  the leak
        meter()

    train(out, meter.steps, keep)


def attention_training(out: Path, meter: LeakMeter) -> None:
    """Training with an attention loss through `wrap` and `watch`."""

    def second_key_loss(trace: AttentionTrace, batch: Mapping[str, Tensor]) -> Loss:
        each = -trace.calls[0].log_weights()[:, 0, 0, 1]
        return Loss(each.sum(), torch.tensor(len(each)))

    model = wrap(SideAttention(), lambda model, batch: model(batch["x"]), loss=second_key_loss)

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert (
            isinstance(net, WrappedModel)
            and batch.features is not None
            and batch.labels is not None
        )
        x = batch.features[:, 0, :6, None].expand(-1, -1, 6)
        output = net({"x": x})
        assert isinstance(output, SupervisedOutput) and isinstance(output.loss, Loss)
        meter()
        task = classification(output.prediction, batch.labels)
        return {"model": {"task": task, "attention": output.loss}}

    sets = {"model": ParameterSet(torch.optim.AdamW(model.parameters(), lr=1e-3))}
    limits = FitConfig(epochs=10**6, batch=8, steps=meter.steps, save_every=500, log_every=20)
    fit(model, Numbers(), step, sets, limits, out=out, seed=0, device="cpu")


class Cells:
    """Items of sixteen cells, one per step."""

    name, split = "cells", "train"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        return f"cells {self.count}"

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [torch.Generator().manual_seed(at) for at in indices]
        cells = torch.stack([torch.rand(16, 1, generator=one) for one in rows])
        ids = tuple(f"cell-{at}" for at in indices)
        return Batch(ids, features=cells, labels=torch.ones(len(ids), dtype=torch.long))


class PlantedWithoutLog(Planted):
    """Clears the list of requests."""

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Any:
        self.batch_sizes.clear()
        return super().decide(features, mask)


def surrogate_search(out: Path, meter: LeakMeter) -> None:
    """Surrogate search, sample by sample, with shards on disk."""
    generate_surrogates(
        PlantedWithoutLog(),
        Cells(meter.steps),
        out,
        masks=GridMasks(10, 2),
        shard=100,
        batch=1,
        on_progress=lambda done, total: meter(),
    )


def self_critical_training(out: Path, meter: LeakMeter) -> None:
    """Self-critical steps of a captioner."""
    torch.manual_seed(0)
    sizes = CaptionerSizes(vocabulary=10, width=8, layers=1, heads=2, inner=8)
    model = Captioner(sizes, CachedRegionEncoder(4)).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = Batch(ids=("a", "b"), features=torch.randn(2, 3, 4), boxes=torch.rand(2, 3, 4))
    rules = DecodingRules(max_length=3)
    reward = token_reward(
        lambda texts, images: [float(len(set(text))) for text in texts], [0, 1], 2
    )
    for _ in range(meter.steps):
        memory = model.encode(batch)

        def log_probabilities_of(sampled: Any, memory: Any = memory) -> Tensor:
            begin = torch.full_like(sampled.tokens[:, :1], rules.begin)
            inputs = torch.cat([begin, sampled.tokens[:, :-1]], dim=1)
            spread = memory.select(torch.tensor([0, 0, 1, 1]))
            return log_probabilities(
                model.decode_captions(spread, inputs).logits, sampled.tokens, rules.forbidden
            )

        critique = self_critical(
            lambda memory=memory: sample(model, batch, 2, rules=rules, features=memory),
            reward,
            log_probabilities_of,
        )
        optimizer.zero_grad()
        critique.loss.mean().backward()
        optimizer.step()
        meter()


KINDS = {
    one.__name__: one
    for one in (
        plain_training,
        attention_training,
        surrogate_search,
        self_critical_training,
        leak_memory,
        leak_files,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("OVERT_TRUST") == "full":
        tracemalloc.start(1)  # doubles the time
    for word in sys.argv[2:]:
        kind, _, steps = word.partition(":")
        gc.unfreeze()
        meter = LeakMeter(int(steps))
        KINDS[kind](Path(sys.argv[1]) / kind, meter)
        print(json.dumps({"kind": kind, **meter.growth()}), flush=True)
