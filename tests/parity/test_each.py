"""`watch(each=)`: a callback per call, with exceptions, nested watchers and threads."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture.call import Call
from overt.capture.coverage import UncapturedAttentionError
from overt.capture.session import watch
from overt.capture.state import STATE


class Attention(nn.Module):
    """Fused self-attention of two heads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """A stack of attention layers."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def model() -> Stack:
    return Stack().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8)


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def is_clean(model: nn.Module) -> bool:
    """Return whether no state of any watcher is left in this thread."""
    happened = STATE.events.since(None)
    return not (
        count_hooks(model) or STATE.sessions or STATE.module_stack or STATE.traces or happened
    )


def weights(call: Call) -> Tensor:
    return call.weights().detach()


def test_each_is_called_immediately_and_only_its_result_is_kept(model: Stack, x: Tensor) -> None:
    order: list[Any] = []

    def each(call: Call) -> str:
        order.append(call.name)
        return call.name.upper()

    handle = model.layers[1].register_forward_hook(lambda *_: order.append("layer 1 is done"))
    with watch(model, each=each) as trace:
        model(x)
        assert order == ["layers.0", "layers.1", "layer 1 is done", "layers.2"]
    handle.remove()
    assert trace.results == ["LAYERS.0", "LAYERS.1", "LAYERS.2"]
    assert trace.calls == ()


def test_calls_are_counted_by_step(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: (call.step, call.name)) as trace:
        model(x)
        model(x)
    assert [step for step, _ in trace.results] == [0, 0, 0, 1, 1, 1]


def test_calls_passed_to_each_equal_those_without_it(model: Stack, x: Tensor) -> None:
    with watch(model, layers=[1, 2], heads=[1], each=weights) as trace:
        model(x)
    with watch(model, layers=[1, 2], heads=[1]) as plain:
        model(x)
    torch.testing.assert_close(torch.stack(trace.results, dim=1), plain.map().weights)


def test_calls_are_freed_after_each_returns(model: Stack, x: Tensor) -> None:
    references: list[weakref.ref[Any]] = []

    def each(call: Call) -> None:
        references.extend((weakref.ref(call), weakref.ref(call.source)))

    with torch.no_grad(), watch(model, each=each) as trace:
        model(x)
        gc.collect()
        assert len(references) == 6 and [one() for one in references] == [None] * 6
    assert trace.results == [None] * 3


# --- exceptions


def fail_at(name: str) -> Callable[[Call], str]:
    def each(call: Call) -> str:
        if call.name == name:
            raise KeyError(name)
        return call.name

    return each


@pytest.mark.parametrize("name", ["layers.0", "layers.2"])
def test_an_error_in_each_propagates_and_leaves_no_state(
    model: Stack, x: Tensor, name: str
) -> None:
    before = model(x)
    watching = watch(model, each=fail_at(name))
    for _ in range(2):  # the watcher can be used again
        with pytest.raises(KeyError, match=name), watching:
            model(x)
        assert is_clean(model)
    torch.testing.assert_close(model(x), before)
    with watch(model) as trace:
        model(x)
    assert trace.names == ("layers.0", "layers.1", "layers.2")


def test_after_a_caught_error_the_next_pass_is_complete(model: Stack, x: Tensor) -> None:
    failed: list[str] = []

    def each(call: Call) -> str:
        if not failed and call.name == "layers.1":
            raise KeyError(call.name)
        return call.name

    with watch(model, each=each) as trace:
        with pytest.raises(KeyError):
            model(x)
        failed.append("now")
        first = len(trace.results)
        model(x)
        assert trace.results[first:] == ["layers.0", "layers.1", "layers.2"]
    assert is_clean(model)


def test_after_an_error_no_module_counts_as_running(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as trace:
        model(x)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 9))
        trace.results.clear()
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 4))  # outside of any module
        assert trace.results == []


def test_an_error_of_the_model_is_not_hidden_by_missed_modules(model: Stack, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="multiplied"), watch(model, each=weights):
        model(torch.randn(2, 5, 9))
    assert is_clean(model)


def test_missing_calls_raise_with_each_too(x: Tensor) -> None:
    with (
        pytest.raises(UncapturedAttentionError, match="was not called"),
        watch(Stack(), each=weights),
    ):
        pass
    plain = nn.Linear(8, 8)
    with (
        pytest.raises(UncapturedAttentionError, match="has no attention"),
        watch(plain, each=weights),
    ):
        plain(x)


# --- several watchers


def test_nested_watchers_have_separate_results(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as outer:
        model(x)
        with watch(model, layers=[2], each=lambda call: call.step) as inner:
            model(x)
        with watch(model) as plain:
            model(x)
    assert len(outer.results) == 9
    assert len(inner.results) == 1
    assert len(plain.calls) == 3
    assert inner.calls == ()
    assert is_clean(model)


def test_calls_kept_by_an_inner_watcher_are_not_kept_by_the_outer(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as outer:
        with watch(model):
            model(x)
        assert len(outer.results) == 3
        assert outer.calls == ()


def test_an_error_in_an_inner_watcher_does_not_stop_the_outer(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as outer:
        with pytest.raises(KeyError), watch(model, each=fail_at("layers.1")):
            model(x)
        outer.results.clear()
        model(x)
        assert outer.results == ["layers.0", "layers.1", "layers.2"]
    assert is_clean(model)


def test_a_watcher_can_be_nested_in_itself(model: Stack, x: Tensor) -> None:
    watching = watch(model, each=lambda call: call.name)
    with watching as outer, watching as inner:
        model(x)
    assert outer.results == inner.results == ["layers.0", "layers.1", "layers.2"]
    assert is_clean(model)


def test_each_may_run_the_model_again(model: Stack, x: Tensor) -> None:
    """A nested pass, such as the same input without a token, has separate results."""
    inside: list[list[str]] = []

    def each(call: Call) -> str:
        if call.name == "layers.1" and not inside:
            inside.append([])
            with watch(model, each=lambda inner: inner.name) as again:
                model(x[:, 1:])
            inside.append(again.results)
        return call.name

    with watch(model, each=each) as trace:
        model(x)
    assert inside == [[], ["layers.0", "layers.1", "layers.2"]]
    assert trace.results[-2:] == ["layers.1", "layers.2"]


def test_two_threads_capture_their_own_calls(model: Stack) -> None:
    """Both threads are in the same layer of one model at once, and one of them fails."""
    barrier = threading.Barrier(2, timeout=300)
    kept: dict[int, list[tuple[int, ...]]] = {}
    raised: dict[int, BaseException] = {}

    def work(length: int) -> None:
        def each(call: Call) -> tuple[int, ...]:
            barrier.wait()
            if length == 4 and call.name == "layers.2":
                raise KeyError(call.name)
            return call.shape

        try:
            with watch(model, each=each) as trace:
                kept[length] = trace.results
                model(torch.randn(2, length, 8))
        except KeyError as problem:
            raised[length] = problem
        assert not STATE.sessions

    threads = [threading.Thread(target=work, args=(length,)) for length in (4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert kept == {4: [(2, 2, 4, 4)] * 2, 6: [(2, 2, 6, 6)] * 3}
    assert list(raised) == [4]
    assert is_clean(model)


def test_calls_of_a_thread_without_a_watcher_are_not_captured(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as trace:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join(timeout=600)
        assert trace.results == []
        model(x)
    assert len(trace.results) == 3
