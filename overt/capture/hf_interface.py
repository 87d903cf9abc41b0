"""Hugging Face attention interface: `attn_implementation="overt"`.

Models with kernels that cannot be captured (flash-attention and others) are switched to it while
they are watched, and back afterwards. It uses PyTorch's fused kernel, and plain operations for what
that kernel does not support (softcap, sinks).
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture.call import MaterializedCall, QKCall, Route, default_scale
from overt.capture.edits import attend_with_edits, edits_of
from overt.capture.packed_documents import is_packed, mask_by_lengths, mask_by_positions
from overt.capture.records import CallRecord, record_call
from overt.capture.state import STATE

NAME = "overt"

# Keywords that models pass to every implementation and that do not change scores.
_IGNORED = frozenset(
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
        "position_ids",  # packed documents: `_separate_documents`
        "return_dict",
        "training",
        "use_cache",
    )
)


_LENGTHS = "cu_seq_lens_q", "cu_seq_lens_k"  # ends of packed documents


def register_interface() -> None:
    """Register `attn_implementation="overt"` with transformers; may be called repeatedly."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, overt_attention)
    AttentionMaskInterface.register(NAME, overt_mask)


def registered(name: str) -> Any:
    """Return the attention function that transformers has registered, None if there is none."""
    from transformers import AttentionInterface

    return AttentionInterface().get(name)  # a new instance has no functions of its own


def register(name: str, function: Any) -> None:
    """Register an attention function with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)


def overt_mask(
    q_length: Any = None,
    kv_length: Any = None,
    allow_is_causal_skip: bool = True,
    cache_position: Tensor | None = None,
    **others: Any,
) -> Any:
    """Make the mask of `sdpa`, but never omit it if the numbers of queries and keys differ.

    `sdpa` omits a mask if its `is_causal`, aligned at the first key, is correct. Flash-attention
    aligns at the last key, so the mask is explicit here. A model with eager attention adds its mask
    to the scores: it gets the mask of "eager", which works for both.

    transformers before 5 gives the positions of the queries instead of their number.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    queries: dict[str, Any] = {"q_length": q_length}
    if q_length is None and cache_position is not None:
        q_length, queries = cache_position.shape[0], {"cache_position": cache_position}
    skip = allow_is_causal_skip and (q_length == kv_length or q_length == 1)
    make = sdpa_mask if _supports_sdpa_masks(others.get("config")) else eager_mask
    return make(**queries, kv_length=kv_length, allow_is_causal_skip=skip, **others)


def overt_attention(
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
    """Compute attention for a Hugging Face module, (b, n, h, d).

    `sliding_window` is part of the mask already. `s_aux` are learned sinks. Packed documents are
    separated as by flash-attention, by `cu_seq_lens_q` or by positions that start again.

    Raises:
        NotImplementedError: For a keyword that could change scores and is not supported.
    """
    given = (others.get(name) for name in _LENGTHS)
    lengths = [one if isinstance(one, Tensor) else None for one in given]
    if all(one is not None for one in lengths):  # one of them alone is an error below
        others = {name: given for name, given in others.items() if name not in _LENGTHS}
    _check_keywords(module, others)
    if sliding_window is not None and attention_mask is None and key.shape[2] > sliding_window:
        raise NotImplementedError(
            f"{type(module).__name__} uses a sliding window of {sliding_window} for "
            f"{key.shape[2]} keys without a mask, which is not supported; {_INSTEAD}"
        )
    if attention_mask is not None and attention_mask.ndim == 4 and _may_have_long_masks():
        attention_mask = attention_mask[..., : key.shape[2]]
    # As `sdpa_attention_forward` of transformers: a mask replaces `is_causal`, and a single query,
    # as in decoding, sees all keys.
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    # SDPA aligns `is_causal` at the first key, the kernel that was replaced at the last one.
    if causal and query.shape[2] != key.shape[2] and _is_aligned_at_end(module):
        q, k = query.shape[2], key.shape[2]
        attention_mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
        causal = False
    separated = _separate_documents(
        module, query, key, lengths, others.get("position_ids"), attention_mask, causal
    )
    if separated is not None:
        attention_mask, causal = separated, False
    # The fused call is recorded by the function mode as any SDPA call, the other one here.
    if softcap is None and s_aux is None:
        added = _combine_masks(query, key, attention_mask, causal, position_bias)
        causal = causal and position_bias is None
        output = _fused_attention(query, key, value, added, dropout, causal, scaling)
    else:
        boolean = attention_mask is not None and attention_mask.dtype == torch.bool
        bias = None if boolean else attention_mask
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        source = QKCall(
            query,
            key,
            default_scale(query) if scaling is None else scaling,
            bias=bias,
            allowed=attention_mask if boolean else None,
            causal=causal,
            softcap=softcap,
            sinks=s_aux,
        )
        output = _plain_attention(module, source, value, dropout)
    # The interface returns (b, n, h, d), and no weights.
    return output.transpose(1, 2).contiguous(), None


def _separate_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    lengths: Sequence[Tensor | None],
    positions: Tensor | None,
    mask: Tensor | None,
    causal: bool,
) -> Tensor | None:
    """Return a mask that separates packed documents, None if there are none.

    transformers separates them by positions in its masks, but not with a cache; flash-attention
    does so in its kernel.
    """
    b, q, k = query.shape[0], query.shape[2], key.shape[2]
    query_ends, key_ends = lengths
    if query_ends is not None and key_ends is not None:
        if q != k:
            raise NotImplementedError(
                f"{type(module).__name__} attends in packed documents from {q} queries to {k} "
                "keys, which is not supported; run the model with use_cache=False"
            )
        return mask_by_lengths(query_ends, key_ends, (b, q), mask, causal)
    if (
        positions is not None
        and q == k
        and _is_aligned_at_end(module)
        and is_packed(positions, b, q)
    ):
        return mask_by_positions(positions, mask, causal)
    return None


@cache
def _may_have_long_masks() -> bool:
    """Return whether masks may have more columns than there are keys, to be cut off.

    They do in transformers before 5, whose own attention functions cut them off too.
    """
    transformers = sys.modules.get("transformers")
    return transformers is not None and int(transformers.__version__.partition(".")[0]) < 5


def _supports_sdpa_masks(config: Any) -> bool:
    """Return whether the models of this configuration work with the masks of `sdpa`.

    Some do not support `sdpa`: they use an eager softmax, or do not declare which of their modules
    are causal.
    """
    modeling = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    if modeling is None:
        return False
    # Read from the code of the module that defines the models.
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


_INSTEAD = 'use model.set_attn_implementation("eager") to watch it'


def _check_keywords(module: nn.Module, others: dict[str, Any]) -> None:
    kind = type(module).__name__
    if others.pop("output_attentions", None):
        raise NotImplementedError(
            f'attn_implementation="{NAME}" does not return maps to {kind}; use '
            "overt.watch(model), and remove output_attentions=True"
        )
    for name, given in others.items():
        if given is not None and given is not False and name not in _IGNORED:
            raise NotImplementedError(
                f"{kind} passes the keyword {name!r} to its attention, which "
                f'attn_implementation="{NAME}" does not support; {_INSTEAD}'
            )


def _combine_masks(
    query: Tensor, key: Tensor, given: Tensor | None, causal: bool, bias: Tensor | None
) -> Tensor | None:
    """Combine mask and position bias into one mask for the fused kernel."""
    if bias is None:
        return given
    if causal:
        q, k = query.shape[2], key.shape[2]
        given = torch.ones(q, k, dtype=torch.bool, device=query.device).tril()
    if given is None:
        return bias
    # The lowest number instead of -inf, as in float masks of transformers.
    if given.dtype == torch.bool:
        return torch.where(given, bias, torch.finfo(bias.dtype).min)
    return bias + given


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and given is not None:  # fast kernels with a mask do not support GQA
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    return F.scaled_dot_product_attention(
        query, key, value, given, dropout, causal, scale=scale, enable_gqa=groups > 1
    )


def _plain_attention(
    module: nn.Module, source: QKCall | MaterializedCall, value: Tensor, dropout: float
) -> Tensor:
    """Compute attention with softcap or sinks by plain operations, and record it."""
    edits = edits_of(module)
    if edits:
        source, output = attend_with_edits(module, Route.INTERFACE, source, value, dropout, edits)
    else:
        weights = F.dropout(source.weights(), dropout, training=dropout > 0).to(value.dtype)
        output = weights @ value.repeat_interleave(source.shape[1] // value.shape[1], dim=1)
    if not STATE.sessions:
        return output
    exact = dropout == 0
    record_call(
        CallRecord(module, Route.INTERFACE, source, value, output, STATE.is_cross, exact=exact)
    )
    return output


# --- models with kernels that cannot be captured

_LOCK = threading.Lock()
_SWITCHED: dict[int, tuple[int, str]] = {}  # by id of a config: sessions, previous value


@contextmanager
def use_interface(configs: Sequence[Any]) -> Iterator[None]:
    """Switch configurations with kernels that cannot be captured to "overt" for the block.

    The previous implementation is restored when the last session ends, also after an error.
    """
    with ExitStack() as undo:
        for config in configs:
            if id(config) in _SWITCHED or _is_separate_kernel(config._attn_implementation_internal):
                _switch(config)
                undo.callback(_restore, config)
        yield


def configured_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules whose configuration allows to change the attention implementation."""
    if "transformers" not in sys.modules:
        return []
    fixed: set[int] = set()
    found: list[nn.Module] = []
    for module in modules:
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found.append(module)
            can = getattr(type(module), "_can_set_attn_implementation", None)
            if can is not None and not can():
                fixed.add(id(config))
    return [module for module in found if id(module.config) not in fixed]


def _is_separate_kernel(implementation: Any) -> bool:
    """Whether an implementation is a separate kernel: flash-attention, flex, one from the Hub.

    An implementation registered by a user is not switched: it may differ from ours, and it is
    captured if it uses PyTorch functions.
    """
    name = str(implementation)
    return "flash" in name or "/" in name or name == "flex_attention"


def _switch(config: Any) -> None:
    register_interface()
    with _LOCK:
        count, before = _SWITCHED.get(id(config), (0, config._attn_implementation_internal))
        _SWITCHED[id(config)] = (count + 1, before)
        # Not by the public setter, which changes all sub-configurations too.
        config._attn_implementation_internal = NAME


def _restore(config: Any) -> None:
    with _LOCK:
        count, before = _SWITCHED.pop(id(config))
        if count > 1:
            _SWITCHED[id(config)] = (count - 1, before)
        else:
            config._attn_implementation_internal = before


def _is_aligned_at_end(module: nn.Module) -> bool:
    """Return whether causal masks align the last query with the last key, as in flash-attention."""
    _, before = _SWITCHED.get(id(getattr(module, "config", None)), (0, ""))
    return _is_separate_kernel(before) and before != "flex_attention"
