from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from overt.geometry import TextGeometry
from overt.supervise.surrogate.draws import chances, keys_of
from overt.supervise.surrogate.masks import (
    Bits,
    Candidates,
    Grids,
    OnlyWords,
    ShiftedGrids,
    Whole,
    WithoutWords,
    choose,
    enlarge,
    without_repeats,
)
from overt.supervise.surrogate.places import Places, whole_words
from tests.supervise.surrogate.toys import About, pictures, texts


def taken(candidates: Candidates, row: int) -> torch.Tensor:
    """All masks of one sample."""
    numbers = torch.arange(int(candidates.counts[row]))
    return candidates.take(torch.full_like(numbers, row), numbers)


def slow_enlarge(cells: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Bilinear, corners not aligned, pixel by pixel."""
    found = np.zeros(shape)
    for y in range(shape[0]):
        for x in range(shape[1]):
            total = 0.0
            for row in range(cells.shape[0]):
                for column in range(cells.shape[1]):
                    at_y = min(
                        max((y + 0.5) * cells.shape[0] / shape[0] - 0.5, 0), cells.shape[0] - 1
                    )
                    at_x = min(
                        max((x + 0.5) * cells.shape[1] / shape[1] - 0.5, 0), cells.shape[1] - 1
                    )
                    near = max(0.0, 1 - abs(at_y - row)) * max(0.0, 1 - abs(at_x - column))
                    total += near * cells[row, column]
            found[y, x] = total
    return found


# --- grids


@pytest.mark.parametrize("make", [Grids, ShiftedGrids])
@pytest.mark.parametrize("shape", [(14, 14), (8, 8), (5, 9)])
def test_t_ssa_2_masks_have_the_shape_and_lie_between_0_and_1(make, shape):
    asked = pictures(2, shape)
    for row in range(2):
        found = taken(make(count=40, scale=2)(asked), row)
        assert found.shape[1] == shape[0] * shape[1]
        assert found.min() >= 0 and found.max() <= 1
        assert (found[0] == 1).all()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_t_ssa_2_ones_become_exactly_ones(rows, columns, height, width):
    assert (enlarge(torch.ones(1, rows, columns), (height, width)) == 1).all()
    assert (enlarge(torch.zeros(1, rows, columns), (height, width)) == 0).all()


@pytest.mark.parametrize("make", [Grids, ShiftedGrids])
def test_t_ssa_2_keep_1_keeps_all_and_keep_0_keeps_nothing(make):
    kept = make(count=300, scale=6, keep=1.0)(pictures(1, (14, 14)))
    assert kept.counts.tolist() == [1]
    nothing = taken(make(count=300, scale=6, keep=0.0)(pictures(1, (14, 14))), 0)
    assert (nothing[1:] == 0).all()


def test_enlarging_agrees_with_the_slow_copy(generator):
    cells = (torch.rand(3, 3, 4, generator=generator) < 0.5).float()
    found = enlarge(cells, (14, 11))
    for one, grid in zip(found, cells, strict=True):
        torch.testing.assert_close(
            one.double(), torch.from_numpy(slow_enlarge(grid.numpy(), (14, 11)))
        )


def test_enlarging_agrees_with_torch(generator):
    cells = (torch.rand(50, 3, 5, generator=generator) < 0.5).float()
    theirs = interpolate(cells[:, None], size=(14, 9), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(enlarge(cells, (14, 9)), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("shape", "scale", "side"),
    [((14, 14), 6, (3, 3)), ((8, 8), 2, (4, 4)), ((7, 7), 6, (2, 2)), ((4, 9), 3, (2, 3))],
)
def test_the_grid_is_the_side_over_the_scale_rounded_up(shape, scale, side):
    found = Grids(count=50, scale=scale)(pictures(1, shape))
    assert isinstance(found, Bits)
    assert found.sizes.tolist() == [side[0] * side[1]]


def test_the_grid_can_be_said():
    assert Grids(grid=(6, 6))(pictures(1, (14, 14))).sizes.tolist() == [36]


def test_few_grids_are_all_taken():
    found = Grids(count=16, grid=(2, 2), seed=3)(pictures(3))
    assert found.counts.tolist() == [16] * 3
    bits = found.bits(torch.zeros(16, dtype=torch.long), torch.arange(16))
    assert bits[0].all() and len(bits.unique(dim=0)) == 16
    assert Grids(count=15, grid=(2, 2))(pictures(1)).counts.max() <= 16


def test_no_mask_is_asked_twice():
    for make in (Grids, ShiftedGrids):
        found = make(count=500, scale=6)(pictures(4, (14, 14)))
        for row in range(4):
            masks = taken(found, row)
            if make is Grids:
                assert len(masks.unique(dim=0)) == len(masks)
            assert (masks[1:] != 1).any(dim=1).all()


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 30), st.sampled_from([3, 70]))
@settings(max_examples=40)
def test_repeats_go_and_the_order_stays(seed, samples, rows, cells):
    drawn = np.random.default_rng(seed).random((samples, rows, cells)) < (
        0.5 if cells < 9 else 0.01
    )
    found, counts = without_repeats(drawn)
    for before, after, count in zip(drawn, found, counts, strict=True):
        expected = list(dict.fromkeys(map(bytes, before)))
        assert [bytes(one) for one in after[:count]] == expected


@pytest.mark.parametrize(
    ("side", "draws", "distinct"), [(2, 500, 16.0), (3, 500, 319.4), (3, 1000, 439.5)]
)
def test_t_ssa_11_expected_distinct_grids(side, draws, distinct):
    """512 (1 - (1 - 1/512)^m) of 3 x 3; with the grid of ones there is one mask more at most."""
    cells = side * side
    assert 2**cells * (1 - (1 - 2**-cells) ** draws) == pytest.approx(distinct, abs=0.05)
    keys = keys_of([str(number) for number in range(400)], 0)
    drawn = chances(keys, draws * cells, 0.5).reshape(400, draws, cells)
    assert without_repeats(drawn)[1].mean() == pytest.approx(distinct, abs=1.0)


def test_neither_batch_nor_order_changes_a_samples_masks():
    asked = pictures(6)
    back = About(asked.ids[::-1], asked.places)
    alone = About(asked.ids[2:3], {"image": Places((8, 8), asked.places["image"].present[:1])})
    for masks in (Grids(60, scale=2), ShiftedGrids(60, scale=2)):
        whole, turned, one = masks(asked), masks(back), masks(alone)
        assert torch.equal(taken(whole, 2), taken(turned, 3))
        assert torch.equal(taken(whole, 2), taken(one, 0))
        assert not torch.equal(taken(whole, 1), taken(whole, 2))


def test_another_seed_gives_other_masks():
    asked = pictures(1)
    assert not torch.equal(taken(Grids(60, 2)(asked), 0), taken(Grids(60, 2, seed=1)(asked), 0))


def test_more_masks_begin_with_those_of_fewer():
    """So that best-of-500 is never below best-of-100 of the same sample."""
    few, many = (Grids(count, scale=2)(pictures(1)) for count in (100, 500))
    assert torch.equal(taken(few, 0), taken(many, 0)[: int(few.counts[0])])


def test_shifted_masks_are_windows_of_a_larger_one():
    found = ShiftedGrids(count=200, grid=(3, 3))(pictures(1, (14, 14)))
    masks = taken(found, 0)
    step = 5  # ceil(14 / 3)
    for number in range(1, len(masks)):
        large = enlarge(found.grids[0, number].reshape(1, 3, 3), (20, 20))[0]
        down, right = found.shifts[0, number].tolist()
        assert 0 <= down < step and 0 <= right < step
        window = large[down : down + 14, right : right + 14].flatten()
        assert torch.equal(masks[number], window)
    assert len(found.shifts[0].unique(dim=0)) == step * step


@pytest.mark.parametrize("options", [{"count": 0}, {"keep": 1.5}, {"scale": 0}, {"grid": (0, 2)}])
@pytest.mark.parametrize("make", [Grids, ShiftedGrids])
def test_senseless_grids_are_refused(make, options):
    with pytest.raises(ValueError, match="at least 1"):
        make(**options)


def test_grids_need_rows_and_columns():
    with pytest.raises(ValueError, match="rows and columns"):
        Grids(name="text")(texts(3))
    with pytest.raises(ValueError, match=r"asked about \['text'\]"):
        Grids()(texts(3))


# --- words


@pytest.mark.parametrize(("words", "candidates"), [(1, 1), (2, 2), (10, 46), (38, 704)])
def test_t_ssa_3_the_number_of_pairs(words, candidates):
    assert WithoutWords()(texts(words)).counts.tolist() == [candidates]


def test_every_pair_is_removed_once_and_padding_never():
    found = WithoutWords()(texts(4, 6, 1))
    for row, length in enumerate((4, 6, 1)):
        masks = taken(found, row)
        assert (masks[0] == 1).all() and (masks[:, length:] == 1).all()
        removed = {tuple((one == 0).nonzero()[:, 0].tolist()) for one in masks[1:]}
        assert removed == set(combinations(range(length), 2))
        assert len(masks) == comb(length, 2) + 1


def test_single_words_come_before_pairs():
    found = taken(WithoutWords((1, 2))(texts(4)), 0)
    assert (found == 0).sum(dim=1).tolist() == [0] + [1] * 4 + [2] * 6


def test_all_but_two_words_are_removed():
    found = OnlyWords()(texts(5, 2))
    masks = taken(found, 0)
    assert (masks[0] == 1).all()
    kept = {tuple(one.nonzero()[:, 0].tolist()) for one in masks[1:]}
    assert kept == set(combinations(range(5), 2))
    other = taken(found, 1)
    assert other.shape == (2, 5) and (other == 1).all()  # padding stays


def test_a_long_text_has_a_budget():
    asked = texts(60, 5)
    found = WithoutWords(count=100)(asked)
    assert found.counts.tolist() == [101, 11]
    masks = taken(found, 0)
    assert len(masks.unique(dim=0)) == 101 and ((masks == 0).sum(dim=1)[1:] == 2).all()
    again = WithoutWords(count=100)(
        About(asked.ids[:1], {"text": Places((60,), torch.ones(1, 60, dtype=torch.bool))})
    )
    assert torch.equal(taken(again, 0), masks)
    other = WithoutWords(count=100, seed=1)(asked)
    assert not torch.equal(taken(other, 0), masks)


@given(st.integers(0, 12), st.integers(1, 4))
def test_choices_by_rank_are_all_choices(words, size):
    total = comb(words, size)
    found = choose(words, size, np.arange(total))
    assert {tuple(one) for one in found.tolist()} == set(combinations(range(words), size))
    assert (np.diff(found, axis=1) > 0).all()


def test_words_of_several_pieces_come_and_go_as_one():
    spans = torch.tensor([[[0, 2], [2, 4], [5, 6], [7, 8]]])
    places = Places((4,), torch.ones(1, 4, dtype=torch.bool), TextGeometry(("abcd e f",), spans))
    found = taken(WithoutWords(units=whole_words)(About(("a",), {"text": places})), 0)
    removed = {tuple((one == 0).nonzero()[:, 0].tolist()) for one in found[1:]}
    assert removed == {(0, 1, 2), (0, 1, 3), (2, 3)}


@pytest.mark.parametrize(
    "options", [{"sizes": ()}, {"sizes": (0,)}, {"sizes": (2, 2)}, {"count": 0}]
)
@pytest.mark.parametrize("make", [WithoutWords, OnlyWords])
def test_senseless_choices_are_refused(make, options):
    with pytest.raises(ValueError, match="sizes are different numbers"):
        make(**options)


def test_too_many_choices_are_refused():
    with pytest.raises(ValueError, match=r"2\^62"):
        WithoutWords((40,))(texts(200))


@pytest.mark.parametrize(
    ("masks", "about"),
    [
        (Grids(40, grid=(3, 3)), pictures(2)),
        (WithoutWords(), texts(4, 3)),
        (OnlyWords(), texts(4, 3)),
    ],
    ids=["grids", "without words", "only words"],
)
def test_bits_are_drawn_where_they_are_into_the_masks_of_their_numbers(masks, about):
    candidates = masks(about)
    assert isinstance(candidates, Bits)
    rows = torch.tensor([0, 1, 1, 0])
    numbers = torch.tensor([0, 1, 2, 2])
    bits = candidates.bits(rows, numbers)
    torch.testing.assert_close(
        candidates.draw(rows, bits), candidates.take(rows, numbers), rtol=0, atol=0
    )
    elsewhere = candidates.draw(rows, bits.to("meta"))
    assert elsewhere.device.type == "meta", "a card draws its masks itself"
    assert elsewhere.shape == candidates.take(rows, numbers).shape


def test_nothing_is_removed_from_the_whole():
    found = Whole()(pictures(2))
    assert found.counts.tolist() == [1, 1] and (taken(found, 1) == 1).all()
