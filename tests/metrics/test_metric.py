"""Declared metrics: their information, output, hidden keys and invalid input."""

import math

import pytest
import torch

from overt import metrics
from overt.attention import AttentionMap, Kind, grid, words
from overt.metrics.concentration import effective_support, hoyer
from overt.metrics.localization import iou, localization_accuracy
from overt.metrics.metric import (
    MetricInfo,
    declare_metric,
    paired_rows,
    single_row,
    to_distribution,
)
from overt.metrics.query_swap import total_variation
from tests.metrics.declared_metrics import DOCS, FUNCTIONS, metric_table

DECLARED = list(FUNCTIONS.values())
PAIRS = [
    metrics.pointing_game,
    metrics.mass_inside,
    metrics.spearman,
    metrics.kendall,
    metrics.cc,
    metrics.sim,
    metrics.kl,
    metrics.js,
    total_variation,
    iou,
    metrics.mean_iou,
    metrics.otsu_jaccard,
    localization_accuracy,
    metrics.token_auprc,
]
SINGLE = [metrics.entropy, effective_support, metrics.gini, hoyer]


def test_the_decorator_only_sets_an_attribute():
    def plain(x):
        return x

    made = declare_metric("height", "cells", None, low=0.0)(plain)
    assert made is plain
    assert made.info == MetricInfo("height", "cells", None, 0.0, math.inf, key="plain")


@pytest.mark.parametrize("function", DECLARED, ids=lambda f: f.__name__)
def test_every_metric_has_name_unit_range_and_description(function):
    info = function.info
    assert info.name and info.unit and info.low < info.high
    assert len(info.description) > 15 and "\n" not in info.description
    assert info.summary.endswith(" better") and info.range in info.summary


def test_the_table_of_metrics_on_the_page_is_generated():
    page = (DOCS / "measure.md").read_text(encoding="utf-8")
    assert metric_table().replaced(page) == page, "run python docs/metric_table.py"


def test_the_package_exports_at_most_80_names():
    assert len(metrics.__all__) <= 80
    assert all(hasattr(metrics, name) for name in metrics.__all__)


def test_metric_names_are_unique():
    assert len({f.info.name for f in DECLARED}) == len(DECLARED) > 20
    assert set(PAIRS + SINGLE) <= set(DECLARED)


def random_pair(b: int, k: int, generator, ties: bool) -> tuple[AttentionMap, AttentionMap]:
    weights = torch.rand(2, b, k, generator=generator)
    if ties:
        weights = (weights * 3).round()
    seen = torch.rand(2, b, k, generator=generator) > 0.2
    weights[0, 0], weights[1, 1] = 0, 0  # one sample without attention, one without ground truth
    seen[0, 2] = False  # and one without visible keys
    first, second = (
        AttentionMap.from_cells(weights[side], words(k), seen[side]).normalize() for side in (0, 1)
    )
    return first, second


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_metrics_return_one_value_per_sample_in_the_declared_range(function, ties, generator):
    attention, truth = random_pair(40, 9, generator, ties)
    maps = (attention, truth) if function in PAIRS else (attention,)
    numbers = function(*maps)
    assert numbers.shape == (40,) and numbers.dtype is torch.float32
    without = [0, 1, 2] if function in PAIRS else [0, 2]
    assert numbers[without].isnan().all()
    defined = numbers[~numbers.isnan()]
    assert len(defined) > 25
    assert defined.min() >= function.info.low and defined.max() <= function.info.high

    order = torch.randperm(40, generator=generator)
    moved = function(*(one.select(order) for one in maps))
    assert torch.equal(moved.nan_to_num(-9), numbers[order].nan_to_num(-9)), (
        "samples are independent"
    )


@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_hidden_keys_do_not_count(function, generator):
    """Padding a map with hidden keys changes no value."""
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
    [*PAIRS, *SINGLE, metrics.token_auc, metrics.nss],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_map_with_non_finite_weights_gives_nan(function, wrong, generator):
    """A diverged model must not get a score: ranks of NaN would look like valid numbers."""
    weights = torch.rand(2, 4, 9, generator=generator)
    weights[1] = (weights[1] > 0.5).float()
    weights[1, :, 0], weights[1, :, 1] = 1, 0
    whole = [AttentionMap.from_cells(side, grid(3, 3)) for side in weights]
    weights = weights.clone()
    weights[0, 1, 4], weights[1, 2, 3] = wrong, wrong
    maps = [AttentionMap.from_cells(side, grid(3, 3)) for side in weights]
    count = 1 if function in SINGLE else 2
    found, expected = function(*maps[:count]), function(*whole[:count])
    assert found[1].isnan() and (count == 1 or found[2].isnan())
    kept = [0, 3] if count == 2 else [0, 2, 3]
    torch.testing.assert_close(found[kept], expected[kept])
    assert not expected.isnan().any()


@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_a_tensor_instead_of_a_map_raises_and_names_from_cells(function, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    plain = torch.rand(2, 9)
    maps = (plain, plain) if function in PAIRS else (plain,)
    with pytest.raises(TypeError, match=r"AttentionMap.*Tensor.*from_cells"):
        function(*maps)


@pytest.mark.parametrize("function", PAIRS + SINGLE, ids=lambda f: f.__name__)
def test_several_rows_per_sample_raise_and_name_rows_as_samples(function):
    several = AttentionMap(torch.rand(2, 3, 4, 1, 4), grid(2, 2), kind=Kind.AMOUNT)
    maps = (several, several) if function in PAIRS else (several,)
    with pytest.raises(ValueError, match=r"3 layers.*4 heads.*1 queries.*rows_as_samples\(\)"):
        function(*maps)
    spread = [one.rows_as_samples() for one in maps]
    assert function(*spread).shape == (24,)


def test_maps_of_different_sizes_raise():
    one = AttentionMap.from_cells(torch.ones(2, 4), grid(2, 2))
    two = AttentionMap.from_cells(torch.ones(2, 9), grid(3, 3))
    with pytest.raises(ValueError, match=r"2 .*2 .*4 .*9 keys"):
        paired_rows(one, two)


def test_signed_weights_have_no_distribution():
    signed = AttentionMap(torch.randn(1, 1, 1, 1, 4), words(4), kind=Kind.SIGNED)
    weights, _ = single_row(signed)
    with pytest.raises(ValueError, match="signed"):
        to_distribution(weights, signed.kind)


def test_the_error_names_the_call_that_mends_rows_and_grids():
    axis = words(1, "class") + grid(2, 2)
    whole = AttentionMap.from_scores(torch.zeros(1, 1, 1, 5, 5), axis, axis)
    truth = AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2))
    with pytest.raises(ValueError, match=r"5 queries.*between"):
        metrics.mass_inside(whole, truth)
    first = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 5), axis)
    with pytest.raises(ValueError, match=r"4 keys.*between"):
        metrics.mass_inside(first, truth)
    finer = AttentionMap.from_cells(torch.ones(1, 16), grid(4, 4))
    with pytest.raises(ValueError, match=r"resample.*\(2, 2\)"):
        metrics.mass_inside(finer, truth)
    assert metrics.mass_inside(metrics.resample_to_grid(finer, (2, 2)), truth).tolist() == [1.0]
