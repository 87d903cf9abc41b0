"""Section 1, semi-direct: attention rollout of some rows, with its gradient.

Beside it stand the two ways one would write: whole maps multiplied with each other, as the
published code of rollout does, and the rows alone multiplied down through weights that autograd
keeps. A third one makes every softmax twice. All give the same numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from overt.capture.call import Call, Projected, Route, default_scale
from overt.capture.derived import rolling
from overt.capture.seen import Seen

from .clock import Times, graphed, kept, race, timer
from .report import Curve, Report, Row, Setting, at_least, at_most, dearer, exact, faster

LAYERS, HEADS, WIDTH, ROWS = 6, 6, 64, 8
LESS = {512: 5.0, 1024: 8.0}  # times less memory than the rows with all weights kept
BETTER = 1.1  # times as long as the better of both ways, at most


class Case:
    """Queries and keys of some layers, and rows that should end at four of the positions."""

    def __init__(
        self, samples: int, positions: int, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        drawn = torch.Generator().manual_seed(0)
        shape = (samples, HEADS, positions, WIDTH)
        self.pairs = [
            tuple(
                torch.randn(shape, generator=drawn, dtype=dtype).to(device).requires_grad_()
                for _ in range(2)
            )
            for _ in range(LAYERS)
        ]
        self.rows = torch.randint(positions, (samples, ROWS), generator=drawn).to(device)

    def seen(self) -> Seen:
        """As `watch` gives them."""
        module = nn.Identity()
        return Seen(
            [
                Call(str(at), module, Projected(q, k, default_scale(q)), Route.SDPA, False)
                for at, (q, k) in enumerate(self.pairs)
            ]
        )

    def mixed(self, at: int) -> Tensor:
        """What one layer does: its heads averaged, and half of what was there before."""
        query, key = self.pairs[at]
        weights = (query @ key.mT * WIDTH**-0.5).softmax(dim=-1).mean(dim=1)
        return (weights + torch.eye(weights.shape[-1], device=weights.device)) / 2

    # --- ways

    def ours(self, portion: int | None = None) -> Tensor:
        """Rows, in portions or not, as the library decides."""
        return rolling.rollout(self.seen(), self.rows, portion=portion).values[:, 0, 0]

    def whole(self) -> Tensor:
        """Whole maps, multiplied layer after layer; then the rows."""
        total = self.mixed(0)
        for at in range(1, LAYERS):
            total = self.mixed(at) @ total
        return total.gather(1, self.rows[..., None].expand(-1, -1, total.shape[-1]))

    def by_rows(self) -> Tensor:
        """The rows alone, down through all layers, weights kept for the backward pass."""
        top = self.mixed(LAYERS - 1)
        state = top.gather(1, self.rows[..., None].expand(-1, -1, top.shape[-1]))
        for at in reversed(range(LAYERS - 1)):
            state = state @ self.mixed(at)
        return state

    def step(self, way: Callable[[], Tensor]) -> Callable[[], None]:
        """Forward and backward."""

        def run() -> None:
            for one in self.leaves():
                one.grad = None
            self.loss(way).backward()

        return run

    def loss(self, way: Callable[[], Tensor]) -> Tensor:
        """Cross-entropy with an even target on the first four positions."""
        return -way()[..., :4].log().mean()

    def leaves(self) -> Sequence[Tensor]:
        """All queries and keys."""
        return [one for pair in self.pairs for one in pair]

    def gradients(self, way: Callable[[], Tensor]) -> list[Tensor]:
        """Of all queries and keys."""
        return list(torch.autograd.grad(self.loss(way), self.leaves()))


def exactness() -> float:
    """The largest difference from whole maps in float64, of values and of gradients."""
    case = Case(2, 200, "cpu", torch.float64)
    found = []
    for way in (case.ours, partial(case.ours, portion=64), case.by_rows):
        found.append(float((way() - case.whole()).abs().max().detach()))
        pairs = zip(case.gradients(way), case.gradients(case.whole), strict=True)
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return max(found)


def beside(what: str, times: Times, held: bool) -> Row:
    """Ours and the better of the two ways one would write."""
    best = min(("rows, weights kept", "rows, made twice"), key=lambda name: times.of(name).median)
    return dearer(what, times, "ours", best, at_most(BETTER) if held else None)


def replayed(
    what: str, steps: dict[str, Callable[[], None]], setting: Setting, report: Report
) -> None:
    """The same as graphs of the card, where nothing waits for Python."""
    graphs = {name: graphed(step) for name, step in steps.items()}
    times = race(graphs, setting.rounds, timer(setting.device), limit=5.0)
    report.add(
        beside(f"{what}: beside the better way", times, True),
        faster(f"{what}: beside whole maps", times, "ours", "whole maps"),
    )


def section(setting: Setting, report: Report) -> None:
    """Exactness, then time and memory at three lengths."""
    torch.set_num_threads(1)
    apart = exactness()
    assert apart < 1e-12, f"rollout of rows is {apart} off"
    report.add(exact("off whole maps, float64", "largest difference", apart, at_most(1e-12)))
    sizes = (64, 128) if setting.quick else (164, 512, 1024)
    taken: dict[str, list[float]] = {}
    held: dict[str, list[float]] = {}
    for positions in sizes:
        case = Case(setting.some(32, 1) if setting.gpu else 1, positions, setting.device)
        losses: dict[str, Callable[[], Tensor]] = {
            "ours": case.ours,
            "rows, weights kept": case.by_rows,
            "rows, made twice": partial(case.ours, portion=max(16, positions // 8)),
            "whole maps": case.whole,
        }
        steps = {name: case.step(way) for name, way in losses.items()}
        times = race(steps, setting.rounds, timer(setting.device), limit=15.0)
        memory = {name: kept(partial(case.loss, way)) / 2**20 for name, way in losses.items()}
        less = memory["rows, weights kept"] / memory["ours"]
        goal = at_least(LESS[positions]) if positions in LESS else None
        report.add(
            beside(f"rollout {positions}: beside the better way", times, not setting.gpu),
            exact(f"rollout {positions}: kept for backward", "times less", less, goal),
            faster(f"rollout {positions}: beside whole maps", times, "ours", "whole maps"),
        )
        for name in steps:
            taken.setdefault(name, []).append(times.of(name).median)
            held.setdefault(name, []).append(memory[name])
        if setting.gpu:
            run = partial(replayed, f"rollout {positions}, recorded", steps, setting, report)
            report.part(f"rollout {positions}, recorded", run)
    what = f"{LAYERS} layers, {HEADS} heads of {WIDTH}"
    report.curves = [
        Curve(f"Rollout of {ROWS} rows ({what})", "tokens", cost, list(map(float, sizes)), lines)
        for cost, lines in (("seconds", taken), ("MiB kept for the backward pass", held))
    ]
