"""Attention inside a custom `torch.autograd.Function`: its weights have no gradient.

`forward` of such a function runs without an autograd graph, and its hand-written `backward` does
not involve the weights, so a loss on them would silently train nothing. The tensors of such a call
can be read, but a backward pass through them raises.
"""

import sys
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from overt.capture.call import MaterializedCall, QKCall

_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]


def running_function() -> str | None:
    """Return the name of the custom function whose forward is running on inputs with gradient.

    None outside such a function.
    """
    # PyTorch runs `forward` of a custom function with gradients disabled.
    if torch.is_grad_enabled():
        return None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            args = frame.f_locals.get("args", ())
            if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
                return str(getattr(frame.f_locals.get("cls"), "__name__", "a custom function"))
        frame = frame.f_back  # type: ignore[assignment]
    return None


def block_gradients(
    source: QKCall | MaterializedCall, value: Tensor | None, module: str, function: str
) -> tuple[QKCall | MaterializedCall, Tensor | None]:
    """Return the same call and values; a backward pass through them raises and names the module."""
    message = (
        f"{module} attends inside {function}, a custom autograd function: its weights can be read "
        "but have no gradient; write the attention outside of that function, or detach the weights"
    )
    changed: dict[str, Any] = {
        field.name: block_gradient(getattr(source, field.name), message)
        for field in fields(source)
        if isinstance(getattr(source, field.name), Tensor)
        and getattr(source, field.name).is_floating_point()
    }
    if isinstance(source, QKCall):
        changed["taps"] = None
    return replace(source, **changed), None if value is None else block_gradient(value, message)


def block_gradient(tensor: Tensor, message: str) -> Tensor:
    """Return the same values; a backward pass through them raises `message`."""
    if tensor.is_inference():
        return tensor
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)  # so that the result requires a gradient
        out: Tensor = _BlockGradient.apply(tensor, anchor, message)
    return out


class _BlockGradient(Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, message: str) -> Tensor:
        """Return the same values."""
        ctx.message = message
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise: there is no gradient."""
        raise RuntimeError(ctx.message)
