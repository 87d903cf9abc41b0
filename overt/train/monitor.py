"""Attention statistics during training: four numbers per layer, every few steps.

    fit(model, data, step, sets, config, out=out, seed=0, attention=AttentionMonitor(every=100))

The monitored step is an ordinary training step on its own batch. Some rows of each layer are
computed when the layer is called, and reduced for all layers at once, because on a GPU one layer
takes as long as all of them. `make speed` measures the cost. Models of this package return their
maps: `AttentionMonitor(capture=capture_from_outputs)` reads these.

Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", ICML 2023,
https://arxiv.org/abs/2303.06296: training becomes unstable when entropy collapses to 0. Dong,
Cordonnier and Loukas, "Attention is not all you need: pure attention loses rank doubly
exponentially with depth", ICML 2021, https://arxiv.org/abs/2103.03404: the other collapse, where
all queries have the same weights.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.capture.call import Call, QKCall
from overt.capture.session import watch

MAX_PENDING = 1 << 24  # maximum number of weights that wait to be reduced
STATISTICS = ("entropy", "sink", "collapse", "sameness")

RecordWeights = Callable[[str, Float[Tensor, "b h s k"], Bool[Tensor, "b s k"]], None]
SelectQueries = Callable[[int], list[int]]  # number of queries -> indices of those to sample
CaptureMethod = Callable[[nn.Module, SelectQueries, RecordWeights], AbstractContextManager[None]]


# --- capture methods


@contextmanager
def capture_by_watch(
    model: nn.Module, rows: SelectQueries, record: RecordWeights
) -> Iterator[None]:
    """Capture the attention of any model with `watch`.

    Args:
        model: Any model.
        rows: Returns the indices of the queries to sample from their number.
        record: Called with the layer, the weights of the sampled queries and their visible keys.

    Yields:
        None; attention is captured inside the `with` block.

    Example:
        >>> layer, found = nn.TransformerEncoderLayer(8, 2, batch_first=True), {}
        >>> def record(name, weights, seen):
        ...     found[name] = weights.shape
        >>> with capture_by_watch(layer, rows=lambda count: [0, count - 1], record=record):
        ...     _ = layer(torch.rand(3, 5, 8))
        >>> found  # 3 samples, 2 heads, the first and the last query, 5 keys
        {'self_attn': torch.Size([3, 2, 2, 5])}
    """

    # --- a few rows of each call
    known: dict[
        Any, tuple[Tensor, Tensor]
    ] = {}  # indices on the device: copying them synchronizes the GPU

    @torch.no_grad()
    def take(call: Call) -> None:
        b, _, q, k = call.shape
        # rows are chosen before weights are computed: only these rows of the map are
        places = rows(q)
        device = call.value.device if call.value is not None else None
        if (b, q, k, device) not in known:
            everything = torch.ones(b, len(places), k, dtype=torch.bool, device=device)
            known[b, q, k, device] = torch.tensor([places] * b, device=device), everything
        at, everything = known[b, q, k, device]
        visible = call.visible(at)
        if visible is None and isinstance(call.source, QKCall) and call.source.sinks is None:
            # the common case: no mask and no sinks, so a plain softmax is exact
            record(call.name, call.scores(at).softmax(dim=-1), everything)  # no row is fully masked
            return
        # abs: differential attention has negative weights, which have no entropy
        weights = call.weights(at).detach().abs()
        seen = everything.to(weights.device) if visible is None else visible
        record(call.name, weights, seen.expand(b, len(places), k))

    with watch(model, each=take):
        yield


@contextmanager
def capture_from_outputs(
    model: nn.Module, rows: SelectQueries, record: RecordWeights
) -> Iterator[None]:
    """Capture the maps that a model of this package returns: `Output.attention`.

    Args:
        model: A model that returns an `Output`.
        rows: Returns the indices of the queries to sample from their number.
        record: Called with the layer, the weights of the sampled queries and their visible keys.

    Yields:
        None; attention is captured inside the `with` block.

    Example:
        >>> from overt.testing import PlantedCell, toy_batch
        >>> model, found = PlantedCell((4, 4)), {}
        >>> def record(name, weights, seen):
        ...     found[name] = weights.shape
        >>> with capture_from_outputs(model, rows=lambda count: [0], record=record):
        ...     _ = model(toy_batch(3))
        >>> found
        {'0 image': torch.Size([3, 1, 1, 16])}
    """

    @torch.no_grad()
    def take(module: nn.Module, given: Any, output: Any) -> None:
        for number, one in enumerate(getattr(output, "attention", ())):
            name = f"{number} {'+'.join(span.name for span in one.keys.spans)}"
            places = rows(len(one.queries))
            for layer in range(one.values.shape[1]):
                weights = one.weights[:, layer, :, places].detach().abs()
                full_name = name if one.values.shape[1] == 1 else f"{name} layer {layer}"
                record(full_name, weights, one.visible[:, places])

    handle = model.register_forward_hook(take)
    try:
        yield
    finally:
        handle.remove()


# --- statistics


PendingRows = tuple[Float[Tensor, "b h q k"], Bool[Tensor, "b q k"]]


@dataclass
class AttentionStats:
    """Attention statistics of one step, kept on the device until `compute` is called.

    Args:
        floor: Threshold of `collapse`.
        names: Layer of each captured call.
        numbers: Statistics of each captured call.
        pending: Rows of the last calls, which are not reduced yet.

    Example:
        >>> stats = AttentionStats()
        >>> stats.add("layer", torch.full((1, 1, 2, 4), 0.25), torch.ones(1, 2, 4) > 0)
        >>> found = stats.compute()  # two equal uniform rows
        >>> {name: round(layers["layer"], 3) for name, layers in found.items()}
        {'entropy': 1.0, 'sink': 0.25, 'collapse': 0.0, 'sameness': 1.0}
    """

    floor: float = 0.1
    names: list[str] = field(default_factory=list)
    numbers: list[Float[Tensor, " m"]] = field(default_factory=list)
    pending: list[PendingRows] = field(default_factory=list)

    def add(self, name: str, weights: Tensor, seen: Tensor) -> None:
        """Add some rows of a layer; they are reduced later, with those of other layers."""
        self.names.append(name)
        self.pending.append((weights, seen))
        if sum(one.numel() for one, _ in self.pending) > MAX_PENDING:
            self.reduce_pending()

    def reduce_pending(self) -> None:
        """Reduce the pending rows, all layers of the same shape at once."""
        by_shape: dict[Any, list[int]] = {}
        for place, (weights, _) in enumerate(self.pending):
            # one reduction for all layers of a shape: small kernels cost mostly their launch
            by_shape.setdefault((weights.shape, weights.device), []).append(place)
        found: dict[int, Tensor] = {}
        for places in by_shape.values():
            many, seen = (
                torch.stack([self.pending[place][part] for place in places]) for part in (0, 1)
            )
            found |= dict(zip(places, attention_statistics(many, seen, self.floor), strict=True))
        # in the order of `names`
        self.numbers += [found[place] for place in range(len(self.pending))]
        self.pending.clear()

    def compute(self) -> dict[str, dict[str, float]]:
        """Return each statistic by layer; for layers called several times, the mean.

        Statistics that are undefined for a layer, such as `sameness` of one query, are left out.

        Raises:
            ValueError: No attention was captured.
        """
        if not self.names:
            raise ValueError(
                "no attention was captured in this step: does the step run the model that was "
                "passed to the monitor?"
            )
        self.reduce_pending()
        device = self.numbers[0].device
        # one transfer for all layers; a model may be split over several GPUs
        table = torch.stack([one.to(device) for one in self.numbers]).tolist()
        found: dict[str, dict[str, float]] = {}
        for place, number in enumerate(STATISTICS):
            each: dict[str, list[float]] = {}
            for name, values in zip(self.names, table, strict=True):
                if not math.isnan(values[place]):
                    each.setdefault(name, []).append(values[place])
            if each:
                found[number] = {name: sum(one) / len(one) for name, one in each.items()}
        return found


@dataclass(frozen=True)
class AttentionMonitor:
    """Computes four attention statistics per layer every few steps, starting with the first.

    - `entropy`: mean entropy of the rows, divided by that of a uniform row over the visible keys: 1
      is uniform, 0 attends to one key.
    - `sink`: the fraction of all weight that goes to the most attended key of a sample.
    - `collapse`: the fraction of rows whose entropy is below `floor`.
    - `sameness`: similarity of the rows of a head: 1 when all queries have the same weights, 0 when
      they differ as much as their number allows. Not defined for a single query.

    With several processes the statistics are those of the part of the batch on rank 0.

    Args:
        every: Steps between two monitored steps.
        rows: Queries per layer, evenly spaced over the sequence; queries with fewer than two
            visible keys do not count.
        samples: Samples of the batch.
        layers: Names of the layers; None is all.
        floor: Threshold of `collapse`.
        capture: How attention is captured.

    Example:
        >>> monitor = AttentionMonitor(every=50, rows=8)
        >>> monitor.every
        50
    """

    every: int = 100
    rows: int = 16
    samples: int = 8
    layers: Collection[str] | None = None
    floor: float = 0.1
    capture: CaptureMethod = capture_by_watch

    def __post_init__(self) -> None:
        if min(self.every, self.rows, self.samples) < 1 or not 0 <= self.floor <= 1:
            raise ValueError(
                f"every, rows and samples must be at least 1 and floor in [0, 1], got "
                f"{self.every}, {self.rows}, {self.samples} and {self.floor}"
            )

    def due(self, step: int) -> bool:
        """Return whether this step, counted from 0, is monitored."""
        return step % self.every == 0

    @contextmanager
    def observe(self, model: nn.Module) -> Iterator[AttentionStats]:
        """Collect the attention statistics of the model inside a `with` block."""
        stats = AttentionStats(self.floor)

        def record(
            name: str, weights: Float[Tensor, "b h s k"], seen: Bool[Tensor, "b s k"]
        ) -> None:
            if self.layers is None or name in self.layers:
                few = slice(self.samples)
                stats.add(name, weights[few].float(), seen[few])

        with self.capture(model, lambda count: evenly_spaced(count, self.rows), record):
            yield stats
        stats.reduce_pending()


def attention_statistics(
    weights: Float[Tensor, "*l b h q k"], seen: Bool[Tensor, "*l b q k"], floor: float
) -> Float[Tensor, "*l m"]:
    """Compute entropy, sink, collapse and sameness of rows of layers; NaN where undefined."""
    every = (-3, -2, -1)
    count = seen.sum(dim=-1)
    total = weights.sum(dim=-1, keepdim=True)
    # a row with one visible key has entropy 0 by necessity: it says nothing about collapse
    counted = ((count > 1).unsqueeze(-2) & (total[..., 0] > 0)).float()  # (b, h, q)
    # with learned sinks a row sums to less than one: normalise, so that entropy is that of a
    # distribution
    shares = weights / torch.where(total > 0, total, 1)
    rows = counted.sum(dim=every)
    nats = _nats(shares)
    # divided by the entropy of a uniform row over as many keys
    even = nats / count.clamp_min(2).float().log().unsqueeze(-2)
    entropy = (even * counted).sum(dim=every) / rows
    collapse = ((even < floor) * counted).sum(dim=every) / rows
    of_head = counted.sum(dim=-1)  # (b, h)
    of_sample = of_head.sum(dim=-1)
    # --- sink: attention that each key receives, per head, then over heads
    given = (counted[..., None, :] @ shares)[..., 0, :]  # (b, h, k)
    taken = given.sum(dim=-2).amax(dim=-1) / of_sample.clamp_min(1)
    there = of_sample > 0
    sink = (taken * there).sum(dim=-1) / there.sum(dim=-1)
    # --- sameness: entropy of the mean row minus the mean entropy of the rows
    mean = given / of_head.clamp_min(1)[..., None]
    each = (nats * counted).sum(dim=-1) / of_head.clamp_min(1)
    several = of_head > 1
    # mutual information of query and key, divided by its maximum
    spread = (_nats(mean) - each) / of_head.clamp_min(2).log()
    spread = (spread.clamp(0, 1) * several).sum(dim=(-2, -1)) / several.sum(dim=(-2, -1))
    return torch.stack([entropy, sink, collapse, 1 - spread], dim=-1)


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced, with the first and the last.

    >>> evenly_spaced(10, 4), evenly_spaced(3, 16), evenly_spaced(5, 1)
    ([0, 3, 6, 9], [0, 1, 2], [4])
    """
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _nats(shares: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    # the inner `where`: 0 * log(0) is NaN, and the entropy of an absent key is 0
    return -torch.where(shares > 0, shares * torch.where(shares > 0, shares, 1).log(), 0).sum(-1)


# --- other training loops


class AttentionMonitorMixin:
    """Mixin that makes a Hugging Face Trainer log attention statistics.

    Use it as `class MyTrainer(AttentionMonitorMixin, Trainer)`. The class attribute `attention`
    sets the monitor. The statistics of the last monitored step are logged with the next losses, as
    `attention/entropy/LAYER`.

    Example:
        >>> from types import SimpleNamespace
        >>> class Trainer:  # in place of transformers.Trainer
        ...     state = SimpleNamespace(global_step=0)
        ...     accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        ...     def compute_loss(self, model, inputs):
        ...         return model(inputs).sum()
        ...     def log(self, logs):
        ...         print(*logs, sep=chr(10))
        >>> class MyTrainer(AttentionMonitorMixin, Trainer):
        ...     attention = AttentionMonitor(every=10)
        >>> trainer, layer = MyTrainer(), nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> loss = trainer.compute_loss(layer, torch.rand(2, 5, 8))
        >>> trainer.log({"loss": 0.5})
        loss
        attention/entropy/self_attn
        attention/sink/self_attn
        attention/collapse/self_attn
        attention/sameness/self_attn
    """

    attention = AttentionMonitor()
    _last_step = -1  # last monitored step: one of its batches is enough
    _stats: AttentionStats | None = None

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of Trainer, and monitor attention if the step is due."""
        trainer: Any = super()
        step = self.state.global_step  # type: ignore[attr-defined]
        due = model.training and step != self._last_step and self.attention.due(step)
        if not due:
            return trainer.compute_loss(model, inputs, *args, **kwargs)
        self._last_step = step
        # hooks go on the model itself, not on its DDP or compiled wrapper
        bare = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        with self.attention.observe(bare) as self._stats:
            return trainer.compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with new attention statistics if there are any."""
        if "loss" in logs and self._stats is not None:
            found, self._stats = self._stats.compute(), None
            for number, layers in found.items():
                logs |= {f"attention/{number}/{layer}": value for layer, value in layers.items()}
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)
