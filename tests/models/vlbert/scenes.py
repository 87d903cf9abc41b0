"""Small batches of caption pairs with regions, some of which are missing, and tiny networks."""

from dataclasses import replace
from functools import lru_cache

import torch

from overt.data.batch import Batch
from overt.data.scenes.language import vocabulary
from overt.data.scenes.pairs import CaptionPairScenes
from overt.models.vlbert.model import Answer, Classify, Point, VLBert, VLSizes
from overt.models.vlbert.regions import PooledRegions

SIZES = VLSizes(
    vocabulary=vocabulary().size, width=12, layers=2, heads=3, inner=16, positions=80,
    dropout=0.1, gain=1.0,
)  # fmt: skip


@lru_cache(maxsize=1)
def pairs() -> CaptionPairScenes:
    return CaptionPairScenes("train", 0, 16, size=32, regions=10)


def batch(count: int = 4) -> Batch:
    """Caption pairs; a sample at a time has fewer regions."""
    found = pairs().batch(range(count))
    there = found.region_mask.clone()
    spoken = (found.target.weights > 0).any(dim=3)[:, 0, 0]
    there[1::2, -3:] = spoken[1::2, -3:]
    return replace(found, region_mask=there)


def eye() -> PooledRegions:
    return PooledRegions([4, 6], [2, 2])


def net(answer: Answer | None = None, relations: int = 5) -> VLBert:
    torch.manual_seed(0)
    return VLBert(SIZES, eye(), answer or Classify(SIZES.width, 3), relations)


def pointing() -> VLBert:
    torch.manual_seed(0)
    return VLBert(SIZES, eye(), Point(SIZES.width))
