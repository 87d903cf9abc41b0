"""Numbers: one a sample, with what they mean. See `Measure`, and `statistics` for means."""

from overt.measure.agreement import js, kl, spearman
from overt.measure.answers import accuracy, by_group, chance, soft_accuracy, vqa_scores
from overt.measure.controls import shuffled, uniform
from overt.measure.faithfulness import (
    Contrast,
    Removed,
    contrast,
    deletion,
    flips,
    insertion,
    mass_cells,
    random_cells,
    removed,
    top_cells,
)
from overt.measure.location import mass_inside, pointing_game, support
from overt.measure.measured import Measure, Measured, measured
from overt.measure.shape import effective_support, entropy
from overt.measure.statistics import (
    Interval,
    Spread,
    bootstrap,
    mean,
    over_seeds,
    paired,
    two_level,
    two_level_difference,
)

__all__ = [
    "Contrast",
    "Interval",
    "Measure",
    "Measured",
    "Removed",
    "Spread",
    "accuracy",
    "bootstrap",
    "by_group",
    "chance",
    "contrast",
    "deletion",
    "effective_support",
    "entropy",
    "flips",
    "insertion",
    "js",
    "kl",
    "mass_cells",
    "mass_inside",
    "mean",
    "measured",
    "over_seeds",
    "paired",
    "pointing_game",
    "random_cells",
    "removed",
    "shuffled",
    "soft_accuracy",
    "spearman",
    "support",
    "top_cells",
    "two_level",
    "two_level_difference",
    "uniform",
    "vqa_scores",
]
