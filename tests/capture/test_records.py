"""What is remembered of a call, and who is told."""

import torch
from torch import nn

from overt.attention import Kind
from overt.capture.call import MaterializedCall, QKCall, Route
from overt.capture.records import CallRecord, record_call, resolve_flex_event
from overt.capture.session import watch
from overt.capture.state import FLEX, STATE, EventLog


class Listener:
    """A watcher that keeps, or takes."""

    edit = None

    def __init__(self, keeps):
        self.keeps, self.told = keeps, []

    def handle(self, record):
        self.told.append(record)
        return self.keeps


def record():
    weights = torch.full((1, 1, 2, 2), 0.5)
    source = MaterializedCall(weights, Kind.PROBABILITY)
    return CallRecord(nn.Identity(), Route.SOFTMAX, source, None, None, None)


def test_a_record_is_kept_when_anybody_keeps_it(monkeypatch):
    for keeps, expected in (([False, False], 0), ([False, True], 1), ([True, True], 1)):
        monkeypatch.setattr(STATE, "events", EventLog())
        listeners = [Listener(one) for one in keeps]
        monkeypatch.setattr(STATE, "sessions", listeners)
        record_call(record())
        assert len(STATE.events.since(None)) == expected
        assert [len(one.told) for one in listeners] == [1, 1]


def test_a_flex_call_becomes_a_record_once_its_module_is_known():
    x, module = torch.zeros(1, 1, 2, 4), nn.Identity()
    loose = (FLEX, None, x, x, x, x, None, None, 0.5)
    assert resolve_flex_event(loose) is loose
    found = resolve_flex_event((FLEX, module, *loose[2:]))
    assert found.module is module and found.route is Route.FLEX
    assert isinstance(found.source, QKCall) and found.source.scale == 0.5
    assert resolve_flex_event(module) is module


def test_a_copied_record_does_not_change_with_the_original():
    x = torch.randn(1, 1, 2, 4, requires_grad=True)
    hidden = torch.ones(2, 2, dtype=torch.bool)
    source = QKCall(x * 1, x * 1, 0.5, allowed=hidden)
    original = CallRecord(nn.Identity(), Route.SDPA, source, x * 2, None, None)
    copied = original.clone_tensors()
    expected = original.source.weights().detach().clone()
    with torch.no_grad():
        original.source.query.zero_()
        original.value.zero_()
    torch.testing.assert_close(copied.source.weights().detach(), expected)
    assert copied.value.any() and copied.source.scale == 0.5
    assert copied.source.query.requires_grad


class Buffered(nn.Module):
    """Attention whose keys are always the same memory, as in a static cache."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.cache = torch.zeros(2, 1, 5, 4)

    def forward(self, x):
        self.cache.copy_(self.key(x))
        return nn.functional.scaled_dot_product_attention(x, self.cache, x)


def test_a_pass_is_read_as_it_was_after_its_keys_were_written_over():
    torch.manual_seed(0)
    model, places = Buffered(), torch.arange(5).expand(2, -1)
    x = torch.randn(2, 1, 5, 4, requires_grad=True)
    with watch(model) as trace:
        model(x)
        model(3 * x)
    expected = (x @ model.key(x).mT / 2).softmax(-1)[:, None]
    first = trace.at(0)
    torch.testing.assert_close(first.map().weights, expected)
    torch.testing.assert_close(first.log_block(places, places).weights, expected)


def test_a_mask_that_is_filled_anew_is_copied_once_for_all_layers():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(1, 1, 4, 4))

        def forward(self, x, hidden):
            self.mask.zero_().masked_fill_(hidden, -torch.inf)
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(attend(x, x, x, self.mask), x, x, self.mask)

    model, x = Attend(), torch.randn(2, 1, 4, 3)
    with watch(model) as trace:
        for hidden in (3, 0):
            model(x, torch.arange(4) == hidden)
    for call, hidden in zip(trace.calls, (3, 3, 0, 0), strict=True):
        weights = call.weights()
        assert (weights[..., hidden] == 0).all() and (weights > 0).sum() == 2 * 4 * 3
    first, second, third, _ = (call.source.bias for call in trace.calls)
    assert first is second and third is not second and STATE.mask_copy is None
