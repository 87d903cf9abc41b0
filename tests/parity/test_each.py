"""`watch(each=)`: calls handed over as they come, whatever goes wrong and whoever else watches."""

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
from overt.capture.places import HERE
from overt.capture.watching import Unseen, watch


class Attention(nn.Module):
    """Fused self-attention of two heads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Attention after attention."""

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


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def quiet(model: nn.Module) -> bool:
    """Whether nothing is left of any watcher in this thread."""
    happened = HERE.events.since(None)
    return not (hooks(model) or HERE.watchers or HERE.stack or HERE.traces or happened)


def weights(call: Call) -> Tensor:
    return call.weights().detach()


def test_each_call_is_handed_over_when_it_is_made_and_only_the_answer_is_kept(
    model: Stack, x: Tensor
) -> None:
    order: list[Any] = []

    def each(call: Call) -> str:
        order.append(call.name)
        return call.name.upper()

    handle = model.layers[1].register_forward_hook(lambda *_: order.append("layer 1 is done"))
    with watch(model, each=each) as seen:
        model(x)
        assert order == ["layers.0", "layers.1", "layer 1 is done", "layers.2"]
    handle.remove()
    assert seen.kept == ["LAYERS.0", "LAYERS.1", "LAYERS.2"]
    assert seen.calls == ()


def test_calls_are_counted_by_step(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: (call.step, call.name)) as seen:
        model(x)
        model(x)
    assert [step for step, _ in seen.kept] == [0, 0, 0, 1, 1, 1]


def test_what_each_sees_is_what_is_seen_without_it(model: Stack, x: Tensor) -> None:
    with watch(model, layers=[1, 2], heads=[1], each=weights) as seen:
        model(x)
    with watch(model, layers=[1, 2], heads=[1]) as whole:
        model(x)
    torch.testing.assert_close(torch.stack(seen.kept, dim=1), whole.map().weights)


def test_nothing_of_a_call_is_left_when_it_has_been_answered(model: Stack, x: Tensor) -> None:
    met: list[weakref.ref[Any]] = []

    def each(call: Call) -> None:
        met.extend((weakref.ref(call), weakref.ref(call.source)))

    with torch.no_grad(), watch(model, each=each) as seen:
        model(x)
        gc.collect()
        assert len(met) == 6 and [one() for one in met] == [None] * 6
    assert seen.kept == [None] * 3


# --- exceptions


def fails_at(name: str) -> Callable[[Call], str]:
    def each(call: Call) -> str:
        if call.name == name:
            raise KeyError(name)
        return call.name

    return each


@pytest.mark.parametrize("name", ["layers.0", "layers.2"])
def test_an_error_in_each_comes_out_and_leaves_nothing_behind(
    model: Stack, x: Tensor, name: str
) -> None:
    before = model(x)
    watching = watch(model, each=fails_at(name))
    for _ in range(2):  # the watcher is good for another use
        with pytest.raises(KeyError, match=name), watching:
            model(x)
        assert quiet(model)
    torch.testing.assert_close(model(x), before)
    with watch(model) as seen:
        model(x)
    assert seen.names == ("layers.0", "layers.1", "layers.2")


def test_an_error_that_is_caught_inside_leaves_the_next_pass_whole(model: Stack, x: Tensor) -> None:
    calm: list[str] = []

    def each(call: Call) -> str:
        if not calm and call.name == "layers.1":
            raise KeyError(call.name)
        return call.name

    with watch(model, each=each) as seen:
        with pytest.raises(KeyError):
            model(x)
        calm.append("now")
        first = len(seen.kept)
        model(x)
        assert seen.kept[first:] == ["layers.0", "layers.1", "layers.2"]
    assert quiet(model)


def test_after_an_error_nobody_is_taken_to_be_at_work(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as seen:
        model(x)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 9))
        seen.kept.clear()
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 4))  # of no module
        assert seen.kept == []


def test_an_error_of_the_model_is_not_hidden_by_what_was_missed(model: Stack, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"), watch(model, each=weights):
        model(torch.randn(2, 5, 9))
    assert quiet(model)


def test_what_each_did_not_get_is_still_an_error(x: Tensor) -> None:
    with pytest.raises(Unseen, match="was not called"), watch(Stack(), each=weights):
        pass
    plain = nn.Linear(8, 8)
    with pytest.raises(Unseen, match="has no attention"), watch(plain, each=weights):
        plain(x)


# --- several who watch


def test_nested_watchers_each_get_their_own(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as outer:
        model(x)
        with watch(model, layers=[2], each=lambda call: call.step) as inner:
            model(x)
        with watch(model) as plain:
            model(x)
    assert len(outer.kept) == 9
    assert len(inner.kept) == 1
    assert len(plain.calls) == 3
    assert inner.calls == ()
    assert quiet(model)


def test_what_an_inner_watcher_keeps_is_not_kept_for_the_outer(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as outer:
        with watch(model):
            model(x)
        assert len(outer.kept) == 3
        assert outer.calls == ()


def test_an_error_in_an_inner_watcher_leaves_the_outer_at_work(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as outer:
        with pytest.raises(KeyError), watch(model, each=fails_at("layers.1")):
            model(x)
        outer.kept.clear()
        model(x)
        assert outer.kept == ["layers.0", "layers.1", "layers.2"]
    assert quiet(model)


def test_a_watcher_within_itself(model: Stack, x: Tensor) -> None:
    watching = watch(model, each=lambda call: call.name)
    with watching as outer, watching as inner:
        model(x)
    assert outer.kept == inner.kept == ["layers.0", "layers.1", "layers.2"]
    assert quiet(model)


def test_each_may_run_the_model_again(model: Stack, x: Tensor) -> None:
    """Another pass inside a call, such as the same input without a token, is its own."""
    inside: list[list[str]] = []

    def each(call: Call) -> str:
        if call.name == "layers.1" and not inside:
            inside.append([])
            with watch(model, each=lambda inner: inner.name) as again:
                model(x[:, 1:])
            inside.append(again.kept)
        return call.name

    with watch(model, each=each) as seen:
        model(x)
    assert inside == [[], ["layers.0", "layers.1", "layers.2"]]
    assert seen.kept[-2:] == ["layers.1", "layers.2"]


def test_two_threads_see_their_own_calls(model: Stack) -> None:
    """Both are inside the same layer at once, of one model, and one of them fails."""
    meet = threading.Barrier(2, timeout=20)
    kept: dict[int, list[tuple[int, ...]]] = {}
    raised: dict[int, BaseException] = {}

    def work(length: int) -> None:
        def each(call: Call) -> tuple[int, ...]:
            meet.wait()
            if length == 4 and call.name == "layers.2":
                raise KeyError(call.name)
            return call.shape

        try:
            with watch(model, each=each) as seen:
                kept[length] = seen.kept
                model(torch.randn(2, length, 8))
        except KeyError as problem:
            raised[length] = problem
        assert not HERE.watchers

    threads = [threading.Thread(target=work, args=(length,)) for length in (4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert kept == {4: [(2, 2, 4, 4)] * 2, 6: [(2, 2, 6, 6)] * 3}
    assert list(raised) == [4]
    assert quiet(model)


def test_a_thread_that_does_not_watch_is_not_seen(model: Stack, x: Tensor) -> None:
    with watch(model, each=lambda call: call.name) as seen:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join(timeout=30)
        assert seen.kept == []
        model(x)
    assert len(seen.kept) == 3
