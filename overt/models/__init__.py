"""Modules that attend. Each has `encode(batch)`, `decide(features, mask)` and returns `Output`."""

from overt.models.cnn import Backbone, Cells, SmallCNN
from overt.models.output import Decoder, Model, Output, State
from overt.models.text import TextClassifier, WordAttention, Words, redundancy
from overt.models.vqa import VQA, Asked, Blind, MeanPool, Sizes, SoftAttention

__all__ = [
    "VQA",
    "Asked",
    "Backbone",
    "Blind",
    "Cells",
    "Decoder",
    "MeanPool",
    "Model",
    "Output",
    "Sizes",
    "SmallCNN",
    "SoftAttention",
    "State",
    "TextClassifier",
    "WordAttention",
    "Words",
    "redundancy",
]
