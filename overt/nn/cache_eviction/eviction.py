"""Evict keys and values of a prompt from the cache of a Hugging Face decoder, while it reads it.

Attention is captured from the fused kernels by `watch`. Each layer is scored and evicted right
after its attention, so the full cache of one layer exists at a time. The next token is chosen from
the full prompt; only later tokens attend to the kept positions.

Axis letters:  b batch  l layer  g head of keys and values  k cached position  n kept position
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.capture.call import Call, QKCall
from overt.capture.session import watch
from overt.errors import require_package
from overt.nn.cache_eviction.scores import CachedAttention, ScoreRule, accumulated_attention
from overt.nn.cache_eviction.selection import check_kept, keep_positions

TRANSFORMERS = "5.17"  # the oldest version whose caches were tested


@dataclass(eq=False)
class Eviction:
    """What a block of `evict_cache` has kept of the last prompt.

    Args:
        positions: The kept positions of each evicted layer, by its index, in ascending order. A
            layer is missing if nothing was evicted from it.

    Example:
        >>> Eviction({0: torch.tensor([[[0, 3, 4]]])}).positions[0].shape  # three kept positions
        torch.Size([1, 1, 3])
    """

    positions: dict[int, Int[Tensor, "b g n"]] = field(default_factory=dict)


@contextmanager
def evict_cache(
    model: nn.Module,
    keep: int,
    score: ScoreRule = accumulated_attention,
    first: int = 0,
    last: int = 0,
) -> Iterator[Eviction]:
    """Keep only `keep` cached positions per layer and head of each prompt that the model reads.

    Works with `model.generate` (greedy search, sampling, beams) and with plain calls of the model.
    A prompt is the first pass of several tokens with an empty cache; tokens after it are appended
    and stay. Later tokens keep their true positions. Padding is on the left and is never kept in
    place of a real token. Layers with a sliding window are bounded already and unchanged.

    Args:
        model: A Hugging Face decoder with fused attention ("sdpa"), or any that `watch` captures
            from queries and keys.
        keep: Number of positions to keep in each layer, sample and head of keys.
        score: Rule that scores positions; the largest are kept. Use `functools.partial` for its
            parameters.
        first: Number of first tokens that are always kept: attention sinks.
        last: Number of last tokens that are always kept.

    Yields:
        The kept positions, filled when a prompt has been read.

    Raises:
        ValueError: The cache or the attention does not allow eviction: the message says why.

    Example:
        >>> from functools import partial
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()
        >>> inputs = {"input_ids": torch.arange(1, 13)[None], "pad_token_id": 0}
        >>> from overt.nn.cache_eviction import observation_window
        >>> rule = partial(observation_window, window=2)
        >>> with evict_cache(model, keep=6, score=rule) as evicted:
        ...     output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
        >>> output.shape, evicted.positions[0].shape  # batch, heads of keys, kept positions
        (torch.Size([1, 15]), torch.Size([1, 2, 6]))
    """
    check_kept(keep, first, last)
    evicted = Eviction()

    def evict(cached: CachedAttention, cache: Any, layer: int) -> None:
        if layer in evicted.positions:  # of the prompt before
            evicted.positions.clear()
        if cached.call.shape[-1] <= keep:
            return
        if not _check_cache(model, cache, layer):
            return
        _check_call(cached.call)
        scores = _check_scores(score(cached), cached)
        evicted.positions[layer] = keep_positions(scores, cached.present, keep, first, last)
        gather_cache(cache, {layer: evicted.positions[layer]})

    with _observe_prompts(model, evict):
        yield evicted


def prefill(
    model: nn.Module,
    keep: int,
    score: ScoreRule = accumulated_attention,
    first: int = 0,
    last: int = 0,
    **inputs: Any,
) -> Any:
    """Read a prompt without gradient and return its cache with `keep` positions per head.

    Tokens of a padded prompt get the positions that `model.generate` gives them.

    Pass a copy of the cache to `model.generate(past_key_values=...)`, once for each continuation,
    with the tokens of the prompt and of the continuation, and the attention mask of both.

    Args:
        model: As for `evict_cache`.
        keep: As for `evict_cache`.
        score: As for `evict_cache`.
        first: As for `evict_cache`.
        last: As for `evict_cache`.
        **inputs: Inputs of the model: `input_ids`, `attention_mask` and others.

    Returns:
        The cache, a `DynamicCache` of `transformers`.

    Raises:
        ValueError: As for `evict_cache`.

    Example:
        >>> import copy
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()
        >>> document, question = torch.arange(1, 13)[None], torch.tensor([[1, 2]])
        >>> cache = prefill(model, keep=6, input_ids=document)
        >>> cache.layers[0].keys.shape[2], cache.get_seq_length()
        (6, 12)
        >>> both = torch.cat([document, question], dim=1)
        >>> settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        >>> model.generate(both, past_key_values=copy.deepcopy(cache), **settings).shape
        torch.Size([1, 17])
    """
    with evict_cache(model, keep, score, first, last):
        return _read_prompt(model, inputs)


def score_cache(model: nn.Module, score: ScoreRule, **inputs: Any) -> Float[Tensor, "b l g k"]:
    """Score the positions of a prompt in each layer and head of keys, and evict nothing.

    Args:
        model: As for `evict_cache`; layers with a sliding window are scored, too.
        score: Rule that scores positions.
        **inputs: Inputs of the model: `input_ids`, `attention_mask` and others.

    Returns:
        The scores, without gradient.

    Raises:
        ValueError: The layers have different numbers of heads of keys.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
        >>> ids = torch.arange(1, 13)[None]
        >>> scores = score_cache(model, accumulated_attention, input_ids=ids)
        >>> scores.shape, scores.sum(dim=-1)[0, 0].round()  # 12 queries, one of attention each
        (torch.Size([1, 3, 2, 12]), tensor([12., 12.]))
    """
    found: dict[int, Tensor] = {}

    def keep_scores(cached: CachedAttention, cache: Any, layer: int) -> None:
        found[layer] = _check_scores(score(cached), cached)

    with _observe_prompts(model, keep_scores):
        _read_prompt(model, inputs)
    layers = [found[layer] for layer in sorted(found)]
    if len({one.shape for one in layers}) > 1:
        raise ValueError(
            f"layers have scores of different shapes {[tuple(one.shape) for one in layers]}; use "
            "evict_cache, which scores layer by layer"
        )
    return torch.stack([one.to(layers[0].device) for one in layers], dim=1)


def gather_cache(cache: Any, positions: Mapping[int, Int[Tensor, "b g n"]]) -> None:
    """Keep only some positions of a cache, in place, separately in each head.

    Args:
        cache: A `DynamicCache` of `transformers`.
        positions: The positions to keep of each layer, by its index, in ascending order, with
            padding in front, as from `keep_positions`. All layers without a sliding window must
            keep the same number, because they share an attention mask.

    Raises:
        ValueError: The layer is not a plain dynamic layer, or the sizes do not match.

    Example:
        >>> from transformers import DynamicCache
        >>> cache = DynamicCache()
        >>> _ = cache.update(torch.arange(8.0).view(1, 2, 4, 1), torch.zeros(1, 2, 4, 1), 0)
        >>> gather_cache(cache, {0: torch.tensor([[[0, 3], [1, 2]]])})
        >>> cache.layers[0].keys.view(2, 2), cache.get_seq_length()
        (tensor([[0., 3.],
                [5., 6.]]), 4)
    """
    require_package("transformers", least=TRANSFORMERS)
    from transformers.cache_utils import DynamicLayer

    from overt.nn.cache_eviction.evicted_layer import EvictedLayer

    for index, kept in positions.items():
        layer = cache.layers[index]
        if type(layer) is not DynamicLayer or layer.keys is None:
            raise ValueError(
                f"expected a filled DynamicLayer as layer {index} of the cache, got "
                f"{type(layer).__name__}; evict once, from a DynamicCache"
            )
        b, g, k, _ = layer.keys.shape
        if tuple(kept.shape[:2]) != (b, g):
            raise ValueError(
                f"layer {index} of the cache has {b} samples and {g} heads, positions have "
                f"{tuple(kept.shape[:2])}"
            )
        if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < k:
            raise ValueError(f"positions must be 0 to {k - 1}, the length of layer {index}")
        cache.layers[index] = EvictedLayer(layer, kept)


# --- passes over a prompt

# What to do with the attention of a layer over a prompt: (attention, cache, index of the layer).
Handle = Callable[[CachedAttention, Any, int], None]


@contextmanager
def _observe_prompts(model: nn.Module, handle: Handle) -> Iterator[None]:
    """Pass the attention of each layer to `handle` when the model reads a prompt with a cache."""
    require_package("transformers", least=TRANSFORMERS)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"expected a decoder, got the encoder-decoder {type(model).__name__}, whose prompt is "
            "in the encoder; eviction is not supported for it"
        )
    passes = _Passes(handle)
    with ExitStack() as undo:
        for module in model.modules():
            # a wrapper (PEFT) may generate with the model inside, and skip its own forward
            if module is model or hasattr(module, "prepare_inputs_for_generation"):
                hook = module.register_forward_pre_hook(passes.on_forward, with_kwargs=True)
                undo.callback(hook.remove)
                undo.callback(module.register_forward_hook(passes.on_end, always_call=True).remove)
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                hook = module.register_forward_pre_hook(passes.on_layer, with_kwargs=True)
                undo.callback(hook.remove)
        undo.enter_context(watch(model, each=passes.on_call))
        yield


class _Passes:
    """The forward passes of a block: the current attention mask and cache."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.running: list[nn.Module] = []  # models, the outermost first
        self.mask: Tensor | None = None
        self.caches: dict[nn.Module, Any] = {}  # of the current pass, by the layers that got it
        self.reads_prompt = False  # whether no single token came since the last prompt

    def on_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model and of models inside it: the outermost has the mask."""
        if module in self.running:  # Ctrl-C ended the pass before without `on_end`
            del self.running[self.running.index(module) :]
        self.running.append(module)
        if len(self.running) > 1:
            return
        self.caches.clear()
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        self.mask = kwargs.get("attention_mask", given.get("attention_mask"))

    def on_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the same modules, also after an error."""
        if module in self.running:
            del self.running[self.running.index(module) :]

    def on_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of modules that have a layer of the cache."""
        from transformers.cache_utils import Cache

        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                self.caches[module] = value

    @torch.no_grad()
    def on_call(self, call: Call) -> None:
        """Callback of `watch(each=...)`."""
        index = getattr(call.module, "layer_idx", None)
        if not isinstance(index, int) or call.cross:
            return  # image encoders and their adapters
        cache = self.caches.get(call.module)
        if cache is None:
            raise ValueError(
                f"{call.name or 'the model'} ran without a cache; pass use_cache=True, or leave "
                "this pass out of the block"
            )
        _, _, q, k = call.shape
        if not getattr(cache.layers[index], "is_sliding", False):
            if q != k and q > 1 and self.reads_prompt:
                raise ValueError(
                    f"the model read {q} more tokens right after a prompt (prefill_chunk_size, "
                    "assisted generation, a second call); a prompt must come in one pass, and "
                    "later turns outside of the block"
                )
            self.reads_prompt = q == k
        if q == k and q > 1:
            present = _present(self.mask, call)
            kv_heads = int(cache.layers[index].keys.shape[1])
            self.handle(CachedAttention(call, present, kv_heads), cache, index)


def _read_prompt(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Run the model over a prompt and return its cache."""
    known = inspect.signature(model.forward).parameters
    # the scores of all words at all positions are large, and not needed
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    mask = inputs.get("attention_mask")
    own = hasattr(getattr(model, "model", model), "get_rope_index")  # positions of image grids
    if isinstance(mask, Tensor) and mask.ndim == 2 and "position_ids" in known and not own:
        # those of `generate`, which counts real tokens; models alone count padding, too
        more["position_ids"] = (mask.long().cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
    with torch.no_grad():
        return model(**{"use_cache": True, **more, **inputs}).past_key_values


def _present(mask: Tensor | None, call: Call) -> Bool[Tensor, "b k"]:
    """Return which positions are not padding, which must be on the left."""
    b, _, _, k = call.shape
    if mask is None:
        return torch.ones(b, k, dtype=torch.bool, device=_device(call))
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (b, k):
        raise ValueError(
            f"expected an attention mask of shape ({b}, {k}), one number per token, got "
            f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
        )
    present = mask.to(_device(call)).bool()
    if bool((present[:, :-1] & ~present[:, 1:]).any()):
        raise ValueError(
            "expected padding on the left only, but the attention mask hides tokens after visible "
            "ones; use tokenizer.padding_side = 'left', and pass attention_mask: without it, "
            "`generate` hides every token that equals pad_token_id"
        )
    return present


def _device(call: Call) -> torch.device:
    source = call.source
    return source.query.device if isinstance(source, QKCall) else source.used.device


# --- checks


def _check_cache(model: nn.Module, cache: Any, layer: int) -> bool:
    """Return whether a layer may be evicted; raise if the cache does not allow it."""
    from transformers.cache_utils import DynamicCache

    config = getattr(model, "config", None)
    if type(cache) is not DynamicCache or cache.offloading:
        raise ValueError(
            f"expected a DynamicCache without offloading, got {cache!r}; leave out "
            "past_key_values and cache_implementation"
        )
    found = [getattr(one, "is_sliding", False) for one in cache.layers]
    if config is None:
        return not found[layer]
    if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise ValueError("layers that share keys and values with others cannot be evicted")
    windows = [getattr(one, "is_sliding", False) for one in DynamicCache(config=config).layers]
    if any(windows) and found != windows:
        # the mask of a sliding window counts keys: after an eviction it would show the wrong ones
        raise ValueError(
            "the model has layers with a sliding window that this cache does not limit; pass "
            "DynamicCache(config=model.config)"
        )
    if windows and all(windows):
        raise ValueError(
            "every layer has a sliding window, which bounds its cache already; there is nothing to "
            "evict"
        )
    return not found[layer]


def _check_call(call: Call) -> None:
    """Raise if the scores depend on the places of keys other than by their rotation."""
    source, name = call.source, call.name or "the model"
    if not isinstance(source, QKCall):
        raise ValueError(
            f"{name} computes its attention weights explicitly ({call.route.value}), so biases of "
            'positions cannot be told from scores; use model.set_attn_implementation("sdpa"), or '
            '"overt" after importing it'
        )
    bias = source.bias
    places = source.score_mod is not None
    if bias is not None and not places:  # very low numbers are masks
        places = bool(((bias != 0) & (bias > -9e3)).any())
    if places:
        raise ValueError(
            f"{name} adds a bias for the position of each key (ALiBi, relative positions), which "
            "kept keys would lose; eviction needs rotary or absolute positions"
        )


def _check_scores(scores: Tensor, cached: CachedAttention) -> Float[Tensor, "b g k"]:
    b, k = cached.present.shape
    if tuple(scores.shape) != (b, cached.kv_heads, k):
        raise ValueError(
            f"a rule must return scores of shape {(b, cached.kv_heads, k)}: samples, heads of keys "
            f"and positions; got {tuple(scores.shape)}"
        )
    return scores
