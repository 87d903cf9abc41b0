"""Training: `fit`, with checkpoints and exact resume, and attention losses in other loops."""

from overt.train.distributed import Processes, processes
from overt.train.integrations import (
    AttentionLossMixin,
    add_attention_loss,
    check_gradient_flow,
    compute_loss,
    distributed_mean,
    label_loss,
    supervise_answers,
)
from overt.train.lightning_monitor import lightning_monitor
from overt.train.loop import (
    BeforeStep,
    FitConfig,
    FitResult,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Step,
    doubling_warmup,
    fit,
    warmup_cosine,
)
from overt.train.monitor import (
    AttentionMonitor,
    AttentionMonitorMixin,
    AttentionStats,
    capture_by_watch,
    capture_from_outputs,
)
from overt.train.progress import Reporter

__all__ = [
    "AttentionLossMixin",
    "AttentionMonitor",
    "AttentionMonitorMixin",
    "AttentionStats",
    "BeforeStep",
    "FitConfig",
    "FitResult",
    "Losses",
    "Monitor",
    "ParameterSet",
    "Processes",
    "Progress",
    "Reporter",
    "Step",
    "add_attention_loss",
    "capture_by_watch",
    "capture_from_outputs",
    "check_gradient_flow",
    "compute_loss",
    "distributed_mean",
    "doubling_warmup",
    "fit",
    "label_loss",
    "lightning_monitor",
    "processes",
    "supervise_answers",
    "warmup_cosine",
]
