"""Record attention calls and pass them to the open sessions."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture import (
    _torch_compat,
    activation_checkpointing,
    autograd_functions,
    dispatch_mode,
    record_checks,
)
from overt.capture.axis_roles import LeadingAxes
from overt.capture.call import MaterializedCall, QKCall, Route
from overt.capture.state import FLEX, STATE


@dataclass(frozen=True, eq=False)
class CallRecord:
    """The captured tensors of a call, from which a session makes a `Call`.

    Attributes:
        cross: Whether queries and keys come from different sequences, None if not known.
        detached: Whether values and output were detached when leaving a compiled graph.
        versions: Version counters of the tensors at the call (see `record_checks`).
        exact: Whether the output is weights times values: no dropout, nothing added.
        leading_axes: Samples and heads in the leading axes of the output, None for (b, h).
        through_interface: Whether the call came through the attention interface of Hugging Face.
    """

    module: nn.Module
    route: Route
    source: QKCall | MaterializedCall
    value: Tensor | None
    output: Tensor | None
    cross: bool | None
    detached: tuple[bool, bool] = (False, False)
    versions: tuple[int, ...] | None = None
    exact: bool = True
    leading_axes: LeadingAxes | None = None
    through_interface: bool = False

    @property
    def modified(self) -> frozenset[str]:
        """The names of the tensors that were modified in place since the call."""
        return record_checks.modified_tensors(self.source, self.value, self.output, self.versions)

    @property
    def current_source(self) -> QKCall | MaterializedCall:
        """The source without factors of the logits that were modified in place."""
        if isinstance(self.source, MaterializedCall) and "factors" in self.modified:
            return replace(self.source, query=None, key=None)
        return self.source

    @cached_property
    def value_and_output(self) -> tuple[Tensor | None, Tensor | None]:
        """Values and output, None where they were modified in place since the call.

        Cached, so that every access returns the same tensors.
        """
        modified = self.modified
        found = [
            None if name in modified else one
            for name, one in (("values", self.value), ("outputs", self.output))
        ]
        # Tensors that left a compiled graph without gradient get a node that raises, so that a
        # backward pass through them is an error and not a silent zero.
        if isinstance(self.source, QKCall) and any(self.detached):
            some = [
                at
                for at, detached in enumerate(self.detached)
                if detached and found[at] is not None
            ]
            # The call may be read under `no_grad`; the node has to exist all the same.
            with torch.inference_mode(False), torch.enable_grad():
                inputs = self.source.query, self.source.key
                made = _DetachedFromGraph.apply(*inputs, *(found[at] for at in some))
            for at, one in zip(some, made, strict=True):
                found[at] = one
        return found[0], found[1]

    def clone_tensors(self) -> "CallRecord":
        """Return the record with copies of its tensors."""
        return replace(
            self,
            source=_clone_source(self.source),
            value=None if self.value is None else self.value.clone(),
            output=None if self.output is None else self.output.clone(),
        )

    def without_tensors(self) -> "CallRecord":
        """Return the record without what it would keep in memory."""
        nothing = MaterializedCall(torch.empty(0, 0, 0, 0), Kind.AMOUNT)
        return replace(self, source=nothing, value=None, output=None)


class _DetachedFromGraph(torch.autograd.Function):
    """Tensors that left a compiled graph without their gradient; a backward pass raises.

    Any backward pass that continues to the queries or keys of the call raises, so no gradient is
    lost silently. Gradients requested only for tensors that queries and keys do not depend on
    (`autograd.grad`, `backward(inputs=)`), such as a value projection outside of the graph, are not
    caught.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the same values."""
        return tuple(one.view_as(one) for one in given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise: graph outputs with a gradient would slow down every backward pass."""
        raise RuntimeError(
            "values and outputs of a compiled model are captured without gradient; run the model "
            "without torch.compile, or detach them: call.value.detach()"
        )


def _may_be_overwritten(source: QKCall | MaterializedCall) -> bool:
    """Return whether the tensors may be overwritten later without a change of version counters.

    True for the keys of a static cache, and in inference mode, which has no version counters.
    """
    if not isinstance(source, QKCall):
        return source.used.is_inference()
    # A static cache is one tensor that every step writes into: from the first write on, its counter
    # is above zero.
    return source.key.is_inference() or source.key._version > 0


def _clone_source(source: QKCall | MaterializedCall) -> QKCall | MaterializedCall:
    changed: dict[str, Any] = {
        one.name: getattr(source, one.name).clone()
        for one in fields(source)
        if isinstance(getattr(source, one.name), Tensor)
    }
    if isinstance(source, QKCall):
        changed["taps"] = None  # they are views of memory that may be overwritten
    return replace(source, **changed)


def resolve_flex_event(event: Any) -> Any:
    """Return the record of a FlexAttention event whose module is known; other events unchanged."""
    if not isinstance(event, tuple) or event[0] is not FLEX or event[1] is None:
        return event
    _, module, query, key, value, output, score, allow, scale = event
    source = QKCall(query, key, scale, score_mod=score, mask_mod=allow)
    return CallRecord(module, Route.FLEX, source, value, output, None)


def record_call(record: CallRecord) -> None:
    """Add the record to the event log, or pass it to sessions with `each`."""
    if torch.compiler.is_compiling():
        STATE.events.add(_detach_from_graph(record))
        return
    if _torch_compat.is_vmapped(record.value):
        raise NotImplementedError(
            f"{type(record.module).__name__} attends inside torch.vmap, whose tensors cannot be "
            "read outside; call the model with the whole batch, or with one sample at a time"
        )
    if record.route is Route.SOFTMAX and not STATE.tracks_axes:
        _raise_untracked(record)
    # The dispatch mode has just seen the product of this call: it is accounted for.
    if STATE.dispatch_mode is not None:
        STATE.dispatch_mode.mark_captured(math.prod(record.source.shape))
    # A recomputation repeats a call that has a record already.
    if (
        activation_checkpointing.checkpoint_phase()
        is not activation_checkpointing.CheckpointPhase.RECOMPUTE
    ):
        record = _block_gradients_in_function(record)
        kept = [session.handle(record) for session in STATE.sessions]
        if any(kept):
            STATE.events.add(_protect(record))


def _raise_untracked(record: CallRecord) -> None:
    """Raise for eager attention in a model that was fused before, so axes were not tracked."""
    for session in STATE.sessions:
        dispatch_mode.reset_check(session.watcher.unwrapped)
    raise NotImplementedError(
        f"{type(record.module).__name__} uses eager attention, but all attention was fused when "
        "this model was first watched, so axes were not tracked; run the block again to track them"
    )


def _block_gradients_in_function(record: CallRecord) -> CallRecord:
    """Block the gradients of a call that was made inside a custom autograd function."""
    function = autograd_functions.running_function()
    if function is None:
        return record
    kind = type(record.module).__name__
    source, value = autograd_functions.block_gradients(record.source, record.value, kind, function)
    return replace(
        record, source=source, value=value, output=None
    )  # the function returns another tensor


def _detach_from_graph(record: CallRecord) -> CallRecord:
    """Detach values and output of a record that leaves a compiled graph.

    For each output with a gradient, the backward graph would take one: zeros are allocated, copied
    and added even if no loss uses them. Queries and keys keep theirs, as losses need it.
    """
    if not isinstance(record.source, QKCall) or not record.source.query.requires_grad:
        return record  # no query to attach the error to
    ends = record.value, record.output
    value, output = (None if one is None else one.detach() for one in ends)
    learns = [one is not None and one.requires_grad for one in ends]
    return replace(record, value=value, output=output, detached=(learns[0], learns[1]))


def _protect(record: CallRecord) -> CallRecord:
    """Copy the tensors of a record that may be overwritten, and store the version counters.

    An output with a gradient is not copied: it is not a cache, and targets depend on this tensor.
    """
    if _may_be_overwritten(record.source):
        learns = record.output is not None and not record.output.is_inference()
        record = (
            replace(record.clone_tensors(), output=record.output)
            if learns
            else record.clone_tensors()
        )
    elif isinstance(record.source, QKCall):
        record = _protect_masks(record, record.source)
    # Of the tensors that are stored, which may be the copies made above.
    now = record_checks.tensor_versions(record.source, record.value, record.output)
    object.__setattr__(record, "versions", now)  # faster than `replace` on every call
    return record


def _protect_masks(record: CallRecord, source: QKCall) -> CallRecord:
    """Copy masks, biases and sinks that may be overwritten."""
    bias, allowed = (_protect_mask(one) for one in (source.bias, source.allowed))
    sinks = None if source.sinks is None else source.sinks.clone()  # an optimizer may change them
    if bias is source.bias and allowed is source.allowed and sinks is None:
        return record
    return replace(record, source=replace(source, bias=bias, allowed=allowed, sinks=sinks))


def _protect_mask(mask: Tensor | None) -> Tensor | None:
    """Copy a mask that was filled in place or is a parameter: it may be written again."""
    if mask is None or mask.is_inference():
        return mask
    return _clone_mask(mask) if mask._version or (mask.is_leaf and mask.requires_grad) else mask


def _clone_mask(mask: Tensor) -> Tensor:
    """Copy a mask, once for all layers that share it."""
    known = STATE.mask_copy
    if known is None or known[0] is not mask or known[1] != mask._version:
        STATE.mask_copy = known = (mask, mask._version, mask.clone())
    copy: Tensor = known[2]
    return copy
