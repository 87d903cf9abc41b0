"""Run a model under one of its attention implementations, and leave it as it was."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.errors import RunError
from overt.inspect.inputs import first_line, model_errors
from overt.inspect.load_model import quiet_transformers

if TYPE_CHECKING:
    import torch
    from torch import nn

Forward = Callable[["nn.Module", Mapping[str, Any]], Any]
Compiler = Callable[[Any], Any]
_HOOKS_ADDED = "_output_capturing_hooks_installed"  # mark of transformers


@dataclass(frozen=True, eq=False)
class Task:
    """The input, how to call the model with it, and the number of tokens to generate."""

    inputs: Mapping[str, Any]
    forward: Forward
    new_tokens: int

    def to(self, dtype: "torch.dtype") -> "Task":
        """Return the task with inputs of another floating-point type."""
        import torch

        def convert(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floats else value

        return replace(self, inputs={name: convert(one) for name, one in self.inputs.items()})


@dataclass(frozen=True, eq=False)
class Variant:
    """A model under one implementation."""

    model: "nn.Module"
    name: str
    switch: bool = False  # else as it is loaded
    compiler: Compiler | None = None
    task: Task | None = None  # with inputs of its own type

    @property
    def dtype(self) -> str:
        """The floating-point type of the model."""
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return str(next(floats, "torch.float32")).removeprefix("torch.")

    @contextmanager
    def in_use(self) -> Iterator["nn.Module"]:
        """Yield the model to call, under this implementation; restore it afterwards."""
        with ExitStack() as undo:
            if self.switch:
                undo.enter_context(use_implementation(self.model, self.name))
            yield self.model if self.compiler is None else self.compiler(self.model)


def run_task(name: str, model: "nn.Module", task: Task) -> Any:
    """Call the model with the same random numbers each time."""
    import torch

    torch.manual_seed(0)  # some models use random numbers in evaluation mode
    with model_errors(name), quiet_transformers():
        return task.forward(model, task.inputs)


def copy_to_dtype(model: "nn.Module", dtype: "torch.dtype") -> "nn.Module":
    """Copy a model with its weights in another type, without a copy in the first type."""
    from torch import nn

    replaced: dict[int, Any] = {}
    for one in model.state_dict(keep_vars=True).values():
        if getattr(one, "is_floating_point", bool)():
            weight = one.detach().to(dtype)
            is_parameter = isinstance(one, nn.Parameter)
            replaced[id(one)] = nn.Parameter(weight, False) if is_parameter else weight
    return copy.deepcopy(model, replaced)


def is_switchable(model: Any) -> bool:
    """Return whether this is a Hugging Face model."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def _fused_modules(model: "nn.Module") -> list[Any]:
    """Return the modules with the switch of timm."""
    return [one for one in model.modules() if isinstance(getattr(one, "fused_attn", None), bool)]


def name_as_loaded(model: Any) -> str:
    """Return the name of the implementation of a model as it is."""
    if is_switchable(model):
        configs = (getattr(module, "config", None) for module in model.modules())
        found = {getattr(one, "_attn_implementation", None) for one in configs} - {None}
        names = sorted(str(one) for one in found)
        return names[0] if len(names) == 1 else f"mixed ({', '.join(names)})"
    flags = {one.fused_attn for one in _fused_modules(model)}
    return {frozenset({True}): "sdpa", frozenset({False}): "eager"}.get(frozenset(flags), "its own")


def _implementations_of(model: Any) -> list[tuple[Any, Any]]:
    """Return the configurations of a Hugging Face model and their implementations."""
    pending = [getattr(module, "config", None) for module in model.modules()]
    found: dict[int, Any] = {}
    while pending:
        config = pending.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [(config, config._attn_implementation_internal) for config in found.values()]


@contextmanager
def restore_hooks(model: "nn.Module") -> Iterator[None]:
    """Remove the hooks that are added in the block.

    Hugging Face models add some to themselves when they are first asked for attention weights.
    """
    from overt.capture._torch_compat import forward_hook_dicts

    before = [
        (module, [set(hooks) for hooks in forward_hook_dicts(module)], _HOOKS_ADDED in vars(module))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, keys, had in before:
            for hooks, kept in zip(forward_hook_dicts(module), keys, strict=True):
                for key in set(hooks) - kept:
                    del hooks[key]
            if not had:  # else they would not be added again
                vars(module).pop(_HOOKS_ADDED, None)


@contextmanager
def use_implementation(model: Any, name: str) -> Iterator[None]:
    """Switch the attention implementation of a model for the block, and restore every part.

    Args:
        model: A Hugging Face model, or a timm model for "eager" and "sdpa".
        name: Name of the implementation.

    Raises:
        ValueError: If the model cannot be switched to it.
        ImportError: If a package is missing.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        >>> model = BertModel(BertConfig(vocab_size=8, num_hidden_layers=1, **sizes))
        >>> with use_implementation(model, "eager"):
        ...     model.config._attn_implementation
        'eager'
        >>> model.config._attn_implementation
        'sdpa'
    """
    if not is_switchable(model):
        with _use_fused_flag(model, name):
            yield
        return
    before = _implementations_of(model)
    try:
        with quiet_transformers():
            model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError(f"{type(model).__name__} cannot switch its implementation")
        yield
    finally:
        # Not by the setter, which gives all parts the same implementation.
        for config, value in before:
            config._attn_implementation_internal = value


@contextmanager
def _use_fused_flag(model: Any, name: str) -> Iterator[None]:
    before = [(one, one.fused_attn) for one in _fused_modules(model)]
    if not before or name not in ("eager", "sdpa"):
        raise ValueError(f"{type(model).__name__} has no such implementation")
    try:
        for one, _ in before:
            one.fused_attn = name == "sdpa"
        yield
    finally:
        for one, value in before:
            one.fused_attn = value


def reason_not_to_run(variant: Variant) -> str:
    """Return why an implementation cannot run here, empty if it may."""
    if not variant.switch:
        return ""
    version = re.fullmatch(r"flash_attention_(\d)", variant.name)
    if version and is_switchable(variant.model):
        # Before transformers is asked: it may download a kernel from the Hub, which is code.
        from transformers import utils

        device = next((p.device.type for p in variant.model.parameters()), "cpu")
        if not getattr(type(variant.model), "_supports_flash_attn", False):
            return f"{type(variant.model).__name__} does not support it"
        if not getattr(utils, f"is_flash_attn_{version[1]}_available", bool)():
            return "it needs the package flash-attn and a GPU"
        if device != "cuda":
            return f"it needs the model on a GPU, it is on {device}"
        if variant.dtype not in ("float16", "bfloat16"):
            return f"it needs float16 or bfloat16, the model is in {variant.dtype}"
    try:
        with use_implementation(variant.model, variant.name):
            return ""
    except Exception as error:
        return describe_error(error)


def describe_error(error: BaseException) -> str:
    """Return an error as part of a line."""
    import torch

    # Names the model, which is known here, and repeats its cause.
    if isinstance(error, RunError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "it needs more memory than there is"
    # Later sentences ask to open issues, or repeat the advice for the whole model.
    return re.split(r"(?<=\w)\. ", first_line(error))[0][:300] or type(error).__name__
