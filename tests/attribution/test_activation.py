"""Activation maps: parity with the published formula, sums, and empty maps."""

import pytest
import torch
import torch.nn.functional as F

from overt.attribution import activation_attention
from overt.geometry import PixelGeometry


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_maps_are_those_of_the_paper_up_to_their_norm(power: float) -> None:
    """The paper flattens the mean of |A|^p over channels and divides by its L2 norm."""
    features = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    published = F.normalize(features.abs().pow(power).mean(1).view(3, -1))
    found = activation_attention(features, power)
    assert found.keys.find("image").shape == (4, 6)
    torch.testing.assert_close(F.normalize(found.weights.flatten(1)), published)
    torch.testing.assert_close(found.weights.flatten(1).sum(dim=1), torch.ones(3))


def test_a_cell_has_the_channels_of_its_position() -> None:
    features = torch.zeros(1, 2, 2, 3)
    features[0, :, 1, 2] = torch.tensor([3.0, -4.0])
    features[0, 0, 0, 1] = 5.0
    weights = activation_attention(features).weights.reshape(2, 3)
    assert weights.tolist() == [[0, 0.5, 0], [0, 0, 0.5]]


def test_an_empty_map_stays_zero_and_16_bits_do_not_overflow() -> None:
    assert not activation_attention(torch.zeros(2, 3, 2, 2)).weights.any()
    large = activation_attention(torch.full((1, 8, 2, 2), 500.0, dtype=torch.float16))
    assert large.weights.flatten().tolist() == [0.25] * 4


def test_cells_keep_the_geometry_of_their_photo() -> None:
    geometry = PixelGeometry.identity(1, (8, 8))
    assert activation_attention(torch.ones(1, 1, 2, 2), geometry=geometry).keys.find("image")


def test_power_must_be_positive() -> None:
    with pytest.raises(ValueError, match="power .* 0"):
        activation_attention(torch.ones(1, 1, 2, 2), power=0.0)
