"""Modules that attend. Each has `encode(batch)`, `decide(features, mask)` and returns `Output`."""

from overt.models.adopted import Adopted, Supervised, adopt
from overt.models.cnn import Backbone, Cells, SmallCNN
from overt.models.looking import every, last
from overt.models.ltpa import (
    AttentionClassifier,
    Levels,
    additive,
    concat,
    dot,
    indep,
    parametrised,
    product,
    scaled_dot,
    uniform,
)
from overt.models.output import Decoder, Model, Output, State
from overt.models.resnet import ResNet, ResNetAttention
from overt.models.text import TextClassifier, WordAttention, Words, redundancy
from overt.models.vgg import VGG, VGGAttention, VGGGap, VGGProgressive, vgg_attention
from overt.models.vqa import VQA, Asked, Blind, MeanPool, Sizes, SoftAttention

__all__ = [
    "VGG",
    "VQA",
    "Adopted",
    "Asked",
    "AttentionClassifier",
    "Backbone",
    "Blind",
    "Cells",
    "Decoder",
    "Levels",
    "MeanPool",
    "Model",
    "Output",
    "ResNet",
    "ResNetAttention",
    "Sizes",
    "SmallCNN",
    "SoftAttention",
    "State",
    "Supervised",
    "TextClassifier",
    "VGGAttention",
    "VGGGap",
    "VGGProgressive",
    "WordAttention",
    "Words",
    "additive",
    "adopt",
    "concat",
    "dot",
    "every",
    "indep",
    "last",
    "parametrised",
    "product",
    "redundancy",
    "scaled_dot",
    "uniform",
    "vgg_attention",
]
