"""Which layers kernels of our own would take; what they compute is held to plain operations in
`test_kernels`, where there is a card or Triton's interpreter."""

import subprocess
import sys

import pytest
import torch

from overt.capture import launching


def test_on_a_cpu_the_plain_way_is_taken() -> None:
    if launching.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 asks for the kernels on a CPU")
    layers = [torch.randn(2, 4, 9, 8)]
    assert not launching.fit(layers, layers, 3)


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, overt.capture.products; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("size", [1, 2, 3, 12, 16, 17, 64])
def test_sizes_go_up_to_a_power_of_two(size: int) -> None:
    found = launching._power(size)
    assert found >= size and found & (found - 1) == 0 and found < 2 * size
