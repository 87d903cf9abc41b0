"""RISE: masks, the slow reference, memory, targets, unchanged models, errors."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overt.attention import AttentionMap, Kind
from overt.attribution.rise import rise, rise_masks
from overt.attribution.target_scores import Contrast
from tests.attribution.networks import TARGET, Net, model_state


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 10, 12).double()


def slow_masks(
    count: int, size: tuple[int, int], cells: int, keep: float, generator: torch.Generator
) -> Tensor:
    """Upsample and crop each mask separately with PyTorch, from the same draws."""
    steps = [math.ceil(length / cells) for length in size]
    found = []
    for _ in range(count):
        draws = torch.rand(cells * cells + 2, generator=generator)
        small = (draws[:-2] < keep).float().reshape(1, 1, cells, cells)
        large = [(cells + 1) * step for step in steps]
        mask = F.interpolate(small, large, mode="bilinear", align_corners=False)
        y, x = (int(draw * step) for draw, step in zip(draws[-2:], steps, strict=True))
        found.append(mask[0, 0, y : y + size[0], x : x + size[1]])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("size", "cells"), [((10, 12), 3), ((14, 14), 7), ((5, 9), 4), ((6, 6), 1)]
)
def test_rise_masks_are_upsampled_and_shifted_grids(size: tuple[int, int], cells: int) -> None:
    found = rise_masks(20, size, cells, 0.4, torch.Generator().manual_seed(3))
    expected = slow_masks(20, size, cells, 0.4, torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_rise_masks_keep_pixels_with_the_given_probability() -> None:
    found = rise_masks(4000, (8, 8), 4, 0.3, torch.Generator().manual_seed(0))
    assert (found.mean(dim=0) - 0.3).abs().max() < 0.04


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_rise_agrees_with_the_slow_reference(chunk: int, net: Net, images: Tensor) -> None:
    stream = torch.Generator().manual_seed(5)
    found = rise(net, images, TARGET, stream, masks=10, cells=3, keep=0.4, chunk=chunk).check()
    stream = torch.Generator().manual_seed(5)
    total = torch.zeros(2, 10, 12).double()
    net.eval()
    for mask in slow_masks(10, (10, 12), 3, 0.4, stream).double():
        for sample in range(2):
            scores = net(images[sample : sample + 1] * mask).detach().softmax(-1)
            total[sample] += scores[0, TARGET[sample]] * mask
    torch.testing.assert_close(
        found.values.flatten(1), (total / 10 / 0.4).flatten(1), rtol=1e-5, atol=1e-6
    )
    assert found.kind is Kind.AMOUNT


def test_rise_finds_the_decisive_pixels() -> None:
    """The score is the brightness of one corner."""
    images = torch.ones(1, 3, 12, 12)

    def corner(x: Tensor) -> Tensor:
        return x[:, 0, :3, :3].mean(dim=(1, 2))

    stream = torch.Generator().manual_seed(0)
    found = rise(corner, images, lambda out: out, stream, masks=600, cells=4)
    values = found.values.reshape(12, 12)
    assert found.kind is Kind.SIGNED
    assert values[:3, :3].min() > values[6:, 6:].max()


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor created."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.found = max(self.found, out.numel())
        return out


@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_rise_memory_does_not_depend_on_the_number_of_masks(chunk: int, images: Tensor) -> None:
    sizes = []
    for masks in (8, 40):
        with LargestTensor() as largest:
            rise(
                lambda x: x.mean(dim=(1, 2, 3)),
                images,
                lambda out: out,
                torch.Generator(),
                masks=masks,
                cells=3,
                chunk=chunk,
            )
        sizes.append(largest.found)
    # the largest tensor has `chunk` changed images, or the two given ones
    assert sizes[0] == sizes[1] == max(chunk, 2) * images[0].numel()


def test_invalid_rise_numbers_raise(images: Tensor) -> None:
    with pytest.raises(ValueError, match="masks.* 0, 7, 32"):
        rise(lambda x: x, images, lambda out: out, torch.Generator(), masks=0)

    with pytest.raises(ValueError, match="images"):
        rise(lambda x: x, torch.ones(2, 3, 4), lambda out: out, torch.Generator())


def test_rise_takes_classes_contrasts_and_keyword_inputs(net: Net, images: Tensor) -> None:
    def run(target: Any, given: Any = None, model: Any = net) -> AttentionMap:
        stream = torch.Generator().manual_seed(0)
        return rise(model, images if given is None else given, target, stream, masks=3, cells=2)

    assert torch.equal(run(3).values, run(torch.tensor([3, 3])).values)
    assert torch.equal(run([1, 3]).values, run(TARGET).values)
    torch.testing.assert_close(run(Contrast(1, 3)).values, run(1).values - run(3).values)
    assert run(Contrast(1, 3)).kind is Kind.SIGNED and run(1).kind is Kind.AMOUNT

    net.eval()  # not a part of the module below

    class Named(nn.Module):
        def forward(self, pixel_values: Tensor) -> Tensor:
            return net(pixel_values)

    torch.testing.assert_close(run(1, {"pixel_values": images}, Named()).values, run(1).values)
    for wrong in (4, -1, [0, 4]):
        with pytest.raises(ValueError, match="classes 0 to 3"):
            run(wrong)


def test_rise_restores_the_model_also_after_an_error(net: Net, images: Tensor) -> None:
    before = model_state(net.train())
    rise(net, images, TARGET, torch.Generator().manual_seed(1), masks=3)
    assert model_state(net) == before

    def fail(module: nn.Module, given: object) -> None:
        torch.rand(3)
        raise RuntimeError("in the middle")

    handle = net.head.register_forward_pre_hook(fail)
    before = model_state(net)
    with pytest.raises(RuntimeError, match="in the middle"):
        rise(net, images, TARGET, torch.Generator().manual_seed(1), masks=3)
    assert model_state(net) == before
    handle.remove()
