"""The private names of PyTorch that capture needs, each against its public effect."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from overt.capture import _torch_compat
from overt.capture.function_mode import AttentionFunctionMode


def test_only_subclasses_with_an_override_count():
    class Plain(torch.Tensor):
        pass

    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    kinds = (nn.Parameter, Plain, FakeTensor, Overriding)
    found = [_torch_compat.overrides_functions(kind) for kind in kinds]
    assert found == [False, False, False, True]


def test_a_backward_pass_has_an_id_of_its_own():
    seen = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda gradient: seen.append(_torch_compat.backward_pass_id()))
        y.sum().backward()
    assert _torch_compat.backward_pass_id() == -1
    assert len(set(seen)) == 2 and min(seen) >= 0


@pytest.mark.newer("torch>=2.7")
def test_the_pack_hook_is_that_of_the_innermost_context():
    def pack(tensor):
        return tensor

    assert _torch_compat.saved_tensors_pack_hook() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert _torch_compat.saved_tensors_pack_hook() is pack
    names = []

    def run(x):
        names.append(_torch_compat.saved_tensors_pack_hook().__qualname__)
        return x.sin()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert [name.split(".")[0] for name in names] == ["_checkpoint_hook", "_recomputation_hook"]


@pytest.mark.newer("torch>=2.7")
def test_the_pack_hook_is_none_where_pytorch_does_not_show_it(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    assert _torch_compat.saved_tensors_pack_hook() is None


def test_transforms_and_vmapped_tensors_are_recognized():
    found = []

    def run(x):
        found.append((_torch_compat.in_functorch(), _torch_compat.is_vmapped(x)))
        return x.sum()

    torch.vmap(run)(torch.ones(2, 3))
    torch.func.grad(run)(torch.ones(3))
    torch.vmap(torch.func.grad(run))(torch.ones(2, 3))
    assert found == [(True, True), (True, False), (True, True)]
    assert not _torch_compat.in_functorch() and not _torch_compat.in_func_transform()
    assert not _torch_compat.is_vmapped(None) and not _torch_compat.is_vmapped(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        assert _torch_compat.in_func_transform() and not _torch_compat.in_functorch()


def test_tracing_is_recognized():
    found = []

    class Traced(nn.Module):
        def forward(self, x):
            found.append(_torch_compat.is_tracing())
            return x + 1

    Traced()(torch.ones(2))
    torch.jit.trace(Traced(), torch.ones(2))
    assert not found[0] and found[1]


def test_modes_are_listed_and_switched_off():
    class Counting(TorchDispatchMode):
        names = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(_torch_compat.operator_name(func))
            return func(*args, **(kwargs or {}))

    assert not _torch_compat.has_dispatch_mode()
    with AttentionFunctionMode() as mode:
        assert list(_torch_compat.function_modes()) == [mode]
        with _torch_compat.without_torch_function():
            assert torch.ones(2).sum() == 2
    with Counting():
        assert _torch_compat.has_dispatch_mode()
        torch.ones(2).sin()
        with _torch_compat.without_dispatch_modes():
            assert not _torch_compat.has_dispatch_mode()
            torch.ones(2).cos()
    assert "aten::sin" in Counting.names and "aten::cos" not in Counting.names
    assert _torch_compat.operator_name(len) == str(len)


def test_hooks_written_directly_are_called():
    module, called = nn.Linear(2, 2), []
    pre_hooks, hooks, always_called = _torch_compat.forward_hook_dicts(module)
    pre_hooks[-1] = lambda module, inputs: called.append("before")
    hooks[-2] = lambda module, inputs, output: called.append("after")
    always_called[-2] = True
    module(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert called == ["before", "after"] * 2
    for name, held in zip(_torch_compat.HOOK_ATTRIBUTES, (pre_hooks, hooks), strict=True):
        assert getattr(module, name) is held
    assert getattr(module, _torch_compat.ALWAYS_CALLED_ATTRIBUTE) is always_called


def test_hooks_run_under_the_frame_that_is_looked_for():
    import sys

    codes = []

    def hook(module, inputs, output):
        frame = sys._getframe()
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back

    module = nn.Linear(2, 2)
    module.register_forward_hook(hook)
    module(torch.ones(1, 2))
    assert _torch_compat.module_call_code() in codes


def test_compiled_modules_are_recognized():
    plain, wrapped, in_place = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert _torch_compat.is_compile_wrapper(wrapped)
    assert isinstance(_torch_compat.inside_compile_wrapper(wrapped), nn.Linear)
    assert not _torch_compat.is_compile_wrapper(plain)
    assert _torch_compat.inside_compile_wrapper(plain) is None
    found = [_torch_compat.is_compiled_module(one) for one in (plain, wrapped, in_place)]
    assert found == [False, True, True]


def test_what_a_compiler_has_not_loaded_is_answered_without_it(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "torch._functorch.config", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not _torch_compat.gradients_follow_outputs()
    assert not _torch_compat.uses_cuda_graph_trees()
    assert "torch._functorch.config" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.eval_frame", None)
    _torch_compat.skip_compilation(lambda: None)  # nothing to switch off, and no error


def test_operations_agree_with_public_ones():
    scores = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    logs = scores.log_softmax(dim=-1)
    gradient = torch.randn_like(logs)
    (expected,) = torch.autograd.grad(logs, scores, gradient)
    found = _torch_compat.log_softmax_backward(gradient, logs.detach())
    torch.testing.assert_close(found, expected)
    total = torch.zeros(3, dtype=torch.long)
    _torch_compat.add_scalars_(total.unbind(), [1, 2, 2**40])
    assert total.tolist() == [1, 2, 2**40]
    _torch_compat.assert_async(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="too far"):
        _torch_compat.assert_async(torch.tensor(False), "too far")
