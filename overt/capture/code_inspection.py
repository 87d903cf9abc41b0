"""Which modules could attend, as far as their Python code tells.

Most modules of a model name neither a softmax nor fused attention anywhere in their code. They need
no function mode in later blocks (see `scoped_mode`).
"""

import functools
import types
from typing import Any

import torch
from torch import nn

# Names by which code reaches a softmax or fused attention.
_ATTENTION_FUNCTIONS = frozenset(
    (
        "_safe_softmax",
        "_scaled_dot_product_attention",
        "_softmax",
        "flex_attention",
        "log_softmax",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
        "softmax",
        "softmin",
    )
)
_SOFTMAX_LAYERS = (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d)
# Code that is not followed. The functions of transformers that attend are called by modules that
# are attention by their names.
_NOT_FOLLOWED = ("torch", "numpy", "builtins", "transformers.masking_utils", "transformers.utils")


def may_attend(module: nn.Module) -> bool:
    """Return whether the forward of a module names attention or a softmax.

    Methods and functions that it calls are followed through globals, closures, partials and
    attributes of the module. TorchScript, whose code is not Python, may attend.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if any(isinstance(child, _SOFTMAX_LAYERS) for child in module.children()):
        return True
    # Functions are also attributes of the module itself, such as an activation or a partial.
    pending: list[Any] = [module.forward, *vars(module).values()]
    seen: set[int] = set()
    while pending:
        function = _inner_function(pending.pop())
        if getattr(function, "__name__", None) in _ATTENTION_FUNCTIONS:
            return True
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if _is_not_followed(function.__module__ or ""):
            continue
        names = _names_in(function.__code__)
        if names & _ATTENTION_FUNCTIONS:
            return True
        # Names that are not globals may be methods of the class, or come from a decorator's
        # closure.
        pending += [function.__globals__[name] for name in names & function.__globals__.keys()]
        pending += [getattr(type(module), name, None) for name in names]  # methods
        pending += _closure_values(function)
    return False


def _is_not_followed(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in _NOT_FOLLOWED)


def _inner_function(value: Any) -> Any:
    """Return the function inside of a bound method, a property, a partial or a static method."""
    while True:
        if isinstance(value, types.MethodType | staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        else:
            return value


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in functions inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _closure_values(function: types.FunctionType) -> list[Any]:
    """Return what the closure of a function holds; decorators keep functions there."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return values
