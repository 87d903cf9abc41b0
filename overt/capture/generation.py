"""Attention of generated tokens: one row per token, reduced during generation.

A token is generated from the last query of a forward pass, so row n of the map is the attention of
that query for the n-th new token. Each row is read at its step, restricted to the requested keys
and reduced; queries, keys and whole maps are not stored.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, Span
from overt.capture.call import Call
from overt.capture.edits import Bias, Edit
from overt.capture.layouts.decoded_tokens import decode_geometry
from overt.capture.session import watch
from overt.capture.stacked_calls import group_stackable, stacked_weights

Keys = Span | slice | Int[Tensor, "b n"]  # positions in the sequence of each sample
Reduce = Callable[[AttentionMap], AttentionMap]


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """Output of `model.generate` with the attention of the generated tokens.

    Args:
        output: What `model.generate` returned.
        attention: The map (b, l, h, new tokens, keys). Sample i is sequence i of
            `output.sequences`. Rows after the end of a sequence are hidden and zero.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 3, "n_head": 2}
        >>> config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> result = generate(model, input_ids=ids, max_new_tokens=2, pad_token_id=0)
        >>> result.output.sequences.shape, result.attention.weights.shape
        (torch.Size([1, 6]), torch.Size([1, 3, 2, 2, 4]))
    """

    output: Any
    attention: AttentionMap


def generate(
    model: nn.Module,
    keys: Keys | None = None,
    layers: Collection[int | str] | None = None,
    heads: Sequence[int] | None = None,
    where: Callable[[Call], bool] | None = None,
    reduce: Reduce | None = None,
    edit: Edit | Bias | None = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> GenerationResult:
    """Run `model.generate(**arguments)` and capture the attention of each generated token.

    Greedy search, sampling and beam search are supported, with any cache or none.

    Args:
        model: A Hugging Face model with `generate`.
        keys: Positions in the sequence, including padding: a span, a slice, or one row of positions
            per sample, -1 for none; None for the whole prompt. A key that is not generated yet, or
            is outside of a sliding window, is hidden and zero.
        layers: As for `watch`.
        heads: As for `watch`.
        where: Selects calls. By default, the cross-attention of the decoder if it has any (an
            encoder-decoder, or a captioner such as BLIP), else its self-attention. With
            cross-attention, `keys` are positions of the encoder; use
            `where=lambda call: not call.cross` for the self-attention instead.
        reduce: Applied to the map (b, l, h, 1, k) of each token, with beams as samples; only its
            result is stored: `lambda row: row.over_heads().over_layers()`.
        edit: As for `watch`.
        tokenizer: Tokenizer or processor that names the generated tokens in pictures, and those of
            the prompt if `keys` is None.
        **arguments: Arguments of `model.generate`, by name.

    Returns:
        The output of `model.generate` and the attention map.

    Raises:
        ValueError: If the model runs several times per token (assisted generation, guidance), or
            if no call is selected.
        TypeError: If `keys` are not positions.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 3, "n_head": 2}
        >>> config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "pad_token_id": 0}
        >>> settings = {"keys": slice(0, 3), "reduce": lambda row: row.over_heads()}
        >>> result = generate(model, **settings, **inputs, max_new_tokens=2)
        >>> result.attention.weights.shape  # 3 layers, the mean over heads, 2 new tokens, 3 keys
        torch.Size([1, 3, 1, 2, 3])
    """
    _check_arguments(model, keys, arguments)
    write = getattr(model, "generate", None)
    if not callable(write):
        kind = type(model).__name__
        raise ValueError(f"{kind} has no generate(); use watch(model, each=...) instead")
    encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    # positions of the prompt are those of `input_ids`, or of their encoder
    reads_prompt = keys is None and (not encodes or where is None)
    if where is None and encodes:
        where = _is_cross_attention
    rows = _TokenRows(keys, where, reduce, _uses_cache if layers is None else _accept_all)
    processors = [*(arguments.pop("logits_processor", None) or []), rows]
    with ExitStack() as undo:
        for module in model.modules():
            if hasattr(module, "prepare_inputs_for_generation"):
                hook = module.register_forward_pre_hook(rows.on_forward, with_kwargs=True)
                undo.callback(hook.remove)
        undo.enter_context(watch(model, layers, heads, edit=edit, each=rows.on_call))
        output = write(
            **_with_required_settings(_with_tokenizer(model, arguments, tokenizer)),
            logits_processor=processors,
        )
    attention = rows.map(output, _end_tokens(model, arguments))
    if tokenizer is not None:
        attention = _name_generated(attention, tokenizer, output.sequences[:, rows.start :])
        if reads_prompt and (encodes or not rows.reads_cross_attention):
            attention = _name_prompt(attention, tokenizer, arguments)
    return GenerationResult(output, attention)


class _TokenRows:
    """The rows of the generated tokens, and the layers of the current forward pass."""

    def __init__(
        self,
        keys: Keys | None,
        where: Callable[[Call], bool] | None,
        reduce: Reduce | None,
        is_decoder: Callable[[Call], bool],
    ) -> None:
        self.keys = keys
        self.where = _is_self_attention if where is None else where
        self.prefers_cross = where is None  # whether to switch to cross-attention if there is any
        self.reduce = reduce
        self.is_decoder = is_decoder
        self.thread = threading.get_ident()
        self.open = False  # a pass has started and its token is not selected yet
        self.past = -1  # tokens in the cache when the pass started
        self.cached = False
        self.defers = False  # whether the cache keeps the keys until the end of the pass
        # The layers of the current pass, one query each: calls that are read together at its end,
        # or rows that were read at once.
        self.layers: list[Call | AttentionMap] = []
        self.tokens: list[AttentionMap] = []  # of the generated tokens, reduced
        self.prompt = 0  # number of keys when the first token was selected
        self.start = 0  # position of the first new token

    # --- callbacks, in the order of a step

    def on_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the generating model: start a pass."""
        if threading.get_ident() != self.thread:
            return  # another user of the model
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        # Without a cache, each pass starts at the first token, one pass per token. With a cache,
        # each pass continues where the last one ended; a prompt may be split into several passes.
        if bool(self.layers) if cache is None else self._goes_back(past):
            raise ValueError(
                "the model ran twice over the same tokens (guidance, assisted generation, chunked "
                "audio), so a token has no unique row; turn that off, or use "
                "watch(model, each=...)"
            )
        self.open, self.past, self.cached, self.layers = True, past, cache is not None, []
        self.defers = bool(self.tokens) and cache is not None and _holds_keys(cache)

    def on_call(self, call: Call) -> None:
        """Callback of `watch(each=...)`: store the last query of a selected call."""
        if not self.open or not self.is_decoder(call):
            return
        if (
            self.prefers_cross and call.cross and _uses_cache(call)
        ):  # first layer of a decoder with it
            self.prefers_cross, self.where, self.layers = False, _is_cross_attention, []
        if not self.where(call):
            return
        _, _, q, k = call.shape
        if self.tokens and self.cached and q != 1:
            raise ValueError(f"expected one new token per pass, got {q}; {_ASSISTED}")
        if not self.tokens:
            self.prompt = k if call.cross else self.past + q
        self.layers.append(call if self.defers else self._read_rows([call]))

    def __call__(self, written: Int[Tensor, "b n"], scores: Float[Tensor, "b v"]) -> Tensor:
        """Logits processor that returns its scores: the pass has ended, store the row."""
        if not self.layers:
            raise ValueError("`layers` and `where` selected no attention call of the decoder")
        if not self.tokens:
            self.start = written.shape[1]
        row = self._stack_layers()
        row = row if self.reduce is None else self.reduce(row)
        if row.values.shape[0] != len(written) or row.values.shape[3] != 1:
            raise ValueError(
                f"`reduce` must keep {len(written)} samples and one query, got a map of shape "
                f"{tuple(row.values.shape)}; it may change layers, heads and keys"
            )
        self.tokens.append(row)
        self.open, self.layers = False, []
        return scores

    # --- result

    @property
    def reads_cross_attention(self) -> bool:
        """Whether the rows are of cross-attention."""
        return self.where is _is_cross_attention

    def map(self, output: Any, ends: Int[Tensor, " e"]) -> AttentionMap:
        """Return the map of the output sequences, each traced back through its beams."""
        beams = getattr(output, "beam_indices", None)
        if beams is None:
            new = output.sequences[:, self.start :]
            over = torch.isin(new, ends.to(new.device))
            beams = torch.arange(len(new), device=new.device)[:, None].expand_as(new)
            beams = beams.masked_fill(over.cumsum(dim=1) - over.long() > 0, -1)
        tokens = self.tokens[: beams.shape[1]]
        values, masks = [], []
        for row, beam in zip(tokens, beams.to(tokens[0].values.device).unbind(dim=1), strict=True):
            there = beam >= 0
            beam = beam.long().clamp_min(0)
            masks.append(row.visible[beam] & there[:, None, None])
            values.append(row.weights[beam] * there[:, None, None, None, None])
        return AttentionMap(
            torch.cat(values, dim=3),
            tokens[0].keys.select(beams[:, 0].long().cpu()),
            Layout((Span("new", (len(tokens),), slice(0, len(tokens))),), len(tokens)),
            torch.cat(masks, dim=1),
            tokens[0].kind,
        )

    # --- helpers

    def _read_rows(self, calls: Sequence[Call]) -> AttentionMap:
        """Return the rows of the last query in calls that can be stacked, restricted to the keys.

        The layers of the map are the calls.
        """
        first = calls[0]
        b, _, q, k = first.shape
        end = k if first.cross else self.past + q
        last = slice(q - 1, q)
        row = stacked_weights(calls, last)
        at = self._positions(b, row.device)
        # A cache with more slots than tokens (static) fills from the left. One with fewer slots
        # (sliding window) has dropped the first tokens.
        slots = at - max(end - k, 0)
        slots = torch.where((at < end) & (slots >= 0), slots, -1)
        there = (slots >= 0)[:, None]
        visible = first.visible(last, slots)
        at = slots.clamp_min(0)[:, None, None, None].expand(*row.shape[:4], -1)
        return AttentionMap(
            row.gather(-1, at) * there[:, None, None],
            self._layout(b, slots.shape[1]),
            GLOBAL_QUERY,
            there if visible is None else there & visible,
            Kind.SUBPROBABILITY if first.kind is Kind.PROBABILITY else first.kind,
        )

    def _goes_back(self, past: int) -> bool:
        """Return whether a pass starts at or before the position of the last one."""
        return past < self.past or (past == self.past and (bool(self.layers) or not self.open))

    def _positions(self, b: int, device: torch.device) -> Int[Tensor, "b n"]:
        """Return the requested keys as positions, for each sample and beam."""
        index = self.keys.index if isinstance(self.keys, Span) else self.keys
        if index is None:
            index = slice(0, self.prompt)
        if isinstance(index, slice):
            return torch.arange(index.stop, device=device)[index].expand(b, -1)
        if b % len(index):
            raise ValueError(f"keys have {len(index)} samples, the batch has {b} sequences")
        return index.to(device).repeat_interleave(b // len(index), dim=0)

    def _layout(self, b: int, n: int) -> Layout:
        """Return the layout of the requested keys, for each sample and beam."""
        if not isinstance(self.keys, Span):
            return Layout((Span("keys", (n,), slice(0, n)),), n)
        layout = Layout((replace(self.keys, index=slice(0, n)),), n)
        if self.keys.geometry is None:
            return layout
        samples = len(self.keys.geometry)
        return layout.select(torch.arange(samples).repeat_interleave(b // samples))

    def _stack_layers(self) -> AttentionMap:
        """Stack the layers of one pass into one map."""
        layers, order = self._read_layers()
        heads = {layer.values.shape[2] for layer in layers}
        if len(heads) > 1:
            raise ValueError(
                f"layers with different numbers of heads {sorted(heads)} cannot be stacked; select "
                "some with `layers` or `where`"
            )
        if len(layers) == 1:
            return layers[0]
        # A large model may have its layers on several devices; its rows are small.
        layers = [layer.to(layers[0].values.device) for layer in layers]
        weights = torch.cat([layer.weights for layer in layers], dim=1)
        if order != sorted(order):
            weights = weights[:, torch.tensor(order, device=weights.device).argsort()]
        kinds = (Kind.SUBPROBABILITY, Kind.AMOUNT, Kind.SIGNED)
        return AttentionMap(
            weights,
            layers[0].keys,
            GLOBAL_QUERY,
            torch.stack([layer.visible for layer in layers]).any(dim=0),
            max((layer.kind for layer in layers), key=kinds.index),
        )

    def _read_layers(self) -> tuple[list[AttentionMap], list[int]]:
        """Return the rows of the pass, of several layers where possible, and the layer of each."""
        calls = [one for one in self.layers if isinstance(one, Call)]
        if not calls:
            rows = [one for one in self.layers if isinstance(one, AttentionMap)]
            return rows, list(range(len(rows)))
        groups = group_stackable(calls)
        found = [self._read_rows([calls[place] for place in group]) for group in groups]
        return found, [place for group in groups for place in group]


def _name_generated(
    attention: AttentionMap, tokenizer: Any, new: Int[Tensor, "b n"]
) -> AttentionMap:
    """Return the map with the text of the generated tokens."""
    span = attention.queries.spans[0]
    geometry = decode_geometry(tokenizer, new[:, : len(attention.queries)])
    return replace(
        attention,
        queries=Layout((replace(span, geometry=geometry),), len(attention.queries)),
    )


def _name_prompt(
    attention: AttentionMap, tokenizer: Any, arguments: Mapping[str, Any]
) -> AttentionMap:
    """Return the map with the text of the prompt, if its keys are the tokens of `input_ids`."""
    ids = arguments.get("input_ids", arguments.get("inputs"))
    keys = len(attention.keys)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.shape[1:] != (keys,):
        return attention
    there = arguments.get("attention_mask")
    geometry = decode_geometry(
        tokenizer, ids, None if there is None or there.shape != ids.shape else there.bool()
    )
    # sequences of one sample follow each other
    rows = torch.arange(len(ids)).repeat_interleave(len(attention) // len(ids))
    return replace(
        attention, keys=Layout((Span("text", (keys,), slice(0, keys), geometry[rows]),), keys)
    )


_ASSISTED = "assisted generation is not supported: remove the assistant or prompt lookup"


def _check_arguments(model: nn.Module, keys: Keys | None, arguments: dict[str, Any]) -> None:
    """Raise for unsupported arguments before the model runs."""
    given = any(isinstance(one, Tensor) for one in arguments.values())
    if isinstance(keys, Mapping):
        raise TypeError(
            "the second argument is keys; pass inputs by name: generate(model, **inputs)"
        )
    if isinstance(keys, str) and not given:
        raise TypeError(
            "the second argument is keys; pass the tokens of a text by name: "
            'generate(model, **tokenizer(text, return_tensors="pt"))'
        )
    if isinstance(keys, str):
        raise TypeError(f"keys must be positions: use the span layout_of(...).find({keys!r})")
    if isinstance(keys, Tensor) and not given:
        raise TypeError(
            "the second argument is keys; pass inputs by name: generate(model, input_ids=...)"
        )
    if isinstance(keys, slice) and (keys.stop is None or min(keys.start or 0, keys.stop) < 0):
        raise ValueError(f"a slice of keys needs a stop and no negative positions, got {keys}")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if _generation_setting(model, arguments, name) is not None:
            raise ValueError(f"{name} is set, but {_ASSISTED}")
    if arguments.get("custom_generate") is not None:
        raise ValueError("custom_generate is not supported; remove it")


def _generation_setting(model: nn.Module, arguments: dict[str, Any], name: str) -> Any:
    """Return a setting from the arguments, their generation config, or that of the model."""
    if name in arguments:
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return (
        getattr(getattr(model, "generation_config", None), name, None) if given is None else given
    )


def _with_tokenizer(model: nn.Module, arguments: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Add the tokenizer if `model.generate` needs it, to find the strings at which it stops."""
    if tokenizer is None or _generation_setting(model, arguments, "stop_strings") is None:
        return arguments
    return arguments | {"tokenizer": getattr(tokenizer, "tokenizer", tokenizer)}


def _with_required_settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the settings needed here: return beam indices, and do not compile the steps.

    The row of a compiled step could not be read.
    """
    settings = {"return_dict_in_generate": True, "disable_compile": True}
    config = arguments.get("generation_config")
    if config is None:
        return arguments | settings
    config = deepcopy(config)
    config.update(**settings)
    return arguments | {"generation_config": config}


def _holds_keys(cache: Any) -> bool:
    """Return whether the keys of a pass stay in memory anyway, until its end.

    Offloaded layers leave the device when they have attended, and quantized ones are unpacked for
    one layer: to keep their keys would keep the whole cache.
    """
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    layers = [layer for one in (cache, *parts) for layer in getattr(one, "layers", ())]
    offloads = any(getattr(one, "offloading", False) for one in (cache, *parts))
    return not offloads and not any(hasattr(layer, "nbits") for layer in layers)


def _is_self_attention(call: Call) -> bool:
    return not call.cross


def _is_cross_attention(call: Call) -> bool:
    return call.cross


def _accept_all(call: Call) -> bool:
    return True


def _uses_cache(call: Call) -> bool:
    """Return whether a call belongs to the decoder: modules that use a cache have a `layer_idx`.

    Image encoders run in the first pass too, and have none.
    """
    return getattr(call.module, "layer_idx", None) is not None


def _end_tokens(model: nn.Module, arguments: dict[str, Any]) -> Int[Tensor, " e"]:
    """Return the end-of-sequence token ids."""
    ends = _generation_setting(model, arguments, "eos_token_id")
    return torch.as_tensor([] if ends is None else ends, dtype=torch.long).reshape(-1)
