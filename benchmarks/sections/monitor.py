"""What watching attention while training costs: a step as it is beside one that is watched.

Forward and backward; `fit` watches the forward pass, and so does this. A step has no optimizer here
that the cost could hide behind. The share is the extra time of a watched step over that of a plain
one, divided by how many steps there are to one that is watched.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from overt.train import AttentionMonitor

from .clock import Spread, Times, race, timer
from .report import Report, Row, Setting, at_most

SIZES = {  # layers, width, heads, positions, samples
    "12 layers of 256, 128 positions": (12, 256, 4, 128, 8),
    "6 layers of 384, 512 positions": (6, 384, 6, 512, 4),
}
SMALL = {"2 layers of 32, 16 positions": (2, 32, 2, 16, 2)}
EVERY = 100
COST = 0.01  # of training at most, with one step in a hundred watched


def section(setting: Setting, report: Report) -> None:
    """Two sizes of a Transformer."""
    torch.set_num_threads(1)
    monitor = AttentionMonitor(every=EVERY)
    for name, sizes in (SMALL if setting.quick else SIZES).items():
        times = _raced(*made(sizes, setting.device), monitor, setting)
        ratio = times.over("watched", "plain")
        share = Spread(*((one - 1) / EVERY for one in (ratio.median, ratio.low, ratio.high)))
        report.add(
            Row(
                f"{name}, one step in {EVERY} watched",
                "watched",
                "plain",
                "of training",
                share,
                at_most(COST),
                times.of("watched"),
                times.of("plain"),
            )
        )


def _raced(model: nn.Module, tokens: Tensor, monitor: AttentionMonitor, setting: Setting) -> Times:
    seen: list[object] = []
    ways = dict(zip(("watched", "plain"), steps(model, tokens, monitor, seen), strict=True))
    times = race(ways, 2 * setting.rounds, timer(setting.device), limit=15.0)
    assert seen[0], "nothing was seen"
    return times


def steps(
    model: nn.Module, tokens: Tensor, monitor: AttentionMonitor, seen: list[object]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step that is watched, which leaves what it saw, and the same step as it is."""

    def loss() -> Tensor:
        found: Tensor = model(tokens).square().mean()
        return found

    def plain() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    def watched() -> None:
        with monitor.looking(model) as pulse:  # the forward pass alone, as `fit` does it
            found = loss()
        found.backward()
        model.zero_grad(set_to_none=True)
        seen[:] = [pulse.read()]

    return watched, plain


def made(sizes: tuple[int, ...], device: str) -> tuple[nn.Module, Tensor]:
    """A Transformer and what it reads."""
    layers, width, heads, positions, samples = sizes
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    return model, torch.randn(samples, positions, width, device=device)
