"""Placebo targets: the content is replaced, all other properties are kept."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from overt.attention import AttentionMap, Kind, grid, words
from overt.metrics import entropy
from overt.targets import placebos
from overt.targets.sources import Targets

IDS = [f"s{n}" for n in range(12)]
LENGTHS = {one: 2 + at % 5 for at, one in enumerate(IDS)}
EMPTY = "s7"  # has no target


def target_row(one: str) -> torch.Tensor:
    n = LENGTHS[one]
    generator = torch.Generator().manual_seed(int(one[1:]))
    row = torch.rand(n, generator=generator, dtype=torch.float64).pow(3)
    return row / row.sum() * (one != EMPTY)


def text_targets(ids: Sequence[str]) -> AttentionMap:
    """Make targets over words; each batch is as long as its longest text."""
    longest = max(LENGTHS[one] for one in ids)
    values = torch.zeros(len(ids), longest, dtype=torch.float64)
    for at, one in enumerate(ids):
        values[at, : LENGTHS[one]] = target_row(one)
    there = torch.arange(longest) < torch.tensor([LENGTHS[one] for one in ids])[:, None]
    return AttentionMap.from_cells(values, words(longest), there).normalize()


def image_targets(ids: Sequence[str]) -> AttentionMap:
    values = torch.zeros(len(ids), 6, dtype=torch.float64)
    for at, one in enumerate(ids):
        generator = torch.Generator().manual_seed(int(one[1:]))
        values[at] = torch.rand(6, generator=generator, dtype=torch.float64) * (one != EMPTY)
    return AttentionMap.from_cells(values, grid(2, 3)).normalize()


CLASSES = {one: "ab"[at % 2] for at, one in enumerate(IDS)}


def all_placebos(targets: Targets, seed: int = 0) -> dict[str, Targets]:
    return {
        "swapped": placebos.swapped_targets(targets, IDS, seed),
        "swapped_within": placebos.swapped_within_class(targets, CLASSES, seed),
        "scattered": placebos.permuted_keys(targets, seed),
        "random_maps": placebos.random_targets(targets, seed),
        "uniform": placebos.uniform_targets(targets),
        "unmasked": placebos.own_attention(targets, placebos.random_targets(targets, 99)),
    }


@pytest.mark.parametrize("targets", [text_targets, image_targets])
@pytest.mark.parametrize("name", all_placebos(text_targets))
def test_placebo_of_a_sample_does_not_depend_on_batch_or_order(targets, name):
    fake = all_placebos(targets)[name]
    whole = fake(IDS)
    for at, one in enumerate(IDS):
        alone = fake([one])
        n = len(alone.keys)
        torch.testing.assert_close(whole.weights[at, ..., :n], alone.weights[0])
        assert not whole.weights[at, ..., n:].any()
    turned = fake(IDS[::-1])
    torch.testing.assert_close(turned.weights, whole.weights.flip(0))


@pytest.mark.parametrize("targets", [text_targets, image_targets])
@pytest.mark.parametrize("name", all_placebos(text_targets))
def test_placebos_keep_supervised_rows_and_are_distributions(targets, name):
    real, fake = targets(IDS), all_placebos(targets)[name](IDS)
    fake.check()
    assert fake.kind is Kind.PROBABILITY and fake.values.shape == real.values.shape
    sums = fake.weights.sum(dim=-1).flatten()
    empty = {EMPTY}
    if name.startswith("swapped"):  # the sample that got the empty target has none either
        assert int((sums == 0).sum()) in (1, 2)
        empty |= {one for one, value in zip(IDS, sums, strict=True) if value == 0}
    for one, value in zip(IDS, sums, strict=True):
        assert float(value) == pytest.approx(0.0 if one in empty else 1.0)
    alike = [torch.allclose(one, two) for one, two in zip(fake.weights, real.weights, strict=True)]
    same = sum(alike[at] for at, one in enumerate(IDS) if one not in empty)
    assert same <= (3 if name == "scattered" else 0)  # two words often keep their positions


@pytest.mark.parametrize("name", ["swapped", "swapped_within", "scattered", "random_maps"])
def test_seed_changes_the_placebo(name):
    one, other = (all_placebos(image_targets, seed)[name](IDS).weights for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(one, all_placebos(image_targets, 0)[name](IDS).weights)


def test_swapped_image_targets_come_from_other_samples_once_each():
    real, fake = (
        image_targets(IDS).weights.flatten(1),
        placebos.swapped_targets(image_targets, IDS, 3)(IDS),
    )
    same = (fake.weights.flatten(1)[:, None] - real[None]).abs().amax(dim=-1) < 1e-12
    got = {IDS[at]: IDS[int(row.int().argmax())] for at, row in enumerate(same) if row.any()}
    assert all(one != other for one, other in got.items() if one != EMPTY)
    supervised = [other for one, other in got.items() if one != EMPTY and other != EMPTY]
    assert len(set(supervised)) == len(supervised) >= 9


def test_swapped_within_class_keeps_the_class():
    fake = placebos.swapped_within_class(image_targets, CLASSES, 5)(IDS).weights.flatten(1)
    real = image_targets(IDS).weights.flatten(1)
    for at, one in enumerate(IDS):
        if fake[at].any():
            other = IDS[int((fake[at] - real).abs().amax(dim=-1).argmin())]
            assert other != one and CLASSES[other] == CLASSES[one]


def test_samples_alone_in_their_class_swap_with_other_samples():
    classes = dict.fromkeys(IDS, "rest") | {"s0": "x", "s1": "y"}
    fake = placebos.swapped_within_class(image_targets, classes, 0)(["s0", "s1"]).weights
    torch.testing.assert_close(fake, image_targets(["s1", "s0"]).weights)
    classes = {one: "rest" for one in IDS if one != EMPTY} | {"s0": "x"}
    lonely = placebos.swapped_within_class(image_targets, classes, 0)(["s0"]).weights
    others = image_targets([one for one in classes if one != "s0"]).weights
    assert ((lonely - others).abs().amax(dim=-1) < 1e-12).sum() == 1


def test_swapped_text_targets_are_stretched_to_the_new_length():
    """Two words to four: each weight is halved; four to two: weights are added."""
    table = {"two": [0.75, 0.25], "four": [0.1, 0.2, 0.3, 0.4]}

    def targets(ids: Sequence[str]) -> AttentionMap:
        longest = max(len(table[one]) for one in ids)
        rows = [table[one] + [0.0] * (longest - len(table[one])) for one in ids]
        there = [[at < len(table[one]) for at in range(longest)] for one in ids]
        return AttentionMap.from_cells(torch.tensor(rows), words(longest), torch.tensor(there))

    fake = placebos.swapped_targets(targets, ["two", "four"], 0)
    assert fake(["four"]).weights.flatten().tolist() == pytest.approx([0.375, 0.375, 0.125, 0.125])
    assert fake(["two"]).weights.flatten().tolist() == pytest.approx([0.3, 0.7])
    both = fake(["two", "four"]).weights[:, 0, 0, 0]
    assert both[0].tolist() == pytest.approx([0.3, 0.7, 0, 0])


@given(some.lists(some.floats(0.01, 1.0), min_size=1, max_size=9), some.integers(1, 9))
def test_stretching_follows_the_overlap_of_intervals(row, n):
    """Each of n words gets the mass under its interval, one overlap at a time."""
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

    found = placebos.swapped_targets(targets, ["m", "n"], 0)(["n"]).weights.flatten().tolist()
    expected = [
        sum(
            value * max(0.0, min((i + 1) / n, (j + 1) / m) - max(i / n, j / m)) * m
            for j, value in enumerate(row)
        )
        for i in range(n)
    ]
    assert found == pytest.approx(expected, abs=1e-9)


def test_permuted_keys_keep_the_entropy_and_values():
    real, fake = text_targets(IDS), placebos.permuted_keys(text_targets, 0)(IDS)
    torch.testing.assert_close(entropy(fake), entropy(real), equal_nan=True)
    for at in range(len(IDS)):
        torch.testing.assert_close(
            fake.weights[at].flatten().sort().values, real.weights[at].flatten().sort().values
        )


def test_random_targets_are_uniform_on_average():
    """Normalised exponentials are a flat Dirichlet; each key has 1 / n on average."""
    many = [f"{n}" for n in range(2000)]

    def flat(ids: Sequence[str]) -> AttentionMap:
        return AttentionMap.from_cells(torch.full((len(ids), 4), 0.25), grid(2, 2))

    found = placebos.random_targets(flat, 0)(many).weights.flatten(1)
    torch.testing.assert_close(found.mean(dim=0), torch.full((4,), 0.25), atol=0.015, rtol=0)
    # the variance of a share of a flat Dirichlet of 4
    assert float(found.var(dim=0).mean()) == pytest.approx(3 / (16 * 5), rel=0.1)


def test_placebos_keep_the_mass_of_amounts():
    def heat(ids: Sequence[str]) -> AttentionMap:
        return AttentionMap.from_cells(torch.tensor([[3.0, 0, 1, 0]] * len(ids)), words(4))

    for fake in (
        placebos.permuted_keys(heat, 0),
        placebos.random_targets(heat, 0),
        placebos.uniform_targets(heat),
    ):
        assert fake(["a"]).kind is Kind.AMOUNT
        assert float(fake(["a"]).weights.sum()) == pytest.approx(4.0)


def test_uniform_targets_cover_the_words_of_each_text():
    found = placebos.uniform_targets(text_targets)(["s0", "s3"])
    assert found.weights[0].flatten().tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])
    assert found.weights[1].flatten().tolist() == pytest.approx([0.2] * 5)


def test_own_attention_is_used_where_there_is_a_target():
    scores = torch.randn(2, 1, 2, 1, 6, requires_grad=True)
    look = AttentionMap.from_scores(scores, grid(2, 3))
    found = placebos.own_attention(image_targets, lambda ids: look)(["s1", EMPTY])
    torch.testing.assert_close(found.weights[0], look.weights[0])
    assert not found.weights[1].any() and not found.weights.requires_grad


def test_no_targets_give_zero_loss():
    from overt.losses import mse

    attention = AttentionMap.from_scores(torch.randn(12, 1, 1, 1, 6), grid(2, 3))
    loss = mse(attention, placebos.no_targets(image_targets)(IDS))
    assert float(loss.total) == 0 and int(loss.count) == 0


def test_impossible_swaps_raise():
    with pytest.raises(ValueError, match="two samples.* 1"):
        placebos.swapped_targets(image_targets, ["s0"], 0)
    with pytest.raises(ValueError, match="'s9'"):
        placebos.swapped_targets(image_targets, ["s0", "s1"], 0)(["s9"])

    def ragged(ids: Sequence[str]) -> AttentionMap:
        shape = (2, 3) if ids[0] == "s0" else (2, 2)
        return AttentionMap.from_cells(torch.ones(len(ids), shape[0] * shape[1]), grid(*shape))

    with pytest.raises(ValueError, match="4 and 6 cells"):
        placebos.swapped_targets(ragged, ["s0", "s1"], 0)(["s0"])


def test_placebos_of_large_counts_in_16_bits_are_finite():
    """A sum of weights beyond 65,504 is infinite in float16, a mean of them is not."""
    counts = torch.full((1, 16), 3e4, dtype=torch.float16)
    target = AttentionMap.from_cells(counts, grid(4, 4))
    even = placebos.uniform_targets(lambda ids: target)(["a"]).weights
    assert torch.equal(even.flatten(), counts[0])
    drawn = placebos.random_targets(lambda ids: AttentionMap.from_cells(counts / 8, grid(4, 4)), 0)
    weights = drawn(["a"]).weights
    assert weights.dtype is torch.float16 and weights.isfinite().all()
    assert float(weights.float().sum()) == pytest.approx(16 * 3e4 / 8, rel=1e-2)
