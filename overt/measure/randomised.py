"""Does a map depend on what the model has learned? Its weights are made random, layer by layer.

Adebayo, Gilmer, Muelly, Goodfellow, Hardt and Kim, "Sanity Checks for Saliency Maps", NeurIPS 2018,
https://arxiv.org/abs/1810.03292, section 3. A map that stays the same when the model has forgotten
everything is a map of the input. A map that changes is not thereby right: it is a check, not a
score.

    found = cascading(model, lambda: model(batch).attention[0], generator)
    dict(zip(found.layers, found.similarity.mean(dim=1)))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.capture.resting import still
from overt.measure.agreement import spearman
from overt.measure.measured import Measured, measured

Look = Callable[[], AttentionMap]
Compare = Callable[[AttentionMap, AttentionMap], Measured]
Forget = Callable[[nn.Module, torch.Generator], None]


@dataclass(frozen=True, eq=False)
class Randomised:
    """How alike the maps before and after are, when each of `layers` was made random."""

    layers: tuple[str, ...]
    similarity: Float[Tensor, "n b"]


# --- how a layer forgets


def reset(layer: nn.Module, generator: torch.Generator) -> None:
    """The weights drawn anew as when the layer was made: the paper's way.

    A layer that does not know how it was made has its numbers mixed by `mix` instead.
    """
    own = getattr(layer, "reset_parameters", None)
    if not callable(own):
        mix(layer, generator)
        return
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    devices = {value.device for value in layer.parameters(recurse=False)}
    with torch.random.fork_rng([one for one in devices if one.type == "cuda"]):
        torch.manual_seed(seed)
        own()


@torch.no_grad()
def mix(layer: nn.Module, generator: torch.Generator) -> None:
    """The layer's own numbers in a random order, tensor by tensor: no other numbers come in."""
    for values in layer.parameters(recurse=False):
        order = torch.randperm(values.numel(), generator=generator, device=generator.device)
        values.copy_(values.flatten()[order.to(values.device)].reshape(values.shape))


# --- which layers


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules that have weights of their own, from the answer to the input.

    The order is that in which they were made, turned round: give names in another order where a
    model was put together otherwise.
    """
    return tuple(reversed([name for name, part in model.named_modules() if _weighs(part)]))


def cascading(
    model: nn.Module,
    look: Look,
    generator: torch.Generator,
    layers: Sequence[str] | None = None,
    forget: Forget = reset,
    compare: Compare = spearman,
) -> Randomised:
    """Layers are made random one after the other, from the answer to the input, and stay so.

    `layers` are names of modules, whose parts forget with them; None takes those of `layers_of`.
    The model is in evaluation mode for the time and is left as it was found, weights and buffers to
    the bit.
    """
    return _randomised(model, look, generator, layers, forget, compare, restore=lambda: None)


def independent(
    model: nn.Module,
    look: Look,
    generator: torch.Generator,
    layers: Sequence[str] | None = None,
    forget: Forget = reset,
    compare: Compare = spearman,
) -> Randomised:
    """Each layer is made random alone, all others as they were."""
    state = _copied(model)
    return _randomised(
        model, look, generator, layers, forget, compare, restore=lambda: _restored(model, state)
    )


@measured("similarity when forgotten", "correlation", higher_is_better=False, low=-1.0, high=1.0)
def forgotten_similarity(
    model: nn.Module,
    look: Look,
    generator: torch.Generator,
    forget: Forget = reset,
    compare: Compare = spearman,
) -> Measured:
    """How alike the maps of a model are before and after all of it was made random."""
    return cascading(model, look, generator, None, forget, compare).similarity[-1]


def _randomised(
    model: nn.Module,
    look: Look,
    generator: torch.Generator,
    layers: Sequence[str] | None,
    forget: Forget,
    compare: Compare,
    restore: Callable[[], None],
) -> Randomised:
    names = layers_of(model) if layers is None else tuple(layers)
    parts = dict(model.named_modules())
    missing = [name for name in names if name not in parts]
    if missing or not names:
        raise ValueError(f"the model has no layers {missing}; it has {list(layers_of(model))}")
    found = []
    with _borrowed(model), torch.no_grad():
        before = look().detach()
        for name in names:
            restore()
            # a block that was asked for by name forgets with all its parts
            inside = [parts[name]] if layers is None else list(parts[name].modules())
            for part in filter(_weighs, inside):
                forget(part, generator)
            found.append(compare(look().detach(), before))
    return Randomised(names, torch.stack(found))


def _weighs(part: nn.Module) -> bool:
    """Whether a module has weights of its own."""
    return any(True for _ in part.parameters(recurse=False))


@contextmanager
def _borrowed(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards as it was, weights and all."""
    state = _copied(model)
    with still(model):
        try:
            yield
        finally:
            _restored(model, state)


def _copied(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in _tensors(model)]


@torch.no_grad()
def _restored(model: nn.Module, state: Sequence[Tensor]) -> None:
    for value, kept in zip(_tensors(model), state, strict=True):
        value.copy_(kept)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
