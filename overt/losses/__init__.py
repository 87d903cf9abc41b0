"""Losses on attention: cross-entropy, MSE, CORAL, MMD, adversarial, grounding, transport."""

from overt.losses import forgetting, grounding, head_selection
from overt.losses.adversarial import Discriminator, discriminator_loss, generator_loss
from overt.losses.answer_grounding import ANSWER_INPUTS, answer_grounding
from overt.losses.attention_losses import (
    classification,
    cross_entropy,
    kl,
    mse,
    soft_classification,
)
from overt.losses.caption_reward import (
    SelfCriticalStep,
    leave_one_out_baseline,
    mean_baseline,
    next_token_cross_entropy,
    self_critical,
    token_reward,
)
from overt.losses.distribution_matching import (
    adaptive_gaussian_kernel,
    coral,
    coral_unscaled,
    gaussian_kernel,
    mmd,
    mmd_linear,
    mmd_unbiased,
)
from overt.losses.loss import Loss
from overt.losses.loss_balance import LossBalancer, SupervisedModel
from overt.losses.transport import emd

__all__ = [
    "ANSWER_INPUTS",
    "Discriminator",
    "Loss",
    "LossBalancer",
    "SelfCriticalStep",
    "SupervisedModel",
    "adaptive_gaussian_kernel",
    "answer_grounding",
    "classification",
    "coral",
    "coral_unscaled",
    "cross_entropy",
    "discriminator_loss",
    "emd",
    "forgetting",
    "gaussian_kernel",
    "generator_loss",
    "grounding",
    "head_selection",
    "kl",
    "leave_one_out_baseline",
    "mean_baseline",
    "mmd",
    "mmd_linear",
    "mmd_unbiased",
    "mse",
    "next_token_cross_entropy",
    "self_critical",
    "soft_classification",
    "token_reward",
]
