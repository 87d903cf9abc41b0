"""Attention weighed by what it does to a target: gradients, without a stored matrix of them.

The output of an attention call is O = A V, so the gradient of a target by the weight of query i and
key j is the product of the gradient of O at i and the value at j. One backward pass gives the
former, the call has kept the latter, and any rows of the gradient are a product of the two, made
when they are asked for. The model runs on its fused kernel. Dropout of weights is not followed: ask
in evaluation mode.

Chefer, Gur and Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and
Encoder-Decoder Transformers", ICCV 2021, https://arxiv.org/abs/2103.15679.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.capture.axes import four
from overt.capture.call import Call, Written
from overt.capture.derived.maps import (
    device_of,
    exactly,
    hidden_rows,
    listed,
    one_hot_rows,
    onto_itself,
    places,
    portion_size,
    portions,
    precision_of,
    shared_mask,
)
from overt.capture.derived.rolling import reached
from overt.capture.products import ALL, Index, take
from overt.capture.seen import Seen, Where


@dataclass(frozen=True, eq=False)
class Slope:
    """The gradient of a target by the weights of one call, of which any rows can be asked for.

    Kept is the gradient of the call's output and the value, or where a model wrote its weights out,
    the gradient of those.
    """

    call: Call
    output: Float[Tensor, "b h q d"] | None = None
    value: Float[Tensor, "b g k d"] | None = None
    weights: Float[Tensor, "b h q k"] | None = None

    def __call__(self, rows: Index = ALL) -> Float[Tensor, "b h s k"]:
        """The gradient of some rows of the weights."""
        if self.weights is not None:
            return take(self.weights, rows, 2).to(precision_of(self.call))
        assert self.output is not None and self.value is not None
        with torch.autocast(self.value.device.type, enabled=False):
            precise = torch.promote_types(self.value.dtype, torch.float32)
            value = self.value.to(precise)
            output = take(self.output, rows, 2).to(precise)
            grouped = output.unflatten(1, (value.shape[1], -1))
            return (grouped @ value.mT.unsqueeze(2)).flatten(1, 2)


def slopes(seen: Seen, target: Tensor, *, create_graph: bool = False) -> list[Slope]:
    """The gradient of the sum of `target` by the weights of each call, by one backward pass.

    `target` is what to explain: a class score of each sample, a loss. The graph is kept, and no
    `.grad` is touched. `create_graph` is that of `torch.autograd.grad`: a gradient through the
    result, which PyTorch's fused kernels do not have; run the model under
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` or with its weights written out.
    """
    seen.check_alike()
    if target.ndim > 1:
        raise ValueError(
            f"a target is one score a sample, and this is {tuple(target.shape)}; choose a class, "
            "such as logits[:, 2]"
        )
    if not target.requires_grad:
        raise ValueError(
            "the target has no gradient: run the model without no_grad, and let a parameter or an "
            "input require one"
        )
    ends: list[Tensor] = []
    for call in seen.calls:
        ends += [end for end in _ends(call) if end is not None]
    found = torch.autograd.grad(
        target.sum(), ends, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    by_end = {id(end): gradient for end, gradient in zip(ends, found, strict=True)}
    return [_slope(call, by_end) for call in seen.calls]


@exactly
def gradient_attention(
    seen: Seen, target: Tensor, rows: Where | None = None, *, create_graph: bool = False
) -> AttentionMap:
    """Gradient times attention of every layer and head: what each weight adds to the target.

    To first order, for all queries or for `rows`, the name of a span or positions a sample; above
    zero where more attention would raise the target. For `target` and `create_graph` see `slopes`.
    """
    found = slopes(seen, target, create_graph=create_graph)
    at, queries, keys = places(seen, rows)
    mask = shared_mask(seen, at)
    with torch.set_grad_enabled(create_graph):
        values = torch.stack([one.call.weights(at) * one(at) for one in found], dim=1)
        if isinstance(at, Tensor):
            there = (at >= 0).to(values.device)
            values = values * there[:, None, None, :, None]
            mask = hidden_rows(mask, there, len(keys))
        elif mask is not None:
            mask = mask.expand(len(values), -1, -1)
    return AttentionMap(values, keys, queries, mask, Kind.SIGNED)


@exactly
def relevance(
    seen: Seen,
    target: Tensor,
    rows: Where | None = None,
    *,
    create_graph: bool = False,
    portion: int | None = None,
) -> AttentionMap:
    """How relevant each input is to each position for the target (Chefer et al. 2021, eq. 5 and 6).

    In every layer the positive part of gradient times attention, its mean over heads, is added to
    what flows straight on, and layers are multiplied. For the prediction ask for the row it is made
    from, such as the class token. The matrix of a layer is made in portions of rows and never
    stored: memory grows with rows x keys. `target` and `create_graph` are those of `slopes`.
    """
    onto_itself(seen, "relevance")
    found = slopes(seen, target, create_graph=create_graph)
    at, queries, keys = places(seen, rows)
    b, _, q, _ = seen.calls[0].shape
    mask = shared_mask(seen)
    with torch.set_grad_enabled(create_graph):
        first = listed(at, b, q, device_of(seen.calls[-1]))
        state = one_hot_rows(first, q, precision_of(seen.calls[-1]))
        for one in reversed(found):
            more = torch.zeros_like(state)
            for part in portions(q, portion or portion_size(one.call)):
                layer = (one.call.weights(part) * one(part)).clamp_min(0).mean(dim=1)
                more = more + state[..., part] @ layer
            state = state + more
    shown = None if mask is None else reached(mask.expand(b, q, q), at, True, len(seen))
    if shown is not None:  # a row that sees nothing is no query
        state = state * shown.any(dim=-1, keepdim=True)
    if isinstance(at, Tensor):
        shown = hidden_rows(shown, first >= 0, len(keys))
    return AttentionMap(state[:, None, None], keys, queries, shown, Kind.AMOUNT)


def _ends(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The tensors by which the gradient of a call's weights can be known."""
    weights = call.source.used if isinstance(call.source, Written) else None
    ends = (call.output, weights)
    if not any(end is not None and end.requires_grad for end in ends):
        raise ValueError(
            f"{call.name or 'the model'} ran without a gradient, or hides what it gave out; run it "
            " without no_grad, and let a parameter or an input require a gradient"
        )
    output, weights = (end if end is not None and end.requires_grad else None for end in ends)
    return output, weights


def _slope(call: Call, found: Mapping[int, Tensor | None]) -> Slope:
    output, weights = (None if end is None else found[id(end)] for end in _ends(call))
    if call.chosen is not None:
        raise ValueError(
            f"heads {list(call.chosen)} of {call.name or 'the model'} have no gradient of their "
            "own; take heads of the finished map, not of what was seen"
        )
    if weights is not None:
        return Slope(call, weights=weights)
    if output is None:
        raise ValueError(
            f"the target does not depend on what {call.name or 'the model'} gave out; choose calls "
            "with where(...), and run the model without torch.compile"
        )
    b, h, q, k = call.shape
    value = call.value
    if value is None or value.shape[-2] != k or value.numel() % (b * k * value.shape[-1]):
        raise ValueError(f"{call.name or 'the model'} does not show the values its weights met")
    size = value.shape[-1]
    if output.numel() != b * h * q * size or output.shape[-2] != q:
        raise ValueError(
            f"{call.name or 'the model'} gave out {tuple(output.shape)} for weights {call.shape}; "
            "take heads of the finished map, not of what was seen"
        )
    return Slope(call, four(output, h).reshape(b, h, q, size), value.reshape(b, -1, k, size))
