"""Hugging Face's attention interface: `attn_implementation="overt"`.

Models that attend through kernels nobody can look into (flash-attention and the like) are switched
to it while they are watched, and back afterwards. It computes what they asked for with PyTorch's
fused kernel, and what that kernel cannot do (caps, sinks) in plain arithmetic.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture.call import Projected, Route, Written, default_scale
from overt.capture.edits import edited, edits_of
from overt.capture.places import HERE
from overt.capture.records import Record, remember

NAME = "overt"

# What models hand on to every implementation and what changes no score.
_INERT = frozenset(
    (
        "cache_position",
        "deterministic",
        "head_mask",
        "kernel_options",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",  # packed sequences are told apart in the mask
        "return_dict",
        "training",
        "use_cache",
    )
)


def register() -> None:
    """Make `attn_implementation="overt"` known to transformers; doing it twice does no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(q_length: Any, kv_length: Any, allow_is_causal_skip: bool = True, **others: Any) -> Any:
    """The mask that `sdpa` gets, but always there when queries and keys differ in number.

    `sdpa` leaves it out where its own reading of "causal" is right. Flash-attention reads the same
    word from the other end, so here nothing is left to be read. A model that writes attention out
    adds its mask to the scores: it gets the mask of "eager", which serves both.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    skip = allow_is_causal_skip and (q_length == kv_length or q_length == 1)
    make = sdpa_mask if _asks_only_us(others.get("config")) else eager_mask
    return make(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skip, **others)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a module asked for, (b, n, h, d); a keyword that could change scores unseen is refused.

    The windows of `sliding_window` are in the mask already. `s_aux` are learned sinks.
    """
    _check(module, others)
    if sliding_window is not None and attention_mask is None and key.shape[2] > sliding_window:
        raise NotImplementedError(
            f"{type(module).__name__} asks for a window of {sliding_window} keys and gives no mask "
            f"for its {key.shape[2]}; {_INSTEAD}"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    if causal and query.shape[2] != key.shape[2] and _aligned_at_the_end(module):
        q, k = query.shape[2], key.shape[2]
        attention_mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
        causal = False
    if softcap is None and s_aux is None:
        added = _added(query, key, attention_mask, causal, position_bias)
        causal = causal and position_bias is None
        output = _fused(query, key, value, added, dropout, causal, scaling)
    else:
        boolean = attention_mask is not None and attention_mask.dtype == torch.bool
        bias = None if boolean else attention_mask
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        source = Projected(
            query,
            key,
            default_scale(query) if scaling is None else scaling,
            bias=bias,
            allowed=attention_mask if boolean else None,
            causal=causal,
            softcap=softcap,
            sinks=s_aux,
        )
        output = _written_out(module, source, value, dropout)
    return output.transpose(1, 2).contiguous(), None


def _asks_only_us(config: Any) -> bool:
    """Whether the models of this configuration leave masks to us, as they do to `sdpa`.

    Some cannot be on `sdpa`: they write a softmax out somewhere, or do not say which of their
    modules are causal.
    """
    modeling = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    if modeling is None:
        return False
    kinds = [kind for kind in vars(modeling).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if kind.__module__ == modeling.__name__]
    if not any(getattr(kind, "_supports_sdpa", False) for kind in kinds):
        return False
    return not any(
        word in getattr(getattr(member, "__code__", None), "co_names", ())
        for kind in kinds
        for member in vars(kind).values()
        if "Attention" in kind.__name__
        for word in ("softmax", "Softmax")
    )


_INSTEAD = 'choose model.set_attn_implementation("eager") to watch it'


def _check(module: nn.Module, others: dict[str, Any]) -> None:
    kind = type(module).__name__
    if others.pop("output_attentions", None):
        raise NotImplementedError(
            f'attn_implementation="{NAME}" returns no maps to {kind}; read them by '
            "overt.watch(model), and leave output_attentions=True out"
        )
    for name, given in others.items():
        if given is not None and given is not False and name not in _INERT:
            raise NotImplementedError(
                f"{kind} gives its attention the keyword {name!r}, which "
                f'attn_implementation="{NAME}" does not know and will not ignore; {_INSTEAD}'
            )


def _added(
    query: Tensor, key: Tensor, given: Tensor | None, causal: bool, bias: Tensor | None
) -> Tensor | None:
    """Mask and position bias as one mask for the fused kernel."""
    if bias is None:
        return given
    if causal:
        q, k = query.shape[2], key.shape[2]
        given = torch.ones(q, k, dtype=torch.bool, device=query.device).tril()
    if given is None:
        return bias
    if given.dtype == torch.bool:
        return torch.where(given, bias, torch.finfo(bias.dtype).min)
    return bias + given


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and given is not None:  # with a mask, fast kernels want every head's keys
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    return F.scaled_dot_product_attention(
        query, key, value, given, dropout, causal, scale=scale, enable_gqa=groups > 1
    )


def _written_out(
    module: nn.Module, source: Projected | Written, value: Tensor, dropout: float
) -> Tensor:
    """Attention with a cap or sinks, and its record for whoever watches."""
    edits = edits_of(module)
    if edits:
        source, output = edited(module, Route.INTERFACE, source, value, dropout, edits)
    else:
        weights = F.dropout(source.weights(), dropout, training=dropout > 0).to(value.dtype)
        output = weights @ value.repeat_interleave(source.shape[1] // value.shape[1], dim=1)
    if not HERE.watchers:
        return output
    remember(Record(module, Route.INTERFACE, source, value, output, HERE.cross))
    return output


# --- models on kernels that cannot be seen

_LOCK = threading.Lock()
_ROUTED: dict[int, tuple[int, str]] = {}  # by configuration: how many watch it, and what it had


@contextmanager
def routed(configs: Sequence[Any]) -> Iterator[None]:
    """Let Hugging Face models on kernels that cannot be seen attend through ours, for this block.

    Every part of the model gets back what it had, also after an error, when the last of those who
    watch it has left.
    """
    with ExitStack() as undo:
        for config in configs:
            if id(config) in _ROUTED or _hidden(config._attn_implementation_internal):
                _switch(config)
                undo.callback(_restore, config)
        yield


def configs(model: nn.Module) -> list[Any]:
    """The configurations in a model that name an implementation which can be changed, each once."""
    if "transformers" not in sys.modules:
        return []
    fixed: set[int] = set()
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            can = getattr(type(module), "_can_set_attn_implementation", None)
            if can is not None and not can():
                fixed.add(id(config))
    return [config for at, config in found.items() if at not in fixed]


def _hidden(implementation: Any) -> bool:
    """Whether an implementation is a kernel of its own: flash-attention, flex, one from the Hub.

    One that a user has registered is left alone: it may attend in another way than ours, and it is
    seen if it is made of PyTorch's functions.
    """
    name = str(implementation)
    return "flash" in name or "/" in name or name == "flex_attention"


def _switch(config: Any) -> None:
    register()
    with _LOCK:
        count, before = _ROUTED.get(id(config), (0, config._attn_implementation_internal))
        _ROUTED[id(config)] = (count + 1, before)
        config._attn_implementation_internal = NAME


def _restore(config: Any) -> None:
    with _LOCK:
        count, before = _ROUTED.pop(id(config))
        if count > 1:
            _ROUTED[id(config)] = (count - 1, before)
        else:
            config._attn_implementation_internal = before


def _aligned_at_the_end(module: nn.Module) -> bool:
    """Whether "causal" means that the last query sees the last key, as flash-attention has it."""
    _, before = _ROUTED.get(id(getattr(module, "config", None)), (0, ""))
    return _hidden(before) and before != "flex_attention"
