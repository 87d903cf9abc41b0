"""Counter-based random numbers per sample: a function of its id, a seed and a counter.

There is no shared generator, so batches, the order of samples and the number of processes do not
change the numbers of any sample, on any machine.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def stream_keys(ids: Sequence[str], seed: int, purpose: str = "") -> NDArray[np.uint64]:
    """Return the key of the random stream of each sample."""
    found = [hashlib.sha256(f"{seed} {purpose} {name}".encode()).digest()[:8] for name in ids]
    return np.frombuffer(b"".join(found), dtype="<u8").astype(np.uint64)


def random_bits(keys: NDArray[np.uint64], count: int, start: int = 0) -> NDArray[np.uint64]:
    """Return the numbers `start` to `start + count` of every stream, 64 random bits each.

    SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        counter = np.arange(start + 1, start + count + 1, dtype=np.uint64) * _STEP
        found = np.empty((len(keys), count), dtype=np.uint64)
        for state, key in zip(found, keys, strict=True):  # one stream at a time fits the cache
            np.add(counter, key, out=state)
            for shift, factor in ((30, _FIRST), (27, _SECOND)):
                state ^= state >> np.uint64(shift)
                state *= factor
            state ^= state >> np.uint64(31)
    return found


def bernoulli(
    keys: NDArray[np.uint64], count: int, chance: float, start: int = 0
) -> NDArray[np.bool_]:
    """Return booleans that are true with probability `chance`, `count` per sample."""
    limit = np.uint64(round(chance * 2**53))
    return (random_bits(keys, count, start) >> np.uint64(11)) < limit


def sample_distinct(key: np.uint64, total: int, count: int) -> NDArray[np.int64]:
    """Return `count` different numbers below `total`, in the order in which they were drawn."""
    if count >= total:
        return np.arange(total, dtype=np.int64)
    found = np.empty(0, dtype=np.int64)
    start, portion = 0, 2 * count
    one = np.array([key], dtype=np.uint64)
    while len(found) < count:
        new = (random_bits(one, portion, start)[0] % np.uint64(total)).astype(np.int64)
        joined = np.concatenate([found, new])
        first = np.sort(np.unique(joined, return_index=True)[1])
        found, start = joined[first], start + portion
    return found[:count]
