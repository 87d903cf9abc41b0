"""Hard attention: the rows of its paper on VQA-CP and CLEVR, and on sets that stand in for them.

Malinowski, Doersch, Santoro and Battaglia, "Learning Visual Question Answering by Bootstrapping
Hard Attention", ECCV 2018, https://arxiv.org/abs/1808.00300.

A row is a way to choose cells and a way to make one vector of them. The paper's rows are `top` and
`above-uniform`, and `all`, which is no attention. The others ask what its rule is worth: `blind`
looks at the image alone, `random` at nothing, `straight-through`, `gumbel` and `soft-to-hard` learn
the choice by other means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from overt.recipes.han.figures import figures
from overt.recipes.recipe import Context, Figure, Train

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment


class Files(StrEnum):
    """The data sets that lie on disk or in a package."""

    EASY_VQA = "easyvqa"
    DAQUAR = "daquar"
    VQA_CP = "vqacp2"
    CLEVR = "clevr"


class Select(Enum):
    """How cells are chosen: `top` is HAN and `above-uniform` AdaHAN (eq. 6).

    `all-to-few` is HAN that keeps all cells for half of its training, then fewer and fewer until
    three quarters of it are done.
    """

    ALL = "all"
    TOP = "top"
    SHARE = "share"
    ABOVE_UNIFORM = "above-uniform"
    STRAIGHT_THROUGH = "straight-through"
    SOFT_TO_HARD = "soft-to-hard"
    ALL_TO_FEW = "all-to-few"
    GUMBEL = "gumbel"
    RANDOM = "random"
    BLIND = "blind"


class Aggregate(Enum):
    """What is made of the cells: `pairwise` is eq. 7, `relation` a relation network."""

    SUM = "sum"
    MEAN = "mean"
    PAIRWISE = "pairwise"
    RELATION = "relation"


class Soft(Enum):
    """Stacked attention in the place of hard: its hops, and whether cells say where they stand."""

    NONE = "none"
    SAN1 = "san1"
    SAN2 = "san2"
    SAN2_POS = "san2+pos"


class Eye(Enum):
    """Where cells come from.

    `cached` are features of photos. The others learn with the rest: `strided` is the CNN of section
    4.7 with cells of 32 pixels, `coarse` that of relation networks with cells of 16, `fine` has
    cells of 8.
    """

    CACHED = "cached"
    STRIDED = "strided"
    COARSE = "coarse"
    FINE = "fine"


class Norm(Enum):
    """What cached features are divided by: the norm of the cell, of the whole image, or nothing."""

    CELL = "cell"
    IMAGE = "image"
    NONE = "none"


class Reader(Enum):
    """How a question is read: by an LSTM, from its end, or as the set of its words."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BAG = "bag"


class Init(Enum):
    """What layers begin with: PyTorch's numbers, or those of variance 1 / inputs.

    The second are three times as large in variance, and what the library of the paper's authors
    begins with where nothing is said. A relation network on a few cells adds up few pairs, so that
    it matters how large each is.
    """

    TORCH = "torch"
    FAN_IN = "fan-in"


class Schedule(Enum):
    """How the rate goes: up and down a cosine, `fixed`, or doubled until it is what it should be.

    Relation networks learn CLEVR from pixels under `doubling` and stop near 65 % without.
    """

    COSINE = "cosine"
    FIXED = "fixed"
    DOUBLING = "doubling"


@dataclass(frozen=True)
class SortOfClevr:
    """Drawn pictures of six things; `world` is the seed of all, and 20 questions come a picture.

    `train`, `val` and `test` are how many pictures each part has; `limit` caps the questions of
    every part. `ternary` adds ten questions about three things. In training all questions of a
    picture come together, and `train.batch` counts pictures.
    """

    limit: int | None = None
    world: int = 1
    train: int = 9800
    val: int = 200
    test: int = 400
    ternary: bool = False


@dataclass(frozen=True)
class Scenes:
    """Questions about scenes whose deciding things are known; `world` is the seed of all.

    `train`, `val` and `test` are how many scenes each split has, with four questions to a scene;
    `limit` caps all three. `size` is the pixels of a side.
    """

    limit: int | None = None
    world: int = 1
    train: int = 24000
    val: int = 200
    test: int = 2016
    size: int = 64


@dataclass(frozen=True)
class Questions:
    """Questions about pictures of a set; `limit` caps the questions of every part.

    `size` is the side to which photos are brought and `answers` how many classes there are, where
    not all. An eye that is `cached` looks at the cache of features in the folder `features`; where
    that is none, features are made once by `backbone` and kept: `efficientnet-lite0`, a folder with
    a CNN as Hugging Face writes it, or `timm:NAME`.
    """

    name: Files
    limit: int | None = None
    size: int = field(default=320, metadata={"low": 32, "high": 1024})
    answers: int | None = field(default=None, metadata={"low": 1})
    features: str | None = None
    backbone: str = "efficientnet-lite0"


@dataclass(frozen=True)
class Model:
    """Which cells count and what is made of them; `width` multiplies every layer but the answers.

    `cells` is k of `top`, `straight-through`, `soft-to-hard`, `all-to-few`, `gumbel`, `random` and
    `blind`; `share` that of `share`; `temperature` divides the norms of `above-uniform` and
    `gumbel`. Question and cells are aligned by `depth` layers of `joint` features and added (eq.
    2-4); with `none` they are not, and cells are judged by their own norm, as a relation network
    takes them. `placed` cells say where they stand. `state` is how many features a question is read
    to by an LSTM. `hidden` are the features of the layers before the answers, and `dropout` the
    share, 0 to 1, that is dropped after them.
    `start` is the folder of a saved network of the same layers, whose weights this one begins with:
    what has learned to look at all cells can so be taught to do with a few.
    """

    select: Select = Select.ABOVE_UNIFORM
    cells: int = field(default=16, metadata={"low": 1})
    share: float = field(default=0.16, metadata={"low": 0.001, "high": 1})
    temperature: float = field(default=1.0, metadata={"low": 1e-6})
    aggregate: Aggregate = Aggregate.SUM
    depth: int | None = field(default=2, metadata={"low": 0, "high": 8})
    soft: Soft = Soft.NONE
    eye: Eye = Eye.CACHED
    placed: bool = False
    norm: Norm = Norm.CELL
    reader: Reader = Reader.FORWARD
    joint: int = field(default=2048, metadata={"low": 1})
    state: int = field(default=512, metadata={"low": 1})
    hidden: tuple[int, ...] = field(default=(1024, 2048), metadata={"low": 1})
    dropout: float = 0.0
    width: float = 1.0
    init: Init = Init.TORCH
    start: str | None = None


@dataclass(frozen=True)
class Adam:
    """How the rate of `train` goes; `every` is after how many epochs it is doubled."""

    schedule: Schedule = Schedule.COSINE
    every: int = field(default=20, metadata={"low": 1})


COUNTED = (
    Select.TOP,
    Select.STRAIGHT_THROUGH,
    Select.SOFT_TO_HARD,
    Select.ALL_TO_FEW,
    Select.GUMBEL,
    Select.RANDOM,
    Select.BLIND,
)
NAMES: dict[str, Files] = {
    "han-easyvqa": Files.EASY_VQA,
    "han-daquar": Files.DAQUAR,
    "han-vqacp": Files.VQA_CP,
    "han-clevr": Files.CLEVR,
}


@dataclass(frozen=True)
class HanRecipe:
    """A network that answers questions from a few cells, or from all of them, on one data set."""

    name: str
    about: str
    data: SortOfClevr | Scenes | Questions
    model: Model
    train: Train
    adam: Adam = Adam()

    def __post_init__(self) -> None:
        own = NAMES.get(self.name)
        if own is not None and getattr(self.data, "name", None) is not own:
            raise ValueError(f"{self.name} is about {own}")
        photos = own in (Files.DAQUAR, Files.VQA_CP)
        if self.model.eye is Eye.CACHED and not photos:
            raise ValueError("model.eye=cached is for photos: han-daquar and han-vqacp")
        if self.model.soft is Soft.NONE and self.model.depth is None:
            if self.model.aggregate is not Aggregate.RELATION:
                raise ValueError(
                    "model.depth=none needs model.aggregate=relation: nothing else is told the "
                    "question"
                )
            if self.model.select is Select.BLIND:
                raise ValueError("model.depth=none chooses by the image alone: say select=top")

    @property
    def set_name(self) -> str:
        """The data set, by the name that figures go by."""
        match self.data:
            case SortOfClevr():
                return "sortclevr"
            case Scenes():
                return "scenes"
            case Questions():
                return str(self.data.name)

    @property
    def paper(self) -> Mapping[str, Figure]:
        """What is stated for this row on this data set."""
        label = label_of(self.set_name, self.model)
        return {} if label is None else figures(self.set_name, label)

    def build(self, context: Context) -> "Experiment":
        """The data, the network and one stage of training."""
        from overt.recipes.han import building as han_building

        return han_building.build(self, context)


# --- the rows


def _hard(
    select: Select,
    aggregate: Aggregate,
    cells: int = 16,
    depth: int | None = 2,
    eye: Eye = Eye.CACHED,
) -> Model:
    return Model(select=select, cells=cells, aggregate=aggregate, depth=depth, eye=eye)


_SUM, _PAIRS, _RELATION = Aggregate.SUM, Aggregate.PAIRWISE, Aggregate.RELATION

WARM = 4.0  # of AdaHAN: norms of many features are far apart, and at 1 it keeps few cells

IN_TABLE_1: dict[str, Model] = {
    **{f"han-sum-{k}": _hard(Select.TOP, _SUM, k) for k in (16, 32, 48, 64)},
    "sum": _hard(Select.ALL, _SUM),
    **{f"han-pairwise-{k}": _hard(Select.TOP, _PAIRS, k) for k in (16, 32, 48)},
    "pairwise": _hard(Select.ALL, _PAIRS),
    "san1": Model(soft=Soft.SAN1),
    "san2": Model(soft=Soft.SAN2),
    "san2-pos": Model(soft=Soft.SAN2_POS),
}
IN_TABLE_2: dict[str, Model] = {
    "adahan-sum": _hard(Select.ABOVE_UNIFORM, _SUM),
    "adahan-pairwise": _hard(Select.ABOVE_UNIFORM, _PAIRS),
}
IN_TABLE_3: dict[str, Model] = {
    f"han-sum-{k}-depth0": _hard(Select.TOP, _SUM, k, depth=0) for k in (16, 32, 48)
}
IN_SIMPLE: dict[str, Model] = {
    "simple-san": Model(soft=Soft.SAN2, eye=Eye.STRIDED),
    "simple-han": replace(_hard(Select.SHARE, _SUM), share=0.16, eye=Eye.STRIDED),
}
# What the paper does not ask: whether its rule is better than chance, than a choice that does not
# hear the question, and than choices that are learned.
CONTROLS: dict[str, Model] = {
    f"{name}-sum-16": _hard(select, _SUM)
    for name, select in (
        ("random", Select.RANDOM),
        ("blind", Select.BLIND),
        ("gumbel", Select.GUMBEL),
        ("straight-through", Select.STRAIGHT_THROUGH),
        ("soft-to-hard", Select.SOFT_TO_HARD),
    )
} | {"adahan-warm-sum": replace(_hard(Select.ABOVE_UNIFORM, _SUM), temperature=WARM)}


def relational(cells: int, fine: int) -> dict[str, Model]:
    """The rows with a relation network, where `cells`, or `fine`, are 25 % of a picture's.

    `rn` is that of Santoro et al. 2017, over cells as the CNN made them. `rn-aligned` differs from
    `han-rn` by the choice alone: it keeps all. `han-rn-fine` keeps 25 % of cells of 8 pixels, which
    are four times as many. A thing of Sort-of-CLEVR lies in several cells of 5 x 5, and six of them
    cannot show six things.
    """
    return {
        "rn": _hard(Select.ALL, _RELATION, cells, depth=None),
        "rn-aligned": _hard(Select.ALL, _RELATION, cells),
        "han-rn": _hard(Select.TOP, _RELATION, cells),
        "adahan-rn": _hard(Select.ABOVE_UNIFORM, _RELATION, cells),
        "adahan-warm-rn": replace(_hard(Select.ABOVE_UNIFORM, _RELATION, cells), temperature=WARM),
        "han-sum": _hard(Select.TOP, _SUM, cells),
        "san2-pos": Model(soft=Soft.SAN2_POS, cells=cells),
        "st-rn": _hard(Select.STRAIGHT_THROUGH, _RELATION, cells),
        "all-to-few-rn": _hard(Select.ALL_TO_FEW, _RELATION, cells),
        "gumbel-rn": _hard(Select.GUMBEL, _RELATION, cells),
        "blind-rn": _hard(Select.BLIND, _RELATION, cells),
        "random-rn": _hard(Select.RANDOM, _RELATION, cells),
        "han-rn-fine": _hard(Select.TOP, _RELATION, fine, eye=Eye.FINE),
    }


# cells that are 25 % of 5 x 5 and of 8 x 8, and of the finer grids of 10 x 10 and 16 x 16
QUARTER = {"sortclevr": (6, 25), "clevr": (16, 64)}


def rows_of(data: str) -> dict[str, Model]:
    """Every row on a data set by its label."""
    if data in QUARTER:
        return relational(*QUARTER[data])
    found = {**IN_TABLE_1, **IN_TABLE_2, **IN_TABLE_3, **CONTROLS}
    if data in ("scenes", "easyvqa"):  # 8 x 8 cells: 64 of them are all, and all learn end to end
        return {label: model for label, model in found.items() if label != "han-sum-64"}
    return {**found, **IN_SIMPLE}


OWN_EYES = (Eye.STRIDED, Eye.FINE)  # of rows that do not look as their recipe does


def changes(model: Model) -> tuple[str, ...]:
    """What makes the network of a recipe that of this row, as `--set` would."""
    wanted: dict[str, object] = {}
    if model.eye in OWN_EYES:
        wanted["eye"] = model.eye.value
    if model.soft is not Soft.NONE:
        wanted["soft"] = model.soft.value
    else:
        wanted["select"], wanted["aggregate"] = model.select.value, model.aggregate.value
        wanted["depth"] = "none" if model.depth is None else model.depth
        if model.select in COUNTED:
            wanted["cells"] = model.cells
        if model.select is Select.SHARE:
            wanted["share"] = model.share
        if model.select is Select.ABOVE_UNIFORM and model.temperature != 1:
            wanted["temperature"] = model.temperature
    return tuple(f"model.{key}={value}" for key, value in wanted.items())


def label_of(data: str, model: Model) -> str | None:
    """The row that a network is, whatever its sizes; None if it is none."""
    for label, one in rows_of(data).items():
        if _kind(data, one) == _kind(data, model):
            return label
    return None


def _kind(data: str, model: Model) -> tuple[object, ...]:
    simple = model.eye is Eye.STRIDED or (data in QUARTER and model.eye is Eye.FINE)
    if model.soft is not Soft.NONE:
        return model.soft, simple
    number: object = None
    if model.select in COUNTED:
        number = model.cells
    elif model.select is Select.SHARE:
        number = model.share
    elif model.select is Select.ABOVE_UNIFORM:
        number = model.temperature
    return model.select, number, model.aggregate, model.depth, simple


# --- the recipes

_WORLD = Model(
    eye=Eye.FINE, placed=True, joint=256, state=128, hidden=(256, 256), aggregate=Aggregate.SUM
)
_RELATIONS = Model(
    Select.TOP,
    aggregate=Aggregate.RELATION,
    eye=Eye.COARSE,
    placed=True,
    joint=128,
    state=128,
    hidden=(256, 256),
    dropout=0.5,
)


def han_sortclevr() -> HanRecipe:
    """Sort-of-CLEVR, by default a relation network on 6 of 25 cells (HAN+RN). No paper's number.

    It stands in for CLEVR, of which figure 3 is. A relation network over all cells is stated to
    reach more than 94 % on both kinds of question (A simple neural network module for relational
    reasoning); `overt table han-sortclevr` has every row. Eight pictures a step, layers that begin
    by `fan-in` and no dropout are what got rows that choose off a plateau, on validation.
    """
    return HanRecipe(
        "han-sortclevr",
        "Sort-of-CLEVR, a relation network on the quarter of the cells that matters",
        SortOfClevr(),
        replace(_RELATIONS, cells=6, reader=Reader.BAG, dropout=0.0, init=Init.FAN_IN),
        Train(epochs=40, batch=8, rate=5e-4, decay=1e-4, clip=5.0, save_every=2000),
    )


def han_scenes() -> HanRecipe:
    """Questions about scenes, where the deciding things are known. No paper's number.

    `overt table han-scenes` has the rows of Tables 1 to 3, with 64 cells in the place of 100.
    """
    return HanRecipe(
        "han-scenes",
        "questions about scenes, answered from the cells that matter",
        Scenes(),
        _WORLD,
        Train(epochs=14, batch=32, rate=2e-3, decay=1e-3, save_every=2000),
    )


def han_easyvqa() -> HanRecipe:
    """easy-VQA, end to end, with 64 cells in the place of 100. No paper's number."""
    return HanRecipe(
        "han-easyvqa",
        "easy-VQA, answered from the cells that matter",
        Questions(Files.EASY_VQA, size=64),
        _WORLD,
        Train(epochs=12, batch=128, rate=2e-3, decay=1e-3, save_every=2000),
    )


def han_daquar() -> HanRecipe:
    """DAQUAR with features of an ImageNet CNN, 10 x 10 cells as in the paper. No paper's number.

    Photos are brought to 320 x 320 pixels for the sake of the grid, whatever their files have. The
    set is a seventieth of VQA-CP, so layers are narrower and half of them is dropped.
    """
    return HanRecipe(
        "han-daquar",
        "DAQUAR, answered from the cells of a pretrained CNN that matter",
        Questions(Files.DAQUAR),
        Model(joint=512, state=256, hidden=(512, 512), dropout=0.5),
        Train(epochs=20, batch=64, rate=5e-4, decay=1e-3, save_every=2000),
    )


def han_vqacp() -> HanRecipe:
    """VQA-CP v2 as in the paper, by default AdaHAN+sum on cached features of 10 x 10 cells.

    The paper (Bootstrapping Hard Attention, Table 2) reaches 27.40 % with it, keeping 25.66 of 100
    cells; `overt table han-1`, `han-2` and `han-3` have every row. Its features are those of a
    ResNet-101, which you have to cache (`data.features`) or name (`data.backbone`). Adam with one
    rate, batches of 2 x 128, no validation: as long as stated, and unstated in length.
    """
    return HanRecipe(
        "han-vqacp",
        "VQA-CP v2, answered from the cells of a pretrained CNN that matter",
        Questions(Files.VQA_CP, answers=1000),
        Model(),
        Train(epochs=30, batch=256, rate=1e-4, decay=0.0, clip=None, save_every=5000),
        Adam(Schedule.FIXED),
    )


def han_clevr() -> HanRecipe:
    """CLEVR from pixels, by default a relation network on 16 of 64 cells (HAN+RN).

    The paper (Bootstrapping Hard Attention, section 4.8) reaches 93.90 % with it on the test part,
    whose answers are not public: ours is tested on the official validation part, and validated on
    the last 10,000 training questions. `overt table han-clevr` has every row.
    """
    return HanRecipe(
        "han-clevr",
        "CLEVR, a relation network on the quarter of the cells that matters",
        Questions(Files.CLEVR, size=128),
        replace(_RELATIONS, cells=16, reader=Reader.BACKWARD),
        Train(epochs=350, batch=640, rate=5e-4, decay=1e-4, clip=50.0, save_every=5000),
        Adam(Schedule.DOUBLING),
    )
