"""Section 1, semi-direct: attention rollout of some rows, with its gradient.

It is compared with the two usual implementations: products of whole maps, as in the published code,
and the rows alone multiplied through weights that autograd saves. A third one recomputes every
softmax. All give the same numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from overt.attribution import attention_rollout
from overt.capture.call import Call, QKCall, Route, default_scale
from overt.capture.trace import AttentionTrace

from .clock import Times, capture_graph, device_clock, saved_bytes, time_variants
from .report import (
    Curve,
    Report,
    Row,
    Setting,
    at_least,
    at_most,
    relative_time_row,
    speedup_row,
    value_row,
)

LAYERS, HEADS, WIDTH, ROWS = 6, 6, 64, 8
MEMORY_GOALS = {512: 5.0, 1024: 8.0}  # times less memory than rows with all weights saved
TIME_GOAL = 1.1  # maximum time relative to the better alternative


class Case:
    """Queries and keys of some layers, and rows whose target is four of the positions."""

    def __init__(
        self, samples: int, positions: int, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (samples, HEADS, positions, WIDTH)
        self.pairs = [
            tuple(
                torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_()
                for _ in range(2)
            )
            for _ in range(LAYERS)
        ]
        self.rows = torch.randint(positions, (samples, ROWS), generator=generator).to(device)

    def trace(self) -> AttentionTrace:
        """Return a trace, as from `watch`."""
        module = nn.Identity()
        return AttentionTrace(
            [
                Call(str(at), module, QKCall(q, k, default_scale(q)), Route.SDPA, False)
                for at, (q, k) in enumerate(self.pairs)
            ]
        )

    def mixing_matrix(self, at: int) -> Tensor:
        """Return the matrix of one layer: its mean over heads, and half the identity."""
        query, key = self.pairs[at]
        weights = (query @ key.mT * WIDTH**-0.5).softmax(dim=-1).mean(dim=1)
        return (weights + torch.eye(weights.shape[-1], device=weights.device)) / 2

    # --- variants

    def ours(self, chunk: int | None = None) -> Tensor:
        """Compute the rows, in chunks or at once, as the library decides."""
        return attention_rollout.rollout(self.trace(), self.rows, chunk=chunk).values[:, 0, 0]

    def whole_maps(self) -> Tensor:
        """Multiply whole maps, layer by layer; then select the rows."""
        total = self.mixing_matrix(0)
        for at in range(1, LAYERS):
            total = self.mixing_matrix(at) @ total
        return total.gather(1, self.rows[..., None].expand(-1, -1, total.shape[-1]))

    def saved_rows(self) -> Tensor:
        """Multiply the rows through all layers, with weights saved for the backward pass."""
        top = self.mixing_matrix(LAYERS - 1)
        state = top.gather(1, self.rows[..., None].expand(-1, -1, top.shape[-1]))
        for at in reversed(range(LAYERS - 1)):
            state = state @ self.mixing_matrix(at)
        return state

    def step(self, variant: Callable[[], Tensor]) -> Callable[[], None]:
        """Return a forward and backward step."""

        def run() -> None:
            for one in self.leaves():
                one.grad = None
            self.loss(variant).backward()

        return run

    def loss(self, variant: Callable[[], Tensor]) -> Tensor:
        """Return the cross-entropy with a uniform target on the first four positions."""
        return -variant()[..., :4].log().mean()

    def leaves(self) -> Sequence[Tensor]:
        """Return all queries and keys."""
        return [one for pair in self.pairs for one in pair]

    def gradients(self, variant: Callable[[], Tensor]) -> list[Tensor]:
        """Return the gradients of all queries and keys."""
        return list(torch.autograd.grad(self.loss(variant), self.leaves()))


def max_difference() -> float:
    """Return the largest difference from whole maps in float64, of values and gradients."""
    case = Case(2, 200, "cpu", torch.float64)
    found = []
    for variant in (case.ours, partial(case.ours, chunk=64), case.saved_rows):
        found.append(float((variant() - case.whole_maps()).abs().max().detach()))
        pairs = zip(case.gradients(variant), case.gradients(case.whole_maps), strict=True)
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return max(found)


def compare_best(label: str, times: Times, has_goal: bool) -> Row:
    """Compare ours with the better of the two row implementations."""
    alternative = min(
        ("rows, saved weights", "rows, recomputed weights"),
        key=lambda name: times.spread(name).median,
    )
    return relative_time_row(
        label, times, "ours", alternative, at_most(TIME_GOAL) if has_goal else None
    )


def time_graphs(
    label: str, steps: dict[str, Callable[[], None]], setting: Setting, report: Report
) -> None:
    """Time the same in CUDA graphs, which do not wait for Python."""
    graphs = {name: capture_graph(step) for name, step in steps.items()}
    times = time_variants(graphs, setting.rounds, device_clock(setting.device), limit=5.0)
    report.add(
        compare_best(f"{label}: compared with the best alternative", times, True),
        speedup_row(f"{label}: compared with whole maps", times, "ours", "whole maps"),
    )


def section(setting: Setting, report: Report) -> None:
    """Check exactness, then measure time and memory at three lengths."""
    torch.set_num_threads(1)
    difference = max_difference()
    assert difference < 1e-12, f"rollout of rows differs by {difference}"
    report.add(
        value_row(
            "difference from whole maps, float64", "largest difference", difference, at_most(1e-12)
        )
    )
    sizes = (64, 128) if setting.quick else (164, 512, 1024)
    time_curves: dict[str, list[float]] = {}
    memory_curves: dict[str, list[float]] = {}
    for positions in sizes:
        case = Case(setting.size(32, 1) if setting.gpu else 1, positions, setting.device)
        losses: dict[str, Callable[[], Tensor]] = {
            "ours": case.ours,
            "rows, saved weights": case.saved_rows,
            "rows, recomputed weights": partial(case.ours, chunk=max(16, positions // 8)),
            "whole maps": case.whole_maps,
        }
        steps = {name: case.step(variant) for name, variant in losses.items()}
        times = time_variants(steps, setting.rounds, device_clock(setting.device), limit=15.0)
        memory = {
            name: saved_bytes(partial(case.loss, variant)) / 2**20
            for name, variant in losses.items()
        }
        memory_ratio = memory["rows, saved weights"] / memory["ours"]
        goal = at_least(MEMORY_GOALS[positions]) if positions in MEMORY_GOALS else None
        report.add(
            compare_best(
                f"rollout {positions}: compared with the best alternative", times, not setting.gpu
            ),
            value_row(
                f"rollout {positions}: saved for backward", "times less memory", memory_ratio, goal
            ),
            speedup_row(
                f"rollout {positions}: compared with whole maps", times, "ours", "whole maps"
            ),
        )
        for name in steps:
            time_curves.setdefault(name, []).append(times.spread(name).median)
            memory_curves.setdefault(name, []).append(memory[name])
        if setting.gpu:
            run = partial(time_graphs, f"rollout {positions}, CUDA graph", steps, setting, report)
            report.part(f"rollout {positions}, CUDA graph", run)
    label = f"{LAYERS} layers, {HEADS} heads of {WIDTH}"
    report.curves = [
        Curve(f"Rollout of {ROWS} rows ({label})", "tokens", cost, list(map(float, sizes)), lines)
        for cost, lines in (
            ("seconds", time_curves),
            ("MiB saved for backward", memory_curves),
        )
    ]
