"""Overhead of `AttentionMonitor` in training: a monitored step compared with a plain one.

Forward and backward; only the forward pass is watched, as in `fit`. There is no optimizer step that
could hide the cost. The share is the additional time of a watched step, divided by the time of a
plain step and by the number of steps per watched one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from overt.train import AttentionMonitor

from .clock import Spread, Times, device_clock, time_variants
from .report import Report, Row, Setting, at_most

SIZES = {  # layers, width, heads, positions, samples
    "12 layers of 256, 128 positions": (12, 256, 4, 128, 8),
    "6 layers of 384, 512 positions": (6, 384, 6, 512, 4),
}
SMALL = {"2 layers of 32, 16 positions": (2, 32, 2, 16, 2)}
EVERY = 100
COST = 0.01  # share of training at most, with one watched step in a hundred


def section(setting: Setting, report: Report) -> None:
    """Measure two sizes of a Transformer."""
    torch.set_num_threads(1)
    monitor = AttentionMonitor(every=EVERY)
    for name, sizes in (SMALL if setting.quick else SIZES).items():
        times = _time_steps(*build_model(sizes, setting.device), monitor, setting)
        ratio = times.ratio("watched", "plain")
        share = Spread(*((one - 1) / EVERY for one in (ratio.median, ratio.low, ratio.high)))
        report.add(
            Row(
                f"{name}, one step in {EVERY} watched",
                "watched",
                "plain",
                "share of training",
                share,
                at_most(COST),
                times.spread("watched"),
                times.spread("plain"),
            )
        )


def _time_steps(
    model: nn.Module, tokens: Tensor, monitor: AttentionMonitor, setting: Setting
) -> Times:
    statistics: list[object] = []
    variants = dict(
        zip(("watched", "plain"), build_steps(model, tokens, monitor, statistics), strict=True)
    )
    times = time_variants(variants, 2 * setting.rounds, device_clock(setting.device), limit=15.0)
    assert statistics[0], "no statistics were collected"
    return times


def build_steps(
    model: nn.Module, tokens: Tensor, monitor: AttentionMonitor, statistics: list[object]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a watched step, which stores its its results in `statistics`, and the plain step."""

    def loss() -> Tensor:
        found: Tensor = model(tokens).square().mean()
        return found

    def plain() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    def watched() -> None:
        with monitor.observe(model) as stats:  # only the forward pass, as in `fit`
            found = loss()
        found.backward()
        model.zero_grad(set_to_none=True)
        statistics[:] = [stats.compute()]

    return watched, plain


def build_model(sizes: tuple[int, ...], device: str) -> tuple[nn.Module, Tensor]:
    """Return a Transformer and its input."""
    layers, width, heads, positions, samples = sizes
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    return model, torch.randn(samples, positions, width, device=device)
