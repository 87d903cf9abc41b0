"""Fewer tokens from layer to layer of a model that was not made for it.

`thin` keeps some tokens and drops the rest, `merge` joins alike ones. Both work on any Hugging Face
or timm encoder of the ViT or BERT kind, from outside: hooks take tokens out between layers, and
what the attention of later layers needs to know (padding, sizes, position biases) is handed to it.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of Dynamo now
from torch.overrides import TorchFunctionMode

from overt.attention import AttentionMap, Layout, Span
from overt.capture import checkpoints
from overt.capture.call import Call
from overt.capture.edits import Bias
from overt.capture.places import attention_modules
from overt.capture.seen import Seen
from overt.capture.watching import bare, watch
from overt.models.adopting import looking
from overt.models.hard.selection import Rule
from overt.models.thinning.choosing import Rest, Score, by_presence, choosing
from overt.models.thinning.layers import (
    BIASES,
    ROTATIONS,
    at_places,
    averages,
    layers_of,
    seen_by_masks,
    thinned_arguments,
    tokens_layout,
)
from overt.models.thinning.merging import Metric, by_keys, merging
from overt.models.thinning.tokens import Plan, Step, Tokens

ALWAYS = (*looking.SERVANTS, "detection")  # spans that stay: models answer from them


def thin(
    model: nn.Module,
    after: Collection[int],
    keep: Rule,
    score: Score = by_presence,
    rest: Rest | None = None,
    layout: Layout | None = None,
    always: Collection[str] = ALWAYS,
) -> "Thinned":
    """Keep some tokens after some layers: `with thin(model, (3, 6, 9), keep): model(**inputs)`.

    After so many layers (0: before the first) every free token is scored, and those that `keep`
    takes go on; later layers see nothing else, and really compute less. `score` is the L2 norm of
    the hidden state (hard attention, eq. 5), or another: `by_class_attention`, `by_chance`,
    `by_grid`. `rest=fused` makes one token of those that go. Class tokens, registers and whatever
    is in a span named in `always` stay. `layout` says what the tokens are, where the model does
    not: the first token of a text is taken for its class token.

    Samples may keep different numbers: they are padded to the most, and nobody looks at padding.
    Heads that average all tokens cannot tell it apart and are refused then, where they are known.
    """
    return Thinned(model, after, choosing(keep, score, rest), layout, always)


def merge(
    model: nn.Module,
    count: int,
    after: Collection[int] | None = None,
    metric: Metric = by_keys,
    layout: Layout | None = None,
    always: Collection[str] = ALWAYS,
) -> "Thinned":
    """Merge `count` tokens into others after each layer, or after those named (ToMe).

    Tokens count by what they stand for in the attention of later layers (proportional attention).
    Departure: the published code merges between the attention and the MLP of a layer, and here it
    is done after the layer, since its inside belongs to the model; after the last nothing is saved.
    """
    if count < 0:
        raise ValueError(f"merge count={count} tokens: a count is not negative")
    chosen = range(1, len(layers_of(bare(model)))) if after is None else after
    return Thinned(model, chosen, merging(count, metric), layout, always)


@dataclass(frozen=True, eq=False)
class Left:
    """What one step left of the tokens of the input, whose `input` layout says what they are.

    `slots` is where each of them stands now, alone or in another, -1 where it is gone; `present`
    which of them there were, None for all. `count` is how many tokens each sample has left and
    `length` the most of them. `scores` are those of the tokens before the step, at the places of
    the input, -inf for all others; None when nothing was scored.
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
        """A hard map: 1 where a token of the input still is, alone or in another, and 0 else."""
        kept = (self.slots >= 0).to(torch.float32)
        return AttentionMap.from_cells(kept, self.input, self.present)

    @property
    def layout(self) -> Layout:
        """What the positions are now: each span with the places of its tokens, -1 if gone."""
        return self.shorten(self.input)

    def shorten(self, layout: Layout) -> Layout:
        """Another layout of the input, for the sequence as it is now."""
        spans = tuple(replace(span, index=_now_at(span, self.slots)) for span in layout.spans)
        return Layout(spans, self.length)


class Thinned:
    """A model that loses tokens on its way, for the length of a `with` block; made by `thin`.

    `steps` tells what the last forward pass left after each step, `lengths` how many tokens each
    layer was given, padding included. Afterwards the model is as it was found. A compiled model is
    compiled anew, with a break in its graph at each step, since what is left depends on the input.
    """

    def __init__(
        self,
        model: nn.Module,
        after: Collection[int],
        plan: Plan,
        layout: Layout | None = None,
        always: Collection[str] = ALWAYS,
    ) -> None:
        if isinstance(after, int):
            raise TypeError(f"after is a list of layers, also of one: after=({after},)")
        model = bare(model)
        layers = layers_of(model)
        wrong = [at for at in after if not 0 <= at < len(layers)]
        if wrong or not after:
            raise ValueError(
                f"after={sorted(after)}: the model has {len(layers)} layers, so tokens can go "
                f"after 0 to {len(layers) - 1} of them"
            )
        self.model, self.plan, self.given, self.always = model, plan, layout, tuple(always)
        self.after = tuple(sorted(set(after)))
        self.layers = tuple(layers.values())
        self.steps: list[Left] = []
        self.lengths: list[int] = []
        self._attending = list(attention_modules(model).values())
        self._at = {
            module: at for at, layer in enumerate(self.layers) for module in layer.modules()
        }
        self._canvas: tuple[int, int] | None = None
        self._known: dict[tuple[int, tuple[int, int] | None], Layout] = {}
        self._call: Call | None = None
        self._now: _State | None = None
        self._undo = ExitStack()

    # --- beginning and end

    def __enter__(self) -> "Thinned":
        with ExitStack() as undo:
            eye = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
            if eye is not None:
                undo.callback(eye.register_forward_pre_hook(self._looked).remove)
            for at, layer in enumerate(self.layers):
                hook = partial(self._before, at)
                undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for module in self._attending:
                if self._at.get(module, -1) >= self.after[0]:
                    given = module.register_forward_pre_hook(self._given, with_kwargs=True)
                    undo.callback(given.remove)
            undo.enter_context(watch(self.model, edit=Bias(self._bias), each=self._read))
            if self._biased_inside():
                undo.enter_context(_Fitting(self))
            undo.callback(self._forget)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *problem: Any) -> bool | None:
        return self._undo.__exit__(*problem)

    def _forget(self) -> None:
        self._call, self._now = None, None

    def _biased_inside(self) -> bool:
        """Whether attention makes its own position bias, which only the fused kernel shows us."""
        own = [m for m in self._attending if getattr(m, BIASES, None) is not None]
        if any(not getattr(module, "fused_attn", True) for module in own):
            raise ValueError(
                f"{type(own[0]).__name__} adds a position bias of its own to scores that it writes "
                "out, which cannot be thinned from outside; switch to fused attention "
                "(in timm `timm.layers.set_fused_attn(True)` before the model is made)"
            )
        return bool(own)

    # --- what the last pass did

    @property
    def kept(self) -> AttentionMap:
        """The 0/1 maps of all steps of the last pass, a layer each, over the input's tokens."""
        if not self.steps:
            raise ValueError("the model has not run yet: call it inside the block")
        maps = [one.kept for one in self.steps]
        return replace(maps[0], values=torch.cat([one.values for one in maps], dim=1))

    def stages(self, seen: Seen) -> tuple[Seen, ...]:
        """What was seen in the last pass, stage by stage: before the first step, after it, ...

        Each has the layout of its own sequence, so that `block("class", "image")` gives the whole
        grid, hidden where a token is gone. Stages without any watched layer are left out. Cells in
        one merged token each show its weight.
        """
        if not seen.calls:
            return ()
        seen = seen.at(-1)
        base = seen.layout[1] if isinstance(seen.layout, tuple) else seen.layout
        whole = self.steps[0].input if self.steps else None
        base = whole if base is None else base
        if base is not None and whole is not None and len(base) != len(whole):
            raise ValueError(
                f"what was seen has a layout of {len(base)} positions, and the model began with "
                f"{len(whole)} tokens; watch it with the layout of these"
            )
        edges = [0, *(one.after for one in self.steps), len(self.layers)]
        found = []
        for number, (start, stop) in enumerate(pairwise(edges)):
            calls = [call for call in seen if start <= self._at.get(call.module, -1) < stop]
            layout = base
            if number and base is not None:
                layout = self.steps[number - 1].shorten(base)
            if calls:
                found.append(Seen(calls, layout))
        return tuple(found)

    def last(self, seen: Seen) -> tuple[AttentionMap, ...]:
        """What decides in the last layer, over the whole grid: `adopt(model, reduce=thin.last)`."""
        return looking.last(self.stages(seen)[-1])

    # --- while the model runs

    def _looked(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        height, width = inputs[0].shape[-2:]
        self._canvas = (int(height), int(width))

    def _before(
        self, at: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of a layer: a new pass begins, or tokens go, or nothing happens."""
        compiling = torch.compiler.is_compiling()
        if not compiling and checkpoints.current() is not checkpoints.Pass.ONLY:
            raise NotImplementedError(
                "thinning under activation checkpointing would choose tokens twice; switch "
                "checkpointing off: fewer tokens need less memory, too"
            )
        name, states = _states(args, kwargs, module)
        if at == 0:
            self._begin(states, args, kwargs)
        now = self._now
        if now is None or states.shape[1] != now.length:
            expected = "the first layer" if now is None else f"{now.length} tokens"
            raise ValueError(
                f"layer {at} was given {states.shape[1]} tokens where {expected} was expected: "
                "something else changes their number; thin() cannot be nested"
            )
        if kwargs.get("interpolate_pos_encoding") and _has_biases(module) and now.changed:
            raise ValueError(
                "interpolate_pos_encoding stretches position biases to the number of tokens, which "
                "are fewer now; give the model pictures of its own size"
            )
        if at in self.after:
            with torch._C.DisableTorchFunction():  # the choice itself is no attention to be seen
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
        if self.given is None:
            kind = n, self._canvas
            if kind not in self._known:
                self._known[kind] = tokens_layout(self.model, *kind)
            layout = self._known[kind]
        else:
            layout = self.given.to(states.device)
        if len(layout) != n:
            raise ValueError(f"the layout has {len(layout)} tokens, and the model {n}")
        self.steps, self.lengths, self._call = [], [], None
        now = _State(layout, states, self.always)
        now.hide(seen_by_masks(args, kwargs, now.places))
        self._now = now

    @_disable_dynamo
    def _step(self, at: int, now: "_State", states: Float[Tensor, "b k d"]) -> Tensor:
        call, self._call = self._call, None
        step = self.plan(now.tokens(states, call))
        scores = now.spread(step.scores)
        now.take(step)
        if now.ragged and (who := averages(self.model)):
            raise ValueError(
                f"{who} averages all tokens, and samples that keep different numbers are padded; "
                "keep the same number in all (keep_top, keep_share), or answer from a class token"
            )
        count = step.there.sum(dim=1)
        left = Left(at, now.layout, now.slots, count, now.length, now.present, scores)
        self.steps.append(left)
        return step.states

    def _given(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward pre-hook of an attention module: its masks for the tokens that are left."""
        now = self._now
        if now is None or not now.changed:
            return None
        if now.placeless and any(kwargs.get(name) is not None for name in ROTATIONS):
            raise ValueError(
                f"{type(module).__name__} turns tokens by their place, and one that was fused of "
                "many has none; leave out rest="
            )
        with torch._C.DisableTorchFunction():
            return thinned_arguments(args, kwargs, now.places, now.layout)

    def _bias(self, call: Call) -> Tensor | None:
        """What the attention of a layer, or of a head that pools, has to add to its scores."""
        now = self._now
        if now is None or now.bias is None or call.shape[::3] != tuple(now.bias.shape):
            return None
        if call.module not in self._at and not call.cross:
            return None
        return now.bias[:, None, None]

    def _read(self, call: Call) -> None:
        """Keep the attention of the layer before a step; whole sequences only, no decoders."""
        at = self._at.get(call.module)
        if at is None or at + 1 not in self.after or call.cross:
            return
        if call.causal:
            raise ValueError(
                f"{call.name} is causal: a decoder answers for each of its tokens, and needs them"
            )
        self._call = call


# --- the state of one pass


class _State:
    """Which tokens are left in the pass under way."""

    def __init__(
        self, layout: Layout, states: Float[Tensor, "b n d"], always: Collection[str]
    ) -> None:
        b, n, _ = states.shape
        device = states.device
        self.layout = layout
        self.length = n
        self.places = torch.arange(n, device=device).expand(b, n)
        self.slots = self.places
        self.there = torch.ones(b, n, dtype=torch.bool, device=device)
        self.sizes = torch.ones(b, n, device=device)
        self.bias: Float[Tensor, "b k"] | None = None
        self.present: Bool[Tensor, "b n"] | None = None
        self.changed = self.ragged = self.placeless = False
        stays = torch.zeros(b, n + 1, dtype=torch.bool, device=device)
        for span in layout.spans:
            if span.name in always:
                stays.scatter_(1, _positions(span, n, self.places), True)
        self.stays = stays[:, :n]

    def hide(self, seen: Bool[Tensor, "b k"] | None) -> None:
        """Tokens that nobody may look at are not there: padding, and what was hidden."""
        if seen is None:
            return
        self.there = self.there & seen
        if not self.changed:
            self.present = self.there

    def tokens(self, states: Float[Tensor, "b k d"], call: Call | None) -> Tokens:
        """The tokens as a plan sees them."""
        seen = None if call is None else call.visible()
        self.hide(None if seen is None else seen.any(dim=1))
        stays = self.stays.gather(1, self.places.clamp_min(0)) & (self.places >= 0)
        free = self.there & ~stays
        return Tokens(states, self.there, free, self.sizes, self.places, self.layout, call)

    def take(self, step: Step) -> None:
        """What is left is what the step left."""
        held = step.holder.gather(1, self.slots.clamp_min(0))
        self.slots = torch.where(self.slots >= 0, held, -1)
        self.places, self.there, self.sizes = step.places, step.there, step.sizes
        self.length = step.states.shape[1]
        same = step.places.shape == self.slots.shape
        identical = step.places == torch.arange(self.length, device=step.places.device)
        flags = [
            (~step.there).any(),
            (step.sizes != 1).any(),
            (step.there & (step.places < 0)).any(),
            (~identical).any(),
        ]
        self.ragged, weighted, self.placeless, moved = torch.stack(flags).tolist()
        self.changed = moved or not same
        self.bias = None
        if self.ragged or weighted:
            self.bias = torch.where(step.there, step.sizes.log(), -torch.inf)

    def spread(self, scores: Float[Tensor, "b k"] | None) -> Float[Tensor, "b n"] | None:
        """The scores of the tokens at the places where these stood in the beginning."""
        if scores is None:
            return None
        b, n = self.slots.shape
        found = torch.full((b, n + 1), -torch.inf, dtype=scores.dtype, device=scores.device)
        at = torch.where(self.places >= 0, self.places, n)
        return found.scatter(1, at, scores)[:, :n]


def _positions(span: Span, length: int, like: Int[Tensor, "b n"]) -> Int[Tensor, "b m"]:
    """Where a span stands, a row a sample; `length` for what is absent."""
    if isinstance(span.index, slice):
        return torch.arange(length, device=like.device)[span.index].expand(len(like), -1)
    index = span.index.to(like.device)
    return torch.where(index >= 0, index, length)


def _now_at(span: Span, slots: Int[Tensor, "b n"]) -> Int[Tensor, "b m"]:
    """Where the tokens of a span stand in a shorter sequence, -1 for those that are gone."""
    n = slots.shape[1]
    padded = torch.cat([slots, torch.full_like(slots[:, :1], -1)], dim=1)
    return padded.gather(1, _positions(span, n, slots))


def _states(
    args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
) -> tuple[str | None, Float[Tensor, "b k d"]]:
    """The hidden states among the arguments of a layer, and their name if they have one."""
    if args and isinstance(args[0], Tensor):
        name, states = None, args[0]
    else:
        found = [(key, one) for key, one in kwargs.items() if isinstance(one, Tensor)]
        name, states = found[0] if found else (None, torch.empty(0))
    if states.ndim != 3:
        raise ValueError(
            f"{type(module).__name__} was given hidden states of shape {tuple(states.shape)}; "
            "tokens can be taken from (batch, tokens, features)"
        )
    return name, states


def _has_biases(module: nn.Module) -> bool:
    return any(name.endswith(BIASES) for name, _ in module.named_parameters())


class _Fitting(TorchFunctionMode):
    """Fits a position bias that attention made for all tokens to those that are left."""

    def __init__(self, thinned: Thinned) -> None:
        super().__init__()
        self.thinned = thinned

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The result of `func`, its mask made shorter when it is the fused attention of a layer."""
        kwargs = kwargs or {}
        now = self.thinned._now
        if func is F.scaled_dot_product_attention and now is not None and now.changed:
            mask = kwargs.get("attn_mask")
            if mask is not None and mask.shape[-1] == len(now.layout):
                kwargs = {**kwargs, "attn_mask": at_places(mask, now.places, len(now.layout))}
        return func(*args, **kwargs)
