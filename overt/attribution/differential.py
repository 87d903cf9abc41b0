"""Differential attention: the difference of two softmax maps that the model applies.

Ye, Dong, Xia, Sun, Zhu, Huang and Wei, "Differential Transformer", ICLR 2025,
https://arxiv.org/abs/2410.05258, equation 1. DiffLlama of transformers computes both maps as heads
of one attention and subtracts their outputs, so the difference is never computed there.
"""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture.call import Call, MaterializedCall
from overt.capture.discovery import DIFFERENTIAL_PARAMETERS, is_differential
from overt.capture.trace import AttentionTrace


def differential(trace: AttentionTrace) -> AttentionTrace:
    """Replace the two halves of heads of each differential attention by their difference.

    Head i of the result is head i minus lambda times head i + h / 2 (equation 1), with the lambda
    of the module at the time of this call. Weights may be negative (`Kind.SIGNED`). Other calls are
    unchanged.

    Args:
        trace: A trace of `overt.watch`.

    Returns:
        A trace with half as many heads in calls whose heads are subtracted. Their values and
        outputs are None, because they belong to the two maps.

    Raises:
        ValueError: No module subtracts heads.

    Example:
        >>> import overt
        >>> import torch
        >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.rand(1, 4, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> differential(trace)
        Traceback (most recent call last):
        ValueError: ...
    """
    # Calls without differential attention, and those that were subtracted before, are kept.
    calls: list[Call] = []
    done: set[tuple[nn.Module, int]] = set()
    for call in trace.calls:
        if not is_differential(call.module) or call.kind is Kind.SIGNED:
            calls.append(call)
        elif (
            call.module,
            call.step,
        ) not in done:  # a fused kernel runs once per half of the values
            done.add((call.module, call.step))
            calls.append(_subtract_heads(call))
    if not done:
        raise ValueError(
            "no captured module has differential attention, which is recognised by the attributes "
            "lambda_q1, lambda_k1, lambda_q2, lambda_k2 and lambda_init"
        )
    return AttentionTrace(calls, trace.layout, trace.notes)


def _lambda(module: nn.Module) -> Float[Tensor, ""]:
    """Return the weight of the second map (equation 2)."""
    q1, k1, q2, k2 = (getattr(module, name).float() for name in DIFFERENTIAL_PARAMETERS)
    return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + module.lambda_init


def _subtract_heads(call: Call) -> Call:
    if call.shape[1] % 2 or call.head_indices is not None:
        raise ValueError(
            f"{call.name or 'the model'} was captured with {call.shape[1]} heads, which are "
            "subtracted in pairs; watch all heads, and select heads of the result"
        )
    first, second = call.weights().chunk(2, dim=1)
    weights = first - _lambda(call.module).to(first) * second
    return replace(call, source=MaterializedCall(weights, Kind.SIGNED), value=None, output=None)
