"""Prune or merge the image tokens of a vision-language model, before its decoder and inside of it.

`prune_image_tokens` keeps some image tokens of a prompt and drops the rest; `merge_image_tokens`
and `zip_image_tokens` merge them. Hooks do it from outside, for any Hugging Face model whose prompt
contains image tokens. Text is never dropped. Kept tokens keep their positions, the caches of
later layers contain only them, and outputs have the length of the whole prompt.
"""

import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt import io
from overt.attention import AttentionMap, Layout, Span
from overt.capture import activation_checkpointing
from overt.capture.call import Call
from overt.capture.discovery import attention_modules, format_names, without_adapter
from overt.capture.session import unwrap_model, watch
from overt.errors import UserError, require_package
from overt.nn.hard_attention.selection import Rule
from overt.nn.inner_checkpoint import load_inner_weights, load_saved_model, save_inner_model
from overt.nn.token_pruning.image_token_scores import ImageTokens, by_last_query, make_zipper
from overt.nn.token_pruning.merge import TokenMetric, by_states, make_merger
from overt.nn.token_pruning.pruned_model import PruningResult
from overt.nn.token_pruning.selection import TokenScore, make_pruner
from overt.nn.token_pruning.settings import (
    keep_settings,
    merge_settings,
    reducer_from_settings,
    zip_settings,
)
from overt.nn.token_pruning.token_tracker import TokenTracker
from overt.nn.token_pruning.tokens import TokenReducer

TRANSFORMERS = "5.17"  # the oldest version whose caches were tested
IMAGE, TEXT = "image", "text"  # names of spans
IMAGE_PRUNING_FILE = "image_pruning.json"  # beside the model


def prune_image_tokens(
    model: nn.Module,
    after: Collection[int],
    keep: Rule,
    score: TokenScore = by_last_query,
    vision_layer: int | None = None,
    grid: tuple[int, int] | None = None,
    capture: bool = True,
) -> "PrunedDecoder":
    """Drop image tokens of a vision-language model before or after some layers of its decoder.

    Args:
        model: A Hugging Face model whose `input_ids` contain a token per image token.
        after: Numbers of decoder layers after which to prune; 0 is before the decoder.
        keep: Rule that selects image tokens by score, such as `partial(keep_share, share=0.25)`.
        score: Score of a token: `by_last_query`, `by_image_encoder`, or a control (`by_random`,
            `by_grid`, `by_centre`).
        vision_layer: Layer of the image encoder whose attention is captured, such as -2.
        grid: Rows and columns of the image tokens of a sample; a square by default.
        capture: Whether attention is captured at all: controls need none, and are faster without.

    Returns:
        A module: call it, call its `generate`, or use the model inside a `with` block.

    Raises:
        ValueError: The model has no single list of decoder layers, or not those in `after`.
        TypeError: `keep` is not callable, or `after` is not a collection.

    Example:
        >>> from overt.nn import keep_top
        >>> from overt.nn.vqa.vision_language import VisionLanguageSizes, VisionLanguageVQA
        >>> sizes = VisionLanguageSizes(("what",), ("red", "blue"), side=32, width=16, layers=3)
        >>> vlm = VisionLanguageVQA(sizes).eval().vlm  # 16 image tokens
        >>> ids = torch.tensor([[3, *[6] * 16, 5, 7]])  # begin, the image, "what" and "?"
        >>> pruned = prune_image_tokens(vlm, after=(1,), keep=partial(keep_top, count=4))
        >>> _ = pruned(input_ids=ids, pixel_values=torch.rand(1, 3, 32, 32))
        >>> pruned.lengths
        [19, 7, 7]
    """
    reducer = make_pruner(keep, score)
    made = PrunedDecoder(model, after, reducer, vision_layer, grid, capture)
    made.settings = partial(keep_settings, keep, score, None)
    return made


def merge_image_tokens(
    model: nn.Module,
    after: Collection[int],
    count: int,
    metric: TokenMetric = by_states,
    grid: tuple[int, int] | None = None,
) -> "PrunedDecoder":
    """Merge `count` image tokens into similar ones in each step: ToMe, inside a decoder.

    A merged token has the position of its target, and counts by its size in later attention.

    Args:
        model: As for `prune_image_tokens`.
        after: As for `prune_image_tokens`.
        count: Number of tokens to merge per step, at most half of the image tokens.
        metric: Features to compare tokens by: `by_states`, or `by_keys` of the layer before.
        grid: As for `prune_image_tokens`.

    Returns:
        As for `prune_image_tokens`.

    Raises:
        ValueError: `count` is negative, or as for `prune_image_tokens`.

    Example:
        >>> from overt.nn.vqa.vision_language import VisionLanguageSizes, VisionLanguageVQA
        >>> sizes = VisionLanguageSizes(("what",), ("red", "blue"), side=32, width=16, layers=3)
        >>> vlm = VisionLanguageVQA(sizes).eval().vlm  # 16 image tokens
        >>> ids = torch.tensor([[3, *[6] * 16, 5, 7]])  # begin, the image, "what" and "?"
        >>> pruned = merge_image_tokens(vlm, after=(1,), count=8)
        >>> _ = pruned(input_ids=ids, pixel_values=torch.rand(1, 3, 32, 32))
        >>> pruned.lengths
        [19, 11, 11]
    """
    if count < 0:
        raise ValueError(f"count must be 0 or more, got {count}")
    reducer = make_merger(count, metric)
    made = PrunedDecoder(model, after, reducer, None, grid, metric != by_states)
    made.settings = partial(merge_settings, count, metric)
    return made


def zip_image_tokens(
    model: nn.Module,
    after: Collection[int],
    keep: Rule,
    score: TokenScore,
    context: int,
    vision_layer: int | None = None,
    grid: tuple[int, int] | None = None,
) -> "PrunedDecoder":
    """Keep the image tokens selected by `keep` and merge all others into `context` tokens.

    With `score=by_image_encoder` and `after=(0,)` this is the rule of VisionZip, see `make_zipper`.

    Args:
        model: As for `prune_image_tokens`.
        after: As for `prune_image_tokens`.
        keep: As for `prune_image_tokens`.
        score: As for `prune_image_tokens`.
        context: Number of merged tokens.
        vision_layer: As for `prune_image_tokens`.
        grid: As for `prune_image_tokens`.

    Returns:
        As for `prune_image_tokens`.

    Raises:
        ValueError: `context` is below 1, or as for `prune_image_tokens`.

    Example:
        >>> from overt.nn import keep_top
        >>> from overt.nn.vqa.vision_language import VisionLanguageSizes, VisionLanguageVQA
        >>> sizes = VisionLanguageSizes(("what",), ("red", "blue"), side=32, width=16, layers=3)
        >>> vlm = VisionLanguageVQA(sizes).eval().vlm  # 16 image tokens
        >>> ids = torch.tensor([[3, *[6] * 16, 5, 7]])  # begin, the image, "what" and "?"
        >>> keep = partial(keep_top, count=4)
        >>> pruned = zip_image_tokens(vlm, after=(1,), keep=keep, score=by_last_query, context=2)
        >>> _ = pruned(input_ids=ids, pixel_values=torch.rand(1, 3, 32, 32))
        >>> pruned.lengths
        [19, 9, 9]
    """
    made = PrunedDecoder(model, after, make_zipper(keep, score, context), vision_layer, grid)
    made.settings = partial(zip_settings, keep, score, context)
    return made


@dataclass(eq=False)
class _Prompt:
    """A pass over a prompt with images: what its tokens are."""

    images: Bool[Tensor, "b n"]
    there: Bool[Tensor, "b n"]
    last: Int[Tensor, " b"] | None  # position of the last token of the prompt
    tracker: TokenTracker | None = None
    call: Call | None = None


class PrunedDecoder(nn.Module):
    """Vision-language model with fewer image tokens; made by `prune_image_tokens`.

    Calling it or its `generate` runs the model with fewer image tokens, so it trains in any loop;
    in a `with` block the model itself does, wherever it is called. Outside of both the model is
    unchanged. Logits and hidden states after the last layer have the length of the prompt, with
    zeros for dropped tokens.

    Args:
        model: A Hugging Face model whose `input_ids` contain a token per image token.
        after: Numbers of decoder layers after which to prune or merge.
        reducer: Prunes or merges the tokens of a step.
        vision_layer: Layer of the image encoder whose attention is captured; None for none.
        grid: Rows and columns of the image tokens of a sample; a square by default.
        capture: Whether attention is captured.

    Attributes:
        steps: results of the steps of the last prompt.
        lengths: number of tokens in each decoder layer of the last prompt, padding included.

    Example:
        >>> from overt.nn import keep_top
        >>> from overt.nn.vqa.vision_language import VisionLanguageSizes, VisionLanguageVQA
        >>> sizes = VisionLanguageSizes(("what",), ("red", "blue"), side=32, width=16, layers=3)
        >>> vlm = VisionLanguageVQA(sizes).eval().vlm  # 16 image tokens
        >>> ids = torch.tensor([[3, *[6] * 16, 5, 7]])  # begin, the image, "what" and "?"
        >>> pruned = prune_image_tokens(vlm, after=(1,), keep=partial(keep_top, count=4))
        >>> logits = pruned(input_ids=ids, pixel_values=torch.rand(1, 3, 32, 32)).logits
        >>> pruned.lengths, logits.shape[1]
        ([19, 7, 7], 19)
    """

    def __init__(
        self,
        model: nn.Module,
        after: Collection[int],
        reducer: TokenReducer,
        vision_layer: int | None = None,
        grid: tuple[int, int] | None = None,
        capture: bool = True,
    ) -> None:
        if isinstance(after, int):
            raise TypeError(
                f"after must be a collection of ints, got {after}: use after=({after},)"
            )
        require_package("transformers", least=TRANSFORMERS)
        super().__init__()
        self.model = model
        inner = self.inner
        self.image_token = _image_token(inner)
        layers = decoder_layers(inner)
        wrong = [at for at in after if not 0 <= at < len(layers)]
        if wrong or not after:
            raise ValueError(
                f"after={sorted(after)}: the decoder has {len(layers)} layers, expected numbers "
                f"from 0 to {len(layers) - 1}"
            )
        self.after, self.reducer, self.grid = tuple(sorted(set(after))), reducer, grid
        self.vision_layer, self.capture = vision_layer, capture
        self.settings: Callable[[], dict[str, Any]] | None = None  # the reducer as plain values
        self.layers = tuple(layers)
        self.attention = tuple(layers.values())
        inside = {module for layer in layers for module in layer.modules()}
        encoder = {name: one for name, one in attention_modules(inner).items() if one not in inside}
        vision: list[nn.Module] = []
        if vision_layer is not None:
            if not -len(encoder) <= vision_layer < len(encoder):
                raise ValueError(
                    f"vision_layer={vision_layer}: the image encoder has {len(encoder)} layers "
                    "with attention"
                )
            vision = [list(encoder.values())[vision_layer]]
        self.vision = tuple(vision)  # in a tuple, so that it is not registered twice
        names = {module: name for name, module in inner.named_modules()}
        before = [self.attention[at - 1] for at in self.after if at > 0]
        watched = [*before, *vision]
        self.watched = [names[one] for one in watched] if capture else []
        self.steps: list[PruningResult] = []
        self.lengths: list[int] = []
        self._prompt: _Prompt | None = None
        self._vision_call: Call | None = None
        self._running = False
        self._undo, self._active = ExitStack(), False

    @property
    def inner(self) -> nn.Module:
        """The model without compiled, distributed and PEFT wrappers."""
        return without_adapter(unwrap_model(self.model))

    # --- on disk

    def save_pretrained(self, folder: Path | str, processor: Any = None) -> None:
        """Write the model, the pruned layers and the rule; and a processor, if one is given.

        The model alone can be loaded from the folder by transformers, without the rule.

        Args:
            folder: The target folder; an existing one is replaced.
            processor: Processor or tokenizer of the model.

        Raises:
            UserError: The score, rule or metric is custom or random, so it is code; or the model
                has an adapter of PEFT.
        """
        if self.settings is None:
            raise UserError("cannot save a custom reducer; save the inner model instead.")
        if self.inner is not unwrap_model(self.model):
            raise UserError(
                "cannot save a pruned model with an adapter: prune model.merge_and_unload(), or "
                "save the adapter alone and prune again in code."
            )
        saved = {
            "after": list(self.after),
            "plan": self.settings(),
            "vision_layer": self.vision_layer,
            "grid": None if self.grid is None else list(self.grid),
            "capture": self.capture,
        }
        preprocessors = () if processor is None else (processor,)
        save_inner_model(self.inner, folder, preprocessors, extra_files={IMAGE_PRUNING_FILE: saved})

    @classmethod
    def from_pretrained(cls, folder: Path | str, model: nn.Module | None = None) -> "PrunedDecoder":
        """Load what `save_pretrained` wrote, with the model in eval mode.

        Args:
            folder: The saved folder.
            model: A model to load the weights into; built from the folder by default.

        Returns:
            The pruned model.
        """
        if not (Path(folder) / IMAGE_PRUNING_FILE).is_file():
            raise UserError(
                f"{folder} has no {IMAGE_PRUNING_FILE}: expected a folder written by "
                "PrunedDecoder.save_pretrained"
            )
        if model is None:
            model = load_saved_model(folder)
        else:
            load_inner_weights(model, folder)
        saved = io.read_json(Path(folder) / IMAGE_PRUNING_FILE)
        grid = saved["grid"]
        made = cls(
            model,
            saved["after"],
            reducer_from_settings(saved["plan"]),
            saved["vision_layer"],
            None if grid is None else (int(grid[0]), int(grid[1])),
            saved["capture"],
        )
        made.settings = partial(dict, saved["plan"])
        return made.eval()

    # --- beginning and end

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with fewer image tokens, and return its output."""
        with self._activated():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` of the model with fewer image tokens, and return its output.

        Raises:
            ValueError: The settings read the prompt in parts, or again for each token.
        """
        _check_one_prompt(self.inner, kwargs)
        with self._activated():
            return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    def _activated(self) -> Any:
        return ExitStack() if self._active else self

    def __enter__(self) -> "PrunedDecoder":
        inner = self.inner
        hooks = inner._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), PrunedDecoder) for hook in hooks):
            raise ValueError(
                f"{type(inner).__name__} is inside a block that prunes its image tokens already: "
                "leave that block first; several steps are one call, such as after=(2, 4)"
            )
        with ExitStack() as undo:
            undo.callback(self._end)
            undo.callback(
                inner.register_forward_pre_hook(self._begin_pass, with_kwargs=True).remove
            )
            undo.callback(inner.register_forward_hook(self._end_pass, always_call=True).remove)
            for at, layer in enumerate(self.layers):
                hook = partial(self._before_layer, at)
                undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
                after = partial(self._after_layer, at)
                undo.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
            if self.watched:
                undo.enter_context(watch(inner, layers=self.watched, each=self._note_call))
            self._undo = undo.pop_all()
        self._active = True
        return self

    def __exit__(self, *problem: Any) -> bool | None:
        self._active = False
        return self._undo.__exit__(*problem)

    def _end(self) -> None:
        self._prompt, self._vision_call, self._running = None, None, False

    # --- results of the last prompt

    @property
    def kept(self) -> AttentionMap:
        """The 0/1 maps of all steps over the prompt, one layer per step; its image span is "image".

        A token that was merged into another one counts as kept.
        """
        if not self.steps:
            raise ValueError("no prompt with an image was read yet: call the pruned model first")
        maps = [one.kept for one in self.steps]
        values = torch.cat([one.values for one in maps], dim=1)
        return AttentionMap(values, maps[0].keys, maps[0].queries, maps[0].mask, maps[0].kind)

    # --- a pass of the model

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Forward pre-hook of the model: find the image tokens of a prompt.

        It forgets the pass before: Ctrl-C ends one without its last hook.
        """
        self._running, self._prompt = True, None
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise NotImplementedError(
                "image tokens cannot be pruned in a compiled or traced model, since which ones are "
                "kept depends on the input; pass the model without torch.compile"
            )
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor):
            raise ValueError(
                "expected input_ids, which say where the image tokens are, got "
                f"{type(ids).__name__}; do not pass inputs_embeds to a pruned model"
            )
        images = ids == self.image_token
        if not bool(images.any()):  # a generated token, or a text
            return
        cache = given.get("past_key_values")
        if cache is not None:
            _check_cache(cache)
            if cache.get_seq_length() > 0:
                if given.get("pixel_values") is None:  # a generated token with this id
                    return
                raise ValueError(
                    f"the cache contains {cache.get_seq_length()} tokens already: images must be "
                    "in the first pass over a prompt"
                )
        mask, there = given.get("attention_mask"), torch.ones_like(images)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            there = mask.to(ids.device).bool()
        last = self._last_token(images, there, given.get("labels"))
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            last = None  # the end of a sample is not known
        self._prompt = _Prompt(images, there, last)
        self.steps, self.lengths = [], []

    def _last_token(
        self, images: Bool[Tensor, "b n"], there: Bool[Tensor, "b n"], labels: Tensor | None
    ) -> Int[Tensor, " b"] | None:
        """Return the position of the last token of each prompt; None if labels would tell."""
        n = there.shape[1]
        ends = n - 1 - there.flip(1).int().argmax(dim=1)
        if labels is None:
            return None if self.inner.training else ends
        labelled = labels.to(there.device) != -100
        first = labelled.int().argmax(dim=1)
        last = torch.where(labelled.any(dim=1) & (first > 0), first - 1, ends)
        own = torch.arange(n, device=there.device) == last[:, None]
        if bool((images[:, :-1] & labelled[:, 1:] & ~own[:, :-1]).any()):
            raise ValueError(
                "a label follows an image token, which may be dropped: set the labels of the "
                "prompt to -100"
            )
        return last

    def _end_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, also after an error."""
        self._end()  # its tensors are not kept alive

    def _note_call(self, call: Call) -> None:
        """Callback of `watch`: keep the attention that a step may need."""
        if call.module in self.vision:  # `generate` encodes images before the pass begins
            self._vision_call = call
        elif self._prompt is not None:
            self._prompt.call = call

    # --- a layer of the decoder

    def _before_layer(
        self, at: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of a layer: prune the tokens, and adapt masks and positions."""
        if not self._running:
            name = type(self.inner).__name__
            raise ValueError(
                f"the decoder of {name} ran without {name} itself, which gets the input_ids that "
                f"say where the image tokens are: call the whole model. `generate` of {name} may "
                "do without, too"
            )
        prompt = self._prompt
        if prompt is None:
            return self._adapt_to_cache(at, args, kwargs)
        states = args[0] if args else kwargs["hidden_states"]
        if at == 0:
            if activation_checkpointing.checkpoint_phase() is not (
                activation_checkpointing.CheckpointPhase.NONE
            ):
                raise NotImplementedError(
                    "pruning image tokens does not work with activation checkpointing, which would "
                    "select tokens twice; switch checkpointing off"
                )
            _check_implementation(self.attention[0])
            prompt.tracker = _new_tracker(prompt, states, self.grid)
        now = prompt.tracker
        assert now is not None
        if at in self.after:
            with torch._C.DisableTorchFunction():  # the selection is not attention of the model
                states = self._step(at, prompt, now, states)
        self.lengths.append(states.shape[1])
        if not now.changed:
            return None
        attention = self.attention[at]
        kwargs = dict(kwargs)
        mask = _prompt_mask(kwargs.get("attention_mask"), now, attention, states.dtype)
        kwargs["attention_mask"] = mask
        for name in ("position_embeddings", "position_ids"):
            if name in kwargs:
                kwargs[name] = _at_places(kwargs[name], now.places, len(now.layout), name)
        if args:
            return (states, *args[1:]), kwargs
        return (), {**kwargs, "hidden_states": states}

    def _step(
        self, at: int, prompt: _Prompt, now: TokenTracker, states: Float[Tensor, "b k d"]
    ) -> Float[Tensor, "b m d"]:
        call, prompt.call = prompt.call, None  # a later step must not use it
        last = None
        if prompt.last is not None:
            last = (now.places == prompt.last[:, None]).int().argmax(dim=1)
        plain = now.tokens(states, None)
        tokens = ImageTokens(
            *(plain.states, plain.there, plain.free, plain.sizes, plain.places, plain.layout),
            call=call,
            last=last,
            vision=self._vision_call,
            images=prompt.images,
        )
        step = self.reducer(tokens)
        scores = now.scores_at_input(step.scores)
        now.take(step)
        count = step.there.sum(dim=1)
        self.steps.append(
            PruningResult(at, now.layout, now.slots, count, now.length, prompt.there, scores)
        )
        return step.states

    def _after_layer(
        self, at: int, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Forward hook of a layer: mark its cache, and restore the length after the last layer."""
        now = None if self._prompt is None else self._prompt.tracker
        if now is None or not now.changed:
            return None
        cache = kwargs.get("past_key_values")
        if cache is not None:
            _mark_cache(cache, int(self.attention[at].layer_idx), now)  # type: ignore[arg-type]
        if at + 1 < len(self.layers):
            return None
        if isinstance(output, tuple):
            return (_restore_length(output[0], now), *output[1:])
        return _restore_length(output, now)

    def _adapt_to_cache(
        self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Adapt the mask of new tokens to the keys that the cache of a layer has."""
        from overt.nn.token_pruning.pruned_cache_layer import PrunedCacheLayer

        cache = kwargs.get("past_key_values")
        index = int(self.attention[at].layer_idx)  # type: ignore[arg-type]
        layers = getattr(cache, "layers", [])
        found = layers[index] if index < len(layers) else None
        if not isinstance(found, PrunedCacheLayer):
            return None
        states = args[0] if args else kwargs["hidden_states"]
        q = states.shape[1]
        found.expect(q)
        mask, bias = kwargs.get("attention_mask"), found.key_bias(q)
        if mask is None and bias is None:
            return None
        if mask is None:
            if q > 1:
                raise ValueError("expected a mask for several tokens after a pruned prompt")
            mask = torch.zeros(len(states), 1, 1, bias.shape[1], device=states.device)  # type: ignore[union-attr]
        else:
            mask = _mask_columns(mask, found.columns(q))
        return args, {**kwargs, "attention_mask": _add_bias(mask, bias, states.dtype)}


# --- the decoder


def decoder_layers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the layers of the decoder, each with its attention module.

    Raises:
        ValueError: The model has no single list of layers with one self-attention module each.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        attending = [
            [one for one in layer.modules() if isinstance(getattr(one, "layer_idx", None), int)]
            for layer in module
        ]
        # some layers have the index of their cache, too
        inner = [
            [one for one in each if one is not layer]
            for each, layer in zip(attending, module, strict=True)
        ]
        if all(len(each) == 1 for each in inner):
            found.append((name, dict(zip(module, (each[0] for each in inner), strict=True))))
    if len(found) != 1:
        names = format_names([name for name, _ in found]) if found else "none"
        raise ValueError(
            f"expected {type(model).__name__} to have one list of decoder layers with one "
            f"self-attention module each, found {names}; encoder-decoders and models with "
            "cross-attention to the image are not supported"
        )
    layers = found[0][1]
    softmax = set(attention_modules(model).values())
    other = [type(one).__name__ for one in layers.values() if one not in softmax]
    if other:
        raise ValueError(
            f"{type(model).__name__} has layers without softmax attention ({other[0]}), which keep "
            "a state of all tokens instead of keys: its image tokens cannot be pruned"
        )
    crossed = [type(one).__name__ for one in layers.values() if "Cross" in type(one).__name__]
    if crossed:
        raise ValueError(
            f"{type(model).__name__} reads the image by cross-attention ({crossed[0]}), so its "
            "prompt contains no image tokens to prune"
        )
    config = getattr(model, "config", None)
    if getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None):
        raise ValueError(
            f"{type(model).__name__} adds image features to all image tokens in several decoder "
            "layers (deepstack), so none of them can be dropped"
        )
    return layers


def _image_token(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    found = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if not isinstance(found, int):
        raise ValueError(
            f"expected a model whose configuration has image_token_id, got {type(model).__name__}: "
            "only prompts with a token per image token can be pruned"
        )
    return found


def _check_one_prompt(model: nn.Module, settings: dict[str, Any]) -> None:
    """Raise if `generate` would select tokens more than once, or before it knows the prompt."""
    given = settings.get("generation_config") or getattr(model, "generation_config", None)

    def setting(name: str) -> Any:
        return settings[name] if name in settings else getattr(given, name, None)

    if setting("use_cache") is False:
        raise ValueError(
            "use_cache=False would select other image tokens for each generated one; leave it out"
        )
    if setting("prefill_chunk_size") is not None:
        raise ValueError(
            "prefill_chunk_size would select image tokens before the end of the prompt is read; "
            "leave it out"
        )


def _check_implementation(attention: nn.Module) -> None:
    """Raise if attention does not take a mask with four axes."""
    name = str(getattr(getattr(attention, "config", None), "_attn_implementation", "sdpa"))
    if "flash" in name or "flex" in name:
        raise NotImplementedError(
            f"image tokens cannot be pruned with attn_implementation={name!r}, whose masks are not "
            'matrices; use model.set_attn_implementation("sdpa")'
        )


def _new_tracker(
    prompt: _Prompt, states: Float[Tensor, "b n d"], grid: tuple[int, int] | None
) -> TokenTracker:
    layout = _prompt_layout(prompt.images, grid)
    now = TokenTracker(layout, states, (TEXT,))
    now.hide(prompt.there)
    if prompt.last is not None:  # the answer is predicted from it
        now.stays = now.stays.scatter(1, prompt.last[:, None], True)
    return now


def _prompt_layout(images: Bool[Tensor, "b n"], grid: tuple[int, int] | None) -> Layout:
    """Return the layout of prompts: "image", on a grid where each sample has one, and "text"."""
    n = images.shape[1]
    counts = images.sum(dim=1)
    most = int(counts.max())
    spans = []
    for name, these in ((IMAGE, images), (TEXT, ~images)):
        count = int(these.sum(dim=1).max())
        order = (~these).to(torch.int8).argsort(dim=1, stable=True)[:, :count]
        real = these.gather(1, order)
        spans.append((name, (count,), torch.where(real, order, -1)))
    side = isqrt(most)
    equal = bool((counts == most).all())
    shape: tuple[int, ...] = (most,)
    if grid is not None:
        if prod(grid) != most or not equal:
            raise ValueError(
                f"samples have {counts.tolist()} image tokens, expected {grid[0]} x {grid[1]} each"
            )
        shape = grid
    elif side * side == most and equal:
        shape = (side, side)
    (_, _, first), (_, rest, second) = spans
    return Layout((Span(IMAGE, shape, first), Span(TEXT, rest, second)), n)


# --- masks, positions and caches


def _prompt_mask(
    mask: Any, now: TokenTracker, attention: nn.Module, dtype: torch.dtype
) -> Tensor | None:
    """Return the mask of a layer over the kept tokens of a prompt."""
    if mask is None:
        if now.bias is None:
            return None
        b, k = now.places.shape
        device = now.places.device
        seen = torch.ones(k, k, dtype=torch.bool, device=device)
        if getattr(attention, "is_causal", True):
            seen = seen.tril()  # kept tokens are in their order
        mask = seen.expand(b, 1, k, k)
        return _add_bias(mask, now.bias, dtype)
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == len(now.layout):
        rows = now.places.clamp_min(0)[:, None, :, None]
        mask = mask.expand(len(now.places), -1, -1, -1)
        mask = mask.gather(2, rows.expand(-1, mask.shape[1], -1, mask.shape[3]))
    return _add_bias(_mask_columns(mask, now.places), now.bias, dtype)


def _mask_columns(mask: Any, columns: Int[Tensor, "b k"]) -> Tensor:
    """Return the columns of a mask (b, h, q, n) that belong to the keys."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        kind = f"{mask.ndim} axes" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"expected an attention mask with four axes, got {kind}; use "
            'model.set_attn_implementation("sdpa")'
        )
    _, h, q, n = mask.shape
    mask = mask.expand(len(columns), -1, -1, -1)
    if int(columns.max()) >= n:
        raise ValueError(f"expected a mask over {int(columns.max()) + 1} tokens, got {n}")
    return mask.gather(3, columns.clamp_min(0)[:, None, None].expand(-1, h, q, -1))


def _add_bias(mask: Tensor, bias: Float[Tensor, "b k"] | None, dtype: torch.dtype) -> Tensor:
    """Add a bias on keys to a mask; very low scores stay finite, so that no row is empty."""
    if bias is None:
        return mask
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(dtype).min
        )
    added = mask + bias[:, None, None].to(mask.dtype)
    return added.clamp_min(torch.finfo(mask.dtype).min)


def _at_places(value: Any, places: Int[Tensor, "b k"], length: int, name: str) -> Any:
    """Select the positions of kept tokens: ids (.., b, n) or rotary tables (.., b, n, d)."""
    if isinstance(value, tuple):
        return tuple(_at_places(one, places, length, name) for one in value)
    if not isinstance(value, Tensor):
        return value
    at = places.clamp_min(0)  # padding gets any position: it is masked
    if name == "position_ids":
        whole = value.expand(*value.shape[:-2], len(places), length)
        return whole.gather(-1, at.expand(whole.shape[:-1] + at.shape[-1:]))
    if value.shape[-2] != length:
        raise ValueError(f"expected rotary embeddings of {length} tokens, got {value.shape[-2]}")
    whole = value.expand(*value.shape[:-3], len(places), length, value.shape[-1])
    index = at[..., None].expand(*whole.shape[:-2], at.shape[-1], value.shape[-1])
    return whole.gather(-2, index)


def _check_cache(cache: Any) -> None:
    """Raise unless a cache has one dynamic layer per layer of the decoder, without a window."""
    from transformers.cache_utils import DynamicCache

    sliding = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    if type(cache) is not DynamicCache or cache.offloading or sliding:
        kind = f"{type(cache).__name__}{' with sliding windows' if sliding else ''}"
        raise ValueError(
            f"expected a DynamicCache without offloading and sliding windows, got {kind}; pass "
            "past_key_values=DynamicCache(), or use_cache=False without `generate`"
        )


def _mark_cache(cache: Any, index: int, now: TokenTracker) -> None:
    from overt.nn.token_pruning.pruned_cache_layer import PrunedCacheLayer

    _check_cache(cache)
    cache.layers[index] = PrunedCacheLayer(
        cache.layers[index], now.places, len(now.layout), now.bias
    )


def _restore_length(states: Float[Tensor, "b k d"], now: TokenTracker) -> Float[Tensor, "b n d"]:
    """Return states at the positions of the prompt; zeros for dropped tokens."""
    n = len(now.layout)
    whole = states.new_zeros(len(states), n + 1, states.shape[-1])  # the last column takes padding
    at = torch.where(now.places >= 0, now.places, n)[..., None].expand_as(states)
    return whole.scatter(1, at, states)[:, :n]
