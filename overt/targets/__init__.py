"""What to train attention towards: boxes, masks, human maps, surrogate search, placebos."""

from overt.targets import placebos, surrogate
from overt.targets.sources import (
    Targets,
    cached_targets,
    dataset_targets,
    grad_cam_target,
    match_keys,
    move_target,
)
from overt.targets.surrogate import Surrogates, generate_surrogates

__all__ = [
    "Surrogates",
    "Targets",
    "cached_targets",
    "dataset_targets",
    "generate_surrogates",
    "grad_cam_target",
    "match_keys",
    "move_target",
    "placebos",
    "surrogate",
]
