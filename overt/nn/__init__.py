"""Networks and attention modules: wrappers, learned and hard attention, pruning, VQA, captioning.

Each network has `encode(batch)` and `decide(features, mask)`, and returns an `Output`. Internals
and further options are in the sub-packages, such as `overt.nn.vlbert.downstream`.
"""

from overt.nn import mask_perturbation
from overt.nn.backbone_attention.attached_model import AttachedAttention, attach
from overt.nn.backbone_attention.feature_levels import FeatureLevel
from overt.nn.captioning import decoding
from overt.nn.captioning.captioner import CachedRegionEncoder, Captioner, CaptionerSizes
from overt.nn.captioning.decoding import DecodingRules
from overt.nn.cnn import AttentiveCNN, ConvBackbone, ImageFeatures, SmallCNN
from overt.nn.hard_attention.aggregate import (
    MeanAggregation,
    NonLocalAggregation,
    RelationAggregation,
    SumAggregation,
)
from overt.nn.hard_attention.attention import HardAttention, image_presence, joint_presence
from overt.nn.hard_attention.selection import (
    Selection,
    gather_cells,
    gumbel_selection,
    keep_above_uniform,
    keep_all,
    keep_share,
    keep_top,
    linear_decay,
    mask_cells,
    presence,
    random_selection,
    soft_to_hard,
    straight_through,
)
from overt.nn.image_backbones.efficientnet import efficientnet_lite
from overt.nn.learned_attention.attention import (
    AttentionClassifier,
    additive_score,
    average_levels,
    concat_levels,
    dot_score,
    multiply_levels,
    parametrised_score,
    scaled_dot_score,
    uniform_score,
)
from overt.nn.mask_perturbation import Aligner
from overt.nn.output import AttentionModel, Decoder, Output
from overt.nn.text_classifier import StructuredClassifier, TextClassifier
from overt.nn.text_transformer import TextTransformer
from overt.nn.token_pruning.pruned_model import PrunedModel, merge_tokens, prune_tokens
from overt.nn.token_pruning.selection import (
    by_class_attention,
    by_grid,
    by_presence,
    by_random,
    fuse_tokens,
)
from overt.nn.vlbert.model import ClassificationHead, RegionHead, VLBert, VLBertSizes
from overt.nn.vlbert.regions import PooledRegionEncoder, PrecomputedRegionEncoder
from overt.nn.vqa.image_encoders import CachedImageEncoder, CNNEncoder, CoordinateEncoder
from overt.nn.vqa.model import VQA, MeanPooling, QuestionOnly, SoftAttention, VQASizes
from overt.nn.vqa.show_ask_attend import ShowAskAttend, ShowAskAttendSizes
from overt.nn.vqa.stacked_attention import StackedAttention, StackedAttentionSizes
from overt.nn.wrappers.map_selection import all_layers, last_layer
from overt.nn.wrappers.wrapped_model import WrappedModel, wrap

__all__ = [  # noqa: RUF022 - grouped by use
    # Use any PyTorch model
    "wrap",
    "WrappedModel",
    "last_layer",
    "all_layers",
    # Output and protocols of every model
    "Output",
    "AttentionModel",
    "Decoder",
    # Classify images and texts
    "SmallCNN",
    "AttentiveCNN",
    "ConvBackbone",
    "ImageFeatures",
    "efficientnet_lite",
    "TextClassifier",
    "StructuredClassifier",
    "TextTransformer",
    # Add attention to a backbone (Learn To Pay Attention)
    "attach",
    "AttachedAttention",
    "FeatureLevel",
    "AttentionClassifier",
    "additive_score",
    "dot_score",
    "parametrised_score",
    "scaled_dot_score",
    "uniform_score",
    "average_levels",
    "concat_levels",
    "multiply_levels",
    # Select cells: hard attention (HAN, AdaHAN)
    "HardAttention",
    "Selection",
    "presence",
    "joint_presence",
    "image_presence",
    "keep_all",
    "keep_top",
    "keep_share",
    "keep_above_uniform",
    "random_selection",
    "gumbel_selection",
    "soft_to_hard",
    "straight_through",
    "linear_decay",
    "gather_cells",
    "mask_cells",
    "SumAggregation",
    "MeanAggregation",
    "NonLocalAggregation",
    "RelationAggregation",
    # Prune or merge tokens of a Transformer
    "prune_tokens",
    "merge_tokens",
    "PrunedModel",
    "by_presence",
    "by_class_attention",
    "by_grid",
    "by_random",
    "fuse_tokens",
    # Answer questions about images (VQA)
    "VQA",
    "VQASizes",
    "SoftAttention",
    "MeanPooling",
    "QuestionOnly",
    "ShowAskAttend",
    "ShowAskAttendSizes",
    "StackedAttention",
    "StackedAttentionSizes",
    "CachedImageEncoder",
    "CNNEncoder",
    "CoordinateEncoder",
    # Describe images, and align attention by mask perturbation
    "Captioner",
    "CaptionerSizes",
    "CachedRegionEncoder",
    "DecodingRules",
    "decoding",
    "Aligner",
    "mask_perturbation",
    # Match texts and image regions (VL-BERT)
    "VLBert",
    "VLBertSizes",
    "ClassificationHead",
    "RegionHead",
    "PooledRegionEncoder",
    "PrecomputedRegionEncoder",
]
