"""Attention of generated tokens: one row per token, reduced during generation.

A token is generated from the last query of a forward pass, so row n of the map is the attention of
that query for the n-th new token. Each row is read at its step, restricted to the requested keys
and reduced; queries, keys and whole maps are not stored.
"""

import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, Span
from overt.capture.call import Call, QKCall, Route
from overt.capture.decode_rows import DecodeCall, DeferredRows, can_defer, decode_call
from overt.capture.edits import Bias, Edit
from overt.capture.layouts.decoded_tokens import decode_geometry
from overt.capture.session import watch
from overt.capture.stacked_calls import group_stackable, stacked_weights
from overt.capture.state import STATE

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
        reduce: Applied to the map (b, l, h, 1, k) of each token when it is generated, with beams as
            samples; only its result is stored: `lambda row: row.over_heads().over_layers()`.
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
        if edit is None and len(STATE.sessions) == 1:
            beams = _generation_setting(model, arguments, "num_beams") or 1
            rows.record_decoding(STATE.sessions[0], defers=reduce is None and beams == 1)
            undo.callback(setattr, STATE, "decode_recorder", STATE.decode_recorder)
            STATE.decode_recorder = rows.on_interface
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


class _Rows(NamedTuple):
    """Rows of consecutive tokens, after `reduce`."""

    values: Float[Tensor, "b l h n k"]
    visible: Bool[Tensor, "b n k"]
    keys: Layout
    kind: Kind


class _TokenRows:
    """The rows of the generated tokens, and the layers of the current forward pass.

    The calls of the first passes come from the function mode. In the first pass of one new token,
    calls are also recorded from the arguments of the attention functions (`decode_rows`), and the
    rows are compared. If they are equal, later passes are recorded from the arguments only.
    """

    def __init__(
        self,
        keys: Keys | None,
        where: Callable[[Call], bool] | None,
        reduce: Reduce | None,
        is_decoder: Callable[[Call], bool],
    ) -> None:
        self.keys = keys
        self.where = _is_self_attention if where is None else where
        self.given_where = where is not None
        self.prefers_cross = where is None  # whether to switch to cross-attention if there is any
        self.reduce = reduce
        self.is_decoder = is_decoder
        self.thread = threading.get_ident()
        self.open = False  # a pass has started and its token is not selected yet
        self.past = -1  # tokens in the cache when the pass started
        self.count = 0  # tokens in the pass
        self.cache: Any = None
        self.cached = False
        self.stores_keys = False  # whether the cache keeps the keys until the end of the pass
        self.defers = False
        # The layers of the current pass, one query each: calls that are read together at its end,
        # or rows that were read at once.
        self.layers: list[Call | DecodeCall | AttentionMap] = []
        self.tokens: list[_Rows] = []  # of the generated tokens, reduced
        self.new = 0  # tokens so far
        self.prompt = 0  # number of keys when the first token was selected
        self.start = 0  # position of the first new token
        # Decode steps that are recorded from the arguments of the interface.
        self.session: Any = None  # None: they are not
        self.checked = False  # whether their rows were compared
        self.together = True  # whether the rows of several layers are computed at once
        self.candidates: list[DecodeCall] = []  # of the pass in which they are compared
        self.selects: dict[nn.Module, bool] = {}  # by module that may be recorded: `where`
        self.can_wait = False  # whether rows may be computed later than their token
        self.waiting: DeferredRows | None = None

    def record_decoding(self, session: Any, defers: bool) -> None:
        """Record decode steps from the arguments of the interface, once that is checked.

        Args:
            session: The open session.
            defers: Whether rows may be computed later than their token.
        """
        self.session, self.can_wait = session, defers

    # --- callbacks, in the order of a step

    def on_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the generating model: start a pass."""
        if threading.get_ident() != self.thread:
            return  # another user of the model
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else self._cached_tokens(cache)
        # Without a cache, each pass starts at the first token, one pass per token. With a cache,
        # each pass continues where the last one ended; a prompt may be split into several passes.
        if bool(self.layers) if cache is None else self._goes_back(past):
            raise ValueError(
                "the model ran twice over the same tokens (guidance, assisted generation, chunked "
                "audio), so a token has no unique row; turn that off, or use "
                "watch(model, each=...)"
            )
        if cache is not self.cache:
            self.cache, self.stores_keys = cache, cache is not None and _holds_keys(cache)
        self.open, self.past, self.cached, self.layers = True, past, cache is not None, []
        self.count, self.candidates = 0, []
        self.defers = self.new > 0 and self.stores_keys

    def on_interface(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """`STATE.decode_recorder`: return whether the call is recorded without the mode."""
        if self.session is None or not self.open or not self.defers or len(STATE.sessions) != 1:
            return False
        call = decode_call(function, args, kwargs)
        if call is None:
            return False
        if not self.session.watches(call.module):
            return self.checked  # not captured, and no other session has it
        if STATE.module_stack[-1:] != [call.module]:
            return False
        if not self.checked:
            self.candidates.append(call)
            return False
        selected = self.selects.get(call.module)
        if selected is None:
            return False
        self.session.handled.append(call.module)
        self.count = 1
        if self.where(self._call(call)) if self.given_where else selected:
            self.layers.append(call)
        return True

    def on_call(self, call: Call) -> None:
        """Callback of `watch(each=...)`: store the last query of a selected call."""
        if not self.open or not self.is_decoder(call):
            return
        if (
            self.prefers_cross and call.cross and _uses_cache(call)
        ):  # first layer of a decoder with it
            self.prefers_cross, self.where, self.layers = False, _is_cross_attention, []
        selected = self.where(call)
        if self.candidates:
            self.selects[call.module] = selected
        if not call.cross:
            self.count = call.shape[2]
        if not selected:
            return
        _, _, q, k = call.shape
        if self.new and self.cached and q != 1:
            raise ValueError(f"expected one new token per pass, got {q}; {_ASSISTED}")
        if not self.new:
            self.prompt = k if call.cross else self.past + q
        self.layers.append(call if self.defers else self._read_rows([call]))

    def __call__(self, written: Int[Tensor, "b n"], scores: Float[Tensor, "b v"]) -> Tensor:
        """Logits processor that returns its scores: the pass has ended, store the row."""
        if not self.layers:
            raise ValueError(
                "`layers` and `where` selected no attention call of the decoder. If the model is "
                "compiled, its steps are not captured: run it with "
                'torch.compiler.set_stance("force_eager")'
            )
        if not self.new:
            self.start = written.shape[1]
        if not self._wait():
            self._compute_waiting()
            self._store_row(len(written))
        self.new += 1
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
        searched = beams is not None
        if beams is None:
            new = output.sequences[:, self.start :]
            over = torch.isin(new, ends.to(new.device))
            beams = torch.arange(len(new), device=new.device)[:, None].expand_as(new)
            beams = beams.masked_fill(over.cumsum(dim=1) - over.long() > 0, -1)
        count = beams.shape[1]
        # A pass may have run for a token that was not needed; its keys are gone from the cache.
        self._compute_waiting(count - sum(one.values.shape[3] for one in self.tokens))
        tokens = self.tokens
        self.tokens = []
        first = tokens[0]
        values = torch.cat([one.values for one in tokens], dim=3)[:, :, :, :count]
        visible = torch.cat([one.visible for one in tokens], dim=1)[:, :count]
        del tokens
        beams = beams.to(values.device)
        there = beams >= 0
        if searched:
            row, at = beams.long().clamp_min(0), torch.arange(count, device=values.device)
            values = values.permute(0, 3, 1, 2, 4)[row, at].permute(0, 2, 3, 1, 4)
            visible = visible[row, at]
        return AttentionMap(
            values * there[:, None, None, :, None],
            first.keys.select(beams[:, 0].long().cpu()),
            Layout((Span("new", (count,), slice(0, count)),), count),
            visible & there[:, :, None],
            first.kind,
        )

    # --- one token

    def _wait(self) -> bool:
        """Return whether the row of the token can be computed later; then it waits for others."""
        calls = [one for one in self.layers if isinstance(one, DecodeCall)]
        if not self.can_wait or len(calls) < len(self.layers) or not can_defer(self.cache, calls):
            return False
        end = self.past + 1
        if self.waiting is not None and not self.waiting.fits(self.cache, calls, end):
            self._compute_waiting()
        if self.waiting is None:
            self.waiting = DeferredRows(self.cache, calls)
        self.waiting.add(calls, end)
        if self.waiting.full:
            self._compute_waiting()
        return True

    def _compute_waiting(self, count: int | None = None) -> None:
        """Compute the rows of the first `count` waiting tokens, None for all; drop the others."""
        waiting, self.waiting = self.waiting, None
        if waiting is None or not len(waiting) or count == 0:
            return
        self.tokens.append(self._rows_of(waiting, count))

    def _rows_of(self, waiting: DeferredRows, count: int | None = None) -> _Rows:
        """Return the rows of the first `count` waiting tokens, restricted to the keys."""
        rows, seen = waiting.rows(count)
        if self.session.watcher.heads is not None:
            rows = rows[:, :, list(self.session.watcher.heads)]
        some = self._key_index()
        if isinstance(some, slice) and some.stop <= self.prompt:
            rows, visible = rows[..., some], seen[..., some]  # in the cache from the beginning
        else:
            at = self._positions(len(rows), rows.device)
            there = ((at >= 0) & (at < rows.shape[-1]))[:, None]
            at = torch.where(there, at[:, None], 0)
            visible = seen.take_along_dim(at, 2) & there
            at = at[:, None, None].expand(*rows.shape[:4], -1)
            rows = rows.gather(-1, at) * there[:, None, None]
        layout = self._layout(len(rows), visible.shape[-1])
        return _Rows(rows.clone(), visible, layout, Kind.SUBPROBABILITY)

    def _store_row(self, samples: int) -> None:
        """Compute the row of this token, and store what `reduce` returns."""
        first = self.defers and not self.checked
        row = self._check_row() if first else self._stack_layers(self.layers, self.together)
        row = row if self.reduce is None else self.reduce(row)
        if row.values.shape[0] != samples or row.values.shape[3] != 1:
            raise ValueError(
                f"`reduce` must keep {samples} samples and one query, got a map of shape "
                f"{tuple(row.values.shape)}; it may change layers, heads and keys"
            )
        self.tokens.append(_Rows(row.weights, row.visible, row.keys, row.kind))

    def _check_row(self) -> AttentionMap:
        """Return the row of the first pass of one token, read layer by layer, and compare it.

        The other rows are those of later passes: from the arguments of the interface, and of all
        layers at once, by kernels on a GPU. If they differ, later passes are read as this one.
        """
        self.checked = True
        row = self._stack_layers(self.layers, together=False)
        found = [one for one in self.candidates if self.selects.get(one.module)]
        calls = [one for one in self.layers if isinstance(one, Call)]
        self.candidates = []
        if [one.module for one in found] != [one.module for one in calls]:
            self.session = None  # some calls do not come through the interface
        if self.session is None:
            together = self._stack_layers(self.layers, together=True)
            other, visible = together.weights, together.visible
        elif self.can_wait and can_defer(self.cache, found):
            waiting = DeferredRows(self.cache, found)
            waiting.add(found, self.past + 1)
            other, visible, _, _ = self._rows_of(waiting)
        else:
            together = self._stack_layers(found, together=True)
            other, visible = together.weights, together.visible
        source = calls[0].source
        limit = _TOLERANCE.get(source.query.dtype if isinstance(source, QKCall) else None, 2e-3)
        wrong = (row.weights - other).abs().amax(dim=(0, 2, 3, 4)).nan_to_num(torch.inf)
        if bool((wrong > limit).any()) or not torch.equal(row.visible, visible):
            warnings.warn(
                f"rows of {calls[int(wrong.argmax())].name} that are computed for all layers at "
                f"once differ from those that were captured, by {float(wrong.max()):.2g}; each "
                "layer is captured and computed by itself, which is slower",
                stacklevel=2,
            )
            self.session, self.together = None, False
        return row

    def _call(self, call: DecodeCall) -> Call:
        """Return a decode call as the function mode makes it."""
        session = self.session
        made = Call(
            session.name_of(call.module),
            call.module,
            call.source,
            Route.SDPA,
            session.is_cross(call.module, call.source.shape, None),
        )
        heads = session.watcher.heads
        return made if heads is None else made.heads(heads)

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

    def _cached_tokens(self, cache: Any) -> int:
        """Return the number of tokens in the cache when a pass starts."""
        length = cache.get_seq_length()
        # A static cache counts on the GPU, and reading it would synchronize. It only grows.
        if isinstance(length, Tensor) and length.is_cuda and cache is self.cache and self.count:
            return self.past + self.count
        return int(length)

    def _key_index(self) -> slice | Int[Tensor, "b n"]:
        """Return the requested keys."""
        index = self.keys.index if isinstance(self.keys, Span) else self.keys
        return slice(0, self.prompt) if index is None else index

    def _positions(self, b: int, device: torch.device) -> Int[Tensor, "b n"]:
        """Return the requested keys as positions, for each sample and beam."""
        index = self._key_index()
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

    def _stack_layers(
        self, given: Sequence[Call | DecodeCall | AttentionMap], together: bool
    ) -> AttentionMap:
        """Stack the layers of one pass into one map; `together` as for `_read_layers`."""
        layers, order = self._read_layers(given, together)
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

    def _read_layers(
        self, given: Sequence[Call | DecodeCall | AttentionMap], together: bool
    ) -> tuple[list[AttentionMap], list[int]]:
        """Return the rows of the pass and the layer of each; of several layers with `together`."""
        rows = [one for one in given if isinstance(one, AttentionMap)]
        if rows:
            return rows, list(range(len(rows)))
        calls = [
            one if isinstance(one, Call) else self._call(one)
            for one in given
            if isinstance(one, Call | DecodeCall)
        ]
        groups = group_stackable(calls) if together else [[place] for place in range(len(calls))]
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


# Largest difference of the same weights from two ways of computing them in float32, by the format
# of queries and keys.
_TOLERANCE: dict[torch.dtype | None, float] = {torch.float64: 1e-9, torch.float32: 1e-4}
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
