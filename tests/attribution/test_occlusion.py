"""Occlusion: Captum, words, borders, and memory of a chunk."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from overt.attention import Kind
from overt.attribution import occlusion
from tests.attribution.networks import TARGET, Net


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 2), (4, 3), (2, 2)])
def test_occlusion_agrees_with_captum(window: int, stride: int, net: Net, images: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    expected = captum.Occlusion(net).attribute(
        images, (3, window, window), (3, stride, stride), baselines=0.2, target=TARGET
    )
    found = occlusion(net, images, TARGET, window=window, stride=stride, baseline=0.2).check()
    assert found.kind is Kind.SIGNED
    # all channels are hidden together
    torch.testing.assert_close(found.weights.flatten(1), expected[:, 0].flatten(1).double())


def test_a_window_over_everything_is_the_change_of_the_score(net: Net, images: Tensor) -> None:
    found = occlusion(net, images, TARGET, window=20)
    change = net(images) - net(torch.zeros_like(images))
    expected = change[torch.arange(2), TARGET].detach()
    torch.testing.assert_close(found.weights.flatten(1), expected[:, None].expand(-1, 63))


def test_features_of_regions_are_hidden_one_at_a_time() -> None:
    x = torch.randn(2, 4, 3)
    found = occlusion(lambda x: x.sum(dim=(1, 2)), x, lambda out: out)
    torch.testing.assert_close(found.weights.flatten(1), x.sum(dim=2))


def test_only_a_chunk_of_changed_inputs_is_run(images: Tensor) -> None:
    sizes = []

    def model(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        sizes.append(len(x))
        return x.mean(dim=(1, 2, 3))

    occlusion(model, images, lambda out: out, chunk=5)
    assert max(sizes) == 5 and sum(sizes) == 2 * 63 + 2


def test_wrong_windows_raise(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match="0 and 1"):
        occlusion(net, images, 1, window=0)
    with pytest.raises(ValueError, match="2 and 3"):
        occlusion(net, images, 1, window=2, stride=3)


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_memory_does_not_grow_with_the_number_of_windows() -> None:
    """576 windows over 576 pixels: no table of all of them."""
    with LargestTensor() as largest:
        occlusion(lambda x: x.flatten(1), torch.rand(1, 1, 24, 24), 7, chunk=4)
    assert largest.elements <= 4 * 576
