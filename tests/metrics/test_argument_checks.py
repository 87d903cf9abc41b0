"""Bad counts, shares, grids and generators end in one sentence, before the model runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from overt.attention import AttentionMap, grid, words
from overt.metrics import deletion_curves, interventions, removal, roar, robustness, sensitivity
from overt.metrics import top_cells as cells
from overt.metrics.argument_checks import (
    check_count,
    check_generator,
    check_grid,
    check_positive,
    check_share,
    check_shares,
)
from overt.metrics.controls import center_map, random_map
from overt.metrics.deletion_curves import deletion_area
from overt.metrics.faithfulness import class_probabilities, contrast_removal
from overt.metrics.key_effects import leave_one_out
from overt.metrics.model_randomization import randomization_similarity

NAN, INF = float("nan"), float("inf")
MAP = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
IMAGES = torch.full((1, 3, 4, 4), 0.5)
WHOLE = roar.RetrainedModel(torch.ones(1), MAP, MAP)


@pytest.fixture(autouse=True)
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of types at each call, as for users."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def refuse_to_run(*args: Any) -> Tensor:
    raise AssertionError("the model must not run on bad arguments")


@pytest.mark.parametrize("count", [0, -1, 2.5, NAN, INF, None, "3", torch.ones(2)])
def test_bad_counts_raise(count):
    with pytest.raises((TypeError, ValueError), match=r"draws.*1, got"):
        check_count("draws", count)


def test_whole_numbers_of_any_kind_are_counts():
    for count in (4, 4.0, np.int64(4), np.float32(4), torch.tensor(4)):
        assert check_count("draws", count) == 4
        assert type(check_count("draws", count)) is int


@pytest.mark.parametrize("share", [-0.1, 1.1, NAN, None, "0.5"])
def test_bad_shares_raise(share):
    with pytest.raises((TypeError, ValueError), match=r"share.*1, got"):
        check_share(share)
    with pytest.raises((TypeError, ValueError), match=r"share.*above 0"):
        check_share(share, zero=False)


@pytest.mark.parametrize(
    "shares",
    [0, 0.5, None, "ab", torch.tensor(0.5), (), (NAN,), (0.1, NAN), (1.0, 0.5), (0.5, 0.5), (2,)],
)
def test_shares_that_are_no_increasing_numbers_raise(shares):
    with pytest.raises((TypeError, ValueError), match=r"share.*, got"):
        check_shares(shares)


def test_arrays_of_shares_are_accepted():
    for shares in ([0, 0.5, 1], np.array([0, 0.5, 1]), torch.tensor([0, 0.5, 1])):
        assert check_shares(shares) == (0.0, 0.5, 1.0)
    with pytest.raises(ValueError, match="increase, above 0"):
        check_shares((0.0, 0.5), zero=False)


def test_numbers_that_are_not_positive_and_finite_raise():
    assert check_positive("spread", 0.5) == 0.5 and check_positive("eps", 0, zero=True) == 0
    for value in (0, -1, NAN, INF, None, "1"):
        with pytest.raises((TypeError, ValueError), match=r"spread.*above 0"):
            check_positive("spread", value)
    with pytest.raises(ValueError, match=r"eps.*-1"):
        check_positive("eps", -1, zero=True)


@pytest.mark.parametrize("cells", [2, (2,), (0, 2), (2.0, 2), (1, 2, 2), "22", None])
def test_bad_grids_raise(cells):
    with pytest.raises(ValueError, match=r"\(height, width\)"):
        check_grid(cells)


def test_a_seed_is_not_a_generator():
    with pytest.raises(TypeError, match=r"7.*manual_seed\(7\)"):
        check_generator(7)


CURVES = [
    deletion_curves.aopc,
    deletion_curves.comprehensiveness,
    deletion_curves.deletion_area,
    deletion_curves.flip_share,
    deletion_curves.insertion_area,
    deletion_curves.sufficiency,
]


@pytest.mark.parametrize("metric", CURVES)
def test_curves_check_their_arguments_before_the_model_runs(metric):
    with pytest.raises(TypeError, match=r"torch.Generator.*0"):
        metric(refuse_to_run, MAP, 0)
    with pytest.raises(TypeError, match=r"shares.*0"):
        metric(refuse_to_run, MAP, seeded(), 0)
    with pytest.raises(ValueError, match=r"shares.*nan"):
        metric(refuse_to_run, MAP, seeded(), (0.1, NAN))


CALLS: dict[str, Callable[[], Any]] = {
    "draws": lambda: contrast_removal(refuse_to_run, MAP, None, seeded(), draws=2.5),
    "draws of infidelity": lambda: sensitivity.infidelity(refuse_to_run, MAP, seeded(), draws=None),
    "at_once": lambda: leave_one_out(refuse_to_run, MAP, at_once=0.5),
    "count": lambda: cells.top_cells(MAP, seeded(), count=0),
    "share of mass": lambda: cells.mass_cells(MAP, seeded(), share=1.5),
    "share of keys": lambda: sensitivity.random_half(torch.ones(1, 4).bool(), seeded(), share=2),
    "shares of weights": lambda: interventions.weights_to_flip(refuse_to_run, 0.5),
    "share of weights": lambda: interventions.drop_top_weights(None),
    "within": lambda: interventions.find_alternative_attention(
        refuse_to_run, MAP, seeded(), within=NAN
    ),
    "steps": lambda: robustness.pgd(
        refuse_to_run, IMAGES, torch.zeros(1).long(), 0.1, seeded(), steps=2.5
    ),
    "eps": lambda: robustness.fgsm(refuse_to_run, IMAGES, torch.zeros(1).long(), NAN),
    "portion": lambda: robustness.fooling_rate(refuse_to_run, IMAGES, 0.1, portion=0),
    "spread": lambda: center_map(AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2)), NAN),
    "cells": lambda: removal.pixel_removal(refuse_to_run, IMAGES, 2),
    "shares of roar": lambda: roar.roar_faithfulness(WHOLE, refuse_to_run, seeded(), (NAN,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_raise_before_the_model_runs(name):
    with pytest.raises((TypeError, ValueError), match=r"must.*, got"):
        CALLS[name]()


@pytest.mark.parametrize(
    "call",
    [
        partial(roar.roar_faithfulness, WHOLE, refuse_to_run),
        partial(random_map, MAP),
        partial(randomization_similarity, torch.nn.Linear(4, 1), lambda: MAP),
        partial(robustness.pgd, refuse_to_run, IMAGES, torch.zeros(1).long(), 0.1),
        interventions.permute_weights,
        partial(interventions.drop_random_weights, 0.5),
    ],
)
def test_a_seed_in_place_of_a_generator_raises(call):
    with pytest.raises(TypeError, match=r"torch.Generator.*0"):
        call(0)


@pytest.mark.parametrize("logits", [(1, 2), np.ones((1, 2)), torch.ones(1), torch.ones(1, 2) + 0j])
def test_logits_of_another_kind_raise(logits):
    with pytest.raises(TypeError, match=r"logits \(b, classes"):
        class_probabilities(lambda keep: logits, torch.ones(1, 4).bool())


def test_a_grid_with_other_keys_raises():
    decide = removal.pixel_removal(lambda images: images.flatten(1), IMAGES, (3, 2))
    with pytest.raises(ValueError, match=r"3 x 2.*6.*4"):
        deletion_area(decide, MAP, seeded())
    with pytest.raises(ValueError, match=r"1 x 3.*3.*4"):
        removal.feature_removal(refuse_to_run, torch.ones(1, 4, 2), (3,))
