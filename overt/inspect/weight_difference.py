"""Compare the attention weights of a model under two implementations, in blocks of rows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from overt.inspect.implementation_switch import (
    Task,
    Variant,
    describe_error,
    is_switchable,
    run_task,
)
from overt.inspect.output_difference import badness, row_blocks, worst

if TYPE_CHECKING:
    from torch import Tensor

    from overt.capture import Call

MAX_HELD = 1 << 28  # bytes of the reference's maps that are kept at a time


@dataclass(eq=False)
class MapDifference:
    """The largest differences so far of one variant."""

    maps: int = 0
    largest: float | None = None
    module: str = ""
    returned: float | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, off: float) -> None:
        """Add the largest difference of one call."""
        self.maps += 1
        if self.largest is None or badness(off) > badness(self.largest):
            self.largest, self.module = off, name


def compare_maps(reference: Variant, others: Sequence[Variant], task: Task) -> list[MapDifference]:
    """Compare the maps of variants with those of the reference, some layers at a time."""
    found = [MapDifference() for _ in others]
    if not others:
        return found
    try:
        groups = _group_layers(reference, task)
    except Exception as error:
        for one in found:
            one.notes.append(f"no maps: {describe_error(error)}")
        return found
    for layers in groups:
        held: Mapping[tuple[str, int], Call] | Exception
        try:
            held = _hold(reference, layers, task)
        except Exception as error:
            held = error
        for other, one in zip(others, found, strict=True):
            try:
                _add_differences(one, other, layers, held, other.task or task)
            except Exception as error:
                one.notes.append(f"no maps: {describe_error(error)}")
    for other, one in zip(others, found, strict=True):
        if other.name == "eager" and other.compiler is None and is_switchable(other.model):
            try:
                one.returned = _returned_difference(other, other.task or task)
            except Exception as error:
                one.notes.append(f"weights that the model returns: {describe_error(error)}")
    return found


def _watch(
    variant: Variant,
    layers: Sequence[str] | None,
    task: Task,
    each: Callable[["Call"], Any] | None = None,
) -> Any:
    """Run a variant under `watch`, without its recurrences, and return the trace."""
    from overt.capture import watch
    from overt.capture.discovery import recurrent_modules

    without = list(recurrent_modules(variant.model)) if layers is None else []
    with variant.in_use() as model:
        with watch(model, layers=layers, without=without, each=each) as trace:
            run_task(type(variant.model).__name__, model, task)
        return trace


def _group_layers(reference: Variant, task: Task) -> list[list[str] | None]:
    """Split the modules into groups whose maps can be kept; [None] if all can at once."""
    sizes: Counter[str] = Counter()
    for name, size in _watch(reference, None, task, lambda c: (c.name, _held_bytes(c))).results:
        sizes[name] += size
    if sizes.total() <= MAX_HELD:
        return [None]
    groups: list[list[str] | None] = []
    held = MAX_HELD + 1
    for name, size in sizes.items():
        if held + size > MAX_HELD:
            groups.append([])
            held = 0
        group = groups[-1]
        assert group is not None
        group.append(name)
        held += size
    return groups


def _held_bytes(call: "Call") -> int:
    """Return the size of what is kept of a call: its map if it is materialized."""
    source: Any = call.source
    parts = [getattr(source, name, None) for name in ("used", "logits", "query", "key")]
    return sum(one.numel() * one.element_size() for one in parts if one is not None)


def _hold(
    reference: Variant, layers: Sequence[str] | None, task: Task
) -> dict[tuple[str, int], "Call"]:
    """Return the calls of the reference by module and number."""
    count: Counter[str] = Counter()
    held = {}
    for call in _watch(reference, layers, task).calls:
        held[call.name, count[call.name]] = call
        count[call.name] += 1
    return held


def _add_differences(
    found: MapDifference,
    other: Variant,
    layers: Sequence[str] | None,
    held: "Mapping[tuple[str, int], Call] | Exception",
    task: Task,
) -> None:
    """Compare each call of a variant when it is made, so that one of its maps exists at a time."""
    if isinstance(held, Exception):
        raise held
    count: Counter[str] = Counter()

    def compare(call: "Call") -> None:
        expected = held.get((call.name, count[call.name]))
        count[call.name] += 1
        if expected is None or expected.shape != call.shape:
            found.notes.append(f"no map to compare with in {call.name or 'the model'}")
        else:
            found.add(call.name, _weights_difference(expected, call))

    if other.compiler is None:
        _watch(other, layers, task, compare)
    else:  # fused calls only, so queries and keys are kept and not maps
        for call in _watch(other, layers, task).calls:
            compare(call)
    missing = len(held) - count.total()
    if missing > 0:
        found.notes.append(f"{missing} maps of the reference have no counterpart")


def _weights_difference(expected: "Call", given: "Call") -> float:
    """Return the largest difference of two calls, in blocks of rows, without rows of padding."""
    import torch

    b, h, q, k = expected.shape
    largest = [0.0]
    for at in row_blocks(q, b * h * k):
        one, other = expected.weights(at), given.weights(at)
        off = _off(one, other.to(one.device))
        # A row without visible keys is zero under one implementation and even under another.
        empty = _empty_rows(expected, at), _empty_rows(given, at)
        if empty[0] is not None and empty[1] is not None:
            hidden = empty[0] & empty[1].to(empty[0].device)
            off = torch.where(hidden[:, None, :, None], 0, off)
        largest.append(float(off.max()))
    return worst(largest)


def _off(one: "Tensor", other: "Tensor") -> "Tensor":
    import torch

    kind = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    return (one.detach().to(kind) - other.detach().to(kind)).abs()


def _empty_rows(call: "Call", at: slice) -> "Tensor | None":
    """Return which queries see no key (b, s); None if all of them see one."""
    seen, even = call.visible(at), call.even_rows(at)
    empty = None if seen is None else ~seen.any(dim=-1)
    if empty is None or even is None:
        return even if empty is None else empty
    return empty | even


def _returned_difference(variant: Variant, task: Task) -> float | None:
    """Compare captured weights with those that the model returns; None if it returns none.

    Both are in the order of the layers. Weights of other sizes, or of another number of calls of
    that size, belong to modules that return none, and are not compared.
    """
    asked = replace(task, inputs={**task.inputs, "output_attentions": True})
    with variant.in_use() as model:
        output = run_task(type(variant.model).__name__, model, asked)
    returned = defaultdict[Any, list[Any]](list)
    for cross, weights in _returned_weights(output):
        returned[cross, tuple(weights.shape)].append(weights)
    del output
    if not returned:
        return None
    made = Counter(_watch(variant, None, task, lambda call: (call.cross, call.shape)).results)
    # The order tells which layer returned which weights, if there are as many calls of their size.
    waiting = {key: iter(found) for key, found in returned.items() if len(found) == made[key]}

    def compare(call: "Call") -> float | None:
        given = next(waiting.get((call.cross, call.shape), iter(())), None)
        if given is None:
            return None
        b, h, q, k = call.shape
        blocks = row_blocks(q, b * h * k)
        return worst([float(_off(given[:, :, at], call.weights(at)).max()) for at in blocks])

    found = [one for one in _watch(variant, None, task, compare).results if one is not None]
    return worst(found) if found else None


def _returned_weights(output: Any) -> Iterator[tuple[bool, "Tensor"]]:
    """Yield the attention weights in an output, the encoder's first, and whether they are cross."""
    import torch

    if not isinstance(output, Mapping):
        return
    for name in ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions"):
        for weights in output.get(name) or ():
            if isinstance(weights, torch.Tensor) and weights.ndim == 4:
                yield name == "cross_attentions", weights
    for inner in output.values():  # the encoders of CLIP
        yield from _returned_weights(inner)
