"""Find the attention modules of a model, by name, class, parameters and declaration."""

import re
import weakref
from collections.abc import Collection
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from overt.capture._torch_compat import is_compile_wrapper, is_compiled_module
from overt.capture.state import LOCK

DIFFERENTIAL_PARAMETERS = (
    "lambda_q1",
    "lambda_k1",
    "lambda_q2",
    "lambda_k2",
)  # of differential attention
_ADAPTED = "PeftModel", "PeftMixedModel"  # classes of peft, which is not imported
_ATTENDS = re.compile(r"attention|attn", re.IGNORECASE)
_NOT_ATTENDING = re.compile(
    r"(?<!with)(?<!without)(?<!and)(?<!no)(output|mask|bias|norm|dropout"
    r"|embeddings?|rotary\w*emb\w*|projections?)$",
    re.IGNORECASE,
)
_RECURRENT = re.compile(r"mamba|state_?space|delta_?net|rg_?lru|rwkv|retention", re.IGNORECASE)
_LIGHTNING = re.compile(r"lightning_?attention$", re.IGNORECASE)  # linear attention of MiniMax
_SHORT_CONVOLUTION = re.compile(r"short_?conv(olution)?$", re.IGNORECASE)  # LFM2
_STATES = ("A_log", "recurrent_param", "time_decay")  # parameters of recurrences over positions
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|attn_pool|probe", re.IGNORECASE)


def attention_modules(
    model: nn.Module, declared: Collection[nn.Module] = ()
) -> dict[str, nn.Module]:
    """Find the attention modules of a model by their class name, the innermost of nested ones.

    `watch(layers=[...])` indexes this list.

    Args:
        model: The model to search.
        declared: Modules that count as attention whatever their class name.

    Returns:
        The modules by name, in the order of `model.named_modules()`. Of a PEFT model, those of its
        base model, as `watch` names them.

    Example:
        >>> from torch import nn
        >>> list(attention_modules(nn.TransformerEncoderLayer(8, 2)))
        ['self_attn']
    """
    like = {
        name: module
        for name, module in without_adapter(model).named_modules()
        if looks_like_attention(module) or module in declared
    }
    # Every prefix of a name is a module around it; the root has the empty name.
    around = {name[:at] for name in like for at, letter in enumerate(name) if letter == "."}
    if len(like) > 1:
        around.add("")
    around = {name for name in around if name not in like or like[name] not in declared}
    return {name: module for name, module in like.items() if name not in around}


def without_adapter(model: nn.Module) -> nn.Module:
    """Return the model that a PEFT model wraps, adapters included; other models unchanged.

    LoRA and similar methods put modules inside of the model; others add inputs (prompts) or a cache
    (prefixes).
    """
    while any(kind.__name__ in _ADAPTED for kind in type(model).__mro__):
        inner = getattr(model, "get_base_model")()  # noqa: B009
        if not isinstance(inner, nn.Module) or inner is model:
            break
        model = inner
    return model


_DECLARED: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()


def declare_attention(modules: Collection[nn.Module]) -> None:
    """Count modules as attention whatever their class names, until `undeclare_attention`."""
    with LOCK:
        for module in modules:
            _DECLARED[module] = _DECLARED.get(module, 0) + 1


def undeclare_attention(modules: Collection[nn.Module]) -> None:
    """Undo one `declare_attention`."""
    with LOCK:
        for module in modules:
            count = _DECLARED.pop(module) - 1
            if count:
                _DECLARED[module] = count


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module has a class name like attention, or was declared as attention."""
    kind = type(module).__name__
    named = bool(_ATTENDS.search(kind)) and not _NOT_ATTENDING.search(kind)
    return named or (bool(_DECLARED) and module in _DECLARED)


def recurrent_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules that mix positions by a recurrence (state space, linear attention).

    They have no attention weights.
    """
    like = {name: module for name, module in model.named_modules() if is_recurrent(module)}
    return {
        name: module
        for name, module in like.items()
        if not any(other != name and other.startswith(f"{name}." if name else "") for other in like)
    }


def modules_without_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules that mix positions without attention weights.

    Recurrences (state space, linear attention), and the short convolutions of LFM2.

    Args:
        model: The model to search.

    Returns:
        The modules by name, in the order of `model.named_modules()`.

    Example:
        >>> from transformers import MambaConfig, MambaModel
        >>> sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2}
        >>> list(modules_without_weights(MambaModel(MambaConfig(**sizes))))
        ['layers.0.mixer', 'layers.1.mixer']
    """
    recurrent = recurrent_modules(model)
    inside = {inner for module in recurrent.values() for inner in module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if name in recurrent
        or (module not in inside and _SHORT_CONVOLUTION.search(type(module).__name__))
    }


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrence, by its parameters or its class name."""
    kind = type(module).__name__
    if any(one in module._parameters for one in _STATES) or _LIGHTNING.search(kind):
        return True
    own = any(one is not None for one in module._parameters.values())
    return own and bool(_RECURRENT.search(kind)) and not _NOT_ATTENDING.search(kind)


def is_cross_by_name(root: nn.Module, path: str) -> bool:
    """Return whether the module at `path`, or a parent, is named like cross-attention."""
    module = root.get_submodule(path)
    if getattr(module, "is_cross_attention", False) or _CROSS.search(path):
        return True
    while path:
        if re.search("cross", type(root.get_submodule(path)).__name__, re.IGNORECASE):
            return True
        path = path.rpartition(".")[0]
    return False


def is_cross_by_shape(module: nn.Module, shape: tuple[int, int, int, int]) -> bool:
    """Return whether the sizes of a call imply cross-attention.

    A decoder with a cache has more keys than queries in self-attention too.
    """
    decodes = any(getattr(module, name, False) for name in ("is_causal", "is_decoder"))
    return shape[2] != shape[3] and not decodes and not hasattr(module, "layer_idx")


def needs_hook(module: nn.Module) -> bool:
    """Return whether attention could be computed in the forward of this module itself.

    Not in leaf layers of `torch.nn` and in activations of transformers, of which there are many;
    not in a forward that only calls children; and not in the wrapper of `torch.compile`, which runs
    only together with the wrapped module.
    """
    if is_compile_wrapper(module):
        return False
    if _ATTENDS.search(type(module).__name__):
        return True
    # Containers such as `nn.TransformerEncoderLayer` compute in their own forward; leaf layers do
    # not attend.
    if type(module).__module__.startswith(("torch.nn.modules", "transformers.activations")):
        return next(module.children(), None) is not None
    return not _only_calls_children(module)


def _only_calls_children(module: nn.Module) -> bool:
    """Return whether a forward uses no names but those of children, so that it calls no function.

    Read from its bytecode: the names of attributes and globals.
    """
    if isinstance(module, torch.jit.ScriptModule):  # its forward is not Python code
        return False
    code = getattr(getattr(module.forward, "__func__", None), "__code__", None)
    # Closures and inner functions may call anything.
    if code is None or code.co_freevars or any(hasattr(one, "co_code") for one in code.co_consts):
        return False
    return module._modules.keys() >= set(code.co_names)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model, or any part of it, is compiled with `torch.compile`."""
    return any(is_compiled_module(module) for module in model.modules())


def is_inside_compiled(model: nn.Module, part: nn.Module) -> bool:
    """Return whether a module is inside a compiled part of a model."""
    return any(
        is_compiled_module(module) and part in set(module.modules()) for module in model.modules()
    )


def select_layers(
    model: nn.Module,
    layers: Collection[int | str] | None,
    declared: Collection[nn.Module] = (),
) -> dict[str, nn.Module] | None:
    """Return the modules that `layers` selects by name or index; None for all."""
    if layers is None:
        return None
    if isinstance(layers, int | str):
        raise TypeError(f"layers must be a list, got {layers!r}: use layers=[{layers!r}]")
    listed = attention_modules(model, declared)
    every = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for layer in layers:
        if isinstance(layer, str):
            if layer not in every:
                near = [name for name in listed if layer in name]
                raise ValueError(
                    f"the model has no module {layer!r}; "
                    f"its attention modules are {format_names(near or list(listed))}"
                )
            chosen[layer] = every[layer]
        elif not -len(listed) <= layer < len(listed):
            raise ValueError(
                f"layer {layer} is out of range for the {len(listed)} attention modules: "
                f"{format_names(list(listed))}"
            )
        else:
            name = list(listed)[layer]
            chosen[name] = listed[name]
    return chosen


def find_modules(model: nn.Module, names: Collection[str], what: str) -> dict[str, nn.Module]:
    """Return the modules of these names or patterns (`layers.*.mixer`).

    `what` is the name of the argument, for errors.
    """
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list, got {names!r}: use {what}=[{names!r}]")
    every = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for name in names:
        these = {one: every[one] for one in every if one == name or fnmatchcase(one, name)}
        if not these:
            like = [one for one in every if one and name.rpartition(".")[2] in one]
            raise ValueError(
                f"{what}={list(names)!r}: the model has no module {name!r}; "
                f"it has {format_names(like or list(every)[1:])}"
            )
        found.update(these)
    return found


def format_names(names: list[str], most: int = 6) -> str:
    """Format names for a message, at most `most` of them."""
    shown = [repr(name) for name in names[:most]]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(shown) or "none") + more


def is_differential(module: nn.Module) -> bool:
    """Return whether a module is differential attention, by its lambda parameters."""
    learned = all(
        isinstance(getattr(module, name, None), Tensor) for name in DIFFERENTIAL_PARAMETERS
    )
    return learned and hasattr(module, "lambda_init")
