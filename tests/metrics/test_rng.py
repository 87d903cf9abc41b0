"""Random numbers: same draws as torch, and independent streams per sample."""

import pytest
import torch
from scipy import stats

from overt.attention import AttentionMap, words
from overt.metrics import random_map, shuffled_map
from overt.metrics.rng import (
    PerSampleGenerator,
    derive_seed,
    sample_exponential,
    sample_normal,
    sample_uniform,
)
from overt.metrics.top_cells import top_cells

SEEDS = [3, 2**63 + 5, 0, -1]
KINDS = [sample_uniform, sample_normal, sample_exponential]


def function_name(function: object) -> str:
    return function.__name__  # type: ignore[attr-defined]


def test_a_torch_generator_gives_the_draws_of_torch() -> None:
    ours, theirs = (torch.Generator().manual_seed(4) for _ in range(2))
    assert torch.equal(sample_uniform((3, 5), ours), torch.rand(3, 5, generator=theirs))
    assert torch.equal(sample_normal((3, 5), ours), torch.randn(3, 5, generator=theirs))
    own = torch.empty(3, 5).exponential_(generator=theirs)
    assert torch.equal(sample_exponential((3, 5), ours), own)


@pytest.mark.parametrize("draw", KINDS, ids=function_name)
def test_draws_of_a_sample_do_not_depend_on_the_batch(draw) -> None:
    whole = draw((4, 2, 6), PerSampleGenerator(SEEDS))
    for at, seed in enumerate(SEEDS):
        assert torch.equal(draw((1, 2, 6), PerSampleGenerator([seed]))[0], whole[at])


@pytest.mark.parametrize("draw", KINDS, ids=function_name)
def test_draws_of_a_longer_row_start_with_those_of_a_shorter_row(draw) -> None:
    wide, narrow = (draw((4, 3, width), PerSampleGenerator(SEEDS)) for width in (9, 5))
    assert torch.equal(wide[..., :5], narrow)


def test_successive_draws_differ() -> None:
    streams = PerSampleGenerator(SEEDS)
    first, second = (sample_uniform((4, 50), streams) for _ in range(2))
    assert not (first == second).any()
    assert float(torch.corrcoef(torch.cat([first, second])).triu(1).abs().max()) < 0.5


@pytest.mark.parametrize(
    ("draw", "law"),
    [(sample_uniform, "uniform"), (sample_normal, "norm"), (sample_exponential, "expon")],
    ids=lambda one: one if isinstance(one, str) else function_name(one),
)
def test_draws_follow_their_distribution(draw, law: str) -> None:
    """Along positions, samples and successive draws (Kolmogorov-Smirnov test)."""
    places = draw((1, 100, 100), PerSampleGenerator([7])).flatten().numpy()
    samples = draw((10_000, 1), PerSampleGenerator(range(10_000))).flatten().numpy()
    streams = PerSampleGenerator([7])
    turns = torch.cat([draw((1, 1), streams) for _ in range(3000)]).flatten().numpy()
    for numbers in (places, samples, turns):
        assert stats.kstest(numbers, law).pvalue > 1e-3


def test_neighbouring_draws_are_uncorrelated() -> None:
    drawn = sample_uniform((2, 64, 64), PerSampleGenerator([1, 2])).double() - 0.5
    pairs = [
        (drawn[:, :-1], drawn[:, 1:]),
        (drawn[..., :-1], drawn[..., 1:]),
        (drawn[:1], drawn[1:]),
    ]
    for one, two in pairs:
        assert abs(float((one * two).mean()) / (1 / 12)) < 0.06


def test_derived_seeds_depend_on_all_words() -> None:
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c")
    assert derive_seed(1, "\udcff") == derive_seed(1, "\udcff") and 0 <= derive_seed() < 2**64
    assert derive_seed(0, "deletion", "photo 7") == 830818495044982221


def test_another_number_of_samples_or_axes_raises() -> None:
    with pytest.raises(ValueError, match="4 samples"):
        sample_uniform((3, 2), PerSampleGenerator(SEEDS))
    with pytest.raises(ValueError, match="at most 5 axes"):
        sample_uniform((4, 1, 1, 1, 1, 1), PerSampleGenerator(SEEDS))


def test_controls_and_selections_draw_per_sample() -> None:
    """Compare a text alone with the same text padded in a batch."""
    cells = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    batch = AttentionMap.from_cells(cells, words(5), cells > 0).normalize()
    alone = AttentionMap.from_cells(cells[:1, :3], words(3)).normalize()
    streams = [PerSampleGenerator([8, 9]), PerSampleGenerator([8])]
    for make in (random_map, shuffled_map):
        wide, narrow = (make(m, s).weights for m, s in zip((batch, alone), streams, strict=True))
        torch.testing.assert_close(wide[0, ..., :3], narrow[0])
    wide, narrow = (top_cells(m, s, 2) for m, s in zip((batch, alone), streams, strict=True))
    assert torch.equal(wide[0, :3], narrow[0])
