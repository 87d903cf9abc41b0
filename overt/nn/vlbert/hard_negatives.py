"""Hard negatives: captions of similar images.

Lu, Batra, Parikh and Lee, "ViLBERT", 2019, https://arxiv.org/abs/1908.02265, as used in "Attending
Self-Attention". Scenes have harder ones (`CaptionPairScenes`): there the false caption describes
the same scene with one attribute of one object changed.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nearest_images(
    features: Float[Tensor, "n d"], count: int = 1, portion: int = 512
) -> Int[Tensor, "n c"]:
    """Return the `count` nearest other images of each image by their features, nearest first.

    Any frozen features work; the paper's code uses those of a ResNet-101 and the nearest image
    only. Exact, computed in chunks; ties keep their order.

    Args:
        features: one vector per image.
        count: neighbours per image.
        portion: images per chunk.

    Raises:
        ValueError: there are not enough images.
    """
    n = len(features)
    if not 1 <= count < n:
        raise ValueError(f"count must be from 1 to {n - 1} for {n} images, got {count}")
    # float64 and no matrix product: |x|^2 - 2 x y + |y|^2 cancels for close images
    precise = features.detach().double()
    found = []
    for start in range(0, n, portion):
        rows = torch.arange(start, min(start + portion, n), device=features.device)
        far = torch.cdist(precise[rows], precise, compute_mode="donot_use_mm_for_euclid_dist")
        # an image is not its own neighbour, even if another has the same features
        far[torch.arange(len(rows), device=features.device), rows] = torch.inf
        found.append(far.argsort(dim=1, stable=True)[:, :count])
    return torch.cat(found)
