"""Section 5: metrics of many maps, compared with scipy, torchmetrics, POT and quantus.

Ranks are compared with `scipy.stats.rankdata(axis=1)` and `spearmanrho(axis=1)`, because a loop of
`spearmanr` is over ten times as slow; the loop is measured too. Quantus removes pixels one by one.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overt import metrics
from overt.attention import AttentionMap, grid
from overt.metrics.ranks import average_ranks

from .clock import Times, device_clock, time_variants
from .report import Curve, Report, Setting, at_least, missing_row, speedup_row

SIDE, LEVELS = 14, 60  # cells per side; distinct weights, so that there are many ties
LOOP_ROWS = 100  # rows of a timed loop; its time is scaled to all rows


def attention_maps(values: np.ndarray, device: str) -> AttentionMap:
    """Convert weights of cells to an attention map."""
    return AttentionMap.from_cells(torch.from_numpy(values).to(device), grid(SIDE, SIDE))


def random_maps(count: int) -> list[np.ndarray]:
    """Generate two sets of maps with many ties."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, LEVELS, (count, SIDE * SIDE)).astype(float) for _ in range(2)]


def scale_times(times: Times, name: str, factor: float) -> Times:
    """Scale the times of a loop over some of the rows to all rows."""
    return Times({**times.seconds, name: [factor * elapsed for elapsed in times.seconds[name]]})


# --- ranks


def assert_agreement(ours: np.ndarray, theirs: np.ndarray, maps: list[AttentionMap]) -> None:
    """Assert that ranks are equal and correlations agree up to rounding."""
    from scipy import stats

    valid = torch.ones(ours.shape, dtype=torch.bool)
    ranks = average_ranks(torch.from_numpy(ours), valid).numpy()
    assert np.array_equal(ranks, stats.rankdata(ours, axis=1)), "ranks differ from scipy"
    rho = stats.spearmanrho(ours, theirs, axis=1).statistic
    assert np.abs(metrics.spearman(*maps).cpu().numpy() - rho).max() < 1e-6
    taus = [stats.kendalltau(a, b).statistic for a, b in zip(ours[:50], theirs[:50], strict=True)]
    assert np.abs(metrics.kendall(*maps)[:50].cpu().numpy() - taus).max() < 1e-6


def ranks(setting: Setting, report: Report) -> None:
    """Measure Spearman and Kendall of 2,000 maps with ties."""
    from scipy import stats

    count = setting.size(2000, 200)
    ours, theirs = random_maps(count)
    maps = [attention_maps(one, setting.device) for one in (ours, theirs)]
    assert_agreement(ours, theirs, maps)
    valid = torch.ones(ours.shape, dtype=torch.bool, device=setting.device)
    values = torch.from_numpy(ours).to(setting.device)
    pairs = list(zip(ours[:LOOP_ROWS], theirs[:LOOP_ROWS], strict=True))
    variants: dict[str, Any] = {
        "average_ranks": lambda: average_ranks(values, valid),
        "scipy rankdata(axis=1)": lambda: stats.rankdata(ours, axis=1),
        "metrics.spearman": lambda: metrics.spearman(*maps),
        "scipy spearmanrho(axis=1)": lambda: stats.spearmanrho(ours, theirs, axis=1),
        "scipy spearmanr in a loop": lambda: [stats.spearmanr(a, b) for a, b in pairs],
        "metrics.kendall": lambda: metrics.kendall(*maps),
        "scipy kendalltau in a loop": lambda: [stats.kendalltau(a, b) for a, b in pairs],
    }
    torchmetrics_variant = _torchmetrics(ours, theirs, maps)
    if torchmetrics_variant is not None:
        variants["torchmetrics"] = torchmetrics_variant
    times = time_variants(variants, setting.rounds, device_clock(setting.device))
    for name in variants:
        if name.endswith("loop"):
            times = scale_times(times, name, count / LOOP_ROWS)
    goal = at_least(1.0)
    report.add(
        speedup_row(
            f"ranks of {count} maps", times, "average_ranks", "scipy rankdata(axis=1)", goal
        ),
        speedup_row("Spearman", times, "metrics.spearman", "scipy spearmanrho(axis=1)", goal),
        speedup_row("Spearman", times, "metrics.spearman", "scipy spearmanr in a loop"),
    )
    if torchmetrics_variant is None:
        report.add(missing_row("Spearman", "torchmetrics is not installed"))
    else:
        report.add(speedup_row("Spearman", times, "metrics.spearman", "torchmetrics", goal))
    report.add(speedup_row("Kendall", times, "metrics.kendall", "scipy kendalltau in a loop", goal))


def _torchmetrics(ours: np.ndarray, theirs: np.ndarray, maps: list[AttentionMap]) -> Any:
    try:
        from torchmetrics.functional import spearman_corrcoef
    except ImportError:
        return None
    device = maps[0].values.device
    arrays = [torch.from_numpy(one.T.copy()).to(device) for one in (ours, theirs)]
    difference = (spearman_corrcoef(*arrays) - metrics.spearman(*maps)).abs().max()
    assert float(difference) < 1e-5, f"rank correlations differ from torchmetrics by {difference}"
    return lambda: spearman_corrcoef(*arrays)


# --- earth mover's distance


def emd(setting: Setting, report: Report) -> None:
    """Measure exact distances between maps of 14 x 14 cells."""
    try:
        import ot
    except ImportError:
        report.add(missing_row("EMD", "POT is not installed"))
        return
    count = setting.size(16, 3)
    rng = np.random.default_rng(0)
    arrays = [rng.random((count, SIDE * SIDE)) ** 4 for _ in range(2)]
    shares = [one / one.sum(axis=1, keepdims=True) for one in arrays]
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    places = np.stack([y, x], axis=-1) / SIDE
    cost = np.linalg.norm(places[:, None] - places[None], axis=-1)
    maps = [attention_maps(one, "cpu") for one in shares]

    def theirs() -> np.ndarray:
        return np.array([ot.emd2(a, b, cost) for a, b in zip(*shares, strict=True)])

    expected = theirs()
    difference = np.abs(metrics.emd(*maps).numpy() - expected).max()
    assert difference < 1e-6, f"distances differ from POT by {difference}"
    sinkhorn = [ot.sinkhorn2(a, b, cost, 1e-2) for a, b in zip(*shares, strict=True)]
    report.facts["sinkhorn relative error"] = float((np.abs(sinkhorn - expected) / expected).mean())
    times = time_variants(
        {"metrics.emd": lambda: metrics.emd(*maps), "POT emd2 in a loop": theirs}, setting.rounds
    )
    report.add(
        speedup_row(
            f"EMD of {count} pairs", times, "metrics.emd", "POT emd2 in a loop", at_least(1.0)
        )
    )


# --- deletion


def deletion(setting: Setting, report: Report) -> None:
    """Compare deletion curves with those of quantus."""
    count, side = setting.size(16, 2), setting.size(16, 6)
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

        return metrics.deletion_curve(decide, ours_map, torch.Generator(), shares).probability

    theirs = _quantus(net, images, weights, setting.device)
    name = f"deletion of {count} maps, {steps} pixels"
    if theirs is None:
        report.add(missing_row(name, "quantus is not installed"))
        return
    difference = np.abs(ours().T.cpu().numpy() - np.array(theirs())).max()
    assert difference < 1e-5, f"curves differ from quantus by {difference}"
    variants = {"deletion_curve": ours, "quantus PixelFlipping": theirs}
    times = time_variants(variants, min(5, setting.rounds), device_clock(setting.device))
    report.add(speedup_row(name, times, "deletion_curve", "quantus PixelFlipping", at_least(1.0)))


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
    inputs = {
        "x_batch": images.cpu().numpy(),
        "y_batch": answers,
        "a_batch": weights.reshape(images.shape).cpu().numpy(),
    }
    return lambda: metric(model=net, **inputs, softmax=True, channel_first=True, device=device)


# --- growth


def growth(setting: Setting) -> list[Curve]:
    """Measure Spearman for increasing numbers of maps."""
    from scipy import stats

    sizes = (20, 100) if setting.quick else (10, 100, 1000, 10_000)
    lines: dict[str, list[float]] = {}
    for count in sizes:
        ours, theirs = random_maps(count)
        maps = [attention_maps(one, setting.device) for one in (ours, theirs)]
        part = list(zip(ours[:LOOP_ROWS], theirs[:LOOP_ROWS], strict=True))
        variants: dict[str, Any] = {
            "metrics.spearman": lambda maps=maps: metrics.spearman(*maps),
            "scipy spearmanrho(axis=1)": lambda a=ours, b=theirs: stats.spearmanrho(a, b, axis=1),
            "scipy spearmanr in a loop": lambda part=part: [stats.spearmanr(*p) for p in part],
        }
        times = time_variants(variants, setting.size(5, 2), device_clock(setting.device), limit=6.0)
        times = scale_times(times, "scipy spearmanr in a loop", count / len(part))
        for name in variants:
            lines.setdefault(name, []).append(times.spread(name).median)
    title = f"Rank correlation of maps of {SIDE} x {SIDE} cells"
    return [Curve(title, "maps", "seconds", list(map(float, sizes)), lines)]


def section(setting: Setting, report: Report) -> None:
    """Measure ranks, distances and deletion. Distances are computed on a CPU only."""
    torch.set_num_threads(1)
    report.part("ranks", partial(ranks, setting, report))
    if not setting.gpu:
        report.part("EMD", partial(emd, setting, report))
    report.part("deletion", partial(deletion, setting, report))
    report.part("growth", lambda: report.curves.extend(growth(setting)))
