"""Does a map add up to what the model does, and does it hold still when the input hardly changes?

Yeh, Hsieh, Suggala, Inouye and Ravikumar, "On the (In)fidelity and Sensitivity of Explanations",
NeurIPS 2019, https://arxiv.org/abs/1901.09392. A map that never changes is as stable as can be, and
says nothing: read stability beside faithfulness.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.agreement import spearman
from overt.measure.drawing import normal_numbers, uniform_numbers
from overt.measure.faithfulness import Decide, probabilities
from overt.measure.measured import Measured, defined, measured, row

Attend = Callable[[Tensor], AttentionMap]
Disturb = Callable[[Tensor, torch.Generator], Tensor]
Remove = Callable[[Bool[Tensor, "b k"], torch.Generator], Bool[Tensor, "b k"]]
Compare = Callable[[AttentionMap, AttentionMap], Measured]


# --- infidelity


def half_of_them(
    seen: Bool[Tensor, "b k"], generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "b k"]:
    """Each key that may be seen with the chance `share`."""
    drawn = uniform_numbers(seen.shape, generator).to(seen.device)
    return (drawn < share) & seen


@measured("infidelity", "squared probability", higher_is_better=False, low=0.0)
def infidelity(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    remove: Remove = half_of_them,
    draws: int = 64,
) -> Measured:
    """How far the weights of removed keys are from adding up to what removing them does.

    `E (beta I.a - (f(x) - f(x - I)))^2` (definition 2.1), where I are the keys that `remove` draws
    and f is the probability of the answer. Weights have no unit, so beta is the scale that fits
    best, a sample at a time, as captum's `normalize` does it.
    """
    if draws < 1:
        raise ValueError(f"{draws} draws remove nothing; take one at least")
    weights, seen = row(attention)
    whole = probabilities(decide, torch.ones_like(seen))
    answer = whole.argmax(dim=-1, keepdim=True)
    said, done = [], []
    for _ in range(draws):
        cells = remove(seen, generator)
        left = probabilities(decide, ~cells).gather(-1, answer)[:, 0]
        said.append((weights * cells).sum(dim=-1))
        done.append(whole.gather(-1, answer)[:, 0] - left)
    ours, theirs = torch.stack(said), torch.stack(done)
    square = ours.square().sum(dim=0)
    scale = (ours * theirs).sum(dim=0) / torch.where(square > 0, square, 1)
    error = (scale * ours - theirs).square().mean(dim=0)
    return defined(error, (weights != 0).any(dim=-1))


# --- sensitivity


def within(inputs: Tensor, generator: torch.Generator, radius: float = 0.02) -> Tensor:
    """The inputs, each number moved at random by `radius` at most."""
    drawn = uniform_numbers(inputs.shape, generator)
    return inputs + radius * (2 * drawn - 1).to(inputs)


def noisy(inputs: Tensor, generator: torch.Generator, deviation: float = 0.05) -> Tensor:
    """The inputs with Gaussian noise of this deviation."""
    drawn = normal_numbers(inputs.shape, generator)
    return inputs + deviation * drawn.to(inputs)


@measured("max-sensitivity", "share", higher_is_better=False, low=0.0)
def sensitivity_max(
    attend: Attend,
    inputs: Tensor,
    generator: torch.Generator,
    disturb: Disturb = within,
    draws: int = 10,
) -> Measured:
    """The most that a map changes among inputs hardly different, over its own length (eq. 2.5).

    `attend` gives the maps of inputs; lengths are Euclidean, over all that a sample's map has. More
    draws find more: compare numbers of as many.
    """
    return _changes(attend, inputs, generator, disturb, draws).amax(dim=0).float()


@measured("mean sensitivity", "share", higher_is_better=False, low=0.0)
def sensitivity_mean(
    attend: Attend,
    inputs: Tensor,
    generator: torch.Generator,
    disturb: Disturb = within,
    draws: int = 10,
) -> Measured:
    """The mean of what `sensitivity_max` takes the most of."""
    return _changes(attend, inputs, generator, disturb, draws).mean(dim=0).float()


@measured("stability", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def stability(
    attend: Attend,
    inputs: Tensor,
    generator: torch.Generator,
    disturb: Disturb = noisy,
    draws: int = 4,
    compare: Compare = spearman,
) -> Measured:
    """How alike the maps of inputs with and without noise are: the mean over draws.

    Under crops and mirrors, which move things, `view_consistency` compares where both have seen.
    `compare` is a measure of two maps, whose numbers these then are.
    """
    own = _asked(attend, inputs)
    found = [compare(other, own) for other in _others(attend, inputs, generator, disturb, draws)]
    numbers = torch.stack(found).double()
    return defined(numbers.nanmean(dim=0), ~numbers.isnan().all(dim=0))


def _changes(
    attend: Attend, inputs: Tensor, generator: torch.Generator, disturb: Disturb, draws: int
) -> Float[Tensor, "n b"]:
    own = _asked(attend, inputs).weights.double().flatten(1)
    length = own.norm(dim=-1)
    found = []
    for other in _others(attend, inputs, generator, disturb, draws):
        apart = (other.weights.double().flatten(1) - own).norm(dim=-1)
        found.append(torch.where(length > 0, apart / length, torch.nan))
    return torch.stack(found)


def _others(
    attend: Attend, inputs: Tensor, generator: torch.Generator, disturb: Disturb, draws: int
) -> Iterator[AttentionMap]:
    if draws < 1:
        raise ValueError(f"{draws} draws: nothing is compared; take one at least")
    for _ in range(draws):
        yield _asked(attend, disturb(inputs, generator))


def _asked(attend: Attend, inputs: Tensor) -> AttentionMap:
    return attend(inputs).detach()
