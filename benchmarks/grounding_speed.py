"""What grounded supervision costs: a training step of VL-BERT with it beside the same step without.

    python benchmarks/grounding_speed.py [OUT.json] [--steps N] [--sizes 164,512]

Steps of all variants run by turns in one process, and each is compared with the plain step of the
same round; medians of CPU time, one thread. Beside the time stands what autograd keeps for the
backward pass. Gradients of `direct` are first held against those of whole maps.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from overt import watch
from overt.attention import AttentionMap, Kind, regions, words
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.models.vlbert.model import Classify, VLBert, VLSizes
from overt.models.vlbert.regions import GivenRegions
from overt.supervise import Loss, classification
from overt.supervise.grounding import direct, rolled, rolled_rows, within
from overt.supervise.heads import of_layers, on_heads

GROUNDED = 12  # tokens a sample
LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1536  # as MiniLM
Losses = dict[str, Loss]


def batch_of(samples: int, text: int, boxes: int, seed: int = 0) -> Batch:
    """Random captions and regions, with twelve tokens of each caption tied to two regions."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 100, (samples, text), generator=drawn)
    tokens[:, 0], tokens[:, text // 2], tokens[:, -1] = 3, 4, 4
    wanted = torch.zeros(samples, 1, 1, text, boxes)
    for row in range(samples):
        for token in (1 + torch.randperm(text - 2, generator=drawn)[:GROUNDED]).tolist():
            wanted[row, 0, 0, token, torch.randperm(boxes, generator=drawn)[:2]] = 0.5
    corners = 48 * torch.rand(samples, boxes, 2, generator=drawn)
    return Batch(
        ids=tuple(map(str, range(samples))),
        geometry=PixelGeometry.identity(samples, (64, 64)),
        tokens=tokens,
        token_mask=torch.ones_like(tokens, dtype=torch.bool),
        boxes=torch.cat([corners, corners + 16], dim=-1),
        features=torch.randn(samples, boxes, 256, generator=drawn),
        region_mask=torch.ones(samples, boxes, dtype=torch.bool),
        labels=torch.randint(0, 3, (samples,), generator=drawn),
        target=AttentionMap(wanted, regions(boxes), words(text), kind=Kind.AMOUNT),
    )


def net() -> VLBert:
    """A network of the size of MiniLM."""
    torch.manual_seed(0)
    sizes = VLSizes(100, WIDTH, LAYERS, HEADS, INNER, positions=1024, dropout=0.0, gain=1.0)
    return VLBert(sizes, GivenRegions(256), Classify(WIDTH, 3, 0.0))


def supervised() -> dict[str, Callable[[VLBert, Batch], Tensor]]:
    """The loss of one step, by the name of the variant."""

    def step(attend: Callable[[object, Batch], Losses]) -> Callable[[VLBert, Batch], Tensor]:
        def loss(model: VLBert, batch: Batch) -> Tensor:
            output = model(batch)
            assert batch.labels is not None
            task = classification(output.prediction, batch.labels)
            return task.mean() + sum(one.mean() for one in attend(output.seen, batch).values())

        return loss

    last = of_layers([-1], (LAYERS, HEADS))

    def watched(model: VLBert, batch: Batch) -> Tensor:
        features = model.encode(batch)
        with watch(model.encoder, layout=features.layout) as seen:
            output = model.decide(features)
        assert batch.labels is not None
        task = classification(output.prediction, batch.labels)
        losses = direct(seen.log_block, batch.target)
        return task.mean() + sum(one.mean() for one in losses.values())

    return {
        "plain": step(lambda seen, batch: {}),
        "direct": step(lambda seen, batch: direct(seen.log_block, batch.target)),
        "direct, watched": watched,
        "direct, last layer": step(
            lambda seen, batch: direct(
                seen.where(lambda call: call.name.startswith(f"layers.{LAYERS - 1}.")).log_block,
                batch.target,
            )
        ),
        "direct, last layer by a mask": step(
            lambda seen, batch: direct(seen.log_block, batch.target, on_heads(last), on_heads(last))
        ),
        "whole maps": step(lambda seen, batch: direct(within(seen.map()), batch.target)),
        "rollout, every layer": step(lambda seen, batch: direct(rolled(seen.map()), batch.target)),
        "rollout, last layer by rows": step(
            lambda seen, batch: direct(rolled_rows(seen), batch.target)
        ),
    }


def kept(loss: Callable[[], Tensor]) -> float:
    """MiB that autograd keeps for the backward pass, each storage once."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = loss()
    del alive
    return sum(found.values()) / 2**20


def apart(model: VLBert, batch: Batch) -> float:
    """The largest difference of a gradient by blocks from one by whole maps, in float64."""
    precise = model.double()
    given = Batch(**{**vars(batch), "features": batch.features.double()})  # type: ignore[union-attr]
    ways = supervised()
    slopes = []
    for name in ("direct", "whole maps"):
        precise.zero_grad()
        ways[name](precise, given).backward()
        slopes.append([p.grad.clone() for p in precise.parameters() if p.grad is not None])
    model.float()
    model.zero_grad(set_to_none=True)
    return max(float((a - b).abs().max()) for a, b in zip(*slopes, strict=True))


def measured(samples: int, text: int, boxes: int, steps: int) -> dict[str, object]:
    """Ratios to the plain step, and what is kept, at one size."""
    model, batch, ways = net(), batch_of(samples, text, boxes), supervised()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(steps + 1):
        for name, loss in ways.items():
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            loss(model, batch).backward()
            if number:  # the first is for warming up
                times[name].append(time.process_time() - start)
    model.zero_grad(set_to_none=True)
    rows = {
        name: {
            "ratio": round(
                statistics.median(a / b for a, b in zip(found, times["plain"], strict=True)), 3
            ),
            "seconds": round(statistics.median(found), 3),
            "kept_mib": round(kept(lambda loss=ways[name]: loss(model, batch)), 1),  # type: ignore[misc]
        }
        for name, found in times.items()
    }
    length = text + boxes + 2
    return {"length": length, "samples": samples, "text": text, "regions": boxes, "rows": rows}


def main() -> None:
    """Measure, print a table, and write it down if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sizes", default="164,512")
    given = parser.parse_args()
    torch.set_num_threads(1)
    difference = apart(net(), batch_of(2, 12 + GROUNDED, 10))
    print(f"gradients by blocks and by whole maps differ by {difference:.1e} (float64)")
    found = []
    for size in map(int, given.sizes.split(",")):
        text = 64 if size < 256 else 128
        found.append(measured(4 if size < 256 else 2, text, size - text - 2, given.steps))
        print(f"length {size}, {found[-1]['samples']} samples")
        rows = found[-1]["rows"]
        assert isinstance(rows, dict)
        for name, row in rows.items():
            print(
                f"  {name:30} {row['ratio']:6.3f}  {row['seconds']:6.3f} s {row['kept_mib']:8} MiB"
            )
    if given.out is not None:
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": 1,
            "model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS},
            "grounded": GROUNDED,
            "steps": given.steps,
            "difference": difference,
            "sizes": found,
        }
        given.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
