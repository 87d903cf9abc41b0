"""What a run counts and writes down."""

import json
import math
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.recipes.experiment import (
    Evaluation,
    Source,
    Value,
    direction,
    flops,
    parameters,
    peak_memory,
    plain,
)


class Colour(Enum):
    RED = "red"


class Sums(nn.Module):
    """Two matrices, one of which does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5, bias=False), nn.Linear(5, 3)
        self.first.requires_grad_(False)
        self.trained_when_asked: list[bool] = []

    def forward(self, batch: Batch) -> Tensor:
        self.trained_when_asked.append(self.training)
        return self.second(self.first(torch.ones(len(batch), 7)))


def test_parameters_are_those_that_learn() -> None:
    assert parameters(Sums()) == 5 * 3 + 3


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("training", [True, False])
def test_flops_of_two_matrices_by_hand(count: int, training: bool) -> None:
    model = Sums().train(training)
    batch = Batch(ids=tuple(map(str, range(count))))
    assert flops(model, batch) == 2 * 7 * 5 + 2 * 5 * 3  # a multiplication and a sum each
    assert model.trained_when_asked == [False] and model.training is training


def test_memory_grows_and_is_counted_in_bytes() -> None:
    before = peak_memory(torch.device("cpu"))
    held = np.ones(64 << 20, dtype=np.uint8)
    after = peak_memory(torch.device("cpu"))
    assert 10 << 20 < before <= after < 1 << 40 and len(held)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        assert after == pytest.approx(int(line.split()[1]) * 1024, rel=0.1)


def test_directions_in_a_word() -> None:
    assert [direction(one) for one in (True, False, None)] == ["higher", "lower", "neither"]


def test_plain_values_are_json() -> None:
    value = Value(math.nan, "share", "higher", "test", 0, math.inf, -math.inf)
    mixed = {
        1: (value, Source("a", "train", "00", 3)),
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.float64("nan")],
        "enum": Colour.RED,
        "none": None,
        "class": {"deep": [1.5, "text", False]},
    }
    found = plain(mixed)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["1"][0] == {
        "value": None,
        "unit": "share",
        "direction": "higher",
        "split": "test",
        "n": 0,
        "low": None,
        "high": None,
    }
    assert found["1"][1] == {"name": "a", "split": "train", "hash": "00", "n": 3}
    assert found["numpy"] == [0.5, 3, True, None] and found["enum"] == "red"


def test_an_evaluation_may_have_no_groups_and_no_gallery() -> None:
    found = Evaluation({}, {})
    assert found.groups == {} and tuple(found.gallery) == ()
