"""Additive models of the score: KernelSHAP and LIME.

Parts of the input are present or replaced by a baseline, at random, and a linear model of the parts
is fitted to the score. Parts are words, squares of pixels, or given segments. Only outputs of the
model are needed.
"""

import math
from collections.abc import Iterator
from itertools import combinations

import torch
from jaxtyping import Float, Int
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

Segments = Int[Tensor, "..."]  # part of each pixel (b, y, x) or word (b, n), from 0


def kernel_shap(
    model: Model,
    inputs: Inputs,
    target: Target,
    generator: torch.Generator,
    geometry: PlaceGeometry | None = None,
    *,
    samples: int = 512,
    cells: int = 7,
    segments: Segments | None = None,
    baseline: float | Tensor = 0.0,
    embedding: nn.Module | None = None,
    chunk: int = 32,
) -> AttributionMap:
    """Compute Shapley values by weighted least squares: KernelSHAP (Lundberg and Lee 2017).

    "A Unified Approach to Interpreting Model Predictions", https://arxiv.org/abs/1705.07874,
    theorem 2. With at least as many samples as sets of parts, all sets are used and the values are
    exact. Else sets are drawn with the Shapley kernel, each with its complement. The values add up
    to the change of the score by construction.

    Args:
        model: The network, or for pixels any function of them.
        inputs: Pixels (b, c, y, x), features (b, n, d), tokens (b, n), or keyword arguments of the
            model.
        target: A class, a `Contrast`, or a function of the output that returns one score per row.
        generator: The random generator of the sets, which all inputs with as many parts share.
        geometry: How the images were resized and cropped, or the characters of each token.
        samples: How many sets of parts are run.
        cells: For pixels without `segments`: the sides of the grid of parts.
        segments: The part of each pixel or word, such as superpixels of another tool. Padding is no
            part.
        baseline: What replaces an absent part; see `integrated_gradients`.
        embedding: For tokens: the layer whose output is varied.
        chunk: How many changed inputs are run at a time.

    Returns:
        A signed map over pixels or words. The value of a part is divided evenly among its pixels.

    Raises:
        ValueError: A number is out of range, too few sets determine the values, or a score is not
            finite.

    Example:
        >>> product = lambda x: x.prod(dim=1)
        >>> given, drawn = torch.tensor([[2.0, 3.0]]), torch.Generator()
        >>> kernel_shap(product, given, lambda out: out, drawn).weights.flatten()
        tensor([3., 3.])
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        start = varied.fill(baseline)
        parts = _parts(varied, segments, cells)
        change = varied.score_in_chunks(varied.values, chunk)
        empty = varied.score_in_chunks(start, chunk)
        change = change - empty
        found = change.new_zeros(len(parts), max(1, int(parts.max()) + 1), dtype=torch.float64)
        for count, rows in _samples_by_count(parts, generator):
            if count == 1:
                found[rows, 0] = change[rows].double()
                continue
            sets, weights = shapley_sets(count, samples, generator)
            scores = _scores(varied, start, parts, sets, chunk, rows)
            scores = scores - empty[rows].double()[:, None]
            found[rows, :count] = _fit_with_sum(sets, weights, scores, change[rows].double())
        return varied.to_map(_divide(found, parts).to(change), change=change)


def lime(
    model: Model,
    inputs: Inputs,
    target: Target,
    generator: torch.Generator,
    geometry: PlaceGeometry | None = None,
    *,
    samples: int = 512,
    width: float = 0.25,
    ridge: float = 1.0,
    cells: int = 7,
    segments: Segments | None = None,
    baseline: float | Tensor = 0.0,
    embedding: nn.Module | None = None,
    chunk: int = 32,
) -> AttributionMap:
    """Compute the weights of a local linear model of the score: LIME (Ribeiro et al. 2016).

    "Why Should I Trust You? Explaining the Predictions of Any Classifier",
    https://arxiv.org/abs/1602.04938, eq. 2. Each part is present with probability one half. Sets
    are weighted by exp(-d² / width²), with the cosine distance d to the whole input, and a ridge
    regression with intercept is fitted to all parts; the paper selects some of them.

    Args:
        model: The network, or for pixels any function of them.
        inputs: See `kernel_shap`.
        target: See `kernel_shap`.
        generator: See `kernel_shap`.
        geometry: See `kernel_shap`.
        samples: See `kernel_shap`.
        width: The width of the kernel.
        ridge: The penalty on squared weights.
        cells: See `kernel_shap`.
        segments: See `kernel_shap`.
        baseline: See `kernel_shap`.
        embedding: See `kernel_shap`.
        chunk: See `kernel_shap`.

    Returns:
        A signed map over pixels or words; each has the weight of its part. `fit` is the weighted
        R² of the linear model on its own sets: far below 1, the weights describe the model badly.

    Raises:
        ValueError: A number is out of range, or a score is not finite.

    Example:
        >>> total = lambda x: x.sum(dim=1)
        >>> given, drawn = torch.tensor([[2.0, 3.0]]), torch.Generator().manual_seed(0)
        >>> found = lime(total, given, lambda out: out, drawn, ridge=0.0)
        >>> found.weights.flatten(), bool(found.fit > 0.999)
        (tensor([2., 3.]), True)
    """
    if samples < 2 or width <= 0 or ridge < 0:
        raise ValueError(
            "samples must be at least 2, width above 0 and ridge at least 0, got "
            f"{samples}, {width} and {ridge}"
        )
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        start = varied.fill(baseline)
        parts = _parts(varied, segments, cells)
        values, device = varied.values, generator.device
        found = torch.zeros(
            len(parts), max(1, int(parts.max()) + 1), dtype=torch.float64, device=values.device
        )
        fit = found.new_ones(len(parts))
        for count, rows in _samples_by_count(parts, generator):
            drawn = torch.rand(samples, count, generator=generator, device=device) < 0.5
            drawn[0] = True  # the whole input is one of the samples
            sets = drawn.double().to(values.device)
            scores = _scores(varied, start, parts, sets, chunk, rows)
            # The cosine of a set and the whole is the root of its share of the parts.
            distance = 1 - sets.mean(dim=1).sqrt()
            weights = (-distance.square() / width**2).exp()
            found[rows, :count], fit[rows] = _fit_ridge(sets, weights, scores, ridge)
        kept = precise(values)
        return varied.to_map(found.gather(1, parts.clamp_min(0)).to(kept), fit=fit.to(kept))


def shapley_sets(
    count: int, samples: int, generator: torch.Generator
) -> tuple[Float[Tensor, "m p"], Float[Tensor, " m"]]:
    """Return sets of parts and their weights: all sets, or pairs drawn with the Shapley kernel.

    Args:
        count: The number of parts.
        samples: How many sets there may be.
        generator: The random generator.

    Returns:
        Which parts each set has, and the weight of each set in the fit.

    Raises:
        ValueError: There are too few samples.

    Example:
        >>> sets, weights = shapley_sets(2, 10, torch.Generator())
        >>> sets.tolist(), weights.tolist()
        ([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5])
    """
    sizes = range(1, count)
    if count < 30 and 2**count - 2 <= samples:
        sets = torch.zeros(2**count - 2, count, dtype=torch.float64)
        weights: list[float] = []
        for size in sizes:
            for chosen in combinations(range(count), size):
                sets[len(weights), list(chosen)] = 1
                weights.append((count - 1) / (math.comb(count, size) * size * (count - size)))
        return sets, torch.tensor(weights, dtype=torch.float64)
    if samples < 2 * count:
        raise ValueError(
            f"{samples} samples cannot determine {count} values: use at least {2 * count}, or "
            "fewer parts"
        )
    # The Shapley kernel of a size, times the number of sets of that size.
    kernel = torch.tensor([1 / (size * (count - size)) for size in sizes], device=generator.device)
    half = samples // 2
    chosen_sizes = 1 + torch.multinomial(kernel, half, replacement=True, generator=generator)
    drawn = torch.rand(half, count, generator=generator, device=generator.device)
    first = (drawn.argsort(dim=1).argsort(dim=1) < chosen_sizes[:, None]).double().cpu()
    both = torch.stack([first, 1 - first], dim=1).flatten(0, 1)  # each with its complement
    return both, torch.ones(len(both), dtype=torch.float64)


def _parts(varied: VariedInput, segments: Tensor | None, cells: int) -> Int[Tensor, "b k"]:
    """Return the part of each position, numbered from 0 without gaps; -1 for padding."""
    b, shape, device = len(varied.values), varied.keys.spans[0].shape, varied.values.device
    if segments is not None:
        if segments.is_floating_point() or tuple(segments.shape) != (b, *shape):
            raise ValueError(
                f"segments must be integers of the shape {(b, *shape)}, got {segments.dtype} "
                f"{tuple(segments.shape)}"
            )
        if int(segments.min()) < 0:
            raise ValueError(f"segments must be 0 or more, got {int(segments.min())}")
        parts = segments.flatten(1).long().to(device)
    elif len(shape) == 1:
        parts = torch.arange(shape[0], device=device).expand(b, -1)
    else:
        if cells < 1:
            raise ValueError(f"cells must be at least 1, got {cells}")
        rows, columns = (
            torch.arange(side, device=device) * min(cells, side) // side for side in shape
        )
        wide = int(columns.max()) + 1
        return (rows[:, None] * wide + columns).flatten().expand(b, -1)
    there = torch.ones_like(parts).bool() if varied.present is None else varied.present.to(device)
    found = torch.full_like(parts, -1)
    for row, own in enumerate(there):
        found[row, own] = parts[row, own].unique(return_inverse=True)[1]
    return found


def _samples_by_count(
    parts: Int[Tensor, "b k"], generator: torch.Generator
) -> Iterator[tuple[int, Int[Tensor, " s"]]]:
    """Yield each number of parts with its samples, and let all draw from the same state.

    So a sample has the sets of its own number of parts, whatever the other samples are.
    """
    counts, state = parts.amax(dim=1) + 1, generator.get_state()
    for count in counts.unique().tolist():
        generator.set_state(state)
        if count:  # else a sample of nothing but padding
            yield count, (counts == count).nonzero()[:, 0]


def _scores(
    varied: VariedInput,
    start: Float[Tensor, "b ..."],
    parts: Int[Tensor, "b k"],
    sets: Float[Tensor, "m p"],
    chunk: int,
    rows: Int[Tensor, " s"],
) -> Float[Tensor, "s m"]:
    """Compute the score of some samples with only the parts of each set."""
    shown = sets.bool().to(varied.values.device)
    scores = shown.new_zeros(len(varied.values), len(sets), dtype=torch.float64)
    for number, at in varied.chunks(len(sets), chunk, rows):
        there = shown[number].gather(1, parts[at].clamp_min(0)) | (parts[at] < 0)
        changed = torch.where(varied.spread(there), varied.values[at], start[at])
        scores[at, number] = varied.score(changed, at).double()
    if not bool(scores.isfinite().all()):
        raise ValueError(
            "a score is not finite: check the inputs, the baseline and the target for NaN and inf"
        )
    return scores[rows]


def _fit_with_sum(
    sets: Float[Tensor, "m p"],
    weights: Float[Tensor, " m"],
    scores: Float[Tensor, "b m"],
    total: Float[Tensor, " b"],
) -> Float[Tensor, "b p"]:
    """Fit values to the scores by weighted least squares, so that they add up to `total`."""
    device, root = scores.device, weights.sqrt()[:, None]
    scores, total = scores.cpu(), total.cpu()
    # The last value is the total minus the others.
    last = sets[:, -1:]
    wanted = scores.T - last * total
    others = torch.linalg.lstsq(root * (sets[:, :-1] - last), root * wanted, driver="gelsd")
    values = others.solution.T
    return torch.cat([values, total[:, None] - values.sum(dim=1, keepdim=True)], 1).to(device)


def _fit_ridge(
    sets: Float[Tensor, "m p"],
    weights: Float[Tensor, " m"],
    scores: Float[Tensor, "b m"],
    ridge: float,
) -> tuple[Float[Tensor, "b p"], Float[Tensor, " b"]]:
    """Fit a weighted ridge regression with intercept; return its weights and its R²."""
    share = weights / weights.sum()
    centred = sets - share @ sets
    wanted = scores - (scores @ share)[:, None]
    weighted = centred * weights[:, None]
    gram = centred.T @ weighted + ridge * torch.eye(sets.shape[1]).to(sets)
    # A pseudo-inverse: without a penalty, parts that always agree have no unique weights.
    found = (torch.linalg.pinv(gram, hermitian=True) @ weighted.T @ wanted.T).T
    rest = (wanted - found @ centred.T).square() @ weights
    spread = wanted.square() @ weights
    return found, torch.where(spread > 0, 1 - rest / spread, 1.0)


def _divide(values: Float[Tensor, "b p"], parts: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """Divide the value of each part evenly among its positions."""
    there, parts = (parts >= 0).to(values), parts.clamp_min(0)
    sizes = torch.zeros_like(values).scatter_add_(1, parts, there)
    return (values / sizes.clamp_min(1)).gather(1, parts)
