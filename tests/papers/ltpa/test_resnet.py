"""Residual networks: layers, sizes, grids, and attention on their stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt.nn.learned_attention.attention import (
    average_levels,
    dot_score,
    grid_shape,
    uniform_score,
)
from overt.papers.ltpa.resnet import Bottleneck, ResidualTrunk, ResNet, ResNetAttention, ResNetSizes
from overt.testing import check_model, toy_batch

TINY = ResNetSizes(3, width=0.25, blocks=1)
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: ResNet(TINY),
    "att2": lambda: ResNetAttention(TINY),
    "att3-dp": lambda: ResNetAttention(TINY, 3, dot_score, average_levels),
    "att2-mean": lambda: ResNetAttention(TINY, 2, uniform_score),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def build_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@each
def test_each_network_passes_check_model(make: Callable[[], nn.Module]) -> None:
    classify = getattr(build_model(make), "classify", None)
    idle = () if classify is None or classify.uses_query else ("query.", "classify.project.")
    check_model(lambda: build_model(make), toy_batch(), unreached=idle, tolerance=1e-4)


@each
def test_a_saved_network_gives_the_same_prediction(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    net: Any = build_model(make).eval()
    net.save_pretrained(tmp_path / "net")
    again = type(net).from_pretrained(tmp_path / "net")
    assert again.config() == net.config()
    torch.testing.assert_close(again(toy_batch()).prediction, net(toy_batch()).prediction)


def test_resnet_164_has_164_layers_and_1_7_million_parameters() -> None:
    """He et al. 2016, Table 2: 1.7 million. Shortcuts of 1 x 1 are not counted as layers."""
    with torch.device("meta"):
        net = ResNet(ResNetSizes(10))
    layers = [
        name
        for name, one in net.named_modules()
        if isinstance(one, nn.Conv2d | nn.Linear) and "shortcut" not in name
    ]
    assert len(layers) == 164
    assert sum(value.numel() for value in net.parameters()) == 1_703_258
    assert net.trunk.channels == [64, 128, 256]


def test_level_grids_and_descriptor_width() -> None:
    with torch.device("meta"):
        net = ResNetAttention(ResNetSizes(10))
    assert net.classify.decision.linear.in_features == 384
    assert list(net.classify.project) == ["128"]
    assert net.classify.project["128"][3].weight.shape == (128, 256)
    small = ResNetAttention(TINY, 3).eval()
    features = small.encode(toy_batch())
    assert [grid_shape(one.layout) for one in features.cells] == [(32, 32), (16, 16), (8, 8)]
    assert small.descriptor(features).shape == (4, 16 + 32 + 64)
    assert ResNet(TINY).eval().descriptor(ResNet(TINY).eval().encode(toy_batch())).shape == (4, 64)


def test_dropout_rates_are_as_published() -> None:
    with torch.device("meta"):
        net = ResNetAttention(ResNetSizes(10, blocks=1))
    rates = {name: one.p for name, one in net.named_modules() if isinstance(one, nn.Dropout)}
    assert rates["query.convolve.2"] == 0.4
    assert {rate for name, rate in rates.items() if name.startswith("classify")} == {0.3}


def test_an_unused_query_is_not_computed_in_training() -> None:
    idle, counting = build_model(MAKERS["att2"]).train(), build_model(MAKERS["att3-dp"]).train()
    assert idle.encode(toy_batch()).query is None
    assert counting.encode(toy_batch()).query is not None
    idle(toy_batch()).prediction.sum().backward()
    assert all(value.grad is None for value in idle.query.parameters())
    assert idle.eval().encode(toy_batch()).query is not None


def test_a_bottleneck_adds_its_residual_to_the_input() -> None:
    """Before the sum, each branch equals figure 1b of He et al., layer by layer."""
    same, change = Bottleneck(16, 4).eval(), Bottleneck(16, 8, stride=2).eval()
    x = torch.randn(2, 16, 6, 6)
    ready = torch.relu(same.norm[0](x))
    first, one, second, two, third = same.residual
    middle = second(torch.relu(one[0](first(ready))))
    torch.testing.assert_close(same(x), x + third(torch.relu(two[0](middle))))
    assert same.shortcut is None and change(x).shape == (2, 32, 3, 3)
    change.residual[-1].weight.data.zero_()
    torch.testing.assert_close(change(x), change.shortcut(torch.relu(change.norm[0](x))))


def test_a_bottleneck_does_not_modify_its_input() -> None:
    x = torch.randn(2, 16, 6, 6)
    kept = x.clone()
    Bottleneck(16, 4)(x)
    assert torch.equal(x, kept)


def test_the_grid_is_halved_before_the_last_two_stages() -> None:
    found = ResidualTrunk(0.25, 2).eval()(torch.randn(1, 3, 32, 32))
    assert [tuple(one.shape[1:]) for one in found] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize("levels", [0, 4])
def test_more_than_three_or_zero_levels_are_rejected(levels: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2 or 3, got {levels}"):
        ResNetAttention(TINY, levels)
