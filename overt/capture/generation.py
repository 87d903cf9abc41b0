"""Attention of the tokens that a model writes: one row a token, reduced while it writes.

A token is chosen from the last query of a forward pass, so that row is the attention with which the
token was written: row n of the map belongs to the n-th new token. Each row is read at its own step,
cut to the keys asked for, and reduced; queries, keys and whole maps are gone when the step is.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.attention import POINT, AttentionMap, Kind, Layout, Span
from overt.capture.call import Call
from overt.capture.edits import Bias, Edit
from overt.capture.products import take
from overt.capture.watching import watch

Keys = Span | slice | Int[Tensor, "b n"]  # where the keys stand in the sequence of each sample
Reduce = Callable[[AttentionMap], AttentionMap]


@dataclass(frozen=True, eq=False)
class Generated:
    """What `model.generate` returned, and the attention (b, l, h, new tokens, keys) behind it.

    Sequence i of `output.sequences` is sample i of the map. After its end a sequence has no rows:
    they are hidden and zero.
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
    **arguments: Any,
) -> Generated:
    """Run `model.generate(**arguments)`, and keep the attention with which each token was written.

    `keys` are positions of the sequence, padding counted: a span, a slice, or one row of positions
    a sample, -1 where it has none. None is the whole prompt. A key that is not written yet, or that
    a sliding window has left behind, is hidden and zero. `layers`, `heads` and `edit` are those of
    `watch`. `where` chooses calls. By default they are those of a decoder that look at its own
    sequence, or, in an encoder-decoder, at the encoder: then `keys` are positions of the encoder's
    states, and `where=lambda call: not call.cross` asks for the decoder's own tokens instead.

    `reduce` is given the map (b, l, h, 1, k) of each token as it comes, beams as samples, and only
    what it returns is kept: `lambda row: row.over_heads().over_layers()`. Greedy search, sampling
    and beams are followed, with any cache or none. What runs the model several times for one token
    is refused.
    """
    _refuse(model, keys, arguments)
    write = getattr(model, "generate", None)
    if not callable(write):
        kind = type(model).__name__
        raise ValueError(f"{kind} has no generate(); take calls with watch(model, each=...)")
    if where is None:
        encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        where = _across if encodes else _itself
    rows = _Rows(keys, where, reduce, _cached if layers is None else _any)
    processors = [*(arguments.pop("logits_processor", None) or []), rows.choose]
    with ExitStack() as undo:
        for module in model.modules():
            if hasattr(module, "prepare_inputs_for_generation"):
                hook = module.register_forward_pre_hook(rows.begin, with_kwargs=True)
                undo.callback(hook.remove)
        undo.enter_context(watch(model, layers, heads, edit=edit, each=rows.take))
        output = write(**_needed(arguments), logits_processor=processors)
    return Generated(output, rows.map(output, _ends(model, arguments)))


class _Rows:
    """The rows of the tokens chosen so far, and those of the forward pass that is at work."""

    def __init__(
        self,
        keys: Keys | None,
        where: Callable[[Call], bool],
        reduce: Reduce | None,
        writes: Callable[[Call], bool],
    ) -> None:
        self.keys = keys
        self.where = where
        self.reduce = reduce
        self.writes = writes
        self.thread = threading.get_ident()
        self.open = False  # a pass has begun and its token is not chosen yet
        self.past = -1  # how many tokens the cache held when the pass began
        self.cached = False
        self.layers: list[AttentionMap] = []  # of the pass at work, one query each
        self.tokens: list[AttentionMap] = []  # of the tokens chosen, reduced
        self.prompt = 0  # keys there were when the first token was chosen
        self.start = 0  # where the first new token stands

    # --- what generate does, in the order of a step

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the model that writes: a pass over some tokens begins."""
        if threading.get_ident() != self.thread:
            return  # somebody else uses the model at the same time
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        # Without a cache each pass starts from the first token, and there is one a token. With one,
        # each pass goes on where the last ended; a prompt may come in several.
        if bool(self.layers) if cache is None else self._returns(past):
            raise ValueError(
                "the model ran twice over the same tokens (guidance, assistants, long recordings "
                "in parts), so that the row of a token is not known; switch that off, or take "
                "calls as they come with watch(model, each=...)"
            )
        self.open, self.past, self.cached, self.layers = True, past, cache is not None, []

    def take(self, call: Call) -> None:
        """For `watch(each=)`: the last query of a call, if the call is one of those wanted."""
        if not self.open or not self.writes(call) or not self.where(call):
            return
        b, _, q, k = call.shape
        if self.tokens and self.cached and q != 1:
            raise ValueError(f"{q} tokens were tried at once, and only one has a row; {_ASSISTED}")
        end = k if call.cross else self.past + q
        if not self.tokens:
            self.prompt = end
        last = slice(q - 1, q)
        row = call.weights(last)
        at = self._positions(b, row.device)
        # A cache of more slots than tokens was made for the full length and fills from the left.
        # One of fewer has let the first tokens go (a sliding window).
        slots = at - max(end - k, 0)
        slots = torch.where((at < end) & (slots >= 0), slots, -1)
        there = (slots >= 0)[:, None]
        visible = call.visible(last, slots)
        self.layers.append(
            AttentionMap(
                rearrange(take(row, slots, 3) * there[:, None], "b h 1 k -> b 1 h 1 k"),
                self._layout(b, slots.shape[1]),
                POINT,
                there if visible is None else there & visible,
                Kind.SUBPROBABILITY if call.kind is Kind.PROBABILITY else call.kind,
            )
        )

    def choose(self, written: Int[Tensor, "b n"], scores: Float[Tensor, "b v"]) -> Tensor:
        """A logits processor that changes nothing: the pass that ended writes the next token."""
        if not self.layers:
            raise ValueError("`layers` and `where` left no attention call that writes a token")
        if not self.tokens:
            self.start = written.shape[1]
        row = self._row()
        row = row if self.reduce is None else self.reduce(row)
        if row.values.shape[0] != len(written) or row.values.shape[3] != 1:
            raise ValueError(
                f"`reduce` gave {tuple(row.values.shape)}: it may change layers, heads and keys, "
                f"but must leave {len(written)} samples and one query"
            )
        self.tokens.append(row)
        self.open, self.layers = False, []
        return scores

    # --- the whole of it

    def map(self, output: Any, ends: Int[Tensor, " e"]) -> AttentionMap:
        """One map of the sequences returned, each followed back through the beams it was on."""
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

    def _returns(self, past: int) -> bool:
        """Whether a pass starts at or before the one that has been read."""
        return past < self.past or (past == self.past and (bool(self.layers) or not self.open))

    def _positions(self, b: int, device: torch.device) -> Int[Tensor, "b n"]:
        """The keys asked for, as positions of each row of the batch, beams and all."""
        index = self.keys.index if isinstance(self.keys, Span) else self.keys
        if index is None:
            index = slice(0, self.prompt)
        if isinstance(index, slice):
            return torch.arange(index.stop, device=device)[index].expand(b, -1)
        if b % len(index):
            raise ValueError(f"keys of {len(index)} samples do not fit {b} sequences")
        return index.to(device).repeat_interleave(b // len(index), dim=0)

    def _layout(self, b: int, n: int) -> Layout:
        """What the keys are, once they stand alone, for each row of the batch."""
        if not isinstance(self.keys, Span):
            return Layout((Span("keys", (n,), slice(0, n)),), n)
        layout = Layout((replace(self.keys, index=slice(0, n)),), n)
        if self.keys.geometry is None:
            return layout
        samples = len(self.keys.geometry)
        return layout.select(torch.arange(samples).repeat_interleave(b // samples))

    def _row(self) -> AttentionMap:
        """The layers of one pass as one map."""
        heads = {layer.values.shape[2] for layer in self.layers}
        if len(heads) > 1:
            raise ValueError(
                f"layers of {sorted(heads)} heads do not stack; choose with `layers` or `where`"
            )
        # A large model may have its layers on several devices; its rows are small.
        layers = [layer.to(self.layers[0].values.device) for layer in self.layers]
        order = (Kind.SUBPROBABILITY, Kind.AMOUNT, Kind.SIGNED)
        return AttentionMap(
            torch.cat([layer.weights for layer in layers], dim=1),
            layers[0].keys,
            POINT,
            torch.stack([layer.visible for layer in layers]).any(dim=0),
            max((layer.kind for layer in layers), key=order.index),
        )


_ASSISTED = "assisted generation cannot be followed: leave out its assistant or prompt lookup"


def _refuse(model: nn.Module, keys: Keys | None, arguments: dict[str, Any]) -> None:
    """Say no to what cannot be followed token by token, before anything runs."""
    if isinstance(keys, str):
        raise TypeError(f"keys are positions: give layout_of(...).find({keys!r}), a span")
    if isinstance(keys, Tensor) and not any(isinstance(one, Tensor) for one in arguments.values()):
        raise TypeError(
            "name what the model reads: generate(model, input_ids=...); second are keys"
        )
    if isinstance(keys, slice) and (keys.stop is None or min(keys.start or 0, keys.stop) < 0):
        raise ValueError("a slice of keys counts from the first and says where it stops")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if _setting(model, arguments, name) is not None:
            raise ValueError(f"{name} is set, but {_ASSISTED}")
    if arguments.get("custom_generate") is not None:
        raise ValueError("custom_generate was given, and its steps are not known; leave it out")


def _setting(model: nn.Module, arguments: dict[str, Any], name: str) -> Any:
    """A setting as `generate` finds it: in its arguments, their config, or the model's."""
    if name in arguments:
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return (
        getattr(getattr(model, "generation_config", None), name, None) if given is None else given
    )


def _needed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with what is needed to follow them: beams told, and no step compiled.

    A compiled step has no moment at which its row could be read.
    """
    settings = {"return_dict_in_generate": True, "disable_compile": True}
    config = arguments.get("generation_config")
    if config is None:
        return arguments | settings
    config = deepcopy(config)
    config.update(**settings)
    return arguments | {"generation_config": config}


def _itself(call: Call) -> bool:
    """Calls that look at the sequence they are part of."""
    return not call.cross


def _across(call: Call) -> bool:
    """Calls that look at another sequence, such as the encoder's."""
    return call.cross


def _any(call: Call) -> bool:
    return True


def _cached(call: Call) -> bool:
    """Calls of a model's writing part: what reads a cache knows its number in it.

    The towers that turn an image into tokens run in the first pass too, and have none.
    """
    return getattr(call.module, "layer_idx", None) is not None


def _ends(model: nn.Module, arguments: dict[str, Any]) -> Int[Tensor, " e"]:
    """The tokens that end a sequence."""
    ends = _setting(model, arguments, "eos_token_id")
    return torch.as_tensor([] if ends is None else ends, dtype=torch.long).reshape(-1)
