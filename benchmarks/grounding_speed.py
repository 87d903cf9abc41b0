"""What grounded supervision costs: a training step of VL-BERT with it beside the same step without.

    python benchmarks/grounding_speed.py [OUT.json] [--steps N] [--sizes 164,512]

Steps of all variants run by turns in one process, and each is compared with the plain step of the
same round; medians of CPU time, one thread. Beside the time stands what autograd keeps for the
backward pass. Gradients of `direct` are first held against those of whole maps. One layer of
BERT's size, its attention with its projections, is measured by itself, and so is the bare kernel,
which has nothing beside it that a cost could hide behind. `make bench` has the part with goals.
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
from overt.attention import AttentionMap, Kind, Layout, Span, regions, words
from overt.capture.call import Call, Projected, Route, default_scale
from overt.capture.products import tap
from overt.capture.seen import Seen
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.models.vlbert.encoder import SelfAttention
from overt.models.vlbert.model import Classify, VLBert, VLSizes
from overt.models.vlbert.regions import GivenRegions
from overt.supervise import Loss, classification
from overt.supervise.grounding import Aims, aims, direct, rolled, rolled_rows, to_regions, within
from overt.supervise.heads import of_layers, on_heads

GROUNDED = 12  # tokens a sample
LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1536  # as MiniLM
GOALS = {  # supervised / plain, CPU
    "layer 164": 1.20,
    "layer 512": 1.05,
    "layer 1024": 1.05,
    "model 164": 1.05,
    "model 512": 1.05,
}
SIZES = {164: 8, 512: 8, 1024: 2}  # positions: samples
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


def in_the_step(batch: Batch) -> Aims:
    """The rows of the truth, found in the step itself; its price is part of what is measured."""
    assert batch.target is not None
    return aims(batch.target)


def supervised(
    aimed: Callable[[Batch], Aims] = in_the_step,
) -> dict[str, Callable[[VLBert, Batch], Tensor]]:
    """The loss of one step, by the name of the variant; `aimed` says which rows are supervised."""

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
        losses = direct(seen.log_block, aimed(batch))
        return task.mean() + sum(one.mean() for one in losses.values())

    return {
        "plain": step(lambda seen, batch: {}),
        "direct": step(lambda seen, batch: direct(seen.log_block, aimed(batch))),
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


# --- one layer


Pair = tuple[Callable[[], None], Callable[[], None]]  # without supervision, and with it


def parts(samples: int, size: int) -> tuple[AttentionMap, Layout]:
    """Grounded tokens of a text and the regions after it, `size` positions in all."""
    text = 64 if size < 256 else 128
    target = batch_of(samples, text, size - text).target
    assert target is not None
    spans = (
        Span("text", (text,), slice(0, text)),
        Span("regions", (size - text,), slice(text, size)),
    )
    return target, Layout(spans, size)


def layer(samples: int, size: int, width: int = 768, heads: int = 12) -> Pair:
    """Attention with its projections, both directions supervised."""
    torch.manual_seed(0)
    attend = SelfAttention(width, heads, 0.0)
    x = torch.randn(samples, size, width, requires_grad=True)
    slope = torch.randn(samples, size, width)
    target, layout = parts(samples, size)
    there = torch.ones(samples, 1, 1, size, dtype=torch.bool)

    def plain() -> None:
        attend.zero_grad(set_to_none=True)
        attend(x, None, there)[0].backward(slope)

    def taught() -> None:
        attend.zero_grad(set_to_none=True)
        y, source, value, found = attend(x, None, there)
        call = Call("layer", attend, source, Route.SDPA, False, value=value, output=found)
        losses = direct(Seen([call], layout).log_block, target)
        cost = sum(one.mean() for one in losses.values())
        torch.autograd.backward([y, cost], [slope, torch.ones(())])

    return plain, taught


def kernel(samples: int, size: int, heads: int = 3, width: int = 64) -> Pair:
    """The fused kernel and nothing else, words to regions supervised."""
    torch.manual_seed(0)
    given = [torch.randn(samples, heads, size, width, requires_grad=True) for _ in range(3)]
    slope = torch.randn(samples, heads, size, width)
    target, layout = parts(samples, size)
    whole = torch.nn.Identity()

    def plain() -> None:
        query, key, value = (one * 1 for one in given)
        torch.nn.functional.scaled_dot_product_attention(query, key, value).backward(slope)

    def taught() -> None:
        query, key, value = (one * 1 for one in given)
        taps = tap(query, key)
        y = torch.nn.functional.scaled_dot_product_attention(taps[0].tensor, taps[1].tensor, value)
        source = Projected(query, key, default_scale(query), taps=taps)
        call = Call("kernel", whole, source, Route.SDPA, False, value=value, output=y)
        cost = to_regions(Seen([call], layout).log_block, target).mean()
        torch.autograd.backward([y, cost], [slope, torch.ones(())])

    return plain, taught


def ratio(pair: Pair, rounds: int) -> dict[str, float]:
    """The median over rounds of supervised / plain, in CPU time, and the medians of both."""
    seen = []
    for number in range(rounds + 1):
        times = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):  # who goes first may matter
            start = time.process_time()
            pair[which]()
            times[which] = time.process_time() - start
        if number:  # the first is for warming up
            seen.append(times)
    return {
        "ratio": statistics.median(taught / plain for plain, taught in seen),
        "plain_s": statistics.median(plain for plain, _ in seen),
        "supervised_s": statistics.median(taught for _, taught in seen),
    }


def model(samples: int, size: int) -> Pair:
    """A step of the whole network."""
    text = 64 if size < 256 else 128
    own, batch, ways = net(), batch_of(samples, text, size - text - 2), supervised()

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            own.zero_grad(set_to_none=True)
            ways[name](own, batch).backward()

        return run

    return step("plain"), step("direct")


def cases(rounds: int) -> dict[str, dict[str, float]]:
    """All cases that have a goal, and the bare kernel; gradients are held to whole maps first."""
    torch.set_num_threads(1)
    difference = apart(net(), batch_of(2, 12 + GROUNDED, 10))
    assert difference < 1e-10, f"gradients by blocks are off by {difference}"
    pairs = {
        **{f"layer {size}": (layer, samples, size) for size, samples in SIZES.items()},
        **{f"model {size}": (model, 4 if size < 256 else 2, size) for size in (164, 512)},
        **{f"kernel {size}": (kernel, samples, size) for size, samples in SIZES.items()},
    }
    return {name: ratio(make(*sizes), rounds) for name, (make, *sizes) in pairs.items()}


# --- the whole network, in all its variants


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
    by_itself = cases(given.steps)
    for name, one in by_itself.items():
        goal = f"  goal {GOALS[name]:.2f}" if name in GOALS else ""
        print(f"{name:12} {one['ratio']:6.3f}{goal}")
    if given.out is not None:
        about = {
            "cases": by_itself,
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
