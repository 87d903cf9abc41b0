"""Section 1: a loss on some rows of attention beside a fused kernel (VGP, eq. 6-8).

Three scales. One *layer* of BERT's size with its projections, the *kernel* alone, and *whole
models*: our VL-BERT, and BERT of Hugging Face with what its users do instead: eager attention and
`output_attentions`, the same compiled, eager attention in the one layer that is wanted, and, where
there is a card, FlexAttention with the sums that it can return. All supervise the same rows.
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
from overt.capture.seen import Seen
from overt.supervise import cross_entropy
from overt.supervise.grounding import aims

from . import grounding
from .clock import Times, kept, peak, race, recorded, timer
from .report import (
    Curve,
    Goal,
    Report,
    Row,
    Setting,
    absent,
    at_least,
    at_most,
    dearer,
    exact,
    faster,
    needs,
)

ROWS, VOCABULARY = 12, 1000
MIB = 2**20
CPU = "cpu"
GPU = "cuda"


@dataclass(frozen=True)
class Size:
    """A BERT and what it is given."""

    positions: int
    samples: int
    layers: int = 6
    width: int = 384
    heads: int = 12

    @property
    def text(self) -> int:
        """How many of the positions are words; the others are cells."""
        return 64 if 128 <= self.positions < 256 else self.positions // 4


@dataclass
class Bert:
    """A BERT of Hugging Face, tokens, and the rows that should look at four of the cells."""

    model: Any
    tokens: Tensor
    rows: Tensor
    target: Tensor
    layout: Layout
    size: Size

    @classmethod
    def of(cls, size: Size, device: str, dtype: torch.dtype = torch.float32) -> "Bert":
        """Random weights without dropout, the same for the same size."""
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
            initializer_range=0.1,  # so that attention is not all but even
        )
        model = BertModel(config, add_pooling_layer=False).to(device, dtype).train()
        model.set_attn_implementation("sdpa")
        b, n, text = size.samples, size.positions, size.text
        drawn = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (b, n), generator=drawn)
        rows = torch.stack([torch.randperm(text, generator=drawn)[:ROWS] for _ in range(b)])
        target = torch.zeros(b, 1, 1, ROWS, n - text, dtype=dtype)
        target[..., :4] = 0.25
        spans = (Span("text", (text,), slice(0, text)), Span("image", (n - text,), slice(text, n)))
        there = (one.to(device) for one in (tokens, rows, target))
        return cls(model, *there, Layout(spans, n), size)

    # --- losses

    def task(self, hidden: Tensor) -> Tensor:
        """Something to learn besides."""
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32)).square().mean()

    def plain(self) -> Tensor:
        """A step without a loss on attention."""
        return self.task(self.model(self.tokens)[0])

    @cached_property
    def watcher(self) -> watch:
        """Made once, as for a training run: it looks at every module of the model."""
        return watch(self.model, layout=self.layout)

    @cached_property
    def of_encoder(self) -> watch:
        """The same for the encoder alone."""
        return watch(self.model.encoder, layout=self.layout)

    @cached_property
    def of_last(self) -> watch:
        """The same for the last layer alone."""
        return watch(self.model, layers=[-1], layout=self.layout)

    def ours(self) -> Tensor:
        """The model is watched, and the rows are computed beside the fused kernel."""
        return self.beside(self.watcher)

    def ours_last(self) -> Tensor:
        """The last layer alone is watched."""
        return self.beside(self.of_last)

    def beside(self, watcher: watch) -> Tensor:
        """The loss of a step, and that of the rows that are watched."""
        with watcher as seen:
            loss = self.task(self.model(self.tokens)[0])
        return loss + self.looked(seen)

    def looked(self, seen: Seen) -> Tensor:
        """How far the rows are from their target, by the loss of the library."""
        block = seen.log_block("text", "image", rows=self.rows)
        wanted = AttentionMap(self.target, block.keys, block.queries)
        return cross_entropy(block, wanted).mean()

    def encoded(self) -> Tensor:
        """What the encoder makes of the tokens, without the model around it.

        Recorded, the whole model makes a mask over all pairs of positions, and with eager attention
        copies a number from the host, which cannot be recorded: this leaves out both.
        """
        found: Tensor = self.model.encoder(self.model.embeddings(input_ids=self.tokens))[0]
        return found

    def plain_encoder(self) -> Tensor:
        """`plain` by way of the encoder."""
        return self.task(self.encoded())

    def our_encoder(self) -> Tensor:
        """`ours` by way of the encoder."""
        with self.of_encoder as seen:
            loss = self.task(self.encoded())
        return loss + self.looked(seen)

    def eager(self) -> Tensor:
        """`attn_implementation="eager"` and `output_attentions`, as the manual says."""
        with self.implementation("eager"):
            out = self.model(self.tokens, output_attentions=True)
        return self.of_weights(out[0], torch.stack(out.attentions, dim=1))

    def eager_last(self) -> Tensor:
        """Eager attention in the last layer alone, its weights caught by a hook."""
        with self.caught(self.model.encoder.layer[-1:]) as found:
            hidden = self.model(self.tokens)[0]
        return self.of_weights(hidden, found[0][:, None])

    def eager_encoder(self) -> Tensor:
        """`eager` by way of the encoder, its weights caught by hooks."""
        with self.caught(self.model.encoder.layer) as found:
            hidden = self.encoded()
        return self.of_weights(hidden, torch.stack(found, dim=1))

    @contextmanager
    def caught(self, layers: Any) -> Iterator[list[Tensor]]:
        """Eager attention in some layers, whose weights are put into a list."""
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

    def of_weights(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """The same loss out of whole maps."""
        logs = self.logs(weights)
        return self.task(hidden) - (self.target * logs).sum(dim=-1).mean()

    def logs(self, weights: Tensor) -> Tensor:
        """Rows and keys that count, renormalised: logarithms of `[b l h s r]`."""
        b, l, h, _, n = weights.shape
        at = self.rows[:, None, None, :, None].expand(b, l, h, ROWS, n)
        part = weights.gather(3, at)[..., self.size.text :]
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        return (part / part.sum(dim=-1, keepdim=True)).clamp_min(1e-30).log()

    # --- steps

    @contextmanager
    def implementation(self, name: str) -> Iterator[None]:
        """Another way to attend, and the fused one again afterwards."""
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation("sdpa")

    def clear(self) -> None:
        """No gradients."""
        self.model.zero_grad(set_to_none=True)

    def step(self, loss: Callable[[], Tensor]) -> Callable[[], None]:
        """Forward and backward; in bfloat16 where there is a card."""
        kind = self.tokens.device.type

        def run() -> None:
            self.clear()
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                value = loss()
            value.backward()

        return run

    def gradients(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        """Of all parameters that have one."""
        self.clear()
        loss().backward()
        found = [one.grad.clone() for one in self.model.parameters() if one.grad is not None]
        self.clear()
        return found


# --- are they the same?


def agreement(report: Report) -> None:
    """Blocks and gradients held against eager weights, at three precisions."""
    small = Size(96, 2, layers=2, width=96, heads=4)
    for dtype, name, goal in ((torch.float64, "float64", 1e-12), (torch.float32, "float32", 1e-5)):
        bert = Bert.of(small, CPU, dtype)
        apart = _apart(*(bert.gradients(way) for way in (bert.ours, bert.eager)))
        apart = max(apart, float((_block(bert) - _block_eager(bert)).abs().max()))
        assert apart < goal, f"rows and eager weights differ by {apart} in {name}"
        report.add(exact(f"off eager, {name}", "largest difference", apart, at_most(goal)))
        last = _apart(*(bert.gradients(way) for way in (bert.ours_last, bert.eager_last)))
        assert last < goal, f"rows of the last layer and eager weights differ by {last} in {name}"
    one = Size(96, 4, layers=1, width=96, heads=4)
    rough, oracle = Bert.of(one, CPU, torch.bfloat16), Bert.of(one, CPU, torch.float64)
    oracle.model.load_state_dict(rough.model.state_dict())  # the same rounded weights
    truth = _block(oracle)
    errors = [float((way(rough).double() - truth).abs().mean()) for way in (_block, _block_eager)]
    report.add(
        exact(
            "error in bfloat16 over that of eager weights",
            "ratio of mean errors",
            errors[0] / errors[1],
            at_most(1.0),
        )
    )


@torch.no_grad()
def _block(bert: Bert) -> Tensor:
    with watch(bert.model, layout=bert.layout) as seen:
        bert.model(bert.tokens)
    return seen.log_block("text", "image", rows=bert.rows).weights


@torch.no_grad()
def _block_eager(bert: Bert) -> Tensor:
    with bert.implementation("eager"):
        found = bert.model(bert.tokens, output_attentions=True).attentions
    return bert.logs(torch.stack(found, dim=1)).exp()


def _apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


# --- layers, kernels and our own model


def alone(setting: Setting, report: Report) -> None:
    """One layer, the bare kernel, and VL-BERT: with supervision and without, by goals."""
    difference = grounding.apart(grounding.net(), grounding.batch_of(2, 24, 10))
    assert difference < 1e-10, f"gradients by blocks are off by {difference}"
    sizes = {164: 1} if setting.quick else grounding.SIZES
    cases: dict[str, Callable[[], grounding.Pair]] = {}
    for size, samples in sizes.items():
        cases[f"layer {size}"] = partial(grounding.layer, samples, size)
        cases[f"kernel {size}"] = partial(grounding.kernel, samples, size)
    for size in (164,) if setting.quick else (164, 512):
        cases[f"model {size}"] = partial(grounding.model, 4 if size < 256 else 2, size)
    for name, make in cases.items():
        plain, taught = make()
        rounds = (3 if name.startswith("kernel") else 2) * setting.rounds
        limit = 28.0 if name.startswith("layer") else 14.0  # of hundredths: more rounds say more
        times = race({"supervised": taught, "plain": plain}, rounds, limit=limit)
        goal = grounding.GOALS.get(name)
        what = f"{name.replace('model', 'VL-BERT')} positions"
        wanted = None if goal is None else at_most(goal, CPU)
        report.add(dearer(what, times, "supervised", "plain", wanted))
    variants(setting, report)


def variants(setting: Setting, report: Report) -> None:
    """Other ways to supervise VL-BERT: how long they take, and what they keep."""
    sizes = (1, 24, 10) if setting.quick else (4, 64, 98)
    net, batch = grounding.net(), grounding.batch_of(*sizes)
    ways = grounding.supervised()
    names = ("plain", "direct, watched", "whole maps", "rollout, every layer",
             "rollout, last layer by rows")  # fmt: skip

    def step(name: str) -> None:
        net.zero_grad(set_to_none=True)
        ways[name](net, batch).backward()

    runs = {name: partial(step, name) for name in names}
    times = race(runs, min(4, setting.rounds), limit=20.0)
    held = {name: kept(partial(ways[name], net, batch)) for name in names}
    for name in names[1:]:
        what = "VL-BERT 164"
        more = held[name] / held["plain"]
        report.add(
            dearer(f"{what}: {name}", times, name, "plain"),
            exact(f"{what}: kept for backward, {name}", "times plain", more, None),
        )


# --- BERT of Hugging Face


def hugging_face(size: Size, setting: Setting, report: Report) -> None:
    """A whole model, beside what users do instead; as graphs of the card too where there is one."""
    bert = Bert.of(size, setting.device)
    name = f"BERT {size.positions} x {size.samples}"
    ways = {
        "plain": bert.step(bert.plain),
        "ours": bert.step(bert.ours),
        "eager weights": bert.step(bert.eager),
        "ours, last layer": bert.step(bert.ours_last),
        "eager, last layer": bert.step(bert.eager_last),
    }
    if setting.gpu:
        report.add(*_memory(name, ways))
    elif not setting.quick:
        saved = {way: kept(loss) / MIB for way, loss in _losses(bert).items()}
        more, theirs = (saved[way] / saved["plain"] for way in ("ours", "eager"))
        what = f"{name}: kept for backward"
        report.add(
            exact(what, "ours / plain", more, at_most(1.03)),
            exact(what, "eager / plain", theirs, None),
        )
    times = race(ways, setting.rounds, timer(setting.device), limit=5.0 if setting.gpu else 30.0)
    report.add(*_beside(name, times, None if setting.gpu else size.positions))
    if setting.gpu:
        _same(bert)
        some = {
            "plain": bert.step(bert.plain_encoder),
            "ours": bert.step(bert.our_encoder),
            "eager weights": bert.step(bert.eager_encoder),
        }
        replayed(name, some, "ours", goal_of(size.positions), setting, report)


@torch.no_grad()
def _same(bert: Bert) -> None:
    """Assert that the encoder alone gives the losses of the model."""
    pairs = (
        (bert.plain, bert.plain_encoder),
        (bert.ours, bert.our_encoder),
        (bert.eager, bert.eager_encoder),
    )
    for one, two in pairs:
        apart = float((one() - two()).abs())
        assert apart < 1e-3, f"the encoder alone has another loss, by {apart}"


def sizes_of(setting: Setting) -> tuple[Size, ...]:
    """What is measured: BERT-base in bfloat16 on a card, a small BERT on a CPU."""
    if setting.quick:
        return (Size(96, 2, layers=2, width=96, heads=4),)
    if setting.gpu:
        base = {"layers": 12, "width": 768}
        return tuple(Size(n, b, **base) for n, b in ((164, 64), (512, 32), (1024, 16)))
    return Size(164, 4), Size(512, 2)


def goal_of(positions: int) -> Goal:
    """How many times as long a supervised step of a whole model may take on a card."""
    return at_most(1.10 if positions < 512 else 1.05, GPU)


def _losses(bert: Bert) -> dict[str, Callable[[], Tensor]]:
    return {"plain": bert.plain, "ours": bert.ours, "eager": bert.eager}


def _beside(name: str, times: Times, positions: int | None) -> list[Row]:
    """Eager steps; on a card, where they wait for Python, recorded ones are held to the goal."""
    wanted = None if positions is None else at_most(1.10 if positions < 512 else 1.05)
    least = None if positions is None else at_least(1.0)
    return [
        dearer(f"{name}: all layers", times, "ours", "plain", wanted),
        faster(f"{name}: all layers", times, "ours", "eager weights", least),
        dearer(f"{name}: last layer", times, "ours, last layer", "plain"),
        faster(f"{name}: last layer", times, "ours, last layer", "eager, last layer"),
    ]


def _memory(name: str, ways: dict[str, Callable[[], None]]) -> list[Row]:
    """The most that is held at once, on a card."""
    for way in ways.values():
        way()
    held = {way: peak(run) for way, run in ways.items()}
    return [
        exact(
            f"{name}: peak memory, {way}",
            "times plain",
            held[way] / held["plain"],
            at_most(1.03, GPU) if way == "ours" else None,
        )
        for way in ("ours", "eager weights")
    ]


def replayed(
    name: str,
    steps: dict[str, Callable[[], None]],
    ours: str,
    goal: Goal,
    setting: Setting,
    report: Report,
) -> None:
    """The same steps, each as one graph of the card, so that nothing waits for Python."""
    broken: dict[str, str] = {}
    ways = recorded(steps, broken)
    times = race(ways, 2 * setting.rounds, timer(setting.device), limit=5.0)
    what = f"{name}, recorded"
    for way in steps:
        if way == "plain":
            continue
        wanted = goal if way == ours else None
        gone = [broken[one] for one in (way, "plain") if one in broken]
        row = absent(what, gone[0], wanted) if gone else dearer(what, times, way, "plain", wanted)
        report.add(row)


# --- FlexAttention


def flex(setting: Setting, report: Report) -> None:
    """Rows beside FlexAttention, which returns the logarithms of its sums."""
    what = "kernel 1024: beside FlexAttention and its sums"
    if not setting.gpu:
        why = "needs a GPU: on a CPU FlexAttention has no backward pass and no sums"
        report.add(absent(what, why))
        return
    report.part(what, lambda: report.add(_flex(what, setting)))


def _flex(what: str, setting: Setting) -> Row:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    b, h, n, d, text = 8, 12, 1024, 64, 256
    drawn = torch.Generator(setting.device).manual_seed(0)
    shape = (b, h, n, d)
    given = [
        torch.randn(shape, generator=drawn, device=setting.device, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    for one in given:
        one.requires_grad_()
    query, key, value = given
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

    apart = float((ours() - theirs()).abs())
    assert apart < 2e-2, f"FlexAttention gives another loss, by {apart}"

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for one in given:
                one.grad = None
            loss().backward()

        return run

    times = race({"ours": step(ours), "FlexAttention": step(theirs)}, 4 * setting.rounds,
                 timer(setting.device))  # fmt: skip
    return faster(what, times, "ours", "FlexAttention")


# --- growth


def growth(setting: Setting) -> list[Curve]:
    """Time and memory of a step as sequences grow."""
    usual = (64, 128, 256, 512, 1024) if not setting.gpu else (128, 512, 1024, 2048)
    sizes = (64, 128) if setting.quick else usual
    taken: dict[str, list[float]] = {name: [] for name in ("plain", "ours", "eager weights")}
    held: dict[str, list[float]] = {name: [] for name in taken}
    for n in sizes:
        size = Size(n, 8, 12, 768) if setting.gpu else Size(n, 2, 2)
        bert = Bert.of(size, setting.device)
        losses = dict(zip(taken, (bert.plain, bert.ours, bert.eager), strict=True))
        steps = {name: bert.step(loss) for name, loss in losses.items()}
        limit = 4.0 if setting.gpu else 12.0
        times = race(steps, setting.some(5, 2), timer(setting.device), limit=limit)
        for name, loss in losses.items():
            taken[name].append(times.of(name).median)
            held[name].append((peak(steps[name]) if setting.gpu else kept(loss)) / MIB)
        del bert, losses, steps
    what = "12 layers of BERT-base, batch 8" if setting.gpu else "2 layers of 384, batch 2"
    numbers = [float(n) for n in sizes]
    memory = "peak MiB" if setting.gpu else "MiB kept for the backward pass"
    return [
        Curve(f"A supervised step ({what})", "tokens", "seconds", numbers, taken),
        Curve(f"Memory of a supervised step ({what})", "tokens", memory, numbers, held),
    ]


def section(setting: Setting, report: Report) -> None:
    """All of it; agreement first."""
    torch.set_num_threads(1)
    agreement(report)
    if setting.gpu:
        for size in own_sizes(setting):
            report.part(f"VL-BERT {size[0]}", partial(own, *size, setting, report))
    else:
        alone(setting, report)
        report.add(
            needs("whole model, H200, 164 positions", goal_of(164)),
            needs("whole model, H200, 512 positions", goal_of(512)),
            needs("whole model, H200, peak memory over plain", at_most(1.03, GPU)),
        )
    for one in sizes_of(setting):
        report.part(f"BERT {one.positions}", partial(hugging_face, one, setting, report))
    report.part("growth", lambda: report.curves.extend(growth(setting)))


# --- our own model on a card


def own_sizes(setting: Setting) -> tuple[tuple[int, int], ...]:
    """Positions and samples."""
    return ((96, 4),) if setting.quick else ((164, 64), (512, 32), (1024, 16))


class Own:
    """Steps of our VL-BERT on a card, in bfloat16; which rows are supervised is known before."""

    def __init__(self, positions: int, samples: int, setting: Setting, layers: int = 12) -> None:
        text = min(64 if positions < 256 else 128, positions // 2)
        net = grounding.net() if setting.quick else grounding.base(layers)
        self.net = net.to(setting.device)
        batch = grounding.batch_of(samples, text, positions - text - 2)
        self.batch = batch.to(setting.device)
        self.kind = torch.device(setting.device).type
        assert self.batch.target is not None
        ready = aims(self.batch.target)  # as data is: not in a step
        self.ways = grounding.supervised(lambda _: ready)

    def step(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[], None]:
        """Forward and backward."""

        def run() -> None:
            self.net.zero_grad(set_to_none=True)
            with torch.autocast(self.kind, torch.bfloat16):
                value = loss(self.net, self.batch)
            value.backward()

        return run


def own(positions: int, samples: int, setting: Setting, report: Report) -> None:
    """Our VL-BERT of BERT's size: as it is and as a graph of the card, with its memory."""
    case = Own(positions, samples, setting)
    name = f"VL-BERT {positions} x {samples}"
    kinds = ("plain", "direct", "direct, watched", "whole maps", "rollout, last layer by rows")
    steps = {kind: case.step(case.ways[kind]) for kind in kinds}
    eager = {**steps, "direct, rows found in the step": case.step(grounding.supervised()["direct"])}
    for once in eager.values():
        once()
    held = {kind: peak(once) for kind, once in eager.items()}
    times = race(eager, setting.rounds, timer(setting.device), limit=5.0)
    for kind in eager:
        if kind != "plain":
            report.add(dearer(f"{name}, eager", times, kind, "plain"))
    for kind in ("direct", "whole maps"):
        more = held[kind] / held["plain"]
        goal = at_most(1.03, GPU) if kind == "direct" else None
        report.add(exact(f"{name}: peak memory, {kind}", "times plain", more, goal))
    replayed(name, steps, "direct", goal_of(positions), setting, report)
