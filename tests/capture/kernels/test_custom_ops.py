"""Triton kernels as custom operators of a compiled graph."""

from pathlib import Path

import pytest

from tests.kernel_subprocess import run_cases


@pytest.mark.long
@pytest.mark.kernel
def test_operators_work_in_a_compiled_graph() -> None:
    run_cases(Path(__file__).with_name("custom_ops_cases.py"), {})
