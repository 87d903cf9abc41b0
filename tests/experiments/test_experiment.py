"""Counts of parameters, FLOPs and memory, and results as JSON."""

import json
import math
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.experiments.experiment import (
    DatasetInfo,
    MetricValue,
    count_flops,
    count_parameters,
    direction_word,
    peak_memory,
    to_json_value,
)


class Colour(Enum):
    RED = "red"


class TwoLinear(nn.Module):
    """Two linear layers, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5, bias=False), nn.Linear(5, 3)
        self.first.requires_grad_(False)
        self.modes: list[bool] = []

    def forward(self, batch: Batch) -> Tensor:
        self.modes.append(self.training)
        return self.second(self.first(torch.ones(len(batch), 7)))


def test_count_parameters_counts_trainable_ones() -> None:
    assert count_parameters(TwoLinear()) == 5 * 3 + 3


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("training", [True, False])
def test_flops_of_two_linear_layers_match_a_count_by_hand(count: int, training: bool) -> None:
    model = TwoLinear().train(training)
    batch = Batch(ids=tuple(map(str, range(count))))
    assert (
        count_flops(model, batch) == 2 * 7 * 5 + 2 * 5 * 3
    )  # one multiplication and one addition each
    assert model.modes == [False] and model.training is training


def test_peak_memory_grows_and_is_in_bytes() -> None:
    before = peak_memory(torch.device("cpu"))
    array = np.ones(64 << 20, dtype=np.uint8)
    after = peak_memory(torch.device("cpu"))
    assert 10 << 20 < before <= after < 1 << 40 and len(array)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        assert after == pytest.approx(int(line.split()[1]) * 1024, rel=0.1)


def test_directions_have_names() -> None:
    assert [direction_word(one) for one in (True, False, None)] == ["higher", "lower", "neither"]


def test_values_convert_to_json() -> None:
    value = MetricValue(math.nan, "share", "higher", "test", 0, math.inf, -math.inf)
    mixed = {
        1: (value, DatasetInfo("a", "train", "00", 3)),
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.float64("nan")],
        "enum": Colour.RED,
        "none": None,
        "class": {"deep": [1.5, "text", False]},
    }
    found = to_json_value(mixed)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["1"][0] == {
        "value": None,
        "unit": "share",
        "direction": "higher",
        "split": "test",
        "n": 0,
        "low": None,
        "high": None,
        "version": 1,
    }
    assert found["1"][1] == {"name": "a", "split": "train", "hash": "00", "n": 3, "version": 1}
    assert found["numpy"] == [0.5, 3, True, None] and found["enum"] == "red"
