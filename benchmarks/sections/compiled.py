"""Supervised attention, its alternatives and complete training steps under `torch.compile`.

Compilation takes most of the time, so this is a separate section. A compiled step is compared with
a plain step compiled in the same way; on a GPU both are also captured in CUDA graphs. There, models
have fewer layers than elsewhere, and no part starts after `ENOUGH` seconds. A watched model is
compiled itself, without the `watch` block: entering it inside a graph would break the graph. So its
losses are computed outside the graph, and those of the plain step as well.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import supervision, training
from .clock import describe_error, device_clock, time_variants
from .report import Report, Setting, missing_row, relative_time_row, speedup_row
from .supervision import Bert, VLBertCase, gpu_goal

LAYERS, TIME_LIMIT = 4, 160.0  # on a GPU: layers, and seconds
Steps = dict[str, Callable[[], None]]


def compare(
    name: str, steps: Steps, ours: str, positions: int, setting: Setting, report: Report
) -> None:
    """Time supervised and plain steps, both compiled, and both in CUDA graphs."""
    ready = compile_steps(f"{name}, compiled", steps, report)
    times = time_variants(
        ready, setting.rounds, device_clock(setting.device), limit=5.0 if setting.gpu else 30.0
    )
    for other in ready:
        if other != "plain":
            report.add(relative_time_row(f"{name}, compiled", times, other, "plain"))
        if other not in (ours, "plain") and ours in ready:
            report.add(speedup_row(f"{name}, compiled", times, ours, other))
    if setting.gpu:
        goal = gpu_goal(positions)
        supervision.time_graphs(f"{name}, compiled", ready, ours, goal, setting, report)


def compile_steps(label: str, steps: Steps, report: Report) -> Steps:
    """Compile the steps; each step that fails is reported in a row."""
    found: Steps = {}
    for variant, run_step in steps.items():
        try:
            run_step()
        except Exception as error:
            traceback.print_exc()
            report.add(missing_row(f"{label}: {variant}", describe_error(error)))
        else:
            found[variant] = run_step
    return found


def vlbert(positions: int, samples: int, setting: Setting, report: Report) -> None:
    """Measure our VL-BERT."""
    torch.compiler.reset()
    case = VLBertCase(positions, samples, setting, LAYERS)
    kinds = ("plain", "direct")
    steps = {kind: case.step(torch.compile(case.variants[kind], dynamic=False)) for kind in kinds}
    name = f"VL-BERT {positions} x {samples}, {LAYERS} layers"
    compare(name, steps, "direct", positions, setting, report)


def plain_loss(one: Bert) -> Callable[[], Tensor]:
    """Return the loss of the task with the compiled encoder.

    The model itself creates a mask over all pairs when compiled with transformers 5.17, not with
    5.22.
    """
    compiled = torch.compile(one.model.encoder, dynamic=False)
    return lambda: one.task(compiled(one.model.embeddings(input_ids=one.tokens))[0])


def watched_loss(one: Bert) -> Callable[[], Tensor]:
    """Return our loss: the same encoder, watched from outside, and the loss on its attention."""
    step = plain_loss(one)

    def loss() -> Tensor:
        with one.encoder_watcher as trace:
            value = step()
        return value + one.attention_loss(trace)

    return loss


def eager_loss(one: Bert) -> Callable[[], Tensor]:
    """Return both losses from eager attention weights, all in one graph."""
    one.model.set_attn_implementation("eager")
    found: list[Tensor] = []
    for layer in one.model.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *args: found.append(args[2][1]))

    def loss() -> Tensor:
        hidden = one.encode()
        return one.loss_from_weights(hidden, torch.stack(found, dim=1))

    compiled = torch.compile(loss, dynamic=False)

    def run_step() -> Tensor:
        found.clear()  # outside: another list length would recompile
        return compiled()

    return run_step


def bert(size: supervision.Size, setting: Setting, report: Report) -> None:
    """Measure BERT of Hugging Face, watched, and with eager attention weights."""
    torch.compiler.reset()
    one, other = (Bert.create(size, setting.device) for _ in range(2))
    ours, theirs = watched_loss(one), eager_loss(other)
    with torch.autocast(setting.device, torch.bfloat16, enabled=setting.gpu):
        values = [float(variant().detach()) for variant in (ours, theirs)]
    assert abs(values[0] / values[1] - 1) < 1e-2, f"the losses are {values}"
    steps = {
        "plain": one.step(plain_loss(one)),
        "eager weights": other.step(theirs),
        "ours": one.step(ours),
        "ours, not compiled": one.step(one.our_encoder),
    }
    name = f"BERT {size.positions} x {size.samples}"
    compare(f"{name}, {size.layers} layers" if setting.gpu else name, steps, "ours", size.positions,
          setting, report)  # fmt: skip


def section(setting: Setting, report: Report) -> None:
    """Measure everything on a GPU; on a CPU only compiled eager weights and training steps."""
    torch.set_num_threads(1)
    if setting.quick:
        return
    start = time.perf_counter()
    for label, run in parts(setting, report):
        if setting.gpu and time.perf_counter() - start > TIME_LIMIT:
            report.add(missing_row(label, "not measured: compilation took too long"))
        else:
            report.part(label, run)


def parts(setting: Setting, report: Report) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the parts, the most important first; on a GPU no captioner, which takes a minute."""
    sizes, networks = supervision.bert_sizes(setting), training.networks(setting)
    if setting.gpu:
        yield "FlexAttention", partial(supervision.flex, setting, report)
        sizes = (replace(sizes[1], layers=LAYERS),)
        networks = {"VGG-att2": networks["VGG-att2"]}
    for one in sizes:
        yield f"BERT {one.positions}, compiled", partial(bert, one, setting, report)
    if setting.gpu:
        positions, samples = supervision.vlbert_sizes(setting)[0]
        run = partial(vlbert, positions, samples, setting, report)
        yield f"VL-BERT {positions}, compiled", run
    best = training.measure_limits(setting)
    for name, (batch, make) in networks.items():
        run = partial(training.measure_compiled, name, batch, make, setting, report, best)
        yield f"{name}, batch {batch}, compiled", run
