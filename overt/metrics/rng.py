"""Random numbers for metrics: one stream per batch, or one per sample.

Every metric with random numbers draws them here. With a plain `torch.Generator` a batch is drawn at
once. With `PerSampleGenerator` the numbers of a sample depend only on its own seed: not on its
batch, on padding, or on the process.
"""

from collections.abc import Sequence
from hashlib import sha256
from math import prod

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from overt.metrics.argument_checks import check_generator

# Steps along the axes: odd and without a common pattern, so that places do not collide.
_STEPS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


class PerSampleGenerator(torch.Generator):
    """Random number generator with one seed per sample of a batch.

    A number is a function of the sample's seed, of how many draws were made before, and of its
    place in the row (finalizer of SplitMix64; Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", 2014). So a longer row begins with the numbers of a shorter one.
    """

    def __new__(cls, seeds: Sequence[int]) -> "PerSampleGenerator":
        return super().__new__(cls)

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        self.times = 0

    def numbers(self, shape: Sequence[int]) -> NDArray[np.float64]:
        """Draw numbers between 0 and 1, exclusive; the first axis is that of the samples."""
        if len(shape) < 1 or shape[0] != len(self.seeds):
            raise ValueError(
                f"the first axis must have {len(self.seeds)} samples, got shape {tuple(shape)}"
            )
        if len(shape) - 1 > len(_STEPS):
            raise ValueError(f"at most {len(_STEPS) + 1} axes are supported, got {len(shape)}")
        self.times += 1
        place = np.zeros(shape[1:], dtype=np.uint64)
        for axis, (side, step) in enumerate(zip(shape[1:], _STEPS, strict=False)):
            along = np.arange(1, side + 1, dtype=np.uint64) * np.uint64(step)
            place += along.reshape([-1 if at == axis else 1 for at in range(len(shape) - 1)])
        turn = _splitmix64(np.array([self.times], dtype=np.uint64))
        start = _splitmix64(self.seeds ^ turn).reshape([-1] + [1] * (len(shape) - 1))
        found = _splitmix64(_splitmix64(place)[None] ^ start)
        return ((found >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def derive_seed(*words: object) -> int:
    """Derive a seed from words, the same on any machine.

    >>> derive_seed(0, "deletion", "photo 7") == derive_seed(0, "deletion", "photo 7")
    True
    """
    text = "\n".join(f"{len(str(word))} {word}" for word in words)
    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def sample_uniform(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw uniform numbers from 0 to 1."""
    check_generator(generator)
    if isinstance(generator, PerSampleGenerator):
        return torch.from_numpy(generator.numbers(shape)).float().clamp_max(1 - 2**-24)
    return torch.rand(tuple(shape), generator=generator, device=generator.device)


def sample_normal(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw standard normal numbers."""
    check_generator(generator)
    if isinstance(generator, PerSampleGenerator):
        return torch.special.ndtri(torch.from_numpy(generator.numbers(shape))).float()
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def sample_exponential(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw numbers with the density exp(-x); normalized, they are uniform on the simplex."""
    check_generator(generator)
    if isinstance(generator, PerSampleGenerator):
        return (-torch.from_numpy(generator.numbers(shape)).log()).float()
    drawn = torch.empty(tuple(shape), device=generator.device)
    return drawn.exponential_(generator=generator) if prod(shape) else drawn


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64: every output bit depends on every input bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
