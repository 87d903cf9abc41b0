"""Infidelity and sensitivity of maps, and their stability under noise.

Yeh, Hsieh, Suggala, Inouye and Ravikumar, "On the (In)fidelity and Sensitivity of Explanations",
NeurIPS 2019, https://arxiv.org/abs/1901.09392. A constant map is perfectly stable and says nothing:
read stability together with faithfulness.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.agreement import spearman
from overt.metrics.argument_checks import check_count, check_share
from overt.metrics.faithfulness import Decide, class_probabilities
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined, single_row
from overt.metrics.rng import sample_normal, sample_uniform

Attend = Callable[[Tensor], AttentionMap]
Perturb = Callable[[Tensor, torch.Generator], Tensor]
Remove = Callable[[Bool[Tensor, "b k"], torch.Generator], Bool[Tensor, "b k"]]
Compare = Callable[[AttentionMap, AttentionMap], SampleScores]


# --- infidelity


def random_half(
    seen: Bool[Tensor, "b k"], generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "b k"]:
    """Draw each visible key with probability `share`."""
    drawn = sample_uniform(seen.shape, generator).to(seen.device)
    return (drawn < check_share(share)) & seen


@declare_metric("infidelity", "squared probability", higher_is_better=False, low=0.0)
def infidelity(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    remove: Remove = random_half,
    draws: int = 64,
) -> SampleScores:
    """Compute the squared error between summed weights of removed keys and the effect of removal.

    `E (beta I.a - (f(x) - f(x - I)))^2` (definition 2.1), where I are the keys drawn by `remove`
    and f is the probability of the prediction. Weights have no unit, so beta is the best-fitting
    scale per sample, as with captum's `normalize`.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: The source of random numbers.
        remove: Draws the keys to remove.
        draws: Number of draws.

    Returns:
        One error per sample.

    Raises:
        ValueError: `draws` is below 1.

    Example:
        >>> from overt import words
        >>> effects = torch.tensor([0.2, 0.1, 0.0])
        >>> def decide(keep):  # the probability is 0.6 plus the effects of the kept words
        ...     right = 0.6 + keep @ effects
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> generator = torch.Generator().manual_seed(0)
        >>> faithful = AttentionMap.from_cells(torch.tensor([[2.0, 1.0, 0.0]]), words(3))
        >>> infidelity(decide, faithful, generator).round(decimals=4)  # proportional to the effects
        tensor([0.])
        >>> other = AttentionMap.from_cells(torch.tensor([[0.0, 1.0, 2.0]]), words(3))
        >>> infidelity(decide, other, generator).round(decimals=4)
        tensor([0.0180])
    """
    draws = check_count("draws", draws)
    weights, seen = single_row(attention)
    whole = class_probabilities(decide, torch.ones_like(seen))
    answer = whole.argmax(dim=-1, keepdim=True)
    said, done = [], []
    for _ in range(draws):
        cells = remove(seen, generator)
        left = class_probabilities(decide, ~cells).gather(-1, answer)[:, 0]
        said.append((weights * cells).sum(dim=-1))
        done.append(whole.gather(-1, answer)[:, 0] - left)
    ours, theirs = torch.stack(said), torch.stack(done)
    square = ours.square().sum(dim=0)
    # least squares through the origin: minimizes the error over beta
    scale = (ours * theirs).sum(dim=0) / torch.where(square > 0, square, 1)
    error = (scale * ours - theirs).square().mean(dim=0)
    return mask_undefined(error, (weights != 0).any(dim=-1))


# --- sensitivity


def uniform_noise(inputs: Tensor, generator: torch.Generator, radius: float = 0.02) -> Tensor:
    """Add uniform noise of at most `radius` to the inputs."""
    drawn = sample_uniform(inputs.shape, generator)
    return inputs + radius * (2 * drawn - 1).to(inputs)


def gaussian_noise(inputs: Tensor, generator: torch.Generator, deviation: float = 0.05) -> Tensor:
    """Add Gaussian noise with this standard deviation to the inputs."""
    drawn = sample_normal(inputs.shape, generator)
    return inputs + deviation * drawn.to(inputs)


@declare_metric("max-sensitivity", "share", higher_is_better=False, low=0.0)
def sensitivity_max(
    attend: Attend,
    inputs: Tensor,
    generator: torch.Generator,
    perturb: Perturb = uniform_noise,
    draws: int = 10,
) -> SampleScores:
    """Compute the largest relative change of a map under small changes of the input (eq. 2.5).

    Norms are Euclidean, over all weights of a sample. More draws find larger changes: compare
    scores with the same number of draws.

    Args:
        attend: Returns the maps of inputs.
        inputs: The inputs.
        generator: The source of random numbers.
        perturb: Changes the inputs.
        draws: Number of draws.

    Returns:
        One relative change per sample.

    Example:
        >>> from overt import words
        >>> def attend(inputs):
        ...     return AttentionMap.from_cells(inputs, words(2))
        >>> def perturb(inputs, generator):
        ...     return inputs + torch.tensor([0.0, 0.5])
        >>> inputs, generator = torch.tensor([[3.0, 4.0]]), torch.Generator().manual_seed(0)
        >>> sensitivity_max(attend, inputs, generator, perturb)  # 0.5 / |(3, 4)|
        tensor([0.1000])
    """
    return _relative_changes(attend, inputs, generator, perturb, draws).amax(dim=0).float()


@declare_metric("mean sensitivity", "share", higher_is_better=False, low=0.0)
def sensitivity_mean(
    attend: Attend,
    inputs: Tensor,
    generator: torch.Generator,
    perturb: Perturb = uniform_noise,
    draws: int = 10,
) -> SampleScores:
    """Compute the mean relative change of a map under small changes of the input.

    The arguments are those of `sensitivity_max`.
    """
    return _relative_changes(attend, inputs, generator, perturb, draws).mean(dim=0).float()


@declare_metric("stability", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def stability(
    attend: Attend,
    inputs: Tensor,
    generator: torch.Generator,
    perturb: Perturb = gaussian_noise,
    draws: int = 4,
    compare: Compare = spearman,
) -> SampleScores:
    """Compute the mean similarity of maps with and without noise on the input.

    For crops and mirrors, which move content, use `view_consistency`.

    Args:
        attend: Returns the maps of inputs.
        inputs: The inputs.
        generator: The source of random numbers.
        perturb: Changes the inputs.
        draws: Number of draws.
        compare: A metric of two maps, Spearman's correlation by default.

    Returns:
        One mean per sample.

    Example:
        >>> from overt import words
        >>> def attend(inputs):
        ...     return AttentionMap.from_cells(inputs, words(3))
        >>> inputs, generator = torch.tensor([[1.0, 2.0, 3.0]]), torch.Generator().manual_seed(0)
        >>> stability(attend, inputs, generator)  # noise of 0.05 does not change the order
        tensor([1.])
        >>> stability(attend, inputs, generator, perturb=lambda inputs, generator: inputs.flip(1))
        tensor([-1.])
    """
    own = _map_of(attend, inputs)
    found = [
        compare(other, own) for other in _perturbed_maps(attend, inputs, generator, perturb, draws)
    ]
    numbers = torch.stack(found).double()
    return mask_undefined(numbers.nanmean(dim=0), ~numbers.isnan().all(dim=0))


def _relative_changes(
    attend: Attend, inputs: Tensor, generator: torch.Generator, perturb: Perturb, draws: int
) -> Float[Tensor, "n b"]:
    own = _map_of(attend, inputs).weights.double().flatten(1)
    length = own.norm(dim=-1)
    found = []
    for other in _perturbed_maps(attend, inputs, generator, perturb, draws):
        apart = (other.weights.double().flatten(1) - own).norm(dim=-1)
        found.append(torch.where(length > 0, apart / length, torch.nan))
    return torch.stack(found)


def _perturbed_maps(
    attend: Attend, inputs: Tensor, generator: torch.Generator, perturb: Perturb, draws: int
) -> Iterator[AttentionMap]:
    draws = check_count("draws", draws)
    for _ in range(draws):
        yield _map_of(attend, perturb(inputs, generator))


def _map_of(attend: Attend, inputs: Tensor) -> AttentionMap:
    return attend(inputs).detach()
