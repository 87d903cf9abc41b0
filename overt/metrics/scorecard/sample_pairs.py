"""Partners of samples for the control "other sample", independent of batches and processes.

The map of another sample is a control: its score is what maps of this model get on any sample.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.metrics.rng import derive_seed


def partner_items(items: Sequence[int], total: int, seed: int) -> list[int]:
    """Draw for each item of a dataset another item, from its index and the seed alone."""
    if total < 2:
        raise ValueError(f"another item needs at least 2 items in the dataset, got {total}")
    return [
        (item + 1 + derive_seed(seed, "other sample", item) % (total - 1)) % total for item in items
    ]


def samples_per_item(data: Dataset, items: Sequence[int], samples: int) -> list[int]:
    """Count the samples of each item; an item may have several, such as its questions."""
    if samples == len(items):
        return [1] * len(items)
    return [len(data.batch([item])) for item in items]


def pair_samples(ours: Sequence[int], theirs: Sequence[int]) -> Int[Tensor, " b"]:
    """Index for each sample a sample of the partner item, cycling where the partner has fewer.

    Args:
        ours: The number of samples of each item.
        theirs: The number of samples of each item's partner, in the same order.

    Returns:
        The index of the partner sample.
    """
    found, start = [], 0
    for count, others in zip(ours, theirs, strict=True):
        found += [start + at % others for at in range(count)]
        start += others
    return torch.tensor(found, dtype=torch.long)


def partner_batch(
    data: Dataset, items: Sequence[int], samples: int, seed: int
) -> tuple[Batch, Int[Tensor, " b"]]:
    """Load the partners of these items, and the index of each sample's partner."""
    partners = partner_items(items, len(data), seed)
    batch = data.batch(partners)
    ours = samples_per_item(data, items, samples)
    return batch, pair_samples(ours, samples_per_item(data, partners, len(batch)))
