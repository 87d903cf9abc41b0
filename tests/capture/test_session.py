"""Watching leaves the model as it was found, in every way it can be used."""

import contextlib
import gc
import inspect
import re
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.capture import UncapturedAttentionError, discovery, session, watch
from overt.capture.session import unwrap_model
from overt.capture.state import STATE
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack(FusedAttention(), WrittenAttention()).eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 6, 16)


def state(model):
    """Everything a watcher could leave behind."""
    return (
        [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()],
        [(p.requires_grad, p.grad) for p in model.parameters()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
        (STATE.sessions, STATE.module_stack, STATE.events.since(None), STATE.traces),
        [sorted(vars(m)) for m in model.modules()],
    )


def test_the_model_gives_the_same_and_is_left_as_found(model, x):
    before, plain = state(model), model(x)
    with watch(model) as trace:
        watched = model(x)
    assert state(model) == before
    assert torch.equal(plain, watched)
    assert trace.names == ("layers.0", "layers.1")


def test_also_after_an_error_in_the_model(model, x):
    before = state(model)
    with pytest.raises(RuntimeError), watch(model):
        model(model(x)[..., :5])
    assert state(model) == before
    with watch(model) as trace:
        model(x)
    assert len(trace) == 2


def test_an_error_that_the_model_catches_does_not_lose_its_place(x):
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.broken, self.attend = Stack(FusedAttention()), FusedAttention()

        def forward(self, x):
            try:
                self.broken(x[..., :3])
            except RuntimeError:
                x = self.attend(x)
            return x

    model = Careful()
    with watch(model, layers=["attend"]) as trace:
        model(x)
    assert trace.names == ("attend",)
    with watch(model) as trace:  # one that failed is not missed
        model(x)
    assert trace.names == ("attend",)


def test_nested_watchers_each_see_their_own(model, x):
    with watch(model) as outer:
        model(x)
        with watch(model, layers=[1]) as inner:
            model(x)
    assert outer.names == ("layers.0", "layers.1") * 2 and inner.names == ("layers.1",)


def test_watchers_may_be_closed_in_any_order(model, x):
    before = state(model)
    first, second = watch(model), watch(model)
    early, late = first.__enter__(), second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)  # nobody but the second watches by now
    second.__exit__(None, None, None)
    assert len(early) == 2 and len(late) == 4
    assert late.names == ("layers.0", "layers.1") * 2
    assert state(model) == before


def test_a_step_is_counted_once_however_many_watch(model, x):
    with watch(model) as outer:
        model(x)
        with watch(model) as inner:
            model(x)
        model(x)
    assert [call.step for call in outer] == [0, 0, 1, 1, 2, 2]
    assert [call.step for call in inner] == [0, 0]


def test_closing_what_is_not_open_is_said(model, x):
    watcher = watch(model)
    with pytest.raises(RuntimeError, match=r"Stack.*open"):
        watcher.__exit__(None, None, None)
    with watcher:
        model(x)
        problems = []

        def close():
            try:
                watcher.__exit__(None, None, None)
            except RuntimeError as problem:
                problems.append(str(problem))

        other = threading.Thread(target=close)
        other.start()
        other.join()
    assert "not open in this thread" in problems[0]
    with pytest.raises(RuntimeError, match="not open"):
        watcher.__exit__(None, None, None)


def test_a_part_of_a_model_can_be_watched_from_within_a_watch_of_the_whole(model, x):
    with watch(model) as whole, watch(model.layers[1]) as part:
        model(x)
    assert whole.names == ("layers.0", "layers.1")
    assert part.names == ("",)


def test_threads_do_not_see_each_other(model):
    problems = []

    def use(length, quiet):
        try:
            y = torch.randn(1, length, 16)
            for _ in range(25):
                if quiet:
                    model(y)
                    assert not STATE.events.since(None)
                    continue
                with watch(model) as trace:
                    model(y)
                assert [call.shape[2] for call in trace] == [length] * 2
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=use, args=(n, n == 3)) for n in (2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_one_watcher_in_two_threads(model, x):
    watcher = watch(model)
    seen = {}

    def use(length):
        for _ in range(10):
            with watcher as found:
                model(torch.randn(1, length, 16))
            seen.setdefault(length, []).append([call.shape[2] for call in found])

    threads = [threading.Thread(target=use, args=(n,)) for n in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {2: [[2, 2]] * 10, 5: [[5, 5]] * 10}


def test_another_thread_may_ask_while_the_model_is_watched(model, x):
    found = []
    with watch(model) as trace:
        model(x)
        thread = threading.Thread(target=lambda: found.append(len(trace)))
        thread.start()
        thread.join()
    assert found == [2]


def test_a_watcher_is_used_again(model, x):
    watcher = watch(model, layers=["layers.0"])
    for _ in range(3):
        with watcher as trace:
            model(x)
        assert len(trace) == 1


def test_each_takes_calls_as_they_come_and_keeps_nothing_else(model, x):
    with watch(model, each=lambda call: (call.name, call.step, call.weights().shape)) as trace:
        model(x)
        model(x[:, :3])
        assert not any(hasattr(event, "source") for event in STATE.events.since(None))
    assert trace.results == [
        ("layers.0", 0, (2, 4, 6, 6)),
        ("layers.1", 0, (2, 4, 6, 6)),
        ("layers.0", 1, (2, 4, 3, 3)),
        ("layers.1", 1, (2, 4, 3, 3)),
    ]
    assert len(trace) == 0


def test_heads_are_chosen(model, x):
    with watch(model, heads=[1, 3]) as trace:
        model(x)
    with watch(model) as all_heads:
        model(x)
    torch.testing.assert_close(trace.map().weights, all_heads.map().weights[:, :, [1, 3]])


def test_unknown_layers_are_answered_with_those_there_are(model):
    with pytest.raises(ValueError, match=r"layer 2 .* 2 "):
        watch(model, layers=[2])
    with pytest.raises(ValueError, match=r"'layer.0'.*'layers.0', 'layers.1'"):
        watch(model, layers=["layer.0"])


def test_what_is_computed_in_the_block_outside_the_model_is_not_taken_for_attention(model, x):
    with watch(model) as trace:
        model(x)
        (x @ x.transpose(1, 2)).softmax(-1) @ x
        trace.map()
    assert len(trace) == 2


def test_gradients_reach_the_model(model, x):
    with watch(model) as trace:
        model(x)
    trace.map().weights.square().sum().backward()
    assert model.layers[0].query.weight.grad.abs().sum() > 0
    assert model.layers[1].key.weight.grad.abs().sum() > 0


def test_without_a_graph_there_is_none(model, x):
    with torch.no_grad(), watch(model) as trace:
        model(x)
    assert not trace.map().weights.requires_grad


def test_wrappers_are_refused_or_warned_of(model, x):
    with pytest.raises(UncapturedAttentionError, match=r"watch model\.module"):
        watch(nn.DataParallel(model))
    with pytest.raises(UncapturedAttentionError, match="TorchScript"):
        watch(torch.jit.trace(FusedAttention(), x, check_trace=False))

    class DistributedDataParallel(nn.Module):  # the real one needs processes
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    wrapped = DistributedDataParallel(model)
    with pytest.warns(UserWarning, match=r"wrap\(model, loss="), watch(wrapped) as trace:
        wrapped(x)
    assert trace.names == ("layers.0", "layers.1")
    assert unwrap_model(wrapped) is model


def test_copies_and_saving_are_not_disturbed(model, x, tmp_path):
    import copy

    with watch(model):
        twin = copy.deepcopy(model)
        model(x)
        torch.save(model.state_dict(), tmp_path / "weights")
    with warnings.catch_warnings(), watch(twin) as trace:
        twin(x)
    assert len(trace) == 2


def test_what_was_watched_is_let_go_without_the_collector():
    """Rings of references would keep every activation until the collector happens to run."""
    model = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
    states = torch.randn(2, 5, 16)

    def step() -> list[weakref.ref]:
        with watch(model) as trace:
            output = model(states)
        call = trace.calls[0]
        assert call.source.taps is not None
        held = [weakref.ref(one) for one in (call, trace, output, *call.source.taps)]
        rows = torch.zeros(2, 1, dtype=torch.long)
        columns = torch.arange(5).expand(2, 5)
        taught = trace.log_block(rows, columns).log_weights[..., 0].sum()
        (output.sum() + taught).backward()
        return held

    gc.collect()
    gc.disable()
    try:
        assert [one() for one in step()] == [None] * 5
    finally:
        gc.enable()


def test_what_is_no_module_is_refused_by_its_type():
    refuse = inspect.unwrap(
        session._check_model
    )  # without the checks of types that only tests have
    with pytest.raises(TypeError, match=r"Module, got str"):
        refuse("bert-base-uncased")


def test_one_layer_is_a_list_too_and_an_edit_is_a_function(model):
    choose = inspect.unwrap(discovery.select_layers)
    for given in ("layers.0", -1):
        with pytest.raises(TypeError, match=re.escape(f"use layers=[{given!r}]")):
            choose(model, given)
    make = inspect.unwrap(watch.__init__)
    with pytest.raises(TypeError, match=r"Bias, got 3"):
        make(object.__new__(watch), model, edit=3)
    for given in (1, []):
        with pytest.raises(TypeError, match=re.escape(f"got {given}")):
            make(object.__new__(watch), model, heads=given)


class Reused(FusedAttention):
    """Fused attention that goes on with the memory of its queries, or of its keys."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x, mask=None):
        q, k, v = (
            part(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q *= 0.5  # before it attends, which is nobody's concern
        out = F.scaled_dot_product_attention(q, k, v)
        {"queries": q, "keys": k, "values": v}[self.what].zero_()
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("what", ["queries", "keys", "values"])
@torch.no_grad()
def test_queries_and_keys_that_are_changed_after_they_attended_are_refused(what):
    torch.manual_seed(0)
    model, x = Stack(Reused(what)).eval(), torch.randn(2, 6, 16)
    with watch(model, each=lambda call: call.weights()) as at_once:
        model(x)
    with contextlib.ExitStack() as stack:
        if what != "values":
            stack.enter_context(
                pytest.raises(
                    UncapturedAttentionError,
                    match=r"'layers.0' .*in place.*each=",
                )
            )
        trace = stack.enter_context(watch(model))
        model(x)
    if what == "values":
        torch.testing.assert_close(trace.map().weights[:, 0], at_once.results[0])
    other = Stack(FusedAttention()).eval()
    other.load_state_dict(model.state_dict())
    other.layers[0].query.weight *= 0.5
    other.layers[0].query.bias *= 0.5
    with watch(other) as wanted:
        other(x)
    torch.testing.assert_close(at_once.results[0], wanted.map().weights[:, 0])
