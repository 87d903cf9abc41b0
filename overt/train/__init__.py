"""`fit`, the only training loop: checkpoints, exact resume, one process or many."""

from overt.train.loop import (
    Fitted,
    Limits,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Step,
    fit,
    warm_then_cosine,
)
from overt.train.processes import Processes, processes
from overt.train.report import Reporter

__all__ = [
    "Fitted",
    "Limits",
    "Losses",
    "Monitor",
    "ParameterSet",
    "Processes",
    "Progress",
    "Reporter",
    "Step",
    "fit",
    "processes",
    "warm_then_cosine",
]
