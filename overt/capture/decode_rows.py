"""Attention rows of generated tokens, read from the arguments of the Hugging Face interface.

A decode step runs one query per sample through every layer. Capturing each call by the function
mode and computing each row by operations of its own costs more than the step itself in small
models. Here a call is recorded from the arguments of the attention function, and the queries of
several tokens wait (`DeferredRows`) until their rows are computed together, from the keys that the
cache holds anyway: a few operations for all layers and tokens.

Nothing here is used before its rows were compared with those of the function mode, see
`generation`. Calls that are not certain to be what the attention function computes are left to it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.capture.block_scores import ALL, block_log_softmax
from overt.capture.call import QKCall, default_scale

# Functions whose arguments decide the scores as in `decode_call`, by their module.
_FUNCTIONS = ("transformers.integrations.sdpa_attention", "overt.capture.hf_interface")
# Keywords that change the scores; "cache" is that of continuous batching.
_CHANGE_SCORES = {
    "cache",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "output_attentions",
    "position_bias",
    "s_aux",
    "softcap",
}
# Layers of a cache that append keys and never change or move those that they hold.
_APPENDING = ("DynamicLayer", "StaticLayer")
_CACHES = ("DynamicCache", "StaticCache", "EncoderDecoderCache")
MAX_TOKENS = 64  # that wait; as many rows as the kernels hold
MAX_BYTES = {"cpu": 2**22}  # of the rows of waiting tokens, over all keys
MAX_BYTES_GPU = 2**28


class DecodeCall(NamedTuple):
    """Attention of one new token per sample: queries (b, h, 1, d) and cached keys (b, g, k, d)."""

    module: nn.Module
    query: Tensor
    key: Tensor
    scale: float
    mask: Tensor | None  # (b, 1 or h, 1, k): bool, or added to the scores

    @property
    def source(self) -> QKCall:
        """The same attention as the function mode records it."""
        boolean = self.mask is not None and self.mask.dtype == torch.bool
        bias, allowed = (None, self.mask) if boolean else (self.mask, None)
        return QKCall(self.query, self.key, self.scale, bias=bias, allowed=allowed)


def decode_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DecodeCall | None:
    """Return the attention that a function of the interface computes for one new token per sample.

    Args:
        function: The function of the interface.
        args: Its positional arguments: module, queries, keys, values, mask.
        kwargs: Its keywords.

    Returns:
        The call; None if these arguments alone do not decide the scores.
    """
    if len(args) != 5 or function.__module__ not in _FUNCTIONS:
        return None
    module, query, key, _, mask = args
    if (
        type(query) is not Tensor
        or type(key) is not Tensor
        or query.ndim != 4
        or key.ndim != 4
        or query.shape[2] != 1
        or query.shape[1] % key.shape[1]
        or query.dtype != key.dtype
        or kwargs.get("dropout")
        or any(kwargs[name] is not None for name in _CHANGE_SCORES.intersection(kwargs))
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(query.device.type)
    ):
        return None
    if mask is not None:
        if type(mask) is not Tensor or mask.ndim != 4:
            return None
        if mask.shape[2] != 1 or mask.shape[3] != key.shape[2]:
            return None
    scale = kwargs.get("scaling")
    return DecodeCall(module, query, key, default_scale(query) if scale is None else scale, mask)


# --- tokens whose rows are computed later


class DeferredRows:
    """Queries of tokens whose rows are computed together, from the keys of the cache.

    The keys of a token stay in the cache, at the same places, so its row can be computed from the
    queries alone at any later time.
    """

    def __init__(self, cache: Any, calls: Sequence[DecodeCall]) -> None:
        self.cache = cache
        self.modules = [call.module for call in calls]
        self.scale = calls[0].scale
        self.queries: list[list[Tensor]] = []  # of each token, by layer
        self.masks: list[Tensor | None] = []
        self.ends: list[int] = []  # tokens in the cache, with the new one

    def __len__(self) -> int:
        return len(self.queries)

    def fits(self, cache: Any, calls: Sequence[DecodeCall], end: int) -> bool:
        """Return whether the next token can wait with the others."""
        return (
            cache is self.cache
            and len(calls) == len(self.modules)
            and all(call.module is one for call, one in zip(calls, self.modules, strict=True))
            and calls[0].scale == self.scale
            and (not self.ends or end == self.ends[-1] + 1)
            and (not self.queries or calls[0].query.shape == self.queries[-1][0].shape)
        )

    def add(self, calls: Sequence[DecodeCall], end: int) -> None:
        """Add the queries of a token."""
        self.queries.append([call.query for call in calls])
        self.masks.append(calls[0].mask)
        self.ends.append(end)

    @property
    def full(self) -> bool:
        """Whether the rows of these tokens fill the memory that is set aside for them."""
        b, h, _, _ = self.queries[0][0].shape
        device = self.queries[0][0].device.type
        one = 4 * len(self.modules) * b * h * self.ends[-1]
        limit = MAX_BYTES.get(device, MAX_BYTES_GPU) // one
        return len(self) >= max(1, min(MAX_TOKENS, limit))

    def rows(
        self, count: int | None = None
    ) -> tuple[Float[Tensor, "b l h s k"], Bool[Tensor, "b s k"]]:
        """Compute the rows of the first `count` tokens over all keys, and which keys exist.

        The tokens are removed.
        """
        count = len(self) if count is None else min(count, len(self))
        ends, masks = self.ends[:count], self.masks[:count]
        keys = [_cached_keys(self.cache, module) for module in self.modules]
        if any(key is None or key.shape[2] < ends[-1] for key in keys):
            raise RuntimeError(
                f"the cache holds fewer than {ends[-1]} keys although that many were attended to: "
                "it was changed during generation; pass reduce=lambda row: row to read each row "
                "when its token is generated"
            )
        visible = _visible_keys(keys[0], ends, masks)
        # One copy for all layers and tokens; each layer is a view, with equal strides.
        layers = zip(*self.queries[:count], strict=True)
        queries = torch.cat([one for layer in layers for one in layer], dim=2)
        some = queries.split(count, dim=2)
        hidden = (
            None if count == 1 and masks[0] is None and keys[0].shape[2] == ends[0] else visible
        )
        logs = block_log_softmax(some, keys, slice(0, count), ALL, self.scale, hidden)
        self.queries, self.masks, self.ends = [], [], []
        return rearrange(logs.exp_(), "l b h s k -> b l h s k"), visible


def can_defer(cache: Any, calls: Sequence[DecodeCall]) -> bool:
    """Return whether the rows of these calls can be computed from the cache at a later time.

    Layers of equal shapes, one mask of booleans for all, and keys that are those of an appending
    cache: not of a sliding window, whose first keys are dropped, or of a quantized cache.
    """
    first = calls[0]
    if type(cache).__name__ not in _CACHES or not _is_of_transformers(cache):
        return False
    if first.mask is not None and (first.mask.dtype != torch.bool or first.mask.shape[1] != 1):
        return False
    return all(
        call.mask is first.mask
        and call.scale == first.scale
        and call.query.shape == first.query.shape
        and call.key.shape == first.key.shape
        and call.key.stride() == first.key.stride()
        and call.query.dtype == first.query.dtype
        and call.query.device == first.query.device
        and _cached_keys(cache, call.module) is call.key
        for call in calls
    )


def _is_of_transformers(one: Any) -> bool:
    return type(one).__module__ == "transformers.cache_utils"


def _cached_keys(cache: Any, module: nn.Module) -> Any:
    """Return the keys that an appending cache holds for a module, None for other caches."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    place = getattr(module, "layer_idx", None)
    if not isinstance(place, int) or not 0 <= place < len(layers):
        return None
    layer = layers[place]
    known = type(layer).__name__ in _APPENDING and _is_of_transformers(layer)
    return layer.keys if known else None


def _visible_keys(
    key: Tensor, ends: Sequence[int], masks: Sequence[Tensor | None]
) -> Bool[Tensor, "b s k"]:
    """Return which keys existed when each token attended, and were not hidden by a mask."""
    k = key.shape[2]
    # Consecutive tokens: compared with a range, which is not copied from the host.
    last = torch.arange(ends[0], ends[0] + len(ends), device=key.device)
    visible = (torch.arange(k, device=key.device) < last[:, None]).expand(len(key), -1, -1)
    if all(one is None for one in masks):
        return visible
    shown = key.new_ones((key.shape[0], len(masks), k), dtype=torch.bool)
    for at, mask in enumerate(masks):
        if mask is not None:  # a dynamic cache had fewer keys at that time
            shown[:, at, : mask.shape[3]] = mask[:, 0, 0]
    return visible & shown
