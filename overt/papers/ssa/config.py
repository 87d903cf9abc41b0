"""Self Supervision for Attention Networks: recipes, targets, losses and placebos.

Patro, Kasturi, Jain and Namboodiri, WACV 2021. A network is trained. For every training sample it
is then run with parts of the input removed, to find the masked input on which it is most confident
in the label. Its attention there (the surrogate) is the target of a second training, from scratch
and of the same length.

Controls measure what a target contributes: `shuffled` and the other placebos have the same cost and
no content, `none` is the first training alone, `truth` is the ground truth, which no search has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from overt.experiments.recipe import (
    NO_PUBLISHED_VALUES,
    GeneratedScenes,
    PublishedValue,
    TrainConfig,
    check_data_name,
)
from overt.papers.ssa.published import figures


class SsaDataset(StrEnum):
    """The datasets of the paper, and replacements for those that are not available."""

    TREC = "trec6"
    CIFAR10 = "cifar10"
    EASY_VQA = "easyvqa"
    DAQUAR = "daquar"
    YELP = "yelp_hat"
    VQA = "vqa_hat"


class SsaTarget(Enum):
    """The attention target.

    `surrogate` is the paper's. Its placebos: `shuffled` among all samples, `shuffled-in-class`,
    `scattered` (the same weights on other keys), `random` maps, the `uniform` map. `own` is the
    attention of the first network with nothing removed, `gradcam` the Grad-CAM of its answer,
    `truth` the ground truth of the dataset.
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


class SsaLoss(Enum):
    """The distance between attention and target: eq. 3 to 6 of the paper, and others."""

    MSE = "mse"
    CORAL = "coral"
    MMD = "mmd"
    MMD_LINEAR = "mmd-linear"
    ADVERSARIAL = "adversarial"
    KL = "kl"
    CROSS_ENTROPY = "cross-entropy"
    EMD = "emd"


class SsaWeighting(Enum):
    """What `weight` multiplies: the scale measured on the first batches, or 1."""

    FOUND = "found"
    PLAIN = "plain"


class SsaSpan(Enum):
    """Which attention is supervised, if a network has two."""

    IMAGE = "image"
    QUESTION = "question"
    BOTH = "both"


class SsaDiscriminatorInput(Enum):
    """What a discriminator gets besides a map.

    `mean` is the mean of the sample's features, `attended` also the features weighted by the map.
    With `nothing` it only sees maps, as in the code published for the paper's predecessor: then it
    only learns how targets are distributed.
    """

    NOTHING = "nothing"
    MEAN = "mean"
    ATTENDED = "attended"


class SsaStart(Enum):
    """The initial weights of the second training."""

    SCRATCH = "scratch"
    BASELINE = "baseline"


class SsaSearch(Enum):
    """How masks are tried: `all` of them, `refine` one flip at a time, or weighted means."""

    ALL = "all"
    REFINE = "refine"
    MEAN_MAP = "mean-map"
    MEAN_MASK = "mean-mask"


@dataclass(frozen=True)
class SsaTexts:
    """Questions by type, or reviews; `limit` caps the items of every split."""

    name: SsaDataset
    limit: int | None = None


@dataclass(frozen=True)
class SsaImages:
    """Images to classify; `limit` caps the images of every split.

    `vary` crops and flips training images, and moves the target of each with it. Targets are always
    searched for on the whole images.
    """

    name: SsaDataset
    limit: int | None = None
    vary: bool = False


@dataclass(frozen=True)
class SsaQuestions:
    """Questions about images; `limit` caps the questions of every split.

    `size` is the side to which photos are resized; `features` the folder of a feature cache, used
    instead of photos; `answers` the number of answer classes, if not all.
    """

    name: SsaDataset
    limit: int | None = None
    size: int = field(default=224, metadata={"low": 16, "high": 1024})
    features: str | None = None
    answers: int | None = field(default=None, metadata={"low": 1})


@dataclass(frozen=True)
class SsaScenes(GeneratedScenes):
    """Questions about scenes whose deciding objects are known; `world` is the seed of the dataset.

    `train`, `val` and `test` are the numbers of scenes per split, with four questions per scene;
    `limit` caps all three. `size` is the side of an image in pixels.
    """

    train: int = 12000
    test: int = 1008


@dataclass(frozen=True)
class SsaShapes(GeneratedScenes):
    """Scenes classified by the shape of their largest object; `world` is the seed of the dataset.

    `train`, `val` and `test` are the numbers of scenes per split, `limit` caps all three, and
    `size` is the side of an image in pixels.
    """

    train: int = 12000
    val: int = 500
    test: int = 1000
    size: int = field(default=32, metadata={"low": 16, "high": 256})


class SsaTextNetwork(Enum):
    """The text classifier: a `small` one, or that of Lin et al. in its full `structured` size."""

    SMALL = "small"
    STRUCTURED = "structured"


@dataclass(frozen=True)
class SsaTextModel:
    """A BiLSTM with attention over the words.

    `width` scales the features of every layer; `dropout` is a rate from 0 to 1. `hops` is the
    number of attention maps over the words, and `penalty` the weight of a loss on maps that are
    alike.
    """

    net: SsaTextNetwork = SsaTextNetwork.SMALL
    width: float = 1.0
    dropout: float = 0.4
    hops: int = 4
    penalty: float = 0.01


@dataclass(frozen=True)
class SsaPretrained:
    """A pretrained encoder that is fine-tuned as a whole.

    `folder` contains it in Hugging Face format; by default the installed MiniLM is used. The width
    of its layers is fixed: `width` is the share of its layers that is kept, from the bottom.
    """

    folder: str | None = None
    width: float = field(default=1.0, metadata={"high": 1})


@dataclass(frozen=True)
class SsaImageModel:
    """A CNN to 32 x 8 x 8 features with attention over the 64 cells.

    `width` scales the features of every layer; `dropout` is the rate before the classes, from 0 to
    1.
    """

    width: float = 1.0
    dropout: float = 0.1


class SsaVqaNetwork(Enum):
    """The VQA network: a `small` one of ours, or that of Kazemi and Elqursh."""

    SMALL = "small"
    SHOW_ASK_ATTEND = "show-ask-attend"


@dataclass(frozen=True)
class SsaVqaModel:
    """A VQA network that attends to an image and to the words of a question.

    `width` scales the features of every layer; `dropout` is a rate from 0 to 1. `glimpses` is the
    number of attention heads over the image.
    """

    net: SsaVqaNetwork = SsaVqaNetwork.SMALL
    width: float = 1.0
    glimpses: int = 2
    dropout: float = 0.0


@dataclass(frozen=True)
class SsaSurrogate:
    """How surrogate targets are searched for.

    `count` masks per image, with cells of `scale` features a side or the given `grid`, at random
    offsets with `shift`; texts without one or several of `words` at a time, at most `texts`
    choices. `refine` runs the network `probes` times.
    """

    search: SsaSearch = SsaSearch.ALL
    count: int = field(default=500, metadata={"low": 1})
    scale: int = field(default=2, metadata={"low": 1})
    grid: tuple[int, int] | None = field(default=None, metadata={"low": 1})
    shift: bool = False
    words: tuple[int, ...] = field(default=(2,), metadata={"low": 1})
    texts: int = field(default=1000, metadata={"low": 1})
    probes: int = field(default=50, metadata={"low": 1})


@dataclass(frozen=True)
class SsaSupervise:
    """The attention target, the loss, and its weight.

    `weight` multiplies the measured scale (gamma and beta of section 3.3), or is the weight itself.
    `rival` is the learning rate of the discriminator, `sees` its inputs.
    """

    target: SsaTarget = SsaTarget.SURROGATE
    loss: SsaLoss = SsaLoss.ADVERSARIAL
    over: SsaSpan = SsaSpan.IMAGE
    counts: SsaWeighting = SsaWeighting.FOUND
    weight: float = 1.0
    start: SsaStart = SsaStart.SCRATCH
    rival: float = field(default=1e-3, metadata={"low": 0})
    sees: SsaDiscriminatorInput = SsaDiscriminatorInput.MEAN


ONCE = TrainConfig()
# Placebos are made from the surrogates, so that they cost the same search.
SEARCHED = frozenset(
    {
        SsaTarget.SURROGATE,
        SsaTarget.SHUFFLED,
        SsaTarget.IN_CLASS,
        SsaTarget.SCATTERED,
        SsaTarget.RANDOM,
        SsaTarget.UNIFORM,
        SsaTarget.OWN,
    }
)


@dataclass(frozen=True)
class SsaRecipe:
    """A task of the paper: a first training, a search for targets, and a second training."""

    name: str
    about: str
    data: SsaTexts | SsaImages | SsaQuestions | SsaScenes | SsaShapes
    model: SsaTextModel | SsaPretrained | SsaImageModel | SsaVqaModel
    surrogate: SsaSurrogate = SsaSurrogate()
    supervise: SsaSupervise = SsaSupervise()
    train: TrainConfig = ONCE

    def __post_init__(self) -> None:
        check_data_name(self.name, self.data, NAMES)
        if self.supervise.over is not SsaSpan.IMAGE and not isinstance(self.model, SsaVqaModel):
            raise ValueError("supervise.over needs a network with attention over image and words")

    @property
    def supervised(self) -> bool:
        """Return whether there is a second training."""
        start = self.supervise.start
        return self.supervise.target is not SsaTarget.NONE or start is SsaStart.BASELINE

    @property
    def needs_search(self) -> bool:
        """Return whether targets come from a search, or are placebos of such."""
        return self.supervise.target in SEARCHED

    @property
    def paper(self) -> Mapping[str, PublishedValue]:
        """Return the published numbers for this row."""
        name = getattr(self.data, "name", None)
        weighted = self.surrogate.search in (SsaSearch.MEAN_MAP, SsaSearch.MEAN_MASK)
        if name is None or weighted or isinstance(self.model, SsaPretrained):
            return NO_PUBLISHED_VALUES
        plan = self.supervise
        # a network trained for longer is not the paper's baseline
        alone = "" if self.supervised else "none"
        row = {SsaTarget.NONE: alone, SsaTarget.SURROGATE: plan.loss.value}.get(plan.target, "")
        return figures(str(name), row, plan.over.value)


NAMES = {
    "ssa-trec": SsaDataset.TREC,
    "ssa-minilm": SsaDataset.TREC,
    "ssa-cifar10": SsaDataset.CIFAR10,
    "ssa-easyvqa": SsaDataset.EASY_VQA,
    "ssa-daquar": SsaDataset.DAQUAR,
    "ssa-yelp": SsaDataset.YELP,
    "ssa-vqa": SsaDataset.VQA,
}


def ssa_trec() -> SsaRecipe:
    """TREC-6 with attention supervised by surrogates, searched by removing pairs of words.

    The paper (Self Supervision for Attention Networks, Table 1) reports 84.91 % with the
    adversarial loss, and 81.20 % without supervision; `overt table ssa-1` has every row. Our
    classifier is a twentieth of the paper's size: `model.net=structured model.hops=30` is that one.
    """
    return SsaRecipe(
        "ssa-trec",
        "TREC-6, attention over words supervised by surrogates",
        SsaTexts(SsaDataset.TREC),
        SsaTextModel(),
        train=TrainConfig(epochs=10, batch=64, rate=3e-3, decay=1e-2, save_every=1000),
    )


def ssa_minilm() -> SsaRecipe:
    """TREC-6 with a pretrained encoder, MiniLM, fine-tuned as a whole. No published number."""
    return SsaRecipe(
        "ssa-minilm",
        "TREC-6, class token attention of a fine-tuned MiniLM",
        SsaTexts(SsaDataset.TREC),
        SsaPretrained(),
        SsaSurrogate(search=SsaSearch.REFINE, probes=16),
        train=TrainConfig(epochs=3, batch=32, rate=1e-4, decay=1e-2, save_every=1000),
    )


def ssa_cifar10() -> SsaRecipe:
    """CIFAR-10 with attention over 8 x 8 cells supervised by surrogates from 500 grid masks.

    The paper (Self Supervision for Attention Networks, Table 2) reports 71.12 % with the
    adversarial loss, and 69.59 % without supervision; `overt table ssa-2` has every row.
    """
    return SsaRecipe(
        "ssa-cifar10",
        "CIFAR-10, attention over cells supervised by surrogates",
        SsaImages(SsaDataset.CIFAR10),
        SsaImageModel(),
        train=TrainConfig(epochs=12, batch=256, rate=4e-3, decay=1e-3, save_every=1000),
    )


def ssa_easyvqa() -> SsaRecipe:
    """easy-VQA with supervised attention over cells, words or both. No published number."""
    return SsaRecipe(
        "ssa-easyvqa",
        "easy-VQA, attention supervised by surrogates",
        SsaQuestions(SsaDataset.EASY_VQA, size=64),
        SsaVqaModel(dropout=0.1),
        SsaSurrogate(search=SsaSearch.REFINE),
        train=TrainConfig(epochs=12, batch=256, rate=4e-3, decay=1e-3, save_every=1000),
    )


def ssa_daquar() -> SsaRecipe:
    """DAQUAR with supervised attention over cells, words or both. No published number.

    Photos are encoded by a small CNN trained from scratch, so few answers need more than the words.
    """
    return SsaRecipe(
        "ssa-daquar",
        "DAQUAR, attention supervised by surrogates",
        SsaQuestions(SsaDataset.DAQUAR, size=112),
        SsaVqaModel(SsaVqaNetwork.SHOW_ASK_ATTEND, width=0.25, dropout=0.3),
        train=TrainConfig(epochs=20, batch=64, rate=1e-3, decay=1e-3, save_every=1000),
    )


def ssa_yelp() -> SsaRecipe:
    """Reviews, compared with human attention. No published number.

    It stands in for VQA-HAT: human attention, on texts.
    """
    return SsaRecipe(
        "ssa-yelp",
        "Yelp-HAT, attention over words compared with human attention",
        SsaTexts(SsaDataset.YELP),
        SsaTextModel(hops=1, penalty=0.0),
        SsaSurrogate(words=(1, 2), texts=500),
        train=TrainConfig(epochs=12, batch=32, rate=2e-3, decay=1e-2, save_every=1000),
    )


def ssa_vqa() -> SsaRecipe:
    """VQA v1 with Show, Ask, Attend and Answer, and the human attention of VQA-HAT.

    The paper (Self Supervision for Attention Networks, Table 4) reports 61.76 % with the
    adversarial loss over the image, and 58.08 % without supervision. It needs the official files,
    and a feature cache: 2048 x 14 x 14 of a ResNet-152 at 448 x 448 pixels (`data.features`).
    """
    return SsaRecipe(
        "ssa-vqa",
        "VQA v1, attention supervised by surrogates and compared with human attention",
        SsaQuestions(SsaDataset.VQA, size=448, answers=3000),
        SsaVqaModel(SsaVqaNetwork.SHOW_ASK_ATTEND, dropout=0.5),
        SsaSurrogate(scale=6),
        train=TrainConfig(epochs=50, batch=128, rate=1e-3, decay=0.0, save_every=5000),
    )


def ssa_scenes() -> SsaRecipe:
    """Questions about scenes, where the deciding objects are known. No published number."""
    return SsaRecipe(
        "ssa-scenes",
        "questions about scenes, attention supervised by surrogates, compared with the truth",
        SsaScenes(),
        SsaVqaModel(),
        SsaSurrogate(search=SsaSearch.REFINE),
        train=TrainConfig(epochs=10, batch=32, rate=4e-3, decay=1e-3, save_every=1000),
    )


def ssa_shapes() -> SsaRecipe:
    """The shape of the largest object of a scene, whose pixels are known. No published number.

    The network is that for CIFAR-10; it learns in minutes on one core.
    """
    return SsaRecipe(
        "ssa-shapes",
        "shape of the largest object of a scene, attention supervised by surrogates",
        SsaShapes(),
        SsaImageModel(),
        SsaSurrogate(search=SsaSearch.REFINE, scale=1),
        train=TrainConfig(epochs=10, batch=64, rate=3e-3, decay=1e-3, save_every=1000),
    )


RECIPES = (
    *(ssa_trec, ssa_minilm, ssa_cifar10, ssa_easyvqa),
    *(ssa_daquar, ssa_yelp, ssa_vqa, ssa_scenes, ssa_shapes),
)
