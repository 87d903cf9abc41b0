"""Hard negatives: captions of other images that look alike.

Lu, Batra, Parikh and Lee, "ViLBERT", 2019, https://arxiv.org/abs/1908.02265, as "Attending
Self-Attention" takes them up. Scenes have harder ones of their own (`CaptionPairScenes`): there the
false caption is true of the same scene with one attribute of one thing changed.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nearest_others(
    features: Float[Tensor, "n d"], count: int = 1, portion: int = 512
) -> Int[Tensor, "n c"]:
    """The `count` images whose features are nearest to those of each image, the nearest first.

    Any frozen features will do; the paper's code takes those of a ResNet-101 and the nearest image
    alone. Exact, `portion` images at a time; equals come in their order, and no image is its own.
    """
    n = len(features)
    if not 1 <= count < n:
        raise ValueError(f"{count} other images cannot be found among {n}")
    precise = features.detach().double()
    found = []
    for start in range(0, n, portion):
        rows = torch.arange(start, min(start + portion, n), device=features.device)
        far = torch.cdist(precise[rows], precise, compute_mode="donot_use_mm_for_euclid_dist")
        far[torch.arange(len(rows), device=features.device), rows] = torch.inf
        found.append(far.argsort(dim=1, stable=True)[:, :count])
    return torch.cat(found)
