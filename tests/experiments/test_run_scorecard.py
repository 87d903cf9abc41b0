"""The scorecard of a run: controls, size limit, determinism and errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import io
from overt.experiments import run_scorecard, settings
from overt.experiments.recipe import RunContext
from overt.experiments.run_scorecard import (
    METRICS,
    ScorecardOutcome,
    results_entry,
    write_scorecard,
)
from overt.metrics.scorecard.result import Scorecard
from overt.papers.catalog import build
from tests.experiments import tiny

FLOPS = 1e6
CONTROLS = {"gradient", "shuffled", "random", "centre", "uniform"}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build the tiny untrained experiment of `scenes-soft`."""
    torch.manual_seed(0)
    made = build(
        tiny.recipe("scenes-soft"), RunContext(tmp_path_factory.mktemp("run"), device="cpu")
    )
    made.model.eval()
    return made


@pytest.mark.long
def test_the_scorecard_compares_attention_with_controls(experiment: Any, tmp_path: Path) -> None:
    with torch.no_grad():  # as in a run; the gradient map enables gradients itself
        found = write_scorecard(experiment, tmp_path, 10, FLOPS, seed=3)
    assert found == ScorecardOutcome(n=12) and results_entry(found) == {
        "n": 12
    }  # three images of four questions
    io.verify(tmp_path / "scorecard")
    card = Scorecard.load(tmp_path / "scorecard")
    assert card.subject == "attention" and set(card.maps) >= CONTROLS
    assert set(card.keys) == set(METRICS) and card.seed == 3 and len(card) == 12
    for key in ("pointing_game", "deletion_area@mask"):
        for name in ("attention", *CONTROLS):
            one = card.intervals[name, key]
            assert one.count > 0 and one.low <= one.mean <= one.high


@pytest.mark.long
def test_the_same_model_gives_the_same_bytes(experiment: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scorecard(experiment, tmp_path / name, 4, FLOPS, seed=0)
    one, other = (io.verify(tmp_path / name / "scorecard") for name in ("a", "b"))
    assert one["files"] == other["files"] and "clock.json" not in one["files"]


@pytest.mark.long
def test_a_large_model_gets_the_minimum_number_of_samples(experiment: Any, tmp_path: Path) -> None:
    assert write_scorecard(experiment, tmp_path, 64, 1e13, seed=0).n == run_scorecard.MIN_SAMPLES


@pytest.mark.long
def test_a_disabled_scorecard_has_a_reason(experiment: Any, tmp_path: Path) -> None:
    assert "train.card is 0" in write_scorecard(experiment, tmp_path, 0, FLOPS, seed=0).reason
    nothing = replace(experiment, test_data=None)
    assert "one map per sample" in write_scorecard(nothing, tmp_path, 8, FLOPS, seed=0).reason
    assert not (tmp_path / "scorecard").exists()


@pytest.mark.long
def test_an_error_in_the_scorecard_does_not_fail_the_run(experiment: Any, tmp_path: Path) -> None:
    class Broken(torch.nn.Module):
        def forward(self, batch: object) -> object:
            raise RuntimeError("no such kernel.\nA long story")

    found = write_scorecard(replace(experiment, model=Broken()), tmp_path, 4, FLOPS, seed=0)
    assert found == ScorecardOutcome(reason="no such kernel") and results_entry(found) == {
        "why": "no such kernel"
    }
    assert not (tmp_path / "scorecard").exists()


@pytest.mark.long
def test_results_of_a_run_include_its_scorecard(finished_run: Callable[..., Any]) -> None:
    place, results = finished_run("trec-attention", "train.card=6")
    card = Scorecard.load(place / "scorecard")
    assert results["scorecard"] == {"n": 6} and len(card) == 6
    assert card.subject == "attention" and "uniform" in card.maps
    assert np.isfinite(card.values("deletion_area@mask")).all()


def test_a_negative_scorecard_size_raises() -> None:
    with pytest.raises(Exception, match=r"train\.card"):
        settings.apply(tiny.recipe("scenes-soft"), ["train.card=-1"])
