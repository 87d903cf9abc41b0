"""Steps of our VL-BERT with and without grounded supervision: layer, kernel and model.

Twelve tokens per sample are grounded, with two regions each, and both directions are supervised.
One layer of BERT's size is its attention with projections; the bare kernel has no other work that
could hide a cost. Gradients of `direct_supervision` are compared with those of whole maps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from overt import watch
from overt.attention import AttentionMap, Kind, Layout, Span, regions, words
from overt.capture.block_scores import tap_gradients
from overt.capture.call import Call, QKCall, Route, default_scale
from overt.capture.trace import AttentionTrace
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.losses import Loss, classification
from overt.losses.grounding import (
    GroundingTargets,
    direct_supervision,
    grounding_targets,
    map_blocks,
    rollout_blocks,
    rollout_row_blocks,
    text_to_regions,
)
from overt.losses.head_selection import heads_of_layers, on_selected_heads
from overt.nn.vlbert.encoder import BertSelfAttention
from overt.nn.vlbert.model import ClassificationHead, VLBert, VLBertSizes
from overt.nn.vlbert.regions import PrecomputedRegionEncoder

GROUNDED = 12  # tokens per sample
LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1536  # as in MiniLM
GOALS = {  # supervised / plain, CPU
    "layer 164": 1.20,
    "layer 512": 1.05,
    "layer 1024": 1.05,
    "model 164": 1.05,
    "model 512": 1.05,
}
SIZES = {164: 8, 512: 8, 1024: 2}  # positions: samples
Losses = dict[str, Loss]


def random_batch(samples: int, text: int, boxes: int, seed: int = 0) -> Batch:
    """Generate captions and regions; twelve tokens of each caption have two regions each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 100, (samples, text), generator=generator)
    tokens[:, 0], tokens[:, text // 2], tokens[:, -1] = 3, 4, 4
    target = torch.zeros(samples, 1, 1, text, boxes)
    for row in range(samples):
        for token in (1 + torch.randperm(text - 2, generator=generator)[:GROUNDED]).tolist():
            target[row, 0, 0, token, torch.randperm(boxes, generator=generator)[:2]] = 0.5
    corners = 48 * torch.rand(samples, boxes, 2, generator=generator)
    return Batch(
        ids=tuple(map(str, range(samples))),
        geometry=PixelGeometry.identity(samples, (64, 64)),
        tokens=tokens,
        token_mask=torch.ones_like(tokens, dtype=torch.bool),
        boxes=torch.cat([corners, corners + 16], dim=-1),
        features=torch.randn(samples, boxes, 256, generator=generator),
        region_mask=torch.ones(samples, boxes, dtype=torch.bool),
        labels=torch.randint(0, 3, (samples,), generator=generator),
        target=AttentionMap(target, regions(boxes), words(text), kind=Kind.AMOUNT),
    )


def small_model() -> VLBert:
    """Return a network of the size of MiniLM."""
    return _model(WIDTH, LAYERS, HEADS, INNER)


def base_model(layers: int = 12) -> VLBert:
    """Return a network of the size of BERT-base, as in the paper, or some of its layers."""
    return _model(768, layers, 12, 3072)


def _model(width: int, layers: int, heads: int, inner: int) -> VLBert:
    torch.manual_seed(0)
    sizes = VLBertSizes(100, width, layers, heads, inner, positions=1024, dropout=0.0, gain=1.0)
    return VLBert(sizes, PrecomputedRegionEncoder(256), ClassificationHead(width, 3, 0.0))


def targets_in_step(batch: Batch) -> GroundingTargets:
    """Find the target rows inside the step, so that their cost is measured."""
    assert batch.target is not None
    return grounding_targets(batch.target)


def loss_functions(
    get_targets: Callable[[Batch], GroundingTargets] = targets_in_step,
) -> dict[str, Callable[[VLBert, Batch], Tensor]]:
    """Return the loss of one step by variant; `get_targets` returns the supervised rows."""

    def step(attention: Callable[[object, Batch], Losses]) -> Callable[[VLBert, Batch], Tensor]:
        def loss(model: VLBert, batch: Batch) -> Tensor:
            output = model(batch)
            assert batch.labels is not None
            task = classification(output.prediction, batch.labels)
            return task.mean() + sum(one.mean() for one in attention(output.trace, batch).values())

        return loss

    last = heads_of_layers([-1], (LAYERS, HEADS))

    watchers: dict[VLBert, watch] = {}  # created once, as in training

    def watched(model: VLBert, batch: Batch) -> Tensor:
        if model not in watchers:
            watchers[model] = watch(model.encoder)
        features = model.encode(batch)
        with watchers[model] as trace:
            output = model.decide(features)
        trace = trace.with_layout(features.layout)
        assert batch.labels is not None
        task = classification(output.prediction, batch.labels)
        losses = direct_supervision(trace.log_block, get_targets(batch))
        return task.mean() + sum(one.mean() for one in losses.values())

    return {
        "plain": step(lambda trace, batch: {}),
        "direct": step(
            lambda trace, batch: direct_supervision(trace.log_block, get_targets(batch))
        ),
        "direct, watched": watched,
        "direct, last layer": step(
            lambda trace, batch: direct_supervision(
                trace.where(lambda call: call.name.startswith(f"layers.{LAYERS - 1}.")).log_block,
                batch.target,
            )
        ),
        "direct, last layer by a mask": step(
            lambda trace, batch: direct_supervision(
                trace.log_block, batch.target, on_selected_heads(last), on_selected_heads(last)
            )
        ),
        "whole maps": step(
            lambda trace, batch: direct_supervision(map_blocks(trace.map()), get_targets(batch))
        ),
        "rollout, every layer": step(
            lambda trace, batch: direct_supervision(rollout_blocks(trace.map()), get_targets(batch))
        ),
        "rollout, last layer by rows": step(
            lambda trace, batch: direct_supervision(rollout_row_blocks(trace), get_targets(batch))
        ),
    }


def gradient_difference(model: VLBert, batch: Batch) -> float:
    """Return the largest gradient difference of blocks and whole maps, in float64."""
    float64_model = model.double()
    inputs = Batch(**{**vars(batch), "features": batch.features.double()})  # type: ignore[union-attr]
    variants = loss_functions()
    gradients = []
    for name in ("direct", "whole maps"):
        float64_model.zero_grad()
        variants[name](float64_model, inputs).backward()
        gradients.append([p.grad.clone() for p in float64_model.parameters() if p.grad is not None])
    model.float()
    model.zero_grad(set_to_none=True)
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


# --- one layer


Pair = tuple[Callable[[], None], Callable[[], None]]  # without and with supervision


def target_and_layout(samples: int, size: int) -> tuple[AttentionMap, Layout]:
    """Return the target and layout of grounded tokens followed by regions, `size` positions."""
    text = 64 if size < 256 else 128
    target = random_batch(samples, text, size - text).target
    assert target is not None
    spans = (
        Span("text", (text,), slice(0, text)),
        Span("regions", (size - text,), slice(text, size)),
    )
    return target, Layout(spans, size)


def layer_steps(samples: int, size: int, width: int = 768, heads: int = 12) -> Pair:
    """Return steps of attention with its projections, both directions supervised."""
    torch.manual_seed(0)
    attention = BertSelfAttention(width, heads, 0.0)
    x = torch.randn(samples, size, width, requires_grad=True)
    output_gradient = torch.randn(samples, size, width)
    target, layout = target_and_layout(samples, size)
    key_mask = torch.ones(samples, 1, 1, size, dtype=torch.bool)

    def plain() -> None:
        attention.zero_grad(set_to_none=True)
        attention(x, None, key_mask)[0].backward(output_gradient)

    def supervised() -> None:
        attention.zero_grad(set_to_none=True)
        y, source, value, found = attention(x, None, key_mask)
        call = Call("layer", attention, source, Route.SDPA, False, value=value, output=found)
        losses = direct_supervision(AttentionTrace([call], layout).log_block, target)
        cost = sum(one.mean() for one in losses.values())
        torch.autograd.backward([y, cost], [output_gradient, torch.ones(())])

    return plain, supervised


def kernel_steps(samples: int, size: int, heads: int = 3, width: int = 64) -> Pair:
    """Return steps of the fused kernel alone, words to regions supervised."""
    torch.manual_seed(0)
    inputs = [torch.randn(samples, heads, size, width, requires_grad=True) for _ in range(3)]
    output_gradient = torch.randn(samples, heads, size, width)
    target, layout = target_and_layout(samples, size)
    module = torch.nn.Identity()

    def plain() -> None:
        query, key, value = (one * 1 for one in inputs)
        torch.nn.functional.scaled_dot_product_attention(query, key, value).backward(
            output_gradient
        )

    def supervised() -> None:
        query, key, value = (one * 1 for one in inputs)
        taps = tap_gradients(query, key)
        y = torch.nn.functional.scaled_dot_product_attention(taps[0].tensor, taps[1].tensor, value)
        source = QKCall(query, key, default_scale(query), taps=taps)
        call = Call("kernel", module, source, Route.SDPA, False, value=value, output=y)
        cost = text_to_regions(AttentionTrace([call], layout).log_block, target).mean()
        torch.autograd.backward([y, cost], [output_gradient, torch.ones(())])

    return plain, supervised


def model_steps(samples: int, size: int) -> Pair:
    """Return steps of the whole network."""
    text = 64 if size < 256 else 128
    network, batch, variants = (
        small_model(),
        random_batch(samples, text, size - text - 2),
        loss_functions(),
    )

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            network.zero_grad(set_to_none=True)
            variants[name](network, batch).backward()

        return run

    return step("plain"), step("direct")
