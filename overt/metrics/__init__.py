"""Metrics of attention maps and of the models behind them.

Every metric is a function that returns one score per sample, NaN where it is undefined, and
describes itself in `.info` (see `MetricInfo`). This package exports the most used ones, grouped by
the question they answer; the others are imported from their modules.
"""

from overt.metrics import captions as captions  # a package with exports of its own
from overt.metrics.agreement import cc, js, kendall, kl, sim, spearman
from overt.metrics.answer_accuracy import accuracy, soft_accuracy, vqa_accuracy
from overt.metrics.calibration import brier, reliability_diagram
from overt.metrics.concentration import entropy, gini, head_redundancy, sink_mass
from overt.metrics.consistency import view_consistency
from overt.metrics.controls import (
    center_map,
    other_sample_map,
    random_map,
    shuffled_map,
    uniform_map,
)
from overt.metrics.deletion_curves import (
    aopc,
    comprehensiveness,
    deletion_area,
    deletion_curve,
    insertion_area,
    sufficiency,
)
from overt.metrics.faithfulness import contrast_removal
from overt.metrics.fixations import auc_judd, auc_shuffled, information_gain, nss
from overt.metrics.grounding import grounding_accuracy, grounding_mass
from overt.metrics.human_ceiling import agreement_with_each_human, inter_human_agreement
from overt.metrics.interventions import (
    editable_forward,
    knock_out_attention,
    output_change,
    permute_weights,
    uniform_weights,
)
from overt.metrics.key_effects import gradient_agreement, leave_one_out_agreement
from overt.metrics.localization import mass_inside, mean_iou, otsu_jaccard, pointing_game
from overt.metrics.metric import MetricInfo, declare_metric
from overt.metrics.model_randomization import randomization_similarity
from overt.metrics.rationales import discretize, iou_f1, token_auc, token_auprc, token_f1
from overt.metrics.removal import (
    blur_fill,
    feature_removal,
    linear_imputation,
    mean_fill,
    pixel_removal,
    token_removal,
)
from overt.metrics.resample import resample_to_grid
from overt.metrics.roar import roar_faithfulness
from overt.metrics.running_metric import as_metric
from overt.metrics.scorecard.catalog import available_metrics
from overt.metrics.scorecard.evaluate import scorecard
from overt.metrics.scorecard.result import Scorecard, mean_over_runs
from overt.metrics.sensitivity import infidelity, sensitivity_max, stability
from overt.metrics.statistics import (
    Interval,
    confidence_interval,
    holm,
    mean,
    paired_difference,
    permutation_test,
    two_level_difference,
    two_level_interval,
)
from overt.metrics.transport import emd

__all__ = [  # noqa: RUF022 - grouped by question
    # How metrics are declared: one score per sample, with name, unit, range and direction
    "MetricInfo",
    "as_metric",
    "declare_metric",
    # Does a map agree with another map?
    "cc",
    "emd",
    "js",
    "kendall",
    "kl",
    "sim",
    "spearman",
    # Does it agree with human fixations?
    "auc_judd",
    "auc_shuffled",
    "information_gain",
    "nss",
    # Does it mark the words that people marked?
    "discretize",
    "iou_f1",
    "token_auc",
    "token_auprc",
    "token_f1",
    # How well do people agree with each other?
    "agreement_with_each_human",
    "inter_human_agreement",
    # Is it on the object?
    "grounding_accuracy",
    "grounding_mass",
    "mass_inside",
    "mean_iou",
    "otsu_jaccard",
    "pointing_game",
    # Does it show what drives the answer?
    "aopc",
    "comprehensiveness",
    "contrast_removal",
    "deletion_area",
    "deletion_curve",
    "gradient_agreement",
    "infidelity",
    "insertion_area",
    "leave_one_out_agreement",
    "roar_faithfulness",
    "sufficiency",
    # How are keys removed?
    "blur_fill",
    "feature_removal",
    "linear_imputation",
    "mean_fill",
    "pixel_removal",
    "token_removal",
    # Does the answer change with other attention weights?
    "editable_forward",
    "knock_out_attention",
    "output_change",
    "permute_weights",
    "uniform_weights",
    # Is it stable, and does it depend on the learned weights?
    "randomization_similarity",
    "sensitivity_max",
    "stability",
    "view_consistency",
    # How concentrated is it?
    "entropy",
    "gini",
    "head_redundancy",
    "sink_mass",
    # Is the answer right, and is the model calibrated?
    "accuracy",
    "brier",
    "reliability_diagram",
    "soft_accuracy",
    "vqa_accuracy",
    # What would a map without information score?
    "center_map",
    "other_sample_map",
    "random_map",
    "resample_to_grid",
    "shuffled_map",
    "uniform_map",
    # How sure is a mean, and how large is a difference?
    "Interval",
    "confidence_interval",
    "holm",
    "mean",
    "paired_difference",
    "permutation_test",
    "two_level_difference",
    "two_level_interval",
    # Everything at once, with controls and intervals
    "Scorecard",
    "available_metrics",
    "mean_over_runs",
    "scorecard",
]
