"""What hard attention saves: aggregation of kept cells beside aggregation of all, by turns.

    python benchmarks/hard_speed.py [--out FILE] [--only NAME ...] [--rounds N] [--device cpu]

Forward and backward passes, the choice of the cells among them, in one process and on one thread.
Each section first asserts that the quick way gives the right answer. The ways take turns; a ratio
is the median, over the rounds, of the time of all cells over that of the kept ones in that round,
and `share` is that ratio over the ratio of floating-point operations. For the adaptive rule
`share_of_cells` is it over all cells / mean kept; `packed` fills samples up for all but the first
layer, `filled_up` for that too. `literal` is equation 7 as it is printed, with a
value for every cell and torch's fused attention, on all cells, and `not_factorised` a relation
network that sees pairs side by side. On a CPU time is CPU time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from speed import machine
from torch import Tensor, nn

from overt.models.hard.aggregate import Pairwise, Relation
from overt.models.hard.selection import (
    Kept,
    Ragged,
    Rule,
    gather,
    keep_above_uniform,
    keep_top,
    number_kept,
    presence,
)

SHARES = (0.16, 0.25, 0.33, 0.48)
GOAL_GATHER, GOAL_ADAPTIVE, GOAL_GPU = 0.85, 0.9, 0.6

Run = Callable[[], Tensor]


class Plain(nn.Module):
    """A relation network whose first layer sees every pair side by side: what is factorised."""

    def __init__(self, like: Relation) -> None:
        super().__init__()
        self.like = like

    def forward(self, cells: Tensor, question: Tensor) -> Tensor:
        """All pairs, the question beside each."""
        b, n, _ = cells.shape
        parts = (cells[:, :, None], cells[:, None], question[:, None, None])
        pairs = torch.cat([part.expand(b, n, n, -1) for part in parts], dim=-1)
        return self.like.rest(self.like.first(pairs).relu_()).sum(dim=(1, 2))


class Literal(nn.Module):
    """Equation 7 as it is printed: queries, keys and values of every cell, then a sum."""

    def __init__(self, like: Pairwise) -> None:
        super().__init__()
        self.like = like

    def forward(self, cells: Tensor) -> Tensor:
        """All cells look at all cells."""
        weight = torch.cat([self.like.query_and_key.weight, self.like.value.weight])
        query, key, value = rearrange(
            nn.functional.linear(cells, weight), "b n (t h d) -> t b h n d", t=3, h=self.like.heads
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, scale=self.like.scale)
        return rearrange(seen.sum(dim=2), "b h d -> b (h d)")


def chosen(cells: Tensor, rule: Rule) -> Kept | Ragged:
    """The kept cells, as a model takes them."""
    kept = rule(presence(cells.detach()))
    return gather(cells, kept, number_kept(rule, cells.shape[1]))


def masked(cells: Tensor, rule: Rule) -> Kept:
    """All cells with 0 and 1: what a mask costs."""
    kept = rule(presence(cells.detach()))
    return Kept(cells, weights=kept.to(cells.dtype))


def every_cell(module: Any, cells: Tensor, question: Tensor) -> Tensor:
    """All cells, without a choice."""
    return module(Kept(cells), question)


def some_cells(
    module: Any, cells: Tensor, question: Tensor, way: Callable[..., Kept | Ragged], rule: Rule
) -> Tensor:
    """The cells that a rule keeps, taken in one way or another."""
    return module(way(cells, rule), question)


def same(runs: dict[str, Run], names: tuple[str, ...]) -> None:
    """Assert that these ways agree to 1e-4 of the largest value."""
    with torch.no_grad():
        first, *others = (runs[name]() for name in names)
    for name, other in zip(names[1:], others, strict=True):
        apart = float((first - other).abs().max() / first.abs().max())
        assert apart < 1e-4, f"{name} is {apart:g} away from {names[0]}"


def timed(
    runs: dict[str, Run], module: nn.Module, cells: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each in each round, forward and backward; one round before them warms up."""
    clock = time.perf_counter if cells.is_cuda else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            cells.grad = None
            module.zero_grad(set_to_none=True)
            start = clock()
            run().square().sum().backward()
            if cells.is_cuda:
                torch.cuda.synchronize()
            if number:
                seconds[name].append(clock() - start)
    return seconds


def over(above: list[float], below: list[float]) -> float:
    """The median over rounds of one time over another: what slows a round slows both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def fixed(
    module: Any, cells: Tensor, question: Tensor, rounds: int, extra: dict[str, Run]
) -> dict[str, Any]:
    """A fixed number of cells, gathered and masked, beside all of them."""
    found = {}
    every = cells.shape[1]
    for share in SHARES:
        count = round(share * every)
        rule = partial(keep_top, count=count)
        runs: dict[str, Run] = {
            "all": partial(every_cell, module, cells, question),
            "gathered": partial(some_cells, module, cells, question, chosen, rule),
            "masked": partial(some_cells, module, cells, question, masked, rule),
            **extra,
        }
        same(runs, ("masked", "gathered"))
        seconds = timed(runs, module, cells, rounds)
        flops = module.flops(torch.tensor([float(every), float(count)], dtype=torch.float64))
        ratio, wanted = over(seconds["all"], seconds["gathered"]), float(flops[0] / flops[1])
        found[f"{count} of {every}"] = {
            "ratio": ratio,
            "flop_ratio": wanted,
            "share": ratio / wanted,
            "masked_over_all": over(seconds["masked"], seconds["all"]),
            **{f"{name}_over_all": over(seconds[name], seconds["all"]) for name in extra},
            **{f"{name}_over_gathered": over(seconds[name], seconds["gathered"]) for name in extra},
        }
    return found


def adaptive(
    module: Any,
    cells: Tensor,
    question: Tensor,
    rounds: int,
    extra: dict[str, Run],
    temperatures: tuple[float, ...] = (0.5, 1.0, 2.0),
) -> dict[str, Any]:
    """As many cells as are above uniform, packed and filled up, beside all of them."""
    from overt.models.hard import aggregate

    found = {}
    every = cells.shape[1]

    def spared(spare: float, rule: Rule) -> Tensor:
        before, aggregate.SPARE = aggregate.SPARE, spare
        kept = chosen(cells, rule)
        try:
            if isinstance(module, Pairwise) and isinstance(kept, Ragged):
                return module.filled_up(kept)  # which on a CPU is asked for by nobody else
            return module(kept, question)
        finally:
            aggregate.SPARE = before

    for temperature in temperatures:
        rule = partial(keep_above_uniform, temperature=temperature)
        runs: dict[str, Run] = {
            "all": partial(every_cell, module, cells, question),
            "ours": partial(some_cells, module, cells, question, chosen, rule),
            "packed": partial(spared, -1.0, rule),
            "filled up": partial(spared, 1e9, rule),
            "masked": partial(some_cells, module, cells, question, masked, rule),
        }
        same(runs, ("masked", "ours", "packed", "filled up"))
        del runs["masked"]
        runs |= extra
        seconds = timed(runs, module, cells, rounds)
        counts = rule(presence(cells.detach())).sum(dim=-1).double().cpu()
        needed = float(module.flops(counts).mean())
        flop_ratio = float(module.flops(torch.full_like(counts, every)).mean()) / needed
        ratio = over(seconds["all"], seconds["ours"])
        mean = float(counts.mean())
        found[f"mean {mean:.1f}, most {int(counts.max())} of {every}"] = {
            "ratio": ratio,
            "flop_ratio": flop_ratio,
            "share": ratio / flop_ratio,
            "share_of_cells": ratio / (every / mean),
            "packed": over(seconds["all"], seconds["packed"]),
            "filled_up": over(seconds["all"], seconds["filled up"]),
            **{f"{name}_over_ours": over(seconds[name], seconds["ours"]) for name in extra},
        }
    return found


def cells_of(batch: int, count: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Random cells of unequal norm, a few of which stand out, and questions."""
    drawn = torch.Generator().manual_seed(0)
    sizes = 1 + 0.1 * torch.randn(batch, count, 1, generator=drawn).abs()
    cells = sizes * torch.randn(batch, count, width, generator=drawn)
    question = torch.randn(batch, 128, generator=drawn)
    return cells.to(device).requires_grad_(), question.to(device)


def sections(device: str) -> dict[str, Callable[[int], dict[str, Any]]]:
    """What is measured, by name; a GPU gets more work at once."""
    gpu = device != "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nonlocal_, photo = Pairwise(512).to(device), Pairwise(2048).to(device)
    relation = Relation(256, 128).to(device)
    many = cells_of(256 if gpu else 32, 196 if gpu else 100, 512, device)
    photos = cells_of(256 if gpu else 32, 100, 2048, device)
    pairs = cells_of(64 if gpu else 8, 64, 256, device)
    plain: dict[str, Run] = {"not_factorised": partial(Plain(relation), *pairs)}
    literal: dict[str, Run] = {"literal": partial(Literal(nonlocal_), many[0])}
    same(
        {"a": plain["not_factorised"], "b": lambda: relation(Kept(pairs[0]), pairs[1])}, ("a", "b")
    )
    same({"a": literal["literal"], "b": lambda: nonlocal_(Kept(many[0]), many[1])}, ("a", "b"))
    return {
        "pairwise": lambda rounds: fixed(nonlocal_, *many, rounds, literal),
        "pairwise_photos": lambda rounds: fixed(photo, *photos, rounds, {}),
        "relation": lambda rounds: fixed(relation, *pairs, rounds, plain),
        "adaptive_pairwise": lambda rounds: adaptive(nonlocal_, *many, rounds, literal),
        "adaptive_relation": lambda rounds: adaptive(relation, *pairs, rounds, plain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name, section in sections(given.device).items():
        if given.only and name not in given.only:
            continue
        found[name] = section(given.rounds)
        print(f"{name}:")
        for case, values in found[name].items():
            print(f"  {case:28}", *(f"{what} {value:.2f} " for what, value in values.items()))
    goals = {"gather": GOAL_GATHER, "adaptive": GOAL_ADAPTIVE, "gather_gpu": GOAL_GPU}
    result = {"machine": machine(), "device": given.device, "goals": goals, "sections": found}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
