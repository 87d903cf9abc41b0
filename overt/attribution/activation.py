"""Maps of plain activations: how strong the features of each cell are.

Zagoruyko and Komodakis, "Paying More Attention to Attention", ICLR 2017,
https://arxiv.org/abs/1612.03928, section 3.1.
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, grid
from overt.geometry import PixelGeometry


def activation_attention(
    features: Float[Tensor, "b d y x"],
    power: float = 2.0,
    geometry: PixelGeometry | None = None,
) -> AttentionMap:
    """Compute the sum over channels of the absolute activations, raised to a power.

    It needs no gradient and no class. The paper divides by the L2 norm of the map, to compare two
    networks; here the cells of a sample sum to one. A map without any activation stays zero.

    Args:
        features: feature maps of one layer.
        power: power of each activation; larger ones favour the strongest channels.
        geometry: how each image was made from its photo.

    Returns:
        One map per sample.

    Raises:
        ValueError: `power` is not positive.

    Example:
        >>> features = torch.zeros(1, 2, 2, 2)
        >>> features[0, :, 0, 1] = torch.tensor([1.0, -1.0])
        >>> features[0, 0, 1, 0] = 1.0
        >>> activation_attention(features).weights.flatten()
        tensor([0.0000, 0.6667, 0.3333, 0.0000])
    """
    if power <= 0:
        raise ValueError(f"power must be above 0, got {power}")
    precise = features.to(torch.promote_types(features.dtype, torch.float32))
    strength = rearrange(precise.abs().pow(power).sum(dim=1), "b y x -> b (y x)")
    layout = grid(features.shape[2], features.shape[3], geometry=geometry)
    return AttentionMap.from_cells(strength, layout).normalize()
