"""Section 1: a loss on rows of attention next to a fused kernel (VGP, eq. 6-8).

Three scales: one *layer* of BERT's size with its projections, the *kernel* alone, and *whole
models*: our VL-BERT, and BERT of Hugging Face with the usual alternatives: eager attention and
`output_attentions`, the same compiled, eager attention in the one layer of interest, and, on a GPU,
FlexAttention with its log-sum-exp. All supervise the same rows.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from overt import AttentionMap, Layout, Span, watch
from overt.capture.trace import AttentionTrace
from overt.losses import cross_entropy
from overt.losses.grounding import grounding_targets

from . import grounding
from .clock import Times, capture_graphs, device_clock, peak_memory, saved_bytes, time_variants
from .report import (
    Curve,
    Goal,
    Report,
    Row,
    Setting,
    at_least,
    at_most,
    gpu_row,
    missing_row,
    relative_time_row,
    speedup_row,
    value_row,
)

ROWS, VOCABULARY = 12, 1000
MIB = 2**20
CPU = "cpu"
GPU = "cuda"


@dataclass(frozen=True)
class Size:
    """Sizes of a BERT and of its input."""

    positions: int
    samples: int
    layers: int = 6
    width: int = 384
    heads: int = 12

    @property
    def text(self) -> int:
        """Number of word positions; the others are cells."""
        return 64 if 128 <= self.positions < 256 else self.positions // 4


@dataclass
class Bert:
    """A BERT of Hugging Face, tokens, and target rows on four of the cells."""

    model: Any
    tokens: Tensor
    rows: Tensor
    target: Tensor
    layout: Layout
    size: Size

    @classmethod
    def create(cls, size: Size, device: str, dtype: torch.dtype = torch.float32) -> "Bert":
        """Create random weights without dropout, the same for the same size."""
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            vocab_size=VOCABULARY,
            max_position_embeddings=size.positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,  # so that attention is not almost uniform
        )
        model = BertModel(config, add_pooling_layer=False).to(device, dtype).train()
        model.set_attn_implementation("sdpa")
        b, n, text = size.samples, size.positions, size.text
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (b, n), generator=generator)
        rows = torch.stack([torch.randperm(text, generator=generator)[:ROWS] for _ in range(b)])
        target = torch.zeros(b, 1, 1, ROWS, n - text, dtype=dtype)
        target[..., :4] = 0.25
        spans = (Span("text", (text,), slice(0, text)), Span("image", (n - text,), slice(text, n)))
        tensors = (one.to(device) for one in (tokens, rows, target))
        return cls(model, *tensors, Layout(spans, n), size)

    # --- losses

    def task(self, hidden: Tensor) -> Tensor:
        """Return the loss of a task."""
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32)).square().mean()

    def plain(self) -> Tensor:
        """Return the loss without supervision of attention."""
        return self.task(self.model(self.tokens)[0])

    @cached_property
    def watcher(self) -> watch:
        """Watcher of the model, created once, as in training: it inspects every module."""
        return watch(self.model, layout=self.layout)

    @cached_property
    def encoder_watcher(self) -> watch:
        """Watcher of the encoder."""
        return watch(self.model.encoder, layout=self.layout)

    @cached_property
    def last_layer_watcher(self) -> watch:
        """Watcher of the last layer."""
        return watch(self.model, layers=[-1], layout=self.layout)

    def ours(self) -> Tensor:
        """Watch the model and compute the rows next to the fused kernel."""
        return self.total_loss(self.watcher)

    def ours_last(self) -> Tensor:
        """Watch the last layer."""
        return self.total_loss(self.last_layer_watcher)

    def total_loss(self, watcher: watch) -> Tensor:
        """Return the loss of the task plus that of the watched rows."""
        with watcher as trace:
            loss = self.task(self.model(self.tokens)[0])
        return loss + self.attention_loss(trace)

    def attention_loss(self, trace: AttentionTrace) -> Tensor:
        """Return the cross-entropy of the rows and their target, by the library."""
        block = trace.log_block("text", "image", rows=self.rows)
        target = AttentionMap(self.target, block.keys, block.queries)
        return cross_entropy(block, target).mean()

    def encode(self) -> Tensor:
        """Run the encoder, without the model around it.

        In a CUDA graph the whole model creates a mask over all pairs of positions, and with eager
        attention it copies a number from the host, which cannot be captured. The encoder does
        neither.
        """
        found: Tensor = self.model.encoder(self.model.embeddings(input_ids=self.tokens))[0]
        return found

    def plain_encoder(self) -> Tensor:
        """Return the loss of `plain`, from the encoder."""
        return self.task(self.encode())

    def our_encoder(self) -> Tensor:
        """Return the loss of `ours`, from the encoder."""
        with self.encoder_watcher as trace:
            loss = self.task(self.encode())
        return loss + self.attention_loss(trace)

    def eager(self) -> Tensor:
        """Use `attn_implementation="eager"` and `output_attentions`, as documented."""
        with self.implementation("eager"):
            out = self.model(self.tokens, output_attentions=True)
        return self.loss_from_weights(out[0], torch.stack(out.attentions, dim=1))

    def eager_last(self) -> Tensor:
        """Use eager attention in the last layer, with a hook for its weights."""
        with self.eager_weights(self.model.encoder.layer[-1:]) as found:
            hidden = self.model(self.tokens)[0]
        return self.loss_from_weights(hidden, found[0][:, None])

    def eager_encoder(self) -> Tensor:
        """Return the loss of `eager`, from the encoder, with hooks for the weights."""
        with self.eager_weights(self.model.encoder.layer) as found:
            hidden = self.encode()
        return self.loss_from_weights(hidden, torch.stack(found, dim=1))

    @contextmanager
    def eager_weights(self, layers: Any) -> Iterator[list[Tensor]]:
        """Use eager attention in some layers and collect their weights in a list."""
        found: list[Tensor] = []
        modules = [layer.attention.self for layer in layers]
        before = [module.config for module in modules]
        handles = []
        for module in modules:
            module.config = copy.copy(module.config)
            module.config._attn_implementation = "eager"
            hook = module.register_forward_hook(lambda *args: found.append(args[2][1]))
            handles.append(hook)
        try:
            yield found
        finally:
            for module, handle, config in zip(modules, handles, before, strict=True):
                handle.remove()
                module.config = config

    def loss_from_weights(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Compute the same loss from whole maps."""
        logs = self.logs(weights)
        return self.task(hidden) - (self.target * logs).sum(dim=-1).mean()

    def logs(self, weights: Tensor) -> Tensor:
        """Return the log weights of rows and keys, renormalized: `[b l h s r]`."""
        b, l, h, _, n = weights.shape
        at = self.rows[:, None, None, :, None].expand(b, l, h, ROWS, n)
        part = weights.gather(3, at)[..., self.size.text :]
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        return (part / part.sum(dim=-1, keepdim=True)).clamp_min(1e-30).log()

    # --- steps

    @contextmanager
    def implementation(self, name: str) -> Iterator[None]:
        """Switch the attention implementation, then back to the fused one."""
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation("sdpa")

    def clear(self) -> None:
        """Remove the gradients."""
        self.model.zero_grad(set_to_none=True)

    def step(self, loss: Callable[[], Tensor]) -> Callable[[], None]:
        """Return a forward and backward step; in bfloat16 on a GPU."""
        kind = self.tokens.device.type

        def run() -> None:
            self.clear()
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                value = loss()
            value.backward()

        return run

    def gradients(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        """Return the gradients of all parameters that have one."""
        self.clear()
        loss().backward()
        found = [one.grad.clone() for one in self.model.parameters() if one.grad is not None]
        self.clear()
        return found


# --- agreement


def check_agreement(report: Report) -> None:
    """Compare blocks and gradients with eager weights, at three precisions."""
    small = Size(96, 2, layers=2, width=96, heads=4)
    for dtype, name, goal in ((torch.float64, "float64", 1e-12), (torch.float32, "float32", 1e-5)):
        bert = Bert.create(small, CPU, dtype)
        difference = _max_difference(
            *(bert.gradients(variant) for variant in (bert.ours, bert.eager))
        )
        difference = max(difference, float((_block(bert) - _block_eager(bert)).abs().max()))
        assert difference < goal, f"rows and eager weights differ by {difference} in {name}"
        report.add(
            value_row(
                f"difference from eager, {name}", "largest difference", difference, at_most(goal)
            )
        )
        last = _max_difference(
            *(bert.gradients(variant) for variant in (bert.ours_last, bert.eager_last))
        )
        assert last < goal, f"rows of the last layer and eager weights differ by {last} in {name}"
    one = Size(96, 4, layers=1, width=96, heads=4)
    low_precision, oracle = (
        Bert.create(one, CPU, torch.bfloat16),
        Bert.create(one, CPU, torch.float64),
    )
    oracle.model.load_state_dict(low_precision.model.state_dict())  # the same rounded weights
    truth = _block(oracle)
    errors = [
        float((variant(low_precision).double() - truth).abs().mean())
        for variant in (_block, _block_eager)
    ]
    report.add(
        value_row(
            "error in bfloat16 over that of eager weights",
            "ratio of mean errors",
            errors[0] / errors[1],
            at_most(1.0),
        )
    )


@torch.no_grad()
def _block(bert: Bert) -> Tensor:
    with watch(bert.model, layout=bert.layout) as trace:
        bert.model(bert.tokens)
    return trace.log_block("text", "image", rows=bert.rows).weights


@torch.no_grad()
def _block_eager(bert: Bert) -> Tensor:
    with bert.implementation("eager"):
        found = bert.model(bert.tokens, output_attentions=True).attentions
    return bert.logs(torch.stack(found, dim=1)).exp()


def _max_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


# --- layers, kernels and our own model


def compare_small(setting: Setting, report: Report) -> None:
    """Compare one layer, the bare kernel and VL-BERT with and without supervision."""
    difference = grounding.gradient_difference(
        grounding.small_model(), grounding.random_batch(2, 24, 10)
    )
    assert difference < 1e-10, f"gradients by blocks differ by {difference}"
    sizes = {164: 1} if setting.quick else grounding.SIZES
    cases: dict[str, Callable[[], grounding.Pair]] = {}
    for size, samples in sizes.items():
        cases[f"layer {size}"] = partial(grounding.layer_steps, samples, size)
        cases[f"kernel {size}"] = partial(grounding.kernel_steps, samples, size)
    for size in (164,) if setting.quick else (164, 512):
        cases[f"model {size}"] = partial(grounding.model_steps, 4 if size < 256 else 2, size)
    for name, make in cases.items():
        plain, supervised = make()
        rounds = (3 if name.startswith("kernel") else 2) * setting.rounds
        limit = (
            28.0 if name.startswith("layer") else 14.0
        )  # differences of hundredths need more rounds
        times = time_variants({"supervised": supervised, "plain": plain}, rounds, limit=limit)
        goal = grounding.GOALS.get(name)
        label = f"{name.replace('model', 'VL-BERT')} positions"
        bound = None if goal is None else at_most(goal, CPU)
        report.add(relative_time_row(label, times, "supervised", "plain", bound))
    compare_losses(setting, report)


def compare_losses(setting: Setting, report: Report) -> None:
    """Report time and saved memory of other supervision variants of VL-BERT."""
    sizes = (1, 24, 10) if setting.quick else (4, 64, 98)
    network, batch = grounding.small_model(), grounding.random_batch(*sizes)
    variants = grounding.loss_functions()
    names = ("plain", "direct, watched", "whole maps", "rollout, every layer",
             "rollout, last layer by rows")  # fmt: skip

    def step(name: str) -> None:
        network.zero_grad(set_to_none=True)
        variants[name](network, batch).backward()

    runs = {name: partial(step, name) for name in names}
    times = time_variants(runs, min(4, setting.rounds), limit=20.0)
    saved = {name: saved_bytes(partial(variants[name], network, batch)) for name in names}
    for name in names[1:]:
        label = "VL-BERT 164"
        more = saved[name] / saved["plain"]
        report.add(
            relative_time_row(f"{label}: {name}", times, name, "plain"),
            value_row(f"{label}: saved for backward, {name}", "times plain", more, None),
        )


# --- BERT of Hugging Face


def compare_bert(size: Size, setting: Setting, report: Report) -> None:
    """Compare a whole model with the usual alternatives; on a GPU also in CUDA graphs."""
    bert = Bert.create(size, setting.device)
    name = f"BERT {size.positions} x {size.samples}"
    variants = {
        "plain": bert.step(bert.plain),
        "ours": bert.step(bert.ours),
        "eager weights": bert.step(bert.eager),
        "ours, last layer": bert.step(bert.ours_last),
        "eager, last layer": bert.step(bert.eager_last),
    }
    if setting.gpu:
        report.add(*_memory(name, variants))
    elif not setting.quick:
        saved = {variant: saved_bytes(loss) / MIB for variant, loss in _losses(bert).items()}
        more, theirs = (saved[variant] / saved["plain"] for variant in ("ours", "eager"))
        label = f"{name}: saved for backward"
        report.add(
            value_row(label, "ours / plain", more, at_most(1.03)),
            value_row(label, "eager / plain", theirs, None),
        )
    times = time_variants(
        variants, setting.rounds, device_clock(setting.device), limit=5.0 if setting.gpu else 30.0
    )
    report.add(*_eager_rows(name, times, None if setting.gpu else size.positions))
    if setting.gpu:
        _assert_same_losses(bert)
        encoder_steps = {
            "plain": bert.step(bert.plain_encoder),
            "ours": bert.step(bert.our_encoder),
            "eager weights": bert.step(bert.eager_encoder),
        }
        time_graphs(name, encoder_steps, "ours", gpu_goal(size.positions), setting, report)


@torch.no_grad()
def _assert_same_losses(bert: Bert) -> None:
    """Assert that the encoder gives the losses of the model."""
    pairs = (
        (bert.plain, bert.plain_encoder),
        (bert.ours, bert.our_encoder),
        (bert.eager, bert.eager_encoder),
    )
    for one, two in pairs:
        difference = float((one() - two()).abs())
        assert difference < 1e-3, f"the loss of the encoder differs by {difference}"


def bert_sizes(setting: Setting) -> tuple[Size, ...]:
    """Return the sizes: BERT-base in bfloat16 on a GPU, a small BERT on a CPU."""
    if setting.quick:
        return (Size(96, 2, layers=2, width=96, heads=4),)
    if setting.gpu:
        base_model = {"layers": 12, "width": 768}
        return tuple(Size(n, b, **base_model) for n, b in ((164, 64), (512, 32), (1024, 16)))
    return Size(164, 4), Size(512, 2)


def gpu_goal(positions: int) -> Goal:
    """Return the goal of a supervised step of a whole model on a GPU."""
    return at_most(1.10 if positions < 512 else 1.05, GPU)


def _losses(bert: Bert) -> dict[str, Callable[[], Tensor]]:
    return {"plain": bert.plain, "ours": bert.ours, "eager": bert.eager}


def _eager_rows(name: str, times: Times, positions: int | None) -> list[Row]:
    """Return rows of eager steps; goals on a GPU apply to the CUDA graphs instead."""
    goal = None if positions is None else at_most(1.10 if positions < 512 else 1.05)
    least = None if positions is None else at_least(1.0)
    return [
        relative_time_row(f"{name}: all layers", times, "ours", "plain", goal),
        speedup_row(f"{name}: all layers", times, "ours", "eager weights", least),
        relative_time_row(f"{name}: last layer", times, "ours, last layer", "plain"),
        speedup_row(f"{name}: last layer", times, "ours, last layer", "eager, last layer"),
    ]


def _memory(name: str, variants: dict[str, Callable[[], None]]) -> list[Row]:
    """Report peak memory on a GPU."""
    for variant in variants.values():
        variant()
    peaks = {variant: peak_memory(run) for variant, run in variants.items()}
    return [
        value_row(
            f"{name}: peak memory, {variant}",
            "times plain",
            peaks[variant] / peaks["plain"],
            at_most(1.03, GPU) if variant == "ours" else None,
        )
        for variant in ("ours", "eager weights")
    ]


def time_graphs(
    name: str,
    steps: dict[str, Callable[[], None]],
    ours: str,
    goal: Goal,
    setting: Setting,
    report: Report,
) -> None:
    """Time the same steps in CUDA graphs, which do not wait for Python."""
    errors: dict[str, str] = {}
    variants = capture_graphs(steps, errors)
    times = time_variants(variants, 2 * setting.rounds, device_clock(setting.device), limit=5.0)
    label = f"{name}, CUDA graph"
    for variant in steps:
        if variant == "plain":
            continue
        variant_goal = goal if variant == ours else None
        failures = [errors[one] for one in (variant, "plain") if one in errors]
        row = (
            missing_row(label, failures[0], variant_goal)
            if failures
            else relative_time_row(label, times, variant, "plain", variant_goal)
        )
        report.add(row)


# --- FlexAttention


def flex(setting: Setting, report: Report) -> None:
    """Compare rows with FlexAttention, which returns its log-sum-exp."""
    label = "kernel 1024: compared with FlexAttention"
    if not setting.gpu:
        why = "needs a GPU: on a CPU FlexAttention has no backward pass and no log-sum-exp"
        report.add(missing_row(label, why))
        return
    report.part(label, lambda: report.add(_flex(label, setting)))


def _flex(label: str, setting: Setting) -> Row:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    b, h, n, d, text = 8, 12, 1024, 64, 256
    generator = torch.Generator(setting.device).manual_seed(0)
    shape = (b, h, n, d)
    inputs = [
        torch.randn(shape, generator=generator, device=setting.device, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    for one in inputs:
        one.requires_grad_()
    query, key, value = inputs
    rows = torch.arange(ROWS, device=setting.device) * 7
    fused = torch.compile(flex_attention)

    def theirs() -> Tensor:
        out, more = fused(query, key, value, return_aux=AuxRequest(lse=True))
        scores = query[:, :, rows].float() @ key[:, :, text:].float().mT / d**0.5
        weights = (scores - more.lse[:, :, rows, None].float()).exp()
        logs = (weights / weights.sum(dim=-1, keepdim=True)).log()
        return out.float().square().mean() - logs[..., :4].mean()

    def ours() -> Tensor:
        out = nn.functional.scaled_dot_product_attention(query, key, value)
        scores = query[:, :, rows].float() @ key[:, :, text:].float().mT / d**0.5
        return out.float().square().mean() - scores.log_softmax(dim=-1)[..., :4].mean()

    difference = float((ours() - theirs()).abs())
    assert difference < 2e-2, f"the loss differs from FlexAttention by {difference}"

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for one in inputs:
                one.grad = None
            loss().backward()

        return run

    times = time_variants({"ours": step(ours), "FlexAttention": step(theirs)}, 4 * setting.rounds,
                 device_clock(setting.device))  # fmt: skip
    return speedup_row(label, times, "ours", "FlexAttention")


# --- growth


def growth_curves(setting: Setting) -> list[Curve]:
    """Measure time and memory of a step for growing sequences."""
    usual = (64, 128, 256, 512, 1024) if not setting.gpu else (128, 512, 1024, 2048)
    sizes = (64, 128) if setting.quick else usual
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "ours", "eager weights")}
    mebibytes: dict[str, list[float]] = {name: [] for name in seconds}
    for n in sizes:
        size = Size(n, 8, 12, 768) if setting.gpu else Size(n, 2, 2)
        bert = Bert.create(size, setting.device)
        losses = dict(zip(seconds, (bert.plain, bert.ours, bert.eager), strict=True))
        steps = {name: bert.step(loss) for name, loss in losses.items()}
        limit = 4.0 if setting.gpu else 12.0
        times = time_variants(steps, setting.size(5, 2), device_clock(setting.device), limit=limit)
        for name, loss in losses.items():
            seconds[name].append(times.spread(name).median)
            mebibytes[name].append(
                (peak_memory(steps[name]) if setting.gpu else saved_bytes(loss)) / MIB
            )
        del bert, losses, steps
    label = "12 layers of BERT-base, batch 8" if setting.gpu else "2 layers of 384, batch 2"
    numbers = [float(n) for n in sizes]
    memory = "peak MiB" if setting.gpu else "MiB saved for backward"
    return [
        Curve(f"A supervised step ({label})", "tokens", "seconds", numbers, seconds),
        Curve(f"Memory of a supervised step ({label})", "tokens", memory, numbers, mebibytes),
    ]


def section(setting: Setting, report: Report) -> None:
    """Check agreement, then measure all parts."""
    torch.set_num_threads(1)
    check_agreement(report)
    if setting.gpu:
        for size in vlbert_sizes(setting):
            report.part(f"VL-BERT {size[0]}", partial(vlbert, *size, setting, report))
    else:
        compare_small(setting, report)
        report.add(
            gpu_row("whole model, H200, 164 positions", gpu_goal(164)),
            gpu_row("whole model, H200, 512 positions", gpu_goal(512)),
            gpu_row("whole model, H200, peak memory over plain", at_most(1.03, GPU)),
        )
    for one in bert_sizes(setting):
        report.part(f"BERT {one.positions}", partial(compare_bert, one, setting, report))
    report.part("growth", lambda: report.curves.extend(growth_curves(setting)))


# --- our model on a GPU


def vlbert_sizes(setting: Setting) -> tuple[tuple[int, int], ...]:
    """Return positions and samples."""
    return ((96, 4),) if setting.quick else ((164, 64), (512, 32), (1024, 16))


class VLBertCase:
    """Steps of our VL-BERT on a GPU, in bfloat16; target rows are known in advance."""

    def __init__(self, positions: int, samples: int, setting: Setting, layers: int = 12) -> None:
        text = min(64 if positions < 256 else 128, positions // 2)
        network = grounding.small_model() if setting.quick else grounding.base_model(layers)
        self.network = network.to(setting.device)
        batch = grounding.random_batch(samples, text, positions - text - 2)
        self.batch = batch.to(setting.device)
        self.kind = torch.device(setting.device).type
        assert self.batch.target is not None
        ready = grounding_targets(self.batch.target)  # in advance, as for data: not in a step
        self.variants = grounding.loss_functions(lambda _: ready)

    def step(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[], None]:
        """Return a forward and backward step."""

        def run() -> None:
            self.network.zero_grad(set_to_none=True)
            with torch.autocast(self.kind, torch.bfloat16):
                value = loss(self.network, self.batch)
            value.backward()

        return run


def vlbert(positions: int, samples: int, setting: Setting, report: Report) -> None:
    """Measure our VL-BERT of BERT's size: eager and in a CUDA graph, with its memory."""
    case = VLBertCase(positions, samples, setting)
    name = f"VL-BERT {positions} x {samples}"
    kinds = ("plain", "direct", "direct, watched", "whole maps", "rollout, last layer by rows")
    steps = {kind: case.step(case.variants[kind]) for kind in kinds}
    eager = {
        **steps,
        "direct, rows found in the step": case.step(grounding.loss_functions()["direct"]),
    }
    for run_step in eager.values():
        run_step()
    peaks = {kind: peak_memory(run_step) for kind, run_step in eager.items()}
    times = time_variants(eager, setting.rounds, device_clock(setting.device), limit=5.0)
    for kind in eager:
        if kind != "plain":
            report.add(relative_time_row(f"{name}, eager", times, kind, "plain"))
    for kind in ("direct", "whole maps"):
        more = peaks[kind] / peaks["plain"]
        goal = at_most(1.03, GPU) if kind == "direct" else None
        report.add(value_row(f"{name}: peak memory, {kind}", "times plain", more, goal))
    time_graphs(name, steps, "direct", gpu_goal(positions), setting, report)
