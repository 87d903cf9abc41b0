"""Trust 18: FSDP through Accelerate, on a card, takes the steps of one process."""

from pathlib import Path

import pytest
import torch

from tests.trust import accelerated
from tests.trust.accelerated import MARK, OUTSIDE


def check(found: dict, world: int) -> None:
    """A launch that agrees with one process, and whose naive counterpart does not."""
    assert "failed" not in found, found["failed"]
    assert found["processes"] == world
    assert found["losses"][-1] < found["losses"][0]  # it learns at all
    assert max(found["loss"], found["gradients"] or 0.0, found["weights"]) < MARK
    if found["naive"]:
        assert found["cut up"] > 70
        assert "setStorage" in found["naive"][OUTSIDE] or "parameters" in found["naive"][OUTSIDE]
    if found["naive"] and world > 1:
        assert found["naive"]["mean of means"] > 0.05


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Accelerate has FSDP for cards alone")
def test_fsdp_through_accelerate_takes_the_steps_of_one(tmp_path: Path, reached) -> None:
    found = accelerated.main(tmp_path)
    went = [one for one in found["launches"] if "failed" not in one]
    assert ("fsdp2", 1) in {(one["way"], one["processes"]) for one in went}
    for one in went:
        check(one, one["processes"])
    row = found["row"]
    reached(row["number"], row["mark"], row["figure"], row["naive"])


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate itself is tried where it can be")
def test_without_a_card_the_same_holds_for_fully_shard(tmp_path: Path) -> None:
    """So that what is run on a card is known to work before it gets there."""
    found = accelerated.main(tmp_path)
    assert "row" not in found
    (one,) = found["launches"]
    check(one, 2)


def test_a_launch_that_failed_is_named_in_the_row() -> None:
    ended = {
        "way": "fsdp2", "processes": 1, "backend": "nccl", "loss": 1e-8, "gradients": 2e-7,
        "weights": 3e-7, "naive": {OUTSIDE: "RuntimeError: no"},
    }  # fmt: skip
    lost = {"way": "fsdp1", "processes": 2, "failed": "trace"}
    row = accelerated.row_of([ended, lost], "a card")
    assert row["figure"] == (
        "loss 1e-08, gradients 2e-07, weights 3e-07 at most; FSDP2 x 1 (nccl); a card; "
        "could not be started: FSDP1 x 2"
    )
    assert row["naive"] == "computed outside: RuntimeError: no"
