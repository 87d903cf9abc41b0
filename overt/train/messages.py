"""Encode nested values as bytes without pickle, to send them to other processes."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

_STRUCTURE = "structure"  # the tensor with the JSON text; the others have numbers as names


def encode(value: Any) -> bytes:
    """Encode a value as bytes.

    Args:
        value: Tensors, numeric arrays, texts, numbers, booleans and None, in lists, tuples and
            dictionaries with texts as keys.

    Returns:
        The bytes of a safetensors file: the tensors, and everything else as JSON.

    Raises:
        TypeError: The value contains anything else.

    Example:
        >>> decode(encode({"name": "a", "sizes": (1, 2), "scores": torch.tensor([0.5])}))
        {'name': 'a', 'sizes': (1, 2), 'scores': tensor([0.5000])}
    """
    # as in checkpoints, and imported on first use, since most runs have one process
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_to_json(value, tensors)).encode()
    tensors[_STRUCTURE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return bytes(save(tensors))


def decode(data: bytes) -> Any:
    """Return the value that was encoded; its tensors are on the CPU."""
    from safetensors.torch import load

    tensors = load(data)
    return _from_json(json.loads(tensors[_STRUCTURE].numpy().tobytes()), tensors)


def _to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a JSON value, and add the tensors of the value to `tensors`.

    Everything but texts and numbers becomes [kind, content], so that a tuple stays a tuple.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"cannot send a dictionary with keys other than texts: {[*value]}")
        return ["dict", {name: _to_json(one, tensors) for name, one in value.items()}]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_to_json(one, tensors) for one in value]]
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        # a copy in the byte order of this machine
        array = value.astype(value.dtype.newbyteorder("="))
        return ["array", _add_tensor(torch.from_numpy(array), tensors)]
    if isinstance(value, Tensor):
        return ["tensor", _add_tensor(value.detach().cpu(), tensors)]
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"cannot send a value of type {kind}: use tensors, numeric arrays or texts")


def _add_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Add a tensor with memory of its own, as safetensors requires, and return its name."""
    name = str(len(tensors))
    tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return name


def _from_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "dict":
            return {name: _from_json(one, tensors) for name, one in content.items()}
        case "list":
            return [_from_json(one, tensors) for one in content]
        case "tuple":
            return tuple(_from_json(one, tensors) for one in content)
        case "array":
            return tensors[content].numpy()
        case _:
            return tensors[content]
