"""Model randomization test: does a map depend on the learned weights?

Adebayo, Gilmer, Muelly, Goodfellow, Hardt and Kim, "Sanity Checks for Saliency Maps", NeurIPS 2018,
https://arxiv.org/abs/1810.03292, section 3. A map that stays the same under random weights is a map
of the input alone. A map that changes is not thereby right: this is a check, not a score.

    found = cascading_randomization(model, lambda: model(batch).attention[0], generator)
    dict(zip(found.layers, found.similarity.mean(dim=1)))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.capture.eval_mode import eval_mode
from overt.metrics.agreement import spearman
from overt.metrics.argument_checks import check_generator
from overt.metrics.metric import SampleScores, declare_metric

ComputeMap = Callable[[], AttentionMap]
Compare = Callable[[AttentionMap, AttentionMap], SampleScores]
Randomize = Callable[[nn.Module, torch.Generator], None]


@dataclass(frozen=True, eq=False)
class RandomizationResult:
    """Similarity of the maps before and after each of `layers` was randomized."""

    layers: tuple[str, ...]
    similarity: Float[Tensor, "n b"]


# --- how to randomize a layer


def reinitialize(layer: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of a layer anew with its `reset_parameters`, as in the paper.

    A layer without `reset_parameters` is randomized with `shuffle_parameters`.
    """
    own = getattr(layer, "reset_parameters", None)
    if not callable(own):
        shuffle_parameters(layer, generator)
        return
    device = check_generator(generator).device
    seed = int(torch.randint(2**31, (1,), generator=generator, device=device))
    devices = {value.device for value in layer.parameters(recurse=False)}
    # `reset_parameters` takes no generator: seed the global one, and restore it afterwards
    with torch.random.fork_rng([one for one in devices if one.type == "cuda"]):
        torch.manual_seed(seed)
        own()


@torch.no_grad()
def shuffle_parameters(layer: nn.Module, generator: torch.Generator) -> None:
    """Shuffle the weights within each parameter of a layer."""
    device = check_generator(generator).device
    for values in layer.parameters(recurse=False):
        order = torch.randperm(values.numel(), generator=generator, device=device)
        values.copy_(values.flatten()[order.to(values.device)].reshape(values.shape))


# --- which layers to randomize


def layers_with_parameters(model: nn.Module) -> tuple[str, ...]:
    """List the modules with parameters of their own, from the output to the input.

    The order is the reverse of the order of registration: give names in another order for models
    that were registered otherwise.
    """
    return tuple(reversed([name for name, part in model.named_modules() if _has_parameters(part)]))


def cascading_randomization(
    model: nn.Module,
    look: ComputeMap,
    generator: torch.Generator,
    layers: Sequence[str] | None = None,
    randomize: Randomize = reinitialize,
    compare: Compare = spearman,
) -> RandomizationResult:
    """Randomize layers one after the other from the output to the input, and compare maps.

    The model is in evaluation mode meanwhile. Its weights and buffers are restored exactly.

    Args:
        model: The model to randomize.
        look: Returns the maps of the model as it is at the moment.
        generator: The source of random numbers.
        layers: Names of modules, each randomized with all its children; by default those of
            `layers_with_parameters`.
        randomize: How a layer is randomized.
        compare: A metric of two maps.

    Returns:
        The similarity after each layer.
    """
    return _randomize_layers(
        model, look, generator, layers, randomize, compare, restore=lambda: None
    )


def independent_randomization(
    model: nn.Module,
    look: ComputeMap,
    generator: torch.Generator,
    layers: Sequence[str] | None = None,
    randomize: Randomize = reinitialize,
    compare: Compare = spearman,
) -> RandomizationResult:
    """Randomize each layer alone, with all others as trained, and compare maps.

    The arguments are those of `cascading_randomization`.
    """
    state = _copy_state(model)
    return _randomize_layers(
        model,
        look,
        generator,
        layers,
        randomize,
        compare,
        restore=lambda: _restore_state(model, state),
    )


@declare_metric(
    "similarity when forgotten",
    "correlation",
    higher_is_better=False,
    low=-1.0,
    high=1.0,
    key="forgotten_similarity",
)
def randomization_similarity(
    model: nn.Module,
    look: ComputeMap,
    generator: torch.Generator,
    randomize: Randomize = reinitialize,
    compare: Compare = spearman,
) -> SampleScores:
    """Compute the similarity of maps before and after all layers were randomized.

    Args:
        model: The model to randomize; restored afterwards.
        look: Returns the maps of the model as it is at the moment.
        generator: The source of random numbers.
        randomize: How a layer is randomized.
        compare: A metric of two maps, Spearman's correlation by default.

    Returns:
        One similarity per sample.

    Example:
        >>> from overt import words
        >>> model, generator = nn.Linear(4, 1), torch.Generator().manual_seed(0)
        >>> fixed = AttentionMap.from_cells(torch.tensor([[1, 2, 3, 4]]), words(4))
        >>> randomization_similarity(model, lambda: fixed, generator)  # independent of the model
        tensor([1.])
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        >>> look = lambda: AttentionMap.from_cells(model.weight.abs(), words(4))
        >>> randomization_similarity(model, look, generator)
        tensor([-0.4000])
    """
    return cascading_randomization(model, look, generator, None, randomize, compare).similarity[-1]


def _randomize_layers(
    model: nn.Module,
    look: ComputeMap,
    generator: torch.Generator,
    layers: Sequence[str] | None,
    randomize: Randomize,
    compare: Compare,
    restore: Callable[[], None],
) -> RandomizationResult:
    names = layers_with_parameters(model) if layers is None else tuple(layers)
    parts = dict(model.named_modules())
    missing = [name for name in names if name not in parts]
    if missing or not names:
        raise ValueError(
            f"no layers {missing} in the model: it has {list(layers_with_parameters(model))}"
        )
    found = []
    with _restored_afterwards(model), torch.no_grad():
        before = look().detach()
        for name in names:
            restore()
            # a block given by name is randomized with all its children
            inside = [parts[name]] if layers is None else list(parts[name].modules())
            for part in filter(_has_parameters, inside):
                randomize(part, generator)
            found.append(compare(look().detach(), before))
    return RandomizationResult(names, torch.stack(found))


def _has_parameters(part: nn.Module) -> bool:
    """Return whether a module has parameters of its own."""
    return any(True for _ in part.parameters(recurse=False))


@contextmanager
def _restored_afterwards(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and restore weights, buffers and modes afterwards."""
    state = _copy_state(model)
    with eval_mode(model):
        try:
            yield
        finally:
            _restore_state(model, state)


def _copy_state(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in _tensors(model)]


@torch.no_grad()
def _restore_state(model: nn.Module, state: Sequence[Tensor]) -> None:
    for value, kept in zip(_tensors(model), state, strict=True):
        value.copy_(kept)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
