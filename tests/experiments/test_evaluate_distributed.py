"""Several processes share an evaluation: the same bytes as one process."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from overt import io
from tests.experiments.evaluated_experiments import SETS
from tests.trust import two_processes

FILES = (
    *("samples.npz", "elsewhere.npz", "results.json"),
    *("gallery/arrays.npz", "gallery/samples.json"),
)


def launch(world: int, out: Path) -> list[Path]:
    """Evaluate all recipes; return the folder of each process."""
    launcher = ("--standalone", "--nproc-per-node", str(world))
    module = "tests.experiments.evaluated_experiments"
    two_processes.wait(two_processes.start(module, str(out), launcher=launcher))
    return [out, *(out / f"rank-{rank}" for rank in range(1, world))]


def digests(folder: Path) -> dict[str, str]:
    return {
        f"{name}/{file}": hashlib.sha256((folder / name / file).read_bytes()).hexdigest()
        for name in SETS
        for file in FILES
    }


@pytest.mark.long
def test_every_process_returns_the_bytes_of_one_process(tmp_path: Path) -> None:
    """Metrics per sample, intervals, groups and galleries of a recipe of each paper."""
    (single,) = launch(1, tmp_path / "1")
    expected = digests(single)
    for world in (2, 4):
        folders = launch(world, tmp_path / str(world))
        for folder in folders:
            assert digests(folder) == expected
        for name in SETS:
            counts = np.array([io.read_json(folder / name / "batches.json") for folder in folders])
            # every batch is evaluated in one process, and each process takes its share
            assert counts.sum(axis=0).tolist() == io.read_json(single / name / "batches.json")
            assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
