"""Datasets of Learn to Pay Attention: augmentation and the first pooling."""

from typing import Any

import torch

from overt.data.batch import Batch
from overt.data.in_memory_images import random_shift, random_shift_flip
from overt.papers.ltpa import config as ltpa
from overt.papers.ltpa.config import LtpaModel
from overt.papers.ltpa.data import augmentation, first_pool_size
from overt.papers.ltpa.model import build_network


def test_svhn_images_are_not_flipped() -> None:
    assert augmentation(ltpa.ltpa_svhn().data) is random_shift
    for make in (ltpa.ltpa_cifar10, ltpa.ltpa_cub, ltpa.ltpa_scenes):
        assert augmentation(make().data) is random_shift_flip


def test_cub_images_are_pooled_by_five() -> None:
    assert [first_pool_size(make().data) for make in (ltpa.ltpa_cub, ltpa.ltpa_svhn)] == [5, 2]
    net: Any = build_network(LtpaModel(width=0.05), 3, 5)
    images = torch.zeros(2, 3, 80, 80, dtype=torch.uint8)
    grids = [one.keys.find("image").shape for one in net(Batch(("a", "b"), images)).attention]
    assert grids == [(16, 16), (8, 8)]
