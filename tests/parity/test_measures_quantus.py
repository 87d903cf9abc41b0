"""Metrics that quantus has too equal those of quantus to 1e-5, on random maps and a network.

quantus takes one map and one single-channel image per sample, without hidden keys. It breaks ties
by pixel order and we break them at random, so the maps have no ties.
"""

import numpy as np
import pytest
import torch
from torch import nn

from overt import metrics
from overt.attention import AttentionMap, grid

quantus = pytest.importorskip("quantus", reason="quantus is not installed", exc_type=ImportError)

SIDE, SAMPLES, CLASSES = 6, 5, 3
QUIET = {"disable_warnings": True, "display_progressbar": False, "normalise": False}


@pytest.fixture(scope="module")
def case():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(SAMPLES, 1, SIDE, SIDE, generator=generator)
    weights = torch.rand(SAMPLES, SIDE * SIDE, generator=generator) + 0.01
    inside = torch.rand(SAMPLES, SIDE * SIDE, generator=generator) > 0.6
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        model[3].weight.mul_(4)
    return model.eval(), images, weights, inside


def make_map(weights: torch.Tensor) -> AttentionMap:
    return AttentionMap.from_cells(weights, grid(SIDE, SIDE))


def quantus_scores(metric, case, **more):
    """Return the scores of quantus for the same maps."""
    model, images, weights, _ = case
    with torch.no_grad():
        answers = model(images).argmax(dim=-1)
    found = metric(
        model=model,
        x_batch=images.numpy(),
        y_batch=answers.numpy(),
        a_batch=weights.reshape(SAMPLES, 1, SIDE, SIDE).numpy(),
        channel_first=True,
        **more,
    )
    return np.array(found, dtype=np.float64)


def assert_close(found: torch.Tensor, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=0, atol=tolerance)


def test_entropy_equals_complexity_of_quantus(case):
    assert_close(
        metrics.entropy(make_map(case[2])),
        quantus_scores(quantus.Complexity(abs=True, **QUIET), case),
    )


def test_gini_equals_sparseness_of_quantus(case):
    assert_close(
        metrics.gini(make_map(case[2])), quantus_scores(quantus.Sparseness(abs=True, **QUIET), case)
    )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (metrics.pointing_game, "PointingGame"),
        (metrics.mass_inside, "RelevanceMassAccuracy"),
        (metrics.auc_judd, "AUC"),
    ],
    ids=["pointing", "mass", "auc"],
)
def test_location_metrics_equal_localisation_of_quantus(case, function, name):
    inside = case[3]
    metric = getattr(quantus, name)(abs=False, **QUIET)
    masks = inside.reshape(SAMPLES, 1, SIDE, SIDE).numpy()
    assert_close(
        function(make_map(case[2]), make_map(inside.float())),
        quantus_scores(metric, case, s_batch=masks),
    )


def test_deletion_equals_pixel_flipping_of_quantus(case):
    """Pixels are set to 0 one at a time, and the probability of the prediction is compared."""
    model, images, weights, _ = case

    def decide(keep):
        return model(images * keep.reshape(images.shape))

    count = SIDE * SIDE
    shares = [step / count for step in range(1, count + 1)]
    curve = metrics.deletion_curve(decide, make_map(weights), torch.Generator(), shares)
    metric = quantus.PixelFlipping(
        features_in_step=1,
        perturb_baseline=0.0,
        abs=False,
        return_auc_per_sample=False,
        **QUIET,
    )
    assert_close(curve.probability.T, quantus_scores(metric, case, softmax=True))
