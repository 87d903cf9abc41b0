"""Ground truth of attention for the samples of a batch: targets, maps of people, fixations, priors.

    batch, truth = load_ground_truth(data.Osie(root), range(8))
    metrics.nss(attention, pool_people(truth.fixations))

Everything is a function of the dataset and the index of a sample. Fixations on other images come
from the whole dataset and not from the batch, so that no number depends on the batch size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from overt.attention import GLOBAL_QUERY, AttentionMap, Form, Kind
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.errors import UserError


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """Ground truth of attention; None is what a dataset does not have.

    Args:
        target: One row per sample: a density, the mean over people, a rationale, or the share of
            each cell inside a box or a mask.
        people: One query per person; an absent person sees no key.
        fixations: Fixation counts per person.
        others: Counts of the fixations on all other images of the dataset.
        prior: Where people look regardless of the image, fitted on all other images.

    Raises:
        ValueError: The maps have different numbers of samples or keys.

    Example:
        >>> from overt.attention import words
        >>> target = AttentionMap.from_cells(torch.tensor([[0.2, 0.8], [0.5, 0.5]]), words(2))
        >>> len(GroundTruth(target).select(torch.tensor([1])))
        1
    """

    target: AttentionMap
    people: AttentionMap | None = None
    fixations: AttentionMap | None = None
    others: AttentionMap | None = None
    prior: AttentionMap | None = None

    def __post_init__(self) -> None:
        for name, one in self._maps().items():
            if len(one) != len(self.target) or len(one.keys) != len(self.target.keys):
                raise ValueError(
                    f"{name} has {len(one)} samples and {len(one.keys)} keys, target has "
                    f"{len(self.target)} samples and {len(self.target.keys)} keys"
                )

    def __len__(self) -> int:
        return len(self.target)

    def select(self, rows: Int[Tensor, " n"]) -> "GroundTruth":
        """Return the samples at `rows`, in that order."""
        return replace(self, **{name: one.select(rows) for name, one in self._maps().items()})

    def to(self, device: torch.device | str) -> "GroundTruth":
        """Return the ground truth on `device`."""
        return replace(self, **{name: one.to(device) for name, one in self._maps().items()})

    def _maps(self) -> dict[str, AttentionMap]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in found.items() if one is not None}


@runtime_checkable
class HumanAttentionDataset(Protocol):
    """A dataset with one map per person."""

    def people(self, indices: Sequence[int]) -> AttentionMap: ...


@runtime_checkable
class FixationDataset(Protocol):
    """A dataset of fixations: those of each person, and those on other images."""

    def counts(self, indices: Sequence[int]) -> AttentionMap: ...
    def others(self, indices: Sequence[int]) -> AttentionMap: ...
    def prior(self, indices: Sequence[int]) -> AttentionMap: ...


def load_ground_truth(source: Dataset, indices: Sequence[int]) -> tuple[Batch, GroundTruth]:
    """Return the samples at `indices` with their ground truth.

    Args:
        source: Dataset whose batches have a target.
        indices: Indices of items.

    Returns:
        The batch and its ground truth.

    Raises:
        UserError: The dataset has no target.

    Example:
        >>> from overt.data import Scenes
        >>> batch, truth = load_ground_truth(Scenes("train", seed=0, count=2, size=32), [0, 1])
        >>> truth.target.shape
        (8, 1, 1, 1, 64)
    """
    batch = source.batch(indices)
    if batch.target is None:
        raise UserError(
            f"{source.name} {source.split} has no ground truth for attention: choose a dataset "
            "with boxes, masks, fixations or rationales, or use data.CustomMaps."
        )
    found = GroundTruth(batch.target)
    if isinstance(source, HumanAttentionDataset):
        found = replace(found, people=source.people(indices))
    if isinstance(source, FixationDataset):
        found = replace(
            found,
            fixations=source.counts(indices),
            others=source.others(indices),
            prior=source.prior(indices),
        )
    return batch, found


def iterate_ground_truth(
    source: Dataset, size: int, limit: int | None = None
) -> Iterator[tuple[Batch, GroundTruth]]:
    """Yield the samples of a dataset with their ground truth, batch by batch.

    Args:
        source: Dataset whose batches have a target.
        size: Number of items per batch.
        limit: Number of items; None takes all.

    Yields:
        A batch and its ground truth.

    Raises:
        UserError: `size` is below 1, or the dataset has no target.

    Example:
        >>> from overt.data import Scenes
        >>> data = Scenes("train", seed=0, count=2, size=32)
        >>> [len(batch) for batch, truth in iterate_ground_truth(data, size=3)]
        [8]
    """
    if size < 1:
        raise UserError(f"The batch size must be at least 1, got {size}.")
    count = len(source) if limit is None else min(limit, len(source))
    for start in range(0, count, size):
        yield load_ground_truth(source, range(start, min(start + size, count)))


def pool_people(people: AttentionMap) -> AttentionMap:
    """Return the sum over the people of each sample, such as all fixations.

    Args:
        people: Map with one query per person.

    Returns:
        Map with one global query per sample.

    Raises:
        ValueError: The weights are signed.

    Example:
        >>> import torch
        >>> from overt.attention import AttentionMap, words
        >>> weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # three people, two keys
        >>> people = AttentionMap(weights[None, None, None], words(2), words(3))
        >>> pool_people(people).weights.flatten()
        tensor([1., 2.])
    """
    if people.kind is Kind.SIGNED:
        raise ValueError("signed weights cannot be summed over people")
    seen = people.visible
    shown = seen[:, None, None]
    values = (people.weights * shown).sum(dim=-2, keepdim=True)
    mask = None if people.mask is None else seen.any(dim=1, keepdim=True)
    return replace(
        people, values=values, queries=GLOBAL_QUERY, mask=mask, kind=Kind.AMOUNT, form=Form.PLAIN
    )
