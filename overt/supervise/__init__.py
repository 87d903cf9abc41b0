"""What attention should be, and how far from it we are."""

from overt.supervise.loss import Loss
from overt.supervise.losses import classification, cross_entropy, kl, mse

__all__ = ["Loss", "classification", "cross_entropy", "kl", "mse"]
