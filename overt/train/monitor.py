"""How is attention doing while a model trains? A few numbers a layer, every so many steps.

    fit(model, data, step, sets, limits, out=out, seed=0, attention=AttentionMonitor(every=100))

The step runs as it always does, watched, on the batch it has anyway. A few rows of each layer are
made when the layer is called, and summed up for all layers at once, since a card takes as long for
the numbers of one: the cost is that of a few rows of one step in `every`. `make bench` measures it.
Models of ours return their maps:
`AttentionMonitor(by=by_outputs)` reads these.

Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", ICML 2023,
https://arxiv.org/abs/2303.06296: training breaks where entropy falls to nothing. Dong, Cordonnier
and Loukas, "Attention is not all you need: pure attention loses rank doubly exponentially with
depth", ICML 2021, https://arxiv.org/abs/2103.03404: the other way to collapse, all queries alike.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.capture.call import Call, Projected
from overt.capture.watching import watch

ROOM = 1 << 24  # numbers of rows that wait at most
NUMBERS = ("entropy", "sink", "collapse", "sameness")

Note = Callable[[str, Float[Tensor, "b h s k"], Bool[Tensor, "b s k"]], None]
Rows = Callable[[int], list[int]]  # how many queries there are -> which of them are looked at
By = Callable[[nn.Module, Rows, Note], AbstractContextManager[None]]


# --- ways to see


@contextmanager
def by_watching(model: nn.Module, rows: Rows, note: Note) -> Iterator[None]:
    """See the attention of any model while it runs, as `watch` does."""

    known: dict[Any, tuple[Tensor, Tensor]] = {}  # to tell a card a place is to wait for it

    @torch.no_grad()
    def take(call: Call) -> None:
        b, _, q, k = call.shape
        places = rows(q)
        device = call.value.device if call.value is not None else None
        if (b, q, k, device) not in known:
            everything = torch.ones(b, len(places), k, dtype=torch.bool, device=device)
            known[b, q, k, device] = torch.tensor([places] * b, device=device), everything
        at, everything = known[b, q, k, device]
        visible = call.visible(at)
        if visible is None and isinstance(call.source, Projected) and call.source.sinks is None:
            note(call.name, call.scores(at).softmax(dim=-1), everything)  # no row is empty
            return
        weights = call.weights(at).detach().abs()
        seen = everything.to(weights.device) if visible is None else visible
        note(call.name, weights, seen.expand(b, len(places), k))

    with watch(model, each=take):
        yield


@contextmanager
def by_outputs(model: nn.Module, rows: Rows, note: Note) -> Iterator[None]:
    """See the maps that a model of ours returns when it is called: `Output.attention`."""

    @torch.no_grad()
    def take(module: nn.Module, given: Any, output: Any) -> None:
        for number, one in enumerate(getattr(output, "attention", ())):
            name = f"{number} {'+'.join(span.name for span in one.keys.spans)}"
            places = rows(len(one.queries))
            for layer in range(one.values.shape[1]):
                weights = one.weights[:, layer, :, places].detach().abs()
                told = name if one.values.shape[1] == 1 else f"{name} layer {layer}"
                note(told, weights, one.visible[:, places])

    handle = model.register_forward_hook(take)
    try:
        yield
    finally:
        handle.remove()


# --- what is seen


Taken = tuple[Float[Tensor, "b h q k"], Bool[Tensor, "b q k"]]


@dataclass
class Pulse:
    """What one watched step showed, kept where it was computed until it is read.

    `waiting` are rows that have not been summed up: those of the last layers of `names`.
    """

    floor: float = 0.1
    names: list[str] = field(default_factory=list)
    numbers: list[Float[Tensor, " m"]] = field(default_factory=list)
    waiting: list[Taken] = field(default_factory=list)

    def take(self, name: str, weights: Tensor, seen: Tensor) -> None:
        """Some rows of a layer; they are summed up with others, before they become too many."""
        self.names.append(name)
        self.waiting.append((weights, seen))
        if sum(one.numel() for one, _ in self.waiting) > ROOM:
            self.settle()

    def settle(self) -> None:
        """Sum up what is waiting, layers of one shape at once."""
        alike: dict[Any, list[int]] = {}
        for place, (weights, _) in enumerate(self.waiting):
            alike.setdefault((weights.shape, weights.device), []).append(place)
        found: dict[int, Tensor] = {}
        for places in alike.values():
            many, seen = (
                torch.stack([self.waiting[place][part] for place in places]) for part in (0, 1)
            )
            found |= dict(zip(places, summed_up(many, seen, self.floor), strict=True))
        self.numbers += [found[place] for place in range(len(self.waiting))]
        self.waiting.clear()

    def read(self) -> dict[str, dict[str, float]]:
        """The numbers by name and layer; the mean, where a layer was called several times.

        What is not defined in a layer, such as `sameness` of one query, is left out.
        """
        if not self.names:
            raise ValueError(
                "no attention was seen in this step, so there is nothing to monitor: is the model "
                "that the step runs the one that was given?"
            )
        self.settle()
        device = self.numbers[0].device
        table = torch.stack([one.to(device) for one in self.numbers]).tolist()
        found: dict[str, dict[str, float]] = {}
        for place, number in enumerate(NUMBERS):
            each: dict[str, list[float]] = {}
            for name, values in zip(self.names, table, strict=True):
                if not math.isnan(values[place]):
                    each.setdefault(name, []).append(values[place])
            if each:
                found[number] = {name: sum(one) / len(one) for name, one in each.items()}
        return found


@dataclass(frozen=True)
class AttentionMonitor:
    """Four numbers a layer, every `every` steps, from the first step on.

    - `entropy`: of a row, as a share of what an even row over the keys it may see would have. 1 is
      even, 0 looks at one key.
    - `sink`: what the key that takes most in a sample takes of all that rows and heads give.
    - `collapse`: the share of rows whose entropy is below `floor`: they look at next to one key.
    - `sameness`: how alike the rows of a head are, whatever they ask: 1 when all look alike, 0 when
      as different as their number allows. Not defined for a single query.

    `rows` queries of each layer are looked at, evenly spaced over the sequence, in the first
    `samples` of the batch; queries that see fewer than two keys do not count. `layers` names those
    that are told of; None is all. `by` is how attention is seen. On many processes the numbers are
    those of the first one's share.
    """

    every: int = 100
    rows: int = 16
    samples: int = 8
    layers: Collection[str] | None = None
    floor: float = 0.1
    by: By = by_watching

    def __post_init__(self) -> None:
        if min(self.every, self.rows, self.samples) < 1 or not 0 <= self.floor <= 1:
            raise ValueError(
                f"every, rows and samples are at least 1 and floor is from 0 to 1, not "
                f"{self.every}, {self.rows}, {self.samples} and {self.floor}"
            )

    def due(self, step: int) -> bool:
        """Whether this step, counted from 0, is one to look at."""
        return step % self.every == 0

    @contextmanager
    def looking(self, model: nn.Module) -> Iterator[Pulse]:
        """While this is open, the attention of the model is summed up as it is computed."""
        pulse = Pulse(self.floor)

        def note(name: str, weights: Float[Tensor, "b h s k"], seen: Bool[Tensor, "b s k"]) -> None:
            if self.layers is None or name in self.layers:
                few = slice(self.samples)
                pulse.take(name, weights[few].float(), seen[few])

        with self.by(model, lambda count: spaced(count, self.rows), note):
            yield pulse
        pulse.settle()


def summed_up(
    weights: Float[Tensor, "*l b h q k"], seen: Bool[Tensor, "*l b q k"], floor: float
) -> Float[Tensor, "*l m"]:
    """Entropy, sink, collapse and sameness of some rows of layers, NaN where not defined."""
    every = (-3, -2, -1)
    count = seen.sum(dim=-1)
    total = weights.sum(dim=-1, keepdim=True)
    counted = ((count > 1).unsqueeze(-2) & (total[..., 0] > 0)).float()  # (b, h, q)
    shares = weights / torch.where(total > 0, total, 1)
    rows = counted.sum(dim=every)
    nats = _nats(shares)
    even = nats / count.clamp_min(2).float().log().unsqueeze(-2)
    entropy = (even * counted).sum(dim=every) / rows
    collapse = ((even < floor) * counted).sum(dim=every) / rows
    of_head = counted.sum(dim=-1)  # (b, h)
    of_sample = of_head.sum(dim=-1)
    given = (counted[..., None, :] @ shares)[..., 0, :]  # (b, h, k)
    taken = given.sum(dim=-2).amax(dim=-1) / of_sample.clamp_min(1)
    there = of_sample > 0
    sink = (taken * there).sum(dim=-1) / there.sum(dim=-1)
    mean = given / of_head.clamp_min(1)[..., None]
    each = (nats * counted).sum(dim=-1) / of_head.clamp_min(1)
    several = of_head > 1
    apart = (_nats(mean) - each) / of_head.clamp_min(2).log()  # what a key tells of the query
    alike = (apart.clamp(0, 1) * several).sum(dim=(-2, -1)) / several.sum(dim=(-2, -1))
    return torch.stack([entropy, sink, collapse, 1 - alike], dim=-1)


def spaced(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly spaced, the first and the last among them.

    >>> spaced(10, 4), spaced(3, 16), spaced(5, 1)
    ([0, 3, 6, 9], [0, 1, 2], [4])
    """
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _nats(shares: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    return -torch.where(shares > 0, shares * torch.where(shares > 0, shares, 1).log(), 0).sum(-1)


# --- loops that are not ours


class Monitored:
    """What makes a Trainer log how attention does: `class Mine(Monitored, Trainer): ...`.

    `attention` says how often and what. The numbers of the last step that was looked at stand
    beside the next losses that are logged, as `attention/entropy/LAYER`.
    """

    attention = AttentionMonitor()
    _looked = -1  # the step that was looked at last: one batch of it is enough
    _pulse: Pulse | None = None

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss that Trainer computes, watched if its turn has come."""
        trainer: Any = super()
        step = self.state.global_step  # type: ignore[attr-defined]
        due = model.training and step != self._looked and self.attention.due(step)
        if not due:
            return trainer.compute_loss(model, inputs, *args, **kwargs)
        self._looked = step
        bare = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        with self.attention.looking(bare) as self._pulse:
            return trainer.compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the numbers of the layers where there are new ones."""
        if "loss" in logs and self._pulse is not None:
            found, self._pulse = self._pulse.read(), None
            for number, layers in found.items():
                logs |= {f"attention/{number}/{layer}": value for layer, value in layers.items()}
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)
