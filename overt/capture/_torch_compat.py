"""Access to private names of PyTorch, in one place.

Each function covers one need that has no public API and says what it is for. Names that may be
missing in other versions of PyTorch are looked up, with a safe answer if they are not there.
`Tensor._version`, `Module._parameters` and `Module._modules` are used directly: they are stable.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

# --- tensor subclasses


def overrides_functions(kind: type[Tensor]) -> bool:
    """Return whether a tensor subclass overrides PyTorch functions.

    Parameters and plain subclasses do not. Fake tensors, as in `torch.export`, disable overrides by
    a builtin that is not public.
    """
    override = kind.__torch_function__
    if override is torch._C._disabled_torch_function_impl:
        return False
    return override.__func__ is not Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


# --- autograd


def backward_pass_id() -> int:
    """Return the id of the running backward pass, -1 outside of one.

    Deferred gradients belong to one pass; leftovers of a pass that failed must be dropped.
    """
    return torch._C._current_graph_task_id()


# Whether PyTorch shows its active hooks for saved tensors; 2.6 does not.
SHOWS_SAVED_TENSORS_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


def saved_tensors_pack_hook() -> Callable[..., Any] | None:
    """Return the active pack hook for saved tensors.

    Activation checkpointing is recognized by it; its frame has no public accessor.
    """
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if find is None else find(True)
    return None if hooks is None else hooks[0]


def in_functorch() -> bool:
    """Return whether a `torch.func` transform is active, which wraps its tensors."""
    return torch._C._functorch.maybe_current_level() is not None


def in_func_transform() -> bool:
    """Return whether a `torch.func` transform or forward-mode AD is active.

    Gradient taps are custom autograd functions that do not support either.
    """
    return in_functorch() or torch.autograd.forward_ad._current_level >= 0


def is_vmapped(tensor: Tensor | None) -> bool:
    """Return whether a tensor is batched by `torch.vmap`, at any level of nested transforms."""
    functorch = torch._C._functorch
    while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


# --- modes and tracing


def is_tracing() -> bool:
    """Return whether `torch.jit.trace` is active, where sizes are tensors."""
    return torch._C._get_tracing_state() is not None


def function_modes() -> Sequence[Any]:
    """Return the active `TorchFunctionMode`s of this thread."""
    return _get_current_function_mode_stack()


def has_function_mode() -> bool:
    """Return whether a `TorchFunctionMode` is active that may change what is computed.

    The mode of `torch.set_default_device` only chooses where tensors are created.
    """
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def has_dispatch_mode() -> bool:
    """Return whether a `TorchDispatchMode` is active."""
    return _len_torch_dispatch_stack() > 0


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes: some higher-order operators have no rule for one."""
    return _disable_current_modes()


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which `__torch_function__` is not called."""
    return torch._C.DisableTorchFunction()


def operator_name(func: Any) -> str:
    """Return the qualified name of an operator that reached the dispatcher."""
    return str(func._schema.name) if hasattr(func, "_schema") else str(func)


# --- modules

# Attributes of a module that hold hooks, also in its pickled state.
HOOK_ATTRIBUTES = ("_forward_pre_hooks", "_forward_hooks")
ALWAYS_CALLED_ATTRIBUTE = "_forward_hooks_always_called"


def forward_hook_dicts(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    """Return the pre-hooks, the hooks and the always-called flags of a module.

    `register_forward_hook` is too slow for hooking hundreds of modules in every `watch` block.
    """
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._forward_hooks_always_called,
    )


def module_call_code() -> Any:
    """Return the code of the frame that calls hooks, to find it on the call stack."""
    return nn.Module._call_impl.__code__


def is_compile_wrapper(module: nn.Module) -> bool:
    """Return whether a module is the wrapper that `torch.compile` puts around a module."""
    return "_orig_mod" in module._modules or "_orig_mod" in vars(module)  # `hasattr` is slow


def inside_compile_wrapper(module: nn.Module) -> Any:
    """Return the module inside a wrapper of `torch.compile`, None if this is not one."""
    return getattr(module, "_orig_mod", None)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is compiled, by `torch.compile` or `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None) is not None or is_compile_wrapper(module)


# --- compiler


def skip_compilation(function: Any) -> None:
    """Let Dynamo skip the frame of a function called from Python; graphs still inline it."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # then it may be compiled, which is slow but correct
        return
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


def gradients_follow_outputs() -> bool:
    """Return whether compiled graphs take gradients with the strides of their outputs.

    PyTorch after 2.11 does; before, gradients are contiguous. Read only if functorch is loaded:
    importing it would import the compiler.
    """
    config = sys.modules.get("torch._functorch.config")
    return bool(getattr(config, "guess_tangent_strides_as_outputs", False))


def uses_cuda_graph_trees() -> bool:
    """Return whether compiled CUDA graphs exist, which write every pass into the same memory."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_available():
        return False
    device = torch.cuda.current_device()
    return trees.get_manager(device, create_if_none_exists=False) is not None


# --- operations


def log_softmax_backward(gradient: Tensor, logs: Tensor) -> Tensor:
    """Compute the gradient of scores from that of their log-softmax over the last axis."""
    return torch._log_softmax_backward_data(gradient, logs, -1, logs.dtype)


def assert_async(condition: Tensor, message: str) -> None:
    """Assert a condition on the device, without synchronizing it."""
    torch._assert_async(condition, message)


def add_scalars_(tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
    """Add one number to each tensor in place, in one launch and without a copy from the host."""
    torch._foreach_add_(tensors, scalars)  # type: ignore[call-overload]
