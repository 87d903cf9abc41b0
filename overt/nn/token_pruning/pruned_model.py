"""Prune or merge tokens between the layers of a pretrained Transformer encoder.

`prune_tokens` keeps some tokens and drops the rest; `merge_tokens` merges similar ones. Both work
on any Hugging Face or timm encoder like ViT or BERT, from outside: hooks remove tokens between
layers and pass padding masks, token sizes and position biases to later attention.
"""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of Dynamo now
from torch.overrides import TorchFunctionMode

from overt import io
from overt.attention import AttentionMap, Layout, Span
from overt.capture import activation_checkpointing
from overt.capture.call import Call
from overt.capture.discovery import attention_modules
from overt.capture.edits import Bias
from overt.capture.session import unwrap_model, watch
from overt.capture.trace import AttentionTrace
from overt.errors import UserError
from overt.nn.hard_attention.selection import Rule
from overt.nn.inner_checkpoint import load_inner_weights, load_saved_model, save_inner_model
from overt.nn.token_pruning.encoder_layers import (
    RELATIVE_BIAS,
    ROTARY_ARGUMENTS,
    encoder_layers,
    find_mean_pooling,
    index_mask,
    prune_arguments,
    token_layout,
    visible_tokens,
)
from overt.nn.token_pruning.merge import TokenMetric, by_keys, make_merger
from overt.nn.token_pruning.selection import FuseRest, TokenScore, by_presence, make_pruner
from overt.nn.token_pruning.settings import (
    PRUNING_FILE,
    keep_settings,
    merge_settings,
    reducer_from_settings,
)
from overt.nn.token_pruning.token_tracker import TokenTracker, span_positions
from overt.nn.token_pruning.tokens import TokenReducer
from overt.nn.wrappers import map_selection

ALWAYS_KEPT = (*map_selection.NON_INPUT_SPANS, "detection")  # spans that heads read


def prune_tokens(
    model: nn.Module,
    after: Collection[int],
    keep: Rule,
    score: TokenScore = by_presence,
    rest: FuseRest | None = None,
    layout: Layout | None = None,
    always: Collection[str] = ALWAYS_KEPT,
) -> "PrunedModel":
    """Drop tokens after some layers: `with prune_tokens(model, (3, 6, 9), keep): model(**inputs)`.

    Later layers get only the kept tokens and compute less. Samples may keep different numbers: they
    are padded to the largest, and padding is masked. A head that averages all tokens would include
    padding; it raises an error where it is recognised.

    Args:
        model: a ViT- or BERT-like encoder.
        after: numbers of layers after which to prune; 0 is before the first.
        keep: rule that selects tokens by score, such as `partial(keep_top, count=49)`.
        score: score of a token: `by_presence` (L2 norm, HAN eq. 5), `by_class_attention`,
            `by_random` or `by_grid`.
        rest: fuses the dropped tokens into one, such as `fuse_tokens`; dropped by default.
        layout: what the tokens are, where it cannot be inferred from the model. By default the
            first token of a text is its class token.
        always: names of spans that are never dropped.

    Returns:
        A context manager; inside it the model prunes tokens.

    Raises:
        ValueError: the model has no single list of attention layers, or not the layers in `after`.
        TypeError: `keep` is not callable, or `after` is not a collection.

    Example:
        >>> from overt.nn import keep_top
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> with prune_tokens(model, after=(1,), keep=partial(keep_top, count=4)) as pruned:
        ...     output = model(torch.rand(2, 10, 8))
        >>> output.shape  # the class token and four words
        torch.Size([2, 5, 8])
    """
    made = PrunedModel(model, after, make_pruner(keep, score, rest), layout, always)
    made.settings = partial(keep_settings, keep, score, rest)
    return made


def merge_tokens(
    model: nn.Module,
    count: int,
    after: Collection[int] | None = None,
    metric: TokenMetric = by_keys,
    layout: Layout | None = None,
    always: Collection[str] = ALWAYS_KEPT,
) -> "PrunedModel":
    """Merge `count` tokens into others after each layer, or after the given ones (ToMe).

    In later attention a token counts by its size (proportional attention). Departure: the published
    code merges between the attention and the MLP of a layer; here tokens are merged after the
    layer, because hooks cannot reach inside it. After the last layer nothing would be saved.

    Args:
        model: a ViT- or BERT-like encoder.
        count: tokens to merge per step.
        after: numbers of layers after which to merge; all but the last by default.
        metric: features to compare tokens by: `by_keys` or `by_states`.
        layout: what the tokens are, where it cannot be inferred from the model.
        always: names of spans that are never merged.

    Returns:
        A context manager; inside it the model merges tokens.

    Raises:
        ValueError: `count` is negative, or the model or `after` is not supported.

    Example:
        >>> from overt.nn.token_pruning.merge import by_states
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> with merge_tokens(model, count=2, metric=by_states) as merged:
        ...     _ = model(torch.rand(2, 10, 8))
        >>> merged.lengths  # of the three layers
        [10, 8, 6]
    """
    if count < 0:
        raise ValueError(f"count must be 0 or more, got {count}")
    chosen = range(1, len(encoder_layers(unwrap_model(model)))) if after is None else after
    made = PrunedModel(model, chosen, make_merger(count, metric), layout, always)
    made.settings = partial(merge_settings, count, metric)
    return made


@dataclass(frozen=True, eq=False)
class PruningResult:
    """Result of one pruning step, in terms of the input tokens.

    Args:
        after: number of layers before the step.
        input: layout of the input tokens.
        slots: current position of each input token, alone or merged; -1 if dropped.
        count: number of remaining tokens per sample.
        length: largest `count` of the batch.
        present: input tokens that are not padding; None for all.
        scores: scores before the step, at input positions; -inf elsewhere. None without scores.
    """

    after: int
    input: Layout
    slots: Int[Tensor, "b n"]
    count: Int[Tensor, " b"]
    length: int
    present: Bool[Tensor, "b n"] | None = None
    scores: Float[Tensor, "b n"] | None = None

    @property
    def kept(self) -> AttentionMap:
        """A hard map: 1 where an input token remains, alone or merged, and 0 elsewhere."""
        kept = (self.slots >= 0).to(torch.float32)
        return AttentionMap.from_cells(kept, self.input, self.present)

    @property
    def layout(self) -> Layout:
        """Layout of the current sequence: each span with its current positions, -1 if dropped."""
        return self.shorten(self.input)

    def shorten(self, layout: Layout) -> Layout:
        """Convert another layout of the input to the current sequence."""
        spans = tuple(
            replace(span, index=_current_positions(span, self.slots)) for span in layout.spans
        )
        return Layout(spans, self.length)


class PrunedModel(nn.Module):
    """Model that prunes or merges tokens; made by `prune_tokens`.

    Calling it runs the model with fewer tokens, so it trains in any loop and is saved like any
    model. In a `with` block the model itself prunes, wherever it is called; the block saves a few
    milliseconds per call. Outside of both, the model is unchanged. A compiled model is recompiled,
    with a graph break at each step, since the remaining tokens depend on the input.

    Args:
        model: a ViT- or BERT-like encoder.
        after: numbers of layers after which to prune or merge; 0 is before the first.
        reducer: prunes or merges the tokens of a step.
        layout: what the tokens are, where it cannot be inferred from the model.
        always: names of spans that are never dropped.

    Attributes:
        steps: results of the steps of the last forward pass.
        lengths: number of tokens in each layer of the last pass, padding included.

    Raises:
        ValueError: the model has no single list of attention layers, or not the layers in `after`.
        TypeError: `after` is a number instead of a collection.

    Example:
        >>> from overt.nn import keep_share
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> with prune_tokens(model, after=(1, 2), keep=partial(keep_share, share=0.5)) as pruned:
        ...     _ = model(torch.rand(1, 9, 8))
        >>> pruned.lengths, pruned.kept.weights.sum(dim=-1).flatten()
        ([9, 5, 3], tensor([5., 3.]))
        >>> _ = pruned(torch.rand(1, 7, 8))  # the same without a block
        >>> pruned.lengths
        [7, 4, 3]
    """

    def __init__(
        self,
        model: nn.Module,
        after: Collection[int],
        reducer: TokenReducer,
        layout: Layout | None = None,
        always: Collection[str] = ALWAYS_KEPT,
    ) -> None:
        if isinstance(after, int):
            raise TypeError(
                f"after must be a collection of ints, got {after}: use after=({after},)"
            )
        super().__init__()
        model = unwrap_model(model)
        layers = encoder_layers(model)
        wrong = [at for at in after if not 0 <= at < len(layers)]
        if wrong or not after:
            raise ValueError(
                f"after={sorted(after)}: the model has {len(layers)} layers, expected numbers from "
                f"0 to {len(layers) - 1}"
            )
        self.model, self.reducer, self.given, self.always = model, reducer, layout, tuple(always)
        self.after = tuple(sorted(set(after)))
        self.layers = tuple(layers.values())
        self.steps: list[PruningResult] = []
        self.lengths: list[int] = []
        self._attending = list(attention_modules(model).values())
        # submodules map to the number of their layer; attention outside of layers (a pooling head)
        # is absent
        self._at = {
            module: at for at, layer in enumerate(self.layers) for module in layer.modules()
        }
        self._canvas: tuple[int, int] | None = None
        # layouts by token count and canvas: inferring one walks through the whole model
        self._known: dict[tuple[int, tuple[int, int] | None], Layout] = {}
        self._call: Call | None = None
        self._tracker: TokenTracker | None = None
        self._undo, self._active = ExitStack(), False
        self.settings: Callable[[], dict[str, Any]] | None = None  # the reducer as plain values

    # --- on disk

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the model, the pruned layers and the rule.

        A custom score, rule or metric raises `UserError`: it is code. A `layout` is not saved.
        """
        if self.settings is None:
            raise UserError("cannot save a custom reducer; save the inner model instead.")
        saved = {"after": list(self.after), "always": list(self.always), "plan": self.settings()}
        save_inner_model(self.model, folder, extra_files={PRUNING_FILE: saved})

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, model: nn.Module | None = None, layout: Layout | None = None
    ) -> "PrunedModel":
        """Load what `save_pretrained` wrote, with the model in eval mode.

        Args:
            folder: the saved folder.
            model: a custom module to load the weights into.
            layout: what the tokens are, where it cannot be inferred from the model.
        """
        if model is None:
            model = load_saved_model(folder)
        else:
            load_inner_weights(model, folder)
        saved = io.read_json(Path(folder) / PRUNING_FILE)
        made = cls(
            model.eval(),
            saved["after"],
            reducer_from_settings(saved["plan"]),
            layout,
            saved["always"],
        )
        made.settings = partial(dict, saved["plan"])
        return made.eval()

    # --- beginning and end

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with fewer tokens, and return its output."""
        if self._active:
            return self.model(*args, **kwargs)
        with self:
            return self.model(*args, **kwargs)

    def __enter__(self) -> "PrunedModel":
        if self._active:
            raise ValueError("the block of this pruned model is open already: leave it first")
        # if a step below fails, the hooks registered so far are removed; pop_all keeps them
        # otherwise
        with ExitStack() as undo:
            # the first convolution is the patch embedding: its input has the size of the image in
            # pixels
            patches = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
            if patches is not None:
                undo.callback(patches.register_forward_pre_hook(self._note_canvas).remove)
            for at, layer in enumerate(self.layers):
                hook = partial(self._layer_hook, at)
                undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for module in self._attending:
                # layers before the first step see all tokens, so their arguments stay valid
                if self._at.get(module, -1) >= self.after[0]:
                    handle = module.register_forward_pre_hook(
                        self._attention_hook, with_kwargs=True
                    )
                    undo.callback(handle.remove)
            # padding and token sizes enter as a bias on the scores, so fused kernels stay on
            undo.enter_context(watch(self.model, edit=Bias(self._bias), each=self._note_call))
            if self._biased_inside():
                undo.enter_context(_PruneBiasMode(self))
            undo.callback(self._forget)
            self._undo = undo.pop_all()
        self._active = True
        return self

    def __exit__(self, *problem: Any) -> bool | None:
        self._active = False
        return self._undo.__exit__(*problem)

    def _forget(self) -> None:
        self._call, self._tracker = None, None

    def _biased_inside(self) -> bool:
        """Return whether attention adds a position bias, which only fused attention exposes."""
        own = [m for m in self._attending if getattr(m, RELATIVE_BIAS, None) is not None]
        if any(not getattr(module, "fused_attn", True) for module in own):
            raise ValueError(
                f"{type(own[0]).__name__} adds a position bias to eager scores, which cannot be "
                "pruned from outside; switch to fused attention (in timm "
                "`timm.layers.set_fused_attn(True)` before building the model)"
            )
        return bool(own)

    # --- results of the last pass

    @property
    def kept(self) -> AttentionMap:
        """The 0/1 maps of all steps of the last pass over the input tokens, one layer per step."""
        if not self.steps:
            raise ValueError("the model has not run yet: call it inside the with block")
        maps = [one.kept for one in self.steps]
        return replace(maps[0], values=torch.cat([one.values for one in maps], dim=1))

    def stages(self, trace: AttentionTrace) -> tuple[AttentionTrace, ...]:
        """Split the trace of the last pass at the pruning steps.

        Each stage has the layout of its own sequence, so `block("class", "image")` gives the whole
        grid, hidden where a token was dropped. Cells merged into one token all show its weight.
        Stages without a captured layer are left out.
        """
        if not trace.calls:
            return ()
        trace = trace.at(-1)
        base = trace.layout[1] if isinstance(trace.layout, tuple) else trace.layout
        whole = self.steps[0].input if self.steps else None
        base = whole if base is None else base
        if base is not None and whole is not None and len(base) != len(whole):
            raise ValueError(
                f"the trace has a layout of {len(base)} positions, but the model started with "
                f"{len(whole)} tokens; watch it with a layout of {len(whole)} positions"
            )
        # stage i has the layers from edge i to edge i + 1; stage 0 has the tokens of the input
        edges = [0, *(one.after for one in self.steps), len(self.layers)]
        found = []
        for number, (start, stop) in enumerate(pairwise(edges)):
            calls = [call for call in trace if start <= self._at.get(call.module, -1) < stop]
            layout = base
            if number and base is not None:
                layout = self.steps[number - 1].shorten(base)
            if calls:
                found.append(AttentionTrace(calls, layout))
        return tuple(found)

    def last_layer(self, trace: AttentionTrace) -> tuple[AttentionMap, ...]:
        """Select the maps of the last layer over the whole grid, for `wrap(reduce=...)`."""
        return map_selection.last_layer(self.stages(trace)[-1])

    # --- while the model runs

    def _note_canvas(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        height, width = inputs[0].shape[-2:]
        self._canvas = (int(height), int(width))

    def _layer_hook(
        self, at: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of a layer: start a new pass, or prune, or do nothing."""
        if torch.jit.is_tracing():
            raise NotImplementedError(
                "token pruning cannot be traced to TorchScript, which would keep the tokens of the "
                "example for every input; trace the model outside of the block, or use "
                "torch.compile"
            )
        if torch.compiler.is_exporting():
            raise NotImplementedError(
                "token pruning cannot be exported by torch.export: which tokens are kept depends "
                "on the input; export the model outside of the block, or use torch.compile"
            )
        compiling = torch.compiler.is_compiling()
        if (
            not compiling
            and activation_checkpointing.checkpoint_phase()
            is not activation_checkpointing.CheckpointPhase.NONE
        ):
            raise NotImplementedError(
                "token pruning does not work with activation checkpointing, which would select "
                "tokens twice; switch checkpointing off"
            )
        # --- the first layer starts a new pass; the others must get the tokens that were left
        name, states = _find_states(args, kwargs, module)
        if at == 0:
            self._begin(states, args, kwargs)
        now = self._tracker
        if now is None or states.shape[1] != now.length:
            expected = "the first layer to run first" if now is None else f"{now.length} tokens"
            raise ValueError(
                f"layer {at} got {states.shape[1]} tokens, expected {expected}: something else "
                "changes their number; prune_tokens cannot be nested"
            )
        if kwargs.get("interpolate_pos_encoding") and _has_relative_bias(module) and now.changed:
            raise ValueError(
                "interpolate_pos_encoding would resize position biases to the pruned number of "
                "tokens; use images of the model's own size"
            )
        # --- prune
        if at in self.after:
            with torch._C.DisableTorchFunction():  # do not capture the selection as attention
                states = self._step(at, now, states)
            if name is None:
                args = (states, *args[1:])
            else:
                kwargs = {**kwargs, name: states}
        self.lengths.append(states.shape[1])
        return args, kwargs

    @_disable_dynamo
    def _begin(
        self, states: Float[Tensor, "b n d"], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        n = states.shape[1]
        # --- what the tokens are
        if self.given is None:
            kind = n, self._canvas
            if kind not in self._known:
                self._known[kind] = token_layout(self.model, *kind)
            layout = self._known[kind]
        else:
            layout = self.given.to(states.device)
        if len(layout) != n:
            raise ValueError(f"the layout has {len(layout)} tokens, the model has {n}")
        self.steps, self.lengths, self._call = [], [], None
        now = TokenTracker(layout, states, self.always)
        # padding masked by the caller is absent from the start: it is neither scored nor counted as
        # kept
        now.hide(visible_tokens(args, kwargs, now.places))
        self._tracker = now

    @_disable_dynamo
    def _step(self, at: int, now: "TokenTracker", states: Float[Tensor, "b k d"]) -> Tensor:
        # used once: a later step must not see the attention of an earlier layer
        call, self._call = self._call, None
        step = self.reducer(now.tokens(states, call))
        # before `take`: scores belong to the sequence before the step
        scores = now.scores_at_input(step.scores)
        now.take(step)
        if now.ragged and (who := find_mean_pooling(self.model)):
            raise ValueError(
                f"{who} averages all tokens, including the padding of samples that keep fewer; "
                "keep the same number in all samples (keep_top, keep_share)"
            )
        count = step.there.sum(dim=1)
        result = PruningResult(at, now.layout, now.slots, count, now.length, now.present, scores)
        self.steps.append(result)
        return step.states

    def _attention_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of an attention module: index its masks at the remaining tokens."""
        now = self._tracker
        if now is None or not now.changed:
            return None
        if now.placeless and any(kwargs.get(name) is not None for name in ROTARY_ARGUMENTS):
            raise ValueError(
                f"{type(module).__name__} uses rotary position embeddings, and a fused token has "
                "no position; leave out rest="
            )
        with torch._C.DisableTorchFunction():  # function modes must not see this indexing
            return prune_arguments(args, kwargs, now.places, now.layout)

    def _bias(self, call: Call) -> Tensor | None:
        """Return the bias on the scores of a layer or a pooling head: padding and token sizes."""
        now = self._tracker
        # call.shape is (b, h, q, k); every third entry is the batch and the keys
        if now is None or now.bias is None or call.shape[::3] != tuple(now.bias.shape):
            return None
        # attention outside of the layers gets the bias only if it pools the tokens with other
        # queries
        if call.module not in self._at and not call.cross:
            return None
        return now.bias[:, None, None]

    def _note_call(self, call: Call) -> None:
        """Keep the attention of the layer before a step; self-attention of encoders only."""
        at = self._at.get(call.module)
        if at is None or at + 1 not in self.after or call.cross:
            return
        if call.causal:
            raise ValueError(
                f"{call.name} is causal: a decoder predicts from each token, so none can be pruned"
            )
        self._call = call


def _current_positions(span: Span, slots: Int[Tensor, "b n"]) -> Int[Tensor, "b m"]:
    """Return the current positions of a span's tokens, -1 for dropped ones."""
    n = slots.shape[1]
    # `span_positions` gives n for absent tokens, so column n holds their -1
    padded = torch.cat([slots, torch.full_like(slots[:, :1], -1)], dim=1)
    return padded.gather(1, span_positions(span, n, slots))


def _find_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
) -> tuple[str | None, Float[Tensor, "b k d"]]:
    """Return the hidden states among the arguments of a layer, and their keyword if any."""
    # layers are called with states first, or with keywords only: then the first tensor is the
    # states
    if args and isinstance(args[0], Tensor):
        name, states = None, args[0]
    else:
        found = [(key, one) for key, one in kwargs.items() if isinstance(one, Tensor)]
        name, states = found[0] if found else (None, torch.empty(0))
    if states.ndim != 3:
        raise ValueError(
            f"{type(module).__name__} got hidden states of shape {tuple(states.shape)}, expected "
            "(batch, tokens, features)"
        )
    return name, states


def _has_relative_bias(module: nn.Module) -> bool:
    return any(name.endswith(RELATIVE_BIAS) for name, _ in module.named_parameters())


class _PruneBiasMode(TorchFunctionMode):
    """Function mode that indexes position biases in fused attention at the remaining tokens."""

    def __init__(self, pruned: PrunedModel) -> None:
        super().__init__()
        self.pruned = pruned

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, with a shorter mask if it is the fused attention of a layer."""
        kwargs = kwargs or {}
        now = self.pruned._tracker
        # the bias is made inside the attention module, where hooks on arguments cannot reach it
        if func is F.scaled_dot_product_attention and now is not None and now.changed:
            mask = kwargs.get("attn_mask")
            if mask is not None and mask.shape[-1] == len(now.layout):
                kwargs = {**kwargs, "attn_mask": index_mask(mask, now.places, len(now.layout))}
        return func(*args, **kwargs)
