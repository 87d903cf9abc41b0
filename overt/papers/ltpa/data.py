"""Learn to Pay Attention: CIFAR, SVHN, CUB and scenes, with augmentation."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from overt import data as datasets
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.papers.ltpa.config import LtpaDataset, LtpaImages, LtpaScenes


@runtime_checkable
class LabelledDataset(Dataset, Protocol):
    """A dataset with class names."""

    @property
    def classes(self) -> tuple[str, ...]: ...


def split_opener(name: LtpaDataset, root: Path) -> Callable[[str], LabelledDataset]:
    """Return a function that opens a split of one of the paper's datasets."""
    match name:
        case LtpaDataset.CIFAR10:
            return lambda split: datasets.Cifar10(root, split)
        case LtpaDataset.CIFAR100:
            return lambda split: datasets.Cifar100(root, split)
        case LtpaDataset.SVHN:
            return lambda split: datasets.Svhn(root, split)
        case LtpaDataset.CUB:
            return lambda split: datasets.Cub(root, split)


def augmentation(data: LtpaImages | LtpaScenes) -> Callable[[Batch, torch.Generator], Batch]:
    """Return the augmentation of training images: crops and flips; for digits crops only."""
    digits = isinstance(data, LtpaImages) and data.name is LtpaDataset.SVHN
    return datasets.random_shift if digits else datasets.random_shift_flip


def first_pool_size(data: LtpaImages | LtpaScenes) -> int:
    """Return the side of the first pooling: 5 for CUB images of 80 x 80 pixels, else 2 (A.2)."""
    return 5 if isinstance(data, LtpaImages) and data.name is LtpaDataset.CUB else 2
