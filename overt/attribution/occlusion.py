"""Occlusion: how much the score falls when a window of the input is replaced."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from overt.attribution.attribution_map import AttributionMap
from overt.attribution.model_inputs import (
    Inputs,
    Model,
    PlaceGeometry,
    precise,
    vary_input,
)
from overt.attribution.target_scores import Target


def occlusion(
    model: Model,
    inputs: Inputs,
    target: Target,
    geometry: PlaceGeometry | None = None,
    *,
    window: int = 1,
    stride: int | None = None,
    baseline: float | Tensor = 0.0,
    embedding: nn.Module | None = None,
    chunk: int = 32,
) -> AttributionMap:
    """Compute how far the score falls, as the mean over the windows that cover each input.

    Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014,
    https://arxiv.org/abs/1311.2901, section 4.2. Only outputs are needed. A window at the
    border is cut.

    Args:
        model: The network, or for pixels any function of them.
        inputs: Pixels (b, c, y, x), features (b, n, d), tokens (b, n), or keyword arguments of the
            model.
        target: A class, a `Contrast`, or a function of the output that returns one score per row.
        geometry: How the images were resized and cropped, or the characters of each token.
        window: The side of the window in pixels, or its number of words.
        stride: How far it moves; by default half of its side, at least 1.
        baseline: What replaces the window; see `integrated_gradients`.
        embedding: For tokens: the layer whose output is varied.
        chunk: How many changed inputs are run at a time.

    Returns:
        A signed map over pixels or words.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> total = lambda x: x.sum(dim=1)
        >>> occlusion(total, torch.tensor([[1.0, 5.0]]), lambda out: out).weights.flatten()
        tensor([1., 5.])
    """
    step = max(1, window // 2) if stride is None else stride
    if window < 1 or not 1 <= step <= window:
        raise ValueError(
            f"window must be at least 1 and stride from 1 to window, got {window} and {step}"
        )
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        start = varied.fill(baseline)
        whole = varied.score_in_chunks(varied.values, chunk)
        lines = [_windows(side, window, step) for side in varied.keys.spans[0].shape]
        lines = [line.to(whole.device) for line in lines]
        total = torch.zeros(len(whole), len(varied.keys), dtype=precise(whole), device=whole.device)
        for number, at in varied.chunks(math.prod(map(len, lines)), chunk):
            covered = _cover(lines, number)
            changed = torch.where(varied.spread(covered), start[at], varied.values[at])
            fall = whole[at] - varied.score(changed, at).to(whole)
            total.index_add_(0, at, fall[:, None] * covered)
        times = lines[0].sum(dim=0)
        for line in lines[1:]:
            times = (times[:, None] * line.sum(dim=0)).flatten()
        return varied.to_map(total / times)


def _windows(side: int, window: int, step: int) -> Bool[Tensor, "m n"]:
    """Return which of the positions along an axis each window covers."""
    count = max(0, -(-(side - window) // step)) + 1
    first = torch.arange(count)[:, None] * step
    place = torch.arange(side)
    return (place >= first) & (place < first + window)


def _cover(lines: Sequence[Bool[Tensor, "_ _"]], number: Int[Tensor, " n"]) -> Bool[Tensor, "n k"]:
    """Return which positions some windows cover; all windows of an image would need gigabytes."""
    if len(lines) == 1:
        return lines[0][number]
    rows, columns = lines
    high, wide = rows[number // len(columns)], columns[number % len(columns)]
    return (high[:, :, None] & wide[:, None]).flatten(1)
