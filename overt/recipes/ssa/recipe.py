"""Self Supervision for Attention Networks: its tasks, its targets and losses, and their placebos.

Patro, Kasturi, Jain and Namboodiri, WACV 2021. A network is trained; asked about every training
sample with parts removed, it finds the input on which it is most sure of the truth; its attention
there becomes the target of a second training, from scratch and of the same length.

What a target is worth is said by what stands beside it: `shuffled` and the other placebos cost the
same and have the content gone, `none` is the first training alone, `truth` is what no search knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from overt.recipes.recipe import NO_FIGURES, Context, Figure, Train
from overt.recipes.ssa.figures import figures

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment


class Files(StrEnum):
    """The data sets of this paper, and those that stand in for what cannot be had."""

    TREC = "trec6"
    CIFAR10 = "cifar10"
    EASY_VQA = "easyvqa"
    DAQUAR = "daquar"
    YELP = "yelp_hat"
    VQA = "vqa_hat"


class Target(Enum):
    """What attention is taught.

    `surrogate` is the paper's. Placebos of it: `shuffled` among all samples, `shuffled-in-class`,
    `scattered` (the same weights on other keys), `random` maps, the `uniform` map. `own` is what
    the first network looked at with nothing removed, `gradcam` what its answer rests on by
    gradient, `truth` what the data set knows.
    """

    NONE = "none"
    SURROGATE = "surrogate"
    SHUFFLED = "shuffled"
    IN_CLASS = "shuffled-in-class"
    SCATTERED = "scattered"
    RANDOM = "random"
    UNIFORM = "uniform"
    OWN = "own"
    GRADCAM = "gradcam"
    TRUTH = "truth"


class Distance(Enum):
    """How far attention is from its target: eq. 3 to 6 of the paper, and others."""

    MSE = "mse"
    CORAL = "coral"
    MMD = "mmd"
    MMD_LINEAR = "mmd-linear"
    ADVERSARIAL = "adversarial"
    KL = "kl"
    CROSS_ENTROPY = "cross-entropy"
    EMD = "emd"


class Counts(Enum):
    """What `weight` multiplies: the scale found on the first batches, or nothing."""

    FOUND = "found"
    PLAIN = "plain"


class Over(Enum):
    """Which attention is taught, where a network has two."""

    IMAGE = "image"
    QUESTION = "question"
    BOTH = "both"


class Sees(Enum):
    """What a discriminator is given beside a map: the `mean` of the sample's features alone, or
    also what the map takes from them, `attended`.

    With `nothing` it judges maps by themselves, as the code published for the paper's forerunner
    does: then it only learns how targets are spread.
    """

    NOTHING = "nothing"
    MEAN = "mean"
    ATTENDED = "attended"


class Start(Enum):
    """What the second training begins with."""

    SCRATCH = "scratch"
    BASELINE = "baseline"


class Search(Enum):
    """How masks are tried: `all` there are, `refine` one flip at a time, or weighted means."""

    ALL = "all"
    REFINE = "refine"
    MEAN_MAP = "mean-map"
    MEAN_MASK = "mean-mask"


@dataclass(frozen=True)
class Texts:
    """Questions by what they ask for, or reviews; `limit` caps the items of every split."""

    name: Files
    limit: int | None = None


@dataclass(frozen=True)
class Pictures:
    """Pictures to classify; `limit` caps the pictures of every split.

    They are not cropped or mirrored: a target belongs to the picture that was searched.
    """

    name: Files
    limit: int | None = None


@dataclass(frozen=True)
class Questions:
    """Questions about pictures; `limit` caps the questions of every split.

    `size` is the side to which photos are brought; `features` the folder of a cache of features,
    which then stand in for photos; `answers` how many classes there are, where not all.
    """

    name: Files
    limit: int | None = None
    size: int = field(default=224, metadata={"low": 16, "high": 1024})
    features: str | None = None
    answers: int | None = field(default=None, metadata={"low": 1})


@dataclass(frozen=True)
class Scenes:
    """Questions about scenes whose deciding things are known; `world` is the seed of all.

    `train`, `val` and `test` are how many scenes each split has, with four questions to a scene;
    `limit` caps all three. `size` is the pixels of a side.
    """

    limit: int | None = None
    world: int = 1
    train: int = 12000
    val: int = 200
    test: int = 1008
    size: int = 64


class Reader(Enum):
    """Which text classifier: a `small` one, or that of Lin et al. in its full `structured` size."""

    SMALL = "small"
    STRUCTURED = "structured"


@dataclass(frozen=True)
class TextModel:
    """A BiLSTM with attention over the words.

    `width` multiplies the features of every layer; `dropout` is a share, 0 to 1. `hops` is how many
    maps of the words there are, and `penalty` the weight of a loss on maps that are alike.
    """

    net: Reader = Reader.SMALL
    width: float = 1.0
    dropout: float = 0.4
    hops: int = 4
    penalty: float = 0.01


@dataclass(frozen=True)
class Pretrained:
    """A pretrained encoder that is tuned as a whole.

    `folder` holds it as Hugging Face writes it; none takes the MiniLM that is installed. How wide
    its layers are is not ours to say: `width` is the share of its layers that is kept, from below.
    """

    folder: str | None = None
    width: float = field(default=1.0, metadata={"high": 1})


@dataclass(frozen=True)
class PictureModel:
    """A CNN to 32 x 8 x 8 features with attention over the 64 cells.

    `width` multiplies the features of every layer; `dropout`, a share of 0 to 1, is that before the
    classes.
    """

    width: float = 1.0
    dropout: float = 0.1


class Answerer(Enum):
    """Which network answers: a `small` one of ours, or that of Kazemi and Elqursh."""

    SMALL = "small"
    SHOW_ASK_ATTEND = "show-ask-attend"


@dataclass(frozen=True)
class AskModel:
    """A network that looks at a picture and at the words of a question.

    `width` multiplies the features of every layer; `dropout` is a share, 0 to 1. `glimpses` is how
    many heads look at the picture.
    """

    net: Answerer = Answerer.SMALL
    width: float = 1.0
    glimpses: int = 2
    dropout: float = 0.0


@dataclass(frozen=True)
class Surrogate:
    """How targets are searched for.

    `count` masks a picture, with cells of `scale` features a side or the `grid` given, `shift`ed at
    random or not; texts without one or several of `words` at a time, at most `texts` choices.
    `refine` asks `probes` times.
    """

    search: Search = Search.ALL
    count: int = field(default=500, metadata={"low": 1})
    scale: int = field(default=2, metadata={"low": 1})
    grid: tuple[int, int] | None = field(default=None, metadata={"low": 1})
    shift: bool = False
    words: tuple[int, ...] = field(default=(2,), metadata={"low": 1})
    texts: int = field(default=1000, metadata={"low": 1})
    probes: int = field(default=50, metadata={"low": 1})


@dataclass(frozen=True)
class Supervise:
    """What attention is taught, how far from it counts, and how much.

    `weight` multiplies the scale found (gamma and beta of section 3.3), or is the weight itself.
    `rival` is the rate of the discriminator, `sees` what it is given.
    """

    target: Target = Target.SURROGATE
    loss: Distance = Distance.ADVERSARIAL
    over: Over = Over.IMAGE
    counts: Counts = Counts.FOUND
    weight: float = 1.0
    start: Start = Start.SCRATCH
    rival: float = field(default=1e-3, metadata={"low": 0})
    sees: Sees = Sees.MEAN


ONCE = Train()
SEARCHED = frozenset(
    {
        Target.SURROGATE,
        Target.SHUFFLED,
        Target.IN_CLASS,
        Target.SCATTERED,
        Target.RANDOM,
        Target.UNIFORM,
        Target.OWN,
    }
)


@dataclass(frozen=True)
class SsaRecipe:
    """A task of the paper: a first training, a search for targets, and a second training."""

    name: str
    about: str
    data: Texts | Pictures | Questions | Scenes
    model: TextModel | Pretrained | PictureModel | AskModel
    surrogate: Surrogate = Surrogate()
    supervise: Supervise = Supervise()
    train: Train = ONCE

    def __post_init__(self) -> None:
        own = NAMES.get(self.name)
        if own is not None and getattr(self.data, "name", None) is not own:
            raise ValueError(f"{self.name} is about {own}")
        if self.supervise.over is not Over.IMAGE and not isinstance(self.model, AskModel):
            raise ValueError("supervise.over is for networks that look at a picture and at words")

    @property
    def taught(self) -> bool:
        """Whether there is a second training at all."""
        start = self.supervise.start
        return self.supervise.target is not Target.NONE or start is Start.BASELINE

    @property
    def searched(self) -> bool:
        """Whether targets come from a search, or are placebos of such."""
        return self.supervise.target in SEARCHED

    @property
    def paper(self) -> Mapping[str, Figure]:
        """What the paper states for this row of its tables."""
        name = getattr(self.data, "name", None)
        weighted = self.surrogate.search in (Search.MEAN_MAP, Search.MEAN_MASK)
        if name is None or weighted or isinstance(self.model, Pretrained):
            return NO_FIGURES
        taught = self.supervise
        alone = "" if self.taught else "none"  # one that was trained on is not the paper's baseline
        row = {Target.NONE: alone, Target.SURROGATE: taught.loss.value}.get(taught.target, "")
        return figures(str(name), row, taught.over.value)

    def build(self, context: Context) -> "Experiment":
        """The data, the networks, and the stages that are left to run."""
        from overt.recipes.ssa import building as ssa_building

        return ssa_building.build(self, context)


NAMES = {
    "ssa-trec": Files.TREC,
    "ssa-minilm": Files.TREC,
    "ssa-cifar10": Files.CIFAR10,
    "ssa-easyvqa": Files.EASY_VQA,
    "ssa-daquar": Files.DAQUAR,
    "ssa-yelp": Files.YELP,
    "ssa-vqa": Files.VQA,
}


def ssa_trec() -> SsaRecipe:
    """TREC-6 with attention taught by what the network finds without pairs of words.

    The paper (Self Supervision for Attention Networks, Table 1) reaches 84.91 % with the
    adversarial loss, and 81.20 % without any; `overt table ssa-1` has every row. Our classifier is
    a twentieth of the paper's size: `model.net=structured model.hops=30` is that one.
    """
    return SsaRecipe(
        "ssa-trec",
        "TREC-6, attention over words taught by its own best look",
        Texts(Files.TREC),
        TextModel(),
        train=Train(epochs=10, batch=64, rate=3e-3, decay=1e-2, save_every=1000),
    )


def ssa_minilm() -> SsaRecipe:
    """The same with a pretrained encoder, MiniLM, tuned as a whole. No paper's number."""
    return SsaRecipe(
        "ssa-minilm",
        "TREC-6, the class token's attention in a tuned MiniLM",
        Texts(Files.TREC),
        Pretrained(),
        Surrogate(search=Search.REFINE, probes=16),
        train=Train(epochs=3, batch=32, rate=1e-4, decay=1e-2, save_every=1000),
    )


def ssa_cifar10() -> SsaRecipe:
    """CIFAR-10 with attention over 8 x 8 cells taught by what is found under 500 grids.

    The paper (Self Supervision for Attention Networks, Table 2) reaches 71.12 % with the
    adversarial loss, and 69.59 % without any; `overt table ssa-2` has every row.
    """
    return SsaRecipe(
        "ssa-cifar10",
        "CIFAR-10, attention over cells taught by its own best look",
        Pictures(Files.CIFAR10),
        PictureModel(),
        train=Train(epochs=12, batch=256, rate=4e-3, decay=1e-3, save_every=1000),
    )


def ssa_easyvqa() -> SsaRecipe:
    """easy-VQA with attention over cells, words or both taught. No paper's number."""
    return SsaRecipe(
        "ssa-easyvqa",
        "easy-VQA, attention taught by its own best look",
        Questions(Files.EASY_VQA, size=64),
        AskModel(dropout=0.1),
        Surrogate(search=Search.REFINE),
        train=Train(epochs=12, batch=256, rate=4e-3, decay=1e-3, save_every=1000),
    )


def ssa_daquar() -> SsaRecipe:
    """DAQUAR with attention over cells, words or both taught. No paper's number.

    Photos are seen by a small CNN of the network's own, so few answers need more than the words.
    """
    return SsaRecipe(
        "ssa-daquar",
        "DAQUAR, attention taught by its own best look",
        Questions(Files.DAQUAR, size=112),
        AskModel(Answerer.SHOW_ASK_ATTEND, width=0.25, dropout=0.3),
        train=Train(epochs=20, batch=64, rate=1e-3, decay=1e-3, save_every=1000),
    )


def ssa_yelp() -> SsaRecipe:
    """Reviews, with what people marked to compare with. No paper's number.

    It stands in for VQA-HAT: attention of people, on texts.
    """
    return SsaRecipe(
        "ssa-yelp",
        "Yelp-HAT, attention over words held against people's",
        Texts(Files.YELP),
        TextModel(hops=1, penalty=0.0),
        Surrogate(words=(1, 2), texts=500),
        train=Train(epochs=12, batch=32, rate=2e-3, decay=1e-2, save_every=1000),
    )


def ssa_vqa() -> SsaRecipe:
    """VQA v1 with Show, Ask, Attend and Answer, and people's attention of VQA-HAT.

    The paper (Self Supervision for Attention Networks, Table 4) reaches 61.76 % with the
    adversarial loss over the image, and 58.08 % without any. It needs the official files, and a
    cache of features: 2048 x 14 x 14 of a ResNet-152 at 448 x 448 pixels (`data.features`).
    """
    return SsaRecipe(
        "ssa-vqa",
        "VQA v1, attention taught by its own best look and held against people's",
        Questions(Files.VQA, size=448, answers=3000),
        AskModel(Answerer.SHOW_ASK_ATTEND, dropout=0.5),
        Surrogate(scale=6),
        train=Train(epochs=50, batch=128, rate=1e-3, decay=0.0, save_every=5000),
    )


def ssa_scenes() -> SsaRecipe:
    """Questions about scenes, where the deciding things are known. No paper's number."""
    return SsaRecipe(
        "ssa-scenes",
        "questions about scenes, attention taught by its own best look and held against the truth",
        Scenes(),
        AskModel(),
        Surrogate(search=Search.REFINE),
        train=Train(epochs=10, batch=32, rate=4e-3, decay=1e-3, save_every=1000),
    )
