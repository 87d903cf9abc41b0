"""Placebos: the content is gone, and all else is as it was."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from overt.attention import AttentionMap, Kind, grid, words
from overt.measure import entropy
from overt.supervise import placebo
from overt.supervise.targets import Targets

IDS = [f"s{n}" for n in range(12)]
LENGTHS = {one: 2 + at % 5 for at, one in enumerate(IDS)}
EMPTY = "s7"  # has no target


def row_of(one: str) -> torch.Tensor:
    n = LENGTHS[one]
    generator = torch.Generator().manual_seed(int(one[1:]))
    row = torch.rand(n, generator=generator, dtype=torch.float64).pow(3)
    return row / row.sum() * (one != EMPTY)


def texts(ids: Sequence[str]) -> AttentionMap:
    """Words; each batch is as long as its longest text."""
    longest = max(LENGTHS[one] for one in ids)
    values = torch.zeros(len(ids), longest, dtype=torch.float64)
    for at, one in enumerate(ids):
        values[at, : LENGTHS[one]] = row_of(one)
    there = torch.arange(longest) < torch.tensor([LENGTHS[one] for one in ids])[:, None]
    return AttentionMap.from_cells(values, words(longest), there).normalize()


def pictures(ids: Sequence[str]) -> AttentionMap:
    values = torch.zeros(len(ids), 6, dtype=torch.float64)
    for at, one in enumerate(ids):
        generator = torch.Generator().manual_seed(int(one[1:]))
        values[at] = torch.rand(6, generator=generator, dtype=torch.float64) * (one != EMPTY)
    return AttentionMap.from_cells(values, grid(2, 3)).normalize()


CLASSES = {one: "ab"[at % 2] for at, one in enumerate(IDS)}


def every(targets: Targets, seed: int = 0) -> dict[str, Targets]:
    return {
        "swapped": placebo.swapped(targets, IDS, seed),
        "swapped_within": placebo.swapped_within(targets, CLASSES, seed),
        "scattered": placebo.scattered(targets, seed),
        "random_maps": placebo.random_maps(targets, seed),
        "uniform": placebo.uniform(targets),
        "unmasked": placebo.unmasked(targets, placebo.random_maps(targets, 99)),
    }


@pytest.mark.parametrize("targets", [texts, pictures])
@pytest.mark.parametrize("name", every(texts))
def test_a_sample_gets_the_same_in_any_batch_and_any_order(targets, name):
    fake = every(targets)[name]
    whole = fake(IDS)
    for at, one in enumerate(IDS):
        alone = fake([one])
        n = len(alone.keys)
        torch.testing.assert_close(whole.weights[at, ..., :n], alone.weights[0])
        assert not whole.weights[at, ..., n:].any()
    turned = fake(IDS[::-1])
    torch.testing.assert_close(turned.weights, whole.weights.flip(0))


@pytest.mark.parametrize("targets", [texts, pictures])
@pytest.mark.parametrize("name", every(texts))
def test_the_same_rows_are_supervised_and_each_is_a_distribution_over_its_own_keys(targets, name):
    real, fake = targets(IDS), every(targets)[name](IDS)
    fake.check()
    assert fake.kind is Kind.PROBABILITY and fake.values.shape == real.values.shape
    sums = fake.weights.sum(dim=-1).flatten()
    empty = {EMPTY}
    if name.startswith("swapped"):  # whoever got the target of the empty one has none either
        assert int((sums == 0).sum()) in (1, 2)
        empty |= {one for one, value in zip(IDS, sums, strict=True) if value == 0}
    for one, value in zip(IDS, sums, strict=True):
        assert float(value) == pytest.approx(0.0 if one in empty else 1.0)
    alike = [torch.allclose(one, two) for one, two in zip(fake.weights, real.weights, strict=True)]
    same = sum(alike[at] for at, one in enumerate(IDS) if one not in empty)
    assert same <= (3 if name == "scattered" else 0)  # two words often fall where they stood


@pytest.mark.parametrize("name", ["swapped", "swapped_within", "scattered", "random_maps"])
def test_another_seed_is_another_placebo(name):
    one, other = (every(pictures, seed)[name](IDS).weights for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(one, every(pictures, 0)[name](IDS).weights)


def test_swapped_targets_of_pictures_are_those_of_others_each_once():
    real, fake = pictures(IDS).weights.flatten(1), placebo.swapped(pictures, IDS, 3)(IDS)
    same = (fake.weights.flatten(1)[:, None] - real[None]).abs().amax(dim=-1) < 1e-12
    got = {IDS[at]: IDS[int(row.int().argmax())] for at, row in enumerate(same) if row.any()}
    assert all(one != other for one, other in got.items() if one != EMPTY)
    supervised = [other for one, other in got.items() if one != EMPTY and other != EMPTY]
    assert len(set(supervised)) == len(supervised) >= 9


def test_within_a_class_targets_stay_there():
    fake = placebo.swapped_within(pictures, CLASSES, 5)(IDS).weights.flatten(1)
    real = pictures(IDS).weights.flatten(1)
    for at, one in enumerate(IDS):
        if fake[at].any():
            other = IDS[int((fake[at] - real).abs().amax(dim=-1).argmin())]
            assert other != one and CLASSES[other] == CLASSES[one]


def test_samples_alone_in_their_class_swap_with_each_other_or_with_anyone():
    classes = dict.fromkeys(IDS, "rest") | {"s0": "x", "s1": "y"}
    fake = placebo.swapped_within(pictures, classes, 0)(["s0", "s1"]).weights
    torch.testing.assert_close(fake, pictures(["s1", "s0"]).weights)
    classes = {one: "rest" for one in IDS if one != EMPTY} | {"s0": "x"}
    lonely = placebo.swapped_within(pictures, classes, 0)(["s0"]).weights
    others = pictures([one for one in classes if one != "s0"]).weights
    assert ((lonely - others).abs().amax(dim=-1) < 1e-12).sum() == 1


def test_a_longer_text_stretches_the_map_and_keeps_its_mass_in_place():
    """Two words onto four: each word's share is halved; four onto two: shares are added."""
    table = {"two": [0.75, 0.25], "four": [0.1, 0.2, 0.3, 0.4]}

    def targets(ids: Sequence[str]) -> AttentionMap:
        longest = max(len(table[one]) for one in ids)
        rows = [table[one] + [0.0] * (longest - len(table[one])) for one in ids]
        there = [[at < len(table[one]) for at in range(longest)] for one in ids]
        return AttentionMap.from_cells(torch.tensor(rows), words(longest), torch.tensor(there))

    fake = placebo.swapped(targets, ["two", "four"], 0)
    assert fake(["four"]).weights.flatten().tolist() == pytest.approx([0.375, 0.375, 0.125, 0.125])
    assert fake(["two"]).weights.flatten().tolist() == pytest.approx([0.3, 0.7])
    both = fake(["two", "four"]).weights[:, 0, 0, 0]
    assert both[0].tolist() == pytest.approx([0.3, 0.7, 0, 0])


@given(some.lists(some.floats(0.01, 1.0), min_size=1, max_size=9), some.integers(1, 9))
def test_stretching_is_the_overlap_of_intervals(row, n):
    """Each of n words gets what lies under its own stretch: one overlap at a time."""
    m = len(row)

    def targets(ids: Sequence[str]) -> AttentionMap:
        longest = max(m if one == "m" else n for one in ids)
        values = torch.zeros(len(ids), longest, dtype=torch.float64)
        there = torch.zeros(len(ids), longest, dtype=torch.bool)
        for at, one in enumerate(ids):
            if one == "m":
                values[at, :m] = torch.tensor(row, dtype=torch.float64)
            else:
                values[at, :n] = 1
            there[at, : m if one == "m" else n] = True
        return AttentionMap.from_cells(values, words(longest), there)

    found = placebo.swapped(targets, ["m", "n"], 0)(["n"]).weights.flatten().tolist()
    expected = [
        sum(
            value * max(0.0, min((i + 1) / n, (j + 1) / m) - max(i / n, j / m)) * m
            for j, value in enumerate(row)
        )
        for i in range(n)
    ]
    assert found == pytest.approx(expected, abs=1e-9)


def test_scattered_weights_are_as_sharp_as_the_target():
    real, fake = texts(IDS), placebo.scattered(texts, 0)(IDS)
    torch.testing.assert_close(entropy(fake), entropy(real), equal_nan=True)
    for at in range(len(IDS)):
        torch.testing.assert_close(
            fake.weights[at].flatten().sort().values, real.weights[at].flatten().sort().values
        )


def test_random_maps_are_even_on_average():
    """Exponential amounts normalised: every map alike likely, each key 1 / n on average."""
    many = [f"{n}" for n in range(2000)]

    def flat(ids: Sequence[str]) -> AttentionMap:
        return AttentionMap.from_cells(torch.full((len(ids), 4), 0.25), grid(2, 2))

    found = placebo.random_maps(flat, 0)(many).weights.flatten(1)
    torch.testing.assert_close(found.mean(dim=0), torch.full((4,), 0.25), atol=0.015, rtol=0)
    # the variance of a share of a flat Dirichlet of 4
    assert float(found.var(dim=0).mean()) == pytest.approx(3 / (16 * 5), rel=0.1)


def test_the_mass_of_amounts_is_kept():
    def heat(ids: Sequence[str]) -> AttentionMap:
        return AttentionMap.from_cells(torch.tensor([[3.0, 0, 1, 0]] * len(ids)), words(4))

    for fake in (placebo.scattered(heat, 0), placebo.random_maps(heat, 0), placebo.uniform(heat)):
        assert fake(["a"]).kind is Kind.AMOUNT
        assert float(fake(["a"]).weights.sum()) == pytest.approx(4.0)


def test_uniform_counts_the_words_there_are():
    found = placebo.uniform(texts)(["s0", "s3"])
    assert found.weights[0].flatten().tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])
    assert found.weights[1].flatten().tolist() == pytest.approx([0.2] * 5)


def test_the_models_own_map_is_taken_where_there_is_a_target():
    scores = torch.randn(2, 1, 2, 1, 6, requires_grad=True)
    look = AttentionMap.from_scores(scores, grid(2, 3))
    found = placebo.unmasked(pictures, lambda ids: look)(["s1", EMPTY])
    torch.testing.assert_close(found.weights[0], look.weights[0])
    assert not found.weights[1].any() and not found.weights.requires_grad


def test_nothing_supervises_nobody():
    from overt.supervise import mse

    attention = AttentionMap.from_scores(torch.randn(12, 1, 1, 1, 6), grid(2, 3))
    loss = mse(attention, placebo.nothing(pictures)(IDS))
    assert float(loss.total) == 0 and int(loss.count) == 0


def test_who_cannot_swap_is_told():
    with pytest.raises(ValueError, match="two samples or more, and there are 1"):
        placebo.swapped(pictures, ["s0"], 0)
    with pytest.raises(ValueError, match="'s9' has nobody to swap"):
        placebo.swapped(pictures, ["s0", "s1"], 0)(["s9"])

    def ragged(ids: Sequence[str]) -> AttentionMap:
        shape = (2, 3) if ids[0] == "s0" else (2, 2)
        return AttentionMap.from_cells(torch.ones(len(ids), shape[0] * shape[1]), grid(*shape))

    with pytest.raises(ValueError, match="over 4 and 6 cells cannot be swapped"):
        placebo.swapped(ragged, ["s0", "s1"], 0)(["s0"])
