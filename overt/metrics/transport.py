"""Earth mover's distance between attention and target."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.errors import require_package
from overt.losses.transport import check_same_grid
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    paired_rows,
    to_distribution,
)


@declare_metric("EMD", "lengths", higher_is_better=False, low=0.0)
def emd(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute the exact earth mover's distance between two maps, in side lengths of the input.

    Distances are Euclidean. The unit is the length of the text or the longer side of the picture,
    so neighbours are 1 / n apart. For words there is a closed form. For a picture it is one linear
    program per sample, over the cells where the two maps differ: solved by POT's network simplex if
    that is installed, else by SciPy, which takes tens of times as long. `overt.losses.emd` is a
    lower bound with a gradient; this function has no gradient on pictures. Not defined where either
    map is empty or has a negative weight.

    Args:
        attention: A map with one row per sample, over the words of a text or the cells of a
            picture.
        truth: The map to compare with, over the same keys.

    Returns:
        One distance per sample.

    Raises:
        ValueError: The two grids have different sides, even if they have as many cells, or the keys
            are of several spans.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0]]), words(4))
        >>> truth = AttentionMap.from_cells(torch.tensor([[0, 0, 0, 1]]), words(4))
        >>> emd(attention, truth)  # three words apart, of a text of four
        tensor([0.7500])
    """
    ours, theirs, seen = paired_rows(attention, truth)
    ours, theirs = to_distribution(ours, attention.kind), to_distribution(theirs, truth.kind)
    there = ~(ours.isnan().any(dim=-1) | theirs.isnan().any(dim=-1))
    apart = torch.where(there[:, None], ours - theirs, 0)
    shape = _key_shape(attention)
    check_same_grid(attention, truth)
    found = _emd_1d(apart, seen) if len(shape) == 1 else _emd_2d(apart, shape)
    return mask_undefined(found.to(ours), there)


def _emd_1d(apart: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Compute the area between the cumulative maps, over the visible words."""
    steps = seen / seen.sum(dim=-1, keepdim=True).clamp_min(1)
    return (apart.cumsum(dim=-1).abs() * steps).sum(dim=-1)


def _emd_2d(apart: Float[Tensor, "b k"], shape: tuple[int, ...]) -> Float[Tensor, " b"]:
    y, x = np.divmod(np.arange(shape[0] * shape[1]), shape[1])
    places = np.stack([y, x], axis=-1) / max(shape)  # cells are square: one unit for both axes
    found = [_min_transport_cost(row, places) for row in apart.detach().double().cpu().numpy()]
    return torch.tensor(found, dtype=torch.float64)


def _min_transport_cost(apart: np.ndarray, places: np.ndarray) -> float:
    """Compute the least work that moves the surplus to where weight is missing.

    Weight that both maps have at a cell stays there: moving it is never cheaper.
    """
    given, wanted = np.flatnonzero(apart > 0), np.flatnonzero(apart < 0)
    if not len(given) or not len(wanted):
        return 0.0
    cost = np.linalg.norm(places[given][:, None] - places[wanted][None], axis=-1)
    return _solver()(apart[given], -apart[wanted], cost)


@functools.cache
def _solver() -> Callable[[np.ndarray, np.ndarray, np.ndarray], float]:
    """Return the fastest exact solver that is installed."""
    try:
        import ot  # noqa: F401
    except ImportError:
        return solve_dual_lp
    return solve_network_simplex


def solve_network_simplex(given: np.ndarray, wanted: np.ndarray, cost: np.ndarray) -> float:
    """Compute the least work with POT's network simplex.

    Both sides must have exactly the same sum, so the second is scaled to the first.
    """
    import ot

    wanted = wanted * (given.sum() / wanted.sum())
    work, log = ot.emd2(given, wanted, cost, numItermax=1_000_000, log=True)
    if log["warning"]:
        raise ValueError(f"earth mover's distance failed: {log['warning']}")
    return float(work)


def solve_dual_lp(given: np.ndarray, wanted: np.ndarray, cost: np.ndarray) -> float:
    """Compute the least work with SciPy, from the Kantorovich dual.

    Maximizes the gain in potential of the moved mass, where the potentials of two cells differ by
    at most their distance. Zero potentials are always feasible, while the primal would be
    infeasible for amounts that do not add up exactly.
    """
    require_package("scipy")
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    g, w = cost.shape
    row = np.arange(g * w)
    columns = np.concatenate([row // w, g + row % w])
    gains = coo_array((np.repeat([1.0, -1.0], g * w), (np.tile(row, 2), columns)))
    amounts = np.concatenate([given, -wanted])
    free = [(0, 0)] + [(None, None)] * (g + w - 1)  # only differences of potentials count
    solved = linprog(-amounts, A_ub=gains.tocsr(), b_ub=cost.flatten(), bounds=free, method="highs")
    if not solved.success:
        raise ValueError(f"earth mover's distance failed: {solved.message}")
    return -float(solved.fun)


def _key_shape(attention: AttentionMap) -> tuple[int, ...]:
    spans = attention.keys.spans
    if len(spans) == 1 and len(spans[0]) == len(attention.keys) and len(spans[0].shape) <= 2:
        return spans[0].shape
    raise ValueError(
        f"expected keys that are the words of one text or the cells of one picture, got "
        f"{[span.name for span in spans]}: take .between(query, key) first"
    )
