"""Gradients along a path from a baseline: integrated gradients and expected gradients.

Both add up to the change of the score between baseline and input. The result has the part that is
missing from the sum as `gap`: for integrated gradients the error of the integral.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attribution.attribution_map import AttributionMap
from overt.attribution.model_inputs import (
    Inputs,
    Model,
    PlaceGeometry,
    VariedInput,
    precise,
    vary_input,
)
from overt.attribution.target_scores import Target


def integrated_gradients(
    model: Model,
    inputs: Inputs,
    target: Target,
    geometry: PlaceGeometry | None = None,
    *,
    baseline: float | Tensor = 0.0,
    steps: int = 50,
    embedding: nn.Module | None = None,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute integrated gradients from a baseline to the input (Sundararajan et al. 2017).

    "Axiomatic Attribution for Deep Networks", https://arxiv.org/abs/1703.01365, eq. 1. The integral
    is computed at the points of Gauss and Legendre. The steps run one after another and only their
    sum is kept: memory is that of one backward pass, whatever the number of steps.

    Args:
        model: The network.
        inputs: Pixels (b, c, y, x), features (b, n, d), tokens (b, n), or keyword arguments of the
            model, such as the output of a Hugging Face tokenizer.
        target: A class, of all samples or one per sample; a `Contrast` of two classes; or a
            function of the model's output that returns one score per row.
        geometry: How the images were resized and cropped, or the characters of each token.
        baseline: The input without information: a number, values that broadcast over the inputs, or
            for tokens an integer tensor of tokens, such as those of the mask token.
        steps: The number of points on the path.
        embedding: For tokens: the layer whose output is varied; found automatically if there is
            one.
        chunk: How many rows, of all steps and samples, are run at a time; None runs as many as
            `inputs` has. More are faster on a GPU.

    Returns:
        A signed map over pixels or words, summed over channels. Its `gap` is the change of the
        score minus the sum of the map: more steps make it smaller.

    Raises:
        ValueError: A number is out of range, or the target has no gradient to the inputs.

    Example:
        >>> square = lambda x: x.square().sum(dim=1)
        >>> found = integrated_gradients(square, torch.tensor([[1.0, 2.0]]), lambda out: out)
        >>> found.weights.flatten()
        tensor([1., 4.])
        >>> bool(found.gap.abs() < 1e-5)
        True
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        start = varied.fill(baseline)
        change = varied.score_in_chunks(varied.values, chunk)
        change = change - varied.score_in_chunks(start, chunk)
        way = varied.values - start
        points, shares = np.polynomial.legendre.leggauss(steps)  # for -1 to 1, of the sum 2
        points, shares = 0.5 + 0.5 * points, 0.5 * shares
        total = torch.zeros_like(way, dtype=precise(way))
        if chunk is None:  # whole batches need no index
            everything = torch.arange(len(way), device=way.device)
            for point, share in zip(points.tolist(), shares.tolist(), strict=True):
                found = varied.gradient(torch.add(start, way, alpha=point), everything)
                total.add_(found, alpha=share)
        else:
            places, weights = (torch.from_numpy(one).to(way.device) for one in (points, shares))
            for step, at in varied.chunks(steps, chunk):
                place = _over_values(places[step], varied).to(way)
                found = varied.gradient(torch.addcmul(start[at], place, way[at]), at)
                # a gradient may be expanded and so cannot be changed in place
                total.index_add_(0, at, found * _over_values(weights[step], varied).to(found))
        total.mul_(way)
        return varied.to_map(varied.channels(total).sum(dim=1), change=change)


def expected_gradients(
    model: Model,
    inputs: Inputs,
    target: Target,
    generator: torch.Generator,
    baselines: Tensor,
    geometry: PlaceGeometry | None = None,
    *,
    samples: int = 100,
    embedding: nn.Module | None = None,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute expected gradients: integrated gradients over random baselines (Erion et al. 2021).

    "Improving performance of deep learning models with axiomatic attribution priors and expected
    gradients", https://arxiv.org/abs/1906.10670; also known as GradientSHAP. Each draw takes a
    random baseline and a random point on the path from it.

    Args:
        model: The network.
        inputs: See `integrated_gradients`.
        target: See `integrated_gradients`.
        generator: The random generator of baselines and points.
        baselines: Inputs of other samples; their number may differ. For tokens, tokens.
        geometry: See `integrated_gradients`.
        samples: How many draws are averaged.
        embedding: See `integrated_gradients`.
        chunk: See `integrated_gradients`. The draws do not depend on it.

    Returns:
        A signed map over pixels or words, summed over channels. `error` is the standard error of
        each weight; `gap` is the score minus the mean score of all baselines, minus the sum of the
        map.

    Raises:
        ValueError: A number is out of range, or the target has no gradient to the inputs.

    Example:
        >>> square = lambda x: x.square().sum(dim=1)
        >>> given, drawn = torch.tensor([[1.0, 2.0]]), torch.Generator().manual_seed(0)
        >>> found = expected_gradients(square, given, lambda out: out, drawn, torch.zeros(3, 2))
        >>> bool(((found.weights - torch.tensor([1.0, 4.0])).abs() < 4 * found.error).all())
        True
    """
    if samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}")
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        starts = _baselines(varied, baselines)
        values, b = varied.values, len(varied.values)
        # The variance is a difference of sums.
        total = torch.zeros(b, len(varied.keys), dtype=torch.float64, device=values.device)
        squares = torch.zeros_like(total)
        device = generator.device
        which, place = [], []
        for _ in range(samples):
            which.append(torch.randint(len(starts), (b,), generator=generator, device=device))
            place.append(torch.rand(b, generator=generator, device=device))
        chosen, points = torch.stack(which).to(values.device), torch.stack(place).to(values.device)
        for draw, at in varied.chunks(samples, chunk):
            start = starts[chosen[draw, at]]
            way = values[at] - start
            share = _over_values(points[draw, at], varied).to(way)
            found = varied.gradient(start + share * way, at) * way
            weights = varied.channels(found).sum(dim=1).double()
            total.index_add_(0, at, weights)
            squares.index_add_(0, at, weights.square())
        mean = total / samples
        variance = (squares / samples - mean.square()).clamp_min(0)
        error = (variance / (samples - 1)).sqrt()[:, None, None, None].to(precise(values))
        change = varied.score_in_chunks(values, chunk) - _mean_score(varied, starts, chunk)
        return varied.to_map(mean.to(error), change=change, error=error)


def _over_values(numbers: Float[Tensor, " n"], varied: VariedInput) -> Tensor:
    """Reshape one number per row so that it broadcasts over its values."""
    return numbers.reshape(-1, *[1] * (varied.values.ndim - 1))


def _baselines(varied: VariedInput, given: Tensor) -> Float[Tensor, "m ..."]:
    """Return the baselines as values; tokens are embedded."""
    shape = varied.values.shape[1:]
    if varied.embed is not None and not given.is_floating_point():
        # the model embeds as many rows as there are samples at a time
        b = len(varied.values)
        parts = [varied.embed(given[at : at + 1]) for at in range(len(given))]
        return torch.cat([part[: min(1, b)] for part in parts])
    if given.ndim != len(shape) + 1 or given.shape[1:] != shape or not len(given):
        raise ValueError(
            f"baselines must have the shape (m, {', '.join(map(str, shape))}), got "
            f"{tuple(given.shape)}"
        )
    return given.detach().to(varied.values)


def _mean_score(
    varied: VariedInput, starts: Float[Tensor, "m ..."], chunk: int | None
) -> Float[Tensor, " b"]:
    """Compute the mean score of the baselines, for the target of each sample."""
    b = len(varied.values)
    total = torch.zeros(b, device=starts.device)
    for number, at in varied.chunks(len(starts), chunk):
        score = varied.score(starts[number], at)
        total = total.to(precise(score)).index_add_(0, at, score.to(precise(score)))
    return total / len(starts)
