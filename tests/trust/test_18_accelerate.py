"""Trust 18: FSDP through Accelerate on a GPU takes the same steps as one process."""

from pathlib import Path

import pytest
import torch

from tests.trust import accelerated
from tests.trust.accelerated import OUTSIDE, TOLERANCE


def check(found: dict, world: int) -> None:
    """Check that a launch agrees with one process and its naive counterpart does not."""
    assert "failed" not in found, found["failed"]
    assert found["processes"] == world
    assert found["losses"][-1] < found["losses"][0]  # the loss decreases
    assert max(found["loss"], found["gradients"] or 0.0, found["weights"]) < TOLERANCE
    if found["naive"]:
        assert found["cut up"] > 70
        assert "setStorage" in found["naive"][OUTSIDE] or "parameters" in found["naive"][OUTSIDE]
    if found["naive"] and world > 1:
        assert found["naive"]["mean of means"] > 0.05


@pytest.mark.long
@pytest.mark.gpu  # Accelerate supports FSDP on GPUs only
def test_fsdp_through_accelerate_takes_the_same_steps_as_one_process(
    tmp_path: Path, record_result
) -> None:
    found = accelerated.main(tmp_path)
    succeeded = [one for one in found["launches"] if "failed" not in one]
    assert ("fsdp2", 1) in {(one["way"], one["processes"]) for one in succeeded}
    for one in succeeded:
        check(one, one["processes"])
    row = found["row"]
    record_result(row["number"], row["mark"], row["figure"], row["naive"])


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Accelerate is tested")
def test_without_a_gpu_fully_shard_takes_the_same_steps_as_one_process(tmp_path: Path) -> None:
    """Tests the program without a GPU."""
    found = accelerated.main(tmp_path)
    assert "row" not in found
    (one,) = found["launches"]
    check(one, 2)


def test_a_failed_launch_is_listed_in_the_row() -> None:
    finished = {
        "way": "fsdp2", "processes": 1, "backend": "nccl", "loss": 1e-8, "gradients": 2e-7,
        "weights": 3e-7, "naive": {OUTSIDE: "RuntimeError: no"},
    }  # fmt: skip
    failed = {"way": "fsdp1", "processes": 2, "failed": "trace"}
    row = accelerated.table_row([finished, failed], "a GPU")
    assert row["figure"] == (
        "loss 1e-08, gradients 2e-07, weights 3e-07 at most; FSDP2 x 1 (nccl); a GPU; "
        "could not be started: FSDP1 x 2"
    )
    assert row["naive"] == "computed outside: RuntimeError: no"
