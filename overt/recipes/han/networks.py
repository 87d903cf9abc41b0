"""The networks of the rows of hard attention, from plain values."""

from functools import partial

from torch import nn

from overt.errors import BadInput
from overt.models.answering.eyes import (
    NORMS,
    CachedEye,
    NormedEye,
    PlacedEye,
    StridedEye,
    TrainedEye,
)
from overt.models.answering.eyes import Eye as Sees
from overt.models.answering.questions import Backwards, Bag, QuestionReader, Recurrent
from overt.models.answering.stacked import StackedAttention, StackSizes
from overt.models.hard.aggregate import Aggregate as Joining
from overt.models.hard.aggregate import Mean, Pairwise, Relation, Sum
from overt.models.hard.attention import HardAttention, Score, asked, unasked, unplaced
from overt.models.hard.nets import HAN, Decision, fan_in
from overt.models.hard.selection import (
    Selection,
    drawn,
    ebb,
    keep_above_uniform,
    keep_all,
    keep_share,
    keep_top,
    randomly,
    softened,
    straight_through,
)
from overt.recipes.han.recipe import Aggregate, Eye, Init, Model, Norm, Reader, Select, Soft

Grid = tuple[int, tuple[int, int]]  # numbers a cell, and rows and columns of cells


def network(model: Model, vocabulary: int, answers: int, cached: Grid | None = None) -> nn.Module:
    """The network of a row, on cached cells or on its own, with the numbers it begins with."""
    made = layers_of(model, vocabulary, answers, cached)
    return fan_in(made) if model.init is Init.FAN_IN else made


def layers_of(model: Model, vocabulary: int, answers: int, cached: Grid | None) -> nn.Module:
    """The layers of a row's network, as PyTorch begins them."""
    eye = eye_of(model, cached)
    if model.soft is not Soft.NONE:
        sizes = StackSizes(
            vocabulary,
            answers,
            word=_times(model.width, 300),
            question=_times(model.width, model.state),
            joint=_times(model.width, min(1024, model.joint)),
            hidden=_times(model.width, min(512, model.joint)),
            hops=1 if model.soft is Soft.SAN1 else 2,
            word_hops=0,
            dropout=model.dropout,
        )
        return StackedAttention(sizes, eye)
    reads = question_reader(model, vocabulary)
    joint = _times(model.width, model.joint)
    width = joint if model.depth else eye.width
    attend = HardAttention(
        eye.width,
        reads.width,
        None if model.depth is None else joint,
        model.depth,
        selection_of(model),
        joining_of(model, width, reads.width),
        score_of(model),
    )
    hidden = tuple(_times(model.width, one) for one in model.hidden)
    return HAN(eye, reads, attend, Decision(hidden, answers, model.dropout))


def eye_of(model: Model, cached: Grid | None = None) -> Sees:
    """Where the cells of a network come from."""
    eye: Sees
    match model.eye:
        case Eye.CACHED:
            if cached is None:
                raise BadInput("model.eye=cached needs features of photos, and there are none.")
            eye = CachedEye(*cached)
            if model.norm is not Norm.NONE:
                eye = NormedEye(eye, NORMS[model.norm.value])
        case Eye.STRIDED:
            eye = StridedEye(model.width)
        case Eye.COARSE:
            eye = TrainedEye([_times(model.width, 24)] * 4, [2] * 4)
        case Eye.FINE:
            wide = _times(model.width, 64)
            eye = TrainedEye([max(4, wide // 2), wide, wide, wide], [2, 2, 2, 1])
    placed = model.placed if model.soft is Soft.NONE else model.soft is Soft.SAN2_POS
    return PlacedEye(eye) if placed else eye


def question_reader(model: Model, vocabulary: int) -> QuestionReader:
    """How a network reads; relation networks have embedded words of a quarter of the state."""
    state = _times(model.width, model.state)
    match model.reader:
        case Reader.FORWARD:
            return Recurrent(vocabulary, _times(model.width, 300), state)
        case Reader.BACKWARD:
            return Backwards(vocabulary, _times(model.width, model.state // 4), state)
        case Reader.BAG:
            return Bag(vocabulary)


def selection_of(model: Model) -> Selection:
    """How the cells of a row are chosen."""
    top = partial(keep_top, count=model.cells)
    match model.select:
        case Select.ALL:
            return Selection(keep_all)
        case Select.TOP | Select.BLIND:
            return Selection(top)
        case Select.SHARE:
            return Selection(partial(keep_share, share=model.share))
        case Select.ABOVE_UNIFORM:
            if model.temperature == 1:
                return Selection(keep_above_uniform)
            return Selection(partial(keep_above_uniform, temperature=model.temperature))
        case Select.STRAIGHT_THROUGH:
            return Selection(top, weigh=straight_through)
        case Select.SOFT_TO_HARD:
            return Selection(top, weigh=softened)
        case Select.ALL_TO_FEW:
            return Selection(top, widen=ebb)
        case Select.GUMBEL:
            return drawn(model.cells, model.temperature)
        case Select.RANDOM:
            return randomly(model.cells)


def score_of(model: Model) -> Score:
    """What cells are chosen by: joined with the question, or the image alone."""
    if model.depth is None:
        return unplaced if model.placed else asked
    return unasked if model.select is Select.BLIND else asked


def joining_of(model: Model, cell: int, question: int) -> Joining:
    """What is made of the kept cells."""
    match model.aggregate:
        case Aggregate.SUM:
            return Sum(cell)
        case Aggregate.MEAN:
            return Mean(cell)
        case Aggregate.PAIRWISE:
            size = 2 * _times(model.width, min(256, model.joint // 2))
            return Pairwise(cell, size, heads=2)
        case Aggregate.RELATION:
            return Relation(cell, question, _times(model.width, 256))


def _times(width: float, features: int) -> int:
    return max(4, round(width * features))
