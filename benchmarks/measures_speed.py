"""How fast rank correlations of many maps are, beside what scipy does for all rows at once.

    python benchmarks/speed.py --only measures

`scipy.stats.rankdata(axis=1)` and `scipy.stats.spearmanrho(axis=1)` are the peers. A loop of
`scipy.stats.spearmanr` is what people write, and over ten times as slow.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats

from overt import measure
from overt.attention import AttentionMap, grid
from overt.measure.ranks import average_ranks

COUNT, SIDE, LEVELS = 2000, 14, 60  # maps, cells a side, different weights: many ties
LOOPED = 200  # rows of a loop, whose time is then taken tenfold
GOAL = 1.0  # as fast as scipy for all rows at once, which is over ten times as fast as a loop

Race = Callable[[Mapping[str, Callable[[], object]], int], dict[str, dict[str, float]]]


def section(race: Race, rounds: int) -> dict[str, Any]:
    """Ours and scipy's in turns, after both have given the same numbers."""
    torch.set_num_threads(1)
    dice = np.random.default_rng(0)
    ours, theirs = (dice.integers(0, LEVELS, (COUNT, SIDE * SIDE)).astype(float) for _ in range(2))
    maps = [
        AttentionMap.from_cells(torch.from_numpy(one), grid(SIDE, SIDE)) for one in (ours, theirs)
    ]
    seen = torch.ones(ours.shape, dtype=torch.bool)
    _agree(ours, theirs, maps, seen)
    pairs = list(zip(ours[:LOOPED], theirs[:LOOPED], strict=True))
    variants: dict[str, Callable[[], object]] = {
        "ranks, ours": lambda: average_ranks(torch.from_numpy(ours), seen),
        "ranks, scipy": lambda: stats.rankdata(ours, axis=1),
        "spearman, ours": lambda: measure.spearman(*maps),
        "spearman, loop": lambda: [stats.spearmanr(a, b) for a, b in pairs],
        "spearman, scipy": lambda: stats.spearmanrho(ours, theirs, axis=1),
        "kendall, ours": lambda: measure.kendall(*maps),
        "kendall, loop": lambda: [stats.kendalltau(a, b) for a, b in pairs],
    }
    times = race(variants, rounds)
    spent = {name: each["cpu_s"] for name, each in times.items()}
    more = COUNT / LOOPED
    return {
        "times": times,
        "times_faster": {
            "ranks, scipy": spent["ranks, scipy"] / spent["ranks, ours"],
            "spearman, scipy": spent["spearman, scipy"] / spent["spearman, ours"],
            "spearman, loop": more * spent["spearman, loop"] / spent["spearman, ours"],
            "kendall, loop": more * spent["kendall, loop"] / spent["kendall, ours"],
        },
        "goal": GOAL,
    }


def _agree(ours: Any, theirs: Any, maps: list[AttentionMap], seen: torch.Tensor) -> None:
    """To the bit for ranks, to rounding for correlations."""
    ranks = average_ranks(torch.from_numpy(ours), seen).numpy()
    assert np.array_equal(ranks, stats.rankdata(ours, axis=1)), "ranks are not those of scipy"
    rho = stats.spearmanrho(ours, theirs, axis=1).statistic
    assert np.abs(measure.spearman(*maps).numpy() - rho).max() < 1e-6
    taus = [stats.kendalltau(a, b).statistic for a, b in zip(ours[:50], theirs[:50], strict=True)]
    assert np.abs(measure.kendall(*maps)[:50].numpy() - taus).max() < 1e-6
