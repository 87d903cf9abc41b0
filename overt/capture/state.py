"""Thread-local capture state: open sessions, the stack of running modules, the event log.

Events are a linked list, not a `list`: a compiled graph would be guarded on the length of a list.
"""

import threading
from typing import Any

from torch import nn


class EventNode:
    """One event and a reference to the event before it."""

    def __init__(self, previous: "EventNode | None", event: Any) -> None:
        self.previous = previous
        self.event = event


class EventLog:
    """A linked list of events, newest first, that a compiled graph can append to."""

    def __init__(self) -> None:
        self.last = EventNode(None, None)

    def add(self, event: Any) -> None:
        """Append an event."""
        self.last = EventNode(self.last, event)

    def discard(self, kind: type) -> None:
        """Drop the events of one class; their nodes stay, because sessions refer to them."""
        node = self.last
        while node.previous is not None:
            if isinstance(node.event, kind):
                node.event = None
            node = node.previous

    def since(self, mark: EventNode | None) -> list[Any]:
        """Return the events after `mark`, oldest first."""
        found = []
        node = self.last
        while node is not mark and node.previous is not None:
            if node.event is not None:
                found.append(node.event)
            node = node.previous
        return found[::-1]


class CaptureState(threading.local):
    """Capture state of one thread."""

    def __init__(self) -> None:
        self.module_stack: list[nn.Module] = []  # running modules, innermost last
        self.events = EventLog()
        self.sessions: list[Any] = []  # open sessions, outermost first
        self.num_heads: int | None = None  # inside nn.MultiheadAttention
        self.is_cross: bool | None = None  # inside nn.MultiheadAttention; None if not known
        self.traces: dict[int, Any] = {}  # softmax results by id, for `eager_attention`
        self.op_nodes: dict[int, Any] = {}  # how tensors were made, for `axis_provenance`
        self.tracks_axes = True  # whether `op_nodes` is filled
        self.key_slices: dict[Any, Any] = {}  # the slice of its keys that a call has used
        self.last_product: Any = None  # last product without a softmax operand: perhaps the scores
        self.write_counts: dict[int, int] = {}  # by storage: in-place writes in inference mode
        self.dispatch_mode: Any = None  # the `AttentionDispatchMode` of this block, if any
        self.excluded: set[nn.Module] = set()  # modules that only `without=` sessions contain
        self.mask_copy: Any = None  # the last copied mask, its version, and the copy
        self.steps = 0  # forward passes of the model so far
        # Whether the function mode is entered only where the model attends, see `scoped_mode`.
        self.scoped = False
        self.mode_scope: Any = None  # the module that has entered the mode, and how to leave it
        self.in_interface = False  # inside of a function of the Hugging Face interface
        self.ran: set[nn.Module] | None = None  # hooked modules that ran, None if not needed
        # Records a call of the Hugging Face interface without the mode, see `decode_rows`; None if
        # there is no such recorder.
        self.decode_recorder: Any = None


STATE = CaptureState()
FLEX = "flex"  # event tag: a FlexAttention call, its module not known yet
FAILED = "failed"  # event tag: a module that raised
GRAPH = "graph"  # event tag: a module that ran inside a compiled graph
OPEN_SESSIONS: list[Any] = []  # the sessions of all threads
LOCK = threading.Lock()  # guards the per-module counts of hooks and declarations
