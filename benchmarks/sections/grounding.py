"""Grounded supervision of our VL-BERT: steps with it and without, of a layer, a kernel, a model.

Twelve tokens a sample are grounded, with two regions each, and both directions are supervised. One
layer of BERT's size is its attention with its projections; the bare kernel has nothing beside it
that a cost could hide behind. Gradients of `direct` are to be held against those of whole maps.
"""

from collections.abc import Callable

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
    return _net(WIDTH, LAYERS, HEADS, INNER)


def base(layers: int = 12) -> VLBert:
    """A network of the size of BERT-base, as in the paper, or some of its layers."""
    return _net(768, layers, 12, 3072)


def _net(width: int, layers: int, heads: int, inner: int) -> VLBert:
    torch.manual_seed(0)
    sizes = VLSizes(100, width, layers, heads, inner, positions=1024, dropout=0.0, gain=1.0)
    return VLBert(sizes, GivenRegions(256), Classify(width, 3, 0.0))


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

    watchers: dict[VLBert, watch] = {}  # made once, as for a training run

    def watched(model: VLBert, batch: Batch) -> Tensor:
        if model not in watchers:
            watchers[model] = watch(model.encoder)
        features = model.encode(batch)
        with watchers[model] as seen:
            output = model.decide(features)
        seen = seen.within(features.layout)
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
        "whole maps": step(lambda seen, batch: direct(within(seen.map()), aimed(batch))),
        "rollout, every layer": step(lambda seen, batch: direct(rolled(seen.map()), aimed(batch))),
        "rollout, last layer by rows": step(
            lambda seen, batch: direct(rolled_rows(seen), aimed(batch))
        ),
    }


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
