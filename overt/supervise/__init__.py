"""What attention should be, and how far from it we are."""

from overt.supervise import grounding, heads, keeping, placebo, surrogate
from overt.supervise.adversary import Discriminator, deceive, tell_apart
from overt.supervise.distributions import (
    coral,
    coral_as_printed,
    gaussians,
    mmd,
    mmd_linear,
    mmd_unbiased,
    spread_gaussians,
)
from overt.supervise.loss import Loss
from overt.supervise.losses import (
    classification,
    cross_entropy,
    kl,
    mse,
    soft_classification,
)
from overt.supervise.scale import Scale, Taught
from overt.supervise.surrogate import Surrogates, surrogates
from overt.supervise.targets import Targets, fitted, grad_cam, known, remembered
from overt.supervise.transport import emd

__all__ = [
    "Discriminator",
    "Loss",
    "Scale",
    "Surrogates",
    "Targets",
    "Taught",
    "classification",
    "coral",
    "coral_as_printed",
    "cross_entropy",
    "deceive",
    "emd",
    "fitted",
    "gaussians",
    "grad_cam",
    "grounding",
    "heads",
    "keeping",
    "kl",
    "known",
    "mmd",
    "mmd_linear",
    "mmd_unbiased",
    "mse",
    "placebo",
    "remembered",
    "soft_classification",
    "spread_gaussians",
    "surrogate",
    "surrogates",
    "tell_apart",
]
