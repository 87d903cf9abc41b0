"""Global random generators continue after a block as if it had not run."""

import random

import numpy as np
import pytest
import torch

from overt.data.global_rng import preserve_global_rng


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def draw_and_fail() -> None:
    draw()
    raise KeyError


def test_random_numbers_continue_as_without_the_block() -> None:
    with preserve_global_rng():
        wanted = draw()
        assert draw() != wanted
    with preserve_global_rng():
        assert draw() == wanted
        torch.manual_seed(5)
    assert draw() == wanted


def test_generators_are_restored_after_an_error() -> None:
    with preserve_global_rng():
        wanted = draw()
    with pytest.raises(KeyError), preserve_global_rng():
        draw_and_fail()
    assert draw() == wanted


@pytest.mark.gpu
def test_generators_of_the_gpu_are_restored() -> None:
    torch.manual_seed(2)
    wanted = torch.rand(3, device="cuda")
    torch.manual_seed(2)
    with preserve_global_rng():
        torch.rand(7, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), wanted)
