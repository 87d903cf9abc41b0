"""Modules that attend. Each has `encode(batch)`, `decide(features, mask)` and returns `Output`."""

from overt.models.cnn import Backbone, Cells, SmallCNN
from overt.models.output import Model, Output
from overt.models.text import TextClassifier, WordAttention, Words, redundancy
from overt.models.vqa import VQA, Asked, Blind, MeanPool, Sizes, SoftAttention

__all__ = [
    "VQA",
    "Asked",
    "Backbone",
    "Blind",
    "Cells",
    "MeanPool",
    "Model",
    "Output",
    "Sizes",
    "SmallCNN",
    "SoftAttention",
    "TextClassifier",
    "WordAttention",
    "Words",
    "redundancy",
]
