"""Random masks of grids and words: shapes, determinism, counts, errors."""

import hashlib
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from overt.geometry import TextGeometry
from overt.targets.surrogate.counter_rng import bernoulli, stream_keys
from overt.targets.surrogate.masks import (
    BinaryMaskCandidates,
    GridMasks,
    KeepWords,
    MaskCandidates,
    NoMask,
    RemoveWords,
    ShiftedGridMasks,
    combinations_at,
    unique_rows,
    upsample_grids,
)
from overt.targets.surrogate.removable import RemovablePositions, whole_words
from tests.targets.surrogate.toys import MaskRequest, image_request, text_request


def all_masks_of(candidates: MaskCandidates, row: int) -> torch.Tensor:
    """Return all masks of one sample."""
    numbers = torch.arange(int(candidates.counts[row]))
    return candidates.take(torch.full_like(numbers, row), numbers)


def slow_upsample(cells: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Upsample bilinearly without aligned corners, pixel by pixel."""
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


@pytest.mark.parametrize("make", [GridMasks, ShiftedGridMasks])
@pytest.mark.parametrize("shape", [(14, 14), (8, 8), (5, 9)])
def test_t_ssa_2_masks_have_the_grid_shape_and_values_in_0_1(make, shape):
    asked = image_request(2, shape)
    for row in range(2):
        found = all_masks_of(make(count=40, scale=2)(asked), row)
        assert found.shape[1] == shape[0] * shape[1]
        assert found.min() >= 0 and found.max() <= 1
        assert (found[0] == 1).all()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_t_ssa_2_constant_grids_stay_exactly_constant(rows, columns, height, width):
    assert (upsample_grids(torch.ones(1, rows, columns), (height, width)) == 1).all()
    assert (upsample_grids(torch.zeros(1, rows, columns), (height, width)) == 0).all()


@pytest.mark.parametrize("make", [GridMasks, ShiftedGridMasks])
def test_t_ssa_2_keep_1_keeps_all_cells_and_keep_0_none(make):
    kept = make(count=300, scale=6, keep=1.0)(image_request(1, (14, 14)))
    assert kept.counts.tolist() == [1]
    nothing = all_masks_of(make(count=300, scale=6, keep=0.0)(image_request(1, (14, 14))), 0)
    assert (nothing[1:] == 0).all()


def test_upsampling_agrees_with_the_slow_reference(generator):
    cells = (torch.rand(3, 3, 4, generator=generator) < 0.5).float()
    found = upsample_grids(cells, (14, 11))
    for one, grid in zip(found, cells, strict=True):
        torch.testing.assert_close(
            one.double(), torch.from_numpy(slow_upsample(grid.numpy(), (14, 11)))
        )


def test_upsampling_agrees_with_torch(generator):
    cells = (torch.rand(50, 3, 5, generator=generator) < 0.5).float()
    theirs = interpolate(cells[:, None], size=(14, 9), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(upsample_grids(cells, (14, 9)), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("shape", "scale", "side"),
    [((14, 14), 6, (3, 3)), ((8, 8), 2, (4, 4)), ((7, 7), 6, (2, 2)), ((4, 9), 3, (2, 3))],
)
def test_grid_side_is_the_image_side_over_the_scale_rounded_up(shape, scale, side):
    found = GridMasks(count=50, scale=scale)(image_request(1, shape))
    assert isinstance(found, BinaryMaskCandidates)
    assert found.sizes.tolist() == [side[0] * side[1]]


def test_grid_size_can_be_given():
    assert GridMasks(grid=(6, 6))(image_request(1, (14, 14))).sizes.tolist() == [36]


def test_few_grids_are_enumerated():
    found = GridMasks(count=16, grid=(2, 2), seed=3)(image_request(3))
    assert found.counts.tolist() == [16] * 3
    bits = found.bits(torch.zeros(16, dtype=torch.long), torch.arange(16))
    assert bits[0].all() and len(bits.unique(dim=0)) == 16
    assert GridMasks(count=15, grid=(2, 2))(image_request(1)).counts.max() <= 16


def test_masks_are_distinct():
    for make in (GridMasks, ShiftedGridMasks):
        found = make(count=500, scale=6)(image_request(4, (14, 14)))
        for row in range(4):
            masks = all_masks_of(found, row)
            if make is GridMasks:
                assert len(masks.unique(dim=0)) == len(masks)
            assert (masks[1:] != 1).any(dim=1).all()


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 30), st.sampled_from([3, 70]))
@settings(max_examples=40)
def test_unique_rows_keeps_the_order(seed, samples, rows, cells):
    drawn = np.random.default_rng(seed).random((samples, rows, cells)) < (
        0.5 if cells < 9 else 0.01
    )
    found, counts = unique_rows(drawn)
    for before, after, count in zip(drawn, found, counts, strict=True):
        expected = list(dict.fromkeys(map(bytes, before)))
        assert [bytes(one) for one in after[:count]] == expected


@pytest.mark.parametrize(
    ("side", "draws", "distinct"), [(2, 500, 16.0), (3, 500, 319.4), (3, 1000, 439.5)]
)
def test_t_ssa_11_expected_distinct_grids(side, draws, distinct):
    """512 (1 - (1 - 1/512)^m) for 3 x 3; the grid of ones adds at most one mask."""
    cells = side * side
    assert 2**cells * (1 - (1 - 2**-cells) ** draws) == pytest.approx(distinct, abs=0.05)
    keys = stream_keys([str(number) for number in range(400)], 0)
    drawn = bernoulli(keys, draws * cells, 0.5).reshape(400, draws, cells)
    assert unique_rows(drawn)[1].mean() == pytest.approx(distinct, abs=1.0)


def test_masks_of_a_sample_do_not_depend_on_batch_or_order():
    asked = image_request(6)
    back = MaskRequest(asked.ids[::-1], asked.positions)
    alone = MaskRequest(
        asked.ids[2:3], {"image": RemovablePositions((8, 8), asked.positions["image"].present[:1])}
    )
    for masks in (GridMasks(60, scale=2), ShiftedGridMasks(60, scale=2)):
        whole, turned, one = masks(asked), masks(back), masks(alone)
        assert torch.equal(all_masks_of(whole, 2), all_masks_of(turned, 3))
        assert torch.equal(all_masks_of(whole, 2), all_masks_of(one, 0))
        assert not torch.equal(all_masks_of(whole, 1), all_masks_of(whole, 2))


def test_seed_changes_the_masks():
    asked = image_request(1)
    assert not torch.equal(
        all_masks_of(GridMasks(60, 2)(asked), 0), all_masks_of(GridMasks(60, 2, seed=1)(asked), 0)
    )


def test_smaller_counts_are_prefixes_of_larger_ones():
    """So best-of-500 is never below best-of-100 of the same sample."""
    few, many = (GridMasks(count, scale=2)(image_request(1)) for count in (100, 500))
    assert torch.equal(all_masks_of(few, 0), all_masks_of(many, 0)[: int(few.counts[0])])


def test_shifted_masks_are_windows_of_a_larger_one():
    found = ShiftedGridMasks(count=200, grid=(3, 3))(image_request(1, (14, 14)))
    masks = all_masks_of(found, 0)
    step = 5  # ceil(14 / 3)
    for number in range(1, len(masks)):
        large = upsample_grids(found.grids[0, number].reshape(1, 3, 3), (20, 20))[0]
        down, right = found.shifts[0, number].tolist()
        assert 0 <= down < step and 0 <= right < step
        window = large[down : down + 14, right : right + 14].flatten()
        assert torch.equal(masks[number], window)
    assert len(found.shifts[0].unique(dim=0)) == step * step


@pytest.mark.parametrize("options", [{"count": 0}, {"keep": 1.5}, {"scale": 0}, {"grid": (0, 2)}])
@pytest.mark.parametrize("make", [GridMasks, ShiftedGridMasks])
def test_invalid_grid_options_raise(make, options):
    with pytest.raises(ValueError, match="at least 1"):
        make(**options)


def test_grids_need_rows_and_columns():
    with pytest.raises(ValueError, match="rows and columns"):
        GridMasks(name="text")(text_request(3))
    with pytest.raises(ValueError, match=r"'text'"):
        GridMasks()(text_request(3))


# --- words


@pytest.mark.parametrize(("words", "candidates"), [(1, 1), (2, 2), (10, 46), (38, 704)])
def test_t_ssa_3_number_of_word_pairs(words, candidates):
    assert RemoveWords()(text_request(words)).counts.tolist() == [candidates]


def test_each_word_pair_is_removed_once_and_padding_never():
    found = RemoveWords()(text_request(4, 6, 1))
    for row, length in enumerate((4, 6, 1)):
        masks = all_masks_of(found, row)
        assert (masks[0] == 1).all() and (masks[:, length:] == 1).all()
        removed = {tuple((one == 0).nonzero()[:, 0].tolist()) for one in masks[1:]}
        assert removed == set(combinations(range(length), 2))
        assert len(masks) == comb(length, 2) + 1


def test_single_words_come_before_pairs():
    found = all_masks_of(RemoveWords((1, 2))(text_request(4)), 0)
    assert (found == 0).sum(dim=1).tolist() == [0] + [1] * 4 + [2] * 6


def test_keep_words_keeps_two_words():
    found = KeepWords()(text_request(5, 2))
    masks = all_masks_of(found, 0)
    assert (masks[0] == 1).all()
    kept = {tuple(one.nonzero()[:, 0].tolist()) for one in masks[1:]}
    assert kept == set(combinations(range(5), 2))
    other = all_masks_of(found, 1)
    assert other.shape == (2, 5) and (other == 1).all()  # padding stays


def test_count_bounds_the_masks_of_a_long_text():
    asked = text_request(60, 5)
    found = RemoveWords(count=100)(asked)
    assert found.counts.tolist() == [101, 11]
    masks = all_masks_of(found, 0)
    assert len(masks.unique(dim=0)) == 101 and ((masks == 0).sum(dim=1)[1:] == 2).all()
    again = RemoveWords(count=100)(
        MaskRequest(
            asked.ids[:1], {"text": RemovablePositions((60,), torch.ones(1, 60, dtype=torch.bool))}
        )
    )
    assert torch.equal(all_masks_of(again, 0), masks)
    other = RemoveWords(count=100, seed=1)(asked)
    assert not torch.equal(all_masks_of(other, 0), masks)


@given(st.integers(0, 12), st.integers(1, 4))
def test_combinations_at_enumerates_all_combinations(words, size):
    total = comb(words, size)
    found = combinations_at(words, size, np.arange(total))
    assert {tuple(one) for one in found.tolist()} == set(combinations(range(words), size))
    assert (np.diff(found, axis=1) > 0).all()


def test_subwords_are_removed_together():
    spans = torch.tensor([[[0, 2], [2, 4], [5, 6], [7, 8]]])
    places = RemovablePositions(
        (4,), torch.ones(1, 4, dtype=torch.bool), TextGeometry(("abcd e f",), spans)
    )
    found = all_masks_of(RemoveWords(units=whole_words)(MaskRequest(("a",), {"text": places})), 0)
    removed = {tuple((one == 0).nonzero()[:, 0].tolist()) for one in found[1:]}
    assert removed == {(0, 1, 2), (0, 1, 3), (2, 3)}


@pytest.mark.parametrize(
    "options", [{"sizes": ()}, {"sizes": (0,)}, {"sizes": (2, 2)}, {"count": 0}]
)
@pytest.mark.parametrize("make", [RemoveWords, KeepWords])
def test_invalid_word_options_raise(make, options):
    with pytest.raises(ValueError, match="(count|sizes) .*got"):
        make(**options)


def test_too_many_combinations_raise():
    with pytest.raises(ValueError, match=r"2\^62"):
        RemoveWords((40,))(text_request(200))


@pytest.mark.parametrize(
    ("masks", "about"),
    [
        (GridMasks(40, grid=(3, 3)), image_request(2)),
        (RemoveWords(), text_request(4, 3)),
        (KeepWords(), text_request(4, 3)),
    ],
    ids=["grids", "remove words", "keep words"],
)
def test_masks_drawn_from_bits_equal_masks_by_number(masks, about):
    candidates = masks(about)
    assert isinstance(candidates, BinaryMaskCandidates)
    rows = torch.tensor([0, 1, 1, 0])
    numbers = torch.tensor([0, 1, 2, 2])
    bits = candidates.bits(rows, numbers)
    torch.testing.assert_close(
        candidates.draw(rows, bits), candidates.take(rows, numbers), rtol=0, atol=0
    )
    elsewhere = candidates.draw(rows, bits.to("meta"))
    assert elsewhere.device.type == "meta", "masks are drawn on the device of the bits"
    assert elsewhere.shape == candidates.take(rows, numbers).shape


def test_no_mask_removes_nothing():
    found = NoMask()(image_request(2))
    assert found.counts.tolist() == [1, 1] and (all_masks_of(found, 1) == 1).all()


@pytest.mark.parametrize(
    ("masks", "digest"),
    [
        (RemoveWords(sizes=(2, 3), count=4), "7d7cf217f6eae495"),
        (KeepWords(sizes=(2, 3), count=4), "0102e7140dd22a06"),
        (GridMasks(5, scale=2), "f1fe4ae82562c98e"),
        (ShiftedGridMasks(5, scale=2), "61a5f5194f66e4b4"),
    ],
    ids=["WithoutWords", "OnlyWords", "Grids", "ShiftedGrids"],
)
def test_random_streams_are_frozen(masks, digest):
    """Committed results were made with these masks (digests of the commit before the rename)."""
    asked = text_request(9, 12) if isinstance(masks, RemoveWords | KeepWords) else image_request(2)
    candidates = masks(asked)
    each = [all_masks_of(candidates, row) for row in range(2)]
    found = hashlib.sha256(b"".join(one.float().numpy().tobytes() for one in each)).hexdigest()
    assert found[:16] == digest
