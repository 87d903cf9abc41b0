"""Where quantus has the same measure, ours has its numbers: to 1e-5, on random maps and a network.

It has one map and one image of a single channel a sample, and no keys that are hidden; ties are
broken by the order of pixels there and at random here, so that maps without ties are compared.
"""

import numpy as np
import pytest
import torch
from torch import nn

from overt import measure
from overt.attention import AttentionMap, grid

quantus = pytest.importorskip("quantus", reason="quantus is not here", exc_type=ImportError)

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


def ours(weights: torch.Tensor) -> AttentionMap:
    return AttentionMap.from_cells(weights, grid(SIDE, SIDE))


def asked(metric, case, **more):
    """What quantus says of the same maps."""
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


def close(found: torch.Tensor, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=0, atol=tolerance)


def test_entropy_is_its_complexity(case):
    close(measure.entropy(ours(case[2])), asked(quantus.Complexity(abs=True, **QUIET), case))


def test_gini_is_its_sparseness(case):
    close(measure.gini(ours(case[2])), asked(quantus.Sparseness(abs=True, **QUIET), case))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (measure.pointing_game, "PointingGame"),
        (measure.mass_inside, "RelevanceMassAccuracy"),
        (measure.auc_judd, "AUC"),
    ],
    ids=["pointing", "mass", "auc"],
)
def test_location_is_its_localisation(case, function, name):
    inside = case[3]
    metric = getattr(quantus, name)(abs=False, **QUIET)
    masks = inside.reshape(SAMPLES, 1, SIDE, SIDE).numpy()
    close(function(ours(case[2]), ours(inside.float())), asked(metric, case, s_batch=masks))


def test_deletion_is_its_pixel_flipping(case):
    """Pixels go to 0, one after the other, and the probability of the answer is watched."""
    model, images, weights, _ = case

    def decide(keep):
        return model(images * keep.reshape(images.shape))

    count = SIDE * SIDE
    shares = [step / count for step in range(1, count + 1)]
    curve = measure.deletion_curve(decide, ours(weights), torch.Generator(), shares)
    metric = quantus.PixelFlipping(
        features_in_step=1,
        perturb_baseline=0.0,
        abs=False,
        return_auc_per_sample=False,
        **QUIET,
    )
    close(curve.probability.T, asked(metric, case, softmax=True))
