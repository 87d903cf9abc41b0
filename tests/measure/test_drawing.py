"""Random numbers: a plain generator draws as torch does, and a stream a sample is its own."""

import pytest
import torch
from scipy import stats

from overt.attention import AttentionMap, words
from overt.measure import random_map, shuffled, top_cells
from overt.measure.drawing import (
    PerSample,
    exponential_numbers,
    normal_numbers,
    seed_of,
    uniform_numbers,
)

SEEDS = [3, 2**63 + 5, 0, -1]
KINDS = [uniform_numbers, normal_numbers, exponential_numbers]


def name_of(function: object) -> str:
    return function.__name__  # type: ignore[attr-defined]


def test_a_plain_generator_draws_what_torch_draws() -> None:
    ours, theirs = (torch.Generator().manual_seed(4) for _ in range(2))
    assert torch.equal(uniform_numbers((3, 5), ours), torch.rand(3, 5, generator=theirs))
    assert torch.equal(normal_numbers((3, 5), ours), torch.randn(3, 5, generator=theirs))
    own = torch.empty(3, 5).exponential_(generator=theirs)
    assert torch.equal(exponential_numbers((3, 5), ours), own)


@pytest.mark.parametrize("draw", KINDS, ids=name_of)
def test_a_sample_gets_the_same_in_any_batch(draw) -> None:
    whole = draw((4, 2, 6), PerSample(SEEDS))
    for at, seed in enumerate(SEEDS):
        assert torch.equal(draw((1, 2, 6), PerSample([seed]))[0], whole[at])


@pytest.mark.parametrize("draw", KINDS, ids=name_of)
def test_a_longer_row_begins_as_a_shorter_one(draw) -> None:
    wide, narrow = (draw((4, 3, width), PerSample(SEEDS)) for width in (9, 5))
    assert torch.equal(wide[..., :5], narrow)


def test_what_is_drawn_next_is_something_else() -> None:
    streams = PerSample(SEEDS)
    first, second = (uniform_numbers((4, 50), streams) for _ in range(2))
    assert not (first == second).any()
    assert float(torch.corrcoef(torch.cat([first, second])).triu(1).abs().max()) < 0.5


@pytest.mark.parametrize(
    ("draw", "law"),
    [(uniform_numbers, "uniform"), (normal_numbers, "norm"), (exponential_numbers, "expon")],
    ids=lambda one: one if isinstance(one, str) else name_of(one),
)
def test_numbers_follow_their_law(draw, law: str) -> None:
    """Along places, along samples, and along turns (Kolmogorov and Smirnov)."""
    places = draw((1, 100, 100), PerSample([7])).flatten().numpy()
    samples = draw((10_000, 1), PerSample(range(10_000))).flatten().numpy()
    streams = PerSample([7])
    turns = torch.cat([draw((1, 1), streams) for _ in range(3000)]).flatten().numpy()
    for numbers in (places, samples, turns):
        assert stats.kstest(numbers, law).pvalue > 1e-3


def test_neighbours_do_not_go_together() -> None:
    drawn = uniform_numbers((2, 64, 64), PerSample([1, 2])).double() - 0.5
    pairs = [
        (drawn[:, :-1], drawn[:, 1:]),
        (drawn[..., :-1], drawn[..., 1:]),
        (drawn[:1], drawn[1:]),
    ]
    for one, two in pairs:
        assert abs(float((one * two).mean()) / (1 / 12)) < 0.06


def test_a_seed_is_a_function_of_its_words() -> None:
    assert seed_of(0, "a", "bc") != seed_of(0, "ab", "c")
    assert seed_of(1, "\udcff") == seed_of(1, "\udcff") and 0 <= seed_of() < 2**64
    assert seed_of(0, "deletion", "photo 7") == 830818495044982221


def test_streams_for_other_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="streams for 4 samples"):
        uniform_numbers((3, 2), PerSample(SEEDS))
    with pytest.raises(ValueError, match="at most 4 axes"):
        uniform_numbers((4, 1, 1, 1, 1, 1), PerSample(SEEDS))


def test_measures_draw_a_sample_at_a_time() -> None:
    """A text alone, and in a batch with a longer one that makes it be padded."""
    cells = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    batch = AttentionMap.from_cells(cells, words(5), cells > 0).normalize()
    alone = AttentionMap.from_cells(cells[:1, :3], words(3)).normalize()
    streams = [PerSample([8, 9]), PerSample([8])]
    for make in (random_map, shuffled):
        wide, narrow = (make(m, s).weights for m, s in zip((batch, alone), streams, strict=True))
        torch.testing.assert_close(wide[0, ..., :3], narrow[0])
    wide, narrow = (top_cells(m, s, 2) for m, s in zip((batch, alone), streams, strict=True))
    assert torch.equal(wide[0, :3], narrow[0])
