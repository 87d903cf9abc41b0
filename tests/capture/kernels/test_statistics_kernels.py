"""Triton kernels for statistics of attention compared with PyTorch operations."""

from pathlib import Path

import pytest

from tests.kernel_subprocess import assert_cases_pass


@pytest.mark.long
@pytest.mark.kernel
def test_kernels_agree_with_pytorch_operations() -> None:
    assert_cases_pass(Path(__file__).with_name("statistics_kernels_cases.py"))
