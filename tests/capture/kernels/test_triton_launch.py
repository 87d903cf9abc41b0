"""Which layers kernels of our own would take; what they compute is held to plain operations in
`test_kernels`, where there is a card or Triton's interpreter."""

import subprocess
import sys

import pytest
import torch

from overt.capture.kernels import triton_launch


def test_on_a_cpu_the_plain_way_is_taken() -> None:
    if triton_launch.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 asks for the kernels on a CPU")
    layers = [torch.randn(2, 4, 9, 8)]
    assert not triton_launch.supports(layers, layers, 3)


@pytest.mark.long
def test_compilers_are_not_imported_before_they_are_needed() -> None:
    """Triton and Dynamo take longer to import than all of overt."""
    code = (
        "import sys, overt.capture.block_scores, overt.nn\n"
        "print(*{'triton', 'torch._dynamo', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("size", [1, 2, 3, 12, 16, 17, 64])
def test_sizes_go_up_to_a_power_of_two(size: int) -> None:
    found = triton_launch._next_power_of_two(size)
    assert found >= size and found & (found - 1) == 0 and found < 2 * size


def test_what_is_hidden_lies_side_by_side_along_the_keys() -> None:
    """A mask that was turned has its rows side by side, and kernels would read other keys."""
    layers = [torch.randn(2, 4, 9, 8)]
    rows = torch.arange(3).expand(2, 3)
    hidden = (torch.rand(2, 1, 5, 3) > 0.5).transpose(2, 3)
    for one in (hidden, hidden[:, :, :1]):
        found = triton_launch.BlockLauncher(layers, layers, rows, slice(2, 7), 1.0, one).hidden
        assert found is not None and found.stride(-1) == 1
        assert torch.equal(found, one[:, 0].expand(2, 3, 5))


def test_pointers_are_addresses() -> None:
    some = [torch.randn(3) for _ in range(5)]
    assert triton_launch._pointers(some).tolist() == [one.data_ptr() for one in some]
