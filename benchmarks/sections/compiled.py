"""The same, compiled: supervised attention, what stands beside it, and whole training steps.

Compiling takes most of the time here, so this is a section of its own. A compiled step is held
against one that was compiled in the same way; on a card each is then recorded as a graph as well.
There models have fewer layers than elsewhere, and after `ENOUGH` seconds no further part is begun.
A model that is watched is compiled itself, and not the block that watches it: entering that block
inside of a graph would break it. So its losses stand outside, and those of the plain step as well.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import supervision, training
from .clock import race, timer, told
from .report import Report, Setting, absent, dearer, faster
from .supervision import Bert, Own, goal_of

LAYERS, ENOUGH = 4, 160.0  # on a card
Steps = dict[str, Callable[[], None]]


def raced(name: str, steps: Steps, ours: str, positions: int,
          setting: Setting, report: Report) -> None:  # fmt: skip
    """A supervised step beside a plain one, both compiled; and both as graphs of the card."""
    ready = made(f"{name}, compiled", steps, report)
    times = race(ready, setting.rounds, timer(setting.device), limit=5.0 if setting.gpu else 30.0)
    for other in ready:
        if other != "plain":
            report.add(dearer(f"{name}, compiled", times, other, "plain"))
        if other not in (ours, "plain") and ours in ready:
            report.add(faster(f"{name}, compiled", times, ours, other))
    if setting.gpu:
        goal = goal_of(positions)
        supervision.replayed(f"{name}, compiled", ready, ours, goal, setting, report)


def made(what: str, steps: Steps, report: Report) -> Steps:
    """Those of the steps that can be compiled; why not, of the others, is a row of its own."""
    found: Steps = {}
    for way, once in steps.items():
        try:
            once()
        except Exception as error:
            traceback.print_exc()
            report.add(absent(f"{what}: {way}", told(error)))
        else:
            found[way] = once
    return found


def own(positions: int, samples: int, setting: Setting, report: Report) -> None:
    """Our VL-BERT."""
    torch.compiler.reset()
    case = Own(positions, samples, setting, LAYERS)
    kinds = ("plain", "direct")
    steps = {kind: case.step(torch.compile(case.ways[kind], dynamic=False)) for kind in kinds}
    name = f"VL-BERT {positions} x {samples}, {LAYERS} layers"
    raced(name, steps, "direct", positions, setting, report)


def plain(one: Bert) -> Callable[[], Tensor]:
    """The compiled encoder, and the loss of its task; the whole model makes a mask over all pairs
    when it is compiled by transformers 5.17, and by 5.22 not."""
    whole = torch.compile(one.model.encoder, dynamic=False)
    return lambda: one.task(whole(one.model.embeddings(input_ids=one.tokens))[0])


def watched(one: Bert) -> Callable[[], Tensor]:
    """Ours: the same encoder, watched from outside, and the loss on what was seen."""
    step = plain(one)

    def loss() -> Tensor:
        with one.of_encoder as seen:
            value = step()
        return value + one.looked(seen)

    return loss


def by_weights(one: Bert) -> Callable[[], Tensor]:
    """Eager attention that gives out its weights, and both losses: all of it one graph."""
    one.model.set_attn_implementation("eager")
    found: list[Tensor] = []
    for layer in one.model.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *given: found.append(given[2][1]))

    def loss() -> Tensor:
        hidden = one.encoded()
        return one.of_weights(hidden, torch.stack(found, dim=1))

    whole = torch.compile(loss, dynamic=False)

    def once() -> Tensor:
        found.clear()  # outside: a graph is made anew for a list of another length
        return whole()

    return once


def bert(size: supervision.Size, setting: Setting, report: Report) -> None:
    """BERT of Hugging Face, watched, and with the weights that its users ask for."""
    torch.compiler.reset()
    one, other = (Bert.of(size, setting.device) for _ in range(2))
    ours, theirs = watched(one), by_weights(other)
    with torch.autocast(setting.device, torch.bfloat16, enabled=setting.gpu):
        values = [float(way().detach()) for way in (ours, theirs)]
    assert abs(values[0] / values[1] - 1) < 1e-2, f"the losses are {values}"
    steps = {
        "plain": one.step(plain(one)),
        "eager weights": other.step(theirs),
        "ours": one.step(ours),
        "ours, not compiled": one.step(one.our_encoder),
    }
    name = f"BERT {size.positions} x {size.samples}"
    raced(f"{name}, {size.layers} layers" if setting.gpu else name, steps, "ours", size.positions,
          setting, report)  # fmt: skip


def section(setting: Setting, report: Report) -> None:
    """On a card all of it; on a CPU what compiling does for the weights that others ask for."""
    torch.set_num_threads(1)
    if setting.quick:
        return
    begun = time.perf_counter()
    for what, run in parts(setting, report):
        if setting.gpu and time.perf_counter() - begun > ENOUGH:
            report.add(absent(what, "not measured: compiling took too long"))
        else:
            report.part(what, run)


def parts(setting: Setting, report: Report) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is measured, the most wanted first; on a card no captioner, which takes a minute."""
    sizes, networks = supervision.sizes_of(setting), training.networks(setting)
    if setting.gpu:
        yield "FlexAttention", partial(supervision.flex, setting, report)
        sizes = (replace(sizes[1], layers=LAYERS),)
        networks = {"VGG-att2": networks["VGG-att2"]}
    for one in sizes:
        yield f"BERT {one.positions}, compiled", partial(bert, one, setting, report)
    if setting.gpu:
        positions, samples = supervision.own_sizes(setting)[0]
        run = partial(own, positions, samples, setting, report)
        yield f"VL-BERT {positions}, compiled", run
    best = training.limits(setting)
    for name, (batch, make) in networks.items():
        run = partial(training.compiled, name, batch, make, setting, report, best)
        yield f"{name}, batch {batch}, compiled", run
