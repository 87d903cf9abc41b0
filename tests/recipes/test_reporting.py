"""A run ends with a small scorecard: beside controls, bounded, the same twice, never in the way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import files
from overt.measure.scorecards.card import Scorecard
from overt.recipes import reporting, settings
from overt.recipes.recipe import Context
from overt.recipes.reporting import MEASURES, Scored, scored, told
from tests.recipes import tiny

FLOPS = 1e6
CONTROLS = {"gradient", "shuffled", "random", "centre", "uniform"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `scenes-soft` builds, tiny and untrained."""
    torch.manual_seed(0)
    made = tiny.recipe("scenes-soft").build(Context(tmp_path_factory.mktemp("run"), device="cpu"))
    made.model.eval()
    return made


def test_the_attention_stands_beside_maps_that_know_nothing(built: Any, tmp_path: Path) -> None:
    with torch.no_grad():  # as a run judges; the gradient map needs one all the same
        found = scored(built, tmp_path, 10, FLOPS, seed=3)
    assert found == Scored(n=12) and told(found) == {"n": 12}  # three pictures of four questions
    files.verify(tmp_path / "scorecard")
    card = Scorecard.load(tmp_path / "scorecard")
    assert card.subject == "attention" and set(card.maps) >= CONTROLS
    assert set(card.keys) == set(MEASURES) and card.seed == 3 and len(card) == 12
    for key in ("pointing_game", "deletion_area@mask"):
        for name in ("attention", *CONTROLS):
            one = card.intervals[name, key]
            assert one.count > 0 and one.low <= one.mean <= one.high


def test_the_same_network_has_the_same_bytes(built: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        scored(built, tmp_path / name, 4, FLOPS, seed=0)
    one, other = (files.verify(tmp_path / name / "scorecard") for name in ("a", "b"))
    assert one["files"] == other["files"] and "clock.json" not in one["files"]


def test_a_large_network_is_asked_of_few_samples(built: Any, tmp_path: Path) -> None:
    assert scored(built, tmp_path, 64, 1e13, seed=0).n == reporting.LEAST


def test_it_can_be_turned_off_and_its_absence_is_said(built: Any, tmp_path: Path) -> None:
    assert "train.card is 0" in scored(built, tmp_path, 0, FLOPS, seed=0).why
    nothing = replace(built, judged=None)
    assert "one map a sample" in scored(nothing, tmp_path, 8, FLOPS, seed=0).why
    assert not (tmp_path / "scorecard").exists()


def test_what_goes_wrong_in_it_does_not_end_a_run(built: Any, tmp_path: Path) -> None:
    class Broken(torch.nn.Module):
        def forward(self, batch: object) -> object:
            raise RuntimeError("no such kernel.\nA long story")

    found = scored(replace(built, model=Broken()), tmp_path, 4, FLOPS, seed=0)
    assert found == Scored(why="no such kernel") and told(found) == {"why": "no such kernel"}
    assert not (tmp_path / "scorecard").exists()


def test_a_run_keeps_its_scorecard_and_says_so(ran: Callable[..., Any]) -> None:
    place, results = ran("trec-attention", "train.card=6")
    card = Scorecard.load(place / "scorecard")
    assert results["scorecard"] == {"n": 6} and len(card) == 6
    assert card.subject == "attention" and "uniform" in card.maps
    assert np.isfinite(card.values("deletion_area@mask")).all()


def test_fewer_than_none_cannot_be_asked_for() -> None:
    with pytest.raises(Exception, match=r"train\.card"):
        settings.apply(tiny.recipe("scenes-soft"), ["train.card=-1"])
