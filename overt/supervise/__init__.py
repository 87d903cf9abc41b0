"""What attention should be, and how far from it we are."""

from overt.supervise import grounding, heads, keeping, perturb, placebo, surrogate
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
from overt.supervise.perturb import (
    Aligner,
    Alignment,
    align,
    crossings,
    decay,
    gate,
    max_pooling,
    moving_average,
)
from overt.supervise.reward import (
    Critique,
    by_tokens,
    mean_of_all,
    mean_of_others,
    next_words,
    self_critical,
)
from overt.supervise.scale import Scale, Taught
from overt.supervise.surrogate import Surrogates, surrogates
from overt.supervise.targets import Targets, fitted, grad_cam, known, remembered
from overt.supervise.transport import emd

__all__ = [
    "Aligner",
    "Alignment",
    "Critique",
    "Discriminator",
    "Loss",
    "Scale",
    "Surrogates",
    "Targets",
    "Taught",
    "align",
    "by_tokens",
    "classification",
    "coral",
    "coral_as_printed",
    "cross_entropy",
    "crossings",
    "decay",
    "deceive",
    "emd",
    "fitted",
    "gate",
    "gaussians",
    "grad_cam",
    "grounding",
    "heads",
    "keeping",
    "kl",
    "known",
    "max_pooling",
    "mean_of_all",
    "mean_of_others",
    "mmd",
    "mmd_linear",
    "mmd_unbiased",
    "moving_average",
    "mse",
    "next_words",
    "perturb",
    "placebo",
    "remembered",
    "self_critical",
    "soft_classification",
    "spread_gaussians",
    "surrogate",
    "surrogates",
    "tell_apart",
]
