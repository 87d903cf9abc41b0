"""How far attention would have to be carried to lie where the truth does."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.measured import Measured, defined, measured, rows, shares
from overt.supervise.transport import check_places


@measured("EMD", "lengths", higher_is_better=False, low=0.0)
def emd(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """The earth mover's distance, exact, with straight-line distances between the keys.

    The unit is the length of the text, or the longer side of the picture: neighbours are 1 / n
    apart. Words have a closed form; a picture is one linear programme a sample, on the cells where
    the two maps differ: solved by POT's network simplex where that is installed, else by scipy,
    which takes tens of times as long. `overt.supervise.emd` is never more, and has a gradient; this
    has none on a picture. Not defined where either map is empty or has a weight below 0. Two grids
    of other sides are refused, though their cells be as many.
    """
    ours, theirs, seen = rows(attention, truth)
    ours, theirs = shares(ours, attention.kind), shares(theirs, truth.kind)
    there = ~(ours.isnan().any(dim=-1) | theirs.isnan().any(dim=-1))
    apart = torch.where(there[:, None], ours - theirs, 0)
    shape = _shape(attention)
    check_places(attention, truth)
    found = _in_a_line(apart, seen) if len(shape) == 1 else _on_a_grid(apart, shape)
    return defined(found.to(ours), there)


def _in_a_line(apart: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """The area between the cumulated maps, over the words there are."""
    steps = seen / seen.sum(dim=-1, keepdim=True).clamp_min(1)
    return (apart.cumsum(dim=-1).abs() * steps).sum(dim=-1)


def _on_a_grid(apart: Float[Tensor, "b k"], shape: tuple[int, ...]) -> Float[Tensor, " b"]:
    y, x = np.divmod(np.arange(shape[0] * shape[1]), shape[1])
    places = np.stack([y, x], axis=-1) / max(shape)
    found = [_least(row, places) for row in apart.detach().double().cpu().numpy()]
    return torch.tensor(found, dtype=torch.float64)


def _least(apart: np.ndarray, places: np.ndarray) -> float:
    """The least work that carries what is too much to where it is too little.

    What both maps have at a cell stays there: a detour is never shorter.
    """
    given, wanted = np.flatnonzero(apart > 0), np.flatnonzero(apart < 0)
    if not len(given) or not len(wanted):
        return 0.0
    cost = np.linalg.norm(places[given][:, None] - places[wanted][None], axis=-1)
    return _solver()(apart[given], -apart[wanted], cost)


@functools.cache
def _solver() -> Callable[[np.ndarray, np.ndarray, np.ndarray], float]:
    """The quickest exact one that is here."""
    try:
        import ot  # noqa: F401
    except ImportError:
        return by_prices
    return by_simplex


def by_simplex(given: np.ndarray, wanted: np.ndarray, cost: np.ndarray) -> float:
    """The least work by POT's network simplex.

    Both sides must add up to the same, to the last digit: the second is scaled to the first.
    """
    import ot

    wanted = wanted * (given.sum() / wanted.sum())
    work, told = ot.emd2(given, wanted, cost, numItermax=1_000_000, log=True)
    if told["warning"]:
        raise ValueError(f"the distance between two maps was not found: {told['warning']}")
    return float(work)


def by_prices(given: np.ndarray, wanted: np.ndarray, cost: np.ndarray) -> float:
    """The least work by scipy, solved for prices in the place of amounts (Kantorovich's dual).

    The most that the carried mass can gain in price, where no two cells differ by more than their
    distance. Prices of zero always fit; tiny amounts that do not add up, to the last digit, would
    have no solution.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    g, w = cost.shape
    row = np.arange(g * w)
    columns = np.concatenate([row // w, g + row % w])
    gains = coo_array((np.repeat([1.0, -1.0], g * w), (np.tile(row, 2), columns)))
    amounts = np.concatenate([given, -wanted])
    free = [(0, 0)] + [(None, None)] * (g + w - 1)  # only differences of prices count
    solved = linprog(-amounts, A_ub=gains.tocsr(), b_ub=cost.flatten(), bounds=free, method="highs")
    if not solved.success:
        raise ValueError(f"the distance between two maps was not found: {solved.message}")
    return -float(solved.fun)


def _shape(attention: AttentionMap) -> tuple[int, ...]:
    spans = attention.keys.spans
    if len(spans) == 1 and len(spans[0]) == len(attention.keys) and len(spans[0].shape) <= 2:
        return spans[0].shape
    raise ValueError(
        f"distances need keys that are all words or all cells of one picture, not "
        f"{[span.name for span in spans]}; take .between(query, key) first"
    )
