"""A scorecard by several processes: `torchrun -m tests.measure.scorecards.many FOLDER [PAUSE]`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from overt import measure
from overt.data.batch import Batch
from overt.testing import PlantedCell
from tests.measure.scorecards.toys import Pictures, told

MEASURES = ("spearman", "deletion_area@mask", "deletion_area@imputed", "token_f1", "accuracy")


class Slow(Pictures):
    """Pictures that take their time."""

    pause = 0.0

    def batch(self, indices: Sequence[int]) -> Batch:
        time.sleep(self.pause)
        return super().batch(indices)


def run(out: Path, pause: float = 0.0) -> measure.Scorecard:
    """The card that all processes have to agree on."""
    data = Slow(40)
    data.pause = pause
    model, maps = PlantedCell(gain=3.0), {"half": told(0.5, None)}
    return measure.scorecard(model, data, MEASURES, maps, portion=5, shard=10, out=out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
