"""Modules that attend. Each has `encode(batch)`, `decide(features, mask)` and returns `Output`."""

from overt.models.adopting.adopted import Adopted, Supervised, adopt
from overt.models.adopting.looking import every, last
from overt.models.answering.eyes import (
    CachedEye,
    Eye,
    NormedEye,
    PlacedEye,
    StridedEye,
    TrainedEye,
    norm_a_cell,
    norm_an_image,
)
from overt.models.answering.questions import (
    Backwards,
    Bag,
    QuestionReader,
    Recurrent,
)
from overt.models.answering.showask import AskSizes, ShowAskAttend
from overt.models.answering.stacked import StackedAttention, StackSizes
from overt.models.answering.vqa import VQA, Asked, Blind, MeanPool, Sizes, SoftAttention
from overt.models.attaching.attached import Attached, attach
from overt.models.attaching.levels import Level, Order
from overt.models.captioning import decoding
from overt.models.captioning.captioner import CachedRegions, Captioner, CaptionSizes, Told
from overt.models.captioning.decoding import Rules, Texts
from overt.models.cnn import AttentiveCNN, Backbone, Cells, SmallCNN
from overt.models.finetuned import TextTransformer, finetune
from overt.models.hard.aggregate import (
    Aggregate,
    Mean,
    Pairwise,
    Relation,
    Sum,
)
from overt.models.hard.attention import (
    HardAttention,
    asked,
    unasked,
    unplaced,
)
from overt.models.hard.nets import (
    HAN,
    Decision,
    relation_net,
    simple_han,
    vqa_cp,
)
from overt.models.hard.selection import (
    Kept,
    Ragged,
    Rule,
    Selection,
    climb,
    drawn,
    ebb,
    gather,
    keep_above_uniform,
    keep_all,
    keep_gumbel,
    keep_random,
    keep_share,
    keep_top,
    presence,
    randomly,
    softened,
    straight_through,
)
from overt.models.output import Decoder, Model, Output, State
from overt.models.paying.attention import (
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
from overt.models.paying.resnet import ResNet, ResNetAttention
from overt.models.paying.vgg import VGG, VGGAttention, VGGGap, VGGProgressive, vgg_attention
from overt.models.photos.efficientnet import EfficientNetLite, efficientnet_lite
from overt.models.photos.frozen import Frozen
from overt.models.text import (
    StructuredClassifier,
    TextClassifier,
    WordAttention,
    Words,
    redundancy,
)
from overt.models.thinning.choosing import (
    by_chance,
    by_class_attention,
    by_grid,
    by_presence,
    fused,
)
from overt.models.thinning.merging import by_keys, by_states
from overt.models.thinning.thinned import Thinned, merge, thin
from overt.models.vlbert.downstream import for_expressions, for_questions
from overt.models.vlbert.marks import beside, marked
from overt.models.vlbert.model import Classify, Point, Understood, VLBert, VLSizes, answering
from overt.models.vlbert.negatives import nearest_others
from overt.models.vlbert.phrases import Phrases, grounded_phrases
from overt.models.vlbert.regions import GivenRegions, PooledRegions, RegionEye

__all__ = [
    "HAN",
    "VGG",
    "VQA",
    "Adopted",
    "Aggregate",
    "AskSizes",
    "Asked",
    "Attached",
    "AttentionClassifier",
    "AttentiveCNN",
    "Backbone",
    "Backwards",
    "Bag",
    "Blind",
    "CachedEye",
    "CachedRegions",
    "CaptionSizes",
    "Captioner",
    "Cells",
    "Classify",
    "Decision",
    "Decoder",
    "EfficientNetLite",
    "Eye",
    "Frozen",
    "GivenRegions",
    "HardAttention",
    "Kept",
    "Level",
    "Levels",
    "Mean",
    "MeanPool",
    "Model",
    "NormedEye",
    "Order",
    "Output",
    "Pairwise",
    "Phrases",
    "PlacedEye",
    "Point",
    "PooledRegions",
    "QuestionReader",
    "Ragged",
    "Recurrent",
    "RegionEye",
    "Relation",
    "ResNet",
    "ResNetAttention",
    "Rule",
    "Rules",
    "Selection",
    "ShowAskAttend",
    "Sizes",
    "SmallCNN",
    "SoftAttention",
    "StackSizes",
    "StackedAttention",
    "State",
    "StridedEye",
    "StructuredClassifier",
    "Sum",
    "Supervised",
    "TextClassifier",
    "TextTransformer",
    "Texts",
    "Thinned",
    "Told",
    "TrainedEye",
    "Understood",
    "VGGAttention",
    "VGGGap",
    "VGGProgressive",
    "VLBert",
    "VLSizes",
    "WordAttention",
    "Words",
    "additive",
    "adopt",
    "answering",
    "asked",
    "attach",
    "beside",
    "by_chance",
    "by_class_attention",
    "by_grid",
    "by_keys",
    "by_presence",
    "by_states",
    "climb",
    "concat",
    "decoding",
    "dot",
    "drawn",
    "ebb",
    "efficientnet_lite",
    "every",
    "finetune",
    "for_expressions",
    "for_questions",
    "fused",
    "gather",
    "grounded_phrases",
    "indep",
    "keep_above_uniform",
    "keep_all",
    "keep_gumbel",
    "keep_random",
    "keep_share",
    "keep_top",
    "last",
    "marked",
    "merge",
    "nearest_others",
    "norm_a_cell",
    "norm_an_image",
    "parametrised",
    "presence",
    "product",
    "randomly",
    "redundancy",
    "relation_net",
    "scaled_dot",
    "simple_han",
    "softened",
    "straight_through",
    "thin",
    "unasked",
    "uniform",
    "unplaced",
    "vgg_attention",
    "vqa_cp",
]
