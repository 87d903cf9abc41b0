"""Counter-based random numbers: SplitMix64 values, streams, draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.targets.surrogate.counter_rng import bernoulli, random_bits, sample_distinct, stream_keys


def slow_splitmix64(key: int, count: int) -> list[int]:
    """Compute SplitMix64 as published, one number at a time."""
    found, state, whole = [], key, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & whole
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & whole
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & whole
        found.append(z ^ (z >> 31))
    return found


def test_random_bits_equal_published_splitmix64_values():
    """The first values of seed 1234567 in other implementations of SplitMix64."""
    found = random_bits(np.array([1234567], np.uint64), 3)[0]
    assert found.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 2**64 - 1), st.integers(0, 20))
def test_random_bits_agree_with_the_slow_reference(key, start):
    found = random_bits(np.array([key, 7], np.uint64), 5, start)
    assert found[0].tolist() == slow_splitmix64(key, start + 5)[start:]
    assert found[1].tolist() == slow_splitmix64(7, start + 5)[start:]


def test_streams_depend_on_sample_seed_and_name():
    both = stream_keys(["a", "b"], 0)
    assert stream_keys(["b"], 0)[0] == both[1] != both[0]
    assert stream_keys(["a"], 1)[0] != both[0] != stream_keys(["a"], 0, "other")[0]


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 1.0])
def test_bernoulli_has_the_requested_mean(chance):
    found = bernoulli(stream_keys(["a", "b"], 0), 20000, chance)
    assert found.shape == (2, 20000)
    assert abs(found.mean() - chance) < (0.01 if 0 < chance < 1 else 1e-12)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_sample_distinct_returns_distinct_numbers(total, count, key):
    found = sample_distinct(np.uint64(key), total, count)
    assert len(found) == len(set(found.tolist())) == min(total, count)
    assert found.min() >= 0 and found.max() < total
    longer = sample_distinct(np.uint64(key), total, count + 1)
    if count + 1 < total:
        assert len(set(found) - set(longer)) <= count  # both begin with the same draws
