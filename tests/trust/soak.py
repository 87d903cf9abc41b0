"""Thousands of steps, and what is left behind: `python -m tests.trust.soak OUT KIND:STEPS...`.

One JSON object a kind on standard output: bytes a step of the process, blocks of memory a step of
Python's objects and, with OVERT_TRUST=full, their bytes, all after warm-up; and how many files and
threads came or went.
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

from overt.capture.seen import Seen
from overt.data.batch import Batch
from overt.models.adopting.adopted import Adopted, Supervised, adopt
from overt.models.captioning.captioner import CachedRegions, Captioner, CaptionSizes
from overt.models.captioning.decoding import Rules, sample
from overt.supervise import Loss, classification, surrogates
from overt.supervise.reward import by_tokens, log_probabilities, self_critical
from overt.supervise.surrogate.masks import Grids
from overt.train import Limits, Losses, ParameterSet, Progress, fit
from tests.supervise.surrogate.toys import Planted
from tests.train.toys import Numbers, make
from tests.train.toys import step as plain_step
from tests.trust.together import Aside

PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY = 25  # steps between two looks
WARM = 0.3  # of the steps, before anything is held against a run


class Gauge:
    """Looks at memory, files and threads now and then."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.seen: list[tuple[int, ...]] = []

    def __call__(self) -> None:
        """One more step is done."""
        self.done += 1
        if self.done == round(self.steps * WARM):
            gc.collect()
            gc.freeze()  # what is there now is no leak, and need not be looked through again
        if self.done % EVERY == 0 and self.done >= self.steps * WARM:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            blocks, traced = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
            self.seen.append((self.done, resident, blocks, traced, files, threads))

    def told(self) -> dict[str, float]:
        """Bytes a step from the first third of what was seen to the last, by their medians."""
        third = len(self.seen) // 3
        first, last = self.seen[:third], self.seen[-third:]
        between = statistics.median(x[0] for x in last) - statistics.median(x[0] for x in first)
        slopes = [
            (statistics.median(x[at] for x in last) - statistics.median(x[at] for x in first))
            / between
            for at in (1, 2, 3)
        ]
        files, threads = (
            max(x[at] for x in self.seen) - min(x[at] for x in self.seen) for at in (4, 5)
        )
        return {
            "steps": self.done,
            "resident": slopes[0],
            "blocks": slopes[1],
            "objects": slopes[2],
            "files": files,
            "threads": threads,
        }


# --- what is done thousands of times


def train(out: Path, steps: int, after: Callable[[Losses], None]) -> None:
    """`fit` with two optimizers, dropout, checkpoints and a log."""

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = plain_step(model, batch, progress)
        after(losses)
        return losses

    net, sets = make()
    limits = Limits(epochs=10**6, batch=8, steps=steps, save_every=200, log_every=20)
    fit(net, Numbers(), step, sets, limits, out=out, seed=0, device="cpu")


def plain(out: Path, gauge: Gauge) -> None:
    """Plain training."""
    train(out, gauge.steps, lambda losses: gauge())


def leaking(out: Path, gauge: Gauge) -> None:
    """The counterpart: every loss is kept for a mean at the end, and its graph with it."""
    kept = []

    def keep(losses: Losses) -> None:
        kept.append(losses)
        gauge()

    train(out, gauge.steps, keep)


def opening(out: Path, gauge: Gauge) -> None:
    """The counterpart for files: a log that is opened at every step, and never closed."""
    kept = []

    def keep(losses: Losses) -> None:
        kept.append(open(out / "log.jsonl"))  # noqa: SIM115  that is the fault
        gauge()

    train(out, gauge.steps, keep)


def watched(out: Path, gauge: Gauge) -> None:
    """Training on what a foreign model attends to, through `adopt` and `watch`."""

    def second(seen: Seen, batch: Mapping[str, Tensor]) -> Loss:
        each = -seen.calls[0].log_weights()[:, 0, 0, 1]
        return Loss(each.sum(), torch.tensor(len(each)))

    model = adopt(Aside(), lambda model, batch: model(batch["x"]), loss=second)

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert isinstance(net, Adopted) and batch.features is not None and batch.labels is not None
        x = batch.features[:, 0, :6, None].expand(-1, -1, 6)
        output = net({"x": x})
        assert isinstance(output, Supervised) and isinstance(output.loss, Loss)
        gauge()
        task = classification(output.prediction, batch.labels)
        return {"model": {"task": task, "attention": output.loss}}

    sets = {"model": ParameterSet(torch.optim.AdamW(model.parameters(), lr=1e-3))}
    limits = Limits(epochs=10**6, batch=8, steps=gauge.steps, save_every=500, log_every=20)
    fit(model, Numbers(), step, sets, limits, out=out, seed=0, device="cpu")


class Cells:
    """Items of sixteen cells, as many as there are steps."""

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


class Silent(Planted):
    """Without the list of what it was asked."""

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Any:
        self.asked.clear()
        return super().decide(features, mask)


def searching(out: Path, gauge: Gauge) -> None:
    """The search for surrogates, sample by sample, in shards on disk."""
    surrogates(
        Silent(),
        Cells(gauge.steps),
        out,
        masks=Grids(10, 2),
        shard=100,
        batch=1,
        on_progress=lambda done, total: gauge(),
    )


def critical(out: Path, gauge: Gauge) -> None:
    """Self-critical steps of a captioner: draw, reward, tell, step."""
    torch.manual_seed(0)
    sizes = CaptionSizes(vocabulary=10, width=8, layers=1, heads=2, inner=8)
    model = Captioner(sizes, CachedRegions(4)).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = Batch(ids=("a", "b"), features=torch.randn(2, 3, 4), boxes=torch.rand(2, 3, 4))
    rules = Rules(longest=3)
    worth = by_tokens(lambda texts, images: [float(len(set(text))) for text in texts], [0, 1], 2)
    for _ in range(gauge.steps):
        memory = model.encode(batch)

        def tell(drawn: Any, memory: Any = memory) -> Tensor:
            begin = torch.full_like(drawn.tokens[:, :1], rules.begin)
            given = torch.cat([begin, drawn.tokens[:, :-1]], dim=1)
            spread = memory.select(torch.tensor([0, 0, 1, 1]))
            return log_probabilities(model.write(spread, given).logits, drawn.tokens, rules.never)

        critique = self_critical(
            lambda memory=memory: sample(model, batch, 2, rules=rules, features=memory),
            worth,
            tell,
        )
        optimizer.zero_grad()
        critique.loss.mean().backward()
        optimizer.step()
        gauge()


KINDS = {one.__name__: one for one in (plain, watched, searching, critical, leaking, opening)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("OVERT_TRUST") == "full":
        tracemalloc.start(1)  # doubles the time
    for word in sys.argv[2:]:
        kind, _, steps = word.partition(":")
        gc.unfreeze()
        gauge = Gauge(int(steps))
        KINDS[kind](Path(sys.argv[1]) / kind, gauge)
        print(json.dumps({"kind": kind, **gauge.told()}), flush=True)
