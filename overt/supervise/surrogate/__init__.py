"""Targets that a model finds for its own attention, by looking at inputs with parts removed.

Patro, G S, Jain and Namboodiri, "Self Supervision for Attention Networks", WACV 2021. The model
is asked about a sample with many masks, and its attention on the input where it was most sure of
the truth becomes what its attention should have been. Made once, kept on disk, used in training:

    wanted = surrogates(net, train, out / "surrogates", Grids(500, scale=2), search=refine)
    ...
    attention = output.looking_at("image").over_heads()
    loss = mse(attention, fitted(wanted.target(batch.ids).to(device), attention))
"""

from overt.supervise.surrogate.kept import Surrogates
from overt.supervise.surrogate.look import (
    Look,
    asking,
    every_one,
    last_layer,
    mean,
    of_answers,
    of_label,
    of_truth,
)
from overt.supervise.surrogate.making import Share, surrogates
from overt.supervise.surrogate.masks import Grids, OnlyWords, ShiftedGrids, Whole, WithoutWords
from overt.supervise.surrogate.places import each_place, whole_words
from overt.supervise.surrogate.refine import refine
from overt.supervise.surrogate.search import Found, apart, in_turn, search, without_whole
from overt.supervise.surrogate.weighted import weighted_maps, weighted_masks

__all__ = [
    "Found",
    "Grids",
    "Look",
    "OnlyWords",
    "Share",
    "ShiftedGrids",
    "Surrogates",
    "Whole",
    "WithoutWords",
    "apart",
    "asking",
    "each_place",
    "every_one",
    "in_turn",
    "last_layer",
    "mean",
    "of_answers",
    "of_label",
    "of_truth",
    "refine",
    "search",
    "surrogates",
    "weighted_maps",
    "weighted_masks",
    "whole_words",
    "without_whole",
]
