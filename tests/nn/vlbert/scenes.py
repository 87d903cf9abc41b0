"""Small batches of caption pairs with regions, some of them absent, and tiny networks."""

from dataclasses import replace
from functools import lru_cache

import torch

from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import CaptionPairScenes
from overt.data.scenes.noun_phrases import vocabulary
from overt.nn.vlbert.model import ClassificationHead, RegionHead, VLBert, VLBertHead, VLBertSizes
from overt.nn.vlbert.regions import PooledRegionEncoder

SIZES = VLBertSizes(
    vocabulary=vocabulary().size, width=12, layers=2, heads=3, inner=16, positions=80,
    dropout=0.1, gain=1.0,
)  # fmt: skip


@lru_cache(maxsize=1)
def pairs() -> CaptionPairScenes:
    return CaptionPairScenes("train", 0, 16, size=32, regions=10)


def batch(count: int = 4) -> Batch:
    """Make caption pairs in which every second sample has fewer regions."""
    found = pairs().batch(range(count))
    there = found.region_mask.clone()
    mentioned = (found.target.weights > 0).any(dim=3)[:, 0, 0]
    there[1::2, -3:] = mentioned[1::2, -3:]
    return replace(found, region_mask=there)


def region_encoder() -> PooledRegionEncoder:
    return PooledRegionEncoder([4, 6], [2, 2])


def net(answer: VLBertHead | None = None, relations: int = 5) -> VLBert:
    torch.manual_seed(0)
    return VLBert(SIZES, region_encoder(), answer or ClassificationHead(SIZES.width, 3), relations)


def region_net() -> VLBert:
    torch.manual_seed(0)
    return VLBert(SIZES, region_encoder(), RegionHead(SIZES.width))
