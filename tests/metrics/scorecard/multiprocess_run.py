"""Scorecard of several processes.

Run by `torchrun -m tests.metrics.scorecard.multiprocess_run FOLDER [PAUSE]`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from overt import metrics
from overt.data.batch import Batch
from overt.testing import PlantedCell
from tests.metrics.scorecard.toys import Pictures, partly_true_map

MEASURES = ("spearman", "deletion_area@mask", "deletion_area@imputed", "token_f1", "accuracy")


class SlowPictures(Pictures):
    """Pictures with a delay per batch."""

    pause = 0.0

    def batch(self, indices: Sequence[int]) -> Batch:
        time.sleep(self.pause)
        return super().batch(indices)


def run(out: Path, pause: float = 0.0) -> metrics.Scorecard:
    """Compute the scorecard that all processes must agree on."""
    data = SlowPictures(40)
    data.pause = pause
    model, maps = PlantedCell(gain=3.0), {"half": partly_true_map(0.5, None)}
    return metrics.scorecard(model, data, MEASURES, maps, portion=5, shard=10, out=out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
