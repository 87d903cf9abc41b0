"""Random numbers that belong to a sample: a function of its id, a seed and a counter.

No generator runs on from one sample to the next, so neither batches nor the order of samples nor
the number of processes changes what is drawn for any of them, on any machine.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def keys_of(ids: Sequence[str], seed: int, purpose: str = "") -> NDArray[np.uint64]:
    """One number a sample: where its own stream of random numbers begins."""
    found = [hashlib.sha256(f"{seed} {purpose} {name}".encode()).digest()[:8] for name in ids]
    return np.frombuffer(b"".join(found), dtype="<u8").astype(np.uint64)


def draws(keys: NDArray[np.uint64], count: int, start: int = 0) -> NDArray[np.uint64]:
    """The numbers `start` to `start + count` of every stream, 64 random bits each, as (b, count).

    SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        counter = np.arange(start + 1, start + count + 1, dtype=np.uint64) * _STEP
        found = np.empty((len(keys), count), dtype=np.uint64)
        for state, key in zip(found, keys, strict=True):  # a stream at a time lies in a cache
            np.add(counter, key, out=state)
            for shift, factor in ((30, _FIRST), (27, _SECOND)):
                state ^= state >> np.uint64(shift)
                state *= factor
            state ^= state >> np.uint64(31)
    return found


def chances(
    keys: NDArray[np.uint64], count: int, chance: float, start: int = 0
) -> NDArray[np.bool_]:
    """True with probability `chance`, `count` times a sample; 0 is never and 1 always."""
    limit = np.uint64(round(chance * 2**53))
    return (draws(keys, count, start) >> np.uint64(11)) < limit


def distinct(key: np.uint64, total: int, count: int) -> NDArray[np.int64]:
    """`count` different numbers below `total`, in the order in which they were drawn."""
    if count >= total:
        return np.arange(total, dtype=np.int64)
    found = np.empty(0, dtype=np.int64)
    start, portion = 0, 2 * count
    one = np.array([key], dtype=np.uint64)
    while len(found) < count:
        new = (draws(one, portion, start)[0] % np.uint64(total)).astype(np.int64)
        joined = np.concatenate([found, new])
        first = np.sort(np.unique(joined, return_index=True)[1])
        found, start = joined[first], start + portion
    return found[:count]
