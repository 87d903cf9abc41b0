"""`fit`, the only training loop: checkpoints, exact resume, one process or many."""

from overt.train.loop import (
    Before,
    Fitted,
    Limits,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Step,
    doubling,
    fit,
    warm_then_cosine,
)
from overt.train.monitor import AttentionMonitor, Monitored, Pulse, by_outputs, by_watching
from overt.train.processes import Processes, processes
from overt.train.report import Reporter
from overt.train.trainer import (
    AttentionLoss,
    check_reaches,
    compute_loss,
    label_loss,
    loss_inside,
    shared_mean,
)

__all__ = [
    "AttentionLoss",
    "AttentionMonitor",
    "Before",
    "Fitted",
    "Limits",
    "Losses",
    "Monitor",
    "Monitored",
    "ParameterSet",
    "Processes",
    "Progress",
    "Pulse",
    "Reporter",
    "Step",
    "by_outputs",
    "by_watching",
    "check_reaches",
    "compute_loss",
    "doubling",
    "fit",
    "label_loss",
    "loss_inside",
    "processes",
    "shared_mean",
    "warm_then_cosine",
]
