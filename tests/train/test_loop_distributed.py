"""Two processes take the steps of one, write each file once, and stop together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from overt import files
from tests.train import many

ROOT = Path(__file__).resolve().parents[2]
EQUAL = [name for name in many.CASES if name.startswith("last") or name == "small"]


def start(out: Path, *words: str, world: int = 2) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.train.many", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(out: Path, *words: str, world: int = 2) -> None:
    process = start(out, *words, world=world)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said


def ends(out: Path, case: str, world: int = 2) -> list[dict[str, object]]:
    return [files.read_json(out / f"{case}-ends" / f"rank-{r}.json") for r in range(world)]


def weights(out: Path, case: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return files.read_tensors(out / f"{case}-ends" / f"rank-{rank}.safetensors")


def checkpoints(out: Path, case: str) -> list[str]:
    return sorted(path.name for path in (out / case / "checkpoints" / "train").iterdir())


def log(out: Path, case: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / case / "log.jsonl").read_text().splitlines()]


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, tensor in theirs.items():
        if not name.startswith("norm."):  # batch norm sees the share of its process
            torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All short cases in one launch: most of the time goes into starting."""
    out = tmp_path_factory.mktemp("two")
    launch(out, *EQUAL, "poison", "stop", "patience")
    return out


@pytest.mark.parametrize("case", EQUAL)
def test_two_processes_take_the_steps_of_one(together: Path, tmp_path: Path, case: str) -> None:
    """Uneven supervised rows, a process with none or without the loss, an uneven last batch, one
    smaller than the world, weights that no loss reaches; different weights at the start."""
    many.run(many.CASES[case], tmp_path / case)
    one = weights(tmp_path, case)
    first, second = weights(together, case), weights(together, case, rank=1)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert_close(first, one)
    assert torch.equal(first["unused"], torch.ones(3))  # no decay without a gradient
    assert [end["ended"] for end in ends(together, case)] == [
        ends(tmp_path, case, 1)[0]["ended"]
    ] * 2
    ours, theirs = log(together, case), log(tmp_path, case)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=1e-9)
        assert {**mine, "losses": 0} == {**other, "losses": 0}


def test_the_first_process_alone_writes_and_speaks(together: Path) -> None:
    first, second = ends(together, "stop")
    assert any("step-" in path for path in first["written"])  # type: ignore[attr-defined]
    assert any(path.endswith("log.jsonl") for path in first["written"])  # type: ignore[attr-defined]
    assert second["written"] == [] and second["said"] == 0
    assert [end["said"] for end in ends(together, "patience")] == [4, 0]


def test_a_loss_that_is_not_finite_on_one_process_stops_both(together: Path) -> None:
    first, second = ends(together, "poison")
    assert first["ended"] == second["ended"]
    told = re.match(
        r"Failed: loss adversary/guess .* is not finite at step 3 .*\(samples (number.*) \.\.\.\)",
        str(first["ended"]),
    )
    assert told and set(told[1].split(", ")) <= set(second["ids"])  # type: ignore[call-overload]
    assert first["same"] and second["same"]
    one, two = (weights(together, "poison", rank) for rank in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one if not name.startswith("norm."))
    assert not (together / "poison" / "checkpoints").exists()


def test_a_signal_to_one_process_saves_once_and_stops_both(together: Path) -> None:
    for end in ends(together, "stop"):
        assert str(end["ended"]).startswith("Stopped: stopped at step 6 of 28")
    assert checkpoints(together, "stop") == ["step-000000004", "step-000000006"]
    assert files.is_whole(together / "stop" / "checkpoints" / "train" / "step-000000006")


def test_the_first_process_decides_on_validations(together: Path) -> None:
    """The second one measures a score that never stops climbing."""
    assert [end["ended"] for end in ends(together, "patience")] == ["done 28 200"] * 2
    first, second = weights(together, "patience"), weights(together, "patience", rank=1)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    scores = [line["measures"] for line in log(together, "patience") if line["split"] == "val"]
    assert scores == [{"score": value} for value in (0.1, 0.5, 0.4, 0.3)]


@pytest.mark.long
def test_the_launcher_is_told_to_end_and_all_save_once(tmp_path: Path) -> None:
    process = start(tmp_path, "slow")
    deadline = time.monotonic() + 120
    while not (tmp_path / "slow" / "checkpoints" / "train").is_dir():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    found = ends(tmp_path, "slow")
    assert found[0]["ended"] == found[1]["ended"], said
    assert str(found[0]["ended"]).startswith("Stopped: stopped at step ")
    step = int(str(found[0]["ended"]).split()[4])
    assert checkpoints(tmp_path, "slow")[-1] == f"step-{step:09d}"
    assert files.is_whole(tmp_path / "slow" / "checkpoints" / "train" / f"step-{step:09d}")


@pytest.mark.long
def test_loading_in_other_processes_changes_nothing(tmp_path: Path) -> None:
    launch(tmp_path, "workers")
    many.run(many.CASES["workers"], tmp_path / "alone")
    assert_close(weights(tmp_path, "workers"), weights(tmp_path, "alone"))
