"""The function mode is entered only in attention, and later blocks capture what the first did."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers  # noqa: F401  (models have configurations only where it is imported)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt.capture import UncapturedAttentionError, _torch_compat, hf_interface, watch
from overt.capture.call import QKCall, Route
from overt.capture.function_mode import AttentionFunctionMode
from overt.capture.records import CallRecord
from overt.capture.scoped_mode import AttentionRoutes, routes_of
from overt.capture.state import STATE
from tests.capture.families import FAMILIES, Family, family
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


class ModeProbe(nn.Module):
    """Notes whether the function mode is active where it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.active: list[bool] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        modes = _torch_compat.function_modes()
        self.active.append(any(isinstance(mode, AttentionFunctionMode) for mode in modes))
        return x


class Conditional(nn.Module):
    """Runs its second layer only on request."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.use_second: Any = [False]  # a list: flags of modules are part of the model's key

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x) if self.use_second[0] else x


def configured(model: Any) -> Any:
    """Give a model a configuration as those of Hugging Face have, and evaluation mode."""
    model.config = SimpleNamespace(_attn_implementation_internal="sdpa")
    return model.eval()


class Mixer(WrittenAttention):
    """Eager attention in a module that is not named so."""


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 6, 16)


@pytest.fixture
def stack() -> Stack:
    torch.manual_seed(0)
    return configured(Stack(FusedAttention(), ModeProbe(), FusedAttention(groups=2)))


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    with watch(model) as trace:
        model(*args, **kwargs)
    return [call.weights() for call in trace]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_mode_is_not_active_outside_of_attention_in_later_blocks(stack: Stack, x: Tensor):
    probe = stack.layers[1]
    first = capture(stack, x)
    assert routes_of(stack, watch(stack).key) is not None
    assert_equal(capture(stack, x), first)
    assert_equal(capture(stack, x), first)
    assert probe.active == [True, False, False]


def test_eager_models_run_under_the_mode_in_every_block(x: Tensor):
    model = Stack(WrittenAttention(), ModeProbe()).eval()
    assert_equal(capture(model, x), capture(model, x))
    assert model.layers[1].active == [True, True]


@pytest.mark.parametrize("name", ["BERT", "ViT"])
@pytest.mark.newer("transformers>=5")
def test_interface_models_are_hooked_only_where_they_attend(name: str):
    one = family(name)
    model, inputs = one.build("sdpa").eval(), one.inputs()
    before = hf_interface.registered("sdpa")
    first = capture(model, **inputs)
    with watch(model) as trace:
        assert hf_interface.registered("sdpa") is not before
        hooked = {one for one in model.modules() if one._forward_pre_hooks}
        model(**inputs)
    assert_equal([call.weights() for call in trace], first)
    assert len(hooked) <= 3 * len(first) + 1 < len(list(model.modules())) / 2
    assert hf_interface.registered("sdpa") is before
    routes = routes_of(model, watch(model).key)
    assert routes is not None and len(routes.interface) == len(first) and not routes.others


@pytest.mark.long
@pytest.mark.parametrize("one", FAMILIES, ids=lambda one: one.name)
def test_later_blocks_capture_the_maps_of_the_first(one: Family):
    for implementation in one.implementations[-2:]:
        model, inputs = one.build(implementation).eval(), one.inputs()
        found = []
        for _ in range(2):
            with watch(model) as trace, torch.no_grad():
                torch.manual_seed(5)
                output = model(**inputs)
            found.append([call.weights() for call in trace])
        torch.manual_seed(5)
        with torch.no_grad():
            plain = model(**inputs)
        assert_equal(found[1], found[0])
        for watched, alone in zip(tensors(output), tensors(plain), strict=True):
            # `nn.TransformerEncoder` takes another path unless it is watched
            torch.testing.assert_close(watched, alone, atol=1e-5, rtol=1e-4, equal_nan=True)


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = list(output.values()) if hasattr(output, "values") else output
    return [one for one in values if isinstance(one, Tensor)]


def test_gradients_of_rows_are_those_of_the_first_block(stack: Stack, x: Tensor):
    found = []
    for _ in range(2):
        stack.zero_grad()
        with watch(stack) as trace:
            output = stack(x)
        (trace.map(0).weights.square().sum() + output.sum()).backward()
        found.append([p.grad.clone() for p in stack.parameters() if p.grad is not None])
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("second", [FusedAttention, WrittenAttention, Mixer])
def test_modules_that_did_not_run_before_are_captured(second: type[nn.Module], x: Tensor):
    model = configured(Conditional(FusedAttention(), second()))
    capture(model, x)
    model.use_second[0] = True
    with watch(model) as trace:
        model(x)
    assert trace.names == ("first", "second")
    assert any("not checked before: 'second'" in note for note in trace.notes)
    maps = [call.weights() for call in trace]
    assert_equal(capture(model, x), maps)  # the next block checks all operations


def attend_by_method(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def attend_fused(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class Branch(nn.Module):
    """Begins to attend on request."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.layer, self.project, self.attend = FusedAttention(), nn.Linear(16, 16), attend
        self.attends: Any = [False]

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x + self.layer(x))
        return self.attend(x) if self.attends[0] else x


@pytest.mark.parametrize("attend", [attend_by_method, attend_fused])
def test_a_module_that_begins_to_attend_is_captured(attend: Any, x: Tensor):
    model = configured(Branch(attend))
    for _ in range(2):
        assert len(capture(model, x)) == 1
    model.attends[0] = True
    if attend is attend_by_method:  # axes were not tracked
        with pytest.raises(NotImplementedError, match="again"):
            capture(model, x)
    with watch(model) as trace:
        model(x)
    assert trace.names == ("layer", "")


class Doubled(TorchFunctionMode):
    """Doubles the queries of SDPA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            args = (args[0] * 2, *args[1:])
        return func(*args, **(kwargs or {}))


def test_the_mode_of_another_library_is_never_below_ours(x: Tensor):
    model = configured(Stack(FusedAttention()))
    capture(model, x)
    with pytest.raises(NotImplementedError, match="again"), watch(model), Doubled():
        model(x)
    with watch(model) as trace, Doubled():
        model(x)
    with watch(model) as plain:
        model(x)
    torch.testing.assert_close(trace.call(0).source.query, 2 * plain.call(0).source.query)


@pytest.mark.newer("transformers>=5")
def test_attention_outside_of_the_interface_raises(monkeypatch: pytest.MonkeyPatch):
    one = family("BERT")
    model, inputs = one.build("sdpa").eval(), one.inputs()
    capture(model, **inputs)
    kind = next(type(m) for m in model.modules() if type(m).__name__ == "BertSelfAttention")

    def eager(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        size = self.attention_head_size
        q, k, v = (
            part(hidden).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = (q @ k.mT * size**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), None

    monkeypatch.setattr(kind, "forward", eager)
    with pytest.raises(UncapturedAttentionError, match="attention"):
        capture(model, **inputs)


@pytest.mark.long
def test_a_compiled_wrapper_of_a_watched_model_is_captured():
    torch._dynamo.reset()
    one = family("BERT")
    model, inputs = one.build("sdpa").eval(), one.inputs()
    first = capture(model, **inputs)
    wrapper = torch.compile(model, backend="eager")
    with watch(model) as trace:
        wrapper(**inputs)
    for found, wanted in zip(trace, first, strict=True):
        torch.testing.assert_close(found.weights(), wanted)


def test_dropout_with_learned_sinks_is_not_an_error(monkeypatch: pytest.MonkeyPatch):
    module = FusedAttention()
    q = torch.randn(1, 4, 6, 4)

    def forward(x: Tensor) -> Tensor:
        sinks = {"is_causal": False, "s_aux": torch.zeros(4)}
        return hf_interface.overt_attention(module, q, q, q, None, dropout=0.5, **sinks)[0]

    monkeypatch.setattr(module, "forward", forward)
    with watch(module) as trace:
        module(torch.zeros(1, 6, 16))
    assert len(trace) == 1


def test_an_error_in_attention_leaves_no_mode(stack: Stack, x: Tensor):
    capture(stack, x)
    with watch(stack):
        with pytest.raises(RuntimeError):
            stack(x[..., :3])
        stack(x)
        assert not _torch_compat.function_modes() and STATE.mode_scope is None
    assert not _torch_compat.function_modes()


def test_blocks_that_need_the_mode_take_it_for_all(stack: Stack, x: Tensor):
    first = capture(stack, x)
    with watch(stack) as outer:
        with watch(stack, edit=lambda call, scores: scores) as inner:
            stack(x)
        stack(x)
    assert len(inner) == 2 and len(outer) == 4
    assert_equal([call.weights() for call in outer][2:], first)
    assert not _torch_compat.function_modes() and not STATE.scoped


@pytest.mark.parametrize("layers", [[-1], [0], ["layers.2"]])
def test_selected_layers_are_captured_alone(stack: Stack, x: Tensor, layers: list[Any]):
    for _ in range(3):
        with watch(stack, layers=layers) as trace:
            stack(x)
        assert len(trace) == 1
    with watch(stack, without=["layers.0"]) as trace:
        stack(x)
    with watch(stack, without=["layers.0"]) as again:
        stack(x)
    assert trace.names == again.names == ("layers.2",)


def test_each_takes_calls_of_later_blocks(stack: Stack, x: Tensor):
    def keep(call: Any) -> Tensor:
        return call.weights()

    found = []
    for _ in range(3):
        with watch(stack, each=keep) as trace:
            stack(x)
        found.append(trace.results)
    assert_equal(found[2], found[0])
    assert stack.layers[1].active == [True, False, False]


def test_threads_have_scopes_of_their_own(stack: Stack, x: Tensor):
    first = capture(stack, x)
    found: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(2, timeout=300)

    def run(at: int) -> None:
        with watch(stack) as trace:
            barrier.wait()
            stack(x)
            barrier.wait()
        found[at] = [call.weights() for call in trace]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(found[0], first)
    assert_equal(found[1], first)


def test_multihead_attention_is_captured_with_any_flags(x: Tensor):
    torch.manual_seed(0)
    model = configured(nn.MultiheadAttention(16, 4, batch_first=True))
    with watch(model) as fused:
        model(x, x, x, need_weights=False)
    for flags in ({"need_weights": False}, {"need_weights": True}, {"average_attn_weights": False}):
        with watch(model) as trace:
            model(x, x, x, **flags)
        torch.testing.assert_close(trace.map(-1).weights, fused.map(-1).weights)


def test_the_interface_of_a_thread_without_a_block_is_unchanged():
    one = family("BERT")
    model, inputs = one.build("sdpa").eval(), one.inputs()
    plain = model(**inputs)[0]
    capture(model, **inputs)
    found: list[Tensor] = []
    with watch(model) as trace:
        other = one.build("sdpa").eval()
        thread = threading.Thread(target=lambda: found.append(other(**inputs)[0]))
        thread.start()
        thread.join()
        model(**inputs)
    assert torch.equal(found[0], plain) and len(trace) == 2


def test_a_module_that_attends_in_two_ways_is_scoped(x: Tensor):
    module = nn.Identity()
    q = torch.zeros(1, 1, 2, 2)
    routes = AttentionRoutes()
    for through in (True, False):
        source = QKCall(q, q, 1.0)
        record = CallRecord(module, Route.SDPA, source, q, q, None, through_interface=through)
        routes.learn([record], [module])
        assert routes.attending() == {module}
    assert not routes.interface and set(routes.others) == {module}


def test_sdpa_is_never_replaced(stack: Stack, x: Tensor):
    function, softmax = F.scaled_dot_product_attention, Tensor.softmax
    capture(stack, x)
    with watch(stack):
        assert F.scaled_dot_product_attention is function and Tensor.softmax is softmax
        stack(x)
