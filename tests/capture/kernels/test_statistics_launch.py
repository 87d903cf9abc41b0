"""Which calls the kernels take; `statistics_kernels_cases.py` compares what they compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.capture.call import QKCall
from overt.capture.kernels import statistics_launch, triton_launch
from overt.capture.kernels.statistics_launch import RowSums, supports

SUMS = RowSums(torch.zeros(1, 4, 6), None, None, None, None)


def call(**changed: Any) -> QKCall:
    source = QKCall(torch.rand(1, 4, 5, 8), torch.rand(1, 2, 6, 8), 0.3)
    return replace(source, **changed)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept tensors of a CPU, as with TRITON_INTERPRET=1."""
    monkeypatch.setattr(triton_launch, "TRITON", True)
    monkeypatch.setattr(triton_launch, "INTERPRETED", True)


def test_plain_operations_are_used_on_a_cpu() -> None:
    if triton_launch.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 asks for the kernels on a CPU")
    assert not supports(call(), SUMS)


@pytest.mark.parametrize(
    "changed",
    [
        {"query": torch.rand(1, 4, 5, 8).double(), "key": torch.rand(1, 2, 6, 8).double()},
        {"query": torch.rand(1, 4, 5, 8).half()},
        {"query": torch.rand(1, 4, 8, 5).mT},
        {"query": torch.rand(1, 4, 5, 300), "key": torch.rand(1, 2, 6, 300)},
        {"key": torch.rand(1, 2, 0, 8)},
        {"score_mod": lambda score, *_: score},
        {"mask_mod": lambda *_: True},
    ],
)
def test_other_calls_are_left_to_plain_operations(anywhere: None, changed: Any) -> None:
    assert supports(call(), SUMS)
    assert not supports(call(**changed), SUMS)


def test_many_groups_and_keys_are_left_to_plain_operations(anywhere: None) -> None:
    many = torch.zeros(1, 4, 5, 65)
    assert not supports(call(), replace(SUMS, shares=many))
    assert not supports(call(), replace(SUMS, weights=many, indices=many.long()))
    assert supports(call(), replace(SUMS, shares=many[..., :64], weights=many[..., :64]))


@pytest.mark.parametrize("causal", [False, True])
def test_the_first_rows_are_compared(causal: bool) -> None:
    source = call(causal=causal, allowed=torch.rand(1, 1, 5, 6) > 0.3, bias=torch.rand(4, 1, 6))
    some = statistics_launch._first_rows(source, 3)
    torch.testing.assert_close(some.weights(), source.weights()[:, :, :3])
