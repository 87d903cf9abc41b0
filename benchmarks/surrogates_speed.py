"""What finding surrogates costs beside a RISE-style loop, by turns in one process.

    python benchmarks/surrogates_speed.py [OUT.json]

Features are cached for both: 14 x 14 cells of 512 numbers, a two-hop attention head, 1,000 answers,
500 masks and the whole input. The loop builds all masked features of an image, runs the head on
100 of them at a time, keeps every score and map, and takes the best at the end. Masks come from
RISE's generator, a resize by scikit-image a mask, and from ours. Times are those of the processor.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from skimage.transform import resize
from torch import Tensor, nn

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.models.output import Output
from overt.supervise.surrogate import Grids, asking, refine, search
from overt.supervise.surrogate.draws import chances, keys_of
from overt.supervise.surrogate.masks import Asked, enlarge

SIDE, WIDTH, ANSWERS, HOPS, MASKS, IMAGES, ROUNDS, CHUNK = 14, 512, 1000, 2, 500, 2, 5, 32
PASS = {"loop": 3.0, "loop_without_repeats": 4.5, "masks": 30.0}


@dataclass(frozen=True, eq=False)
class Seen:
    """Cached cells, a question, and the linear maps of the cells where somebody has made them."""

    cells: Float[Tensor, "b k d"]
    question: Float[Tensor, "b d"]
    mapped: tuple[Tensor, ...] = ()


class Hops(nn.Module):
    """Stacked attention without a bias on the cells, so that masks commute with its linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.of_cell = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(HOPS))
        self.of_question = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HOPS))
        self.score = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(HOPS))
        self.decision = nn.Linear(WIDTH, ANSWERS)

    def encode(self, batch: Batch) -> Seen:
        """Features that somebody has cached, the first row the question; and their linear maps."""
        assert batch.features is not None
        question, cells = batch.features[:, 0], batch.features[:, 1:]
        return Seen(cells, question, tuple(one(cells) for one in self.of_cell))

    def decide(self, features: Seen, mask: Mapping[str, Tensor] | None = None) -> Output:
        """The mask after the linear maps: one number a cell commutes with them."""
        b, k, _ = features.cells.shape
        keep = torch.ones(b, k) if mask is None else mask["image"]
        state = features.question
        for cells, question, score in zip(
            features.mapped, self.of_question, self.score, strict=True
        ):
            joint = (cells * keep[..., None]).add_(question(state)[:, None]).tanh_()
            scores = score(joint)[..., 0]
            weights = scores.softmax(dim=-1) * keep
            state = state + torch.bmm(weights[:, None], features.cells)[:, 0]
        return Output(self.decision(state), (_map(scores),))

    def whole(self, cells: Tensor, state: Tensor) -> Output:
        """Everything from the start, as a head that was not made to be asked again."""
        for cell, question, score in zip(self.of_cell, self.of_question, self.score, strict=True):
            scores = score(torch.tanh(cell(cells) + question(state)[:, None]))[..., 0]
            state = state + torch.bmm(scores.softmax(dim=-1)[:, None], cells)[:, 0]
        return Output(self.decision(state), (_map(scores),))


def _map(scores: Float[Tensor, "b k"]) -> AttentionMap:
    return AttentionMap.from_scores(scores[:, None, None, None], grid(SIDE, SIDE))


@dataclass(frozen=True)
class Drawn:
    """All masks that were drawn, those drawn twice too: what the plain loop is given."""

    grid: tuple[int, int] = (3, 3)
    name: str = "image"

    def __call__(self, asked: Asked) -> "Drawn.Every":
        """The whole input and 500 masks a sample, those of `Grids`."""
        cells = self.grid[0] * self.grid[1]
        keys = keys_of(asked.ids, 0, f"grids {self.name}")
        drawn = torch.from_numpy(chances(keys, MASKS * cells, 0.5).reshape(-1, MASKS, cells))
        return Drawn.Every(torch.cat([torch.ones_like(drawn[:, :1]), drawn], dim=1), self.grid)

    @dataclass(frozen=True, eq=False)
    class Every:
        """Grids by number."""

        grids: Tensor
        side: tuple[int, int]
        name: str = "image"

        @property
        def counts(self) -> Int[Tensor, " b"]:
            """As many for each."""
            return torch.full((len(self.grids),), self.grids.shape[1])

        def take(self, rows: Tensor, numbers: Tensor) -> Tensor:
            """Masks by number."""
            found = self.grids[rows, numbers].unflatten(1, self.side)
            return enlarge(found, (SIDE, SIDE)).flatten(1)


@torch.no_grad()
def loop(model: Hops, batch: Batch, masks: Float[Tensor, "b m k"]) -> tuple[Tensor, Tensor]:
    """RISE-style: all masked features of an image, all scores and maps, then the best."""
    assert batch.labels is not None and batch.features is not None
    chosen, maps = [], []
    for row, label in enumerate(batch.labels.tolist()):
        stack = masks[row][..., None] * batch.features[row, 1:]
        scores, seen = [], []
        for start in range(0, len(stack), 100):
            part = stack[start : start + 100]
            output = model.whole(part, batch.features[row, 0].expand(len(part), -1))
            scores.append(output.prediction.softmax(dim=-1)[:, label])
            seen.append(output.attention[0].weights[:, 0, 0, 0])
        best = int(torch.cat(scores).argmax())
        chosen.append(masks[row, best])
        maps.append(torch.cat(seen)[best])
    return torch.stack(chosen), torch.stack(maps)


def rise_generator(count: int, cells: int, size: int, drawn: np.random.Generator) -> np.ndarray:
    """RISE's masks: one resize and one crop after the other."""
    step = int(np.ceil(size / cells))
    grids = (drawn.random((count, cells, cells)) < 0.5).astype("float32")
    found = np.empty((count, size, size))
    for number in range(count):
        y, x = drawn.integers(0, step, 2)
        large = resize(
            grids[number], ((cells + 1) * step,) * 2, order=1, mode="reflect", anti_aliasing=False
        )
        found[number] = large[y : y + size, x : x + size]
    return found


def our_masks(cells: int, size: int, key: np.ndarray) -> Tensor:
    """As many of ours, for one image."""
    drawn = chances(key, MASKS * cells * cells, 0.5).reshape(MASKS, cells, cells)
    return enlarge(torch.from_numpy(drawn), (size, size))


def timed(
    variants: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds of every variant, by turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.process_time()
            run()
            found[name].append(time.process_time() - start)
    return found


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> dict[str, float]:
    """How many times faster: the median over rounds, with the least and the most."""
    each = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
    return {"median": statistics.median(each), "least": min(each), "most": max(each)}


def measure() -> dict[str, Any]:
    """All ratios, after a check that fast and slow find the same masks and maps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Hops().eval()
    features = 3 * torch.randn(IMAGES, 1 + SIDE * SIDE, WIDTH)  # every cell says something else
    ids = tuple(f"image-{row}" for row in range(IMAGES))
    batch = Batch(ids, features=features, labels=torch.zeros(IMAGES, dtype=torch.long))
    with torch.no_grad():  # answers of middling chance, so that some masks help and some hurt
        order = model.decide(model.encode(batch)).prediction.argsort(dim=-1)
        labels = order[:, ANSWERS // 2]
    batch = replace(batch, labels=labels)
    all_drawn, distinct = Drawn(), Grids(MASKS, grid=(3, 3))
    few = Grids(MASKS, grid=(2, 2))

    def ours(masks: Any, find: Callable[..., Any] = search) -> Callable[[], Any]:
        def run() -> Any:
            with asking(model, batch, ["image"]) as look:
                return find(look, masks, chunk=CHUNK)

        return run

    with asking(model, batch, ["image"]) as look:
        every = all_drawn(look)
    rows = torch.arange(IMAGES)
    masks = torch.stack(
        [every.take(rows, torch.full_like(rows, n)) for n in range(MASKS + 1)], dim=1
    )
    chosen, maps = loop(model, batch, masks)
    checks: dict[str, Any] = {"masks_neither_whole_nor_empty": int((chosen.std(dim=1) > 0).sum())}
    for name, found in (("drawn", ours(all_drawn)()), ("distinct", ours(distinct)())):
        checks[f"same_mask_{name}"] = bool(torch.equal(found.masks["image"], chosen))
        off = found.maps["image"].weights[:, 0, 0, 0] - maps
        checks[f"map_off_{name}"] = float(off.abs().max())
    times = timed(
        {
            "loop": lambda: loop(model, batch, masks),
            "ours": ours(all_drawn),
            "ours_without_repeats": ours(distinct),
            "ours_2x2": ours(few),
            "refine_50": ours(distinct, refine),
        }
    )
    drawn, key = np.random.default_rng(0), keys_of(["image"], 0)
    making = timed(
        {
            "rise_14": lambda: rise_generator(MASKS, 3, SIDE, drawn),
            "ours_14": lambda: our_masks(3, SIDE, key),
        }
    )
    ratios = {
        "loop": ratio(times, "loop", "ours"),
        "loop_without_repeats": ratio(times, "loop", "ours_without_repeats"),
        "loop_2x2_enumerated": ratio(times, "loop", "ours_2x2"),
        "loop_refine_50": ratio(times, "loop", "refine_50"),
        "masks": ratio(making, "rise_14", "ours_14"),
    }
    return {
        "setting": {
            "cells": SIDE * SIDE, "width": WIDTH, "answers": ANSWERS, "hops": HOPS,
            "masks": MASKS, "images": IMAGES, "threads": 1, "torch": torch.__version__,
        },
        "checks": checks,
        "seconds": {name: statistics.median(one) for name, one in (times | making).items()},
        "ratios": ratios,
        "pass": {name: ratios[name]["median"] >= least for name, least in PASS.items()},
    }  # fmt: skip


if __name__ == "__main__":
    result = json.dumps(measure(), indent=2)
    print(result)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(result + "\n")
