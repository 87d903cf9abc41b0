"""Features of a layer and their gradients, as cells. test_cam.py has tokens, Swin and errors."""

import pytest
import torch
from torch import nn

from overt.attribution.feature_layers import RecordedFeatures, channels_first, layer_gradient
from tests.attribution.networks import TARGET, Net


def test_features_and_gradient_are_those_of_the_layer() -> None:
    torch.manual_seed(0)
    net, images = Net().double(), torch.randn(2, 3, 10, 12).double()
    found = layer_gradient(net, net.last, images, TARGET, None, None)
    net.eval()
    features = net.last(net.stem(images).relu()).detach().requires_grad_()
    score = net.head(features.clone().relu().mean(dim=(2, 3)))
    score[torch.arange(2), TARGET].sum().backward()
    torch.testing.assert_close(found.features, features.detach())
    torch.testing.assert_close(found.gradient, features.grad)
    assert found.geometry is None and not net.last._forward_hooks


def test_channels_are_found_by_the_shape_of_the_image() -> None:
    first, last = torch.zeros(2, 5, 4, 6), torch.zeros(2, 4, 6, 5)
    assert channels_first(first, (16, 24)).shape == first.shape
    assert channels_first(last, (16, 24)).shape == first.shape
    # MaxViT inside of a block: 64 channels beside 56 x 56 cells
    assert channels_first(torch.zeros(1, 56, 56, 64), (224, 224)).shape == (1, 64, 56, 56)
    assert channels_first(torch.zeros(1, 64, 56, 56), (224, 224)).shape == (1, 64, 56, 56)
    # a grid that was cut to whole cells, beside as many channels as rows
    assert channels_first(torch.zeros(1, 8, 8, 7), (230, 224)).shape == (1, 8, 8, 7)


def test_a_layer_has_to_return_features() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(ValueError, match="Linear"), RecordedFeatures(net, net[1]):
        net(torch.zeros(1, 3, 2, 2))
