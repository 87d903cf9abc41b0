"""Metrics as `torchmetrics.Metric`: values, intervals, collections and several processes."""

import copy
import math
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from overt import AttentionMap, grid, metrics
from overt.metrics import as_metric, confidence_interval, mass_inside, pointing_game

ROOT = Path(__file__).resolve().parents[2]
torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")


def random_maps(count, rows=slice(None)):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(count, 12, generator=generator).softmax(dim=-1)
    boxes = (torch.rand(count, 12, generator=generator) > 0.6).float()
    boxes[0] = 0  # without a target: NaN
    cells = grid(3, 4)
    return AttentionMap.from_cells(weights[rows], cells), AttentionMap.from_cells(
        boxes[rows], cells
    )


def parts(count, *ends):
    """Return random maps in several batches."""
    return [random_maps(count, slice(*pair)) for pair in pairwise((0, *ends, count))]


@pytest.mark.parametrize("name", ["mass_inside", "pointing_game", "spearman", "kl"])
def test_the_mean_and_its_interval_are_those_of_all_samples(name):
    """Batches of different sizes: the mean of the means of the batches would be another number."""
    metric = getattr(metrics, name)
    running = as_metric(metric)
    for ours, theirs in parts(23, 1, 16):
        running.update(ours, theirs.normalize())
    attention, target = random_maps(23)
    target = target.normalize()
    whole = confidence_interval(metric(attention, target))
    assert float(running.compute()) == pytest.approx(whole.mean, rel=1e-5)
    found = running.interval()
    assert (found.count, found.low) == (whole.count, pytest.approx(whole.low, rel=1e-5))
    assert running.higher_is_better is metric.info.higher_is_better
    assert running.plot_upper_bound == (
        metric.info.high if math.isfinite(metric.info.high) else None
    )


def test_the_interval_of_a_share_is_wilsons():
    attention, target = random_maps(23)
    running = as_metric(pointing_game, share=True)
    running.update(attention, target)
    whole = confidence_interval(pointing_game(attention, target), share=True, confidence=0.8)
    assert running.interval(0.8).low == whole.low


def test_a_forward_returns_the_score_of_the_batch_and_adds_it():
    attention, target = random_maps(8)
    running = as_metric(mass_inside)
    first, second = (running(*maps) for maps in parts(8, 3))
    assert float(first) == pytest.approx(float(mass_inside(attention, target)[:3].nanmean()))
    assert float(second) == pytest.approx(float(mass_inside(attention, target)[3:].nanmean()))
    assert running.interval().count == 7
    running.reset()
    assert running.interval().count == 0 and running.compute().isnan()


def test_it_works_in_a_collection_and_can_be_copied_and_pickled():
    attention, target = random_maps(8)
    both = torchmetrics.MetricCollection(
        {"inside": as_metric(mass_inside), "points": as_metric(pointing_game)}
    )
    both.update(attention, target)
    found = both.compute()
    assert float(found["inside"]) == pytest.approx(
        float(mass_inside(attention, target).nanmean()), rel=1e-5
    )
    for again in (copy.deepcopy(both["inside"]), pickle.loads(pickle.dumps(both["inside"]))):  # noqa: S301
        assert again.compute() == found["inside"]


def make_metric(exponent):
    @metrics.declare_metric("power", "share", True)
    def power(ours, theirs):
        """Compute the mass inside to a power."""
        return mass_inside(ours, theirs) ** exponent

    return power


def test_metrics_that_agree_on_the_first_batch_are_not_merged_in_a_collection():
    @metrics.declare_metric("power", "share", True)
    def power(ours, theirs, exponent):
        """Compute the mass inside to a power."""
        return mass_inside(ours, theirs) ** exponent

    made = {
        "inside": as_metric(mass_inside),
        "points": as_metric(pointing_game),
        "again": as_metric(mass_inside),
        **{f"fixed {n}": as_metric(power, exponent=n) for n in (2, 3)},
        **{f"other {n}": as_metric(make_metric(n)) for n in (4, 5)},
    }
    both = torchmetrics.MetricCollection(copy.deepcopy(made))
    cells = grid(1, 2)
    target = AttentionMap.from_cells(torch.tensor([[1.0, 0.0]]), cells)
    for left in (1.0, 0.6):
        row = AttentionMap.from_cells(torch.tensor([[left, 1 - left]]), cells)
        both.update(row, target)
        for alone in made.values():
            alone.update(row, target)
    assert both.compute() == {name: alone.compute() for name, alone in made.items()}


def test_the_state_is_saved_and_loaded():
    attention, target = random_maps(8)
    running, other = as_metric(mass_inside), as_metric(mass_inside)
    for one in (running, other):
        one.persistent(True)
    running.update(attention, target)
    other.load_state_dict(running.state_dict())
    assert other.compute() == running.compute()


def test_arguments_of_all_batches_are_fixed_once():
    attention, target = random_maps(8)

    @metrics.declare_metric("power", "share", True)
    def power(ours, theirs, exponent):
        """Compute the mass inside to a power."""
        return mass_inside(ours, theirs) ** exponent

    running = as_metric(power, exponent=2)
    running.update(attention, target)
    expected = (mass_inside(attention, target) ** 2).nanmean()
    assert float(running.compute()) == pytest.approx(float(expected), rel=1e-5)


def test_functions_that_are_no_metrics_raise():
    with pytest.raises(TypeError, match="declare_metric"):
        as_metric(torch.mean)

    @metrics.declare_metric("sum", "", None)
    def total(values):
        """Compute the sum."""
        return values.sum()

    with pytest.raises(ValueError, match=r"\(b,\).*\(\)"):
        as_metric(total).update(torch.ones(3))


RANK = """
import sys, torch
from overt import AttentionMap
from overt.metrics import as_metric, mass_inside
from tests.metrics.test_running_metric import random_maps
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2
)
running = as_metric(mass_inside)
running.update(*random_maps(23, (slice(0, 5), slice(5, 23))[rank]))  # of different sizes
print(float(running.compute()), running.interval().count, running.interval().low)
print(len(running.scores))  # not gathered any more
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_two_processes_compute_the_mean_of_all_samples(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    printed = [rank.communicate(timeout=600)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    whole = confidence_interval(mass_inside(*random_maps(23)))
    for mean, count, low, kept in printed:
        assert float(mean) == pytest.approx(whole.mean, rel=1e-5)
        assert (int(count), float(low)) == (whole.count, pytest.approx(whole.low, rel=1e-5))
        assert kept == "1"
