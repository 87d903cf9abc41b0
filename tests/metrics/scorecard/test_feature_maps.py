"""Feature maps: the last convolutional layer, its activation and gradient maps."""

import torch
from torch import nn

from overt.attention import AttentionMap, grid
from overt.attribution.cam import class_activation
from overt.metrics.scorecard.feature_maps import activation_map, gradient_map, last_feature_layer


class Net(nn.Module):
    """Two convolutions, the mean over cells, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 5, 2, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(5, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.second(self.first(images).relu())).flatten(1))


def test_the_last_feature_layer_is_found_before_pooling() -> None:
    net, images = Net(), torch.randn(2, 3, 8, 8)
    assert last_feature_layer(net, lambda: net(images), (8, 8)) is net.second
    assert last_feature_layer(nn.Linear(2, 2), lambda: torch.zeros(1, 2), (8, 8)) is None
    assert not net.second._forward_hooks
    patches = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.Flatten(2))
    assert (
        last_feature_layer(patches, lambda: patches(images), (8, 8)) is None
    )  # a patch embedding only


def test_a_layer_that_runs_twice_is_skipped() -> None:
    net, images = Net(), torch.randn(2, 3, 8, 8)

    def twice() -> torch.Tensor:
        net.second(net.first(images))
        return net(images)

    assert (
        last_feature_layer(net, lambda: net.second(net.first(images)).flatten(1), (8, 8))
        is net.second
    )
    assert last_feature_layer(net, twice, (8, 8)) is None


def test_attention_heads_are_not_taken_for_feature_maps() -> None:
    """They have four axes too, but 5 queries of 8 values are not an image of 8 x 8 pixels."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 4, 4, stride=4), nn.Identity()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.norm(self.first(images).new_zeros(2, 4, 5, 8)).flatten(1)

    net = Heads()
    assert last_feature_layer(net, lambda: net(torch.zeros(2, 3, 8, 8)), (8, 8)) is None


def test_activation_and_gradient_maps_equal_cam_after_mean_pooling() -> None:
    """Grad-CAM is the positive part of CAM per cell; gradient times features is its size."""
    net, images = Net(), torch.randn(2, 3, 8, 8)
    chosen = net(images).argmax(dim=-1)
    exact = class_activation(net, images, chosen, net.second).weights[:, 0, 0, 0]
    found = activation_map(net, net.second, net, images, None).weights[:, 0, 0, 0]
    torch.testing.assert_close(found, exact.clamp_min(0) / 16)
    like = AttentionMap.from_cells(torch.ones(2, 16), grid(4, 4))
    slope = gradient_map(net, net.second, lambda: net(images), like)
    torch.testing.assert_close(slope, exact.abs() / 16)


def test_gradient_maps_of_a_frozen_network_leave_no_gradient() -> None:
    net, images = Net().requires_grad_(False), torch.randn(2, 3, 8, 8)
    like = AttentionMap.from_cells(torch.ones(2, 16), grid(4, 4))
    with torch.no_grad():
        found = gradient_map(net, net.second, lambda: net(images), like)
    assert found.shape == (2, 16) and not found.requires_grad and bool((found > 0).any())
    assert all(weight.grad is None for weight in net.parameters())
