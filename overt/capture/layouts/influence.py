"""Measure which positions of a language model's input depend on images, and on which pixels.

Token ids do not determine what a model does with them: it may insert features of an image at any
position, resample or pool them. So the model is run up to the first layer of its language model,
with the given media and with changed ones. A position that changes holds media. With the
self-attention of the image encoder restricted to the diagonal, a position of a cell depends on that
cell only.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt.capture.call import Call
from overt.capture.edits import Bias
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.capture.session import watch
from overt.capture.state import STATE

CHANGED = 1e-3  # relative to the largest change; smaller ones are rounding errors
CROSS_STATES = ("cross_attention_states", "encoder_hidden_states")  # arguments of decoder layers
PATTERNS = 3  # random halves of the cells; two swapped cells differ in all but 1 / 8 of the cases


class _Reached(Exception):
    """Stops the forward pass at the language model."""


class _InputRecorder:
    """Records the input of the first layer of the language model."""

    def __init__(
        self, model: nn.Module, ids: Int[Tensor, "b n"], differentiable: bool = False
    ) -> None:
        self.ids, self.differentiable = ids, differentiable
        self.stacks = {
            name: module[0]
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module)
        }
        self.tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
        self.embedded: dict[str, tuple[int, int]] = {}  # by name: equal ids, vocabulary size
        self.found: Tensor | None = None
        self.beside: dict[str, Tensor] = {}  # other sequences that the layer reads, by argument

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hook every embedding table and the first layer of every stack."""
        with ExitStack() as undo:
            for name, table in self.tables.items():
                hook = table.register_forward_pre_hook(self._embeds(name))
                undo.callback(hook.remove)
            for name, layer in self.stacks.items():
                hook = layer.register_forward_pre_hook(self._enters(name), with_kwargs=True)
                undo.callback(hook.remove)
            yield

    def _embeds(self, name: str) -> Any:
        def note(module: nn.Embedding, args: tuple[Any, ...]) -> None:
            given = args[0] if args else None
            if isinstance(given, Tensor) and given.shape == self.ids.shape:
                same = int((given.cpu() == self.ids).sum())
                self.embedded[name] = (same, module.num_embeddings)

        return note

    def _enters(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(given, Tensor) or given.ndim != 3 or not self.embedded:
                return
            if given.shape[:2] == self.ids.shape and name == self._nearest():
                self.found = self._keep(given)
                self.beside = {
                    name: self._keep(kwargs[name])
                    for name in CROSS_STATES
                    if isinstance(kwargs.get(name), Tensor) and kwargs[name].ndim == 3
                }
                raise _Reached

        return note

    def _keep(self, states: Tensor) -> Tensor:
        return states if self.differentiable else states.detach().clone()

    def _nearest(self) -> str:
        """Return the stack that shares most of its path with the table that embedded the ids."""
        # The table that embeds most of the ids unchanged (ids of images may be replaced before); of
        # equal ones, that with the largest vocabulary.
        table = max(self.embedded, key=lambda name: self.embedded[name])
        return max(self.stacks, key=lambda name: _shared(name, table))


def _shared(one: str, other: str) -> int:
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def language_model_inputs(
    model: nn.Module, inputs: Mapping[str, Any], tower: nn.Module | None = None
) -> Float[Tensor, "b n d"] | None:
    """Return the input of the first layer of the language model, one row per input id.

    None if no stack of layers has one vector per input id. With a `tower`, its self-attention is
    restricted to the diagonal, so that its positions do not interact.
    """
    entry = _InputRecorder(model, inputs["input_ids"].cpu())
    cut = nullcontext() if tower is None else watch(tower, edit=Bias(_diagonal))
    try:
        with eval_mode_forked_rng(model), torch.no_grad(), entry.open(), cut:
            model(**inputs)
    except _Reached:
        return entry.found
    return None


@dataclass(frozen=True, eq=False)
class LanguageModelStates:
    """What the first layer of a language model reads.

    Attributes:
        sequence: The sequence, one vector per input id.
        beside: Sequences that the layers read by cross-attention, by name of the argument.
        resampled: Whether queries of other positions attended before, as latent queries do.
    """

    sequence: Float[Tensor, "b n d"]
    beside: dict[str, Float[Tensor, "m k d"]]
    resampled: bool


def language_model_states(
    model: nn.Module, inputs: Mapping[str, Any], local: bool = False, differentiable: bool = False
) -> LanguageModelStates | None:
    """Return what the first layer of the language model reads.

    Args:
        model: The model.
        inputs: Its inputs.
        local: Whether to restrict the self-attention of the image encoder to the diagonal.
        differentiable: Whether to keep the graph of gradients to the inputs.

    Returns:
        The states; None if no stack of layers has one vector per input id.
    """
    others: list[bool] = []  # calls that could not be restricted

    def restrict(call: Call) -> Tensor | None:
        bias = _diagonal(call)
        others.append(bias is None)
        return bias

    ways = (lambda: watch(model, edit=Bias(restrict)), lambda: _OwnValues(others))
    for way in ways if local else (nullcontext,):
        others.clear()
        entry = _InputRecorder(model, inputs["input_ids"].cpu(), differentiable)
        grads = torch.enable_grad() if differentiable else torch.no_grad()
        try:
            with eval_mode_forked_rng(model), grads, entry.open(), way():
                model(**inputs)
        except _Reached:
            found = entry.found
            if found is None:
                return None
            return LanguageModelStates(found, entry.beside, any(others))
        except NotImplementedError:
            continue  # attention over channels (DaViT) has no map and cannot be edited
        return None
    return None


class _OwnValues(TorchFunctionMode):
    """Replaces fused self-attention with its values, which is attention of each to itself."""

    def __init__(self, others: list[bool]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value")
            query, key, value = (*args[:3], *(kwargs[n] for n in names[len(args[:3]) :]))
            self.others.append(query.shape[:-1] != key.shape[:-1])
            if not self.others[-1]:
                return value
        return func(*args, **kwargs)


def raise_inside_watch() -> None:
    """Raise inside a watch block, which would capture the measuring runs."""
    if STATE.sessions:
        raise ValueError(
            "layouts_of runs a model with images to measure its positions: call it before "
            "watch(...), not inside"
        )


def _diagonal(call: Call) -> Tensor | None:
    """Return a bias that restricts each query to its own key."""
    _, _, q, k = call.shape
    if call.cross or q != k or call.causal:  # causal: latent queries, in no image encoder
        return None
    return torch.full((q, k), -torch.inf).fill_diagonal_(0)[None, None]


def media_positions(
    model: nn.Module, inputs: Mapping[str, Any], media: list[str]
) -> Bool[Tensor, "b n"] | None:
    """Return the positions that change with the inputs named `media`; None if not measurable."""
    before = language_model_inputs(model, inputs)
    if before is None:
        return None
    after = language_model_inputs(
        model, {**inputs, **{name: add_noise(inputs[name]) for name in media}}
    )
    if after is None or after.shape != before.shape:
        return None
    return _changed_positions(before, after)


def cells_agree(
    model: nn.Module,
    inputs: Mapping[str, Any],
    tower: nn.Module,
    taken: Bool[Tensor, "b n"],
    owner: Int[Tensor, "..."],
) -> bool:
    """Return whether each image token depends on its own cell of pixels and on no other.

    Args:
        model: The model.
        inputs: Its inputs, with `pixel_values`.
        tower: Its image encoder.
        taken: The image tokens, numbered from 0 through the batch.
        owner: The token that each pixel should belong to, -1 for none; broadcasts to the pixels.
    """
    before = language_model_inputs(model, inputs, tower)
    if before is None:
        return False
    pixels: Tensor = inputs["pixel_values"]
    # A token that owns no pixel must never change.
    owned = torch.zeros(int(taken.sum()), dtype=torch.bool)
    owned[owner[owner >= 0]] = True
    random = torch.Generator().manual_seed(0)
    # Random halves, because one run tests many cells at once.
    for _ in range(PATTERNS):
        chosen = (torch.rand(len(owned), generator=random) < 0.5) & owned
        # Change every pixel of the chosen cells, and no other.
        lit = (chosen[owner.clamp_min(0)] & (owner >= 0)).to(pixels.device)
        changed = torch.where(lit, pixels + 1 + pixels.abs(), pixels)
        after = language_model_inputs(model, {**inputs, "pixel_values": changed}, tower)
        expected = torch.zeros_like(taken)
        expected[taken] = chosen
        if after is None or not torch.equal(_changed_positions(before, after), expected):
            return False
    return True


def _changed_positions(before: Tensor, after: Tensor) -> Bool[Tensor, "b n"]:
    change = (after.double() - before.double()).abs().amax(dim=-1).cpu()
    return change > CHANGED * change.max()


def add_noise(value: Any) -> Any:
    """Random values of similar size; zeros stay zero, unless all values are zero."""
    if isinstance(value, list | tuple):
        return type(value)(add_noise(one) for one in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(value.shape, generator=random).to(value)
    return value * (0.5 + noise) if bool(value.any()) else value + noise
