"""What is remembered of a call, and who is told of it."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from overt.capture import checkpoints
from overt.capture.call import Projected, Route, Written
from overt.capture.places import FLEX, HERE


@dataclass(frozen=True, eq=False)
class Record:
    """What a route remembers of a call; it becomes a `Call` when somebody asks.

    `cross` is whether queries and keys came from different places, None if the route cannot tell.
    `sealed` is whether the gradients of values and of output were left behind in a compiled graph.
    `versions` are of queries and keys that are no copies: how often each had been changed in place.
    """

    module: nn.Module
    route: Route
    source: Projected | Written
    value: Tensor | None
    output: Tensor | None
    cross: bool | None
    sealed: tuple[bool, bool] = (False, False)
    versions: tuple[int, int] | None = None

    @property
    def changed(self) -> bool:
        """Whether queries or keys were changed in place since they were multiplied."""
        if self.versions is None or not isinstance(self.source, Projected):
            return False
        return (self.source.query._version, self.source.key._version) != self.versions

    @cached_property
    def ends(self) -> tuple[Tensor | None, Tensor | None]:
        """Values and output, as a call shows them, however they are looked at first."""
        found = [self.value, self.output]
        if isinstance(self.source, Projected) and any(self.sealed):
            some = [at for at, sealed in enumerate(self.sealed) if sealed]
            with torch.inference_mode(False), torch.enable_grad():
                ways = self.source.query, self.source.key
                made = _Sealed.apply(*ways, *(found[at] for at in some))
            for at, one in zip(some, made, strict=True):
                found[at] = one
        return found[0], found[1]

    def copied(self) -> "Record":
        """The same record in memory of its own."""
        return replace(
            self,
            source=_copied(self.source),
            value=None if self.value is None else self.value.clone(),
            output=None if self.output is None else self.output.clone(),
        )


class _Sealed(torch.autograd.Function):
    """What has come out of a compiled graph without its gradient, and says so when it is asked.

    It stands in the way of every gradient that goes on to the queries or keys of its call: nothing
    is lost without a word. Only who asks for gradients of certain tensors (`autograd.grad`,
    `backward(inputs=)`) that neither comes from, as of a projection of values outside of the graph,
    goes by it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The same values."""
        return tuple(one.view_as(one) for one in given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise: what a graph gives out has a gradient, or costs nothing."""
        raise RuntimeError(
            "values and outputs of a compiled model are seen without their gradient; run the model "
            "without torch.compile, or detach them, as call.value.detach()"
        )


def _lasting(source: Projected | Written) -> bool:
    """Whether the keys are memory that is written again and again, as those of a static cache."""
    if not isinstance(source, Projected):
        return False
    return source.key.is_inference() or source.key._version > 0


def _copied(source: Projected | Written) -> Projected | Written:
    changed: dict[str, Any] = {
        one.name: getattr(source, one.name).clone()
        for one in fields(source)
        if isinstance(getattr(source, one.name), Tensor)
    }
    if isinstance(source, Projected):
        changed["taps"] = None  # they are views of the memory that will be written over
    return replace(source, **changed)


def settled(event: Any) -> Any:
    """The record of a FlexAttention call whose module is known by now; any other event as it is."""
    if not isinstance(event, tuple) or event[0] is not FLEX or event[1] is None:
        return event
    _, module, query, key, value, output, score, allow, scale = event
    source = Projected(query, key, scale, modify=score, allow=allow)
    return Record(module, Route.FLEX, source, value, output, None)


def remember(record: Record) -> None:
    """Keep the record for those who watch, or hand it to those who take calls as they come."""
    if torch.compiler.is_compiling():
        HERE.events.add(_out_of_graph(record))
    elif checkpoints.current() is not checkpoints.Pass.AGAIN:
        kept = [watcher.take(record) for watcher in HERE.watchers]
        if any(kept):
            HERE.events.add(_kept(record))


def _out_of_graph(record: Record) -> Record:
    """The record as a graph gives it out: values and output without a gradient.

    Backward, a graph takes a gradient for everything it has given out with one: zeros, made, copied
    and added, where nobody has asked for it. Queries and keys are what losses are made of.
    """
    if not isinstance(record.source, Projected) or not record.source.query.requires_grad:
        return record  # then nothing could be put in the way of it
    ends = record.value, record.output
    value, output = (None if one is None else one.detach() for one in ends)
    learns = [one is not None and one.requires_grad for one in ends]
    return replace(record, value=value, output=output, sealed=(learns[0], learns[1]))


def _kept(record: Record) -> Record:
    """The record, with what will be written over in memory of its own.

    The output is nobody's cache, and a copy of it would not lead to a target.
    """
    if _lasting(record.source):
        return replace(record.copied(), output=record.output)
    source = record.source
    if isinstance(source, Projected):
        bias, allowed = (_lasting_mask(one) for one in (source.bias, source.allowed))
        if bias is not source.bias or allowed is not source.allowed:
            record = replace(record, source=replace(source, bias=bias, allowed=allowed))
        if not source.query.is_inference():
            now = source.query._version, source.key._version
            object.__setattr__(record, "versions", now)  # quicker than another record, a call
    return record


def _lasting_mask(mask: Tensor | None) -> Tensor | None:
    """A mask, copied if it was filled in place: it may be again, as a buffer of every call is."""
    return mask if mask is None or mask.is_inference() or not mask._version else _own(mask)


def _own(mask: Tensor) -> Tensor:
    """A copy of a mask, the same one for all layers that are given the same mask."""
    known = HERE.copied
    if known is None or known[0] is not mask or known[1] != mask._version:
        HERE.copied = known = (mask, mask._version, mask.clone())
    copy: Tensor = known[2]
    return copy
