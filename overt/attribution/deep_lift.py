"""DeepLift with the rescale rule: differences from a baseline, carried back through the network.

The calls of activation functions are intercepted, of modules and in code. What is neither linear
nor an activation function or maximum pooling, such as attention and layer norm, has its ordinary
gradient; `gap` says how much of the score is then missing.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt.attribution.attribution_map import AttributionMap
from overt.attribution.model_inputs import (
    Inputs,
    Model,
    PlaceGeometry,
    VariedInput,
    vary_input,
)
from overt.attribution.target_scores import Target

_OTHER_CALLS = (
    "the model calls other activation functions for the baseline than for the samples, so they "
    "cannot be compared; use integrated_gradients"
)
SMALL = 1e-6  # below this difference of an input the ordinary gradient is used, as in SHAP

_ACTIVATIONS: set[Callable[..., Any]] = {
    *(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6),
    *(F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.softplus),
    *(F.hardswish, F.hardsigmoid, F.hardtanh, F.logsigmoid),
    *(torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, F.sigmoid),
    *(torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, F.tanh),
}


def deep_lift(
    model: Model,
    inputs: Inputs,
    target: Target,
    geometry: PlaceGeometry | None = None,
    *,
    baseline: float | Tensor = 0.0,
    embedding: nn.Module | None = None,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute DeepLift by the rescale rule, in one backward pass (Shrikumar et al. 2017).

    "Learning Important Features Through Propagating Activation Differences",
    https://arxiv.org/abs/1704.02685, eq. 9. The slope of an activation function is the difference
    of its outputs divided by that of its inputs, between the sample and the baseline.

    Args:
        model: The network.
        inputs: Pixels (b, c, y, x), features (b, n, d), tokens (b, n), or keyword arguments of the
            model.
        target: A class, a `Contrast`, or a function of the output that returns one score per row.
        geometry: How the images were resized and cropped, or the characters of each token.
        baseline: The input without information; see `integrated_gradients`.
        embedding: For tokens: the layer whose output is varied.
        chunk: How many samples are run at a time, after their baselines; None runs all.

    Returns:
        A signed map over pixels or words, summed over channels. `gap` is zero for networks of
        linear layers, activation functions and maximum pooling.

    Raises:
        ValueError: The target has no gradient to the inputs, or the model calls other functions for
            the baseline than for the samples.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> found = deep_lift(model, torch.randn(2, 3), 1)
        >>> bool((found.gap.abs() < 1e-5).all())
        True
    """
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        start, parts, changes = varied.fill(baseline), [], []
        for _, at in varied.chunks(1, chunk):
            rescale = _Rescale()
            with rescale:
                floor = _scores(varied, start[at].detach().requires_grad_(), at).detach()
            with rescale.for_samples():
                leaf = varied.values[at].detach().requires_grad_()
                score = _scores(varied, leaf, at)
            slope = _slope(score, leaf)
            changes.append(score.detach() - floor)
            parts.append(slope * (varied.values[at] - start[at]))
        found = varied.channels(torch.cat(parts)).sum(dim=1)
        return varied.to_map(found, change=torch.cat(changes).to(found))


def _scores(varied: VariedInput, leaf: Tensor, at: Tensor) -> Tensor:
    """Compute scores with a graph, also of the baseline, so that the model takes the same path."""
    with torch.enable_grad():
        return varied.score(leaf, at)


def _slope(score: Float[Tensor, " n"], leaf: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
    """Carry back the scores of the samples."""
    found = None
    if score.requires_grad:
        with torch.enable_grad():
            (found,) = torch.autograd.grad(score.sum(), leaf, allow_unused=True)
    if found is None:
        raise ValueError(
            "the target has no gradient to the inputs: the model may detach them, or the target "
            "may not depend on them; use occlusion, rise, kernel_shap or lime"
        )
    return found


@dataclass(frozen=True, eq=False)
class _BaselineCall:
    """What a nonlinear function read and returned for the baseline."""

    function: Callable[..., Any]
    given: Tensor
    out: Tensor
    indices: Tensor | None = None


class _Rescale(TorchFunctionMode):
    """Replace the gradient of nonlinear functions by the slope between sample and baseline.

    The baseline runs first and its calls are recorded; those of the sample come in the same order.
    So nothing is assumed about the axes, such as which one has the samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: deque[_BaselineCall] | None = deque()
        self.baseline: deque[_BaselineCall] = deque()

    @contextmanager
    def for_samples(self) -> Iterator[None]:
        """Run samples for a block: their calls are matched with those of the baseline."""
        assert self.recorded is not None  # once
        self.baseline, self.recorded = self.recorded, None
        with self:
            yield
        if self.baseline:
            raise ValueError(_OTHER_CALLS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = dict(kwargs or {})
        given = args[0] if args else more.get("input")
        # What does not depend on the input, such as a gate that is a parameter, is not changed.
        if not isinstance(given, Tensor) or not given.requires_grad:
            return func(*args, **more)
        if func in _ACTIVATIONS:
            more.pop("input", None)
            return self._activation(func, given, lambda x: func(x, *args[1:], **more))
        if func is F.max_pool2d and given.ndim == 4:
            more.pop("input", None)
            return self._maximum(given, args[1:], more)
        return func(*args, **more)

    def _activation(
        self, func: Callable[..., Any], given: Tensor, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Compute an elementwise function whose gradient is the slope of eq. 9."""
        before = given.detach().clone()  # it may be changed in place
        if self.recorded is not None:
            out = function(given)
            self.recorded.append(_BaselineCall(func, before, out.detach().clone()))
            return out
        base = self._next(func, given)
        with torch.enable_grad():
            leaf = before.clone().requires_grad_()
            copy = leaf.clone()
            out = function(copy)
            in_place = out is copy
            (local,) = torch.autograd.grad(out.sum(), leaf)
        out, way = out.detach(), before - base.given
        slope = torch.where(way.abs() > SMALL, (out - base.out) / way, local)
        found: Tensor = _Slope.apply(given, out, slope)
        # Of an in-place function, the input has to change as well, with the same gradient.
        return given.copy_(found) if in_place else found

    def _maximum(self, given: Tensor, args: tuple[Any, ...], more: dict[str, Any]) -> Tensor:
        """Compute a maximum whose change is divided between the places of both maxima."""
        before = given.detach().clone()
        out, indices = F.max_pool2d_with_indices(before, *args, **more)
        if self.recorded is not None:
            self.recorded.append(_BaselineCall(F.max_pool2d, before, out, indices))
            again: Tensor = F.max_pool2d(given, *args, **more)
            return again
        base = self._next(F.max_pool2d, given)
        assert base.indices is not None  # of a maximum
        found: Tensor = _PoolSlope.apply(given, out, indices, base.given, base.out, base.indices)
        return found

    def _next(self, func: Callable[..., Any], given: Tensor) -> _BaselineCall:
        """Return the call for the baseline; another function or shape raises."""
        base = self.baseline.popleft() if self.baseline else None
        if base is None or base.function is not func or base.given.shape != given.shape:
            raise ValueError(_OTHER_CALLS)
        return base


class _Slope(torch.autograd.Function):
    """Return a given output whose gradient is the product with given slopes."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, out: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


class _PoolSlope(torch.autograd.Function):
    """Return a given maximum, whose change is divided between two places.

    The larger of both maxima minus that of the baseline belongs to the place of the sample's
    maximum, and the rest to the place of the baseline's.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, out: Tensor, indices: Tensor, *base: Tensor) -> Tensor:
        ctx.save_for_backward(given, out, indices, *base)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, top, at, start, floor, before = ctx.saved_tensors
        most = torch.maximum(top, floor)
        moved = _unpool(grad * (most - floor), at, x) + _unpool(grad * (top - most), before, x)
        way = x - start
        found = torch.where(way.abs() > SMALL, moved / way, _unpool(grad, at, x))
        return found, None, None, None, None, None


def _unpool(values: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Add values to the places of their maxima; windows may overlap."""
    flat = torch.zeros_like(like).flatten(2)
    return flat.scatter_add(2, indices.flatten(2), values.flatten(2)).reshape(like.shape)
