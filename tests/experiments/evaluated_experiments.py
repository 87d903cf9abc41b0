"""Evaluate experiments with random weights: equal results in any number of processes.

Run `torchrun -m tests.experiments.evaluated_experiments OUT`. The first process writes
OUT/RECIPE, the others OUT/rank-N/RECIPE.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from overt import io
from overt.experiments import evaluate, settings
from overt.experiments.experiment import to_json_value
from overt.experiments.recipe import RunContext
from overt.papers.a2 import evaluate as a2
from overt.papers.catalog import build, find_recipe
from overt.papers.vgp import evaluate as vgp
from overt.train import Reporter, processes
from overt.train.distributed import Processes
from overt.train.loop import seed_everything
from overt.viz.gallery_sample import save_gallery
from tests.papers.a2 import small as a2_small
from tests.papers.vgp import small as vgp_small

SCENES = ("data.train=4", "data.val=4", "data.test=5", "train.card=0")
SETS = {
    "ltpa-scenes": (*SCENES, "model.width=0.05"),
    "han-scenes": SCENES,
    "ssa-scenes": SCENES,
    "vgp-scenes": vgp_small.SETS,
    "a2-scenes": (*a2_small.SETS, "data.test=7"),
}


def small_portions(count: int, size: int) -> list[range]:
    """Return batches of two items at most, so that processes have something to share."""
    step = min(size, 2)
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def evaluate_all(out: Path) -> None:
    """Evaluate one recipe of each paper without training."""
    with (
        mock.patch.object(evaluate, "portions", small_portions),
        mock.patch.object(a2, "portions", small_portions),
        mock.patch.object(vgp, "portions", small_portions),
    ):
        for name, sets in SETS.items():
            evaluate_recipe(name, sets, out)


def evaluate_recipe(name: str, sets: tuple[str, ...], out: Path) -> None:
    """Write all results of the evaluation of a recipe, and the number of batches evaluated here."""
    seed_everything(0)
    recipe = settings.apply(find_recipe(name), list(sets))
    experiment = build(recipe, RunContext(out / "runs" / name, device="cpu"))
    set_random_buffers(experiment.model)
    experiment.model.eval()
    with torch.no_grad(), counted_items() as count:
        found = experiment.evaluate(Reporter(enabled=False))
    io.write_json(out / name / "batches.json", count)
    io.write_arrays(out / name / "samples.npz", dict(found.samples))
    io.write_arrays(out / name / "elsewhere.npz", dict(found.elsewhere))
    io.write_json(out / name / "results.json", to_json_value([found.ours, found.groups]))
    save_gallery(out / name / "gallery", found.gallery)


@contextmanager
def counted_items() -> Iterator[list[int]]:
    """Count the items of `Processes.map` that this process computes, call by call."""
    counts: list[int] = []
    real = Processes.map

    def counting(ranks: Processes, function: Callable[[Any], Any], items: Sequence[Any]) -> Any:
        counts.append(0)

        def count(item: Any) -> Any:
            counts[-1] += 1
            return function(item)

        return real(ranks, count, items)

    with mock.patch.object(Processes, "map", counting):
        yield counts


def set_random_buffers(model: nn.Module) -> None:
    """Give batch norm statistics that differ from those at the start."""
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand_like(buffer) + 0.5)


if __name__ == "__main__":
    rank = processes("cpu").rank
    folder = Path(sys.argv[1]) if rank == 0 else Path(sys.argv[1], f"rank-{rank}")
    os.environ["OVERT_CACHE"] = str(folder / "cache")
    evaluate_all(folder)
