"""What attention costs in training: VGG with attention beside its control, by turns on one device.

The other networks that differ in size come after them, one by one.

    python benchmarks/ltpa_speed.py [OUT.json]

The training loop of the recipes runs on random pictures of 32 x 32 pixels in blocks of 25 steps,
without validation and without writing checkpoints. Times are those the loop takes itself.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from overt.data.resident import Resident
from overt.recipes import settings
from overt.recipes.experiment import Experiment
from overt.recipes.ltpa import building as ltpa_building
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.recipe import Context
from overt.train import Reporter, checkpoint
from overt.train.loop import seed_everything

STEPS, ROUNDS, PICTURES = 25, 8, 45000
CLASSES = tuple(map(str, range(100)))
PAIRS = (("att2-concat-pc", "att2-mean"), ("att3-concat-pc", "att3-mean"))
OTHERS = ("vgg", "vgg-gap", "vgg-pan", "resnet-164", "rn164-att2")


def pictures(count: int, device: str) -> Resident:
    """Random pictures and labels."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=drawn, dtype=torch.uint8)
    labels = torch.randint(0, len(CLASSES), (count,), generator=drawn)
    ids = tuple(map(str, range(count)))
    return Resident("random", "train", ids, images.to(device), labels.to(device), "")


def built(label: str, train: Resident, out: Path, device: str) -> Experiment:
    """A row of the table, to be trained for one block at a time."""
    changes = [*ltpa.changes(ltpa.models()[label]), f"train.steps={STEPS}"]
    recipe = settings.apply(ltpa.ltpa_cifar100(), changes)
    assert isinstance(recipe, ltpa.LtpaRecipe)
    seed_everything(0)
    context = Context(out / label, 0, device, None)
    made = ltpa_building.trained(recipe, context, train, None, pictures(8, "cpu"), CLASSES)
    made.model.to(device)
    return made


def seconds_a_step(one: Experiment) -> float:
    """A block of steps."""
    fitted = one.stages[0].run(False, Reporter(enabled=False))
    assert fitted is not None
    return fitted.seconds / fitted.steps


def by_turns(pair: tuple[str, str], train: Resident, out: Path, device: str) -> dict[str, Any]:
    """Both rows of a pair, block after block, the first and the second of a round in turn."""
    rows = {label: built(label, train, out, device) for label in pair}
    for one in rows.values():
        seconds_a_step(one)  # the first block is slower
    found: dict[str, list[float]] = {label: [] for label in pair}
    for number in range(ROUNDS):
        for label in pair if number % 2 else pair[::-1]:
            found[label].append(seconds_a_step(rows[label]))
    attention, control = (statistics.median(found[label]) for label in pair)
    return {"seconds_a_step": found, "ratio": attention / control}


def alone(label: str, train: Resident, out: Path, device: str) -> dict[str, Any]:
    """A row by itself, two blocks after the first."""
    one = built(label, train, out, device)
    return {"seconds_a_step": {label: [seconds_a_step(one) for _ in range(3)][1:]}}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = pictures(PICTURES, device)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(checkpoint, "save"),
    ):
        found = {pair[0]: by_turns(pair, train, Path(folder), device) for pair in PAIRS}
        found |= {label: alone(label, train, Path(folder), device) for label in OTHERS}
    for label, one in found.items():
        for row, seconds in one["seconds_a_step"].items():
            print(f"{row}: {1000 * statistics.median(seconds):.2f} ms a step")
        if "ratio" in one:
            print(f"{label}: {one['ratio']:.3f} times the seconds of its control")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
