"""Surrogate targets: attention of the model on masked inputs.

Patro, G S, Jain and Namboodiri, "Self Supervision for Attention Networks", WACV 2021. The model is
run on a sample with many masks, and its attention on the input with the highest probability of the
truth becomes the target. Generated once, stored on disk, used in training:

    targets = generate_surrogates(net, train, out / "surrogates", GridMasks(500, scale=2))
    ...
    attention = output.attention_to("image").over_heads()
    loss = mse(attention, match_keys(targets.target(batch.ids).to(device), attention))
"""

from overt.targets.surrogate.generate import WorkerShare, generate_surrogates
from overt.targets.surrogate.greedy_search import greedy_refine
from overt.targets.surrogate.masked_inference import (
    MaskedBatch,
    all_maps,
    answers_log_probability,
    label_log_probability,
    last_layer_map,
    masked_batch,
    mean_map,
    truth_log_probability,
)
from overt.targets.surrogate.masks import (
    GridMasks,
    KeepWords,
    NoMask,
    RemoveWords,
    ShiftedGridMasks,
)
from overt.targets.surrogate.removable import each_position, whole_words
from overt.targets.surrogate.search import (
    SearchResult,
    exhaustive_search,
    search_independently,
    search_sequentially,
    search_without_whole,
)
from overt.targets.surrogate.store import Surrogates
from overt.targets.surrogate.weighted_mean import weighted_maps, weighted_masks

__all__ = [
    "GridMasks",
    "KeepWords",
    "MaskedBatch",
    "NoMask",
    "RemoveWords",
    "SearchResult",
    "ShiftedGridMasks",
    "Surrogates",
    "WorkerShare",
    "all_maps",
    "answers_log_probability",
    "each_position",
    "exhaustive_search",
    "generate_surrogates",
    "greedy_refine",
    "label_log_probability",
    "last_layer_map",
    "masked_batch",
    "mean_map",
    "search_independently",
    "search_sequentially",
    "search_without_whole",
    "truth_log_probability",
    "weighted_maps",
    "weighted_masks",
    "whole_words",
]
