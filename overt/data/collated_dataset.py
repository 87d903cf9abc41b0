"""Datasets of PyTorch: `torch.utils.data.Dataset` and `DataLoader` as items by index.

Their batches are whatever the collate function returns: a mapping, a tuple or a `Batch`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from overt.data.batch import Batch
from overt.errors import UserError

Collate = Callable[[list[Any]], Any]
HASHED_ITEMS = 64  # per batch, while the content is hashed


class CollatedDataset:
    """A map-style dataset of PyTorch with batches by index, as `fit` and the surrogate search use.

    Args:
        dataset: Items by index, with a length: `torch.utils.data.Dataset`, `datasets.Dataset`, or
            any object with `__getitem__` and `__len__`, such as a list of dictionaries.
        collate_fn: Makes a batch of a list of items.
        name: Name in results and caches; the class of the dataset by default.
        split: Part of the dataset.
        version: Identifies the content, in place of a hash of all items. Needed if an item is
            random, such as an augmented image.

    Raises:
        UserError: The dataset has no length or no items by index.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = CollatedDataset(TensorDataset(torch.arange(6.0), torch.arange(6)))
        >>> len(data), data.batch([1, 4])
        (6, [tensor([1., 4.]), tensor([1, 4])])
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate = default_collate,
        name: str = "",
        split: str = "train",
        version: str | None = None,
    ) -> None:
        listed = isinstance(dataset, list) and bool(dataset) and isinstance(dataset[0], Mapping)
        if isinstance(dataset, list) and not listed:
            found = f"a list of {type(dataset[0]).__name__}" if dataset else "an empty list"
            raise UserError(
                f'expected a list of dictionaries such as {{"text": ..., "labels": ...}}, got '
                f"{found}: name the parts of each sample, or pass a torch Dataset"
            )
        if isinstance(dataset, Mapping):
            raise UserError(
                f"expected one dictionary per sample, got one {type(dataset).__name__} of all: use "
                "[{name: column[i] for name, column in data.items()} for i in range(n)]"
            )
        if isinstance(dataset, IterableDataset) or not (is_map_style(dataset) or listed):
            raise UserError(
                f"cannot take items of a {type(dataset).__name__} by index: a dataset needs "
                "`__getitem__` and `__len__`; read a stream into a list of files or tensors first"
            )
        self.dataset, self.collate_fn = dataset, collate_fn
        self.name, self.split = name or type(dataset).__name__, split
        self.version = version

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the items at `indices`, collated.

        Args:
            indices: Indices of items.
        """
        if hasattr(self.dataset, "__getitems__"):  # reads several items at once
            items = self.dataset.__getitems__([*indices])
        else:
            items = [self.dataset[index] for index in indices]
        if self.collate_fn is default_collate and (name := _uneven_name(items)):
            raise UserError(
                f"items have {name} of different shapes: pad them to one length, or pass "
                "CollatedDataset(data, collate_fn=...)"
            )
        return self.collate_fn(items)

    def digest(self) -> str:
        """Return a hash of name, split and all items, or of `version` if it was given."""
        whole = hashlib.sha256(f"{self.name}\n{self.split}\n{self.version}\n".encode())
        if self.version is None:
            for first in range(0, len(self), HASHED_ITEMS):
                last = min(first + HASHED_ITEMS, len(self))
                _hash_value(whole, self.batch(range(first, last)))
        return whole.hexdigest()


def _uneven_name(items: Sequence[Any]) -> str:
    """Return which part of mappings has tensors of different shapes; "" if none has."""
    if not all(isinstance(item, Mapping) for item in items):
        return ""
    for name in items[0] if items else ():
        shapes = {one.shape for item in items if isinstance(one := item.get(name), Tensor)}
        if len(shapes) > 1:
            return repr(name)
    return ""


def is_map_style(data: Any) -> bool:
    """Return whether an object has items by index: `__getitem__` and `__len__`, and no plain list.

    A list does not count: it is more often a batch than a dataset.
    """
    if isinstance(data, list | tuple | str | bytes | Mapping | Tensor):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def from_loader(loader: "DataLoader[Any]", batch: int) -> CollatedDataset:
    """Return the dataset of a loader, with its collate function.

    The caller decides on the order of the items, so that training can resume: a sampler that does
    more than shuffle raises an error.

    Args:
        loader: The loader.
        batch: Items per batch of the caller.

    Raises:
        UserError: The loader has another batch size, drops items, or has a sampler of its own.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, shuffle=True)
        >>> len(from_loader(loader, batch=2))
        6
    """
    remedy = "pass its dataset, and choose items in `__getitem__`"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UserError(f"a DataLoader with a batch sampler of its own cannot be resumed: {remedy}")
    if loader.batch_size != batch:
        raise UserError(
            f"the DataLoader has batch_size={loader.batch_size}, expected {batch}: give both the "
            "same"
        )
    sampler = loader.sampler
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not whole and not isinstance(loader.dataset, IterableDataset):
        raise UserError(f"a DataLoader with a {type(sampler).__name__} cannot be resumed: {remedy}")
    found = CollatedDataset(loader.dataset, loader.collate_fn)
    if loader.drop_last and len(found) % batch:
        raise UserError(
            f"the DataLoader drops the last {len(found) % batch} items, and every item is used "
            "here: set drop_last=False"
        )
    return found


# --- batches of any form


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with all tensors on a device: a `Batch`, or nested mappings and sequences.

    Args:
        batch: The batch.
        device: Target device.

    Example:
        >>> move_batch({"x": torch.zeros(2), "name": ["a", "b"]}, "cpu")["name"]
        ['a', 'b']
    """
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: move_batch(one, device) for name, one in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [move_batch(one, device) for one in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor.

    Args:
        batch: A `Batch`, or nested mappings and sequences.

    Raises:
        UserError: The batch has no tensor with a row per sample.

    Example:
        >>> count_samples({"name": "a", "x": torch.zeros(3, 2)})
        3
    """
    found = len(batch) if isinstance(batch, Batch) else _first_length(batch)
    if found is None:
        raise UserError(
            f"a batch of type {type(batch).__name__} has no tensor with one row per sample"
        )
    return found


def _first_length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        lengths = (_first_length(one) for one in value)
        return next((one for one in lengths if one is not None), None)
    return None


def batch_ids(batch: Any, indices: Sequence[int]) -> tuple[str, ...]:
    """Return the ids of the samples of a batch: its own, else the indices of the items.

    Args:
        batch: A `Batch`, or a mapping that may have "ids" with one per sample.
        indices: Indices of the items.

    Example:
        >>> batch_ids({"x": torch.zeros(2)}, [4, 7]), batch_ids({"ids": ["a", "b"]}, [4, 7])
        (('4', '7'), ('a', 'b'))
    """
    if isinstance(batch, Batch):
        return batch.ids
    given = batch.get("ids") if isinstance(batch, Mapping) else None
    if given is None:
        return tuple(str(index) for index in indices)
    return tuple(str(one) for one in (given.tolist() if isinstance(given, Tensor) else given))


def _hash_value(whole: Any, value: Any) -> None:
    """Add a nested batch to a hash."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        whole.update(f"{plain.dtype} {tuple(plain.shape)}\n".encode())
        whole.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name, one in value.items():
            whole.update(f"{name}:".encode())
            _hash_value(whole, one)
    elif isinstance(value, list | tuple):
        whole.update(f"{len(value)}[".encode())
        for one in value:
            _hash_value(whole, one)
    elif value is None or isinstance(value, str | int | float | bool):
        whole.update(f"{value!r}\n".encode())
    else:
        raise UserError(
            f"a {type(value).__name__} in a batch cannot be hashed: identify the content with "
            "CollatedDataset(dataset, version=...)"
        )
