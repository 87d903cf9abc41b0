"""Where people looked, or what they marked, for the samples of a batch: all that is known of it.

    batch, truth = truth_of(data.Osie(root), range(8))
    measure.nss(attention, pooled(truth.fixations))

Everything is a function of the data set and the index of a sample. What stands for other images is
taken from the whole data set and not from the batch, so that no number depends on how samples are
cut into batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from overt.attention import POINT, AttentionMap, Form, Kind
from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import BadInput


@dataclass(frozen=True, eq=False)
class Truth:
    """What is known of where attention should be; None is what a data set does not know.

    `target` is one row a sample: a density, the mean of people, a rationale, the share of each cell
    inside a box or a mask. `people` has one query a person, and one who is not there sees no key.
    `fixations` are counts a person, and `others` counts of the fixations on all other images of
    the data set. `prior` is where people look whatever is shown, fitted on all other images.
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
                    f"{name} of {len(one)} samples and {len(one.keys)} keys beside a target of "
                    f"{len(self.target)} samples and {len(self.target.keys)} keys"
                )

    def __len__(self) -> int:
        return len(self.target)

    def select(self, rows: Int[Tensor, " n"]) -> "Truth":
        """The samples named, in their order."""
        return replace(self, **{name: one.select(rows) for name, one in self._maps().items()})

    def to(self, device: torch.device | str) -> "Truth":
        """The same on another device."""
        return replace(self, **{name: one.to(device) for name, one in self._maps().items()})

    def _maps(self) -> dict[str, AttentionMap]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in found.items() if one is not None}


@runtime_checkable
class Peopled(Protocol):
    """A data set that knows what each person did."""

    def people(self, indices: Sequence[int]) -> AttentionMap: ...


@runtime_checkable
class Fixated(Protocol):
    """A data set of fixations: those of each person, and those that fell on other images."""

    def counts(self, indices: Sequence[int]) -> AttentionMap: ...
    def others(self, indices: Sequence[int]) -> AttentionMap: ...
    def prior(self, indices: Sequence[int]) -> AttentionMap: ...


def truth_of(source: Source, indices: Sequence[int]) -> tuple[Batch, Truth]:
    """The samples of any data set whose batches have a target, with all that is known of it."""
    batch = source.batch(indices)
    if batch.target is None:
        raise BadInput(
            f"{source.name} {source.split} says nothing of where attention should be; take a set "
            "with boxes, masks, fixations or marked words, or bring your own maps (data.OwnMaps)."
        )
    found = Truth(batch.target)
    if isinstance(source, Peopled):
        found = replace(found, people=source.people(indices))
    if isinstance(source, Fixated):
        found = replace(
            found,
            fixations=source.counts(indices),
            others=source.others(indices),
            prior=source.prior(indices),
        )
    return batch, found


def truths(source: Source, size: int, limit: int | None = None) -> Iterator[tuple[Batch, Truth]]:
    """The samples of a data set with their truth, `size` items at a time, the first `limit`."""
    if size < 1:
        raise BadInput(f"A batch of {size} items has nothing in it.")
    count = len(source) if limit is None else min(limit, len(source))
    for start in range(0, count, size):
        yield truth_of(source, range(start, min(start + size, count)))


def pooled(people: AttentionMap) -> AttentionMap:
    """All that people did together: amounts summed over the people of each sample."""
    if people.kind is Kind.SIGNED:
        raise ValueError("signed weights are no amounts that could be added up")
    seen = people.visible
    shown = seen[:, None, None]
    values = (people.weights * shown).sum(dim=-2, keepdim=True)
    mask = None if people.mask is None else seen.any(dim=1, keepdim=True)
    return replace(
        people, values=values, queries=POINT, mask=mask, kind=Kind.AMOUNT, form=Form.PLAIN
    )
