import math

import pytest
import torch

from overt import measure
from overt.attention import AttentionMap, Kind, grid, words
from overt.measure.measured import Measure, measured, row, rows, shares

DECLARED = [
    found
    for found in (getattr(measure, name) for name in measure.__all__)
    if hasattr(found, "measure")
]
PAIRS = [
    measure.pointing_game,
    measure.mass_inside,
    measure.spearman,
    measure.kendall,
    measure.cc,
    measure.sim,
    measure.kl,
    measure.js,
    measure.moved,
    measure.iou,
    measure.mean_iou,
    measure.otsu_jaccard,
    measure.cut_out,
    measure.token_auprc,
]
SINGLE = [measure.entropy, measure.effective_support, measure.gini, measure.hoyer]


def test_the_decorator_sets_an_attribute_and_nothing_else():
    def plain(x):
        return x

    made = measured("height", "cells", None, low=0.0)(plain)
    assert made is plain
    assert made.measure == Measure("height", "cells", None, 0.0, math.inf)


@pytest.mark.parametrize("function", DECLARED, ids=lambda f: f.__name__)
def test_every_measure_says_what_its_numbers_mean(function):
    said = function.measure
    assert said.name and said.unit and said.low < said.high
    assert function.__doc__


def test_measures_are_told_by_their_names():
    assert len({f.measure.name for f in DECLARED}) == len(DECLARED) > 20
    assert set(PAIRS + SINGLE) <= set(DECLARED)


def random_pair(b: int, k: int, generator, ties: bool) -> tuple[AttentionMap, AttentionMap]:
    weights = torch.rand(2, b, k, generator=generator)
    if ties:
        weights = (weights * 3).round()
    seen = torch.rand(2, b, k, generator=generator) > 0.2
    weights[0, 0], weights[1, 1] = 0, 0  # one sample without attention, one without a truth
    seen[0, 2] = False  # and one that may see nothing
    first, second = (
        AttentionMap.from_cells(weights[side], words(k), seen[side]).normalize() for side in (0, 1)
    )
    return first, second


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_one_number_a_sample_in_the_declared_range(function, ties, generator):
    attention, truth = random_pair(40, 9, generator, ties)
    maps = (attention, truth) if function in PAIRS else (attention,)
    numbers = function(*maps)
    assert numbers.shape == (40,) and numbers.dtype is torch.float32
    without = [0, 1, 2] if function in PAIRS else [0, 2]
    assert numbers[without].isnan().all()
    defined = numbers[~numbers.isnan()]
    assert len(defined) > 25
    assert defined.min() >= function.measure.low and defined.max() <= function.measure.high

    order = torch.randperm(40, generator=generator)
    moved = function(*(one.select(order) for one in maps))
    assert torch.equal(moved.nan_to_num(-9), numbers[order].nan_to_num(-9)), "samples stand alone"


@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_hidden_keys_do_not_count(function, generator):
    """Padding a map with keys that nobody may see changes no number."""
    weights = torch.rand(2, 6, 5, generator=generator)
    junk = torch.rand(2, 6, 3, generator=generator)
    seen = torch.ones(6, 8, dtype=torch.bool)
    seen[:, 5:] = False
    short = [AttentionMap.from_cells(weights[side], words(5)) for side in (0, 1)]
    long = [
        AttentionMap.from_cells(torch.cat([weights[side], junk[side]], dim=1), words(8), seen)
        for side in (0, 1)
    ]
    count = 2 if function in PAIRS else 1
    torch.testing.assert_close(function(*long[:count]), function(*short[:count]))


@pytest.mark.parametrize(
    "function",
    [*PAIRS, *SINGLE, measure.token_f1, measure.iou_f1, measure.token_auc, measure.nss],
    ids=lambda f: f.__name__,
)
def test_a_map_that_is_not_a_number_has_no_number(function, generator):
    """A diverged model is not somewhat faithful: ranks of NaN were numbers like any other."""
    weights = torch.rand(2, 4, 9, generator=generator)
    weights[1] = (weights[1] > 0.5).float()
    weights[1, :, 0], weights[1, :, 1] = 1, 0
    whole = [AttentionMap.from_cells(side, grid(3, 3)) for side in weights]
    weights = weights.clone()
    weights[0, 1, 4], weights[1, 2] = torch.nan, torch.nan
    maps = [AttentionMap.from_cells(side, grid(3, 3)) for side in weights]
    count = 1 if function in SINGLE else 2
    found, expected = function(*maps[:count]), function(*whole[:count])
    assert found[1].isnan() and (count == 1 or found[2].isnan())
    kept = [0, 3] if count == 2 else [0, 2, 3]
    torch.testing.assert_close(found[kept], expected[kept])
    assert not expected.isnan().any()


@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_what_is_no_map_is_told_how_to_become_one(function, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    plain = torch.rand(2, 9)
    maps = (plain, plain) if function in PAIRS else (plain,)
    with pytest.raises(TypeError, match=r"takes an AttentionMap, .* Tensor; .*from_cells"):
        function(*maps)


@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_several_rows_a_sample_are_refused_with_the_remedy(function):
    many = AttentionMap(torch.rand(2, 3, 4, 1, 4), grid(2, 2), kind=Kind.AMOUNT)
    maps = (many, many) if function in PAIRS else (many,)
    with pytest.raises(ValueError, match=r"3 layers, 4 heads and 1 queries: take .*each_row\(\)"):
        function(*maps)
    spread = [one.each_row() for one in maps]
    assert function(*spread).shape == (24,)


def test_maps_of_other_sizes_do_not_compare():
    one = AttentionMap.from_cells(torch.ones(2, 4), grid(2, 2))
    two = AttentionMap.from_cells(torch.ones(2, 9), grid(3, 3))
    with pytest.raises(ValueError, match=r"2 samples and 4 keys .* 2 samples and 9 keys"):
        rows(one, two)


def test_signed_weights_have_no_shares():
    signed = AttentionMap(torch.randn(1, 1, 1, 1, 4), words(4), kind=Kind.SIGNED)
    weights, _ = row(signed)
    with pytest.raises(ValueError, match="no shares"):
        shares(weights, signed.kind)
