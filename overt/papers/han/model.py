"""Bootstrapping Hard Attention: build the network of a row from a config."""

from functools import partial

from torch import nn

from overt.errors import UserError
from overt.experiments.recipe import scale_width
from overt.nn.hard_attention.aggregate import Aggregation as Joining
from overt.nn.hard_attention.aggregate import (
    MeanAggregation,
    NonLocalAggregation,
    RelationAggregation,
    SumAggregation,
)
from overt.nn.hard_attention.attention import (
    CellScore,
    HardAttention,
    content_presence,
    image_presence,
    joint_presence,
)
from overt.nn.hard_attention.selection import (
    Selection,
    gumbel_selection,
    keep_above_uniform,
    keep_all,
    keep_share,
    keep_top,
    linear_decay,
    random_selection,
    soft_to_hard,
    straight_through,
)
from overt.nn.vqa.image_encoders import (
    NORMS,
    CachedImageEncoder,
    CNNEncoder,
    CoordinateEncoder,
    NormalizedEncoder,
    StridedCNNEncoder,
)
from overt.nn.vqa.image_encoders import ImageEncoder as Sees
from overt.nn.vqa.question_encoders import (
    BagOfWordsEncoder,
    LSTMQuestionEncoder,
    QuestionEncoder,
    ReversedLSTMQuestionEncoder,
)
from overt.nn.vqa.stacked_attention import StackedAttention, StackedAttentionSizes
from overt.papers.han.config import (
    HanAggregate,
    HanImageEncoder,
    HanInit,
    HanModel,
    HanNorm,
    HanQuestionEncoder,
    HanSelect,
    HanSoftAttention,
)
from overt.papers.han.networks import HAN, AnswerHead, init_fan_in

CellGrid = tuple[int, tuple[int, int]]  # features per cell, and rows and columns of cells


def build_model(
    model: HanModel, vocabulary: int, answers: int, cached: CellGrid | None = None
) -> nn.Module:
    """Build the network of a row, on cached cells or with its own CNN, and initialize it."""
    made = build_layers(model, vocabulary, answers, cached)
    return init_fan_in(made) if model.init is HanInit.FAN_IN else made


def build_layers(
    model: HanModel, vocabulary: int, answers: int, cached: CellGrid | None
) -> nn.Module:
    """Build the layers of a row's network, with PyTorch's default initialization."""
    eye = image_encoder(model, cached)
    if model.soft is not HanSoftAttention.NONE:
        sizes = StackedAttentionSizes(
            vocabulary,
            answers,
            word=scale_width(300, model.width),
            question=scale_width(model.state, model.width),
            # The paper's stacked attention has 1024 joint features; recipes with narrower layers
            # narrow it too.
            joint=scale_width(min(1024, model.joint), model.width),
            hidden=scale_width(min(512, model.joint), model.width),
            hops=1 if model.soft is HanSoftAttention.SAN1 else 2,
            word_hops=0,
            dropout=model.dropout,
        )
        return StackedAttention(sizes, eye)
    reads = question_encoder(model, vocabulary)
    joint = scale_width(model.joint, model.width)
    # With depth 0 only the question is projected, to the width of the image cells.
    width = joint if model.depth else eye.width
    attend = HardAttention(
        eye.width,
        reads.width,
        None if model.depth is None else joint,
        model.depth,
        cell_selection(model),
        cell_aggregate(model, width, reads.width),
        score_function(model),
    )
    hidden = tuple(scale_width(one, model.width) for one in model.hidden)
    head = AnswerHead(hidden, answers, model.dropout)
    return HAN(eye, reads, attend, head, oracle=model.select is HanSelect.ORACLE)


def image_encoder(model: HanModel, cached: CellGrid | None = None) -> Sees:
    """Return the image encoder that computes the cells."""
    eye: Sees
    match model.eye:
        case HanImageEncoder.CACHED:
            if cached is None:
                raise UserError("model.eye=cached needs photo features, and this dataset has none.")
            eye = CachedImageEncoder(*cached)
            if model.norm is not HanNorm.NONE:
                eye = NormalizedEncoder(eye, NORMS[model.norm.value])
        case HanImageEncoder.STRIDED:
            eye = StridedCNNEncoder(model.width)
        case HanImageEncoder.COARSE:
            # The CNN of relation networks: four strided layers, of 24 maps on CLEVR.
            eye = CNNEncoder([scale_width(maps, model.width) for maps in model.maps], [2] * 4)
        case HanImageEncoder.FINE:
            wide = scale_width(64, model.width)
            eye = CNNEncoder([max(4, wide // 2), wide, wide, wide], [2, 2, 2, 1])
    # Stacked attention with positions is a row of its own (`san2+pos`), whatever `placed` is.
    placed = (
        model.placed
        if model.soft is HanSoftAttention.NONE
        else model.soft is HanSoftAttention.SAN2_POS
    )
    return CoordinateEncoder(eye) if placed else eye


def question_encoder(model: HanModel, vocabulary: int) -> QuestionEncoder:
    """Return the question encoder; relation networks embed words in a quarter of the state."""
    state = scale_width(model.state, model.width)
    match model.reader:
        case HanQuestionEncoder.FORWARD:
            return LSTMQuestionEncoder(vocabulary, scale_width(300, model.width), state)
        # Reproductions of relation networks that learn CLEVR from pixels read the question in
        # reverse.
        case HanQuestionEncoder.BACKWARD:
            return ReversedLSTMQuestionEncoder(
                vocabulary, scale_width(model.state // 4, model.width), state
            )
        case HanQuestionEncoder.BAG:
            return BagOfWordsEncoder(vocabulary)


def cell_selection(model: HanModel) -> Selection:
    """Return the cell selection of a row."""
    top = partial(keep_top, count=model.cells)
    match model.select:
        case HanSelect.ALL:
            return Selection(keep_all)
        # `blind` differs from `top` in its score only, see `score_function`.
        # `oracle` in the evidence that the network gives to `HardAttention.attend`.
        case HanSelect.TOP | HanSelect.BLIND | HanSelect.ORACLE:
            return Selection(top)
        case HanSelect.SHARE:
            return Selection(partial(keep_share, share=model.share))
        case HanSelect.ABOVE_UNIFORM:
            if model.temperature == 1:
                return Selection(keep_above_uniform)
            return Selection(partial(keep_above_uniform, temperature=model.temperature))
        case HanSelect.STRAIGHT_THROUGH:
            return Selection(top, weigh=straight_through)
        case HanSelect.SOFT_TO_HARD:
            return Selection(top, weigh=soft_to_hard)
        case HanSelect.ALL_TO_FEW:
            return Selection(top, widen=linear_decay)
        case HanSelect.GUMBEL:
            return gumbel_selection(model.cells, model.temperature)
        case HanSelect.RANDOM:
            return random_selection(model.cells)


def score_function(model: HanModel) -> CellScore:
    """Return the score of cells: joined with the question, or from the image alone."""
    if model.depth is None:
        return content_presence if model.placed else joint_presence
    return image_presence if model.select is HanSelect.BLIND else joint_presence


def cell_aggregate(model: HanModel, cell: int, question: int) -> Joining:
    """Return the aggregation of the kept cells."""
    match model.aggregate:
        case HanAggregate.SUM:
            return SumAggregation(cell)
        case HanAggregate.MEAN:
            return MeanAggregation(cell)
        case HanAggregate.PAIRWISE:
            # Two heads of 256 features as in the paper, fewer if the joint embedding is narrow.
            size = 2 * scale_width(min(256, model.joint // 2), model.width)
            return NonLocalAggregation(cell, size, heads=2)
        case HanAggregate.RELATION:
            return RelationAggregation(cell, question, scale_width(model.pair, model.width))
