"""Random numbers for measures: from one stream for a batch, or from one for each of its samples.

Every measure that draws does it here. Given a plain `torch.Generator` a batch is drawn at once.
Given `PerSample` what a sample gets depends on its own seed and on nothing else: not on the batch
it is in, not on how far its neighbours' texts made it be padded, not on the process that asks.
"""

from collections.abc import Sequence
from hashlib import sha256
from math import prod

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

# Steps between neighbours along an axis, odd and without a pattern, so that places do not collide.
_STEPS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


class PerSample(torch.Generator):
    """A stream of random numbers for each sample of a batch, by a seed each.

    A number is a function of the sample's seed, of how many times was drawn before, and of its
    place in the row (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    2014, the finalizer of SplitMix64). So a longer row begins with the numbers of a shorter one.
    """

    def __new__(cls, seeds: Sequence[int]) -> "PerSample":
        return super().__new__(cls)

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        self.times = 0

    def numbers(self, shape: Sequence[int]) -> NDArray[np.float64]:
        """Numbers above 0 and below 1, the first axis being that of the samples."""
        if len(shape) < 1 or shape[0] != len(self.seeds):
            raise ValueError(
                f"numbers of shape {tuple(shape)} were asked of streams for {len(self.seeds)} "
                "samples: the first axis has to be theirs"
            )
        if len(shape) - 1 > len(_STEPS):
            raise ValueError(f"at most {len(_STEPS)} axes behind that of the samples are drawn")
        self.times += 1
        place = np.zeros(shape[1:], dtype=np.uint64)
        for axis, (side, step) in enumerate(zip(shape[1:], _STEPS, strict=False)):
            along = np.arange(1, side + 1, dtype=np.uint64) * np.uint64(step)
            place += along.reshape([-1 if at == axis else 1 for at in range(len(shape) - 1)])
        turn = _mixed(np.array([self.times], dtype=np.uint64))
        start = _mixed(self.seeds ^ turn).reshape([-1] + [1] * (len(shape) - 1))
        found = _mixed(_mixed(place)[None] ^ start)
        return ((found >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def seed_of(*words: object) -> int:
    """A seed that is a function of these words and of nothing else, on any machine.

    >>> seed_of(0, "deletion", "photo 7") == seed_of(0, "deletion", "photo 7")
    True
    """
    text = "\n".join(f"{len(str(word))} {word}" for word in words)
    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def uniform_numbers(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Numbers from 0 to 1, all as likely."""
    if isinstance(generator, PerSample):
        return torch.from_numpy(generator.numbers(shape)).float().clamp_max(1 - 2**-24)
    return torch.rand(tuple(shape), generator=generator, device=generator.device)


def normal_numbers(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Numbers with mean 0 and deviation 1 of a Gaussian."""
    if isinstance(generator, PerSample):
        return torch.special.ndtri(torch.from_numpy(generator.numbers(shape))).float()
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def exponential_numbers(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Numbers with the density exp(-x); as shares of their sum, uniform on the simplex."""
    if isinstance(generator, PerSample):
        return (-torch.from_numpy(generator.numbers(shape)).log()).float()
    drawn = torch.empty(tuple(shape), device=generator.device)
    return drawn.exponential_(generator=generator) if prod(shape) else drawn


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of what comes out hangs on every bit of what goes in."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
