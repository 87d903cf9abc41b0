"""Section 5: measures of many maps, beside scipy, torchmetrics, POT and quantus.

`scipy.stats.rankdata(axis=1)` and `spearmanrho(axis=1)` are the peers of ranks, because a loop of
`spearmanr` is over ten times as slow; the loop is there too. Quantus flips pixels one by one.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overt import measure
from overt.attention import AttentionMap, grid
from overt.measure.ranks import average_ranks

from .clock import Times, race, timer
from .report import Curve, Report, Setting, absent, at_least, faster

SIDE, LEVELS = 14, 60  # cells a side, different weights: many ties
LOOPED = 100  # rows of a loop, whose time is then taken as often as it takes


def maps_of(values: np.ndarray, device: str) -> AttentionMap:
    """Weights of cells as a map."""
    return AttentionMap.from_cells(torch.from_numpy(values).to(device), grid(SIDE, SIDE))


def drawn(count: int) -> list[np.ndarray]:
    """Two sets of maps with many equal weights."""
    dice = np.random.default_rng(0)
    return [dice.integers(0, LEVELS, (count, SIDE * SIDE)).astype(float) for _ in range(2)]


def looped(times: Times, name: str, more: float) -> Times:
    """A loop over some of the rows, as if it had gone over all."""
    return Times({**times.seconds, name: [more * taken for taken in times.seconds[name]]})


# --- ranks


def agree(ours: np.ndarray, theirs: np.ndarray, maps: list[AttentionMap]) -> None:
    """To the bit for ranks, to rounding for correlations."""
    from scipy import stats

    seen = torch.ones(ours.shape, dtype=torch.bool)
    ranks = average_ranks(torch.from_numpy(ours), seen).numpy()
    assert np.array_equal(ranks, stats.rankdata(ours, axis=1)), "ranks are not those of scipy"
    rho = stats.spearmanrho(ours, theirs, axis=1).statistic
    assert np.abs(measure.spearman(*maps).cpu().numpy() - rho).max() < 1e-6
    taus = [stats.kendalltau(a, b).statistic for a, b in zip(ours[:50], theirs[:50], strict=True)]
    assert np.abs(measure.kendall(*maps)[:50].cpu().numpy() - taus).max() < 1e-6


def ranks(setting: Setting, report: Report) -> None:
    """Spearman and Kendall of 2,000 maps with ties."""
    from scipy import stats

    count = setting.some(2000, 200)
    ours, theirs = drawn(count)
    maps = [maps_of(one, setting.device) for one in (ours, theirs)]
    agree(ours, theirs, maps)
    seen = torch.ones(ours.shape, dtype=torch.bool, device=setting.device)
    values = torch.from_numpy(ours).to(setting.device)
    pairs = list(zip(ours[:LOOPED], theirs[:LOOPED], strict=True))
    ways: dict[str, Any] = {
        "average_ranks": lambda: average_ranks(values, seen),
        "scipy rankdata(axis=1)": lambda: stats.rankdata(ours, axis=1),
        "measure.spearman": lambda: measure.spearman(*maps),
        "scipy spearmanrho(axis=1)": lambda: stats.spearmanrho(ours, theirs, axis=1),
        "scipy spearmanr, a loop": lambda: [stats.spearmanr(a, b) for a, b in pairs],
        "measure.kendall": lambda: measure.kendall(*maps),
        "scipy kendalltau, a loop": lambda: [stats.kendalltau(a, b) for a, b in pairs],
    }
    other = _torchmetrics(ours, theirs, maps)
    if other is not None:
        ways["torchmetrics"] = other
    times = race(ways, setting.rounds, timer(setting.device))
    for name in ways:
        if name.endswith("loop"):
            times = looped(times, name, count / LOOPED)
    same = at_least(1.0)
    report.add(
        faster(f"ranks of {count} maps", times, "average_ranks", "scipy rankdata(axis=1)", same),
        faster("Spearman", times, "measure.spearman", "scipy spearmanrho(axis=1)", same),
        faster("Spearman", times, "measure.spearman", "scipy spearmanr, a loop"),
    )
    if other is None:
        report.add(absent("Spearman", "torchmetrics is not installed"))
    else:
        report.add(faster("Spearman", times, "measure.spearman", "torchmetrics", same))
    report.add(faster("Kendall", times, "measure.kendall", "scipy kendalltau, a loop", same))


def _torchmetrics(ours: np.ndarray, theirs: np.ndarray, maps: list[AttentionMap]) -> Any:
    try:
        from torchmetrics.functional import spearman_corrcoef
    except ImportError:
        return None
    device = maps[0].values.device
    given = [torch.from_numpy(one.T.copy()).to(device) for one in (ours, theirs)]
    apart = (spearman_corrcoef(*given) - measure.spearman(*maps)).abs().max()
    assert float(apart) < 1e-5, f"torchmetrics has other rank correlations, by {apart}"
    return lambda: spearman_corrcoef(*given)


# --- the earth mover


def transport(setting: Setting, report: Report) -> None:
    """Exact distances between maps of 14 x 14 cells."""
    try:
        import ot
    except ImportError:
        report.add(absent("EMD", "POT is not installed"))
        return
    count = setting.some(16, 3)
    dice = np.random.default_rng(0)
    given = [dice.random((count, SIDE * SIDE)) ** 4 for _ in range(2)]
    shares = [one / one.sum(axis=1, keepdims=True) for one in given]
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    places = np.stack([y, x], axis=-1) / SIDE
    cost = np.linalg.norm(places[:, None] - places[None], axis=-1)
    maps = [maps_of(one, "cpu") for one in shares]

    def theirs() -> np.ndarray:
        return np.array([ot.emd2(a, b, cost) for a, b in zip(*shares, strict=True)])

    exactly = theirs()
    apart = np.abs(measure.emd(*maps).numpy() - exactly).max()
    assert apart < 1e-6, f"the distance is not that of POT, by {apart}"
    smooth = [ot.sinkhorn2(a, b, cost, 1e-2) for a, b in zip(*shares, strict=True)]
    report.facts["sinkhorn off by"] = float((np.abs(smooth - exactly) / exactly).mean())
    times = race(
        {"measure.emd": lambda: measure.emd(*maps), "POT emd2, a loop": theirs}, setting.rounds
    )
    report.add(
        faster(f"EMD of {count} pairs", times, "measure.emd", "POT emd2, a loop", at_least(1.0))
    )


# --- flipping pixels


def flipping(setting: Setting, report: Report) -> None:
    """The probability of the answer as pixels go, beside quantus; the same curve."""
    count, side = setting.some(16, 2), setting.some(16, 6)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * side * side, 10),
    ).eval().to(setting.device)  # fmt: skip
    images = torch.rand(count, 1, side, side, device=setting.device)
    weights = torch.rand(count, side * side, device=setting.device) + 0.01
    steps = side * side
    shares = [step / steps for step in range(1, steps + 1)]
    ours_map = AttentionMap.from_cells(weights, grid(side, side))

    def ours() -> Tensor:
        def decide(keep: Tensor) -> Tensor:
            return net(images * keep.reshape(images.shape))

        return measure.deletion_curve(decide, ours_map, torch.Generator(), shares).probability

    theirs = _quantus(net, images, weights, setting.device)
    name = f"deletion of {count} maps, {steps} pixels"
    if theirs is None:
        report.add(absent(name, "quantus is not installed"))
        return
    apart = np.abs(ours().T.cpu().numpy() - np.array(theirs())).max()
    assert apart < 1e-5, f"quantus has another curve, by {apart}"
    ways = {"deletion_curve": ours, "quantus PixelFlipping": theirs}
    times = race(ways, min(5, setting.rounds), timer(setting.device))
    report.add(faster(name, times, "deletion_curve", "quantus PixelFlipping", at_least(1.0)))


def _quantus(net: nn.Module, images: Tensor, weights: Tensor, device: str) -> Any:
    try:
        import quantus
    except ImportError:
        return None
    metric = quantus.PixelFlipping(
        features_in_step=1, perturb_baseline=0.0, abs=False, normalise=False,
        return_auc_per_sample=False, disable_warnings=True, display_progressbar=False,
    )  # fmt: skip
    with torch.no_grad():
        answers = net(images).argmax(dim=-1).cpu().numpy()
    given = {
        "x_batch": images.cpu().numpy(),
        "y_batch": answers,
        "a_batch": weights.reshape(images.shape).cpu().numpy(),
    }
    return lambda: metric(model=net, **given, softmax=True, channel_first=True, device=device)


# --- growth


def growth(setting: Setting) -> list[Curve]:
    """Spearman of more and more maps."""
    from scipy import stats

    sizes = (20, 100) if setting.quick else (10, 100, 1000, 10_000)
    lines: dict[str, list[float]] = {}
    for count in sizes:
        ours, theirs = drawn(count)
        maps = [maps_of(one, setting.device) for one in (ours, theirs)]
        part = list(zip(ours[:LOOPED], theirs[:LOOPED], strict=True))
        ways: dict[str, Any] = {
            "measure.spearman": lambda maps=maps: measure.spearman(*maps),
            "scipy spearmanrho(axis=1)": lambda a=ours, b=theirs: stats.spearmanrho(a, b, axis=1),
            "scipy spearmanr, a loop": lambda part=part: [stats.spearmanr(*p) for p in part],
        }
        times = race(ways, setting.some(5, 2), timer(setting.device), limit=6.0)
        times = looped(times, "scipy spearmanr, a loop", count / len(part))
        for name in ways:
            lines.setdefault(name, []).append(times.of(name).median)
    title = f"Rank correlation of maps of {SIDE} x {SIDE} cells"
    return [Curve(title, "maps", "seconds", list(map(float, sizes)), lines)]


def section(setting: Setting, report: Report) -> None:
    """Ranks, distances, flips. Distances are worked out on a CPU and measured there."""
    torch.set_num_threads(1)
    report.part("ranks", partial(ranks, setting, report))
    if not setting.gpu:
        report.part("EMD", partial(transport, setting, report))
    report.part("deletion", partial(flipping, setting, report))
    report.part("growth", lambda: report.curves.extend(growth(setting)))
