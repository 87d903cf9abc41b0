"""Compare what is computed for a cache with what is read from it, to the last bit."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> str:
    """Return a hash of the states of the global random generators of NumPy and PyTorch.

    That of Python is left out: in tests, checks of types draw from it.
    """
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    whole = hashlib.sha256(repr((kind, rest)).encode())
    whole.update(np.asarray(keys).tobytes())
    whole.update(torch.get_rng_state().numpy().tobytes())
    return whole.hexdigest()


def content(value: Any) -> Any:
    """Return a value as plain Python: tensors as dtype, shape, strides and bytes."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return str(value.dtype), tuple(value.shape), value.stride(), bytes(flat.numpy())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.strides, value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: content(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {name: content(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [content(one) for one in value]
    return value
