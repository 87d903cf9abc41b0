"""The same, compiled: supervised attention, what stands beside it, and whole training steps.

Compiling takes most of the time here, so this is a section of its own. A compiled step is held
against one that was compiled in the same way; on a card each is then recorded as a graph as well.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import supervision, training
from .clock import race, timer
from .report import Report, Setting, dearer, faster
from .supervision import Bert, Own, goal_of

Steps = dict[str, Callable[[], None]]


def raced(name: str, steps: Steps, ours: str, positions: int,
          setting: Setting, report: Report) -> None:  # fmt: skip
    """A supervised step beside a plain one, both compiled; and both as graphs of the card."""
    for once in steps.values():
        once()
    times = race(steps, setting.rounds, timer(setting.device), limit=5.0 if setting.gpu else 30.0)
    report.add(dearer(f"{name}, compiled", times, ours, "plain"))
    for other in steps:
        if other not in (ours, "plain"):
            report.add(
                dearer(f"{name}, compiled", times, other, "plain"),
                faster(f"{name}, compiled", times, ours, other),
            )
    if setting.gpu:
        goal = goal_of(positions)
        supervision.replayed(f"{name}, compiled", steps, ours, goal, setting, report)


def own(positions: int, samples: int, setting: Setting, report: Report) -> None:
    """Our VL-BERT."""
    torch.compiler.reset()
    case = Own(positions, samples, setting)
    kinds = ("plain", "direct")
    steps = {kind: case.step(torch.compile(case.ways[kind], dynamic=False)) for kind in kinds}
    name = f"VL-BERT {positions} x {samples}"
    raced(name, steps, "direct", positions, setting, report)


def bert(size: supervision.Size, setting: Setting, report: Report) -> None:
    """BERT of Hugging Face, watched, and with the weights that its users ask for."""
    torch.compiler.reset()
    one, other = (Bert.of(size, setting.device) for _ in range(2))
    other.model.set_attn_implementation("eager")  # a model of its own: its way to attend stays

    def weights() -> Tensor:
        out = other.model(other.tokens, output_attentions=True)
        return other.of_weights(out[0], torch.stack(out.attentions, dim=1))

    steps = {
        "plain": one.step(torch.compile(one.plain, dynamic=False)),
        "eager weights": other.step(torch.compile(weights, dynamic=False)),
    }
    ours = "ours" if setting.gpu else "ours, as it is"
    steps[ours] = one.step(torch.compile(one.ours, dynamic=False) if setting.gpu else one.ours)
    name = f"BERT {size.positions} x {size.samples}"
    raced(name, steps, ours, size.positions, setting, report)


def section(setting: Setting, report: Report) -> None:
    """On a card all of it; on a CPU what compiling does for the weights that others ask for."""
    torch.set_num_threads(1)
    if setting.quick:
        return
    if setting.gpu:
        supervision.flex(setting, report)
    some = supervision.sizes_of(setting)
    for one in some[1:2] if setting.gpu else some:
        report.part(f"BERT {one.positions}, compiled", partial(bert, one, setting, report))
    if setting.gpu:
        for size in supervision.own_sizes(setting)[:1]:
            report.part(f"VL-BERT {size[0]}, compiled", partial(own, *size, setting, report))
    best = training.limits(setting)
    for name, (batch, make) in training.networks(setting).items():
        run = partial(training.compiled, name, batch, make, setting, report, best)
        report.part(f"{name}, batch {batch}, compiled", run)
